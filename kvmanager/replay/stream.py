"""Recorded agent sessions, and the requests of a replay (see `lanes` for who asks when).

Service times are the recorded ones. Subagents' requests run inside their session, in recorded order.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TextIO, cast

import numpy as np
import numpy.typing as npt

from kvmanager.errors import InvalidArgument

Int64Array = npt.NDArray[np.int64]

BLOCK_TOKENS: Final = 64
GAP_CAP_S: Final = 300.0
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
    """One request of the stream. `nodes`: int64[blocks], equal numbers mean equal prefixes within one play.

    warm_up: it is never counted.
    """

    start_s: float
    end_s: float
    play: int
    nodes: Int64Array
    stop_reason: str
    last: bool
    hints: bool = True
    warm_up: bool = False

    @property
    def session_id(self) -> str:
        """What its engine calls its session; empty when the engine tells nothing of sessions."""
        return str(self.play) if self.hints else ""

    @property
    def tokens(self) -> int:
        """Whole blocks only, as recorded."""
        return len(self.nodes) * BLOCK_TOKENS

    def later(self, seconds: float) -> Request:
        """The same, so much later."""
        return replace(self, start_s=self.start_s + seconds, end_s=self.end_s + seconds) if seconds else self

    def keys(self) -> bytes:
        """One 16-byte key a block: play and node. Chained by construction: a node names its whole prefix."""
        keys = np.empty((len(self.nodes), 2), "<u8")
        keys[:, 0] = self.play
        keys[:, 1] = self.nodes
        return keys.tobytes()


@contextmanager
def text_of(path: Path) -> Iterator[TextIO]:
    """A file's text, `.xz` unpacked. Raises InvalidArgument for one that can't be read."""
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as text:
            yield cast(TextIO, text)
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise InvalidArgument(f"can't read {path}: {error}") from error


def load_sessions(path: Path, min_peak_tokens: int = 0) -> list[Session]:
    """Sessions of at least two requests with a prompt of `min_peak_tokens` somewhere; `.xz` or plain JSON lines.

    Raises InvalidArgument for a file in another form.
    """
    sessions = []
    with text_of(path) as lines:
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
