"""Scripted histories with real bytes: what a client writes, copies and reads is checked against its own pattern."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvmanager.core.checksums import PageSections
from kvmanager.core.events import CopyOutcome, Event, Opened
from kvmanager.core.patterns import Rows
from kvmanager.core.plans import CopyPlan
from kvmanager.core.pool import PageState
from kvmanager.core.spec import GroupSpec, Limits, Placement
from kvmanager.errors import KVError
from kvmanager.transport.checksums import sum_pages
from kvmanager.transport.cpu import do_piece
from tests.sim.content import Memory
from tests.sim.driver import DEFAULT_LIMITS, Client, Driver, sharded_group
from tests.sim.worker import WrongKV
from tests.sim.worlds import FORMAT


def small_group(pages: int, host_pages: int, *, ranks: int = 8, page_rows: int = 64) -> GroupSpec:
    """`sharded_group` with rows of a few bytes."""
    return sharded_group(pages, host_pages, ranks=ranks, page_rows=page_rows, kv_format=FORMAT)


def pattern(what: object, positions: np.ndarray) -> np.ndarray:
    """The content of positions of session `what`, uint64: made from their names alone."""
    seed = np.uint64(int.from_bytes(repr(what).encode()[-7:], "little"))
    return (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ seed


@dataclass
class BytesDriver(Driver):
    """A driver with memory. Copies move bytes when they end well; freed pages are poisoned at once."""

    memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes: dict[int, int] = {}
        for spec in self.specs:
            pools = {p.name: p for p in spec.pools}
            for c in (c for chain in spec.chains for c in chain.classes):
                for name, regions in ((c.device_pool, c.device_regions), (c.host_pool, c.host_regions)):
                    if name:
                        sizes.update(dict.fromkeys(regions, pools[name].slabs * pools[name].slab_bytes))
        self.memory = Memory(sizes)

    def apply(self, event: Event, passes: int = 1_000) -> object:
        before = self._taken()
        answer = super().apply(event, passes)
        for regions, page_bytes, generations, state in self._spaces():
            old = before[regions, page_bytes]
            freed = (old != 0) & ((state == PageState.FREE) | (generations != old))
            for page in np.flatnonzero(freed).tolist():
                for region, place in self._places(regions, page):
                    self.memory.poison(region, place * page_bytes, page_bytes)
        return answer

    def _places(self, regions: tuple[int, ...], page: int) -> list[tuple[int, int]]:
        """(region, page in it): of every rank, or the one share that has a host page of a replicated chain."""
        for chain in (chain for spec in self.specs for chain in spec.chains):
            shared = chain.placement is Placement.REPLICATED and any(c.host_regions == regions for c in chain.classes)
            if shared:
                place, share = divmod(page, len(regions))
                return [(regions[share], place)]
        return [(region, page) for region in regions]

    def _spaces(self) -> list[tuple[tuple[int, ...], int, np.ndarray, np.ndarray]]:
        found = []
        for group in self.node.state.groups.values():
            for c in (c for chain in group.chains for c in chain.spec.classes):
                for pool, regions in ((c.device_pool, c.device_regions), (c.host_pool, c.host_regions)):
                    if pool:
                        space = group.pools[pool].spaces[c.name]
                        found.append((regions, c.page_bytes, space.generation, space.state))
        return found

    def _taken(self) -> dict[tuple[tuple[int, ...], int], np.ndarray]:
        """Generations of pages in use by regions and page bytes, 0 for free ones."""
        return {
            (regions, page_bytes): np.where(state != PageState.FREE, made, 0)
            for regions, page_bytes, made, state in self._spaces()
        }

    def end(self, plan_id: int, outcome: CopyOutcome = CopyOutcome.DONE, error: KVError | None = None) -> None:
        plan = self.plans.get(plan_id)
        if plan is not None and outcome is CopyOutcome.DONE:
            self.move(plan)
        super().end(plan_id, outcome, error)

    def sums(self, pages: PageSections) -> np.ndarray:
        """Of the real bytes."""
        return sum_pages(self.memory.regions, pages)

    def move(self, plan: CopyPlan) -> None:
        """All bytes of a plan."""
        for c in plan.pieces():
            do_piece(self.memory.regions, plan.purpose, c)


class BytesClient(Client):
    """An engine that writes and reads its rows."""

    def rows(self, opened: Opened, first: int, last: int) -> Rows:
        """Where positions [first, last) of an answer lie, by the design's rule: token g on rank g % N, row g // N."""
        (chain,) = self.spec.chains
        positions = np.arange(first, last)
        span = self.spec.ranks * self.spec.page_rows
        pages = np.asarray(opened.spans[0].pages["kv"][0], np.int64)[positions // span]
        assert (pages >= 0).all()
        regions = np.asarray(chain.classes[0].device_regions, np.int32)[positions % self.spec.ranks]
        return Rows(regions, pages, positions % span // self.spec.ranks)

    @property
    def layout(self) -> object:
        return self.spec.chains[0].classes[0].layout

    def write(self, opened: Opened, what: object, first: int, last: int) -> None:
        """Runs the answer's copies, then writes rows [first, last) of a session."""
        for plan in opened.worker_plans:
            self.driver.move(plan)
        self.driver.memory.fill(self.layout, self.rows(opened, first, last), pattern(what, np.arange(first, last)))

    def read(self, opened: Opened, what: object, last: int) -> None:
        """Rows [0, last) must be the session's; WrongKV."""
        wrong = self.driver.memory.wrong(self.layout, self.rows(opened, 0, last), pattern(what, np.arange(last)))
        if wrong.any():
            first = int(np.argmax(wrong))
            raise WrongKV(f"session {what!r}: {int(wrong.sum())} of {last} rows are wrong, the first is {first}")

    def serve(self, request_id: int, tokens: int, what: object = 0, growth: int = 0) -> Opened:
        """Opens, reads what was found, computes the rest, commits and closes; all its work and copies are done."""
        opened = self.ready(self.open(request_id, tokens, what, growth))
        if opened.state == "refused":
            return opened
        self.finish(opened, tokens, what)
        self.driver.end_all()
        return opened

    def ready(self, opened: Opened) -> Opened:
        """The complete answer: at once, or when what it waits for has come."""
        if opened.state != "waiting":
            return opened
        self.driver.end_all()
        found = [n.ready for n in self.driver.notices if n.ready and n.ready.request_id == opened.request_id]
        return found[-1]

    def finish(self, opened: Opened, tokens: int, what: object) -> None:
        """Computes, checks and commits a request, and closes it."""
        self.write(opened, what, opened.cached_tokens, tokens)
        self.read(opened, what, tokens)
        self.commit(opened.request_id, tokens)
        self.close(opened.request_id)
        self.run()


def start(
    pages: int, host_pages: int, limits: Limits = DEFAULT_LIMITS, **shape: int
) -> tuple[BytesDriver, BytesClient]:
    """One group of small rows, one engine."""
    driver = BytesDriver([small_group(pages, host_pages, **shape)], limits)
    return driver, BytesClient(driver, "p")
