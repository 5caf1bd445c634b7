"""A stream of requests from recorded agent sessions, as closed-loop lanes replay them.

Each of N lanes runs one session at a time and takes the next when it ends. Gaps between requests are the
recorded ones, capped; service times are the recorded ones. Each play of a session has keys of its own: two
plays never share a prefix. Subagents' requests run inside their session, in recorded order.
"""

from __future__ import annotations

import heapq
import json
import lzma
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvmanager.errors import InvalidArgument

Int64Array = npt.NDArray[np.int64]

BLOCK_TOKENS: Final = 64
GAP_CAP_S: Final = 300.0
FIRST_START_SPREAD_S: Final = 20.0
NEXT_SESSION_AFTER_S: Final = 0.5
DEFAULT_SERVICE_S: Final = 6.0


@dataclass(frozen=True)
class Step:
    """One recorded request: block ids as (first, count) runs, the gap before it, its service time, why it stopped."""

    runs: tuple[tuple[int, int], ...]
    gap_s: float
    service_s: float
    stop_reason: str
    output_tokens: int = 1


@dataclass
class Session:
    """A recorded session. `nodes`: for each step, the prefix-tree node of each block (made on first use)."""

    steps: tuple[Step, ...]
    nodes: list[Int64Array] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """One request of the stream. `nodes`: int64[blocks], equal numbers mean equal prefixes within one play."""

    start_s: float
    end_s: float
    play: int
    nodes: Int64Array
    stop_reason: str
    last: bool
    hints: bool = True

    @property
    def session_id(self) -> str:
        """What its engine calls its session; empty when the engine tells nothing of sessions."""
        return str(self.play) if self.hints else ""

    @property
    def tokens(self) -> int:
        """Whole blocks only, as recorded."""
        return len(self.nodes) * BLOCK_TOKENS

    def keys(self) -> bytes:
        """One 16-byte key a block: play and node. Chained by construction: a node names its whole prefix."""
        keys = np.empty((len(self.nodes), 2), "<u8")
        keys[:, 0] = self.play
        keys[:, 1] = self.nodes
        return keys.tobytes()


def load_sessions(path: Path, min_peak_tokens: int = 0) -> list[Session]:
    """Sessions of at least two requests with a prompt of `min_peak_tokens` somewhere; `.xz` or plain JSON lines.

    Raises InvalidArgument for a file in another form.
    """
    opener = lzma.open if path.suffix == ".xz" else open
    sessions = []
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                steps = tuple(_steps(json.loads(line)))
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidArgument(f"{path} line {number} is no recorded session: {error!r}") from error
            session = Session(steps)
            if len(steps) >= 2 and peak_tokens(session) >= min_peak_tokens:
                sessions.append(session)
    return sessions


def peak_tokens(session: Session) -> int:
    """Tokens of its longest prompt."""
    return BLOCK_TOKENS * max((sum(count for _, count in step.runs) for step in session.steps), default=0)


def _steps(record: dict[str, Any]) -> Iterator[Step]:
    if record["block_size"] != BLOCK_TOKENS:
        raise ValueError(f"blocks of {record['block_size']} tokens; {BLOCK_TOKENS} are read")
    for request in record["requests"]:
        for entry in request["requests"] if request["type"] == "subagent" else [request]:
            runs = tuple((int(first), int(count)) for first, count in entry.get("hash_runs") or ())
            if runs:
                yield Step(
                    runs,
                    float(entry.get("think_time") or 0.0),
                    float(entry.get("api_time") or DEFAULT_SERVICE_S),
                    str(entry.get("stop") or "?"),
                    max(int(entry.get("out") or 1), 1),
                )


def number_nodes(session: Session) -> None:
    """Numbers the prefixes of a session: equal numbers, equal blocks up to there."""
    children: dict[tuple[int, int], int] = {}
    before, known = np.empty(0, np.int64), np.empty(0, np.int64)
    for step in session.steps:
        blocks = np.concatenate([np.arange(first, first + count) for first, count in step.runs])
        # Most of a prompt is the one before it: only what follows the first difference is looked up.
        shortest = min(len(blocks), len(before))
        differs = np.flatnonzero(blocks[:shortest] != before[:shortest])
        kept = int(differs[0]) if len(differs) else shortest
        node = int(known[kept - 1]) if kept else 0
        path = []
        for block in blocks[kept:].tolist():
            node = children.setdefault((node, block), len(children) + 1)
            path.append(node)
        before, known = blocks, np.concatenate((known[:kept], np.asarray(path, np.int64)))
        session.nodes.append(known)


def stream(sessions: list[Session], lanes: int, requests: int, seed: int) -> Iterator[Request]:
    """`requests` requests in order of their start.

    The first session of a lane starts somewhere inside, at a moment drawn uniformly over its length and up to
    20 s into the replay; later ones start at their beginning.
    """
    if not sessions or lanes < 1:
        raise InvalidArgument(f"{len(sessions)} sessions on {lanes} lanes: at least one of each is needed")
    rng = random.Random(seed)
    order = list(range(len(sessions)))
    rng.shuffle(order)
    waiting: list[tuple[float, int, int, int]] = []  # start, lane, play, step
    plays: list[Session] = []

    def take_next() -> Session:
        session = sessions[order[len(plays) % len(order)]]
        if not session.nodes:
            number_nodes(session)
        plays.append(session)
        return session

    for lane in range(lanes):
        session = take_next()
        first = _step_at(session, rng.random())
        heapq.heappush(waiting, (rng.random() * FIRST_START_SPREAD_S, lane, len(plays) - 1, first))
    for _ in range(requests):
        start, lane, play, number = heapq.heappop(waiting)
        session = plays[play]
        step = session.steps[number]
        end = start + step.service_s
        last = number + 1 == len(session.steps)
        yield Request(start, end, play, session.nodes[number], step.stop_reason, last)
        if last:
            take_next()
            heapq.heappush(waiting, (end + NEXT_SESSION_AFTER_S, lane, len(plays) - 1, 0))
        else:
            gap = min(session.steps[number + 1].gap_s, GAP_CAP_S)
            heapq.heappush(waiting, (end + gap, lane, play, number + 1))


def _step_at(session: Session, fraction: float) -> int:
    """The step that runs at a fraction of the session's length (gaps capped); never the last."""
    lengths = [min(step.gap_s, GAP_CAP_S) + step.service_s for step in session.steps]
    mark, passed = fraction * sum(lengths), 0.0
    for number, length in enumerate(lengths[:-1]):
        passed += length
        if passed > mark:
            return number
    return 0
