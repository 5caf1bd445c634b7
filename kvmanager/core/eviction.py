"""Which span goes first. Policies are pure functions from what is known of the candidates to an order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvmanager.core.spans import SHARED

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Candidates:
    """Spans that may go, one entry each.

    last_used: ns (int64). first_token: depth in tokens (int64). owner: session number, NO_OWNER or SHARED (int32).
    dead: abandoned by its session (bool). rate: expected returns of its session per second of memory held
    (float64; 0 without a session). reloadable: the other tier keeps a copy when this one goes (bool).
    miss_s: seconds that each token costs if it is asked for once this has gone: to load it or to compute it (float64).
    """

    last_used: Int64Array
    first_token: Int64Array
    owner: npt.NDArray[np.int32]
    dead: npt.NDArray[np.bool_]
    rate: npt.NDArray[np.float64]
    reloadable: npt.NDArray[np.bool_]
    miss_s: npt.NDArray[np.float64]


class Policy(Protocol):
    """Ranks candidates. Must name every span after all candidates below it."""

    def __call__(self, candidates: Candidates) -> Int64Array:
        """A permutation of the candidates, first victim first."""
        ...


def leaf_first_lru(candidates: Candidates) -> Int64Array:
    """What can be loaded again first, then least recently used, deepest first among equals.

    A match touches a whole path, so a parent is never older than its child: this order names every child
    before its parent.
    """
    return np.lexsort((-candidates.first_token, candidates.last_used, ~candidates.reloadable))


def return_rate(candidates: Candidates) -> Int64Array:
    """What can be loaded again first; dead branches, then sessions by what their memory pays, then what is shared.

    Of a session the deepest spans go first (its path was touched as one); what several sessions share, or none
    claims, goes last and least recently used first. A parent is shared when its child is, and dead only with its
    child, so children come first.
    """
    tier, rate = _ranks(candidates)
    # Equal rates are common, since gaps are counted in bins: then the session that is idle longest gives first.
    return np.lexsort((-candidates.first_token, candidates.last_used, rate, tier, ~candidates.reloadable))


DEAD_SHARE = 1 / 30
"""Of what a session leaves behind when it goes on without it, the share that is asked for again."""


def return_cost(candidates: Candidates) -> Int64Array:
    """Least seconds lost first: the chance that a span is asked for, times what it costs to have it again.

    The chance is the session's return rate; a dead branch has a small part of it, and what is shared as much as the
    likeliest session. So a copy that can be loaded again goes before one that must be computed, unless the former is
    wanted so much more often that loading it would take longer.
    """
    tier, rate = _ranks(candidates)
    shared = tier == 2
    chance = np.where(candidates.dead, DEAD_SHARE * candidates.rate, np.where(shared, rate.max(initial=0.0), rate))
    return np.lexsort(
        (-candidates.first_token, candidates.last_used, chance * candidates.miss_s, shared & ~candidates.reloadable)
    )


def _ranks(candidates: Candidates) -> tuple[Int64Array, npt.NDArray[np.float64]]:
    """(0 dead, 1 claimed by one session, 2 shared or unclaimed; the rate of the claimed, else 0)."""
    claimed = (candidates.owner >= 0) & ~candidates.dead
    tier = np.where(candidates.dead, 0, np.where(claimed, 1, 2))
    return tier, np.where(claimed, candidates.rate, 0.0)


POLICIES: Final[Mapping[str, Policy]] = MappingProxyType(
    {"lru": leaf_first_lru, "return-rate": return_rate, "return-cost": return_cost}
)


def joint_owner(owner: npt.NDArray[np.int32], session: int) -> npt.NDArray[np.int32]:
    """Owners of spans after `session` used them too: its own, or SHARED with whoever had them."""
    mine = (owner == session) | (owner == -1)
    return np.where(mine, np.int32(session), np.int32(SHARED))
