"""Where the tokens of one request lie: the daemon's tables, and a formula of our own."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvmanager.clients.tables import NO_PAGE, PageColumn, decode_residency, decode_spans
from kvmanager.protos import kvmanager_pb2 as pb

Int64Array = npt.NDArray[np.int64]


class Places:
    """Spans of one request whose tokens are dealt out over `shards` ranks (1 where every rank holds all)."""

    def __init__(self, shards: int, page_rows: int) -> None:
        self._shards = shards
        self._rows = page_rows
        self.spans: list[tuple[int, int, int, int]] = []
        """(first token, segments, interleave, first ordinal) of each."""
        self.columns: dict[str, PageColumn] = {}
        self.uids: Int64Array = np.empty(0, np.int64)

    @property
    def tokens(self) -> int:
        """Tokens that have a place."""
        return self.spans[-1][0] + self.spans[-1][1] * self._rows if self.spans else 0

    def append(self, runs: Iterable[pb.SpanRun]) -> None:
        """Adds runs; what lay from their first span on is forgotten."""
        for message in runs:
            run = decode_spans(message)
            self.truncate(run.first_span)
            ordinal = len(self.uids)
            arrays = (run.first_tokens, run.segments, run.interleave)
            for first, segments, interleave in zip(*(a.tolist() for a in arrays), strict=True):
                self.spans.append((first, segments, interleave, ordinal))
                ordinal += segments // self._shards
            self.uids = np.concatenate([self.uids, run.uids])
            for name, column in run.pages.items():
                old = self.columns.get(name, PageColumn(np.empty(0, np.int64), np.empty(0, np.int64)))
                self.columns[name] = PageColumn(
                    np.concatenate([old.device, column.device]), np.concatenate([old.host, column.host])
                )

    def truncate(self, spans: int) -> None:
        """Forgets all but the first `spans`."""
        if spans < len(self.spans):
            pages = self.spans[spans][3]
            del self.spans[spans:]
            self.uids = self.uids[:pages]
            for name, column in self.columns.items():
                self.columns[name] = PageColumn(column.device[:pages], column.host[:pages])

    def grow(self, growth: pb.Growth) -> None:
        """What a row of a step gained or lost."""
        self.truncate(growth.spans[0].first_span if growth.spans else growth.spans_kept)
        self.append(growth.spans)

    def move(self, message: pb.Residency) -> None:
        """Pages that lie elsewhere now."""
        rows = decode_residency(message)
        column = self.columns[rows.page_class]
        column.device[rows.ordinals] = rows.column.device
        column.host[rows.ordinals] = rows.column.host

    def ordinals_within(self, tokens: int) -> int:
        """Pages of the spans that lie wholly in the first `tokens`."""
        pages = 0
        for first, segments, _, ordinal in self.spans:
            if first + segments * self._rows > tokens:
                break
            pages = ordinal + segments // self._shards
        return pages

    def find(self, positions: Int64Array, shard: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Of the positions that lie on a shard: (those positions, ordinal, slot), [n] each."""
        if not self.spans:
            nothing = np.empty(0, np.int64)
            return nothing, nothing, nothing
        table = np.array(self.spans)
        first, segments, interleave, ordinal = table[np.searchsorted(table[:, 0], positions, "right") - 1].T
        offset = positions - first
        run = offset // interleave
        page = run % segments
        slot = run // segments * interleave + offset % interleave
        ours = page % self._shards == shard
        return positions[ours], (ordinal + page // self._shards)[ours], slot[ours]

    def pages(self, page_class: str, ordinals: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(device, host) pages, `NO_PAGE` for none."""
        column = self.columns[page_class]
        return column.device[ordinals], column.host[ordinals]


__all__ = ["NO_PAGE", "Places"]
