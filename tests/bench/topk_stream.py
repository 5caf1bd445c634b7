"""Top-k lists of a decoding request: a model with drift, returns and recency, since random weights give noise.

Each token selects `topk` positions of its context:

- the last `recent` ones, always;
- the rest is a set that drifts: before each token every member is replaced with probability `drift`. A replacement
  comes, with probability `returns`, from positions that this request's set dropped within its last `memory`
  replacements (what was looked at comes back), otherwise from anywhere in the context (new matter).

A step verifies `rows` tokens, of which `accepted` stay: the next step goes on from there. So `drift` sets how fast
the lists change, and `returns` with `memory` how much of the change a cache of some size can catch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StreamModel:
    """Parameters; positions and rows are counts, `drift` and `returns` probabilities."""

    drift: float
    returns: float = 0.5
    memory: int = 16_384
    recent: int = 64
    topk: int = 2048
    rows: int = 4
    accepted: int = 3


class TopkStream:
    """One request at a context of `tokens`; the seed decides all."""

    def __init__(self, model: StreamModel, tokens: int, seed: int) -> None:
        self._model = model
        self._rng = np.random.default_rng(seed)
        self._tokens = tokens
        old = tokens - model.rows * 1_000  # drawn below what recency may reach
        self._old = old
        kept = model.topk - model.recent
        self._members = self._rng.choice(old, kept, replace=False)
        self._held = np.zeros(old, np.bool_)
        self._held[self._members] = True
        self._dropped = self._rng.choice(old, model.memory)
        self._oldest = 0

    def step(self) -> np.ndarray:
        """int32[rows, topk]; the next step continues after the accepted ones."""
        model = self._model
        rows = np.empty((model.rows, model.topk), np.int32)
        for row in range(model.rows):
            self._drift()
            rows[row, : len(self._members)] = self._members
            end = self._tokens + row
            rows[row, len(self._members) :] = np.arange(end - model.recent, end)
        self._tokens += model.accepted
        return rows

    def _drift(self) -> None:
        model, rng = self._model, self._rng
        out = np.flatnonzero(rng.random(len(self._members)) < model.drift)
        again = rng.random(len(out)) < model.returns
        fresh = np.where(again, rng.choice(self._dropped, len(out)), rng.integers(0, self._old, len(out)))
        _, first = np.unique(fresh, return_index=True)
        use = np.zeros(len(out), np.bool_)
        use[first] = True
        use &= ~self._held[fresh]  # a double draw changes nothing
        out, fresh = out[use], fresh[use]
        gone = self._members[out]
        self._held[gone], self._held[fresh] = False, True
        self._members[out] = fresh
        self._dropped[(self._oldest + np.arange(len(gone))) % model.memory] = gone
        self._oldest = (self._oldest + len(gone)) % model.memory


class ExactHits:
    """Lists with a given share of hits: of `union` distinct positions a step, that share was in the step before.

    With four rows each omits another fifth of the union, so that it takes all of them to make it; with one, the row
    is the union. New positions come from a permutation of the context, so they return only when all had their turn.
    """

    def __init__(self, hits: float, rows: int, topk: int, tokens: int, seed: int) -> None:
        assert rows in (1, 4)
        self._rng = np.random.default_rng(seed)
        self._rows = rows
        self.union = topk if rows == 1 else topk // 4 * 5
        self.misses = round(self.union * (1 - hits))
        self._order = self._rng.permutation(tokens).astype(np.int32)
        self._current = self._take(self.union)

    def _take(self, count: int) -> np.ndarray:
        taken, self._order = self._order[:count], np.roll(self._order, -count)
        return taken

    def step(self) -> np.ndarray:
        """int32[rows, topk]."""
        self._rng.shuffle(self._current)
        self._current = np.concatenate((self._current[self.misses :], self._take(self.misses)))
        shown = self._rng.permutation(self._current)
        if self._rows == 1:
            return shown[None]
        fifths = shown.reshape(5, -1)
        return np.stack([np.delete(fifths, row, axis=0).reshape(-1) for row in range(4)])
