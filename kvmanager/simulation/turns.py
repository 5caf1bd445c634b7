"""What sessions ask for: turns with their prompts' keys, and lanes that play one session after the other.

AgentX's rules: c sessions at one time, a lane takes the next when its session ends; gaps are recorded end-to-start
times with a cap; first sessions start at 25 to 75 % of their turns, where the request before that point warms the
caches and is not counted. A prompt longer than the deployment's limit ends its session.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvmanager.replay.stream import BLOCK_TOKENS, GAP_CAP_S, Int64Array, Session, number_nodes
from kvmanager.simulation.virtual import KEY_BYTES


@dataclass(frozen=True)
class Turn:
    """One request. prompt_tokens: the recorded blocks and one more, since a last token is always computed."""

    session: str
    nodes: Int64Array
    output_tokens: int
    gap_s: float
    stop_reason: str
    last: bool

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.nodes) * BLOCK_TOKENS + 1

    def keys(self, whole_blocks: int = 1) -> bytes:
        """One key a block of 64 tokens; with `whole_blocks` above 1, equal only where as many are equal together.

        That is how an engine reuses whose cache blocks are larger: what ends inside one is not found.
        """
        keys = np.empty((len(self.nodes), 2), "<u8")
        keys[:, 0] = int(self.session) + 1
        keys[:, 1] = self.nodes
        if whole_blocks > 1:
            starts = np.arange(0, len(self.nodes), whole_blocks)
            ends = np.minimum(starts + whole_blocks, len(self.nodes))
            closing = np.repeat(self.nodes[ends - 1], ends - starts).astype("<u8")
            place = np.arange(len(self.nodes), dtype="<u8") % whole_blocks
            keys[:, 1] = closing * np.uint64(whole_blocks) + place
            keys[len(self.nodes) // whole_blocks * whole_blocks :, 0] += np.uint64(1 << 62)  # a tail of its own
        assert keys.itemsize * 2 == KEY_BYTES
        return keys.tobytes()


@dataclass
class Play:
    """A session that is played, and the turn that comes next."""

    turns: list[Turn]
    at: int = 0

    def take(self) -> Turn | None:
        """The next turn; None when it is over."""
        if self.at >= len(self.turns):
            return None
        self.at += 1
        return self.turns[self.at - 1]


def plays(sessions: Sequence[Session], most_tokens: int, seed: int) -> Iterator[Play]:
    """Sessions in a shuffled order, without end, each play with keys of its own."""
    dice = random.Random(seed)
    order = list(range(len(sessions)))
    dice.shuffle(order)
    number = 0
    while True:
        found = number
        for place in order:
            turns = _turns(sessions[place], number, most_tokens)
            if len(turns) >= 2:
                yield Play(turns)
                number += 1
        if number == found:
            return


def _turns(session: Session, number: int, most_tokens: int) -> list[Turn]:
    """The session's turns up to the first that is too long."""
    if not session.nodes:
        number_nodes(session)
    turns: list[Turn] = []
    for step, nodes in zip(session.steps, session.nodes, strict=True):
        if len(nodes) * BLOCK_TOKENS + 1 + step.output_tokens > most_tokens:
            break
        gap = min(step.gap_s, GAP_CAP_S)
        turns.append(Turn(str(number), nodes, step.output_tokens, gap, step.stop_reason, False))
    if turns:
        last = turns[-1]
        turns[-1] = Turn(last.session, last.nodes, last.output_tokens, last.gap_s, last.stop_reason, True)
    return turns


def starting_point(play: Play, dice: random.Random) -> None:
    """Sets a first session to the request before a point at 25 to 75 % of its turns."""
    play.at = max(0, int(dice.uniform(0.25, 0.75) * len(play.turns)) - 1)


def one_request(tokens: int, output_tokens: int) -> Play:
    """A session of one prompt of about `tokens` tokens, of which nothing is known."""
    nodes = np.arange(1, (tokens - 1) // BLOCK_TOKENS + 1, dtype=np.int64)
    return Play([Turn("0", nodes, output_tokens, 0.0, "end_turn", True)])
