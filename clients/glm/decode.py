"""Greedy decoding with drafts: verify what was drafted, then draft again. Pure computation, no pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.store import KVStore


@dataclass(frozen=True)
class VerifiedStep:
    """What a step brought.

    `accepted`: new tokens, 1 to 1 + drafts of them; the last one has no KV row yet. `hidden` [h]: post-norm
    hidden state that chose it. `drafts`: tokens proposed to follow it.
    """

    accepted: list[int]
    hidden: Tensor
    drafts: list[int]


def compute_prompt(model: Glm, store: KVStore, prompt: Sequence[int], start: int, rows: int) -> int:
    """Writes the rows of `prompt` from position `start` on, `rows` tokens at a time; the greedy token after it.

    Rows of all earlier positions are in the store; the last prompt token is always computed. MTP rows are written up
    to the last token.
    """
    assert start < len(prompt)
    hidden, positions = torch.empty(0), torch.empty(0, dtype=torch.int64)
    for at in range(start, len(prompt), rows):
        chunk, following = list(prompt[at : at + rows]), list(prompt[at + 1 : at + 1 + rows])
        positions = torch.arange(at, at + len(chunk))
        hidden = model.forward(torch.tensor(chunk), positions, store)
        known = len(following)
        model.mtp_rows(torch.tensor(following, dtype=torch.int64), hidden[:known], positions[:known], store)
    first = model.greedy(hidden[-1:])[0]
    model.mtp_rows(torch.tensor([first]), hidden[-1:], positions[-1:], store)
    return first


def verify_step(model: Glm, store: KVStore, tokens: Sequence[int], start: int, draft_count: int) -> VerifiedStep:
    """One decode step over the last accepted token and the drafts that follow it.

    `tokens[0]` stands at position `start` and has no rows yet. Rows of all tokens are written at `start` on, in
    the main layers; those of rejected drafts are garbage that the next step overwrites, so the store needs room
    for them but they must not be committed: rows [0, start + len(accepted)) are final. MTP rows are written up to
    the same position, given that they exist for all positions before `start`. Tokens are those of plain
    greedy decoding, whatever the drafts were.
    """
    positions = torch.arange(start, start + len(tokens))
    hidden = model.forward(torch.tensor(tokens), positions, store)
    chosen = model.greedy(hidden)
    count = 1
    while count < len(tokens) and tokens[count] == chosen[count - 1]:
        count += 1
    accepted = chosen[:count]
    model.mtp_rows(torch.tensor(accepted), hidden[:count], positions[:count], store)
    last = hidden[count - 1]
    drafts = model.draft(store, accepted[-1], last, start + count - 1, draft_count)
    return VerifiedStep(accepted, last, drafts)
