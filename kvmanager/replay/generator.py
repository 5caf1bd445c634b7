"""Sessions made up by dice, with the distributions of recorded ones: as many as wanted, and the same for the same seed.

The parameters were fitted to 710 recorded Claude Code sessions; log-normal where nothing else is said. Subagents are
not made up, and service times are a constant: whoever replays says how fast a server is.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

from kvmanager.errors import InvalidArgument
from kvmanager.replay.stream import BLOCK_TOKENS, DEFAULT_SERVICE_S, Session, Step


@dataclass(frozen=True)
class LogNormal:
    """`median` and the standard deviation of the logarithm."""

    median: float
    sigma: float

    def draw(self, dice: random.Random) -> float:
        """One value."""
        return self.at(dice.gauss(0.0, 1.0))

    def at(self, deviation: float) -> float:
        """The value so many standard deviations from the median."""
        return self.median * math.exp(self.sigma * deviation)


REQUESTS: Final = LogNormal(45, 1.2)
FRESH_PROMPT, RESUMED_PROMPT = LogNormal(19_000, 0.24), LogNormal(114_000, 0.75)
FRESH_SHARE: Final = 0.55
LONGEST_PROMPT: Final = 850_000
APPEND: Final = LogNormal(math.exp(6.65), 1.13)
JUMP_CHANCE: Final = 0.01
JUMP_TOKENS: Final = (16_000, 235_000)
"""Of turns that append far more, evenly on a logarithmic scale."""
OUTPUT: Final = LogNormal(math.exp(5.57), 0.89)
TOOL_GAP, USER_GAP = LogNormal(math.exp(2.54), 1.28), LogNormal(math.exp(4.91), 1.74)
USER_SHARE: Final = 0.13
GAP_MEMORY: Final = 0.33
"""Correlation of a gap's deviation with the one before it."""
RESET_CHANCE: Final = 0.019
RESET_SHARE: Final = 0.6
"""A reset's prompt, as a share of the one before it; it keeps tools and system alone."""
SYSTEM_TOKENS: Final = 14_300


def generate(count: int, seed: int) -> list[Session]:
    """`count` sessions. Raises InvalidArgument for less than one."""
    if count < 1:
        raise InvalidArgument(f"{count} generated sessions: at least one is needed")
    dice = random.Random(seed)
    return [_session(dice) for _ in range(count)]


def _session(dice: random.Random) -> Session:
    first = FRESH_PROMPT if dice.random() < FRESH_SHARE else RESUMED_PROMPT
    prompt = _Prompt(min(first.draw(dice), LONGEST_PROMPT))
    steps: list[Step] = []
    deviation, stop = dice.gauss(0.0, 1.0), "end_turn"
    for number in range(max(2, round(REQUESTS.draw(dice)))):
        gap = 0.0
        if number:
            fresh = dice.gauss(0.0, 1.0)
            deviation = GAP_MEMORY * deviation + math.sqrt(1 - GAP_MEMORY**2) * fresh
            gap = (USER_GAP if stop == "end_turn" else TOOL_GAP).at(deviation)
            if dice.random() < RESET_CHANCE:
                prompt.reset()
            else:
                prompt.append(_appended(dice))
        stop = "end_turn" if dice.random() < USER_SHARE else "tool_use"
        output = max(1, round(OUTPUT.draw(dice)))
        steps.append(Step(prompt.runs, gap, DEFAULT_SERVICE_S, stop, output))
    return Session(tuple(steps))


def _appended(dice: random.Random) -> float:
    if dice.random() < JUMP_CHANCE:
        low, high = JUMP_TOKENS
        return low * math.exp(math.log(high / low) * dice.random())
    return APPEND.draw(dice)


class _Prompt:
    """A prompt that grows, as runs of blocks; fractions of a block are carried over."""

    def __init__(self, tokens: float) -> None:
        self._tokens = tokens
        self._next = max(1, int(tokens) // BLOCK_TOKENS)
        self.runs: tuple[tuple[int, int], ...] = ((0, self._next),)

    @property
    def _blocks(self) -> int:
        return sum(count for _, count in self.runs)

    def append(self, tokens: float) -> None:
        self._tokens = min(self._tokens + tokens, LONGEST_PROMPT)
        self._fill()

    def reset(self) -> None:
        """Another prompt behind tools and system."""
        first, count = self.runs[0]
        self.runs = ((first, min(count, SYSTEM_TOKENS // BLOCK_TOKENS)),)
        self._tokens = max(self._tokens * RESET_SHARE, self._blocks * BLOCK_TOKENS)
        self._fill()

    def _fill(self) -> None:
        more = int(self._tokens) // BLOCK_TOKENS - self._blocks
        if more > 0:
            first, count = self.runs[-1]
            if first + count == self._next:
                self.runs = (*self.runs[:-1], (first, count + more))
            else:
                self.runs = (*self.runs, (self._next, more))
            self._next += more
