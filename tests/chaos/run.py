"""Rounds of work with a kill in each, and everything that must hold after it."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvmanager.clients.admin import AdminClient
from kvmanager.errors import KVError
from tests.chaos.content import texts_of
from tests.chaos.guest import GROUP_TABLE
from tests.chaos.schedule import GUEST, SIDES, SOURCE, TARGET, Kill
from tests.chaos.sides import Guest, Side, Stuck
from tests.integration.nodes_support import SPAN

TURNS_MOST: Final = 25
"""Turns of work until a point counts as not passed."""
REST_EVERY: Final = 20
"""Kills between two times that all clients leave and nothing may be left."""
VERIFY_TRIES: Final = 3
"""A mover that died may take the copies with it that a prompt waits for: the engine asks again."""
NEW_PROMPTS: Final = 0.15
"""Share of prompts that nobody asks for again: they make room scarce."""

EXPECTED: Final = {
    "PeerUnreachable",
    "TransferFailed",
    "TransferTimeout",
    "UnknownLease",
    "LeaseExpired",
    "NotReady",
    "StalePage",  # a source whose mover was restarted: what was read of it is dropped
}
"""Errors that an engine may get because somebody died: a hand-off that did not end well, a node that is not back."""


@dataclass
class Report:
    """What a run did and found. `by_point`: deaths of each kind; `missed`: kills whose point was not passed."""

    seed: int
    kills: int = 0
    missed: list[str] = field(default_factory=list)
    committed_pages_checked: int = 0
    prompt_tokens_found: int = 0
    leased_tokens_found: int = 0
    wrong_bytes: int = 0
    leaks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    by_point: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    cold_starts: int = 0
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return not (self.wrong_bytes or self.leaks or self.failures)

    def check(self) -> None:
        """Fails with what was wrong, and where kills found next to nothing committed that could have been."""
        assert self.passed, "\n".join([*self.leaks, *self.failures])
        print(self.summary())
        assert self.committed_pages_checked > 20 * self.kills

    def summary(self) -> dict[str, Any]:
        """For the last line of output."""
        return {
            "seed": self.seed, "kills": self.kills, "committed_pages_checked": self.committed_pages_checked,
            "wrong_bytes": self.wrong_bytes, "leaks": len(self.leaks), "failures": len(self.failures),
            "missed": len(self.missed), "turns": self.turns, "prompt_tokens_found": self.prompt_tokens_found,
            "leased_tokens_found": self.leased_tokens_found, "cold_starts": self.cold_starts,
            "by_point": dict(sorted(self.by_point.items())),
            "refused": dict(self.refused), "seconds": round(self.seconds, 1),
        }  # fmt: skip


def run_kills(
    kills: Iterable[Kill], seed: int, say: Callable[[str], object] = print, directory: Path | None = None
) -> Report:
    """Carries out kills on two nodes that live through all of them. What is wrong is in the report."""
    return run_rounds(kills, seed, lambda place, report: Chaos(place, report, say), directory)


def run_rounds(
    kills: Iterable[Kill], seed: int, make: Callable[[Path, Report], Chaos], directory: Path | None = None
) -> Report:
    """The same with the work that `make` says."""
    report = Report(seed)
    began = time.monotonic()
    shm_before = set(Path("/dev/shm").iterdir())
    with tempfile.TemporaryDirectory(prefix="kvm-chaos-") as made:
        place = directory or Path(made)
        chaos = make(place, report)
        try:
            chaos.rest()
            for number, kill in enumerate(kills, 1):
                chaos.round(number, kill)
                if number % REST_EVERY == 0:
                    chaos.rest()
            chaos.rest()
        except Stuck as stuck:
            report.failures.append(f"stuck: {stuck}")
        finally:
            chaos.close()
        left = _processes(str(place / SOURCE), str(place / TARGET))
        report.leaks += [f"process {pid} is left: {line}" for pid, line in left]
    report.leaks += [f"{path} is left" for path in _unused(set(Path("/dev/shm").iterdir()) - shm_before)]
    report.seconds = time.monotonic() - began
    return report


class Chaos:
    """Two sides and the work between them."""

    def __init__(self, directory: Path, report: Report, say: Callable[[str], object]) -> None:
        self._report, self._say = report, say
        self._draw = random.Random(f"work/{report.seed}")
        self._texts = len(texts_of(report.seed, SPAN))
        self.sides = {name: Side(directory, name, report.seed, self.engine_module(), GROUP_TABLE) for name in SIDES}
        self.guest = Guest(self.sides[SOURCE], self.guest_module())
        self._handed: tuple[int, str] | None = None  # prompt and ticket for the target's next turn
        self._new = 0
        self._where = "before the first kill"
        self._cold_allowed = False

    def engine_module(self) -> str:
        """Whose process serves."""
        return "tests.chaos.engine"

    def guest_module(self) -> str:
        """The same of the engine with memory of its own; "": there is none."""
        return "tests.chaos.guest"

    # ------------------------------------------------------------------------------------- work

    def _turn(self) -> None:
        """One prompt through the source, and the one before it through the target."""
        source, target = self.sides[SOURCE], self.sides[TARGET]
        handed, self._handed = self._handed, None
        for side in (source, target):
            if side.engine is None:
                side.mend()
        text = self._draw.randrange(self._texts)
        if self._draw.random() < NEW_PROMPTS:
            self._new += 1
            text = -self._new
        assert source.engine is not None
        assert target.engine is not None
        guest = self._tell_guest()
        source.engine.tell(do="prefill", text=text, export=text >= 0)
        if handed is not None:
            target.engine.tell(do="decode", text=handed[0], ticket=handed[1])
        answer = self._judge(source, source.hear())
        if answer is not None and answer["ticket"]:
            self._handed = (text, answer["ticket"])
        if handed is not None:
            self._judge(target, target.hear())
        if guest:
            self._judge(self.guest, self.guest.hear())
        self._report.turns += 1

    def _tell_guest(self) -> bool:
        """A prompt of its own for the guest, beside everything else."""
        if not self.guest.engine_module:
            return False
        self.guest.start_engine()
        assert self.guest.engine is not None
        end = self._draw.choice(("all", "all", "half", "none"))
        self.guest.engine.tell(do="lease", text=self._draw.randrange(self._texts), end=end)
        return True

    def _judge(self, side: Side | Guest, answer: dict[str, Any] | None) -> Any:
        """The result; None for an error, after which the engine is ready again or gone."""
        if answer is None:
            return None
        self._report.committed_pages_checked += answer["pages"]
        if "ok" in answer:
            return answer["ok"]
        story = f"{self._where}: {side.name}: {answer['error']}"
        name = answer["error"].split(":")[0] if answer["kind"] == "refused" else answer["kind"]
        self._report.refused[name] += 1
        if name == "wrong":
            self._report.wrong_bytes += answer["wrong"]
            self._report.failures.append(story)
        elif name not in EXPECTED and not (name == "stale" and self._cold_allowed):
            self._report.failures.append(story)
        else:
            self._say(f"  {story}")
        if side.engine is not None:
            again = side.ask(do="give_up")
            if again is not None and "ok" not in again:
                side.lose_engine()
        return None

    # ------------------------------------------------------------------------------------ kills

    def round(self, number: int, kill: Kill) -> None:
        """Work until the kill has come, everything back, and every byte looked at."""
        self._where = f"kill {number} ({kill})"
        self._cold_allowed = kill.costs_the_cache
        began = time.monotonic()
        side = self.sides[kill.side]
        if self._carry_out(side, kill):
            self._report.kills += 1
            self._report.by_point[kill.name] += 1
        else:
            self._report.missed.append(str(kill))
        self._turn()
        for each in self.sides.values():
            self._look_at(each, kill)
        if self.guest.engine_module:
            self._look_at_the_guest(kill)
        self._say(f"{self._where}: {time.monotonic() - began:.1f} s" + ("" if side.order.over else ", not passed"))
        side.order.withdraw()

    def _carry_out(self, side: Side, kill: Kill) -> bool:
        if kill.point is None:
            victim = self.guest if kill.role == GUEST else side
            killer = threading.Timer(kill.delay_s, _kill_role, (victim, kill.role))
            killer.start()
            while killer.is_alive():
                self._turn()
            killer.join()
            return True
        side.order.give(kill.point, kill.passage, kill.linger_ms)
        for turn in range(TURNS_MOST):
            if turn % 8 == 0:
                self._do_beside(side, kill.needs)
            self._turn()
            if side.order.over:
                return True
        side.order.withdraw()
        return False

    def _do_beside(self, side: Side, needs: str) -> None:
        """What makes the point be passed when work alone does not."""
        match needs:
            case "mover dies" | "daemon dies":
                _kill_role(side, needs.split()[0])
                time.sleep(0.2)
            case "spare stands in":
                side.await_spare()
                _kill_role(side, "daemon")
                time.sleep(0.2)
            case "engine starts":
                if side.engine is not None:
                    side.ask(do="leave")
                side.lose_engine()
                side.start_engine()
            case "upgrade":
                with suppress(KVError), AdminClient(side.node.runtime_dir) as admin:
                    admin.upgrade()

    def _look_at(self, side: Side, kill: Kill) -> None:
        """Both nodes serve, the audit holds, and what was found before is found again, byte for byte."""
        side.mend()
        cold = self._started_cold(side, kill)
        self._report.failures += [f"{self._where}: {wrong}" for wrong in side.ledger()]
        result = self._verified(side, side.mend, "opened")
        if result is None:
            return
        cold = self._started_cold(side, kill) or cold  # it may have been killed again meanwhile
        forgotten = side.view.counters()["eviction"]
        if not cold and forgotten == side.forgotten:
            self._miss(side, result["found"])
        side.found, side.forgotten = result["found"], forgotten
        self._report.prompt_tokens_found += sum(side.found)

    def _verified(self, party: Side | Guest, begin: Callable[[], object], verb: str) -> Any:
        """What a party finds of all prompts, once `begin` has it ready; None, and a failure, where it never answers."""
        for _ in range(VERIFY_TRIES):
            begin()
            result = self._judge(party, party.ask(do="verify"))
            if result is not None:
                return result
        self._report.failures.append(f"{self._where}: {party.name}: the prompts can't be {verb} again")
        return None

    def _miss(self, party: Side | Guest, found: list[int]) -> None:
        """Notes prompts of which less is found than before, where something was."""
        pairs = zip(party.found, found, strict=True) if party.found else ()
        lost = [f"prompt {n}: {had} -> {has} tokens" for n, (had, has) in enumerate(pairs) if has < had]
        if lost:
            self._report.failures.append(f"{self._where}: {party.name} lost what was committed: {lost}")

    def _look_at_the_guest(self, kill: Kill) -> None:
        """What it had stored is found again, byte for byte; behind `_look_at`, which has said whether all went cold."""
        result = self._verified(self.guest, self.guest.start_engine, "read")
        if result is None:
            return
        forgotten = self.sides[SOURCE].view.counters()["eviction"]
        may_be_lost = forgotten != self.guest.forgotten or (kill.costs_the_cache and kill.side == SOURCE)
        if not may_be_lost:
            self._miss(self.guest, result["found"])
        self.guest.found, self.guest.forgotten = result["found"], forgotten
        self._report.leased_tokens_found += sum(self.guest.found)

    def _started_cold(self, side: Side, kill: Kill) -> bool:
        """Whether the node's log says so since the last look; what it must not say is a failure."""
        log = side.new_log()
        cold = "cold start" in log
        self._report.cold_starts += cold
        if cold and not (kill.costs_the_cache and kill.side == side.name):
            self._report.failures.append(f"{self._where}: {side.name} started cold:\n{side.node.log_tail()}")
        for sign in ("Traceback", "InvariantViolation", "giving up"):
            if sign in log:
                self._report.failures.append(f"{self._where}: {side.name} logged {sign!r}:\n{_around(log, sign)}")
        return cold

    # ------------------------------------------------------------------------------------- rest

    def rest(self) -> None:
        """All clients leave: nothing may be held, in pools or descriptors."""
        self._handed = None
        if self.guest.engine is not None:
            self._judge(self.guest, self.guest.ask(do="leave"))
            self.guest.lose_engine()
        for side in self.sides.values():
            side.mend()
            self._judge(side, side.ask(do="leave"))
            side.lose_engine()
        for side in self.sides.values():
            self._report.leaks += [f"after {self._where}: {wrong}" for wrong in side.leftovers()]
            side.mend()

    def close(self) -> None:
        """Stops both nodes."""
        self.guest.lose_engine()
        for side in self.sides.values():
            self._report.leaks += side.close()


def _kill_role(side: Side | Guest, role: str) -> None:
    if isinstance(side, Guest):
        pid = side.engine.pid if side.engine is not None else 0
    else:
        if role == "spare":
            side.await_spare()
        pid = side.pid_of(role)
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _around(log: str, sign: str) -> str:
    at = log.index(sign)
    return log[max(0, at - 500) : at + 3000]


def _processes(*words: str) -> list[tuple[int, str]]:
    """Processes whose command names one of the words, this one aside."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if any(word in line for word in words):
                    found.append((int(entry.name), line))
    return found


def _unused(paths: set[Path]) -> set[Path]:
    """Those that no living process has open or mapped."""
    used: set[str] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                maps = (entry / "maps").read_text(errors="replace").splitlines()
                used |= {line.split(maxsplit=5)[5] for line in maps if "/dev/shm" in line}
                used |= {os.readlink(fd) for fd in (entry / "fd").iterdir()}
    return {path for path in paths if str(path) not in used and path.exists()}
