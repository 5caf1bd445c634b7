"""Which rows of one share group lie in the hot buffer: an exact map with least-recently-used eviction."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvmanager.geometry import Int64Array

EMPTY: Final = -1


class HotRows:
    """`rows` hot rows, each empty or holding the row set of one key (`page uid * page rows + slot`, >= 0).

    A key names content, not a place: it stays right when its page moves between tiers, and a key that is no
    longer asked for is merely the next victim.
    """

    def __init__(self, rows: int) -> None:
        self._keys = np.full(rows, EMPTY, dtype=np.int64)
        self._last_use = np.zeros(rows, dtype=np.int64)  # number of the `place` call; 0 for empty rows
        self._now = 0

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, keys: Int64Array) -> Int64Array:
        """The hot row of each key, EMPTY where there is none."""
        if len(self._keys) == 0 or len(keys) == 0:
            return np.full(len(keys), EMPTY, dtype=np.int64)
        order = np.argsort(self._keys, kind="stable")
        at = np.minimum(np.searchsorted(self._keys[order], keys), len(order) - 1)
        rows = order[at].astype(np.int64)
        return np.where(self._keys[rows] == keys, rows, EMPTY)

    def place(self, keys: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Gives each of the distinct keys a hot row: (row, missed), where missed rows must be filled by the caller.

        Rows least recently placed go first, ties by row number; no row of this call is evicted for another.
        """
        assert len(keys) <= len(self._keys), "the caller checks that the keys fit"
        self._now += 1
        rows = self.find(keys)
        missed = rows == EMPTY
        self._last_use[rows[~missed]] = self._now
        victims = np.argsort(self._last_use, kind="stable")[: int(missed.sum())]
        assert not (self._last_use[victims] == self._now).any()
        rows[missed] = victims
        self._keys[victims] = keys[missed]
        self._last_use[victims] = self._now
        return rows, missed

    def forget(self, keys: Int64Array) -> None:
        """Empties the rows of these keys, because their content was written anew."""
        rows = self.find(keys)
        rows = rows[rows != EMPTY]
        self._keys[rows] = EMPTY
        self._last_use[rows] = 0
