"""Sharded rows and context-parallel prefill against the plain store and the plain forward pass."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.pcp import pcp_chunks
from kvmanager.clients.glm.shard_group import ShardGroup
from kvmanager.clients.glm.shard_store import ShardStore
from kvmanager.clients.glm.store import ContiguousStore, KVStore
from kvmanager.clients.glm.weights import Profile, make_weights
from kvmanager.clients.glm.workspace import Workspace, workspace_bytes
from kvmanager.errors import InvalidArgument
from kvmanager.geometry import ShardGeometry
from kvmanager.layout import KVLayout, Section, layer_major_layout, native_layout

torch.set_num_threads(1)  # small tensors: more threads only wait for each other on a busy machine

RANKS = 8
PAGE_ROWS = 16
LAYOUTS = {
    "native": native_layout(TINY.format, PAGE_ROWS),
    "layer major": layer_major_layout(TINY.format, PAGE_ROWS),
}


@pytest.fixture(scope="module")
def model() -> Glm:
    return Glm(TINY, make_weights(TINY, 1, Profile.CALM), torch.float64, Fp8Codec())


def make_group(
    model: Glm, layout: KVLayout, interleave: int, span_pages: list[int]
) -> tuple[ShardGroup, list[np.ndarray]]:
    rng = np.random.default_rng(5)
    memories = [rng.integers(0, 256, layout.page_bytes * (max(span_pages) + 1), dtype=np.uint8) for _ in range(RANKS)]
    geometry = ShardGeometry(RANKS, PAGE_ROWS, interleave)
    needed = workspace_bytes(geometry, len(span_pages) * RANKS * PAGE_ROWS)
    spaces = [Workspace(torch.full((needed,), 0xFF, dtype=torch.uint8)) for _ in range(RANKS)]
    group = ShardGroup(model, memories, spaces, layout, geometry)
    group.start(np.array(span_pages))
    return group, memories


def tokens_of(count: int) -> list[int]:
    return np.random.default_rng(21).integers(0, TINY.vocab, count).tolist()


def assert_same_rows(plain: KVStore, shards: list[ShardStore], tokens: int) -> None:
    for layer in range(TINY.layers + 1):
        rows = tokens - 1 if layer == TINY.mtp_layer else tokens
        for shard in shards:
            here = shard.own_positions(rows)
            assert torch.equal(plain.latent_rows(layer, here), shard.latent_rows(layer, here)), layer
            if layer in TINY.format.leaders:
                for whole, mine in zip(plain.index_keys(layer, rows), shard.index_keys(layer, rows), strict=True):
                    assert torch.equal(whole[here], mine)


@pytest.mark.parametrize(
    ("queries", "ranks", "first", "last"),
    [
        (2048, 8, [(0, 128), (1920, 2048)], [(896, 1024), (1024, 1152)]),
        (1000, 8, [(0, 63), (945, 1000)], [(441, 504), (504, 567)]),
        (16, 8, [(0, 1), (15, 16)], [(7, 8), (8, 9)]),
        (100, 2, [(0, 25), (75, 100)], [(25, 50), (50, 75)]),
    ],
)
def test_chunks_pair_early_with_late(
    queries: int, ranks: int, first: list[tuple[int, int]], last: list[tuple[int, int]]
) -> None:
    chunks = pcp_chunks(queries, ranks)
    assert not chunks.replicated
    for rank, bounds in ((0, first), (ranks - 1, last)):
        assert chunks.queries[rank].tolist() == [i for a, b in bounds for i in range(a, b)]
    assert sorted(torch.cat(chunks.queries).tolist()) == list(range(queries))


@pytest.mark.parametrize("queries", [1, 15, 17, 30, 120])
def test_small_batches_are_replicated(queries: int) -> None:
    chunks = pcp_chunks(queries, 8)
    assert chunks.replicated
    assert [q.tolist() for q in chunks.queries] == [list(range(queries))] * 8
    assert len(chunks.distinct) == 1


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_rows_lie_where_the_placement_says(model: Glm, layout: KVLayout, interleave: int) -> None:
    span_pages = [3, 0]
    group, memories = make_group(model, layout, interleave, span_pages)
    rng = np.random.default_rng(9)
    positions = torch.arange(200)
    rows = torch.from_numpy(rng.integers(0, 256, (200, 656), dtype=np.uint8))
    values = torch.from_numpy(rng.integers(0, 256, (200, 128), dtype=np.uint8))
    for shard in group.shards:
        shard.write_latent(4, positions, rows)
        shard.write_index(2, positions, values, torch.arange(200, dtype=torch.float32))
    for p in (0, 1, 17, 127, 128, 199):
        span, offset = divmod(p, RANKS * PAGE_ROWS)
        rank = offset // interleave % RANKS
        slot = offset // (interleave * RANKS) * interleave + offset % interleave
        component = layout.by_key[Section.LATENT, 4]
        at = component.offset + span_pages[span] * component.page_stride + slot * component.slot_stride
        assert memories[rank][at : at + 656].tolist() == rows[p].tolist()
        component = layout.by_key[Section.INDEX_SCALE, 2]
        at = component.offset + span_pages[span] * component.page_stride + slot * component.slot_stride
        assert memories[rank][at : at + 4].view(np.float32)[0] == p
    for shard in group.shards:
        here = shard.own_positions(200)
        assert torch.equal(shard.index_keys(2, 200)[0], values[here])
        assert torch.equal(shard.latent_rows(4, here), rows[here])


def test_positions_beyond_the_spans_are_refused(model: Glm) -> None:
    group, _ = make_group(model, LAYOUTS["native"], 1, [0])
    with pytest.raises(AssertionError, match="beyond 1 spans"):
        group.shards[0].write_latent(0, torch.tensor([128]), torch.zeros((1, 656), dtype=torch.uint8))


def test_geometry_and_memories_must_agree(model: Glm) -> None:
    memory, geometry = np.zeros(8, dtype=np.uint8), ShardGeometry(8, PAGE_ROWS, 1)
    with pytest.raises(InvalidArgument, match="2 memories"):
        ShardGroup(model, [memory] * 2, [Workspace(torch.zeros(8))] * 8, LAYOUTS["native"], geometry)
    with pytest.raises(InvalidArgument, match="rank 8 of 8"):
        ShardStore(memory, LAYOUTS["native"], geometry, 8)


@pytest.mark.parametrize(("interleave", "cuts"), [(1, [0, 200]), (16, [0, 96, 97, 200])], ids=str)
def test_prefill_by_ranks_equals_forward(model: Glm, interleave: int, cuts: list[int]) -> None:
    tokens = tokens_of(200)
    plain = ContiguousStore(TINY.format, model.codec)
    whole = model.forward(torch.tensor(tokens), torch.arange(200), plain)
    model.mtp_rows(torch.tensor(tokens[1:]), whole[:-1], torch.arange(199), plain)
    group, _ = make_group(model, LAYOUTS["native"], interleave, [2, 5])
    for a, b in itertools.pairwise(cuts):
        last = group.prefill(tokens[a:b], a, tokens[a + 1 : b + 1])
        torch.testing.assert_close(last, whole[b - 1], atol=1e-10, rtol=0)
    assert_same_rows(plain, group.shards, 200)
    (token,) = model.greedy(whole[-1:])
    group.write_mtp_row(token, last, 199)
    model.mtp_rows(torch.tensor([token]), whole[-1:], torch.tensor([199]), plain)
    owner = next(shard for shard in group.shards if shard.owns(torch.tensor([199])))
    row = torch.tensor([199])
    assert torch.equal(owner.latent_rows(TINY.mtp_layer, row), plain.latent_rows(TINY.mtp_layer, row))


def test_prefill_refuses_a_gap_in_next_tokens(model: Glm) -> None:
    group, _ = make_group(model, LAYOUTS["native"], 1, [0])
    with pytest.raises(InvalidArgument, match="3 next tokens for 5"):
        group.prefill([1, 2, 3, 4, 5], 0, [2, 3, 4])
