"""What the scheduler's side knows of each request of the engine, and of what it holds at the daemon for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from kvmanager.clients.callline import Question
from kvmanager.clients.callqueue import Answer
from kvmanager.clients.leases import Lease, Questions
from kvmanager.clients.vllm.bell import Bell
from kvmanager.clients.vllm.calls import About, EngineCalls, Passed, Tell
from kvmanager.clients.vllm.handover import Offer
from kvmanager.clients.vllm.orders import Ended
from kvmanager.protos import kvmanager_pb2 as pb

T = TypeVar("T")


class Line(Protocol):
    """The daemon, as `Link` gives it."""

    epoch: int
    up: bool
    checksum_one_in: int
    bell: Bell

    def read(self, make: Callable[[Questions], Question[Any]], *, here: bool) -> Answer[Any]:
        """At once, beside everything else, or fails. here: in this thread, which nobody waits for meanwhile."""
        ...

    def hear(self) -> None:
        """Takes answers to what was read."""
        ...

    def ask(self, call: Callable[[EngineCalls], object]) -> Answer[object]:
        """Soon, behind what was asked and told before, or fails."""
        ...

    def tell(self, call: Callable[[EngineCalls], object]) -> Answer[object]:
        """Until it is heard."""
        ...

    def landed(self, request_id: int) -> Answer[Lease | None]:
        """What a pull brings, once it is there; to be cancelled when nobody asks any more."""
        ...

    def turn_ended(self, session_id: str, stop_reason: str) -> None:
        """A session's turn is over."""
        ...


@dataclass
class Load:
    """blocks [first, first + len(block_ids)) of a request, asked for as lease `lease_id`."""

    lease_id: int
    first: int
    block_ids: list[int]
    asked: Answer[object]
    epoch: int


@dataclass
class Store:
    """A reservation. first: block of the first page. ordered, copied: leading pages that were, and are, filled.

    uids: of the pages' content. said: of copies that made checksums, what each rank said.
    """

    lease_id: int
    asked: Answer[object]
    epoch: int
    first: int = 0
    pages: list[int] = field(default_factory=list)
    granted: bool = False
    ordered: int = 0
    copied: int = 0
    failed: bool = False
    uids: list[int] = field(default_factory=list)
    said: list[dict[int, Ended]] = field(default_factory=list)

    def to_be_summed(self, start: int, end: int, one_in: int) -> list[int]:
        """Those of pages [start, end) that are to have checksums."""
        if one_in == 0 or not self.uids:
            return []
        pages = self.pages[start:end]
        if one_in == 1:
            return pages
        return [page for page, uid in zip(pages, self.uids[start:end], strict=True) if uid % one_in == 0]

    def complete(self, held: Held) -> int:
        """Leading pages whose blocks are complete."""
        return min(held.final - self.first, len(self.pages))

    def written(self, line: Line, block_tokens: int, passed: Callable[[], Passed]) -> None:
        """Some more pages are filled; a reservation tells of all at its end."""

    def end(self, line: Line, block_tokens: int, passed: Passed) -> None:
        """Publishes what was copied; nothing where a copy failed."""
        lease_id, tokens, said = self.lease_id, (self.first + self.copied) * block_tokens, self.said
        if self.copied and not self.failed:
            line.tell(lambda calls: calls.commit(lease_id, passed.fence(), tokens, sums_of(said)))
        else:
            covering = passed if self.ordered else None
            line.tell(lambda calls: calls.abort(lease_id, covering.fence() if covering else None))


@dataclass
class Export(Store):
    """A whole prompt of `tokens` tokens on its way to another node, its last block perhaps not full.

    ticket, told: there once it is granted. renewed_s: when its lease was extended last.
    """

    tokens: int = 0
    ticket: pb.Ticket = field(default_factory=pb.Ticket)
    told: dict[str, Any] = field(default_factory=dict)
    renewed_s: float = 0.0

    def complete(self, held: Held) -> int:
        """Leading pages whose blocks are complete; the last when the prompt is."""
        return len(self.pages) if held.end >= self.tokens else super().complete(held)

    @property
    def done(self) -> bool:
        """Whether all of it is filled."""
        return self.granted and not self.failed and self.copied == len(self.pages)

    def written(self, line: Line, block_tokens: int, passed: Callable[[], Passed]) -> None:
        """Some more pages are filled: who pulls goes on."""
        if self.failed:
            return
        request_id, capacity = self.lease_id, self.tokens
        tokens = min((self.first + self.copied) * block_tokens, self.tokens)
        covering = passed()
        line.tell(lambda calls: calls.write(request_id, tokens, capacity, covering.fence()))

    def end(self, line: Line, block_tokens: int, passed: Passed) -> None:
        """No more pages come; where some are missing, who pulls is told."""
        del block_tokens
        request_id, reason = self.lease_id, pb.FINISHED if self.done else pb.ABORTED
        line.tell(lambda calls: calls.close(request_id, passed.fence(), reason))

    def renew(self, line: Line) -> None:
        """Keeps the ticket alive while its prompt is computed, a few times a lease."""
        now = time.monotonic()
        if self.granted and now - self.renewed_s > self.ticket.lease_ttl_ns / 3e9:
            self.renewed_s, ticket_id = now, self.ticket.ticket_id
            line.ask(lambda calls: calls.renew([ticket_id]))


@dataclass
class Pull:
    """The first tokens of a request on their way from another node.

    asked: for as request `request_id` of the session. landing: the answer when it is not there at once. lease: what has
    landed.
    """

    offer: Offer
    begun_s: float
    request_id: int = 0
    asked: Answer[object] | None = None
    landing: Answer[Lease | None] | None = None
    lease: Lease | None = None

    def look(self, line: Line) -> bool:
        """Whether it is still on its way. Raises why it did not come."""
        if self.landing is not None:
            self.lease = self.landing.result() if self.landing.done() else None
        elif self.asked is not None and self.asked.done():
            answer = self.asked.result()
            assert answer is None or isinstance(answer, Lease)
            self.lease = answer
            if answer is None:
                self.landing = line.landed(self.request_id)
                self.landing.wake(line.bell.ring)
        return self.lease is None


@dataclass(slots=True)
class Held:
    """A request. keys: one a full block of its tokens, growing.

    full: blocks of which all tokens are computed after that step; with `keys_seen` keys it was looked at last.
    known: cached tokens as looked up. end: tokens that are computed after the step that is being built. final: leading
    blocks that are complete then, in `blocks`. saved: leading blocks that the cache has or had. finished_s: when it
    ended, 0 before. barred: a load of it failed. It still holds the blocks of that load, so it is computed and offered
    no other. export_tokens: of a prompt that is to be handed over and is not asked for yet, 0: none; tell: what the
    answer says of it then.
    """

    request_id: str
    keys: Sequence[bytes]
    about: About
    lookup: Answer[object] | None = None
    asked_s: float = 0.0
    known: int | None = None
    local: int = 0
    load: Load | None = None
    store: Store | None = None
    export: Export | None = None
    export_tokens: int = 0
    tell: Tell | None = None
    pull: Pull | None = None
    pause_until: float = 0.0
    blocks: list[int] = field(default_factory=list)
    end: int = 0
    full: int = 0
    keys_seen: int = 0
    final: int = 0
    saved: int = 0
    finished_s: float = 0.0
    barred: bool = False
    delayed: bool = False
    stop_reason: str = ""


    def come_to(self, end: int, block_tokens: int, block_ids: Callable[[str], Sequence[int]]) -> bool:
        """`end` tokens are computed after the step; whether there are other full blocks, or keys, than there were.

        Of many requests that decode few have. Only then it is asked for its block ids.
        """
        full, keys = end // block_tokens, len(self.keys)
        self.end = end
        if full == self.full and keys == self.keys_seen and self.blocks:
            return False
        self.blocks, self.full, self.keys_seen = list(block_ids(self.request_id)), full, keys
        self.final = min(full, keys, len(self.blocks))
        return True

    def preempt(self) -> None:
        """Its blocks are others' from now on."""
        self.end, self.full, self.final, self.blocks = 0, 0, 0, []

    @property
    def waits(self) -> bool:
        """Whether it can't be scheduled before the daemon has answered."""
        asked = self.lookup is not None or self.pull is not None or bool(self.export_tokens)
        return asked or (self.export is not None and not self.export.granted)

    def settled(self) -> bool:
        """Whether nothing is to be done for it until it comes further, or something else happens to it."""
        under_way = self.lookup or self.load or self.store or self.export or self.export_tokens or self.pull
        return not under_way and not self.finished_s and len(self.keys) <= self.saved


def sums_of(said: Sequence[dict[int, Ended]]) -> dict[int, bytes]:
    """Page -> its checksums of all ranks, from what each rank said of each copy."""
    return {
        page: b"".join(of[rank].sums[page] for rank in sorted(of)) for of in said if 0 in of for page in of[0].sums
    }


def result_or(future: Answer[object], failed: T) -> T:
    """What it gave; `failed` where it raised."""
    try:
        value = future.result()
    except Exception:
        return failed
    assert isinstance(value, type(failed))
    return value
