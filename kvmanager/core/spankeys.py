"""The segment keys of spans, by row, in one matrix: many are stored and compared at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvmanager.core.rows import RowArray, as_range, longer

_WORD_BYTES = 8


class SpanKeys:
    """One byte string a row, read and written like a list's; as wide as the longest that was ever stored."""

    def __init__(self) -> None:
        self._text = np.zeros((0, 0), np.uint8)
        self._lengths = np.zeros(0, np.int32)

    def __len__(self) -> int:
        return len(self._lengths)

    def __repr__(self) -> str:
        return f"SpanKeys({[self[row] for row in range(len(self))]})"

    def grow(self, rows: int) -> None:
        """More rows, empty."""
        self._lengths = longer(self._lengths, rows)
        self._text = longer(self._text, rows)

    def __getitem__(self, row: int) -> bytes:
        return self._text[row, : self._lengths[row]].tobytes()

    def texts(self, rows: RowArray) -> list[bytes]:
        """`self[row]` of many rows."""
        width = self._text.shape[1]
        text = self._text[rows].tobytes()
        ends = self._lengths[rows].tolist()
        return [text[place * width : place * width + length] for place, length in enumerate(ends)]

    def __setitem__(self, row: int, text: bytes) -> None:
        self._widen(len(text))
        self._text[row, : len(text)] = np.frombuffer(text, np.uint8) if text else 0
        self._lengths[row] = len(text)

    @property
    def columns(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """All that is held, as it lies."""
        return self._text, self._lengths

    def clear(self, rows: RowArray | slice | int) -> None:
        """Empties rows."""
        self._lengths[rows] = 0

    def put(self, rows: RowArray, texts: npt.NDArray[np.uint8]) -> None:
        """Texts of one length, uint8[rows, bytes]."""
        self._widen(texts.shape[1])
        at = as_range(rows)
        self._text[at, : texts.shape[1]] = texts
        self._lengths[at] = texts.shape[1]

    def words(self, rows: RowArray, words: int) -> npt.NDArray[np.uint64]:
        """The first bytes of rows that are at least as long, uint64[rows, words]."""
        found: npt.NDArray[np.uint64] = self._text.view(np.uint64)[as_range(rows), :words]
        return found

    def lengths(self, rows: RowArray) -> npt.NDArray[np.int32]:
        """Bytes of each row, int32[rows]."""
        found: npt.NDArray[np.int32] = self._lengths[rows]
        return found

    def _widen(self, width: int) -> None:
        if width > self._text.shape[1]:
            wider = np.zeros((len(self._lengths), -(-width // _WORD_BYTES) * _WORD_BYTES), np.uint8)
            wider[:, : self._text.shape[1]] = self._text
            self._text = wider
