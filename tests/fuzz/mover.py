"""Noise on a mover's socket: bytes, frames with descriptors, and commands filled at random or nearly right.

The mover under fire is one of its own, not the node's: whoever has the node's uid and a newer boot id is served, so
commands would only put the daemon off its link. The node's mover gets what no daemon would send (`Attackers`).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.errors import KVError
from kvmanager.framing import receive_frame
from kvmanager.planwire import plan_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.units import KIB
from tests.fuzz import noise
from tests.fuzz.attackers import PATIENCE_S, Broke
from tests.integration import mover_process
from tests.plans import strided

REGIONS: Final = range(1, 5)
REGION_BYTES: Final = 64 * KIB
BOOTS_END: Final = 1 << 40
"""Boot ids of blows are below; who looks in the end comes with a newer one."""
FDS_SPARE: Final = 24
"""Descriptors that NIXL and its libraries may keep once an agent runs."""
_WORDS: Final = ("offload", "onboard", "check", "place", "a-0000000000000001", "cpu", "")


class MoverAttackers:
    """Attacks the mover that listens at `path`; `blow` is one connection with some frames."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._boot_id = 1
        self._next_id = 1
        self.regions_given = len(REGIONS)
        self._regions = {region_id: mover_process.create_memfd("fuzz", REGION_BYTES) for region_id in REGIONS}

    def blow(self, dice: random.Random) -> str:
        """What came back, in words. Raises Broke when nobody answers, or with what is no event."""
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(PATIENCE_S)
            channel.connect(os.fspath(self._path))
            kind = dice.choice(("bytes", "command", "command", "near", "near", "near"))
            for _ in range(dice.randrange(1, 6)):
                if not self._send(channel, dice, kind):
                    break
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_WR)
            return f"mover {kind}: {self._answers(channel)}"

    def _send(self, channel: socket.socket, dice: random.Random, kind: str) -> bool:
        """Writes once; False when the mover has closed."""
        if kind == "bytes":
            data, count = noise.frame(dice)
            fds = [os.memfd_create("fuzz") for _ in range(count)]
        else:
            message, fds = self._near(dice) if kind == "near" else (self._anything(dice), [])
            payload = message.SerializeToString()
            if dice.random() < 0.15 and not fds:
                payload = _of_no_later_boot(noise.damaged(dice, payload), message.boot_id)
            announced = len(fds) if dice.random() < 0.95 else dice.randrange(70)
            data = struct.pack("<II", len(payload), announced) + payload
            if dice.random() < 0.05:
                data = data[: dice.randrange(len(data))]
        try:
            socket.send_fds(channel, [data], fds) if fds else channel.sendall(data)
        except OSError:
            return False
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _boot(self, dice: random.Random) -> int:
        """The newest, a newer one, or one that is over."""
        self._boot_id += dice.random() < 0.05
        return dice.choice((0, 1, self._boot_id)) if dice.random() < 0.1 else self._boot_id

    def _anything(self, dice: random.Random) -> pb.MoverCommand:
        """A command whose fields are filled at random."""
        message = pb.MoverCommand()
        noise.fill(dice, message, _WORDS)
        message.boot_id = self._boot(dice)
        return message

    def _near(self, dice: random.Random) -> tuple[pb.MoverCommand, list[int]]:
        """A command that a daemon could send, mostly: regions that are there, plans and pulls of their bytes."""
        message = pb.MoverCommand(boot_id=self._boot(dice))
        kind = dice.randrange(6)
        if kind == 0:
            return message, self._region(dice, message.add_region)
        if kind <= 3:
            self._next_id += dice.random() < 0.95
            plan = plan_to_proto(_plan(dice, self._next_id))
            if dice.random() < 0.4:
                noise.fill(dice, dice.choice((plan, plan.copies[0], plan.copies[0].boxes[0])), _WORDS)
                plan.plan_id = self._next_id
            if dice.random() < 0.2:
                sections = pb.PageSections()
                noise.fill(dice, sections, _WORDS)
                plan.sums.CopyFrom(sections)
            message.submit.CopyFrom(plan)
        elif kind == 4:
            self._next_id += 1
            noise.fill(dice, message.pull, _WORDS)
            message.pull.pull_id, message.pull.agent_name = self._next_id, "a-0000000000000001"
            message.pull.peer_incarnation = 1
            message.pull.placement.CopyFrom(plan_to_proto(_plan(dice, self._next_id)))
        else:
            commands: tuple[dict[str, Any], ...] = (
                {"ping": 1}, {"cancel": self._next_id}, {"list_outstanding": pb.ListOutstanding()},
                {"hello": pb.Hello()}, {"start_agent": pb.StartAgent()},
            )  # fmt: skip
            message.MergeFrom(pb.MoverCommand(**dice.choice(commands)))
        return message, []

    def _region(self, dice: random.Random, message: pb.AddRegion) -> list[int]:
        """A region as the daemon gives it, again and again, or one that is none; its descriptors.

        Never another one in the place of one that is there: a mover stops then, as it should.
        """
        if dice.random() < 0.6:
            region_id = dice.choice(REGIONS)
            message.region.CopyFrom(pb.Region(region_id=region_id, kind=pb.HOST, size_bytes=REGION_BYTES))
            return [os.dup(self._regions[region_id])]
        self._next_id += 1
        self.regions_given += 1
        size = REGION_BYTES if dice.random() < 0.5 else dice.choice(noise.EDGES)
        kind = dice.choice(list(pb.RegionKind.values()))
        message.region.CopyFrom(pb.Region(region_id=(1000 + self._next_id) % (1 << 31), kind=kind, size_bytes=size))
        return [_memory(dice) for _ in range(dice.choice((1, 1, 1, 1, 0, 2)))]

    def close(self) -> None:
        """Closes its descriptors."""
        for fd in self._regions.values():
            os.close(fd)

    def _answers(self, channel: socket.socket) -> str:
        """Every event until the mover closes; which kinds there were."""
        kinds = set()
        try:
            while (frame := receive_frame(channel)) is not None:
                event = pb.MoverEvent.FromString(frame.payload)
                kinds.add(event.WhichOneof("what") or "nothing")
        except DecodeError as error:
            raise Broke(f"the mover answered what is no event: {error}") from error
        except KVError as error:
            if "timed out" in str(error):
                raise Broke(f"the mover left a half-closed connection open for {PATIENCE_S} s") from error
        return "+".join(sorted(kinds)) or "closed"


def _of_no_later_boot(payload: bytes, boot_id: int) -> bytes:
    """A damaged command; one that can still be read names the boot that it did, or no other would be heard any more."""
    with contextlib.suppress(DecodeError):
        message = pb.MoverCommand.FromString(payload)
        if message.boot_id > boot_id:
            message.boot_id = boot_id
            return message.SerializeToString()
    return payload


def _memory(dice: random.Random) -> int:
    """A descriptor: of memory as the daemon makes it, of memory that is not sealed, or of something else."""
    kind = dice.randrange(8)
    if kind == 0:
        return os.open("/dev/null", os.O_RDWR)
    if kind == 1:
        return os.memfd_create("unsealed")
    return mover_process.create_memfd("fuzz", REGION_BYTES)


def _plan(dice: random.Random, plan_id: int) -> CopyPlan:
    """Copies between two of the regions, which may not be there; most are within them."""
    row = dice.choice((1, 16, 4096))
    offsets = np.asarray(dice.sample(range(0, REGION_BYTES, 4096), dice.randrange(1, 5)), np.int64)
    if dice.random() < 0.1:
        offsets = offsets + dice.choice((REGION_BYTES, 1 << 40, -8192))
    copies = strided(dice.choice(REGIONS), dice.choice(REGIONS), offsets, offsets[::-1].copy(), (), (), (), row)
    return CopyPlan(plan_id, dice.choice(list(Purpose)), (copies,))


@contextlib.contextmanager
def under_fire(directory: Path, seed: int) -> Iterator[Fire]:
    """A mover of its own that is attacked; in the end it must be as good as new, and stop in order."""
    directory.mkdir(mode=0o700)
    with (directory / "log").open("wb") as log, mover_process.running(directory, stderr=log) as (process, path):
        fire = Fire(path, seed, process.pid, directory / "log")
        try:
            yield fire
            fire.check()
        finally:
            fire.close()
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=mover_process.WAIT_S)
        assert code == 0, f"the mover ended with {code}: {fire.log()}"


class Fire:
    """Blows on one mover, numbered."""

    def __init__(self, path: Path, seed: int, pid: int, log: Path) -> None:
        self._attackers = MoverAttackers(path)
        self._path, self._seed, self._pid, self._log = path, seed, pid, log
        self._first_fds, _ = _descriptors(pid)
        self.blows = 0

    def volley(self, count: int) -> Counter[str]:
        """`count` blows; what came back."""
        said: Counter[str] = Counter()
        for _ in range(count):
            dice = random.Random(f"{self._seed}/mover/{self.blows}")
            try:
                said[self._attackers.blow(dice)] += 1
            except (OSError, Broke) as error:
                raise AssertionError(f"seed {self._seed}, mover blow {self.blows}: {error}\n{self.log()}") from error
            self.blows += 1
        assert "Traceback" not in self.log(), self.log()
        return said

    def check(self) -> None:
        """It serves a daemon, moves the right bytes, and holds no descriptor of those who attacked it."""
        client = mover_process.Client(self._path, boot_id=BOOTS_END)
        try:
            source, target = client.add(901, 1 << 20, fill=7), client.add(902, 1 << 20)
            client.link.submit(mover_process.reversed_pieces(1 << 50, 901, 902, [0, 8192, 65536]))
            while (event := client.next_of("completion")).completion.plan_id != 1 << 50:
                pass
            assert event.completion.outcome == pb.Completion.DONE, event
            assert (target[8192 : 8192 + 4096] == source[0]).all()
        finally:
            client.close()
        held, of_regions = _descriptors(self._pid)
        assert held <= self._first_fds + FDS_SPARE, f"{held} descriptors, {self._first_fds} at first"
        given = self._attackers.regions_given + 2
        assert of_regions <= given, f"descriptors of {of_regions} regions, {given} were given"

    def close(self) -> None:
        """Those who attack leave."""
        self._attackers.close()

    def log(self) -> str:
        """The end of what it wrote."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-4000:]


def _descriptors(pid: int) -> tuple[int, int]:
    """(those of all else, those of memory): a mover keeps one of each region."""
    memory = others = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            is_memory = os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/memfd:")
            memory, others = memory + is_memory, others + (not is_memory)
    return others, memory
