"""The engine's side of the bytes: page tables as told by replies, and work that runs late, rank by rank."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvmanager.core.events import Opened, ResidencyRows, SpanRunTable
from kvmanager.core.group import Group
from kvmanager.core.patterns import Rows
from kvmanager.core.plans import CopyPlan, Purpose, StridedCopies
from kvmanager.core.pool import PageState, Pool
from kvmanager.core.spec import ChainSpec, PageClass, Placement
from kvmanager.layout import KVLayout
from kvmanager.transport.cpu import do_piece
from tests.sim.content import PAGE_ROWS, Memory, Text


class WrongKV(AssertionError):
    """Bytes are not what they should be, or a page was touched by one who no longer has it."""


@dataclass(frozen=True)
class Claim:
    """Pages as they were when work on them was issued: they must still be the same when it runs."""

    pool: Pool
    page_class: str
    pages: np.ndarray
    generations: np.ndarray

    @classmethod
    def on(cls, pool: Pool, page_class: str, pages: np.ndarray) -> Claim:
        pages = np.unique(pages)
        return cls(pool, page_class, pages, pool.spaces[page_class].generation[pages].copy())

    def hold(self, what: str) -> None:
        space = self.pool.spaces[self.page_class]
        gone = (space.state[self.pages] == PageState.FREE) | (space.generation[self.pages] != self.generations)
        if gone.any():
            raise WrongKV(f"{what}: pages {self.pages[gone].tolist()} of {space.name} were given away meanwhile")


@dataclass
class ChainTable:
    """Page tables of one chain of a request, by page ordinal, and places by token position."""

    spec: ChainSpec
    group: Group
    widths: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    device: dict[str, np.ndarray] = field(default_factory=dict)
    host: dict[str, np.ndarray] = field(default_factory=dict)
    places: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)  # rank, ordinal, slot

    @property
    def end(self) -> int:
        return sum(self.tokens)

    @property
    def sharded(self) -> bool:
        return self.spec.placement is Placement.SHARDED

    def apply(self, run: SpanRunTable) -> None:
        """Replaces everything from the run's first span on."""
        self.keep(run.first_span)
        for first, segments, interleave in zip(run.first_tokens, run.segments, run.interleave, strict=True):
            assert first == self.end
            self._add(int(segments), int(interleave))
        for name, (device, host) in run.pages.items():
            empty = np.empty(0, np.int64)
            self.device[name] = np.concatenate((self.device.get(name, empty), device))
            self.host[name] = np.concatenate((self.host.get(name, empty), host))
            assert len(self.device[name]) == sum(self.widths)

    def _add(self, segments: int, interleave: int) -> None:
        offset = np.arange(segments * PAGE_ROWS)
        page = offset // interleave % segments
        slot = offset // (interleave * segments) * interleave + offset % interleave
        ranks = self.spec.ranks if self.sharded else 1
        first = sum(self.widths)
        self.places.append((page % ranks, first + page // ranks, slot))
        self.widths.append(segments // ranks)
        self.tokens.append(segments * PAGE_ROWS)

    def keep(self, spans: int) -> None:
        assert spans <= len(self.widths)
        self.widths, self.tokens, self.places = self.widths[:spans], self.tokens[:spans], self.places[:spans]
        pages = sum(self.widths)
        self.device = {name: table[:pages] for name, table in self.device.items()}
        self.host = {name: table[:pages] for name, table in self.host.items()}

    def cut(self, capacity: int) -> bool:
        """Drops whole spans at or past `capacity`; whether there were any."""
        before = len(self.tokens)
        while self.tokens and self.end - self.tokens[-1] >= capacity:
            self.keep(len(self.tokens) - 1)
        return len(self.tokens) < before

    def located(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """rank, ordinal, slot of positions [first, last)."""
        if not self.places:
            empty = np.empty(0, np.int64)
            return empty, empty, empty
        rank, ordinal, slot = (np.concatenate(parts)[first:last] for parts in zip(*self.places, strict=True))
        assert len(rank) == last - first
        return rank, ordinal, slot


@dataclass
class RowsOp:
    """Writes or checks rows of one class in one tier."""

    what: str
    write: bool
    layout: KVLayout
    rows: Rows
    content: np.ndarray
    claim: Claim

    def run(self, memory: Memory) -> None:
        self.claim.hold(self.what)
        if self.write:
            memory.fill(self.layout, self.rows, self.content)
            return
        bad = memory.wrong(self.layout, self.rows, self.content)
        if bad.any():
            at = int(np.argmax(bad))
            raise WrongKV(
                f"{self.what}: {int(bad.sum())} of {len(bad)} rows are wrong, first: region {self.rows.region[at]} "
                f"page {self.rows.page[at]} slot {self.rows.slot[at]} of {self.claim.pool.name}/{self.claim.page_class}"
            )


@dataclass
class CopyOp:
    """A rank's part of a copy plan."""

    what: str
    copies: list[StridedCopies]
    claims: list[Claim]
    purpose: Purpose = Purpose.COPY_ON_WRITE

    def run(self, memory: Memory) -> None:
        for claim in self.claims:
            claim.hold(self.what)
        for c in self.copies:
            do_piece(memory.regions, self.purpose, c)


class Rank:
    """One rank's stream: operations in order, each part of a launch with a timeline value."""

    def __init__(self, attach_id: int, memory: Memory) -> None:
        self.attach_id = attach_id
        self.memory = memory
        self.queue: deque[tuple[int, list[RowsOp | CopyOp]]] = deque()
        self.word = 0
        self.dead = False

    def run_one(self) -> None:
        if self.queue and not self.dead:
            value, ops = self.queue.popleft()
            for op in ops:
                op.run(self.memory)
            self.word = value


@dataclass
class SimRequest:
    """A request as its engine sees it. `done`: positions whose final content is launched."""

    request_id: int
    text: Text
    namespace: int
    prompt: int
    growth: int
    tables: list[ChainTable]
    waiting: bool = False
    done: int = 0
    committed: int = 0
    keys_sent: int = 0
    rejected: int = 0
    capacity: int = 0
    hot: np.ndarray | None = None
    plans: tuple[CopyPlan, ...] = ()
    exported: bool = False
    starved: bool = False

    @property
    def end(self) -> int:
        return min(table.end for table in self.tables)

    def run(self, answer: Opened) -> None:
        """Takes the complete tables of an answer."""
        self.waiting = False
        for table, run in zip(self.tables, answer.spans, strict=True):
            assert run.first_span == 0
            table.apply(run)
        self.done = self.committed = answer.cached_tokens
        self.plans = answer.worker_plans
        self.hot = answer.hot
        self.capacity = self.prompt
        assert self.end >= self.prompt
        for plan in self.plans:
            assert plan.total_bytes > 0

    def residency(self, rows: ResidencyRows) -> None:
        table = self.tables[0]
        table.device[rows.page_class][rows.ordinals] = rows.device
        table.host[rows.page_class][rows.ordinals] = rows.host

    def rows_ops(self, rank: int, first: int, last: int, content: np.ndarray, write: bool) -> list[RowsOp]:
        """Operations of one rank on positions [first, last)."""
        ops: list[RowsOp] = []
        for table in self.tables:
            ranks, ordinals, slots = table.located(first, last)
            mine = ranks == rank if table.spec.ranks > 1 and table.sharded else np.ones(len(ranks), bool)
            for page_class in table.spec.classes:
                ops += self._class_ops(table, page_class, rank, (ordinals[mine], slots[mine]), content[mine], write)
        return [op for op in ops if len(op.rows)]

    def _class_ops(
        self, table: ChainTable, c: PageClass, rank: int, where: tuple[np.ndarray, np.ndarray], content: np.ndarray,
        write: bool,
    ) -> list[RowsOp]:  # fmt: skip
        ordinals, slots = where
        device = table.device[c.name][ordinals]
        host = table.host[c.name][ordinals]
        what = f"{'write' if write else 'read'} of request {self.request_id} on rank {rank}"
        ops = []
        on_host = device < 0
        if on_host.any():
            if write or self.hot is None or (host[on_host] < 0).any():
                raise WrongKV(f"{what}: rows of class {c.name} are nowhere, or on the host without a hot buffer")
            rows = Rows(np.full(int(on_host.sum()), c.host_regions[rank], np.int32), host[on_host], slots[on_host])
            claim = Claim.on(table.group.pools[c.host_pool], c.name, rows.page)
            ops.append(RowsOp(what + " (host)", False, c.layout, rows, content[on_host], claim))
        here = ~on_host
        rows = Rows(np.full(int(here.sum()), c.device_regions[rank], np.int32), device[here], slots[here])
        claim = Claim.on(table.group.pools[c.device_pool], c.name, rows.page)
        ops.append(RowsOp(what, write, c.layout, rows, content[here], claim))
        return ops
