"""Bytes that change by themselves, where checksums are to find it: host copies at rest, and loads on their way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvmanager.core.group import Chain
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spans import HOST, CopyState
from kvmanager.core.spec import Placement
from kvmanager.transport.checksums import sum_pages

if TYPE_CHECKING:
    from tests.sim.harness import World


@dataclass
class Rot:
    """Host pages with a flipped bit: (pool, class, page) -> generation of the content that it hit."""

    pages: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def spoils(self, chain: Chain, page_class: int, row: int) -> bool:
        """Whether the span's host copy was hit."""
        if not chain.has_host(page_class):
            return False
        pool, name = chain.pool(page_class, HOST), chain.page_class(page_class).name
        generation = pool.spaces[name].generation
        held = chain.table.page_list(page_class, HOST, row).tolist()
        return any(self.pages.get((pool.name, name, page)) == generation[page] for page in held)

    def spread(self, world: World) -> None:
        """Flips one bit of a complete host copy that has sums. Kernels of sparse groups read the host unchecked."""
        found = [
            (chain, c, row)
            for group in world.node.state.groups.values()
            if group.spec.sparse is None
            for chain in group.chains
            for c in chain.sums
            for row in chain.table
            if chain.table.copies[c, HOST, row] == CopyState.READY
        ]
        if not found:
            return
        chain, c, row = world.draw.choice(found)
        page_class, pool = chain.page_class(c), chain.pool(c, HOST)
        page = world.draw.choice(chain.table.page_list(c, HOST, row).tolist())
        generation = int(pool.spaces[page_class.name].generation[page])
        if chain.sums[c].generations[page] != generation:
            return
        at, share = page, world.draw.randrange(len(page_class.host_regions))
        if chain.spec.placement is Placement.REPLICATED:
            at, share = divmod(page, len(page_class.host_regions))
        section = world.draw.choice(page_class.sections)
        offset = at * page_class.page_bytes + section.start + world.draw.randrange(section.size_bytes)
        flip(world, page_class.host_regions[share], offset)
        self.pages[(pool.name, page_class.name, page)] = generation
        world.happened["rot"] += 1


def flip(world: World, region: int, offset: int) -> None:
    """One bit of one byte."""
    world.memory.regions[region][offset] ^= np.uint8(1 << world.draw.randrange(8))


def summed(world: World, plan: CopyPlan) -> np.ndarray | None:
    """What the mover says of a plan that is done; a load may have been hit on its way."""
    if plan.sums is None:
        return None
    if plan.purpose is Purpose.ONBOARD and world.draw.random() < 0.03:
        number = world.draw.randrange(len(plan.sums))
        start, size = world.draw.choice(plan.sums.sections)
        offset = int(plan.sums.offsets[number]) + start + world.draw.randrange(size)
        flip(world, int(plan.sums.regions[number]), offset)
        world.happened["load hit"] += 1
    return sum_pages(world.memory.regions, plan.sums)
