"""The journal's file: torn at any byte, killed within a snapshot, of another program, or full."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvmanager.core import digest
from kvmanager.core.digest import state_digest
from kvmanager.core.events import (
    CheckTicket,
    Close,
    Closing,
    CopyOutcome,
    Event,
    Open,
    PlanEnded,
    Progress,
    RenewTickets,
    Step,
    Tick,
    TicketInfo,
    TimelinesRead,
)
from kvmanager.core.leaseevents import AcquirePrefix, EndLease, ReserveSpans
from kvmanager.core.node import Node
from kvmanager.errors import InvariantViolation, PoolExhausted
from kvmanager.journal import hotevents, journal
from kvmanager.journal.journal import Fingerprints, Journal, JournalMismatch
from kvmanager.journal.journalcodec import Codec
from tests.sim.driver import DEFAULT_LIMITS, Client, Driver, chain_keys, sharded_group

HALF_BYTES = 64 << 20
PRINTS = Fingerprints("c" * 64)
SPECS = [sharded_group(64, 64)]


class Kept:
    """A core whose events are kept."""

    def __init__(self) -> None:
        self.fd = journal.create(HALF_BYTES)
        self.driver = Driver(SPECS)
        self.journal = self.open()
        self.journal.snapshot(self.driver.node)
        apply = self.driver.node.apply

        def kept(event: Event, now: int) -> list:
            effects = apply(event, now)
            self.journal.append(event, now, 0.0)
            return effects

        self.driver.node.apply = kept  # type: ignore[method-assign]

    def open(self, prints: Fingerprints = PRINTS) -> Journal:
        return Journal(self.fd, Codec(SPECS, DEFAULT_LIMITS), prints, HALF_BYTES)

    def recovered(self, prints: Fingerprints = PRINTS) -> str:
        return state_digest(self.open(prints).recover().state)

    def digest(self) -> str:
        return state_digest(self.driver.node.state)


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    os.close(made.fd)


def work(kept: Kept, seed: int = 0) -> None:
    """Requests that are committed, offloaded and hit again."""
    client = Client(kept.driver, "p")
    for number in range(6):
        client.serve(number, 2048 * (1 + number % 3), what=(seed, number % 3), growth=64)
    client.die()


def test_the_same_state_comes_back(kept: Kept) -> None:
    work(kept)
    assert kept.recovered() == kept.digest()
    kept.journal.snapshot(kept.driver.node)
    assert kept.recovered() == kept.digest()
    assert kept.journal.log_bytes == 0
    work(kept, 1)
    assert kept.recovered() == kept.digest()


def test_a_record_torn_at_any_byte_is_dropped_and_what_follows_is_kept(kept: Kept) -> None:
    work(kept)
    before = kept.digest()
    record = kept.journal.record(RenewTickets(("a", "b")), kept.driver.now + 1)
    for cut in range(len(record)):
        again = kept.open()
        node = again.recover()
        assert state_digest(node.state) == before
        at = again._at
        again._memory[at : at + cut] = record[:cut]
        assert kept.recovered() == before, cut
        assert not any(again._memory[at : at + len(record)]), "a torn record stays nowhere"


def test_bytes_of_a_torn_record_never_pass_for_records(kept: Kept) -> None:
    """A client chose them: a record within a record, exactly where the next one would begin."""
    work(kept)
    inner = kept.journal.record(Tick(), 1 << 62)
    small = kept.journal.record(Tick(), kept.driver.now)
    evil = kept.journal.record(RenewTickets(("x" * 64 + inner.decode("latin-1"),)), kept.driver.now)
    at = kept.journal._at
    kept.journal._memory[at : at + len(small)] = evil[: len(small)]
    kept.journal._memory[at + len(small) : at + len(small) + len(inner)] = inner
    again = kept.open()
    node = again.recover()
    node.apply(Tick(), kept.driver.now)
    again.append(Tick(), kept.driver.now, 0.0)
    assert again._at == at + len(small)
    assert len(kept.open()._records(_newest(kept))[0]) == len(again._records(_newest(kept))[0])
    assert kept.open().recover().state.now == kept.driver.now


def _newest(kept: Kept) -> object:
    halves = [half for half in map(kept.open()._half, (0, 1)) if half is not None]
    return max(halves, key=lambda half: half.sequence)


def test_a_daemon_killed_within_a_snapshot_leaves_the_older_one(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    work(kept)
    before = kept.digest()

    class Killed(Exception):
        pass

    def die(*_: object) -> None:
        raise Killed

    for step in ("_write_head", "_follow"):
        with monkeypatch.context() as patch:
            patch.setattr(Journal, step, die)
            with pytest.raises(Killed):
                kept.journal.snapshot(kept.driver.node)
        assert kept.recovered() == before, step
    kept.journal = kept.open()
    kept.journal.recover()
    # Any byte of a header that is being written: the half does not count.
    kept.journal.snapshot(kept.driver.node)
    base = kept.journal._base(kept.journal._sequence % 2)
    other = kept.journal._base((kept.journal._sequence + 1) % 2)
    head = kept.journal._memory[base : base + 8]
    kept.journal._memory[other : other + 8] = head
    assert kept.recovered() == before


def test_old_records_of_a_half_are_never_read_again(kept: Kept) -> None:
    work(kept)
    kept.journal.snapshot(kept.driver.node)
    kept.journal.snapshot(kept.driver.node)
    assert kept.open()._records(_newest(kept))[0] == []
    used = os.fstat(kept.fd).st_blocks * 512
    assert used < 4 * kept.journal.snapshot_bytes + (1 << 17), "memory of older snapshots goes back to the host"


def test_neither_half_is_complete(kept: Kept) -> None:
    kept.journal._memory[kept.journal._base(1) : kept.journal._base(1) + 8] = b"\0" * 8
    with pytest.raises(InvariantViolation, match="neither half"):
        kept.recovered()


@pytest.mark.parametrize("field", ["configuration", "schema"])
def test_another_program_or_configuration_is_refused_by_name(kept: Kept, field: str) -> None:
    with pytest.raises(JournalMismatch, match="serve --cold"):
        kept.recovered(dataclasses.replace(PRINTS, **{field: "d" * 64}))
    assert kept.recovered() == kept.digest(), "a refusal changes nothing"


def test_events_are_replayed_by_the_core_that_applied_them_only(kept: Kept) -> None:
    newer = dataclasses.replace(PRINTS, code="d" * 64)
    work(kept)
    with pytest.raises(JournalMismatch, match="kvmanager upgrade"):
        kept.recovered(newer)
    kept.journal.snapshot(kept.driver.node)
    assert kept.recovered(newer) == kept.digest(), "a snapshot alone may be read by a newer core"
    again = kept.open(newer)
    again.recover()
    again.append(Tick(), kept.driver.now + 1, 0.0)
    with pytest.raises(JournalMismatch, match="another version of the core"):
        kept.recovered(PRINTS)


def test_another_format_is_refused(kept: Kept) -> None:
    journal.check_format(kept.fd)
    os.pwrite(kept.fd, b"\xff\xff", 8)
    with pytest.raises(JournalMismatch, match="format 65535"):
        journal.check_format(kept.fd)


def test_boot_ids_rise_also_when_the_clock_does_not(kept: Kept) -> None:
    first = journal.next_boot_id(kept.fd, 100)
    assert first == 100
    for clock in (50, 0, 101, 7):
        journal.note_boot_id(kept.fd, first)
        following = journal.next_boot_id(kept.fd, clock)
        assert following == first + 1
        os.pwrite(kept.fd, b"\0\0\0", journal._BOOT_AT + 12 * (clock % 2))  # a torn one: the other still counts
        first = following
    assert journal.next_boot_id(kept.fd, 0) > 100


def test_every_kind_of_event_comes_back_equal() -> None:
    codec = Codec(SPECS, DEFAULT_LIMITS)
    ticket = TicketInfo("t", "there", 5, 7)
    step = Step(
        "e", 1, 2, 3, {4: 5}, (Progress(1, 2, 3, 4, b"k"),), (Open(1, 2, 3, b"", "s", ticket), Open(2, 2, 0, b"")),
        (Close(1, Closing.ABORTED, "end_turn"),),
    )  # fmt: skip
    events = (step, Tick(), TimelinesRead({1: 2**63}), RenewTickets(("a",)), Step("e", 1, 1))
    for event in events:
        now, same = codec.event(codec.event_bytes(event, 9))
        assert (now, same) == (9, event)
    failed = PlanEnded(3, CopyOutcome.FAILED, PoolExhausted("full", pool="p", needed=2, free=1, retry_after_ns=5))
    _, same = codec.event(codec.event_bytes(failed, 1))
    assert isinstance(same, PlanEnded)
    assert vars(same.error) == vars(failed.error)
    assert (str(same.error), same.outcome) == ("full", CopyOutcome.FAILED)
    check = CheckTicket("t", Client(Driver(SPECS), "p").driver.pool("p/hbm").spaces["kv"].generation)
    assert (codec.event(codec.event_bytes(check, 1))[1].generations == check.generations).all()


@pytest.mark.parametrize("seed", range(20))
def test_steps_and_timelines_come_back_equal(seed: int) -> None:
    """Also those with numbers or names that the packed form has no room for."""
    rng = random.Random(seed)
    codec = Codec(SPECS, DEFAULT_LIMITS)
    packed = 0
    for _ in range(50):
        most = rng.choice((5, 2**32, 2**64 - 1, 2**64))
        numbers = [rng.choice((0, most, rng.randint(0, most))) for _ in range(40)]
        pairs = dict(zip(rng.sample(numbers, rng.randint(0, 16)), numbers, strict=False))
        rows = tuple(
            Progress(*rng.sample(numbers, 4), rng.randbytes(rng.choice((0, 16, 3200))))
            for _ in range(rng.randint(0, 4))
        )
        name = rng.choice(("", "e", "engine/\u00fc", "\u4e2d" * 200))
        for event in (Step(name, *rng.sample(numbers, 3), pairs, rows), TimelinesRead(pairs)):
            stored = bytes(codec.event_bytes(event, seed))
            now, same = codec.event(stored)
            assert (now, same) == (seed, event), f"seed {seed}"
            packed += hotevents.is_packed(stored)
    assert 20 < packed < 100


@pytest.mark.parametrize("seed", range(20))
def test_events_of_leases_come_back_equal(seed: int) -> None:
    """Also those that the packed form has no room for."""
    rng = random.Random(seed)
    codec = Codec(SPECS, DEFAULT_LIMITS)
    packed = 0
    for _ in range(50):
        most = rng.choice((5, 2**32, 2**64 - 1, 2**64))
        numbers = [rng.choice((0, most, rng.randint(0, most))) for _ in range(20)]
        fence, seen = (
            dict(zip(rng.sample(numbers, rng.randint(0, 8)), numbers, strict=False)) for _ in range(2)
        )
        engine, session, name = (rng.choice(("", "e", "\u00fc/7", "\u4e2d" * 30_000)) for _ in range(3))
        keys, token_ids = (rng.randbytes(rng.choice((0, 16, 3200))) for _ in range(2))
        epoch, lease, number = rng.sample(numbers, 3)
        failed = rng.choice(((), (), (3, 4)))
        for event in (
            AcquirePrefix(engine, epoch, lease, keys, number, name),
            ReserveSpans(engine, epoch, lease, keys, number, session, token_ids, name),
            EndLease(engine, epoch, lease, fence, rng.random() < 0.5, number, failed, seen=seen),
            EndLease(engine, epoch, lease, fence, True, number, (), "", failed, token_ids, seen),
        ):
            stored = bytes(codec.event_bytes(event, seed))
            now, same = codec.event(stored)
            assert (now, same) == (seed, event), f"seed {seed}"
            packed += hotevents.is_packed(stored)
    assert 20 < packed < 200


def test_nothing_but_the_cores_classes_is_read() -> None:
    codec = Codec(SPECS, DEFAULT_LIMITS)
    for evil in (os.system, subprocess.Popen, eval, Node.apply, digest.state_digest):
        with pytest.raises(InvariantViolation, match="may hold"):
            codec.event(pickle.dumps((1, evil)))
    with pytest.raises(InvariantViolation, match="snapshot holds a int"):
        codec.state(b"".join(codec.state_parts(5)))  # type: ignore[arg-type]


def test_a_log_that_grows_too_long_makes_a_snapshot_due(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not kept.journal.due(idle=True)
    kept.journal.append(Tick(), 1, journal.REPLAY_S * 0.6)
    assert kept.journal.due(idle=True)
    assert not kept.journal.due(idle=False)
    kept.journal.append(Tick(), 1, journal.REPLAY_S)
    assert kept.journal.due(idle=False)
    kept.journal.snapshot(kept.driver.node)
    assert not kept.journal.due(idle=True)
    monkeypatch.setattr(journal, "LOG_BYTES", 100)
    for _ in range(5):
        kept.journal.append(Tick(), 1, 0.0)
    assert kept.journal.due(idle=False)
    kept.journal._end = kept.journal._at
    with pytest.raises(InvariantViolation, match="full"):
        kept.journal.append(Tick(), 1, 0.0)


REPLAY = """
import sys
from tests.unit.test_journal import Kept, HALF_BYTES, PRINTS, SPECS, DEFAULT_LIMITS, Journal, Codec, state_digest
print(state_digest(Journal(int(sys.argv[1]), Codec(SPECS, DEFAULT_LIMITS), PRINTS, HALF_BYTES).recover().state))
"""


def test_another_process_with_other_hashes_replays_to_the_same_state(kept: Kept) -> None:
    work(kept)
    client = Client(kept.driver, "p")
    client.open(1, 4096, "left open", growth=100)
    os.set_inheritable(kept.fd, True)
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", REPLAY, str(kept.fd)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, check=True, pass_fds=[kept.fd],
        )  # fmt: skip
        assert done.stdout.strip() == kept.digest()


def test_keys_of_a_session_are_what_they_were(kept: Kept) -> None:
    client = Client(kept.driver, "p")
    client.serve(1, 4096, "s")
    node = kept.open().recover()
    chain = node.state.groups["p"].chains[0]
    assert chain.index.match(chain_keys("s", 64), 64).segments == 64
