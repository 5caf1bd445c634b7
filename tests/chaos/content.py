"""Prompts and the bytes of their rows, worked out from the tokens alone and never asked of the product.

A row's bytes follow from all tokens up to its own and from its section and layer, so bytes of another prefix, place
or section never pass for right ones. Rows are found by the layout's description and a formula of our own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from kvmanager.clients.keys import KeyChain
from kvmanager.layout import KVLayout, Section
from kvmanager.protos import kvmanager_pb2 as pb

_SECTIONS: Final = {section: number for number, section in enumerate(Section)}
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


def write_rows(memory: Any, layout: KVLayout, pages: np.ndarray, slots: np.ndarray, digests: np.ndarray) -> None:
    """Writes the rows of tokens: page, slot and digest of each, [n]."""
    for component in layout.components:
        places = _places(component, pages, slots)
        memory[places] = _values(component, digests)


def wrong_bytes(memory: Any, layout: KVLayout, pages: np.ndarray, slots: np.ndarray, digests: np.ndarray) -> int:
    """How many bytes of those rows are others than they should be."""
    return sum(int((memory[_places(c, pages, slots)] != _values(c, digests)).sum()) for c in layout.components)


def _places(component: Any, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
    start = component.offset + pages * component.page_stride + slots * component.slot_stride
    return start[:, None] + np.arange(component.row_bytes)


def _values(component: Any, digests: np.ndarray) -> np.ndarray:
    """uint8[n, row_bytes]."""
    words = -(-component.row_bytes // 8)
    salt = np.uint64(component.layer * 1_000_003 + _SECTIONS[component.section] * 7_919)
    steps = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    mixed = (digests[:, None] + salt + steps[None, :]) * np.uint64(0x2545F4914F6CDD1D)
    mixed ^= mixed >> np.uint64(31)
    return mixed.view(np.uint8)[:, : component.row_bytes]
