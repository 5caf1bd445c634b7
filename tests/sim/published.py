"""Everything that can be found in a node's index holds the right bytes, wherever it is complete."""

from __future__ import annotations

import numpy as np

from kvmanager.core.group import Chain, Group
from kvmanager.core.node import Node
from kvmanager.core.patterns import Rows
from kvmanager.core.spans import DEVICE, HOST, CopyState
from kvmanager.core.spec import PageClass, Placement
from kvmanager.geometry import TokenOrder
from tests.sim.content import PAGE_ROWS, Memory, contents, key_of
from tests.sim.rot import Rot
from tests.sim.worker import WrongKV

_ABSENT, _FILLING = int(CopyState.ABSENT), int(CopyState.FILLING)

SEGMENTS: dict[bytes, list[int]] = {}
"""Digests of every segment by its key. Keys are hashes of digests, so that what one history adds is true in all."""


def learn(digests: list[int]) -> None:
    """Segments of a text, so that published keys can be checked against bytes."""
    for end in range(PAGE_ROWS, len(digests) + 1, PAGE_ROWS):
        key = key_of(digests[end - 1])
        if key not in SEGMENTS:
            SEGMENTS[key] = digests[end - PAGE_ROWS : end]


class PublishedBytes:
    """Checks all published spans of a node against what their keys mean."""

    def __init__(self, node: Node, memory: Memory, rot: Rot) -> None:
        self.node, self.memory, self.rot = node, memory, rot
        self._digests: dict[bytes, np.ndarray] = {}

    def check(self) -> None:
        """Raises WrongKV for the first span with a wrong byte."""
        state = self.node.state
        tags = np.array([digest[0] for digest in state.namespaces], np.int64)
        for group in state.groups.values():
            for chain in group.chains:
                table = chain.table
                rows = np.flatnonzero(table.live & table.published)
                shapes = table.segments[rows].astype(np.int64) << 32 | table.interleave[rows]
                for shape in np.unique(shapes).tolist():
                    order = TokenOrder(shape >> 32, shape & 0xFFFFFFFF)
                    self._check_alike(group, chain, rows[shapes == shape], order, tags)

    def _check_alike(self, group: Group, chain: Chain, rows: np.ndarray, order: TokenOrder, tags: np.ndarray) -> None:
        """Spans of one token order."""
        table = chain.table
        tokens = order.segments * PAGE_ROWS
        digests = np.zeros((len(rows), tokens), np.uint64)
        known = np.zeros((len(rows), tokens), bool)
        for i, row in enumerate(rows.tolist()):
            mine = self._of(table.keys[row], group.key_bytes)
            digests[i, : len(mine)] = mine
            known[i, : len(mine)] = True
        content = contents(digests, tags[table.namespace[rows]][:, None])
        page, slot = order.place(np.arange(tokens))
        for c, page_class in enumerate(chain.spec.classes):
            for tier in (DEVICE, HOST):
                copies = table.copies[c, tier, rows]
                # A device copy that its own request still fills is right as far as it is valid, unless a plan fills it.
                unsure = (copies == _FILLING) & ((tier == HOST) | (table.busy[rows] > 0))
                sure = (copies != _ABSENT) & ~unsure
                if tier == HOST and self.rot.pages:
                    # Found when it is loaded: what is checked here is what is served.
                    sure &= ~np.array([self.rot.spoils(chain, c, row) for row in rows.tolist()])
                if not sure.any():
                    continue
                mask = known[sure]
                where = table.pages[c, tier, rows[sure]]
                for places in _places(chain, page_class, tier, (where, page, slot), mask):
                    bad = self.memory.wrong(page_class.layout, places, content[sure][mask])
                    if bad.any():
                        row = int(np.repeat(rows[sure], mask.sum(axis=1))[np.argmax(bad)])
                        raise WrongKV(
                            f"{group.spec.name}/{chain.spec.name} span {row}, class {page_class.name}, tier {tier}: "
                            f"published content is wrong (pages {table.page_list(c, tier, row).tolist()})"
                        )

    def _of(self, keys: bytes, width: int) -> np.ndarray:
        """Digests of all tokens of a span."""
        found = self._digests.get(keys)
        if found is None:
            parts = [SEGMENTS[keys[i : i + width]] for i in range(0, len(keys), width)]
            found = self._digests[keys] = np.array(parts, np.uint64).ravel()
        return found


def _places(
    chain: Chain, c: PageClass, tier: int, at: tuple[np.ndarray, np.ndarray, np.ndarray], mask: np.ndarray
) -> list[Rows]:
    """Where the tokens of spans lie, once for every place that holds them all. at: (pages[spans], page, slot).

    A chain of one shard on several ranks is a cache's: each has its own part under the same page index.
    """
    pages, page, slot = at
    regions = np.asarray(c.device_regions if tier == DEVICE else c.host_regions, np.int32)
    ranks = chain.spec.ranks
    slots = np.broadcast_to(slot, mask.shape)[mask]
    if chain.spec.placement is Placement.SHARDED and ranks > 1:
        region = np.broadcast_to(regions[page % ranks], mask.shape)[mask]
        return [Rows(region, pages[:, page // ranks][mask], slots)]
    held = pages[:, page][mask]
    if tier == HOST and chain.spec.placement is Placement.REPLICATED:
        return [Rows(regions[held % ranks], held // ranks, slots)]
    return [Rows(np.full(len(held), region, np.int32), held, slots) for region in regions]
