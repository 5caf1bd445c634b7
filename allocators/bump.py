"""The staging ring: a bounded buffer handed out in order and given back in any order.

A block lives from `take` to `give_back`. The ring advances over the oldest blocks once they are given
back, so the bytes that are out are the credits of the pull pipeline: no room means wait, never grow.
"""

from __future__ import annotations

from kvmanager.errors import InvalidArgument


class StagingRing:
    """Contiguous blocks out of `capacity_bytes` bytes, each starting at a multiple of `align_bytes`."""

    _blocks: dict[int, tuple[int, bool]]
    """offset -> (bytes, given back), oldest first; a dict keeps this order. They tile [tail, head) of the ring."""
    _head: int
    """Where the next block starts; 0 <= head <= capacity."""

    def __init__(self, capacity_bytes: int, align_bytes: int = 256) -> None:
        if align_bytes <= 0 or capacity_bytes <= 0 or capacity_bytes % align_bytes:
            raise InvalidArgument(
                f"staging ring of {capacity_bytes} bytes: must be a positive multiple of its alignment {align_bytes}"
            )
        self.capacity_bytes = capacity_bytes
        self.align_bytes = align_bytes
        self._blocks = {}
        self._head = 0

    def __len__(self) -> int:
        """Blocks that are out."""
        return sum(not given_back for _, given_back in self._blocks.values())

    @property
    def held_bytes(self) -> int:
        """Bytes that can't be taken now: blocks that are out, and what lies behind an older one."""
        return sum(size for size, _ in self._blocks.values())

    def take(self, size_bytes: int) -> int | None:
        """Offset of a new block of `size_bytes` (rounded up to the alignment), or None while there is no room.

        Raises InvalidArgument for a size that the ring can never hold.
        """
        size = -(-size_bytes // self.align_bytes) * self.align_bytes
        if not 0 < size <= self.capacity_bytes:
            raise InvalidArgument(f"{size_bytes} bytes from a staging ring of {self.capacity_bytes}: split the chunk")
        offset = self._place(size)
        if offset is None:
            return None
        self._blocks[offset] = (size, False)
        self._head = offset + size
        return offset

    def _place(self, size: int) -> int | None:
        """Where a block of `size` fits, leaving out the end of the ring when it is too short."""
        if not self._blocks:
            return 0
        tail = next(iter(self._blocks))
        if self._head <= tail:  # wrapped round, or exactly full
            return self._head if self._head + size <= tail else None
        if self._head + size <= self.capacity_bytes:
            return self._head
        return 0 if size <= tail else None

    def give_back(self, offset: int) -> None:
        """Ends the block at `offset`; its bytes can be taken again once all older blocks have ended."""
        size, given_back = self._blocks[offset]
        assert not given_back, f"staging block {offset} given back twice"
        self._blocks[offset] = (size, True)
        for oldest, (_, ended) in list(self._blocks.items()):
            if not ended:
                break
            del self._blocks[oldest]
