"""Row numbers of spans, many at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.ma  # np.unique loads it at its first call: 0.1 s in the middle of an event
import numpy.typing as npt

from kvmanager.allocators.fixed import as_range

__all__ = [
    "BoolArray",
    "RowArray",
    "RowList",
    "RowQueue",
    "all_alike",
    "all_true",
    "any_true",
    "as_range",
    "longer",
    "no_rows",
    "places",
    "shorter",
]  # fmt: skip

RowArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def all_true(holds: BoolArray) -> bool:
    """As `holds.all()`, without numpy's set-up of a reduction: several times faster on few entries."""
    return b"\0" not in holds.tobytes()


def all_alike(values: npt.NDArray[np.uint8]) -> bool:
    """Whether all bytes are the same; there is one."""
    text = values.tobytes()
    return text.count(text[:1]) == len(text)


def any_true(holds: BoolArray) -> bool:
    """As `holds.any()`, likewise."""
    return b"\1" in holds.tobytes()


def places(holds: BoolArray) -> RowArray:
    """Where a vector is true, ascending, int64; as `np.flatnonzero`, likewise."""
    return holds.nonzero()[0]


def shorter(at: RowArray | slice) -> RowArray | slice:
    """All but the last of the rows that `as_range` named."""
    return slice(at.start, at.stop - 1) if isinstance(at, slice) else at[:-1]


def longer(array: npt.NDArray[Any], rows: int, axis: int = 0) -> npt.NDArray[Any]:
    """The array with so many more entries along an axis, zeros, whose memory is touched only when they are used."""
    shape = list(array.shape)
    shape[axis] += rows
    wider = np.zeros(shape, array.dtype)
    wider[(*(slice(None),) * axis, slice(array.shape[axis]))] = array
    return wider


def no_rows() -> RowArray:
    """An empty array."""
    return np.empty(0, np.int64)


_EMPTY = no_rows()


class RowList:
    """A list of rows kept as an array, int64: appended to at the end, and read many at once."""

    def __init__(self, rows: Sequence[int] | RowArray = ()) -> None:
        self._rows: RowArray = np.array(rows, np.int64) if len(rows) else _EMPTY
        self._count = len(self._rows)

    @property
    def array(self) -> RowArray:
        """All rows. A view: not to be kept over a change."""
        return self._rows[: self._count]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.array, dtype=dtype)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> RowArray: ...
    def __getitem__(self, at: int | slice) -> int | RowArray:
        if isinstance(at, slice):
            return self._rows[: self._count][at].copy()
        return self._rows[: self._count].item(at)

    @property
    def last(self) -> int:
        """The last row; there is one."""
        return self._rows.item(self._count - 1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __reversed__(self) -> Iterator[int]:
        return iter(self.array[::-1].tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowList | list | np.ndarray):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RowList({list(self)})"

    def append(self, row: int) -> None:
        """One more row."""
        if self._count == 0 == len(self._rows):
            self._rows = np.array((row,), np.int64)
        elif self._count == len(self._rows):
            self._rows = np.concatenate((self._rows, np.zeros(1 + self._count // 2, np.int64)))
        self._rows[self._count] = row
        self._count += 1

    def extend(self, rows: RowArray) -> None:
        """More rows."""
        count = self._count + len(rows)
        if count > len(self._rows):
            self._rows = np.concatenate((self.array, rows, np.zeros(count // 2, np.int64)))
        elif len(rows):
            self._rows[self._count : count] = rows
        self._count = count

    def pop(self) -> int:
        """Takes the last row away."""
        self._count -= 1
        return self._rows.item(self._count)

    def shorten(self, count: int) -> None:
        """Keeps the first `count` rows."""
        assert 0 <= count <= self._count
        self._count = count


class RowQueue:
    """Rows that wait their turn, oldest first; many are looked at and taken at once."""

    def __init__(self) -> None:
        self._rows = RowList()
        self._taken = 0

    def __len__(self) -> int:
        return len(self._rows) - self._taken

    def __bool__(self) -> bool:
        return self._rows._count > self._taken

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows.array[self._taken :].tolist())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, RowQueue) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RowQueue({list(self)})"

    def append(self, row: int) -> None:
        """One more, behind all."""
        self._rows.append(row)

    def extend(self, rows: RowArray | Iterable[int]) -> None:
        """More, behind all."""
        self._rows.extend(rows if isinstance(rows, np.ndarray) else np.fromiter(rows, np.int64))

    def peek(self, first: int, count: int) -> RowArray:
        """Up to `count` rows from place `first` on; they stay."""
        return self._rows[self._taken + first : self._taken + first + count]

    def take(self, count: int) -> None:
        """The first `count` leave."""
        assert 0 <= count <= len(self)
        self._taken += count
        if 2 * self._taken > len(self._rows):
            self._rows, self._taken = RowList(self._rows[self._taken :]), 0
