"""Which span goes first. Policies are pure functions from what is known of the candidates to ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvmanager.core.spans import SHARED

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Kinds:
    """Kinds of spans that may go, one entry each: those of one owner that are alike in all that is named here.

    There are some hundred of them where spans are ten thousands. owner: session number, NO_OWNER or SHARED (int32).
    dead: abandoned by its session (bool). rate: expected returns of its session per second of memory held
    (float64; 0 without a session). reloadable: the other tier keeps a copy when this one goes (bool).
    miss_s: seconds that each token costs if it is asked for once this has gone: to load it or to compute it (float64).
    """

    owner: npt.NDArray[np.int32]
    dead: npt.NDArray[np.bool_]
    rate: npt.NDArray[np.float64]
    reloadable: npt.NDArray[np.bool_]
    miss_s: npt.NDArray[np.float64]


class Policy(Protocol):
    """Ranks kinds of spans. Among spans of one rank the least recently used go first, the deepest first among equals.

    A match touches a whole path, so a parent is never older than its child; who goes on in spite of a policy's rank
    waits for those below it.
    """

    def __call__(self, kinds: Kinds) -> Int64Array:
        """A rank for each, from 0 on: the lowest goes first."""
        ...


def ranks(*keys: npt.NDArray[Any]) -> Int64Array:
    """Equal ranks for equal keys, without gaps from 0 on; the last key counts most, as for `np.lexsort`."""
    order = np.lexsort(keys)
    differs = np.zeros(len(order), bool)
    for key in keys:
        ordered = key[order]
        differs[1:] |= ordered[1:] != ordered[:-1]
    ranked = np.empty(len(order), np.int64)
    ranked[order] = np.cumsum(differs)
    return ranked


def leaf_first_lru(kinds: Kinds) -> Int64Array:
    """What can be loaded again first; all else is alike."""
    return ranks(~kinds.reloadable)


def return_rate(kinds: Kinds) -> Int64Array:
    """What can be loaded again first; dead branches, then sessions by what their memory pays, then what is shared.

    Of a session the deepest spans go first (its path was touched as one); what several sessions share, or none
    claims, goes last and least recently used first. A parent is shared when its child is, and dead only with its
    child, so children come first. Equal rates are common, since gaps are counted in bins: then the session that is
    idle longest gives first.
    """
    tier, rate = _ranks(kinds)
    return ranks(rate, tier, ~kinds.reloadable)


DEAD_SHARE = 1 / 30
"""Of what a session leaves behind when it goes on without it, the share that is asked for again."""


def return_cost(kinds: Kinds) -> Int64Array:
    """Least seconds lost first: the chance that a span is asked for, times what it costs to have it again.

    The chance is the session's return rate; a dead branch has a small part of it, and what is shared as much as the
    likeliest session. So a copy that can be loaded again goes before one that must be computed, unless the former is
    wanted so much more often that loading it would take longer.
    """
    tier, rate = _ranks(kinds)
    shared = tier == 2
    chance = np.where(kinds.dead, DEAD_SHARE * kinds.rate, np.where(shared, rate.max(initial=0.0), rate))
    return ranks(chance * kinds.miss_s, shared & ~kinds.reloadable)


def _ranks(kinds: Kinds) -> tuple[Int64Array, npt.NDArray[np.float64]]:
    """(0 dead, 1 claimed by one session, 2 shared or unclaimed; the rate of the claimed, else 0)."""
    claimed = (kinds.owner >= 0) & ~kinds.dead
    tier = np.where(kinds.dead, 0, np.where(claimed, 1, 2))
    return tier, np.where(claimed, kinds.rate, 0.0)


POLICIES: Final[Mapping[str, Policy]] = MappingProxyType(
    {"lru": leaf_first_lru, "return-rate": return_rate, "return-cost": return_cost}
)


def joint_owner(owner: npt.NDArray[np.int32], session: int) -> npt.NDArray[np.int32]:
    """Owners of spans after `session` used them too: its own, or SHARED with whoever had them."""
    mine = (owner == session) | (owner == -1)
    return np.where(mine, np.int32(session), np.int32(SHARED))
