"""What counts as standing still, and when: looks at a node, one after the other, with made-up times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmanager.configuration.operationsconfig import HealthSection
from kvmanager.observing.health import Health, JobVitals, PoolVitals, Sight, Vitals

MS = 1_000_000
LIMITS = HealthSection(probe_ms=10, core_ms=50, mover_ms=60, copy_ms=100, job_ms=200, evict_ms=300)
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


def test_leases_that_ran_out_must_end(health: Health) -> None:
    assert health.judge(sight(0, replace(WELL, overdue_ns=210 * MS))) == {}
    assert set(health.judge(sight(1, replace(WELL, overdue_ns=211 * MS)))) == {"lease expiry"}
