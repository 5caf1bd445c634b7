"""Who asks when: AgentX's rules, the published forms of traces, and what waits for room."""

from __future__ import annotations

import itertools
import json
import lzma
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvmanager.errors import InvalidArgument, PoolExhausted
from kvmanager.replay.arrivals import TOKEN_S
from kvmanager.replay.cli import SAMPLES, Asked, replay_file, replay_file_in_tiers, source_of
from kvmanager.replay.course import SETTLE_TRIES, Course, Served
from kvmanager.replay.lanes import RULES, Lanes, told
from kvmanager.replay.stream import GAP_CAP_S, Request, Session, Step

# --------------------------------------------------------------------------------------------- AgentX


def _sessions(count: int, steps: int, gap_s: float = 2.0) -> list[Session]:
    runs = [((1, 8 + 8 * n),) for n in range(steps)]
    return [Session(tuple(Step(run, gap_s, 5.0, "tool_use") for run in runs)) for _ in range(count)]


def test_agentx_warms_every_lane_up_and_then_all_go_on() -> None:
    lanes = 4
    requests = list(told(Lanes(_sessions(9, 20), lanes, 7, RULES["agentx"]), 200))
    warm = [r for r in requests if r.warm_up]
    assert len(warm) == lanes * 11, "the request before the point, and ten of one token"
    assert requests[: len(warm)] == warm, "nobody goes on before all are warm"
    warm_end_s = max(r.end_s for r in warm)
    for play in range(lanes):
        own = [r for r in requests if r.play == play]
        assert len({len(r.nodes) for r in own[:11]}) == 1, "the same prompt again"
        begun = len(own[0].nodes) // 8 - 1
        assert 0.25 * 20 - 1 <= begun < 0.75 * 20
        assert len(own[11].nodes) == len(own[0].nodes) + 8, "then the session goes on where the warm-up stood"
        assert own[11].start_s >= warm_end_s + 2.0
        assert own[-1].last
        assert not any(r.last for r in own[:-1])
    assert min(r.play for r in requests if len(r.nodes) == 8 and not r.warm_up) >= lanes, "later ones begin at turn 0"


def test_agentx_cuts_idle_time_and_gaps() -> None:
    requests = list(told(Lanes(_sessions(2, 12, gap_s=9_999.0), 1, 3, RULES["agentx"]), 30))
    for before, after in itertools.pairwise(requests[11:]):
        assert after.start_s - before.end_s <= 10.0 + 1e-6, "the whole system never rests for longer"
    tables = list(told(Lanes(_sessions(2, 12, gap_s=9_999.0), 1, 3, RULES["tables"]), 10))
    gaps = [after.start_s - before.end_s for before, after in itertools.pairwise(tables)]
    assert max(gaps) == pytest.approx(GAP_CAP_S)


# ---------------------------------------------------------------------------------------------- traces


def test_mooncakes_form(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1_100, "output_length": 10, "hash_ids": [0, 1, 2]},
        {"timestamp": 1_500, "input_length": 600, "output_length": 20, "hash_ids": [0, 7]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, again = told(source_of(Asked(path)), 3)
    assert [len(r.nodes) for r in (first, second)] == [1_100 // 64, 600 // 64]
    assert (first.nodes[:8] == second.nodes[:8]).all(), "one block of 512 tokens alike"
    assert first.nodes[8] != second.nodes[8]
    assert (second.start_s, second.end_s) == (1.5, pytest.approx(1.5 + 20 * TOKEN_S))
    assert first.keys()[: 8 * 16] == second.keys()[: 8 * 16]
    assert first.session_id == ""
    assert again.keys()[:16] != first.keys()[:16], "the second time around it is another prompt"
    assert again.start_s == 1.5


def test_azures_form(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,30,8\n2023-11-16 18:17:05.9799600,130,8\n"
    )
    first, second = told(source_of(Asked(path)), 2)
    assert (len(first.nodes), len(second.nodes)) == (4808 // 64, 2), "a prompt below one block leaves nothing to cache"
    assert second.start_s == pytest.approx(2.0)
    assert not set(first.nodes.tolist()) & set(second.nodes.tolist())


@pytest.mark.parametrize(("name", "most"), [("bundled:mooncake", 0.6), ("bundled:azure-code", 0.0)])
def test_the_samples_replay(name: str, most: float) -> None:
    assert name in SAMPLES
    report = replay_file(Asked(Path(name), requests=300), pool_tokens=1_000_000, policy="lru", ranks=1)
    assert report.prompt_tokens > 100_000
    assert report.prefix_hit_rate <= report.ceiling <= most
    assert (report.prefix_hit_rate > 0) is (most > 0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"timestamp": 0, "input_length": 9999, "output_length": 1, "hash_ids": [1]}\n'),
        ("b.csv", "TIMESTAMP,Tokens\nx,1\n"),
        ("c.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,100,1\n"),
        ("d.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n"),
        ("e.jsonl", "\x00\n"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InvalidArgument):
        source_of(Asked(path))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "x.jsonl.xz"
    broken.write_bytes(b"no such form")
    cut = tmp_path / "y.jsonl.xz"
    cut.write_bytes(lzma.compress(b"one long line " * 9_999)[:-60])
    for path in (tmp_path / "absent.jsonl", broken, cut):
        with pytest.raises(InvalidArgument, match="can't read"):
            source_of(Asked(path))
    with pytest.raises(InvalidArgument, match="no rules"):
        source_of(Asked(Path("generate:2"), rules="other"))


# -------------------------------------------------------------------------------------------- queueing


@dataclass
class Room:
    """So many tokens fit; a prompt that never will is refused for good, and so is what is asked for too often."""

    tokens: int
    log: list[tuple[str, int]] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    settled: int = 0
    leaks: int = 0

    def at(self, moment_s: float) -> None:
        self.now_s = moment_s

    def tick(self) -> None:
        pass

    def settle(self) -> None:
        self.settled += 1
        self.leaks -= 1

    def open(self, number: int, request: Request) -> Served:
        free = self.tokens - sum(self.held.values()) - 64 * max(self.leaks, 0)
        if request.tokens > free:
            retry_ns = 1 if request.tokens <= self.tokens else 0
            return Served(refusal=PoolExhausted("full", pool="p", retry_after_ns=retry_ns))
        self.held[number] = request.tokens
        self.log.append(("open", number))
        return Served()

    def close(self, number: int) -> None:
        del self.held[number]
        self.log.append(("close", number))

    def turn_ends(self, request: Request) -> None:
        self.log.append(("turn", request.play))


class Given:
    """Requests (start, seconds, blocks), one a play."""

    def __init__(self, *asked: tuple[float, float, int]) -> None:
        self._left = [
            Request(start, start + long, play, np.arange(blocks), "?", True)
            for play, (start, long, blocks) in enumerate(asked)
        ]
        self.ends: dict[int, float] = {}

    @property
    def next_s(self) -> float:
        return self._left[0].start_s if self._left else float("inf")

    def take(self) -> Request:
        return self._left.pop(0)

    def ended(self, request: Request, end_s: float) -> None:
        self.ends[request.play] = end_s

    def idle(self, now_s: float) -> None:
        pass


def _run(room: Room, source: Given, total: int, holds: float = 1.0) -> tuple[Course, list[Served]]:
    counted: list[Served] = []
    course = Course(room, source, holds, lambda _, served: counted.append(served), lambda: None)
    course.run(total)
    assert not room.held
    return course, counted


def test_what_finds_no_room_waits_in_order() -> None:
    room, source = Room(10 * 64), Given((0, 1, 1), (1, 10, 8), (2, 10, 8), (3, 1, 1))
    course, counted = _run(room, source, 4)
    opened = [number for what, number in room.log if what == "open"]
    assert opened == [1, 2, 3, 4], "the small one does not overtake"
    assert source.ends == {0: 1, 1: 11, 2: 21, 3: 12}, "answers come later by what they waited"
    assert course.queueing.waits_s == [9.0, 8.0]
    assert (course.queueing.most_waiting, course.queueing.most_open) == (2, 2)
    assert course.queueing.most_open_tokens == 9 * 64
    assert course.queueing.waited_s(0.5) == 9.0
    assert not any(served.refused for served in counted)


def test_what_never_fits_is_refused_at_once_and_holds_nobody_up() -> None:
    room, source = Room(10 * 64), Given((0, 10, 1), (1, 5, 11), (1, 5, 4))
    _, counted = _run(room, source, 3)
    assert [served.refused for served in counted] == [False, True, False]
    assert source.ends[2] == 6, "while the first still runs"
    assert room.settled == 0


def test_with_nothing_open_a_refusal_is_tried_again_but_not_for_ever() -> None:
    room, source = Room(10 * 64, leaks=3), Given((0, 1, 1), (5, 5, 9))
    _, counted = _run(room, source, 2)
    assert not counted[0].refused
    assert room.settled == 2, "until what had leaked was back"
    stuck, source = Room(10 * 64, leaks=99), Given((0, 1, 11), (5, 5, 9))
    _, counted = _run(stuck, source, 2)
    assert counted[0].refused
    assert stuck.settled == SETTLE_TRIES


def test_a_share_of_the_time() -> None:
    room, source = Room(10 * 64), Given((0, 10, 8), (6, 10, 8))
    course, _ = _run(room, source, 2, holds=0.5)
    assert course.queueing.most_open == 1
    assert room.log[:2] == [("open", 1), ("close", 1)]
    assert source.ends == {0: 10, 1: 16}


def test_held_requests_wait_in_virtual_time(tmp_path: Path) -> None:
    """Four prompts of six spans each on a pool of fourteen, no host pool: two run at a time."""
    steps = [{"type": "s", "think_time": 1, "api_time": 9, "stop": "?", "hash_runs": [[1, 48]]}] * 2
    path = tmp_path / "s.jsonl"
    path.write_text(4 * (json.dumps({"block_size": 64, "requests": steps}) + "\n"))
    asked = Asked(path, lanes=4, requests=16, holds=1.0)
    report = replay_file_in_tiers(
        asked, pool_tokens=14 * 512, host_tokens=0, inclusion="as-needed", policy="lru", ranks=8
    )  # fmt: skip
    assert (report.most_open, report.refused) == (2, 0)
    assert report.queued > 4
    assert report.queued_p50_s > 0
    assert report.high_water_bytes == {"replay/hbm": 14 * 512 * 54_728}
    assert report.host_hit_rate == 0
