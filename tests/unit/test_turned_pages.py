"""Pages that are turned on the way: each row of each page in its place, and what can't be is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvmanager.core.events import PullTarget
from kvmanager.core.spanplans import SpanRun
from kvmanager.daemon.pulls import SourceSpans, Staging, TargetClass, build_pull
from kvmanager.errors import InvalidArgument
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import GLM53, KVFormat, indexer_layout, latent_layout, layer_major_layout, native_layout
from kvmanager.planwire import ring_from_proto, ring_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.pack_messages import Ask, decode
from kvmanager.transport.packers import HostPacker
from kvmanager.transport.turned_pages import Turn
from tests.pulled import places, put

FORMAT = KVFormat("turned", ((0,), (1, 2), (3,)), latent_row_bytes=5, index_value_bytes=4, index_scale_bytes=2)
ROWS, SPANS = 16, 3


@pytest.mark.parametrize("layout", [native_layout(FORMAT, ROWS), layer_major_layout(FORMAT, ROWS)])
@pytest.mark.parametrize(("segments", "interleave"), [*itertools.product((2, 4, 8), (1, 2, 16))])
def test_every_row_lies_where_its_token_belongs(layout, segments, interleave):
    order = TokenOrder(segments, interleave)
    tokens, rng = SPANS * segments * ROWS, np.random.default_rng(segments)
    pages = rng.permutation(SPANS * segments)
    memory, packed, expected = (np.zeros(SPANS * segments * layout.page_bytes, np.uint8) for _ in range(3))
    number, slot = places(order, ROWS, tokens)
    put(memory, layout, pages[number], slot, np.arange(tokens))
    put(expected, layout, *places(SEQUENTIAL, ROWS, tokens), np.arange(tokens))
    packer = HostPacker()
    turn = Turn.decode(Turn.of(layout, order).encode())
    turn.check(len(pages), layout.page_bytes)
    packer.start(1, memory.ctypes.data + pages * layout.page_bytes, packed.ctypes.data, layout.page_bytes, turn)
    assert packer.poll() == [(1, None)]
    assert np.array_equal(packed, expected)


def test_a_page_of_the_deployment_is_turned_in_few_shapes_of_long_rows():
    layout = native_layout(GLM53, 64)
    turn = Turn.of(layout, TokenOrder(8, 1))
    assert len(turn.pieces) == 3 * 22
    copies = list(turn.copies(np.arange(24, dtype=np.int64) << 24, 1 << 40, layout.page_bytes))
    assert sum(c.total_bytes for c in copies) == 24 * layout.page_bytes
    assert len(copies) <= 6, "a launch each"
    assert all(len(c.counts) <= 2 for c in copies), "as many extents as the kernel has"
    assert max(c.row_bytes for c in copies) == 4 * 656


WRONG = {
    "no whole spans": (Turn(TokenOrder(8, 1), 16, ((0, 4, 4),)), 12),
    "an interleave that does not divide": (Turn(TokenOrder(2, 3), 16, ((0, 4, 4),)), 2),
    "a slot over the page's end": (Turn(TokenOrder(2, 1), 16, ((1, 4, 4),)), 2),
    "slots over each other": (Turn(TokenOrder(2, 1), 16, ((0, 3, 4),)), 2),
    "an empty row": (Turn(TokenOrder(2, 1), 16, ((0, 4, 0),)), 2),
    "very wide spans": (Turn(TokenOrder(512, 1), 16, ((0, 4, 4),)), 512),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_can_not_be_turned_is_refused(name):
    turn, pages = WRONG[name]
    with pytest.raises(InvalidArgument):
        turn.check(pages, 64)


@pytest.mark.parametrize("cut", [0, 3, 15, 17, -1])
def test_torn_descriptions_are_refused(cut):
    with pytest.raises(InvalidArgument):
        Turn.decode(Turn(TokenOrder(2, 1), 16, ((0, 4, 4),)).encode()[:cut])


@pytest.mark.parametrize("turn", [None, Turn(TokenOrder(2, 1), 16, ((0, 4, 4), (64, 2, 2)))])
def test_an_ask_comes_as_it_was_said(turn):
    ask = Ask(7, 96, 1_000, np.arange(4, dtype=np.uint64) << np.uint64(40), b"metadata", turn)
    said = decode(ask.encode())
    assert isinstance(said, Ask)
    assert (said.ask_id, said.page_bytes, said.lease_ns, said.metadata, said.turn) == (7, 96, 1_000, b"metadata", turn)
    assert np.array_equal(said.addresses, ask.addresses)
    for end in range(len(ask.encode())):
        with pytest.raises(InvalidArgument):
            decode(ask.encode()[:end])


def _pull(order, wanted, chunk_pages, tokens, first=0, may_turn=True):
    layout, latent, indexer = native_layout(FORMAT, ROWS), latent_layout(FORMAT, ROWS), indexer_layout(FORMAT, ROWS)
    spans = -(-tokens // (8 * ROWS))
    firsts = np.arange(spans) * 8 * ROWS
    source = SourceSpans(8, firsts, np.full(spans, 8), np.full(spans, order.interleave), np.arange(spans))
    count = -(-(tokens - first) // ROWS)
    targets = [
        TargetClass(c, PullTarget(c.name, (SpanRun(first, wanted, (10 + n,), np.arange(count)),), tokens))
        for n, c in enumerate((latent, indexer))
    ]
    return build_pull(1, layout, source, [r << 40 for r in range(8)], targets, Staging(4, chunk_pages), 3, may_turn)


def test_a_pull_asks_for_whole_spans_turned_and_places_whole_sections():
    ring = _pull(TokenOrder(8, 1), SEQUENTIAL, 9, 3 * 128 - 37, first=128 + ROWS)
    assert ring.turn is not None
    assert (len(ring.addresses), ring.chunk_pages, ring.slots) == (16, 8, 4), "one span is there already"
    assert ring.first_slot < ring.slots
    plain = _pull(TokenOrder(8, 1), SEQUENTIAL, 9, 3 * 128 - 37, first=128 + ROWS, may_turn=False)
    assert plain.turn is None
    assert ring.run_bytes > 3 * plain.run_bytes
    assert ring.placement.total_bytes == plain.placement.total_bytes
    again = ring_from_proto(pb.Pull.FromString(ring_to_proto(ring).SerializeToString()))
    assert again.turn == ring.turn


@pytest.mark.parametrize(
    ("wanted", "chunk_pages"), [(TokenOrder(8, 1), 9), (SEQUENTIAL, 7)], ids=["kept order", "chunks less than a span"]
)
def test_other_pulls_take_pages_as_they_are(wanted, chunk_pages):
    assert _pull(TokenOrder(8, 1), wanted, chunk_pages, 3 * 128).turn is None
