"""Where the tokens of one request lie: the daemon's tables, and a formula of our own."""

from __future__ import annotations

import numpy as np

from kvmanager.clients.tables import NO_PAGE, PageColumn, decode_residency, decode_spans
from kvmanager.protos import kvmanager_pb2 as pb


class Places:
    """Spans of one request on a group of `ranks` ranks."""

    def __init__(self, ranks: int, page_rows: int) -> None:
        self._ranks = ranks
        self._rows = page_rows
        self._spans: list[tuple[int, int, int, int]] = []  # first token, segments, interleave, first ordinal
        self._columns: dict[str, PageColumn] = {}

    @property
    def tokens(self) -> int:
        """Tokens that have a place."""
        return self._spans[-1][0] + self._spans[-1][1] * self._rows if self._spans else 0

    def append(self, runs: object) -> None:
        """Adds SpanRuns; what lay from their first span on is forgotten."""
        for message in runs:  # type: ignore[attr-defined]
            run = decode_spans(message)
            self.truncate(run.first_span)
            ordinal = len(self._any.device) if self._columns else 0
            arrays = (run.first_tokens, run.segments, run.interleave)
            for first, segments, interleave in zip(*(a.tolist() for a in arrays), strict=True):
                self._spans.append((first, segments, interleave, ordinal))
                ordinal += segments // self._ranks
            for name, column in run.pages.items():
                old = self._columns.get(name, PageColumn(np.empty(0, np.int64), np.empty(0, np.int64)))
                self._columns[name] = PageColumn(
                    np.concatenate([old.device, column.device]), np.concatenate([old.host, column.host])
                )

    def truncate(self, spans: int) -> None:
        """Forgets all but the first `spans`."""
        if spans < len(self._spans):
            pages = self._spans[spans][3]
            del self._spans[spans:]
            for name, column in self._columns.items():
                self._columns[name] = PageColumn(column.device[:pages], column.host[:pages])

    def move(self, message: pb.Residency) -> None:
        """Pages that lie elsewhere now."""
        rows = decode_residency(message)
        column = self._columns[rows.page_class]
        column.device[rows.ordinals] = rows.column.device
        column.host[rows.ordinals] = rows.column.host

    @property
    def _any(self) -> PageColumn:
        return next(iter(self._columns.values()))

    def find(self, positions: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the positions that lie on a rank: (those positions, ordinal, slot), [n] each."""
        starts = np.array([span[0] for span in self._spans])
        table = np.array(self._spans)[np.searchsorted(starts, positions, "right") - 1]
        first, segments, interleave, ordinal = table.T
        offset = positions - first
        run = offset // interleave
        page = run % segments
        slot = run // segments * interleave + offset % interleave
        ours = page % self._ranks == rank
        return positions[ours], (ordinal + page // self._ranks)[ours], slot[ours]

    def pages(self, page_class: str, ordinals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(device, host) pages, `NO_PAGE` for none."""
        column = self._columns[page_class]
        return column.device[ordinals], column.host[ordinals]


__all__ = ["NO_PAGE", "Places"]
