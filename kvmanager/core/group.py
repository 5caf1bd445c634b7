"""A shard group at run time: its pools, and for each chain its spans and their index."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmanager.allocators.fixed import PageArray
from kvmanager.core.checksums import SumStore
from kvmanager.core.eviction import Policy, leaf_first_lru
from kvmanager.core.pool import PageState, Pool
from kvmanager.core.prefix import PrefixIndex
from kvmanager.core.return_rate import SessionBook
from kvmanager.core.rows import RowArray, RowQueue, all_true, as_range
from kvmanager.core.spans import ABSENT, DEVICE, HOST, READY, TOKEN_ID_BYTES, CopyState, SpanTable
from kvmanager.core.spec import ChainSpec, GroupSpec, PageClass, Placement
from kvmanager.core.tenants import NOBODY, Tenants
from kvmanager.errors import InvalidArgument


class Chain:
    """Spans of one KV group, and the pools that their pages come from.

    `key_bytes` is fixed by the first namespace that registers; until then the index is empty.
    """

    def __init__(self, spec: ChainSpec, pools: dict[str, Pool], key_bytes: int, *, swaps: bool) -> None:
        """`swaps`: kernels of running requests read rows of pages that lie on the host alone."""
        self.swaps = swaps
        self.spec = spec
        self.table = SpanTable(len(spec.classes), spec.widest)
        self.index = PrefixIndex(self.table, key_bytes)
        self._pools = pools
        self.sums: dict[int, SumStore] = {}  # by page class, of its host pages; where there are any

    def pool(self, page_class: int, tier: int) -> Pool:
        """The pool of a class in a tier."""
        return self._pools[self.spec.pool_names[page_class][tier]]

    def has_host(self, page_class: int) -> bool:
        """Whether pages of the class can leave the device."""
        return bool(self.spec.pool_names[page_class][HOST])

    @property
    def offloads(self) -> bool:
        """Whether some class of it can leave the device."""
        return self.spec.offloads

    def page_class(self, page_class: int) -> PageClass:
        """The class's description."""
        return self.spec.classes[page_class]

    def set_state(self, page_class: int, tier: int, row: int, copy: CopyState, page: PageState) -> None:
        """Moves a present copy and its pages to a new state together."""
        assert self.table.copies[page_class, tier, row] != ABSENT
        self.table.copies[page_class, tier, row] = copy
        self.table.touched.append(row)
        pages = self.table.held(page_class, tier, slice(row, row + 1))
        self.pool(page_class, tier).settle(self.spec.classes[page_class].name, pages, page)

    def set_states(
        self, page_class: int, tier: int, rows: RowArray, copy: CopyState, page: PageState
    ) -> None:
        """`set_state` for many spans at once."""
        if len(rows) == 0:
            return
        at = as_range(rows)
        assert all_true(self.table.copies[page_class, tier, at] != ABSENT), "an absent copy has no state"
        self.table.copies[page_class, tier, at] = copy
        self.table.touched.append(rows)
        pages = self.table.held(page_class, tier, at)
        self.pool(page_class, tier).settle(self.spec.classes[page_class].name, pages, page)

    def put_many(self, page_class: int, tier: int, rows: RowArray | list[int], pages: PageArray) -> None:
        """Deals taken pages out to spans, in order, as copies that are being filled."""
        if len(rows) == 1:
            self.put(page_class, tier, int(rows[0]), pages)
            return
        index = np.asarray(rows, np.int64)
        self.table.put_many(page_class, tier, index, self.widths(index), pages, CopyState.FILLING)
        self.pool(page_class, tier).settle(self.spec.classes[page_class].name, pages, PageState.FILLING)

    def widths(self, rows: RowArray | list[int]) -> RowArray:
        """Page indexes of one class that each span takes, int64[rows]."""
        segments = self.table.segments[as_range(np.asarray(rows, np.int64))]
        if self.spec.ranks > 1 and self.spec.placement is not Placement.REPLICATED:
            segments = segments // self.spec.ranks
        return segments.astype(np.int64)

    def absent(self, page_class: int, tier: int, rows: RowArray | Sequence[int]) -> RowArray:
        """Those of the spans that have no copy of a class in a tier, int64."""
        index = np.asarray(rows, np.int64)
        if len(index) == 0:
            return index
        missing: RowArray = index[self.table.copies[page_class, tier, as_range(index)] == ABSENT]
        return missing

    def put(self, page_class: int, tier: int, row: int, pages: PageArray) -> None:
        """Attaches taken pages as a copy that is being filled."""
        self.table.put(page_class, tier, row, pages, CopyState.FILLING)
        self.pool(page_class, tier).settle(self.spec.classes[page_class].name, pages, PageState.FILLING)

    def free_copy(self, page_class: int, tier: int, row: int) -> None:
        """Drops a copy and frees its pages at once: nobody may be using them."""
        pages = self.table.drop(page_class, tier, row)
        self.pool(page_class, tier).give(self.spec.classes[page_class].name, pages)

    def free_copies(self, page_class: int, tier: int, rows: RowArray) -> None:
        """`free_copy` for distinct spans at once."""
        pages = self.table.drop_many(page_class, tier, rows)
        self.pool(page_class, tier).give(self.spec.classes[page_class].name, pages)

    def free_spans(self, rows: RowArray) -> None:
        """Frees every copy of unpublished spans nobody holds, and forgets them, in order."""
        for page_class, tier in self.spec.class_tiers:
            held = rows[self.table.copies[page_class, tier, as_range(rows)] != ABSENT]
            if len(held):
                self.free_copies(page_class, tier, held)
        self.table.remove_many(rows)

    def release_if_unused(self, row: int) -> None:
        """Frees a span that left the index once no pin and no plan holds it."""
        self.release_unused([row])

    def release_unused(self, rows: RowArray | Sequence[int]) -> None:
        """`release_if_unused` for many spans at once; a row may be named twice."""
        table = self.table
        index = np.asarray(rows, np.int64)
        if len(index) == 0 or (len(index) == 1 and table.published[index[0]]):
            return
        at = as_range(index)
        index = index[table.live[at] & ~table.published[at]]
        if len(index):
            unused = index[(table.pins[index] == 0) & (table.busy[index] == 0)]
            if len(unused):
                self.free_spans(np.unique(unused))

    def unpin(self, rows: RowArray | Sequence[int]) -> None:
        """Takes one pin from each row and frees those that nothing keeps."""
        self.table.unpin(rows)
        self.release_unused(rows)

    def device_ready(self, rows: RowArray) -> int:
        """How many of the leading rows have a complete device copy of every class."""
        lacking = (self.table.copies[:, DEVICE, rows] != READY).any(axis=0)
        return int(lacking.argmax()) if lacking.any() else len(rows)


@dataclass(frozen=True)
class Claim:
    """Who was refused and goes first: `slabs` by pool, held back from those of a larger `rank` since `since` (ns).

    rank: 0 for a running request that must grow, else 1 and the negated priority of a request that asks to be admitted.
    """

    slabs: dict[str, int]
    rank: tuple[int, int]
    since: int


class Group:
    """The memory of one engine's ranks.

    tenants: whose namespaces are whose. asker: the tenant that the event being handled serves, NOBODY between.
    hot_slabs: slabs in hot buffers by tenant. claims: by (engine, epoch, request id).

    `writeback`: by chain, spans whose host copy is wanted, oldest first; entries may be out of date.
    `declined`: by chain, spans that ranked below all that the host holds; they are looked at again as time passes.
    `unwritten`: by chain, spans on the device whose redundant host copy went; written again when the device gets short
    of clean copies. Entries of both may be out of date.
    `blocked`: chains whose host pool had no room; their write-back waits until something may have been freed.
    `deficit_slabs`: device slabs that a refused request lacked; running sparse requests release towards it.
    `sessions`: what is known of the sessions whose requests came here.
    """

    def __init__(self, spec: GroupSpec, policy: Policy = leaf_first_lru) -> None:
        self.spec = spec
        self.policy = policy
        self.pools = {
            p.name: Pool(p.name, p.tier, p.ranks, p.slabs, dict(p.per_slab), p.slab_bytes) for p in spec.pools
        }
        for pool in self.pools.values() if spec.scrub else ():
            pool.note_writers()
        self.key_bytes = 0
        self.chains: list[Chain] = []
        self.writeback: list[RowQueue] = []
        self.declined: list[deque[int]] = []
        self.unwritten: list[list[int]] = []
        self.blocked: set[int] = set()
        self.deficit_slabs = 0
        self.tenants = Tenants(())
        self.asker = NOBODY
        self.hot_slabs: dict[int, int] = {}
        self.claims: dict[tuple[str, int, int], Claim] = {}
        self.sessions = SessionBook()
        self.set_key_bytes(16)

    def set_key_bytes(self, key_bytes: int) -> None:
        """Fixes the key width while the group is empty; another width later is refused by the caller."""
        assert all(not chain.table.live.any() for chain in self.chains)
        self.key_bytes = key_bytes
        self.chains = [Chain(spec, self.pools, key_bytes, swaps=self.spec.swaps) for spec in self.spec.chains]
        self.writeback = [RowQueue() for _ in self.chains]
        self.declined = [deque() for _ in self.chains]
        self.unwritten = [[] for _ in self.chains]

    def check_token_ids(self, keys_bytes: int, token_ids_bytes: int) -> None:
        """Raises InvalidArgument unless there are none, or those of all segments that the keys are of."""
        segments = keys_bytes // self.key_bytes
        if token_ids_bytes not in (0, segments * self.spec.page_rows * TOKEN_ID_BYTES):
            raise InvalidArgument(
                f"{token_ids_bytes} bytes of token ids for {segments} keys; {TOKEN_ID_BYTES} bytes for each of the "
                f"{self.spec.page_rows} tokens of every key"
            )

    def unblock(self) -> None:
        """Something was freed or may be reclaimed now: write-back looks again."""
        self.blocked.clear()

    @property
    def empty(self) -> bool:
        """No span is known."""
        return not any(chain.table.live.any() for chain in self.chains)

    def class_index(self, chain: Chain, name: str) -> int:
        """Position of a page class in its chain."""
        return next(i for i, c in enumerate(chain.spec.classes) if c.name == name)

    def generations(self, chain: Chain, rows: Sequence[int]) -> npt.NDArray[np.uint32]:
        """What pages the rows lie on, as uint32: generations of their device pages, class by class, in table order.

        In a group whose pages move under their readers, pages on the host alone count too, and page numbers follow.
        """
        index = np.asarray(rows, np.int64)
        if self.spec.sparse is not None:
            return self._places(chain, index)
        parts = [
            chain.pool(c, DEVICE).spaces[page_class.name].generation[chain.table.page_lists(c, DEVICE, index)]
            for c, page_class in enumerate(chain.spec.classes)
        ]
        return np.concatenate(parts)

    def _places(self, chain: Chain, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """A row that has moved, even to a page of the same generation, differs."""
        parts = []
        for c, page_class in enumerate(chain.spec.classes):
            resident = chain.table.copies[c, DEVICE, rows] != ABSENT
            for tier, mine in ((DEVICE, rows[resident]), (HOST, rows[~resident])):
                if len(mine):
                    pages = chain.table.page_lists(c, tier, mine)
                    parts += [chain.pool(c, tier).spaces[page_class.name].generation[pages], (pages << 1) + tier]
        return np.concatenate(parts).astype(np.uint32)
