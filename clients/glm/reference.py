"""The run that others are compared with: one session, one contiguous store, greedy tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.store import ContiguousStore

CHUNK_TOKENS: Final = 512
"""Prompt tokens computed at a time."""


class ReferenceRun:
    """Greedy decoding of one session, turn after turn.

    Between turns the rows of the longest common prefix with the next prompt stay, so a recorded session costs
    what its new tokens cost. Rows pass the model's codec as they enter, so a token also attends to its own
    quantised row. With a float64 model the way prompts are cut changes tokens only by float64 noise.
    """

    def __init__(self, model: Glm) -> None:
        self._model = model
        self._store = ContiguousStore(model.config.format, model.codec)
        self._tokens: list[int] = []  # positions whose rows the store holds

    def turn(self, prompt_tokens: Sequence[int], output_tokens: int) -> list[int]:
        """The next `output_tokens` greedy tokens after `prompt_tokens` (at least one of each)."""
        assert len(prompt_tokens) > 0
        assert output_tokens > 0
        prompt = list(prompt_tokens)
        # The last prompt token is always computed: its hidden state gives the first output.
        kept = min(_common_prefix(self._tokens, prompt), len(prompt) - 1)
        self._tokens = self._tokens[:kept]
        for start in range(kept, len(prompt), CHUNK_TOKENS):
            output = self._compute(prompt[start : start + CHUNK_TOKENS])
        outputs = [output]
        while len(outputs) < output_tokens:
            outputs.append(self._compute(outputs[-1:]))
        return outputs

    def _compute(self, tokens: list[int]) -> int:
        """Appends tokens and returns the greedy one to follow the last."""
        start = len(self._tokens)
        positions = torch.arange(start, start + len(tokens))
        hidden = self._model.forward(torch.tensor(tokens), positions, self._store)
        self._tokens += tokens
        return self._model.greedy(hidden[-1:])[0]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for at, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return at
    return min(len(a), len(b))
