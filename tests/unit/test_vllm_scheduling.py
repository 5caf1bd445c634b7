"""The scheduler's side of the vLLM connector, against a daemon whose answers come when the test says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvmanager.clients.callqueue import Answer
from kvmanager.clients.leases import Lease
from kvmanager.clients.vllm.bell import Bell
from kvmanager.clients.vllm.calls import FEW_SEGMENTS
from kvmanager.clients.vllm.orders import Ended, Orders, Report
from kvmanager.clients.vllm.scheduling import Scheduling
from kvmanager.errors import NotReady, PoolExhausted
from kvmanager.wire import unpack_u64

BLOCK = 16
KEYS = [bytes([n]) * 32 for n in range(64)]


class Calls:
    """Notes the calls that are made on it."""

    def __init__(self, said: list[tuple[object, ...]]) -> None:
        self._said = said

    def __getattr__(self, name: str):
        return lambda *args, **named: self._said.append((name, *args, *named.values()))


class FakeLine:
    """A line whose futures the test resolves."""

    def __init__(self) -> None:
        self.epoch, self.up, self.checksum_one_in, self.bell = 1, True, 0, Bell()
        self.asked: list[tuple[str, tuple[object, ...], Answer[object]]] = []
        self.told: list[tuple[object, ...]] = []
        self.turns: list[tuple[str, str]] = []
        self.here: list[bool] = []

    def ask(self, call):
        future: Answer[object] = Answer()
        if not self.up:
            future.set_exception(NotReady("away"))
            return future
        said: list[tuple[object, ...]] = []
        call(Calls(said))
        self.asked.append((str(said[0][0]), said[0][1:], future))
        return future

    def read(self, call, *, here):
        self.here.append(here)
        return self.ask(call)

    def hear(self): ...

    def tell(self, call):
        call(Calls(self.told))
        return Answer()

    def turn_ended(self, session_id, stop_reason):
        self.turns.append((session_id, stop_reason))

    def answer(self, name: str, value: object) -> tuple[object, ...]:
        """Resolves the oldest open call of that name; its arguments."""
        for place, (asked, args, future) in enumerate(self.asked):
            if asked == name:
                del self.asked[place]
                if isinstance(value, Exception):
                    future.set_exception(value)
                else:
                    future.set_result(value)
                return args
        raise AssertionError(f"nobody asked {name}: {[entry[0] for entry in self.asked]}")


@pytest.fixture
def line() -> Iterator[FakeLine]:
    made = FakeLine()
    yield made
    made.bell.close()


@pytest.fixture
def side(line: FakeLine) -> Scheduling:
    made = Scheduling(line, BLOCK, 1, hold_s=5.0)
    build(made, {})
    made.reported([Report(0, 1, 71)])
    return made


def build(side: Scheduling, scheduled: dict[str, tuple[int, list[int]]], preempted: tuple[str, ...] = ()) -> Orders:
    """scheduled: request -> (tokens computed after the step, block ids)."""
    return side.build({name: end for name, (end, _) in scheduled.items()}, lambda name: scheduled[name][1], preempted)


def ended(lease: int, value: int, copies: int, *, ok: bool = True, failed: tuple[int, ...] = ()) -> list[Report]:
    return [Report(0, 1, 71, [Ended(lease, value, copies, ok, list(failed), "why" if failed else "")])]


def save(side: Scheduling, orders: Orders, value: int) -> None:
    """The worker does what it is told to."""
    for order in orders.saves:
        side.reported(ended(order.lease_id, value, len(order.pages)))


def test_a_lookup_answers_none_until_the_daemon_has_answered(side: Scheduling, line: FakeLine) -> None:
    side.arrived("r", KEYS[:10])
    assert side.matched("r", 170, 0) is None
    assert side.matched("r", 170, 0) is None
    assert line.answer("lookup", 96) == (b"".join(KEYS[:10]), 160)
    assert side.matched("r", 170, 0) == 96
    assert side.matched("r", 170, 64) == 32, "what is held locally counts anew each time"
    assert side.matched("r", 170, 112) == 0
    assert not line.asked, "an answer serves as long as it is fresh"


def test_a_daemon_that_is_away_or_fails_is_a_miss(side: Scheduling, line: FakeLine) -> None:
    side.arrived("r", KEYS[:4])
    line.answer("lookup", NotReady("broke"))
    assert side.matched("r", 70, 0) == 0
    line.up = False
    side.arrived("s", KEYS[:4])
    assert side.matched("s", 70, 0) == 0


def test_a_load_is_leased_at_allocation_and_ordered_when_the_lease_is_there(side: Scheduling, line: FakeLine) -> None:
    side.arrived("r", KEYS[:10])
    line.answer("lookup", 160)
    assert side.matched("r", 170, 32) == 128
    assert not [name for name, *_ in line.asked if name == "acquire"], "a lookup takes no lease"
    side.allocated("r", list(range(100, 111)), 128)
    assert build(side, {}).loads == []
    lease, keys, name = line.answer("acquire", Lease(160, list(range(10))))
    assert (keys, name) == (b"".join(KEYS[:10]), "r")
    (order,) = build(side, {}).loads
    assert (order.lease_id, order.pages, order.block_ids) == (lease, list(range(2, 10)), list(range(102, 110)))
    assert order.lost_block_ids == []
    side.reported(ended(lease, 5, 8, failed=(3,)))
    name, told, fence, failed, failure = line.told[-1]
    assert (name, told, failed, failure) == ("done", lease, [3], "why")
    assert unpack_u64(fence.attach_ids, "").tolist() == [71]
    assert unpack_u64(fence.values, "").tolist() == [5]


@pytest.mark.parametrize("answer", [Lease(64, [0, 1, 2, 3]), Lease(0, []), NotReady("died")])
def test_what_the_lease_does_not_cover_is_lost(side: Scheduling, line: FakeLine, answer: object) -> None:
    side.arrived("r", KEYS[:10])
    line.answer("lookup", 160)
    side.matched("r", 170, 0)
    side.allocated("r", list(range(100, 111)), 160)
    line.answer("acquire", answer)
    (order,) = build(side, {}).loads
    covered = 4 if isinstance(answer, Lease) and answer.tokens else 0
    assert order.block_ids == list(range(100, 100 + covered))
    assert order.lost_block_ids == list(range(100 + covered, 110))


def test_an_abort_while_the_lease_is_asked_for_still_reports_the_request(side: Scheduling, line: FakeLine) -> None:
    side.arrived("r", KEYS[:4])
    line.answer("lookup", 64)
    side.matched("r", 70, 0)
    side.allocated("r", [1, 2, 3, 4, 5], 64)
    assert not side.finished("r", "abort")
    assert build(side, {}).loads == []
    lease, *_ = line.answer("acquire", Lease(64, [0, 1, 2, 3]))
    (order,) = build(side, {}).loads
    assert (order.request_id, order.pages, order.lease_id) == ("r", [], 0)
    assert line.told == [("done", lease, None, [], "")]


def test_saves_follow_what_is_complete_and_are_committed_once(side: Scheduling, line: FakeLine) -> None:
    """Chunked prefill of ten blocks, four at a time; the reservation is granted after the first step."""
    side.arrived("r", KEYS[:10])
    line.answer("lookup", 0)
    assert side.matched("r", 170, 0) == 0
    blocks = list(range(100, 111))
    side.allocated("r", blocks, 0)
    assert build(side, {"r": (64, blocks[:4])}).saves == []
    lease, wanted = line.answer("reserve_of", Lease(0, list(range(10))))
    assert (wanted.about.name, wanted.keys, wanted.token_ids) == ("r", b"".join(KEYS[:10]), b"")
    saved = []
    for end in (128, 170):
        orders = build(side, {"r": (end, blocks[: -(-end // BLOCK)])})
        for order in orders.saves:
            saved += zip(order.pages, order.block_ids, strict=True)
        save(side, orders, end)
    assert saved == [(n, 100 + n) for n in range(10)]
    assert [entry[:2] + entry[3:] for entry in line.told] == [("commit", lease, 160, {})]
    assert build(side, {"r": (171, blocks)}).saves == []
    assert not side.finished("r", "stop")


def test_what_another_engine_stored_meanwhile_is_not_written_again(side: Scheduling, line: FakeLine) -> None:
    side.arrived("r", KEYS[:6])
    line.answer("lookup", 0)
    side.matched("r", 100, 0)
    side.allocated("r", list(range(7)), 0)
    build(side, {"r": (100, list(range(7)))})
    line.answer("reserve_of", Lease(64, [40, 41]))
    (order,) = build(side, {"r": (101, list(range(7)))}).saves
    assert (order.pages, order.block_ids) == ([40, 41], [4, 5])


def test_the_blocks_of_a_finished_request_are_kept_for_its_save(side: Scheduling, line: FakeLine) -> None:
    side.arrived("r", KEYS[:4], session_id="s")
    line.answer("lookup", 0)
    side.matched("r", 70, 0)
    side.allocated("r", [1, 2, 3, 4, 5], 0)
    build(side, {"r": (70, [1, 2, 3, 4, 5])})
    assert side.finished("r", "stop"), "its reservation is not there yet"
    assert side.busy
    assert build(side, {}).released == []
    line.answer("reserve_of", Lease(0, [6, 7, 8, 9]))
    orders = build(side, {})
    assert orders.saves[0].block_ids == [1, 2, 3, 4]
    assert orders.saves[0].kept, "nobody writes them, so the engine need not wait for the copy"
    assert orders.released == ["r"], "workers save before they say that the blocks may go"
    save(side, orders, 9)
    build(side, {})
    assert line.told[-1][0] == "commit"
    assert line.turns == [("s", "stop")]
    assert not side.busy


def test_a_reservation_without_room_gives_up_and_the_blocks_go(side: Scheduling, line: FakeLine) -> None:
    side.arrived("r", KEYS[:4])
    line.answer("lookup", 0)
    side.matched("r", 70, 0)
    side.allocated("r", [1, 2, 3, 4, 5], 0)
    build(side, {"r": (70, [1, 2, 3, 4, 5])})
    assert side.finished("r", "stop")
    line.answer("reserve_of", PoolExhausted("full", pool="p", needed=4, free=0))
    assert build(side, {}).released == ["r"]


def test_blocks_lost_to_a_preemption_are_saved_when_they_are_computed_again(side: Scheduling, line: FakeLine) -> None:
    side.arrived("r", KEYS[:8])
    line.answer("lookup", 0)
    side.matched("r", 140, 0)
    side.allocated("r", list(range(10)), 0)
    build(side, {"r": (64, list(range(4)))})
    line.answer("reserve_of", Lease(0, list(range(8))))
    assert build(side, {}, preempted=("r",)).saves == [], "the blocks are gone"
    (order,) = build(side, {"r": (96, list(range(50, 56)))}).saves
    assert order.block_ids == list(range(50, 56))


def test_a_failed_copy_publishes_nothing(side: Scheduling, line: FakeLine) -> None:
    side.arrived("r", KEYS[:4])
    line.answer("lookup", 0)
    side.matched("r", 70, 0)
    side.allocated("r", [1, 2, 3, 4, 5], 0)
    build(side, {"r": (64, [1, 2, 3, 4])})
    lease, *_ = line.answer("reserve_of", Lease(0, [6, 7, 8, 9]))
    build(side, {"r": (70, [1, 2, 3, 4, 5])})
    side.reported(ended(int(str(lease)), 3, 4, ok=False))
    assert line.told[-1][:2] == ("abort", lease)


def test_a_daemon_that_started_anew_has_none_of_our_leases(side: Scheduling, line: FakeLine) -> None:
    side.arrived("r", KEYS[:4])
    line.answer("lookup", 0)
    side.matched("r", 70, 0)
    side.allocated("r", [1, 2, 3, 4, 5], 0)
    build(side, {"r": (64, [1, 2, 3, 4])})
    line.answer("reserve_of", Lease(0, [6, 7, 8, 9]))
    line.epoch = 2
    orders = build(side, {"r": (70, [1, 2, 3, 4, 5])})
    assert (orders.epoch, orders.saves) == (2, [])
    assert not [name for name, *_ in line.asked if name == "reserve_of"], "no rank is attached to the new one yet"
    side.reported([Report(0, 2, 90)])
    build(side, {"r": (71, [1, 2, 3, 4, 5])})
    assert [name for name, *_ in line.asked] == ["reserve_of"]


def test_what_was_saved_is_saved_again_where_the_daemon_started_anew(side: Scheduling, line: FakeLine) -> None:
    side.arrived("r", KEYS[:4])
    line.answer("lookup", 0)
    side.matched("r", 70, 0)
    side.allocated("r", [1, 2, 3, 4, 5], 0)
    build(side, {"r": (70, [1, 2, 3, 4, 5])})
    line.answer("reserve_of", Lease(0, [6, 7, 8, 9]))
    save(side, build(side, {"r": (71, [1, 2, 3, 4, 5])}), 3)
    build(side, {"r": (72, [1, 2, 3, 4, 5])})
    assert not line.asked
    line.epoch = 2
    build(side, {"r": (73, [1, 2, 3, 4, 5])})
    side.reported([Report(0, 2, 90)])
    build(side, {"r": (74, [1, 2, 3, 4, 5])})
    assert [name for name, *_ in line.asked] == ["reserve_of"]


def test_fences_never_go_back(side: Scheduling, line: FakeLine) -> None:
    """A copy that was reported early ends its lease late: behind a fence that covers what was said in between."""
    for name in ("r", "s"):
        side.arrived(name, KEYS[:4])
        line.answer("lookup", 64 if name == "s" else 0)
        side.matched(name, 70, 0)
    side.allocated("r", [1, 2, 3, 4, 5], 0)
    side.allocated("s", [6, 7, 8, 9, 10], 64)
    build(side, {"r": (32, [1, 2])})
    line.answer("reserve_of", Lease(0, [6, 7, 8, 9]))
    load, *_ = line.answer("acquire", Lease(64, [0, 1, 2, 3]))
    orders = build(side, {"r": (33, [1, 2, 3])})
    save(side, orders, 3)
    side.reported(ended(int(str(load)), 9, 4))
    assert not side.finished("r", "stop")
    build(side, {})
    values = [unpack_u64(entry[2].values, "").tolist() for entry in line.told]
    assert [entry[0] for entry in line.told] == ["done", "commit"]
    assert values == [[9], [9]]
    assert line.told[-1][3] == 32, "as much as was written"


def test_a_request_whose_load_failed_is_computed(side: Scheduling, line: FakeLine) -> None:
    """It still holds the blocks of the failed load: another one would wait for blocks that nobody gives back."""
    side.arrived("r", KEYS[:4])
    line.answer("lookup", 64)
    assert side.matched("r", 70, 0) == 64
    side.allocated("r", [1, 2, 3, 4, 5], 64)
    lease, *_ = line.answer("acquire", Lease(64, [0, 1, 2, 3]))
    build(side, {})
    side.reported(ended(int(str(lease)), 2, 4, ok=False))
    assert side.matched("r", 70, 0) == 0


def test_pages_that_the_daemon_wants_summed_are_committed_with_their_sums(side: Scheduling, line: FakeLine) -> None:
    """Every second page, by uid. What is loaded goes to the workers with what it must add up to."""
    line.checksum_one_in = 2
    side.arrived("r", KEYS[:4], token_ids=list(range(70)))
    line.answer("lookup", 0)
    side.matched("r", 70, 0)
    side.allocated("r", [1, 2, 3, 4, 5], 0)
    build(side, {"r": (64, [1, 2, 3, 4])})
    lease, wanted = line.answer("reserve_of", Lease(0, [6, 7, 8, 9], uids=[10, 11, 12, 13]))
    assert wanted.token_ids == b"".join(n.to_bytes(4, "little") for n in range(64))
    (order,) = build(side, {"r": (70, [1, 2, 3, 4, 5])}).saves
    assert order.summed == [6, 8]
    sums = {6: b"s" * 16, 8: b"t" * 16}
    side.reported([Report(0, 1, 71, [Ended(order.lease_id, 3, 4, True, sums=sums)])])
    assert line.told[-1][:2] + line.told[-1][3:] == ("commit", lease, 64, sums)
    side.arrived("again", KEYS[:4])
    line.answer("lookup", 64)
    side.matched("again", 70, 16)
    side.allocated("again", [11, 12, 13, 14, 15], 48)
    line.answer("acquire", Lease(64, [6, 7, 8, 9], sums=sums))
    (load,) = build(side, {}).loads
    assert (load.pages, load.sums) == ([7, 8, 9], {8: b"t" * 16})


def test_a_fence_covers_each_of_several_copies_that_one_report_tells_of(side: Scheduling, line: FakeLine) -> None:
    leases = {}
    for name, blocks in (("r", [1, 2, 3, 4, 5]), ("s", [6, 7, 8, 9, 10])):
        side.arrived(name, KEYS[:4])
        line.answer("lookup", 64)
        side.matched(name, 70, 0)
        side.allocated(name, blocks, 64)
        leases[name], *_ = line.answer("acquire", Lease(64, [0, 1, 2, 3]))
    build(side, {})
    both = [Ended(int(str(lease)), value, 4, True) for value, lease in zip((5, 6), leases.values(), strict=True)]
    side.reported([Report(0, 1, 71, both)])
    told = {entry[1]: unpack_u64(entry[2].values, "").tolist()[0] for entry in line.told if entry[0] == "done"}
    assert told[leases["r"]] >= 5
    assert told[leases["s"]] >= 6


def test_a_request_that_decodes_is_looked_at_only_when_it_has_filled_a_block(side: Scheduling, line: FakeLine) -> None:
    keys, blocks, asked = KEYS[:4], [1, 2, 3, 4, 5], list[str]()
    side.arrived("r", keys)
    line.answer("lookup", 0)
    side.matched("r", 70, 0)
    side.allocated("r", blocks, 0)
    build(side, {"r": (70, blocks)})
    line.answer("reserve_of", Lease(0, [6, 7, 8, 9]))
    save(side, build(side, {"r": (71, blocks)}), 3)

    def block_ids(request_id: str) -> list[int]:
        asked.append(request_id)
        return blocks

    for end in range(72, 79):
        assert side.build({"r": end}, block_ids).saves == []
    assert not asked
    keys.append(KEYS[4])  # its last token is known, and computed in the next step
    side.build({"r": 79}, block_ids)
    assert asked == ["r"]
    line.answer("reserve_of", Lease(64, [10]))  # in time for the step that fills it
    (order,) = side.build({"r": 80}, block_ids).saves
    assert (order.pages, order.block_ids, order.kept) == ([10], [5], False)
    save(side, Orders(saves=[order]), 4)
    assert [entry[0] for entry in line.told] == ["commit", "commit"]


def test_many_requests_that_decode_are_not_all_visited(side: Scheduling, line: FakeLine) -> None:
    """One whose reservation is not there yet is, each step, until its blocks are saved."""
    for name in ("r", "s"):
        side.arrived(name, KEYS[:1])
        line.answer("lookup", 0)
        side.matched(name, 20, 0)
        side.allocated(name, [1, 2], 0)
    both = {"r": (20, [1, 2]), "s": (20, [1, 2])}
    build(side, both)
    line.answer("reserve_of", Lease(0, [6]))
    save(side, build(side, both), 3)
    assert build(side, both).saves == []
    line.answer("reserve_of", Lease(0, [7]))
    (order,) = build(side, both).saves
    assert (order.pages, order.block_ids) == ([7], [1])


def test_only_a_hook_that_holds_up_nobody_asks_by_itself(side: Scheduling, line: FakeLine) -> None:
    side.arrived("alone", KEYS[:4])
    side.arrived("second", KEYS[4:8])
    side.arrived("third", KEYS[8:12])
    assert line.here == [True, False, False]


def test_many_segments_are_left_to_the_thread(side: Scheduling, line: FakeLine) -> None:
    side.arrived("long", KEYS[:1] * (FEW_SEGMENTS + 1))
    assert line.here == [False]
