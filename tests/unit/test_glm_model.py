"""Properties of the tiny GLM that need no oracle: row-wise, deterministic, cut-independent."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch

from kvmanager.clients.glm.attention import top_k
from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.reference import ReferenceRun
from kvmanager.clients.glm.store import ContiguousStore
from kvmanager.clients.glm.weights import Profile, make_weights
from kvmanager.layout import GLM53_TINY

torch.set_num_threads(1)  # small tensors: more threads only wait for each other on a busy machine

TOKENS = 200


@pytest.fixture(scope="module")
def model() -> Glm:
    return Glm(TINY, make_weights(TINY, 1, Profile.CALM), torch.float64, Fp8Codec())


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    seed = 11
    print(f"seed {seed}")
    return torch.from_numpy(np.random.default_rng(seed).integers(0, TINY.vocab, TOKENS))


def run_in_cuts(model: Glm, tokens: torch.Tensor, cuts: list[int]) -> tuple[torch.Tensor, ContiguousStore]:
    """Computes tokens[cuts[i]:cuts[i+1]] one after the other."""
    store = ContiguousStore(TINY.format, model.codec)
    parts = [model.forward(tokens[a:b], torch.arange(a, b), store) for a, b in itertools.pairwise(cuts)]
    hidden = torch.cat(parts)
    model.mtp_rows(tokens[1:], hidden[:-1], torch.arange(len(tokens) - 1), store)
    return hidden, store


def assert_same_rows(a: ContiguousStore, b: ContiguousStore, tokens: int) -> None:
    everything = torch.arange(tokens).unsqueeze(0)
    for layer in range(TINY.layers + 1):
        rows = tokens - 1 if layer == TINY.mtp_layer else tokens
        assert torch.equal(a.latent_rows(layer, everything[:, :rows]), b.latent_rows(layer, everything[:, :rows]))
        if layer in TINY.format.leaders:
            for left, right in zip(a.index_keys(layer, rows), b.index_keys(layer, rows), strict=True):
                assert torch.equal(left, right)


def test_tiny_has_the_tiny_format() -> None:
    assert TINY.format == GLM53_TINY
    assert TINY.mtp_layer == GLM53_TINY.layers - 1


def test_weights_do_not_depend_on_order_or_run() -> None:
    first, second = (make_weights(TINY, 5, Profile.CALM) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    other = make_weights(TINY, 6, Profile.CALM)
    assert not any(np.array_equal(first[n], other[n]) for n in first if not n.endswith("enorm.weight"))
    # Pinned: another reader of the format must be able to make the same numbers.
    key = np.frombuffer(hashlib.sha256(b"5:lm_head.weight").digest()[:16], "<u8")
    normal = np.random.Generator(np.random.Philox(key=key)).standard_normal((1024, 128), dtype=np.float32)
    assert np.array_equal(first["lm_head.weight"], np.float32(4 / 128**0.5) * normal)


@pytest.mark.parametrize("cuts", [[0, 96, 200], [0, 1, 64, 65, 128, 200]], ids=str)
def test_chunked_prefill_equals_whole(model: Glm, tokens: torch.Tensor, cuts: list[int]) -> None:
    whole, store = run_in_cuts(model, tokens, [0, TOKENS])
    chunked, other = run_in_cuts(model, tokens, cuts)
    assert_same_rows(store, other, TOKENS)
    torch.testing.assert_close(chunked, whole, atol=1e-10, rtol=0)


def test_decode_equals_prefill(model: Glm, tokens: torch.Tensor) -> None:
    whole, store = run_in_cuts(model, tokens, [0, TOKENS])
    decoded, other = run_in_cuts(model, tokens, [0, 140, *range(141, TOKENS + 1)])
    assert_same_rows(store, other, TOKENS)
    torch.testing.assert_close(decoded, whole, atol=1e-10, rtol=0)


def test_wrong_rows_change_the_output(model: Glm, tokens: torch.Tensor) -> None:
    """The model must be a detector of wrong KV: one bad page of one layer shows in the logits."""
    hidden, store = run_in_cuts(model, tokens, [0, TOKENS])
    rows = store.latent_rows(3, torch.arange(16, 32).unsqueeze(0))[0]
    store.write_latent(3, torch.arange(160, 176), rows)
    again = model.forward(tokens[-1:], torch.tensor([TOKENS - 1]), store)
    assert float((model.logits(again) - model.logits(hidden[-1:])).abs().max()) > 1e-3


def test_top_k_gives_ties_to_the_lowest_position() -> None:
    scores = torch.tensor([[0.0, 1.0, 0.0, 0.0, 2.0, 0.0, 9.0]])
    assert top_k(scores, torch.tensor([5]), 4).tolist() == [[0, 1, 2, 4]]
    assert top_k(scores, torch.tensor([6]), 2).tolist() == [[4, 6]]


def test_top_k_of_few_keys_is_all_causal_ones() -> None:
    scores = torch.tensor([[-1.0, -3.0, 5.0], [-1.0, -3.0, 5.0], [-1.0, -3.0, 5.0]])
    assert top_k(scores, torch.tensor([0, 1, 2]), 4).tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1]]


def test_top_k_equals_a_stable_sort() -> None:
    seed = 3
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    scores = rng.integers(-3, 4, (60, 90)).astype(np.float64)  # many ties
    positions = rng.integers(0, 90, 60)
    got = top_k(torch.from_numpy(scores), torch.from_numpy(positions), 24).tolist()
    for query, position in enumerate(positions):
        order = np.argsort(-scores[query, : position + 1], kind="stable")[:24]
        expected = sorted(order.tolist())
        assert got[query] == [*expected, *[-1] * (24 - len(expected))]


def test_reference_turns_equal_a_fresh_run(model: Glm, tokens: torch.Tensor) -> None:
    run = ReferenceRun(model)
    prompt = tokens[:60].tolist()
    first = run.turn(prompt, 8)
    recorded = [*first[:5], (first[5] + 1) % TINY.vocab]  # what was recorded differs from what was generated
    longer = prompt + recorded + tokens[60:100].tolist()
    assert run.turn(longer, 6) == ReferenceRun(model).turn(longer, 6)
    assert run.turn(longer, 6) == ReferenceRun(model).turn(longer, 6)  # the same prompt again
    assert run.turn(prompt, 8) == first  # a shorter one


def test_drafts_are_sometimes_right(model: Glm, tokens: torch.Tensor) -> None:
    """The MTP layer must be worth its name, or a demo would only ever reject drafts."""
    prompt = tokens.tolist()
    output = ReferenceRun(model).turn(prompt, 60)
    sequence = torch.tensor(prompt + output)
    hidden, store = run_in_cuts(model, sequence, [0, len(sequence)])
    right = sum(
        model.draft(store, int(sequence[i + 1]), hidden[i], i, 1) == [int(sequence[i + 2])]
        for i in range(TOKENS, len(sequence) - 2)
    )
    assert 6 <= right < 50


def test_draft_matches_the_mtp_layer_run_over_a_chunk(model: Glm, tokens: torch.Tensor) -> None:
    """`draft`'s first step and `mtp_rows` put the same row at a position."""
    hidden, store = run_in_cuts(model, tokens, [0, TOKENS])
    position = TOKENS - 2
    at = torch.tensor([[position]])
    before = store.latent_rows(TINY.mtp_layer, at).clone()
    store.write_latent(TINY.mtp_layer, at[0], torch.zeros((1, 656), dtype=torch.uint8))
    model.draft(store, int(tokens[position + 1]), hidden[position], position, 3)
    assert torch.equal(store.latent_rows(TINY.mtp_layer, at), before)
