"""A hand-off between two machines: network namespaces, a slow link between them, cut and joined on the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from test_mover_pulls import Source, Target

from kvmanager.errors import PeerUnreachable
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.units import SECOND_NS
from kvmanager.wire import error_from_proto
from tests.integration.mover_process import POISON, WAIT_S, running

PULL_BYTES = 24 * Source.LAYOUT.page_bytes
SECONDS = 3
"""That the bytes of a pull take on the link."""
TRIES = 5
"""On a machine that is so slow that the whole pull is over before the link is cut."""


@dataclass
class Link:
    """A namespace and a device for each machine."""

    names: tuple[str, str]
    devices: tuple[str, str]

    def inside(self, side: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.names[side])

    def _do(self, side: int, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.inside(side), *command], capture_output=True, text=True, check=False)

    def run(self, side: int, *command: str) -> None:
        done = self._do(side, *command)
        assert done.returncode == 0, (command, done.stderr)

    def slow_down(self) -> None:
        """Both ways: netem's delay where the kernel has it, and a rate."""
        rate = f"{8 * PULL_BYTES // SECONDS // 1000}kbit"
        for side, device in enumerate(self.devices):
            at = ("tc", "qdisc", "add", "dev", device, "root")
            if self._do(side, *at, "netem", "delay", "5ms", "rate", rate).returncode:
                print("no netem in this kernel: the link has a rate, and no delay of its own")
                self.run(side, *at, "tbf", "rate", rate, "burst", "64kb", "latency", "200ms")

    def cut(self) -> None:
        self.run(1, "ip", "link", "set", self.devices[1], "down")

    def join(self) -> None:
        self.run(1, "ip", "link", "set", self.devices[1], "up")


@contextmanager
def joined() -> Iterator[Link]:
    """Two namespaces with a veth pair. Skips, and says why, where they can't be made."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("no `ip` and `tc` here (Debian: iproute2)")
    tag = f"kv{os.getpid()}"
    link = Link((f"{tag}a", f"{tag}b"), (f"{tag}x", f"{tag}y"))
    made: list[str] = []
    try:
        for name in link.names:
            done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
            made.append(name)
        link.run(0, "ip", "link", "add", link.devices[0], "type", "veth", "peer", "name", link.devices[1],
                 "netns", link.names[1])  # fmt: skip
        for side, device in enumerate(link.devices):
            link.run(side, "ip", "addr", "add", f"10.213.7.{side + 1}/24", "dev", device)
            for each in (device, "lo"):
                link.run(side, "ip", "link", "set", each, "up")
        yield link
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


@contextmanager
def machines(tmp_path: Path) -> Iterator[tuple[Link, Source, Target]]:
    with joined() as link:
        options = [("--ucx-transports", "tcp,self", "--ucx-devices", device) for device in link.devices]
        with (
            running(tmp_path / "prefill", *options[0], inside=link.inside(0)) as (_, source_path),
            running(tmp_path / "decode", *options[1], inside=link.inside(1)) as (_, target_path),
        ):
            source, target = Source(source_path, seed=5), Target(target_path)
            yield link, source, target
            source.client.close()
            target.client.close()


def _poison(target: Target) -> None:
    for region in (50, 60, 70):
        target.client.memory[region][:] = POISON


def _wait_for_bytes(target: Target) -> None:
    """Until some bytes of a pull have arrived."""
    give_up = time.monotonic() + WAIT_S
    while (target.client.memory[50] == POISON).all():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def _stands_still(target: Target) -> None:
    """Until nothing has come for half a second."""
    give_up = time.monotonic() + WAIT_S
    while True:
        before = target.client.memory[50].copy()
        time.sleep(0.5)
        if np.array_equal(before, target.client.memory[50]):
            return
        assert time.monotonic() < give_up


def test_a_link_that_is_cut_in_the_middle_and_joined_again_loses_nothing(tmp_path: Path) -> None:
    with machines(tmp_path) as (link, source, target):
        places = target.places(0, seed=3)
        target.client.link.pull(source.pull(1, places, deadline_ns=60 * SECOND_NS))
        assert target.client.completions(1)[1].outcome == pb.Completion.DONE
        target.check(source, places)
        _poison(target)
        link.slow_down()
        for pull_id in range(2, 2 + TRIES):
            _poison(target)
            target.client.link.pull(source.pull(pull_id, places, spans_a_chunk=3, deadline_ns=120 * SECOND_NS))
            _wait_for_bytes(target)
            link.cut()
            _stands_still(target)
            in_the_middle = target.client.list() == [pull_id]
            link.join()
            done = (target.client.between or [target.client.completions(1)[pull_id]])[0]
            assert done.outcome == pb.Completion.DONE, done
            target.check(source, places)
            if in_the_middle:
                break
        else:
            raise AssertionError("all bytes came before the link was cut, each time")


def test_a_link_that_stays_cut_ends_the_pull_by_its_deadline_and_late_bytes_reach_no_page(tmp_path: Path) -> None:
    with machines(tmp_path) as (link, source, target):
        places = target.places(0, seed=3)
        target.client.link.pull(source.pull(1, places, deadline_ns=60 * SECOND_NS))
        assert target.client.completions(1)[1].outcome == pb.Completion.DONE
        _poison(target)
        link.cut()
        target.client.link.pull(source.pull(2, places, slots=3, deadline_ns=SECOND_NS))
        late = target.client.completions(1)[2]
        assert (late.outcome, late.error.reason) == (pb.Completion.FAILED, pb.TRANSFER_TIMEOUT)
        target.client.link.pull(source.pull(3, places, slots=3))
        again = target.client.completions(1)[3]
        assert isinstance(error_from_proto(again.error), PeerUnreachable), again
        link.join()
        give_up = time.monotonic() + WAIT_S
        for pull_id in range(4, 100_000):
            for region in (60, 70):
                assert (target.client.memory[region] == POISON).all()
            target.client.link.pull(source.pull(pull_id, places, slots=3))
            if target.client.completions(1)[pull_id].outcome == pb.Completion.DONE:
                break
            assert time.monotonic() < give_up
            time.sleep(0.05)
        target.check(source, places)
