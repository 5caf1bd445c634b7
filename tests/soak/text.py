"""Prompts of recorded sessions, at a scale at which small nodes are under pressure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from kvmanager.clients.keys import KeyChain
from kvmanager.pressure import content
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.replay.cli import recorded_sessions
from kvmanager.replay.lanes import stream
from kvmanager.replay.stream import Request
from tests.chaos.content import ANSWER_TOKENS

LANES: Final = 64
BLOCKS_A_TOKEN: Final = 8
"""Recorded blocks (of 64 tokens) that become one token here: a prompt of 142K tokens has 278."""
MOST_TOKENS: Final = 288


@dataclass(frozen=True)
class SessionText:
    """A recorded prompt made short, and an answer: the first tokens are alike where the recorded blocks were."""

    play: int
    nodes: tuple[int, ...]
    """One number a token of the prompt: equal numbers of a play mean equal prefixes."""
    number: int
    """Of the request: its answer is its own."""

    @property
    def prompt_tokens(self) -> int:
        """Without the answer."""
        return len(self.nodes)

    @cached_property
    def tokens(self) -> np.ndarray:
        """Token ids, prompt and answer."""
        draw = np.random.default_rng([self.number])
        prompt = (np.array(self.nodes, np.int64) * 7_919 + self.play * 104_729) % content.VOCABULARY
        return np.concatenate([prompt, draw.integers(0, content.VOCABULARY, ANSWER_TOKENS)])

    @cached_property
    def digests(self) -> np.ndarray:
        """uint64[n]: names all tokens up to each position. Numbers are compared, not tokens, which may repeat."""
        places = np.arange(1, len(self.tokens) + 1, dtype=np.uint64)
        words = self.tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + places * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (words ^ (words >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
        return np.cumsum(mixed, dtype=np.uint64) * np.uint64(0x2545F4914F6CDD1D)

    def keys(self, namespace: pb.Namespace, tokens: int) -> bytes:
        """Keys of the whole segments of the first `tokens`."""
        return KeyChain(namespace).extend(self.tokens[:tokens])


def text_of(request: Request, number: int) -> SessionText:
    """A recorded request, made short."""
    nodes = request.nodes[:: BLOCKS_A_TOKEN][:MOST_TOKENS].tolist()
    return SessionText(request.play, tuple(nodes) if nodes else (1,), number)


def replayed(seed: int) -> Iterator[SessionText]:
    """The bundled sessions on 64 lanes without end, one request after the other: as fast as they are served."""
    sessions, number = recorded_sessions(None, 0), 0
    for round_ in range(1 << 30):
        for request in stream(sessions, LANES, 20_000, seed + round_):
            number += 1
            yield text_of(request, number)
