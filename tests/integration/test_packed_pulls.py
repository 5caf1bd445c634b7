"""Pulls of pages that the source packs first, over a real NIXL between two processes; what a GPU's movers do."""

from __future__ import annotations

import pytest

from kvmanager.layout import GLM53_TINY
from tests.bench.gpu_handoff import Other


@pytest.mark.parametrize(("order", "may_turn"), [("kept", True), ("permuted", True), ("permuted", False)])
def test_a_packed_hand_off_has_the_right_bytes(order, may_turn):
    """`may_turn`: the source turns the pages when it packs them."""
    shape = (3 * 128 - 37, "tiny", 16, 1 << 20, 8)
    source, target = Other("source", "cpu", *shape), Other("target", "cpu", *shape)
    try:
        target.hear()
        target.ask("meet", source.hear())
        done = target.ask("pull", order, may_turn)
        assert done["bytes"] == 24 * GLM53_TINY.page_bytes(16)
        assert done["descriptors"] == 2 * done["chunks"], "one run a chunk: what a chunk reads lies side by side"
        again = target.ask("pull", order, may_turn)
        assert again["bytes"] == done["bytes"], "the slots were given back"
    finally:
        source.close()
        target.close()
