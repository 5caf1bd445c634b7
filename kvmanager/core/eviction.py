"""Which span goes first. Policies are pure functions from what is known of the candidates to an order."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class Policy(Protocol):
    """Ranks candidates: returns a permutation, first victim first."""

    def __call__(self, last_used: Int64Array, first_token: Int64Array) -> Int64Array:
        """`last_used` in ns, `first_token` as a measure of depth; both one entry a candidate."""
        ...


def leaf_first_lru(last_used: Int64Array, first_token: Int64Array) -> Int64Array:
    """Least recently used first, deepest first among equals.

    A match touches a whole path, so a parent is never older than its child: this order names every child
    before its parent.
    """
    return np.lexsort((-first_token, last_used))
