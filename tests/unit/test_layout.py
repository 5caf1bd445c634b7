"""Bytes of the GLM-5.3 layouts, restated number by number."""

import itertools

import numpy as np
import pytest

from kvmanager.errors import InvalidArgument
from kvmanager.layout import (
    GLM53,
    GLM53_TINY,
    Component,
    KVLayout,
    Section,
    indexer_layout,
    latent_layout,
    layer_major_layout,
    layer_outermost_layout,
    native_layout,
)

BUILDERS = (native_layout, latent_layout, indexer_layout, layer_major_layout)


def test_glm53_numbers():
    assert GLM53.layers == 79
    assert len(GLM53.share_groups) == 22
    assert [len(group) for group in GLM53.share_groups] == [1, 1, *[4] * 19, 1]
    assert GLM53.leaders == (0, 1, *range(2, 75, 4), 78)
    assert GLM53.token_bytes == 54_728 == 78 * 656 + 21 * 132 + 788
    assert GLM53.latent_page_bytes(64) == 3_316_736 == 79 * 41_984
    assert GLM53.indexer_page_bytes(64) == 185_856 == 22 * 8_448
    assert GLM53.page_bytes(64) == 3_502_592
    assert GLM53.slab_bytes(64) == 3_345_408 == 18 * 185_856
    assert 8 * GLM53.page_bytes(64) == 28_020_736
    assert 1_048_576 * GLM53.token_bytes == 54_728 << 20


def test_tiny_share_groups():
    assert GLM53_TINY.share_groups == ((0,), (1,), (2, 3, 4, 5), (6,))


def test_pages_613_and_1226_are_the_first_across_the_32_bit_bounds():
    layout = native_layout(GLM53, 64)
    pages = np.arange(1300, dtype=np.int64)
    ends = (pages + 1) * layout.page_bytes
    assert int(np.argmax(ends > 2**31)) == 613
    assert int(np.argmax(ends > 2**32)) == 1226
    last = max(layout.components, key=lambda c: c.offset)
    row = last.offset + 613 * last.page_stride + 63 * last.slot_stride
    assert row > 2**31
    assert row + last.row_bytes == 614 * 3_502_592


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("kv_format", [GLM53, GLM53_TINY])
def test_rows_of_a_page_are_disjoint_and_inside(builder, kv_format):
    layout = builder(kv_format, 16)
    starts, ends = [], []
    for c in layout.components:
        slots = np.arange(16) * c.slot_stride + c.offset
        starts.append(slots)
        ends.append(slots + c.row_bytes)
    start, end = np.sort(np.concatenate(starts)), np.sort(np.concatenate(ends))
    assert (end[:-1] <= start[1:]).all()
    assert end[-1] <= layout.page_bytes


def test_native_page_keeps_a_share_groups_layers_side_by_side():
    layout = native_layout(GLM53, 64)
    row = [layout.by_key[(Section.LATENT, layer)] for layer in (2, 3, 4, 5)]
    assert [c.offset - row[0].offset for c in row] == [0, 656, 1312, 1968]
    assert {c.slot_stride for c in row} == {4 * 656}
    values, scales = layout.by_key[(Section.INDEX_VALUE, 0)], layout.by_key[(Section.INDEX_SCALE, 0)]
    assert values.offset == 3_316_736
    assert scales.offset - values.offset == 64 * 128 == 8192
    assert (values.slot_stride, scales.slot_stride) == (128, 4)


def test_indexer_pages_fill_a_slab_and_a_latent_page_nearly_does():
    assert latent_layout(GLM53, 64).page_bytes == 18 * indexer_layout(GLM53, 64).page_bytes
    waste = GLM53.slab_bytes(64) - GLM53.latent_page_bytes(64)
    assert 0 <= waste < 0.01 * GLM53.slab_bytes(64)


def test_fingerprints_tell_layouts_of_equal_size_apart():
    layouts = [builder(GLM53_TINY, rows) for builder in BUILDERS for rows in (16, 32)]
    assert native_layout(GLM53_TINY, 16).page_bytes == layer_major_layout(GLM53_TINY, 16).page_bytes
    for one, other in itertools.combinations(layouts, 2):
        assert one.fingerprint != other.fingerprint
    assert native_layout(GLM53_TINY, 16).fingerprint == layouts[0].fingerprint


def test_what_cannot_be_described_is_refused():
    twice = KVLayout("twice", 4, (Component(Section.LATENT, 0, 0, 64, 8, 8),) * 2)
    with pytest.raises(InvalidArgument, match="describes a component twice"):
        _ = twice.by_key
    with pytest.raises(InvalidArgument, match="has no single page"):
        _ = layer_outermost_layout(GLM53_TINY, 16, 4).page_bytes
