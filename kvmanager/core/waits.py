"""How long until something happens, learned online: a scale from what is known, times a histogram of what is left.

A `LogScale` predicts the logarithm of a time from features, by recursive least squares. How real times spread around
the prediction is counted by a `WaitHistogram` of times divided by their predicted scale; it keeps what a regression
can't: two humps, long tails, and the share that never happens.

A histogram answers two questions about memory that waits for the event. `best_rate`: events per unit of time held,
under the best time to give up. `worth`: what the wait is worth when held memory has a price.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

SCALED_EDGES = tuple(2.0 ** (k / 2) for k in range(-16, 17))
"""Upper edges of the bins, half an octave each, 1/256 to 256 times the scale; one more bin is for longer, or never."""
MEMORY = 4096
"""About how many of the newest events count; older ones fade."""
LOG_PRICES = np.linspace(-16.0, 12.0, 225)
"""Natural logarithms of the prices (per scaled time) that `worth` is tabulated for."""
SCALE_MOST_LOG = 6.5
DAMPING = 0.7
"""Share of a prediction's distance from the prior that is believed; the histogram takes up the rest."""

_WIDTHS = np.diff(np.concatenate(([0.0], SCALED_EDGES)))
_PRICES = np.exp(LOG_PRICES)
_AFTER = np.triu(np.ones((len(_WIDTHS), len(_WIDTHS)), bool))


@dataclass
class WaitHistogram:
    """Counts of scaled times. Starts flat: one of each, so that an unseen time is possible.

    The tables follow from the counts alone and are made when asked for.
    """

    counts: Float64Array = field(default_factory=lambda: np.ones(len(SCALED_EDGES) + 1))
    _rates: Float64Array | None = field(default=None, compare=False)
    _worths: Float64Array | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """All but what follows from the rest."""
        return {"counts": self.counts}

    def __setstate__(self, stored: dict[str, Any]) -> None:
        vars(self).update(stored, _rates=None, _worths=None)

    def add(self, scaled: float) -> None:
        """It happened after `scaled` times its scale."""
        self._count(bisect_right(SCALED_EDGES, scaled))

    def add_never(self) -> None:
        """It did not happen."""
        self._count(len(SCALED_EDGES))

    def _count(self, place: int) -> None:
        self.counts[place] += 1
        if self.counts.sum() > MEMORY:
            self.counts = 1 + (self.counts - 1) / 2
        self._rates = self._worths = None

    def best_rate(self, scaled: float) -> float:
        """Events per scaled time held, under the best time to give up, once `scaled` has passed without one.

        0 once every known time has passed.
        """
        if self._rates is None:
            returns, held = self._until()
            # Row: the bin that has been reached; column: the bin to give up after.
            gained, cost = returns[1:] - returns[:-1, None], held[1:] - held[:-1, None]
            ratio = np.where(_AFTER, gained / np.where(_AFTER, cost, 1.0), 0.0)
            self._rates = np.append(ratio.max(axis=1), 0.0)
        return float(self._rates[bisect_right(SCALED_EDGES, scaled)])

    def worth(self, log_prices: Float64Array) -> Float64Array:
        """What the wait is worth when memory has a price, under the best time to give up; at least 0.

        Prices are logarithms, for holding through one scaled time; the event pays 1.
        """
        if self._worths is None:
            returns, held = self._until()
            total = self.counts.sum()
            self._worths = ((returns - _PRICES[:, None] * held) / total).max(axis=1)
        return np.interp(log_prices, LOG_PRICES, self._worths)

    def _until(self) -> tuple[Float64Array, Float64Array]:
        """(events, time held) up to each bin's beginning; both start at 0."""
        away = self.counts.sum() - np.concatenate(([0.0], np.cumsum(self.counts[:-2])))
        # Those still away at a bin's beginning are held through it; events come in its middle on average.
        held = np.cumsum((away - self.counts[:-1] / 2) * _WIDTHS)
        return np.concatenate(([0.0], np.cumsum(self.counts[:-1]))), np.concatenate(([0.0], held))


class LogScale:
    """A time's scale from `width` features, the first of which is 1: recursive least squares on its logarithm."""

    def __init__(self, width: int, prior_log_s: float) -> None:
        self._prior_log_s = prior_log_s
        self._weights = np.zeros(width)
        self._weights[0] = prior_log_s
        self._spread = np.eye(width)
        self._seen = 0

    def scale_s(self, features: Float64Array) -> float:
        """The predicted scale, between 1 s and `exp(SCALE_MOST_LOG)` s."""
        log_s = min(max(float(self._weights @ features), 0.0), SCALE_MOST_LOG)
        return float(np.exp(self._prior_log_s + DAMPING * (log_s - self._prior_log_s)))

    def learn(self, features: Float64Array, log_s: float) -> None:
        """A time whose logarithm was `log_s` came of these features."""
        self._seen += 1
        keep = 1.0 if self._seen < MEMORY else 1.0 - 1.0 / MEMORY
        direction = self._spread @ features
        gain = direction / (keep + float(features @ direction))
        self._weights = self._weights + gain * (log_s - float(self._weights @ features))
        spread = (self._spread - np.outer(gain, direction)) / keep
        self._spread = (spread + spread.T) / 2
