"""BL-19: peers whose page sizes and ranks have the same product are not the same; equal ones are."""

from dataclasses import replace

import numpy as np
import pytest

from kvmanager.core.events import PullTarget
from kvmanager.core.spanplans import SpanRun
from kvmanager.daemon.compatibility import check_ticket
from kvmanager.daemon.pulls import TargetClass, share_out
from kvmanager.errors import InvalidArgument, LayoutMismatch
from kvmanager.geometry import SEQUENTIAL, ShardGeometry, TokenOrder
from kvmanager.layout import GLM53, GLM53_TINY, native_layout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.executor import Outcome
from kvmanager.wire import layout_from_proto, layout_to_proto
from tests.pulled import POISON, Pulled, SourceMemory, places, put

TARGET = 9


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((8, 2), (16, 1)), ((64, 8), (512, 1)), ((16, 1), (8, 2)), ((8, 2), (8, 2)), ((64, 8), (64, 8)),
        ((8, 8), (64, 1)),
    ],
)
@pytest.mark.parametrize("interleave", [1, 8])
def test_equal_products_are_laid_out_anew(source: tuple[int, int], target: tuple[int, int], interleave: int) -> None:
    """(page rows, ranks) of both sides: every row lands in its own place, whatever the two have in common."""
    tokens = 2 * source[0] * source[1] - 5
    rng = np.random.default_rng(source[0])
    held = SourceMemory(
        native_layout(GLM53_TINY, source[0]), source[1], TokenOrder(source[1], interleave), tokens, rng
    )
    layout = native_layout(GLM53_TINY, target[0])
    order = TokenOrder(target[1], interleave) if target[1] > 1 else SEQUENTIAL
    spans = -(-tokens // (target[0] * target[1]))
    regions = tuple(range(TARGET, TARGET + target[1]))
    pages = rng.permutation(spans + 1)[:spans].astype(np.int64)
    wanted = TargetClass(layout, PullTarget("kv", (SpanRun(0, order, regions, pages),), tokens))
    size = (spans + 1) * layout.page_bytes
    pulled = Pulled([held], dict.fromkeys(regions, size), 8 * held.layout.page_bytes, 1)
    (share,) = share_out([layout_from_proto(layout_to_proto(held.layout))], [wanted])
    pulled.submit(1, 0, share, 3)
    assert pulled.run()[1].outcome is Outcome.DONE
    number, slot = places(order, target[0], tokens)
    for rank, region in enumerate(regions):
        expected = np.full(size, POISON, np.uint8)
        mine = np.flatnonzero(number % target[1] == rank)
        put(expected, layout, pages[number[mine] // target[1]], slot[mine], mine)
        assert np.array_equal(pulled.regions[region], expected), rank


def test_each_part_of_a_geometry_counts() -> None:
    """Rows of another size, other layers, other sections: refused, and both sides are in the text."""
    mine = pb.Namespace(model="m", weights_revision="r", kv_format=GLM53_TINY.name)
    ticket = pb.Ticket(ticket_id="t", namespace=mine, kv_fingerprint=GLM53_TINY.fingerprint)
    check_ticket(ticket, mine, GLM53_TINY)
    groups = GLM53_TINY.share_groups
    others = [
        replace(GLM53_TINY, latent_row_bytes=GLM53_TINY.latent_row_bytes + 8),
        replace(GLM53_TINY, index_value_bytes=2 * GLM53_TINY.index_value_bytes),
        replace(GLM53_TINY, share_groups=groups[:-1]),
        replace(GLM53_TINY, share_groups=(*groups[:-2], (*groups[-2], *groups[-1]))),
        GLM53,
    ]
    for other in others:
        assert other.fingerprint != GLM53_TINY.fingerprint, other
        with pytest.raises(LayoutMismatch) as refused:
            check_ticket(ticket, mine, other)
        assert GLM53_TINY.fingerprint in str(refused.value)
        assert other.fingerprint in str(refused.value)


def test_a_layout_says_what_its_bytes_alone_do_not() -> None:
    """Two pages with the bytes of one have another layout; a source without a part is refused by the part's name."""
    sixteen, eight = native_layout(GLM53_TINY, 16), native_layout(GLM53_TINY, 8)
    assert 2 * eight.page_bytes == sixteen.page_bytes
    assert eight.fingerprint != sixteen.fingerprint
    without = replace(sixteen, components=sixteen.components[1:])
    wanted = TargetClass(sixteen, PullTarget("kv", (SpanRun(0, SEQUENTIAL, (TARGET,), np.arange(1)),), 16))
    with pytest.raises(LayoutMismatch, match=r"no latent of layer 0 for native/"):
        share_out([without], [wanted])


def test_an_interleave_that_does_not_divide_the_page() -> None:
    with pytest.raises(InvalidArgument, match="interleave 3 does not divide a page of 8 rows"):
        ShardGeometry(2, 8, 3)
    assert ShardGeometry(2, 8, 1).order != ShardGeometry(2, 8, 8).order, "same pages and ranks, other rows"
