"""Checks of everything the core knows, on a copy of its state: the owner loop only stands still for the copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvmanager.core.audit import checks
from kvmanager.core.events import CheckCopies
from kvmanager.core.node import Node
from kvmanager.core.state import CheckJob
from kvmanager.daemon.loop import OwnerLoop
from kvmanager.errors import InvariantViolation
from kvmanager.journal.journalcodec import Codec
from kvmanager.units import SECOND_NS

CHECKSUMS_S: Final = 30.0
"""After that no further copy is read."""
POLL_S: Final = 0.02


@dataclass(frozen=True)
class Checked:
    """One check. broken: its story, empty when all fits. took_ns: beside the owner loop."""

    name: str
    broken: str
    took_ns: int


@dataclass(frozen=True)
class Fsck:
    """All checks. blocked_ns: for how long the loop made the copy. spans: looked at."""

    checks: tuple[Checked, ...]
    blocked_ns: int
    spans: int


def check_copy(loop: OwnerLoop) -> Fsck:
    """Copies the state between two events and checks the copy in the caller's thread. Raises NotReady."""

    def copy(node: Node) -> tuple[bytes, Codec, int]:
        began = time.perf_counter_ns()
        codec = Codec([group.spec for group in node.state.groups.values()], node.state.limits)
        stored = b"".join(codec.state_parts(node.state))
        return stored, codec, time.perf_counter_ns() - began

    stored, codec, blocked_ns = loop.inspect(copy)
    state = codec.state(stored)
    done = tuple(_run(name, check) for name, check in checks(state))
    spans = sum(int(np.count_nonzero(c.table.live)) for group in state.groups.values() for c in group.chains)
    return Fsck(done, blocked_ns, spans)


def _run(name: str, check: Callable[[], None]) -> Checked:
    began = time.perf_counter_ns()
    broken = ""
    try:
        check()
    except InvariantViolation as violation:
        broken = str(violation)
    return Checked(name, broken, time.perf_counter_ns() - began)


def compare_sums(loop: OwnerLoop, spans: int, sleep: Callable[[float], Any] = time.sleep) -> tuple[int, int]:
    """Has host copies read again; (spans compared, bad pages found and taken out). Others' checks count, too."""

    def counted(node: Node) -> tuple[int, int, bool]:
        state = node.state
        busy = bool(state.checks) or any(isinstance(job, CheckJob) for job in state.jobs.values())
        return state.counters["restart_check"], state.counters["bad_copy"], busy

    before = loop.inspect(counted)
    loop.post(CheckCopies(spans, int(CHECKSUMS_S * SECOND_NS)))
    deadline = time.monotonic() + 2 * CHECKSUMS_S
    while (now := loop.inspect(counted))[2] and time.monotonic() < deadline:
        sleep(POLL_S)
    return now[0] - before[0], now[1] - before[1]
