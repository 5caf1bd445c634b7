"""One suite over every executor: the same plans, the same bytes, the same promises."""

import itertools
import random
import secrets
import time

import numpy as np
import pytest

from kvmanager.core.checksums import PageSections
from kvmanager.core.plans import CopyPlan, PagedCopies, Purpose
from kvmanager.errors import Draining, InvalidArgument, TransferFailed
from kvmanager.transport.checksums import section_sum
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.cuda import CudaExecutor, Tuning
from kvmanager.transport.executor import Completion, Outcome, RegionMap
from kvmanager.transport.fake import FakeExecutor
from kvmanager.transport.nixl import NixlReader
from kvmanager.transport.nixl_executor import NixlExecutor
from kvmanager.units import MIB
from tests.plans import strided

SOURCES, TARGETS = (1, 2), (11, 12)
REGION_BYTES, POISON = 6 * MIB, 0xA5
CUDA = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda-kernel-inside")]
GPU_REGIONS = (2, 11)  # so plans go all four ways between host and GPU memory


@pytest.fixture(scope="module")
def host_memory():
    """Regions 1 and 2 hold random bytes, 11 and 12 receive."""
    regions = RegionMap()
    for region in (*SOURCES, *TARGETS):
        regions.add(region, _first_bytes(region))
    return regions


def _first_bytes(region: int) -> np.ndarray:
    if region in TARGETS:
        return np.full(REGION_BYTES, POISON, dtype=np.uint8)
    return np.random.default_rng(region).integers(0, 256, REGION_BYTES, dtype=np.uint8)


@pytest.fixture(scope="module", params=["cpu", "fake", "nixl", *CUDA])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def memory(kind, request):
    """The regions of the executor under test, by id: numpy arrays, or what acts like them."""
    if not kind.startswith("cuda"):
        yield request.getfixturevalue("host_memory")
        return
    from gpu_regions import GpuRegions

    made = GpuRegions({*SOURCES, *TARGETS} - {*GPU_REGIONS}, GPU_REGIONS, REGION_BYTES, _first_bytes)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reader(host_memory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("UCX_TLS", ""), ("UCX_NET_DEVICES", ""), ("NIXL_LOG_LEVEL", "WARN")):
            patch.setenv(name, value)
        reader = NixlReader("conformance", secrets.randbits(64), host_memory)
    for region in (*SOURCES, *TARGETS):
        reader.register(region)
    yield reader
    reader.close()


@pytest.fixture
def executor(kind, memory, request):
    for region in TARGETS:
        memory[region][:] = POISON
    if kind == "cpu":
        yield CpuExecutor(memory)
    elif kind == "fake":
        yield FakeExecutor(seed=3, regions=memory)
    elif kind == "nixl":
        reader = request.getfixturevalue("reader")
        addresses = {region: (memory.address(region), REGION_BYTES) for region in SOURCES}
        yield NixlExecutor(reader, memory, reader.name, addresses)
    else:
        executor = CudaExecutor(memory.regions, "cuda:0", tuning=Tuning() if kind == "cuda" else Tuning(bounce_bytes=0))
        yield executor
        executor.close()
        _drain(executor)
        executor.release()


def _ids():
    return itertools.count(1000)


def _drain(executor) -> dict[int, Completion]:
    """Polls until nothing is outstanding; a second completion of a plan is an error."""
    ended: dict[int, Completion] = {}
    give_up = time.monotonic() + 30
    while executor.outstanding():
        assert time.monotonic() < give_up, executor.outstanding()
        for completion in executor.poll():
            assert completion.plan_id not in ended
            ended[completion.plan_id] = completion
    return ended


def _strided(rng: random.Random, source_at: int, target_at: int) -> tuple[PagedCopies, int]:
    """Random strided copies inside [at, at + 1 MiB) on each side, target ranges apart, and the bytes they take."""
    counts = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 3)))
    row = rng.choice((1, 4, 128, 131, 656))
    strides, reach = [[], []], [row, row]
    for count in reversed(counts):
        for side in (0, 1):
            stride = reach[side] + rng.randint(0, 40)
            strides[side].insert(0, stride)
            reach[side] = stride * (count - 1) + reach[side]
    n = rng.randint(1, max(1, min(60, MIB // max(reach) // 2)))
    room = MIB // max(reach)
    places = [np.array(rng.sample(range(room), n)) * max(reach) for _ in range(2)]
    if rng.random() < 0.3:
        places = [np.arange(n) * max(reach) for _ in range(2)]
    copies = strided(
        rng.choice(SOURCES), rng.choice(TARGETS), places[0] + source_at, places[1] + target_at,
        counts, tuple(strides[0]), tuple(strides[1]), row,
    )  # fmt: skip
    return copies, copies.total_bytes


def _model(memory, before: dict[int, np.ndarray], plan: CopyPlan) -> None:
    """Byte by byte, on copies of the target regions."""
    for c in plan.pieces():
        for source, target in zip(c.source_offsets.tolist(), c.target_offsets.tolist(), strict=True):
            for index in itertools.product(*map(range, c.counts)):
                s = source + sum(i * stride for i, stride in zip(index, c.source_strides, strict=True))
                t = target + sum(i * stride for i, stride in zip(index, c.target_strides, strict=True))
                before[c.target_region][t : t + c.row_bytes] = memory[c.source_region][s : s + c.row_bytes]


def _pages(
    plan_id: int, pages: int, page_bytes: int, at: int = 0, target: int = 11, purpose: Purpose = Purpose.OFFLOAD
) -> CopyPlan:
    offsets = np.arange(pages, dtype=np.int64) * page_bytes + at
    copies = strided(1, target, offsets, offsets[::-1].copy(), (), (), (), page_bytes)
    return CopyPlan(plan_id, purpose, (copies,))


@pytest.mark.parametrize("seed", range(6))
def test_bytes_equal_a_naive_model(executor, memory, seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    expected = {region: memory[region].copy() for region in TARGETS}
    plans = []
    for place in range(5):
        sets = [_strided(rng, rng.randrange(0, 5 * MIB), place * MIB) for _ in range(1)]
        plans.append(CopyPlan(place + 1, Purpose.PLACE, tuple(c for c, _ in sets)))
    for plan in plans:
        executor.submit(plan)
        _model(memory, expected, plan)
    ended = _drain(executor)
    assert {plan.plan_id: plan.total_bytes for plan in plans} == {k: c.moved_bytes for k, c in ended.items()}
    assert {c.outcome for c in ended.values()} == {Outcome.DONE}
    assert {c.error for c in ended.values()} == {None}
    for region in TARGETS:
        assert np.array_equal(memory[region], expected[region])


def test_negative_strides_copy_backwards(executor, memory):
    copies = strided(1, 11, np.array([5000]), np.array([0]), (5,), (-1000,), (700,), 656)
    expected = {11: memory[11].copy()}
    plan = CopyPlan(1, Purpose.PLACE, (copies,))
    _model(memory, expected, plan)
    executor.submit(plan)
    _drain(executor)
    assert np.array_equal(memory[11], expected[11])


def test_a_large_run_and_many_large_pages_arrive_whole(executor, memory):
    whole = strided(1, 11, np.array([1]), np.array([0]), (), (), (), 5 * MIB + 3)
    executor.submit(CopyPlan(1, Purpose.OFFLOAD, (whole,)))
    executor.submit(_pages(2, 6, MIB, target=12))
    assert {c.outcome for c in _drain(executor).values()} == {Outcome.DONE}
    assert np.array_equal(memory[11][: 5 * MIB + 3], memory[1][1 : 5 * MIB + 4])
    assert (memory[11][5 * MIB + 3 :] == POISON).all()
    assert np.array_equal(memory[12].reshape(6, MIB), memory[1].reshape(6, MIB)[::-1])


def test_sums_are_made_when_all_bytes_have_moved(executor, kind, memory):
    """Of source and target pages alike, whatever their place and size; many pages, several plans, nothing to copy."""
    if kind == "nixl":
        pytest.skip("reads from peers; what they bring is summed up in staging")
    page_bytes, sections = 50_000, ((0, 40_960), (40_962, 9_001))
    offsets = np.arange(100, dtype=np.int64) * page_bytes
    copies = strided(1, 11, offsets, offsets[::-1].copy(), (), (), (), page_bytes)
    regions = np.repeat(np.array([1, 11, 2, 12], np.int32), 100)
    every = PageSections(regions, np.tile(offsets, 4), sections)
    executor.submit(CopyPlan(1, Purpose.OFFLOAD, (copies,), every))
    for number in range(20, 40):  # more than an executor has under way at one time
        places = offsets[number : number + 7] + 3
        executor.submit(CopyPlan(number, Purpose.CHECK, (), PageSections(regions[:7], places, ((0, 100), (8, 8)))))
    executor.submit(CopyPlan(3, Purpose.OFFLOAD, ()))
    ended = _drain(executor)
    assert {completion.outcome for completion in ended.values()} == {Outcome.DONE}, ended
    assert ended[3].sums is None
    found = {region: np.asarray(memory[region]) for region in (1, 2, 11, 12)}

    def of(region, at):
        return [section_sum(found[region][at + start : at + start + size]) for start, size in sections]

    for number, (region, at) in enumerate(zip(regions.tolist(), every.offsets.tolist(), strict=True)):
        assert ended[1].sums[number].tolist() == np.concatenate(of(region, at)).tolist(), (number, region, at)
    for number in range(20, 40):
        word = section_sum(found[1][int(offsets[number + 6]) + 11 :][:8])
        assert ended[number].sums[6, 2:].tolist() == word.tolist(), number
    assert np.array_equal(ended[1].sums[:100], ended[1].sums[100:200][::-1]), "what arrived is what was sent"


@pytest.mark.parametrize(
    ("offset", "sections"), [(REGION_BYTES - 99, ((0, 100),)), (-1, ((0, 8),)), (0, ((8, 0),)), (0, ())]
)
def test_sums_of_bytes_outside_fail_before_a_byte_moves(executor, kind, memory, offset, sections):
    if kind == "nixl":
        pytest.skip("reads from peers; what they bring is summed up in staging")
    pages = PageSections(np.array([1], np.int32), np.array([offset]), sections)
    copies = strided(1, 11, np.array([0]), np.array([0]), (), (), (), 4096)
    executor.submit(CopyPlan(1, Purpose.OFFLOAD, (copies,), pages))
    (completion,) = _drain(executor).values()
    assert completion.outcome is Outcome.FAILED
    assert completion.sums is None
    assert (memory[11][:] == POISON).all()


_OUTSIDE = {
    "source end": ({"source_offsets": [0, REGION_BYTES - 655]}, "source"),
    "source start": ({"source_offsets": [-1, 5000]}, "source"),
    "target end": ({"target_offsets": [REGION_BYTES - 655, 0]}, "target"),
    "target start": ({"target_offsets": [0, -(2**62)]}, "target"),
    "stride": ({"counts": (2,), "source_strides": (REGION_BYTES,), "target_strides": (656,)}, "source"),
    "negative stride": ({"counts": (3,), "source_strides": (656,), "target_strides": (-(2**62),)}, "target"),
    "beyond 64 bits": ({"counts": (9,), "source_strides": (2**62,), "target_strides": (656,)}, "source"),
    "unknown source": ({"source_region": 99}, "99"),
    "unknown target": ({"target_region": 99}, "99"),
    "written twice": ({"counts": (2**40,), "source_strides": (0,), "target_strides": (0,)}, "bytes into region"),
}


@pytest.mark.parametrize("case", _OUTSIDE)
def test_a_plan_that_leaves_its_region_fails_before_a_byte_moves(executor, memory, case):
    change, text = _OUTSIDE[case]
    fields = {
        "source_region": 1, "target_region": 11, "source_offsets": [0, 5000], "target_offsets": [0, 5000],
        "counts": (), "source_strides": (), "target_strides": (), "row_bytes": 656,
    } | change  # fmt: skip
    for side in ("source_offsets", "target_offsets"):
        fields[side] = np.array(fields[side], dtype=np.int64)
    good = strided(1, 12, np.array([0]), np.array([0]), (), (), (), 4096)
    executor.submit(CopyPlan(5, Purpose.PLACE, (good, strided(**fields))))
    assert executor.outstanding() == [5]
    completion = _drain(executor)[5]
    assert completion.outcome is Outcome.FAILED
    assert completion.moved_bytes == 0
    assert isinstance(completion.error, InvalidArgument)
    assert text in str(completion.error)
    for region in TARGETS:
        assert (memory[region] == POISON).all()


def test_the_last_byte_of_a_region_is_inside(executor, memory):
    copies = strided(1, 11, np.array([REGION_BYTES - 656]), np.array([REGION_BYTES - 656]), (), (), (), 656)
    executor.submit(CopyPlan(1, Purpose.PLACE, (copies,)))
    assert _drain(executor)[1].outcome is Outcome.DONE
    assert np.array_equal(memory[11][-656:], memory[1][-656:])


def test_empty_plans_complete_too(executor):
    none = np.zeros(0, dtype=np.int64)
    executor.submit(CopyPlan(1, Purpose.PLACE, ()))
    executor.submit(CopyPlan(2, Purpose.PLACE, (strided(1, 11, none, none, (4,), (1,), (1,), 656),)))
    ended = _drain(executor)
    assert {i: (c.outcome, c.moved_bytes) for i, c in ended.items()} == {1: (Outcome.DONE, 0), 2: (Outcome.DONE, 0)}


def test_many_small_plans_each_complete_once(executor, memory):
    for plan_id in range(1, 401):
        executor.submit(_pages(plan_id, 1, 656, at=(plan_id - 1) * 656))
    assert executor.outstanding() == list(range(1, 401))
    assert set(_drain(executor)) == set(range(1, 401))
    assert executor.poll() == []
    assert np.array_equal(memory[11][: 400 * 656], memory[1][: 400 * 656])


def test_outstanding_lists_a_plan_until_its_completion_was_returned(executor):
    executor.submit(_pages(1, 1, MIB))
    executor.submit(_pages(2, 1, MIB))
    seen: set[int] = set()
    for _ in range(10_000):
        assert set(executor.outstanding()) == {1, 2} - seen
        seen |= {c.plan_id for c in executor.poll()}
        if len(seen) == 2:
            break
    assert executor.outstanding() == []


def test_a_plan_id_in_use_is_refused_and_free_again_afterwards(executor):
    executor.submit(_pages(1, 1, 656))
    with pytest.raises(InvalidArgument, match="plan 1 is outstanding"):
        executor.submit(_pages(1, 1, 656))
    assert _drain(executor)[1].outcome is Outcome.DONE
    executor.submit(_pages(1, 1, 656))
    assert _drain(executor)[1].outcome is Outcome.DONE


def test_a_cancelled_plan_ends_once_and_moves_nothing_that_was_not_begun(executor, memory):
    executor.submit(_pages(1, 6, MIB))
    executor.submit(_pages(2, 1, 656, target=12))
    executor.cancel(1)
    executor.cancel(1)
    assert 1 in executor.outstanding(), "a cancelled plan is outstanding until its completion is polled"
    ended = _drain(executor)
    assert ended[1].outcome is Outcome.CANCELLED
    assert ended[1].moved_bytes == 0
    assert ended[2].outcome is Outcome.DONE
    assert (memory[11] == POISON).all()


def test_cancelling_what_has_ended_or_never_was_is_nothing(executor):
    executor.submit(_pages(1, 1, 656))
    _drain(executor)
    executor.cancel(1)
    executor.cancel(77)
    assert executor.outstanding() == []
    assert executor.poll() == []


def test_after_close_everything_ends_and_nothing_starts(executor, memory):
    executor.submit(_pages(1, 6, MIB))
    executor.close()
    assert _drain(executor)[1].outcome is Outcome.CANCELLED
    assert executor.poll() == []
    with pytest.raises(Draining):
        executor.submit(_pages(2, 1, 656))
    assert (memory[11] == POISON).all()


QUEUED = range(1, 201)


def _order(executor) -> list[int]:
    """Plans as they end, poll by poll."""
    order: list[int] = []
    give_up = time.monotonic() + 30
    while executor.outstanding():
        assert time.monotonic() < give_up, executor.outstanding()
        order += [completion.plan_id for completion in executor.poll()]
    return order


@pytest.mark.parametrize("late", [Purpose.ONBOARD, Purpose.SPILL])
def test_a_late_plan_that_somebody_waits_for_overtakes_queued_write_backs(executor, memory, late):
    for plan_id in QUEUED:
        executor.submit(_pages(plan_id, 1, MIB))
    order = [completion.plan_id for completion in executor.poll()]
    executor.submit(_pages(1000, 5, MIB, target=12, purpose=late))
    order += _order(executor)
    assert sorted(order) == [*QUEUED, 1000]
    assert order.index(1000) < len(QUEUED) // 2, "it waits for what has begun, and for no more"
    assert np.array_equal(memory[12][: 5 * MIB].reshape(5, MIB), memory[1][: 5 * MIB].reshape(5, MIB)[::-1])


def test_an_onboard_overtakes_a_spill_and_that_a_write_back(executor):
    executor.submit(_pages(1, 6, MIB, target=12))
    purposes = [*[Purpose.MIRROR] * 60, *[Purpose.SPILL] * 60, *[Purpose.ONBOARD] * 60]
    for number, purpose in enumerate(purposes, start=2):
        executor.submit(_pages(number, 6, MIB // 2, purpose=purpose))
    order = _order(executor)
    places = {
        purpose: sum(order.index(n) for n, p in enumerate(purposes, start=2) if p is purpose) / 60
        for purpose in (Purpose.MIRROR, Purpose.SPILL, Purpose.ONBOARD)
    }
    assert places[Purpose.ONBOARD] < places[Purpose.SPILL] < places[Purpose.MIRROR]


def test_a_write_back_ends_beside_a_stream_of_onboards_that_never_ends(executor):
    executor.submit(_pages(1, 6, MIB))
    ids, ended = itertools.count(100), set()
    give_up = time.monotonic() + 30
    while 1 not in ended:
        assert time.monotonic() < give_up
        while len(executor.outstanding()) < 8 + (1 in executor.outstanding()):
            executor.submit(_pages(next(ids), 4, MIB, target=12, purpose=Purpose.ONBOARD))
        ended |= {completion.plan_id for completion in executor.poll()}
    assert len(ended) > 8, "onboards went on meanwhile"
    _drain(executor)


def test_queued_write_backs_are_given_up_and_stay_outstanding_until_they_have_ended(executor):
    for plan_id in QUEUED:
        executor.submit(_pages(plan_id, 1, MIB))
    begun = {c.plan_id: c for c in executor.poll()}
    executor.submit(_pages(1000, 1, MIB, target=12, purpose=Purpose.ONBOARD))
    given_up = executor.outstanding()[-101:-1]
    for plan_id in given_up:
        executor.cancel(plan_id)
    assert set(given_up) <= set(executor.outstanding())
    ended = begun | _drain(executor)
    assert sorted(ended) == [*QUEUED, 1000]
    assert {ended[plan_id].outcome for plan_id in given_up} == {Outcome.CANCELLED}
    assert {ended[plan_id].moved_bytes for plan_id in given_up} == {0}
    assert {c.outcome for i, c in ended.items() if i not in given_up} == {Outcome.DONE}


def test_without_rates_there_is_no_waiting(executor):
    executor.submit(_pages(1, 6, MIB))
    assert executor.wait_ns() == 0
    executor.poll()
    assert executor.wait_ns() == 0
    _drain(executor)


# --------------------------------------------------------------------------- what only one of them does


def test_cpu_interleaves_a_huge_plan_with_small_ones(host_memory):
    """By turns, not by time: small plans behind a huge one end long before it does."""
    executor = CpuExecutor(host_memory)
    tiny = np.arange(REGION_BYTES // 64, dtype=np.int64) * 64
    huge = strided(1, 11, tiny, tiny[::-1].copy(), (), (), (), 64)
    executor.submit(CopyPlan(1, Purpose.OFFLOAD, (huge,)))
    for plan_id in range(2, 6):
        executor.submit(_pages(plan_id, 1, 656, target=12))
    first = executor.poll()
    assert {c.plan_id for c in first} == {2, 3, 4, 5}
    assert executor.outstanding() == [1]
    completion = _drain(executor)[1]
    assert completion.moved_bytes == REGION_BYTES
    assert completion.busy_ns > 0


def test_cpu_cancel_in_the_middle_says_what_was_moved(host_memory):
    host_memory[11][:] = POISON
    executor = CpuExecutor(host_memory)
    executor.submit(CopyPlan(1, Purpose.PLACE, tuple(_pages(1, 5, MIB).copies) * 4))
    assert executor.poll() == []
    executor.cancel(1)
    (completion,) = executor.poll()
    assert completion.outcome is Outcome.CANCELLED
    assert 0 < completion.moved_bytes < 20 * MIB
    assert executor.poll() == []


def test_fake_is_the_same_for_the_same_seed_and_reorders():
    def order(seed):
        executor = FakeExecutor(seed, delay_polls=(0, 9))
        for plan_id in range(50):
            executor.submit(_pages(plan_id, 1, 656))
        return list(_drain(executor))

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != sorted(order(1))


def test_fake_obeys_the_test(host_memory):
    host_memory[11][:] = POISON
    executor = FakeExecutor(seed=1, regions=host_memory, delay_polls=(0, 0))
    executor.submit(_pages(1, 1, 656))
    executor.hold(1)
    executor.hold_submissions()
    for plan_id in range(2, 6):
        executor.submit(_pages(plan_id, 1, 656, at=656 * plan_id))
    executor.draw_submissions()
    executor.submit(_pages(6, 1, 656, at=656 * 6))
    assert [c.plan_id for _ in range(5) for c in executor.poll()] == [6]
    executor.finish(3)
    executor.fail(2)
    executor.lose(4)
    executor.cancel(5)
    executor.cancel(4)
    ended = {c.plan_id: c for c in executor.poll()}
    assert {i: c.outcome.value for i, c in ended.items()} == {3: "DONE", 2: "FAILED", 5: "CANCELLED"}
    assert isinstance(ended[2].error, TransferFailed)
    assert np.array_equal(host_memory[11][656 * 3 : 656 * 4], host_memory[1][656 * 3 : 656 * 4])
    assert (host_memory[11][656 * 2 : 656 * 3] == POISON).all()
    assert executor.outstanding() == [1, 4]
    executor.close()
    assert {c.plan_id: c.outcome.value for c in executor.poll()} == {1: "CANCELLED", 4: "UNKNOWN_FATE"}


def test_fake_draws_failures_and_losses():
    executor = FakeExecutor(seed=5, fail_share=0.3, lose_share=0.3)
    for plan_id in range(200):
        executor.submit(_pages(plan_id, 1, 656))
    outcomes = [c.outcome for _ in range(10) for c in executor.poll()]
    lost = len(executor.outstanding())
    assert lost > 30
    assert outcomes.count(Outcome.FAILED) > 30
    assert outcomes.count(Outcome.DONE) == 200 - lost - outcomes.count(Outcome.FAILED)
