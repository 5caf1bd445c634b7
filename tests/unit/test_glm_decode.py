"""Drafts must never change tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.decode import verify_step
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.reference import ReferenceRun
from kvmanager.clients.glm.store import ContiguousStore
from kvmanager.clients.glm.weights import Profile, make_weights

torch.set_num_threads(1)  # small tensors: more threads only wait for each other on a busy machine

PROMPT_TOKENS = 90
OUTPUT_TOKENS = 30


@pytest.fixture(scope="module")
def model() -> Glm:
    return Glm(TINY, make_weights(TINY, 2, Profile.CALM), torch.float64, Fp8Codec())


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return np.random.default_rng(4).integers(0, TINY.vocab, PROMPT_TOKENS).tolist()


@pytest.fixture(scope="module")
def expected(model: Glm, prompt: list[int]) -> list[int]:
    return ReferenceRun(model).turn(prompt, OUTPUT_TOKENS)


class Session:
    """A prompt's rows, then decode steps with whatever drafts a test gives."""

    def __init__(self, model: Glm, prompt: list[int]) -> None:
        self.model = model
        self.store = ContiguousStore(TINY.format, model.codec)
        hidden = model.forward(torch.tensor(prompt), torch.arange(len(prompt)), self.store)
        self.outputs = model.greedy(hidden[-1:])
        model.mtp_rows(torch.tensor(prompt[1:] + self.outputs), hidden, torch.arange(len(prompt)), self.store)
        self.steps: list[int] = []
        self.rows = len(prompt)
        self.drafts: list[int] = []

    def step(self, drafts: list[int]) -> None:
        result = verify_step(self.model, self.store, [self.outputs[-1], *drafts], self.rows, 3)
        self.outputs += result.accepted
        self.rows += len(result.accepted)
        self.drafts = result.drafts
        self.steps.append(len(result.accepted))
        assert self.model.greedy(result.hidden.unsqueeze(0)) == result.accepted[-1:]


def test_random_drafts(model: Glm, prompt: list[int], expected: list[int]) -> None:
    rng = np.random.default_rng(8)
    session = Session(model, prompt)
    while len(session.outputs) < OUTPUT_TOKENS:
        session.step(rng.integers(0, TINY.vocab, int(rng.integers(0, 4))).tolist())
    assert session.outputs[:OUTPUT_TOKENS] == expected
    assert max(session.steps) == 1


def test_perfect_drafts(model: Glm, prompt: list[int], expected: list[int]) -> None:
    session = Session(model, prompt)
    while len(session.outputs) + 4 <= OUTPUT_TOKENS:
        at = len(session.outputs)
        session.step(expected[at : at + 3])
    assert session.outputs == expected[: len(session.outputs)]
    assert set(session.steps) == {4}


def test_partly_right_drafts(model: Glm, prompt: list[int], expected: list[int]) -> None:
    session = Session(model, prompt)
    while len(session.outputs) + 4 <= OUTPUT_TOKENS:
        at = len(session.outputs)
        wrong = (expected[at + 2] + 1) % TINY.vocab
        session.step([*expected[at : at + 2], wrong])
    assert session.outputs == expected[: len(session.outputs)]
    assert set(session.steps) == {3}


def test_mtp_drafts(model: Glm, prompt: list[int], expected: list[int]) -> None:
    session = Session(model, prompt)
    while len(session.outputs) < OUTPUT_TOKENS:
        session.step(session.drafts)
    assert session.outputs[:OUTPUT_TOKENS] == expected
    assert max(session.steps) > 1, "no draft was ever right: the case under test did not occur"
    assert min(session.steps) == 1


def test_mtp_rows_equal_those_of_a_chunk(model: Glm, prompt: list[int]) -> None:
    """Rejected drafts leave no trace in committed rows, MTP's included."""
    session = Session(model, prompt)
    while len(session.outputs) < OUTPUT_TOKENS:
        session.step(session.drafts)
    sequence = prompt + session.outputs
    rows = session.rows
    fresh = ContiguousStore(TINY.format, model.codec)
    hidden = model.forward(torch.tensor(sequence[:rows]), torch.arange(rows), fresh)
    model.mtp_rows(torch.tensor(sequence[1 : rows + 1]), hidden, torch.arange(rows), fresh)
    everything = torch.arange(rows).unsqueeze(0)
    for layer in range(TINY.layers + 1):
        assert torch.equal(session.store.latent_rows(layer, everything), fresh.latent_rows(layer, everything))
    for layer in TINY.format.leaders:
        assert torch.equal(session.store.index_keys(layer, rows)[0], fresh.index_keys(layer, rows)[0])
