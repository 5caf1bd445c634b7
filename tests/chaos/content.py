"""Prompts, and words that name all tokens up to each; the bytes of their rows are those of the pressure suites."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from kvmanager.clients.keys import KeyChain
from kvmanager.pressure.content import write_rows, wrong_bytes
from kvmanager.protos import kvmanager_pb2 as pb

__all__ = ["Text", "new_text", "texts_of", "write_rows", "wrong_bytes"]
ANSWER_TOKENS: Final = 24
"""Tokens that a decode engine adds to a prompt."""
ROOTS: Final = 4
FORKS: Final = 2


@dataclass(frozen=True)
class Text:
    """A prompt and its answer: token ids int64[n]; the first `prompt_tokens` are the prompt."""

    tokens: np.ndarray
    prompt_tokens: int

    @cached_property
    def digests(self) -> np.ndarray:
        """uint64[n]: names all tokens up to each position."""
        digest, digests = 1, []
        for token in self.tokens.tolist():
            digest = ((digest ^ token) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % 2**64
            digest ^= digest >> 29
            digests.append(digest)
        return np.array(digests, np.uint64)

    def keys(self, namespace: pb.Namespace, tokens: int) -> bytes:
        """Keys of the whole segments of the first `tokens`."""
        return KeyChain(namespace).extend(self.tokens[:tokens])


def texts_of(seed: int, span_tokens: int) -> list[Text]:
    """Prompts of one to five spans, some of them forks of another one at any token."""
    draw = random.Random(f"texts/{seed}")

    def more(count: int) -> list[int]:
        return [draw.randrange(50_000) for _ in range(count)]

    prompts: list[list[int]] = []
    for _ in range(ROOTS):
        root = more(draw.randint(2 * span_tokens, 5 * span_tokens))
        prompts.append(root)
        for _ in range(FORKS):
            kept = root[: draw.randint(span_tokens // 2, len(root))]
            prompts.append(kept + more(draw.randint(1, 2 * span_tokens)))
    return [Text(np.array(prompt + more(ANSWER_TOKENS)), len(prompt)) for prompt in prompts]


def new_text(seed: int, span_tokens: int) -> Text:
    """A prompt that nobody asks for again."""
    draw = random.Random(f"new/{seed}")
    count = draw.randint(2 * span_tokens, 4 * span_tokens)
    return Text(np.array([draw.randrange(50_000) for _ in range(count + ANSWER_TOKENS)]), count)
