"""The HiSparse store: decoding over released pages gives the tokens of the reference, and misuse is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.decode import verify_step
from kvmanager.clients.glm.hisparse import HiSparseStore
from kvmanager.clients.glm.hot_rows import EMPTY, HotRows
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.page_table import NO_PAGE
from kvmanager.clients.glm.reference import ReferenceRun
from kvmanager.clients.glm.store import ContiguousStore
from kvmanager.clients.glm.weights import Profile, make_weights
from kvmanager.errors import InvalidArgument, InvariantViolation, PoolExhausted
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import indexer_layout, latent_layout

torch.set_num_threads(1)  # small tensors: more threads only wait for each other on a busy machine

B = 16
HOT_ROWS = 128
LATENT = latent_layout(TINY.format, B)
INDEXER = indexer_layout(TINY.format, B)
SLABS = 40
INDEXER_AT = SLABS // 2 * LATENT.page_bytes // INDEXER.page_bytes  # indexer pages in the upper half of HBM
HOT_PAGES = np.arange(8)


class Rank:
    """Memories of one decode rank, filled with garbage; pages are given out by number, 8 up for latents."""

    def __init__(self, hot_rows: int = HOT_ROWS) -> None:
        rng = np.random.default_rng(1)
        self.hbm = rng.integers(0, 256, SLABS * LATENT.page_bytes, dtype=np.uint8)
        self.host = rng.integers(0, 256, 32 * LATENT.page_bytes, dtype=np.uint8)
        readable = self.host.view()
        readable.flags.writeable = False  # a worker only reads the host tier
        self.store = HiSparseStore(self.hbm, readable, LATENT, INDEXER, TINY.format.share_groups, hot_rows)

    def append(self, order: TokenOrder, first_token: int, pages: int) -> None:
        first = first_token // B
        ordinals = np.arange(first, first + pages)
        self.store.append_spans(
            order, first_token, 1000 + ordinals, 8 + ordinals, np.full(pages, NO_PAGE), INDEXER_AT + 3 * ordinals
        )

    def release(self, ordinals: list[int]) -> None:
        """Mirrors resident pages (of ordinal o, in HBM page 8 + o) to host pages, then takes them away."""
        size = LATENT.page_bytes
        for ordinal in ordinals:
            device, host = 8 + ordinal, 31 - ordinal
            self.host[host * size : (host + 1) * size] = self.hbm[device * size : (device + 1) * size]
            self.hbm[device * size : (device + 1) * size] = 0xA5
        gone = np.array(ordinals)
        self.store.set_residency(gone, np.full(len(gone), NO_PAGE), 31 - gone)


@pytest.fixture(scope="module")
def model() -> Glm:
    return Glm(TINY, make_weights(TINY, 2, Profile.CALM), torch.float64, Fp8Codec())


@pytest.fixture
def rank() -> Rank:
    rank = Rank()
    rank.append(SEQUENTIAL, 0, 4)
    return rank


def latent_rows(count: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, 656), dtype=np.uint8))


def test_decode_over_released_pages_equals_the_reference(model: Glm) -> None:
    prompt = np.random.default_rng(4).integers(0, TINY.vocab, 90).tolist()
    expected = ReferenceRun(model).turn(prompt, 60)
    rank = Rank()
    # A hand-off in the order of an 8-rank group (one span of 128 tokens), then pages of its own.
    rank.append(TokenOrder(8, 1), 0, 8)
    rank.append(SEQUENTIAL, 128, 4)
    rank.store.set_hot_pages(HOT_PAGES)
    hidden = model.forward(torch.tensor(prompt), torch.arange(90), rank.store)
    outputs = model.greedy(hidden[-1:])
    model.mtp_rows(torch.tensor(prompt[1:] + outputs), hidden, torch.arange(90), rank.store)
    drafts: list[int] = []
    while len(outputs) < 60:
        rows = 89 + len(outputs)
        if rows >= 128 and rank.store.counters.swap_in_rows == 0:
            rank.release(list(range(8)))
        result = verify_step(model, rank.store, [outputs[-1], *drafts], rows, 3)
        outputs += result.accepted
        drafts = result.drafts
    assert outputs[:60] == expected
    counters = rank.store.counters
    assert min(counters.resident_reads, counters.hot_hits, counters.swap_in_rows) > 20


def test_rows_follow_the_token_order() -> None:
    other = Rank()
    other.append(TokenOrder(4, 2), 0, 4)
    rows = latent_rows(64, 3)
    other.store.write_latent(5, torch.arange(64), rows)
    component = LATENT.by_key[next(key for key in LATENT.by_key if key[1] == 5)]
    for p in (0, 1, 2, 7, 8, 63):
        page, slot = 8 + p // 2 % 4, p // 8 * 2 + p % 2
        at = component.offset + page * component.page_stride + slot * component.slot_stride
        assert other.hbm[at : at + 656].tolist() == rows[p].tolist()
    assert torch.equal(other.store.latent_rows(5, torch.arange(64).view(4, 16)).view(64, -1), rows)


def test_index_keys_stay_in_device_memory(rank: Rank) -> None:
    values, scales = latent_rows(64, 4)[:, :128], torch.arange(64, dtype=torch.float32)
    rank.store.write_index(1, torch.arange(64), values, scales)
    rank.release([0, 1])
    got_values, got_scales = rank.store.index_keys(1, 60)
    assert torch.equal(got_values, values[:60])
    assert torch.equal(got_scales, scales[:60])


def test_misses_are_filled_once_and_counted(rank: Rank) -> None:
    store = rank.store
    store.set_hot_pages(HOT_PAGES)
    rows = {layer: latent_rows(64, layer) for layer in (2, 3, 4, 5)}
    for layer, content in rows.items():
        store.write_latent(layer, torch.arange(64), content)
    rank.release([0, 2])
    selection = torch.tensor([[3, 20, 40, -1], [3, 4, 20, 41]])
    store.prepare(2, selection)
    assert (store.counters.resident_reads, store.counters.hot_hits, store.counters.swap_in_rows) == (1, 0, 4)
    for layer, content in rows.items():
        got = store.latent_rows(layer, selection)
        assert torch.equal(got[selection >= 0], content[selection[selection >= 0]])
    store.prepare(2, torch.tensor([[3, 5]]))
    assert (store.counters.resident_reads, store.counters.hot_hits, store.counters.swap_in_rows) == (1, 1, 5)


def test_union_larger_than_the_hot_buffer_is_refused() -> None:
    small = Rank(hot_rows=20)
    small.append(SEQUENTIAL, 0, 4)
    small.release([0, 1])
    with pytest.raises(PoolExhausted, match="a hot buffer of 0"):
        small.store.prepare(0, torch.tensor([[1]]))
    small.store.set_hot_pages(HOT_PAGES[:2])
    with pytest.raises(PoolExhausted, match="21 rows for a hot buffer of 20") as caught:
        small.store.prepare(0, torch.arange(21).unsqueeze(0))
    assert (caught.value.pool, caught.value.needed, caught.value.free) == ("hot", 21, 20)
    small.store.prepare(0, torch.arange(20).unsqueeze(0))


def test_a_row_that_is_nowhere_is_a_broken_invariant(rank: Rank) -> None:
    rank.store.set_hot_pages(HOT_PAGES)
    rank.release([1])
    rank.store.prepare(0, torch.tensor([[16]]))
    rank.store.set_residency(np.array([1]), np.array([NO_PAGE]), np.array([NO_PAGE]))
    rank.store.prepare(0, torch.tensor([[16]]))  # still hot
    with pytest.raises(InvariantViolation, match=r"pages \[1\] are neither"):
        rank.store.prepare(0, torch.tensor([[16, 17]]))


def test_reading_a_row_not_prepared_is_a_broken_invariant(rank: Rank) -> None:
    rank.store.set_hot_pages(HOT_PAGES)
    rank.release([0])
    rank.store.prepare(1, torch.tensor([[5]]))
    with pytest.raises(InvariantViolation, match="not prepared"):
        rank.store.latent_rows(0, torch.tensor([[5]]))  # another group has a map of its own


def test_writing_into_a_released_page_is_a_broken_invariant(rank: Rank) -> None:
    rank.release([0])
    with pytest.raises(InvariantViolation, match="not resident"):
        rank.store.write_latent(0, torch.tensor([3]), latent_rows(1, 0))


def test_another_hot_buffer_starts_empty(rank: Rank) -> None:
    rank.store.set_hot_pages(HOT_PAGES)
    rank.release([0])
    rank.store.prepare(0, torch.tensor([[5]]))
    rank.store.set_hot_pages(HOT_PAGES[::-1].copy())
    with pytest.raises(InvariantViolation, match="not prepared"):
        rank.store.latent_rows(0, torch.tensor([[5]]))


def test_tables_refuse_what_does_not_fit(rank: Rank) -> None:
    with pytest.raises(InvalidArgument, match="the table ends at 64"):
        rank.append(SEQUENTIAL, 80, 1)
    with pytest.raises(InvalidArgument, match="spans of 4 pages"):
        rank.append(TokenOrder(4, 1), 64, 6)
    with pytest.raises(InvalidArgument, match="interleave 3"):
        rank.append(TokenOrder(4, 3), 64, 4)
    with pytest.raises(InvalidArgument, match="1 slabs"):
        rank.store.set_hot_pages(np.array([0]))
    huge = np.array([2**60])
    with pytest.raises(InvalidArgument, match="64-bit"):
        rank.store.append_spans(SEQUENTIAL, 64, huge, np.array([0]), np.array([0]), np.array([0]))


def test_truncated_positions_are_gone(rank: Rank) -> None:
    rank.store.truncate_spans(2)
    with pytest.raises(AssertionError, match="position 32 of 32"):
        rank.store.latent_rows(0, torch.tensor([[32]]))
    with pytest.raises(AssertionError, match="more spans to keep"):
        rank.store.truncate_spans(3)


def test_least_recently_used_rows_go_first() -> None:
    hot = HotRows(3)
    assert hot.place(np.array([10, 11, 12]))[0].tolist() == [0, 1, 2]
    hot.place(np.array([10]))
    rows, missed = hot.place(np.array([12, 20]))
    assert rows.tolist() == [2, 1]
    assert missed.tolist() == [False, True]
    assert hot.find(np.array([10, 11, 12, 20])).tolist() == [0, EMPTY, 2, 1]
    hot.forget(np.array([12, 99]))
    assert hot.place(np.array([30]))[0].tolist() == [2]


def test_contiguous_and_hisparse_agree_byte_for_byte(model: Glm) -> None:
    tokens = torch.from_numpy(np.random.default_rng(6).integers(0, TINY.vocab, 64))
    plain = ContiguousStore(TINY.format, model.codec)
    rank = Rank()
    rank.append(TokenOrder(4, 1), 0, 4)
    for store in (plain, rank.store):
        model.forward(tokens, torch.arange(64), store)
    everything = torch.arange(64).unsqueeze(0)
    for layer in range(TINY.layers):
        assert torch.equal(plain.latent_rows(layer, everything), rank.store.latent_rows(layer, everything))
