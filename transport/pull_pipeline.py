"""Pulls: reads from a peer into staging, then placement out of it, chunk by chunk, several pulls in turn.

    waiting ──(staging free, its turn)──► reading ──(read done)──► placing ──► placed; when all are: DONE
       ▲                                     │                        │
       └──(failed, tries left)───────────────┤                        └─(error)──► FAILED
                                             ├─(failed for good)──► FAILED
                                             └─(deadline)──► FAILED: its staging stays quarantined until
                                                             the late read is seen to have ended

The daemon chooses where in staging a chunk lands. Two chunks whose ranges overlap never hold them at
once; who waits longest goes first, and nobody overtakes it into a range that it waits for. A pull has at most
`ahead` chunks in staging, so free staging is the credit that it waits for. A chunk whose read failed is read again:
the rest of the pull is not.

A read ends in staging and nowhere else, so one of unknown fate puts no page of a target in doubt. Where it may still
write, chunks of others are put elsewhere in the ring, and nothing more is read from that peer until it has ended.
One peer gets three quarters of the ring at most, so one that hangs leaves room. Without a place that is left over,
the pipeline is `exhausted`: only the end of the process makes an end of late bytes.

Where the regions of the targets can be read into, and what is placed consists of long runs, a chunk may go straight
to its places instead (`paths` says which way). It takes no staging then, and one of unknown fate leaves pages in doubt:
its pull is of unknown fate too, and the pipeline `exhausted` at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from kvmanager.errors import (
    ChecksumMismatch,
    Draining,
    InvalidArgument,
    KVError,
    PeerUnreachable,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from kvmanager.killpoints import reach
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.direct_reads import JoinedReads, Reader, final_places
from kvmanager.transport.executor import Completion, Executor, Outcome, RegionMap
from kvmanager.transport.nixl import ReadResult
from kvmanager.transport.paths import PullPath, PullPaths
from kvmanager.transport.ring import RingPull
from kvmanager.units import MILLISECOND_NS

TRIES: Final = 3
"""Reads of one chunk, when they fail in a way that leaves nothing in flight."""
RETRY_PAUSE_NS: Final = 20 * MILLISECOND_NS
"""Before the second; twice as long before the third."""


@dataclass(frozen=True)
class PullRequest:
    """A pull from one agent. `deadline_ns`: time allowed from the first read on. `packed`: by the peer, before.

    `path`: the way that is wanted, where there is more than one.
    """

    pull_id: int
    agent_name: str
    agent_metadata: bytes
    ring: RingPull
    deadline_ns: int
    packed: bool = False
    path: PullPath = PullPath.MEASURED


@dataclass(frozen=True)
class _Span:
    """Bytes [start, end) of staging, none for a straight read, and the agent that they are read from."""

    start: int
    end: int
    agent: str

    def overlaps(self, other: _Span) -> bool:
        """Whether any byte is in both."""
        return self.start < other.end and other.start < self.end


@dataclass
class _Again:
    """A chunk whose read failed, to be read again at `at_ns`."""

    chunk: int
    at_ns: int


@dataclass
class _Pull:
    """`next_chunk`: the first that was never read. `held`: chunks that hold staging, `rings`: where it puts them.

    `turned`: the request's ring by its first slot, where it was turned out of the way of late bytes.
    `direct`: chunks on their way straight to their places. `spent`: (bytes, ns) of reading those in staging.
    """

    request: PullRequest
    next_chunk: int = 0
    placed: int = 0
    deadline_ns: int | None = None
    held: dict[int, _Span] = field(default_factory=dict)
    rings: dict[int, RingPull] = field(default_factory=dict)
    turned: dict[int, RingPull] = field(default_factory=dict)
    again: list[_Again] = field(default_factory=list)
    tries: dict[int, int] = field(default_factory=dict)
    direct: set[int] = field(default_factory=set)
    spent: dict[int, tuple[int, int]] = field(default_factory=dict)
    moved_bytes: int = 0
    busy_ns: int = 0
    ended: tuple[Outcome, KVError | None] | None = field(default=None)

    def ring(self, turn: int) -> RingPull:
        """The ring, turned by so many slots."""
        ring = self.request.ring
        first = (ring.first_slot + turn) % ring.slots
        return self.turned.setdefault(first, replace(ring, first_slot=first)) if turn else ring

    def let_go(self, chunk: int) -> _Span:
        """The chunk holds its staging no longer."""
        del self.rings[chunk]
        self.direct.discard(chunk)
        self.spent.pop(chunk, None)
        return self.held.pop(chunk)

    @property
    def unread(self) -> bool:
        """Whether some chunk is to be read, now or later."""
        return bool(self.again) or self.next_chunk < self.request.ring.chunks

    def due(self, now: int) -> int | None:
        """The chunk to be read next; None when there is none, or not yet."""
        if self.again:
            return self.again[0].chunk if now >= self.again[0].at_ns else None
        return self.next_chunk if self.next_chunk < self.request.ring.chunks else None


class PullPipeline:
    """All pulls of one mover. `poll` starts at most `ahead` reads: where one blocks until it is done, that is one.

    `moved_bytes` of a pull counts bytes read from the peer, `busy_ns` reading and placing, of all chunks together.
    """

    def __init__(
        self,
        reader: Reader,
        regions: RegionMap,
        staging_region: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        placer: Executor | None = None,
        ahead: int = 1,
        straight: bool = False,
    ) -> None:
        """`placer`: copies out of staging, the pipeline's own; `CpuExecutor` when None.

        `ahead`: chunks of one pull in staging. Where a read blocks for its copy more than one is of no use.
        `straight`: reads may end in any region.
        """
        self._reader = JoinedReads(reader)
        self._straight = straight
        self._paths = PullPaths()
        self._regions = regions
        self._staging = staging_region
        self._clock_ns = clock_ns
        self._placer = placer or CpuExecutor(regions)
        self._ahead = ahead
        self._next_placement = 1
        self._on_host = regions.find(staging_region).array is not None
        self._pulls: dict[int, _Pull] = {}
        self._turns: list[int] = []  # who waits longest comes first
        self._reading: dict[int, tuple[_Pull, int]] = {}  # read -> pull and chunk
        self._placing: dict[int, tuple[_Pull, int]] = {}  # plan -> pull and chunk
        self._quarantine: dict[int, _Span] = {}  # read of unknown fate -> staging it may still write
        self._progressed = False
        self._closed = False
        self.retries = 0
        """Chunks read again so far."""
        self.exhausted = False
        """Whether late bytes have left some pull without a place, or pages in doubt: the owner ends its process."""

    def submit(self, request: PullRequest) -> None:
        """Takes a pull. What is wrong with it comes back as its FAILED completion, before a byte moves.

        Raises InvalidArgument for an id that is outstanding, Draining after `abandon`.
        """
        if self._closed:
            raise Draining(f"pull {request.pull_id}: this mover is stopping")
        if request.pull_id in self._pulls:
            raise InvalidArgument(f"pull {request.pull_id} is outstanding already")
        pull = self._pulls[request.pull_id] = _Pull(request)
        self._turns.append(request.pull_id)
        self._progressed = True
        try:
            if request.deadline_ns <= 0:
                raise InvalidArgument(
                    f"pull {request.pull_id}: a deadline of {request.deadline_ns} ns; a hung peer never errs"
                )
            request.ring.check(self._staging, self._regions)
            if request.ring.turn is not None and not request.packed:
                raise InvalidArgument(f"pull {request.pull_id}: pages that nobody packs can't be turned")
            self._reader.add_peer(request.agent_name, request.agent_metadata)
        except (InvalidArgument, TransferError) as error:
            pull.ended = (Outcome.FAILED, error)

    # ------------------------------------------------------------------------------------- progress

    def poll(self) -> list[Completion]:
        """Moves pulls on and returns those that ended since the last call."""
        self._progressed = False
        for result in self._reader.poll():
            self._after_read(result)
        for read_id in self._reader.settled():
            self._quarantine.pop(read_id, None)
        for completion in self._placer.poll():
            self._after_placement(completion)
        for _ in range(self._ahead):
            if not self._start_one():
                break
        ended = [pull for pull in self._pulls.values() if pull.ended is not None and not pull.held]
        return [self._end(pull) for pull in ended]

    def next_poll_s(self) -> float | None:
        """How long the owner may sleep before the next `poll`; None: until something is submitted."""
        if self._progressed or (self._placing and self._on_host):
            return 0.0
        if self._pulls:
            return 0.001 if self._on_host else 0.0003
        return 0.05 if self._quarantine else None

    def _after_read(self, result: ReadResult) -> None:
        self._progressed = True
        pull, chunk = self._reading.pop(result.read_id)
        pull.moved_bytes += result.moved_bytes
        pull.busy_ns += result.busy_ns
        straight = chunk in pull.direct
        if result.outcome is Outcome.UNKNOWN_FATE:
            self._quarantine[result.read_id] = pull.let_go(chunk)
            if straight:
                self.exhausted = True
                pull.ended = (Outcome.UNKNOWN_FATE, result.error)
            pull.ended = pull.ended or (Outcome.FAILED, result.error)
        elif result.outcome is not Outcome.DONE:
            pull.let_go(chunk)
            self._try_again(pull, chunk, result)
        elif pull.ended is not None:
            pull.let_go(chunk)
        else:
            reach("mover.pull.chunk_read")
            pull.spent[chunk] = result.moved_bytes, result.busy_ns
            if straight:
                self._in_place(pull, chunk, 0)
            else:
                self._place(pull, chunk)

    def _in_place(self, pull: _Pull, chunk: int, placing_ns: int) -> None:
        """All bytes of a chunk are where they belong."""
        reach("mover.pull.chunk_placed")
        size_bytes, reading_ns = pull.spent[chunk]
        path = PullPath.DIRECT if chunk in pull.direct else PullPath.RING
        self._paths.note(pull.request.agent_name, path, size_bytes, reading_ns + placing_ns)
        pull.let_go(chunk)
        pull.placed += 1

    def _try_again(self, pull: _Pull, chunk: int, result: ReadResult) -> None:
        """A read failed and left nothing in flight: the same chunk once more, unless it was tried enough."""
        pull.tries[chunk] = pull.tries.get(chunk, 0) + 1
        if pull.ended is not None:
            return
        if pull.tries[chunk] >= TRIES:
            pull.ended = (result.outcome, result.error)
            return
        self.retries += 1
        pull.again.append(_Again(chunk, self._clock_ns() + RETRY_PAUSE_NS * pull.tries[chunk]))

    def _place(self, pull: _Pull, chunk: int) -> None:
        ring = pull.rings[chunk]
        if self._on_host:
            try:
                ring.verify(chunk, self._regions[self._staging])
            except ChecksumMismatch as error:
                self._fail(pull, chunk, error)
                return
        plan = replace(ring.placed(chunk), plan_id=self._next_placement)
        if not self._on_host:
            # What lies on a GPU is summed up there, behind its placement; nobody uses it before the pull has ended.
            plan = replace(plan, sums=ring.sums_asked(chunk, self._staging))
        self._next_placement += 1
        self._placing[plan.plan_id] = pull, chunk
        self._placer.submit(plan)

    def _fail(self, pull: _Pull, chunk: int, error: KVError) -> None:
        pull.let_go(chunk)
        pull.ended = pull.ended or (Outcome.FAILED, error)

    def _after_placement(self, completion: Completion) -> None:
        self._progressed = True
        pull, chunk = self._placing.pop(completion.plan_id)
        pull.busy_ns += completion.busy_ns
        if completion.outcome is Outcome.DONE and completion.sums is not None:
            try:
                pull.request.ring.compare(chunk, completion.sums)
            except ChecksumMismatch as error:
                self._fail(pull, chunk, error)
                return
        if completion.outcome is Outcome.DONE:
            self._in_place(pull, chunk, completion.busy_ns)
            return
        pull.let_go(chunk)
        if completion.outcome is Outcome.UNKNOWN_FATE or pull.ended is None:
            pull.ended = (completion.outcome, completion.error)

    def _start_one(self) -> bool:
        """Starts the next chunk of the pull that has waited longest, of those whose staging is free. Whether any."""
        taken = [span for pull in self._pulls.values() for span in pull.held.values()]
        now = self._clock_ns()
        for pull_id in self._turns:
            pull = self._pulls[pull_id]
            if pull.ended is not None or self._is_over(pull, now) or len(pull.held) >= self._ahead:
                continue
            chunk = pull.due(now)
            if chunk is None:
                continue
            agent = pull.request.agent_name
            if any(late.agent == agent for late in self._quarantine.values()):
                pull.ended = (Outcome.FAILED, PeerUnreachable(f"agent {agent!r} hangs: reads from it are overdue"))
                continue
            if self._goes_straight(pull):
                self._turn_over(pull_id)
                self._start(pull, chunk, pull.request.ring, None)
                return True
            ring = self._ring_for(pull, chunk)
            if ring is None:
                self.exhausted = True
                late = f"reads of unknown fate may yet write into all staging that chunk {chunk} could use"
                pull.ended = (Outcome.FAILED, TransferFailed(f"pull {pull_id}: {late}; this mover must end"))
                continue
            span = _Span(*ring.staging_range(chunk), agent)
            if self._has_its_share(ring, span):
                continue
            if any(span.overlaps(other) for other in taken):
                taken.append(span)  # later pulls must not take what this one waits for
                continue
            self._turn_over(pull_id)
            self._start(pull, chunk, ring, span)
            return True
        return False

    def _turn_over(self, pull_id: int) -> None:
        """The pull has had its turn."""
        self._turns.remove(pull_id)
        self._turns.append(pull_id)

    def _goes_straight(self, pull: _Pull) -> bool:
        """Whether the pull's next chunk goes to its places without staging, where what is known of it is compared."""
        request = pull.request
        if not self._straight or request.packed or request.ring.expected is not None:
            return False
        return self._paths.next(request.agent_name, request.path, request.ring.run_bytes) is PullPath.DIRECT

    def _has_its_share(self, ring: RingPull, span: _Span) -> bool:
        """Whether reads from the peer would take more than three quarters of the ring. One always may."""
        held = [other for pull, chunk in self._reading.values() if (other := pull.held[chunk]).agent == span.agent]
        share = 3 * ring.slots * ring.chunk_pages * ring.page_bytes // 4
        return bool(held) and sum(other.end - other.start for other in [*held, span]) > share

    def _ring_for(self, pull: _Pull, chunk: int) -> RingPull | None:
        """The pull's ring, turned until no late byte can reach the chunk; None when there is no such place."""
        for turn in range(pull.request.ring.slots):
            ring = pull.ring(turn)
            span = _Span(*ring.staging_range(chunk), pull.request.agent_name)
            if not any(span.overlaps(late) for late in self._quarantine.values()):
                return ring
        return None

    def _is_over(self, pull: _Pull, now: int) -> bool:
        """Ends a pull that has no chunk left, or no time."""
        chunks = pull.request.ring.chunks
        if pull.placed == chunks:
            pull.ended = (Outcome.DONE, None)
        elif pull.deadline_ns is not None and now >= pull.deadline_ns and pull.unread:
            late = f"pull {pull.request.pull_id}: {pull.placed} of {chunks} chunks by its deadline"
            pull.ended = (
                Outcome.FAILED,
                TransferTimeout(f"{late} of {pull.request.deadline_ns} ns; no read is in flight any more when it ends"),
            )
        return pull.ended is not None

    def _start(self, pull: _Pull, chunk: int, ring: RingPull, span: _Span | None) -> None:
        """`span`: the staging it holds; None: it goes straight to its places."""
        self._progressed = True
        request = pull.request
        if pull.again:
            pull.again.pop(0)
            try:
                # Its connection may have been what failed.
                self._reader.add_peer(request.agent_name, request.agent_metadata)
            except TransferError as error:
                pull.ended = (Outcome.FAILED, error)
                return
        else:
            pull.next_chunk += 1
        if pull.deadline_ns is None:
            pull.deadline_ns = self._clock_ns() + request.deadline_ns
        if span is None:
            pull.direct.add(chunk)
            read_id = self._reader.read_places(request.agent_name, final_places(ring, chunk), pull.deadline_ns)
        else:
            addresses, offsets, lengths = ring.reads(chunk)
            asked = request.agent_name, addresses, self._staging, offsets, lengths, pull.deadline_ns
            packed, turn = request.packed, request.ring.turn
            read_id = self._reader.read_packed(*asked, turn) if packed else self._reader.read(*asked)
        pull.held[chunk], pull.rings[chunk] = span or _Span(0, 0, request.agent_name), ring
        self._reading[read_id] = pull, chunk

    def _end(self, pull: _Pull) -> Completion:
        assert pull.ended is not None
        pull_id = pull.request.pull_id
        del self._pulls[pull_id]
        self._turns.remove(pull_id)
        outcome, error = pull.ended
        path = self._paths.rates(pull.request.agent_name)
        return Completion(pull_id, outcome, pull.moved_bytes, pull.busy_ns, error, path=path)

    # ------------------------------------------------------------------------------------- control

    def cancel(self, pull_id: int) -> None:
        """Starts nothing more of a pull; a read in flight is waited for, and its bytes are not placed."""
        pull = self._pulls.get(pull_id)
        if pull is None or pull.ended is not None:
            return
        self._progressed = True
        pull.ended = (Outcome.CANCELLED, None)
        for plan_id, (of, _) in self._placing.items():
            if of is pull:
                self._placer.cancel(plan_id)

    def __contains__(self, pull_id: int) -> bool:
        """Whether the pull is outstanding."""
        return pull_id in self._pulls

    def outstanding(self) -> list[int]:
        """Ids whose completion `poll` has not returned, in the order of submission."""
        return list(self._pulls)

    def abandon(self) -> list[Completion]:
        """For a process that ends: a last result for every pull. Placements in flight are of unknown fate."""
        self._closed = True
        completions = self.poll()
        for pull_id, pull in list(self._pulls.items()):
            if any(of is pull for of, _ in self._placing.values()):
                late = TransferFailed(f"pull {pull_id}: the mover stopped while bytes were placed")
                pull.ended = (Outcome.UNKNOWN_FATE, late)
            elif pull.ended is None:
                pull.ended = (Outcome.CANCELLED, None)
            completions.append(self._end(pull))
        return completions
