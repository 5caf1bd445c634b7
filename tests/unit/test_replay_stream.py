"""The stream of a replay: lanes, starts, gaps, keys; and the bundled sessions."""

from __future__ import annotations

import itertools
import json
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import pytest

from kvmanager.errors import InvalidArgument
from kvmanager.replay.cli import BUNDLED
from kvmanager.replay.lanes import stream
from kvmanager.replay.stream import GAP_CAP_S, load_sessions


def _file(tmp_path: Path, *sessions: list[dict]) -> Path:
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps({"block_size": 64, "requests": s}) + "\n" for s in sessions))
    return path


def _step(runs: list[list[int]], gap: float = 1.0, service: float = 2.0, stop: str = "tool_use") -> dict:
    return {"type": "s", "hash_runs": runs, "think_time": gap, "api_time": service, "stop": stop}


def test_a_lane_plays_its_session_to_the_end_and_takes_the_next(tmp_path: Path) -> None:
    first = [_step([[1, 2]]), _step([[1, 3]], gap=9999.0), _step([[1, 1], [9, 1]])]
    sessions = load_sessions(_file(tmp_path, first, [_step([[1, 1]]), _step([[1, 2]])]))
    requests = list(stream(sessions, 1, 12, 7))
    starts = [r.start_s for r in requests]
    assert starts == sorted(starts)
    for before, after in itertools.pairwise(requests):
        same = before.play == after.play
        assert before.last is not same
        gap = after.start_s - before.end_s
        assert gap <= GAP_CAP_S + 1e-9
        assert same or gap == pytest.approx(0.5)
    assert len({r.play for r in requests}) > 2


def test_keys_agree_exactly_where_prefixes_do(tmp_path: Path) -> None:
    session = [_step([[1, 3]]), _step([[1, 2], [7, 2]]), _step([[2, 2]])]
    sessions = load_sessions(_file(tmp_path, session))
    requests = [r for r in stream(sessions, 1, 40, 1) if r.play == 1]
    a, b, c = (np.frombuffer(r.keys(), "S16") for r in requests)
    assert (a[:2] == b[:2]).all()
    assert a[2] != b[2]
    # The same block behind another prefix has another key; another play shares nothing.
    assert not set(c.tolist()) & set(a.tolist())
    other = next(r for r in stream(sessions, 1, 40, 1) if r.play == 2)
    assert not set(np.frombuffer(other.keys(), "S16").tolist()) & set(a.tolist())


def test_equal_seeds_give_equal_streams(tmp_path: Path) -> None:
    sessions = load_sessions(_file(tmp_path, *[[_step([[1, n]]), _step([[1, n + 1]])] for n in range(1, 9)]))

    def told(seed: int) -> list[tuple[float, int, int]]:
        return [(r.start_s, r.play, len(r.nodes)) for r in stream(sessions, 3, 30, seed)]

    assert told(5) == told(5)
    assert told(5) != told(6)


@pytest.mark.parametrize("line", ["[]", "{}", '{"block_size": 16, "requests": []}', "no json"])
def test_other_files_are_refused_with_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InvalidArgument, match="line 1"):
        load_sessions(path)


def test_a_stream_needs_sessions_and_lanes() -> None:
    with pytest.raises(InvalidArgument, match="0 sessions"):
        next(stream([], 1, 1, 1))


def test_the_bundled_sessions_are_the_recorded_ones() -> None:
    with as_file(files("kvmanager.replay") / BUNDLED) as path:
        sessions = load_sessions(path)
    assert len(sessions) == 710
    prompts = [sum(count for _, count in step.runs) * 64 for s in sessions for step in s.steps]
    assert max(prompts) == pytest.approx(894_371, abs=64)
    assert len(prompts) > 48_000
