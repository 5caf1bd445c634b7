"""What counts as standing still, and when: looks at a node, one after the other, with made-up times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmanager.configuration.operationsconfig import HealthSection
from kvmanager.core.events import DetachRank, EngineGone, Opened, Registered, RegisterEngine, Tick, TimelinesRead
from kvmanager.core.leaseevents import AcquirePrefix, EndLease, ReserveSpans
from kvmanager.core.spec import ChainSpec, GroupSpec, Limits, PageClass, Placement, PoolSpec
from kvmanager.geometry import SEQUENTIAL
from kvmanager.layout import plain_format, plain_layout
from kvmanager.observing.health import Health, JobVitals, PoolVitals, Sight, Tellers, Vitals, vitals
from tests.sim.driver import Client, Driver

MS = 1_000_000
LIMITS = HealthSection(probe_ms=10, core_ms=50, mover_ms=60, copy_ms=100, job_ms=200, evict_ms=300,
                       history_ms=400, events_ms=500)  # fmt: skip
WELL = Vitals(pools={"hbm": PoolVitals(5, 0)}, jobs={"writeback of g": JobVitals(False, 0)}, plans=frozenset(),
              admitted=0, overdue_ns=0)  # fmt: skip


def sight(ms: int, vitals: Vitals | None = WELL, tick_ms: int = 0, pong_ms: int = 0) -> Sight:
    return Sight(ms * MS, vitals, tick_ms * MS, pong_ms * MS)


@pytest.fixture
def health() -> Health:
    return Health(LIMITS, lease_grace_ns=10 * MS)


def test_a_node_at_rest_is_well_for_ever(health: Health) -> None:
    for ms in (0, 1_000, 1_000_000):
        assert health.judge(sight(ms)) == {}


def test_core_and_mover_have_their_deadlines(health: Health) -> None:
    assert set(health.judge(sight(0, None))) == {"core"}
    assert health.judge(sight(1, tick_ms=50, pong_ms=60)) == {}
    assert set(health.judge(sight(2, tick_ms=51, pong_ms=61))) == {"core", "mover"}
    assert health.judge(sight(3)) == {}


def test_plans_must_end_but_any_of_them_will_do(health: Health) -> None:
    def under_way(*plans: int) -> Vitals:
        return replace(WELL, plans=frozenset(plans))

    assert health.judge(sight(0, under_way(1, 2))) == {}
    assert health.judge(sight(90, under_way(1, 2, 3))) == {}, "another one has begun, none has ended"
    assert set(health.judge(sight(101, under_way(1, 2, 3, 4)))) == {"mover"}
    assert health.judge(sight(102, under_way(1, 3, 4))) == {}
    assert set(health.judge(sight(203, under_way(1, 3, 4)))) == {"mover"}
    assert health.judge(sight(204, under_way())) == {}
    assert health.judge(sight(900, under_way(9))) == {}, "time without plans does not count"


def test_a_pool_that_refuses_must_have_room_or_admit_somebody(health: Health) -> None:
    def pool(room: int, wanted: int, admitted: int = 0) -> Vitals:
        return replace(WELL, pools={"hbm": PoolVitals(room, wanted)}, admitted=admitted)

    assert health.judge(sight(0, pool(0, 3))) == {}
    assert health.judge(sight(299, pool(0, 3))) == {}
    assert set(health.judge(sight(301, pool(2, 3)))) == {"pool hbm"}
    assert health.judge(sight(302, pool(3, 3))) == {}, "eviction could free enough"
    assert health.judge(sight(400, pool(0, 3))) == {}
    assert health.judge(sight(650, pool(0, 3, admitted=1))) == {}, "requests come and go"
    assert health.judge(sight(940, pool(0, 3, admitted=1))) == {}
    assert set(health.judge(sight(951, pool(0, 3, admitted=1)))) == {"pool hbm"}
    assert health.judge(sight(952, pool(0, 0, admitted=1))) == {}, "full, and nobody asks"


def test_a_job_with_work_must_do_some(health: Health) -> None:
    def job(waiting: bool, done: int) -> Vitals:
        return replace(WELL, jobs={"writeback of g": JobVitals(waiting, done)})

    assert health.judge(sight(0, job(True, 1))) == {}
    assert health.judge(sight(150, job(True, 2))) == {}
    assert health.judge(sight(349, job(True, 2))) == {}
    assert set(health.judge(sight(351, job(True, 2)))) == {"writeback of g"}
    assert health.judge(sight(352, job(False, 2))) == {}


def test_history_and_events_have_deadlines_of_their_own_and_do_not_take_readiness(health: Health) -> None:
    def late(ms: int, waiting: bool, done: int) -> set[str]:
        job = JobVitals(waiting, done)
        assert health.judge(sight(ms)) == {}
        parts = health.late(ms * MS, Tellers(job, {"events at a": job, "events at b": JobVitals(False, 0)}))
        assert parts.keys() == {"history", "events at a", "events at b"}
        return {part for part, why in parts.items() if why}

    assert late(0, True, 1) == set()
    assert late(100, True, 2) == set()
    assert late(500, True, 2) == set()
    assert late(501, True, 2) == {"history"}
    assert late(601, True, 2) == {"history", "events at a"}
    assert late(602, True, 3) == set(), "slow is not still"
    assert late(9_000, False, 3) == set(), "nothing to tell"
    assert health.late(9_001 * MS, Tellers(None, {})) == {}


def test_leases_that_ran_out_must_end(health: Health) -> None:
    assert health.judge(sight(0, replace(WELL, overdue_ns=210 * MS))) == {}
    assert set(health.judge(sight(1, replace(WELL, overdue_ns=211 * MS)))) == {"lease expiry"}


def test_a_lease_of_a_cache_is_looked_at_like_a_ticket() -> None:
    """Of an engine of which no rank attached: it is the only one whose leases end by time."""
    format_ = plain_format("float32", 2, 2, 8)
    layout = plain_layout(format_, 4)
    kv = PageClass("kv", layout, "c/host", (0,))
    chain = ChainSpec("main", Placement.REPLICATED, 1, 4, SEQUENTIAL, SEQUENTIAL, (kv,))
    pool = PoolSpec("c/host", "host", 1, 7, layout.page_bytes, (("kv", 1),))
    driver = Driver([GroupSpec("c", 1, 4, format_, (chain,), (pool,))], Limits(ticket_grace_ns=10))
    writer, key = Client(driver, "c", "w"), b"k" * 16
    driver.apply(ReserveSpans("w", writer.epoch, 1, key, 1_000))
    driver.apply(EndLease("w", writer.epoch, 1, dict.fromkeys(writer.attaches, 1), committed=True))
    driver.apply(TimelinesRead(dict.fromkeys(writer.attaches, 1)))
    for attach in writer.attaches:
        driver.apply(DetachRank(attach))
    driver.apply(EngineGone("w", writer.epoch))
    reader = driver.apply(RegisterEngine("r", "c", b"ns", 16, 4, (layout.fingerprint,), 1))
    assert isinstance(reader, Registered)
    assert vitals(driver.node, 10**9).overdue_ns == 0
    pinned = driver.apply(AcquirePrefix("r", reader.epoch, 1, key, 1_000))
    assert isinstance(pinned, Opened)
    assert pinned.cached_tokens == 4
    due = driver.node.state.now + 1_000
    assert [vitals(driver.node, now).overdue_ns for now in (due - 3, due, due + 7)] == [-3, 0, 7]
    driver.apply(Tick(), passes=2_000)
    assert driver.counters["expired_lease"] == 1
    assert vitals(driver.node, 10**9).overdue_ns == 0
