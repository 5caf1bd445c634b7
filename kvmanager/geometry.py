"""Where a token lies: rank, page and slot.

Two views of one formula:

* a **token order** `(M, I)` places the `M * B` tokens of one span into `M` pages of `B` slots,
  round-robin in runs of `I` tokens;
* a **shard geometry** `(N, B, I)` is a pool of `N` ranks in which one page index names the same
  page on every rank. Page `k` of a span is page index `k // N` (of the span's list) on rank `k % N`.

A DCP8 prefill group stores spans of order (8, 1) on 8 ranks: one page index a span. A decode rank
that keeps this order stores the same span as 8 page indexes on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmanager.errors import InvalidArgument

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """Round-robin placement of a span's tokens over `segments` pages, `interleave` tokens at a time."""

    segments: int
    interleave: int

    def __post_init__(self) -> None:
        if self.segments < 1 or self.interleave < 1:
            raise InvalidArgument(f"token order ({self.segments}, {self.interleave}): both must be at least 1")

    def check_page_rows(self, page_rows: int) -> None:
        """Refuses an interleave that does not divide the page."""
        if page_rows % self.interleave:
            raise InvalidArgument(f"interleave {self.interleave} does not divide a page of {page_rows} rows")

    def place(self, offsets: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(page of the span, slot of the page) for token offsets inside one span, `0 <= offset < M * B`."""
        runs = offsets // self.interleave
        page = runs % self.segments
        slot = (runs // self.segments) * self.interleave + offsets % self.interleave
        return page, slot

    def rows_in_page(self, tokens: int, page: int) -> int:
        """How many of the first `tokens` tokens of a span lie in its page `page`."""
        stride = self.interleave * self.segments
        whole, rest = divmod(tokens, stride)
        return whole * self.interleave + min(max(rest - page * self.interleave, 0), self.interleave)


SEQUENTIAL = TokenOrder(1, 1)


@dataclass(frozen=True, slots=True)
class ShardGeometry:
    """`ranks` pools in step, pages of `page_rows` token rows, `interleave` tokens a turn."""

    ranks: int
    page_rows: int
    interleave: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.page_rows < 1:
            raise InvalidArgument(f"geometry of {self.ranks} ranks x {self.page_rows} rows: both must be at least 1")
        self.order.check_page_rows(self.page_rows)

    @property
    def order(self) -> TokenOrder:
        """The order of the spans that fill one page index on all ranks."""
        return TokenOrder(self.ranks, self.interleave)

    @property
    def span_tokens(self) -> int:
        """Tokens held by one page index over all ranks."""
        return self.ranks * self.page_rows

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(span, rank, slot) of absolute token positions."""
        span, offset = np.divmod(positions, self.span_tokens)
        rank, slot = self.order.place(offset)
        return span, rank, slot

    def spans(self, tokens: int) -> int:
        """Page indexes that `tokens` tokens take."""
        return -(-tokens // self.span_tokens)

    def rows_on_rank(self, tokens: int, rank: int) -> int:
        """Rows of a sequence of `tokens` tokens that lie on `rank`."""
        whole, rest = divmod(tokens, self.span_tokens)
        return whole * self.page_rows + self.order.rows_in_page(rest, rank)

    def longest_shard(self, tokens: int) -> int:
        """Rows of such a sequence on the rank that has most of them."""
        return max(self.rows_on_rank(tokens, rank) for rank in range(self.ranks))

    def workspace_rows(self, tokens: int) -> int:
        """Rows of two full copies of one layer whose shards are all as long as the longest.

        That is what each rank's workspace holds: one copy to compute from, one to gather the next layer in.
        """
        return 2 * self.ranks * self.longest_shard(tokens)
