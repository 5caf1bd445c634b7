"""The log of refused registrations: who, which engine, why, and never more than a few lines a minute of a process."""

from __future__ import annotations

import logging

import pytest

from kvmanager.daemon.attach import ClientIdentity
from kvmanager.errors import InvariantViolation, KVError, LayoutMismatch, PoolExhausted
from kvmanager.services.refusedlog import LINES, NAME_CHARACTERS, PROCESSES, REASON_CHARACTERS, WINDOW_S, RefusedLog


class Clock:
    """Seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> RefusedLog:
    return RefusedLog(clock)


def refuse(log: RefusedLog, pid: int = 7, engine: str = "e", why: str = "no") -> None:
    with pytest.raises(LayoutMismatch), log.refusals_of(ClientIdentity("secret", 1000, pid, 1, "engine", "n"), engine):
        raise LayoutMismatch(why)


def test_a_line_says_which_engine_whose_process_and_why(log: RefusedLog, caplog: pytest.LogCaptureFixture) -> None:
    refuse(log, pid=4711, engine="prefill-0", why="kv_format is 'a', not 'b'")
    [record] = caplog.records
    assert (record.name, record.levelno) == ("kvmanager.engine", logging.WARNING)
    assert record.getMessage() == (
        "engine prefill-0 of uid 1000 pid 4711 is not registered: LAYOUT_MISMATCH: kv_format is 'a', not 'b'"
    )


def test_what_is_let_in_and_what_is_no_refusal_say_nothing(log: RefusedLog, caplog: pytest.LogCaptureFixture) -> None:
    who = ClientIdentity("secret", 1000, 7, 1, "engine", "n")
    with log.refusals_of(who, "e"):
        pass
    with pytest.raises(InvariantViolation), log.refusals_of(who, "e"):
        raise InvariantViolation("the daemon's own trouble")
    assert not caplog.records


def test_who_tries_for_ever_gets_a_few_lines_a_minute(
    log: RefusedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever name it gives. Others are heard meanwhile; what was left out is counted in the next line."""
    for number in range(LINES + 30):
        refuse(log, engine=f"e{number}")
    assert len(caplog.records) == LINES
    refuse(log, pid=8)
    assert len(caplog.records) == LINES + 1
    clock.now = WINDOW_S - 0.001
    refuse(log)
    assert len(caplog.records) == LINES + 1
    clock.now = WINDOW_S
    refuse(log)
    refuse(log)
    assert caplog.messages[-2].endswith("no (31 more of this process were not logged)")
    assert caplog.messages[-1].endswith(": no")


def test_processes_that_are_remembered_are_bounded(
    log: RefusedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Of too many, the one whose window began first is forgotten, the others are not."""
    for pid in range(PROCESSES + 1):
        clock.now += 0.1
        for _ in range(LINES):
            refuse(log, pid=pid)
    written = len(caplog.records)
    assert written == LINES * (PROCESSES + 1)
    refuse(log, pid=1)
    assert len(caplog.records) == written
    refuse(log, pid=0)
    assert len(caplog.records) == written + 1


def test_a_client_writes_no_lines_of_its_own(log: RefusedLog, caplog: pytest.LogCaptureFixture) -> None:
    refuse(log, engine="é\n2026-11-30 all is well\x1b[2J" + "x" * 10_000, why="\r" + "y" * 10_000)
    [line] = caplog.messages
    assert line.isprintable()
    assert "é\\n2026-11-30 all is well\\x1b[2Jxx" in line
    assert ": \\ryy" in line
    assert len(line) < NAME_CHARACTERS + REASON_CHARACTERS + 100


def test_the_error_goes_on_as_it_was(log: RefusedLog) -> None:
    error = PoolExhausted("full", pool="p", needed=2, free=1)
    with (
        pytest.raises(KVError) as raised,
        log.refusals_of(ClientIdentity("secret", 1000, 7, 1, "engine", "n"), "e"),
    ):
        raise error
    assert raised.value is error
