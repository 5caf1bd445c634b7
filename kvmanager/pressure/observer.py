"""An outside observer: what each client was given, by its own sets, and what must hold whatever the daemon says."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvmanager.errors import CapacityError, Draining, KVError, QuotaExceeded, TransferError
from kvmanager.pressure.content import Text, U64Array, wrong_bytes
from kvmanager.pressure.driver import Driver, Target
from kvmanager.pressure.nodes import Room
from kvmanager.pressure.places import NO_PAGE, Int64Array, Places
from kvmanager.protos import kvmanager_pb2 as pb

INVARIANTS: Final = {
    "page-twice": "no page is given to one request while another one holds it, unless both share its content",
    "uid-twice": "a content id names one content",
    "wrong-bytes": "what a prompt hits, and what a request has written, holds the right bytes",
    "promise": "a request grows within what it was promised",
    "refusal": "a refusal is typed, names what there is, and is true",
    "account": "the daemon's own account holds, and covers all that clients hold",
    "progress": "while what is free fits a request that waits, one goes on",
    "leak": "nothing is held once all have left",
    "death": "the daemon lives on, and its sessions with it",
}
RECENT_S: Final = 30.0
"""A refusal may name a request that was closed so lately."""
SAMPLE: Final = 4096
"""Rows compared of a request at one time; of longer ones, as many spread over all."""
PAGES_AT_ONCE: Final = 32


class Violation(Exception):
    """An invariant that does not hold: which, and what was seen."""

    def __init__(self, invariant: str, says: str) -> None:
        assert invariant in INVARIANTS, invariant
        super().__init__(f"{invariant}: {says}")
        self.invariant = invariant
        self.says = says


@dataclass(frozen=True)
class _Rows:
    """Rows in one tier of one rank: pages, slots and digests are [n]."""

    rank: int
    page_class: str
    tier: str
    pages: Int64Array
    slots: Int64Array
    digests: U64Array


@dataclass(eq=False)
class Book:
    """What we know of one request. `state`: "refused", "waiting" or "running"."""

    client: int
    engine: str
    request: int
    text: Text
    prompt: int
    growth: int
    places: Places
    state: str = "refused"
    cached: int = 0
    committed: int = 0
    capacity: int = 0
    keys_sent: int = 0
    ticket: pb.Ticket | None = None
    session: str = ""
    retry_at: float = 0.0
    units: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """As refusals name it."""
        return f"{self.engine}/{self.request}"

    @property
    def most(self) -> int:
        """Tokens that it may have."""
        return self.prompt + self.growth


class Observer:
    """The books of one node."""

    def __init__(self, target: Target, room: Room) -> None:
        self._target, self.room = target, room
        strides = {name: layout.page_bytes for name, layout in target.layouts.items()}
        self.unit_bytes = min(strides.values())
        self._strides = strides
        self.books: dict[tuple[int, int], Book] = {}
        self._holders: dict[int, tuple[int, set[str]]] = {}  # unit -> uid of its content, who holds it
        self._uids: set[int] = set()
        self._contents: dict[int, int] = {}  # uid -> digest of its last token
        self._closed: dict[str, float] = {}
        self.cordoned = False
        self.disturbed = False
        """Whether somebody's death or silence may make a pull fail."""
        self.rows_checked = 0

    # ------------------------------------------------------------------------------- what is given

    def granted(self, book: Book, reply: pb.OpenReply, driver: Driver) -> None:
        """A request runs: its pages are its own, or shared with the same content, and what it hits is right."""
        book.places = Places(self._target.shards, self._target.page_rows)
        book.places.append(reply.spans)
        book.state, book.cached = "running", reply.cached_tokens
        book.committed = max(book.committed, reply.cached_tokens)
        book.capacity = max(book.prompt, book.committed)
        if reply.cached_tokens > book.prompt or (reply.cached_tokens == book.prompt and book.ticket is None):
            raise Violation("refusal", f"{book.name} has {reply.cached_tokens} of {book.prompt} tokens cached")
        if book.places.tokens < book.prompt:
            raise Violation("promise", f"{book.name} got places for {book.places.tokens} of {book.prompt} tokens")
        self._hold(book, 0, book.places.ordinals_within(reply.cached_tokens))
        self.check_rows(book, reply.cached_tokens, "hit", driver)

    def grown(self, book: Book, growth: pb.Growth, asked: int) -> None:
        """A row of a step gained or lost pages, or was refused what it asked for."""
        if growth.HasField("error"):
            if asked <= book.most:
                raise Violation("promise", f"{book.name} may have {book.most} tokens, not {asked}: {growth.error}")
            return
        self.let_go(book)
        kept = growth.spans[0].first_span if growth.spans else growth.spans_kept
        before = book.places.spans[kept][3] if kept < len(book.places.spans) else len(book.places.uids)
        book.places.grow(growth)
        self._hold(book, 0, before)

    def moved(self, book: Book, residency: pb.Residency) -> None:
        """Pages of a request lie elsewhere now."""
        self.let_go(book)
        book.places.move(residency)
        self._hold(book, 0, len(book.places.uids))

    def _hold(self, book: Book, first: int, known: int) -> None:
        """Books the pages from `first` on; those before `known` may be shared, the others are new content."""
        uids = book.places.uids.tolist()
        fresh = set(uids[known:])
        if twice := fresh & self._uids:
            raise Violation("uid-twice", f"{book.name} got new pages with content ids of others: {sorted(twice)[:3]}")
        self._uids |= fresh
        for name, column in book.places.columns.items():
            width = self._strides[name] // self.unit_bytes
            for ordinal, page in enumerate(column.device.tolist()):
                if page == NO_PAGE or ordinal < first:
                    continue
                start = page * self._strides[name] // self.unit_bytes
                for unit in range(start, start + width):
                    self._hold_unit(book, unit, uids[ordinal], ordinal < known)
        self._check_contents(book, known)

    def _hold_unit(self, book: Book, unit: int, uid: int, may_share: bool) -> None:
        held = self._holders.get(unit)
        if held is not None and book.name not in held[1] and not (may_share and held[0] == uid):
            raise Violation(
                "page-twice",
                f"page unit {unit} of {self._target.group} was given to {book.name} (content {uid}) "
                f"while {sorted(held[1])} hold it (content {held[0]})",
            )
        if held is not None and book.name in held[1] and held[0] != uid:
            raise Violation("page-twice", f"page unit {unit} was given to {book.name} for two places")
        self._holders.setdefault(unit, (uid, set()))[1].add(book.name)
        book.units.add(unit)

    def _check_contents(self, book: Book, known: int) -> None:
        """Shared spans have a content that somebody finished, and it is this text."""
        digests = book.text.digests
        for first, segments, _, ordinal in book.places.spans:
            end = first + segments * self._target.page_rows
            pages = segments // self._target.shards
            if ordinal + pages > known or end > len(digests):
                break
            for uid in book.places.uids[ordinal : ordinal + pages].tolist():
                said = self._contents.get(uid)
                if said is not None and said != int(digests[end - 1]):
                    raise Violation("uid-twice", f"{book.name} shares content {uid}, which is of another text")

    def note_committed(self, book: Book) -> None:
        """Names the contents that a commit finished."""
        for first, segments, _, ordinal in book.places.spans:
            end = first + segments * self._target.page_rows
            if end > book.committed:
                break
            for uid in book.places.uids[ordinal : ordinal + segments // self._target.shards].tolist():
                self._contents[uid] = int(book.text.digests[end - 1])

    def let_go(self, book: Book) -> None:
        """A request holds no pages any more."""
        for unit in book.units:
            _, names = self._holders[unit]
            names.discard(book.name)
            if not names:
                del self._holders[unit]
        book.units = set()

    def find(self, request: int) -> Book | None:
        """The book of a request of this group's engine."""
        return next((book for book in self.books.values() if book.request == request), None)

    def closed(self, book: Book) -> None:
        """It has ended."""
        self.let_go(book)
        self._closed[book.name] = time.monotonic()
        self.books.pop((book.client, book.request), None)

    # --------------------------------------------------------------------------------------- bytes

    def check_rows(self, book: Book, end: int, why: str, driver: Driver) -> None:
        """Compares the rows of the first `end` tokens in every rank's memory. Raises Violation."""
        span = np.arange(end)
        if len(span) > SAMPLE:
            span = span[np.unique(np.linspace(0, len(span) - 1, SAMPLE).astype(np.int64))]
        for rank in range(self._target.ranks):
            shard = rank if self._target.kind == "sharded" else 0
            positions, ordinals, slots = book.places.find(span, shard)
            digests = book.text.digests[positions]
            for page_class in self._target.layouts if len(positions) else ():
                device, host = book.places.pages(page_class, ordinals)
                for tier, pages, there in (("device", device, device != NO_PAGE), ("host", host, device == NO_PAGE)):
                    if (pages[there] == NO_PAGE).any():
                        raise Violation("wrong-bytes", f"{book.name} hits tokens that are in no tier")
                    if there.any():
                        where = _Rows(rank, page_class, tier, pages[there], slots[there], digests[there])
                        self._compare(book, where, f"{why} of {book.name}, {end} tokens", driver)

    def _compare(self, book: Book, rows: _Rows, why: str, driver: Driver) -> None:
        layout = self._target.layouts[rows.page_class]
        unique, inverse = np.unique(rows.pages, return_inverse=True)
        for first in range(0, len(unique), PAGES_AT_ONCE):
            part = unique[first : first + PAGES_AT_ONCE]
            ours = (inverse >= first) & (inverse < first + len(part))
            data = driver.read_pages(rows.rank, rows.page_class, rows.tier, part).reshape(-1)
            wrong = wrong_bytes(data, layout, inverse[ours] - first, rows.slots[ours], rows.digests[ours])
            self.rows_checked += int(ours.sum())
            if wrong:
                where = f"{rows.tier} {rows.page_class} rows of rank {rows.rank} in pages {part[:4].tolist()} ..."
                raise Violation("wrong-bytes", f"{wrong} B of {where}: {why}; {book.cached} tokens were cached")

    # ------------------------------------------------------------------------------------ refusals

    def refused(self, book: Book, error: KVError, pools: dict[str, int]) -> None:
        """A refusal must be typed and true. `pools`: units of each pool, in slabs."""
        book.state = "refused"
        if self.cordoned and isinstance(error, Draining):
            book.retry_at = time.monotonic() + 0.05
            return
        if book.ticket is not None and not isinstance(error, CapacityError):
            if self.disturbed or isinstance(error, TransferError):
                return
            raise Violation("refusal", f"{book.name}: a hand-off that nobody disturbed: {_told(error)}")
        if not isinstance(error, CapacityError):
            raise Violation("refusal", f"{book.name} was refused without a reason of room: {_told(error)}")
        if error.pool not in pools:
            raise Violation("refusal", f"{book.name}: no pool {error.pool!r}; there are {sorted(pools)}")
        if error.needed < 1 or error.needed <= error.free:
            raise Violation("refusal", f"{book.name}: needs {error.needed}, {error.free} are free: {_told(error)}")
        self._check_need(book, error, pools)
        for entry in filter(None, error.holder.split(", ")):
            self._check_holder(book, entry.rsplit(" (", 1)[0])
        book.retry_at = time.monotonic() + max(error.retry_after_ns, 1_000_000) / 1e9

    def _check_need(self, book: Book, error: CapacityError, pools: dict[str, int]) -> None:
        capacity = int(pools[error.pool] * (self.room.ceiling if isinstance(error, QuotaExceeded) else 1.0))
        if self._target.kind == "hisparse":
            return
        spans = -(-book.prompt // self._target.span_tokens) + -(-book.growth // self._target.span_tokens) + 1
        if error.needed > spans:
            raise Violation("refusal", f"{book.name} takes at most {spans} pages: {_told(error)}")
        if not error.retry_after_ns and spans - 2 <= int(capacity * self.room.ceiling):
            raise Violation("refusal", f"{book.name} could be had, yet it is said never to be: {_told(error)}")

    def _check_holder(self, book: Book, name: str) -> None:
        ours = name.rsplit("/", 1)[0].startswith("pressure-")
        known = any(name == other.name for other in self.books.values() if other is not book)
        recent = time.monotonic() - self._closed.get(name, -RECENT_S) < RECENT_S
        if ours and not known and not recent and name != book.name:
            raise Violation("refusal", f"{book.name}: {name} is named as a holder, and holds nothing")

    # ------------------------------------------------------------------------------------- account

    def check_account(self, pools: pb.PoolsReply, ledger_ok: bool) -> None:
        """The daemon's own account of its bytes, and ours."""
        if not ledger_ok:
            raise Violation("account", "its audit says the ledger does not sum up")
        for pool in pools.pools:
            states = (
                pool.free_bytes + pool.reserved_bytes + pool.filling_bytes + pool.ready_bytes + pool.draining_bytes
                + pool.quarantined_bytes
            )  # fmt: skip
            if states != pool.capacity_bytes:
                raise Violation("account", f"pool {pool.pool}: states sum to {states} of {pool.capacity_bytes} B")
            if pool.pool != f"{self._target.group}/hbm":
                continue
            held = len(self._holders) * self.unit_bytes * pool.ranks
            if held > pool.pinned_bytes:
                raise Violation("account", f"clients hold {held} B of {pool.pool}, it says {pool.pinned_bytes}")
            most = int(pool.capacity_bytes * self.room.ceiling)
            if held > most:
                raise Violation("account", f"clients hold {held} B of {pool.pool}, the ceiling is {most}")


def _told(error: KVError) -> str:
    return f"{type(error).__name__}: {error} {vars(error)}"
