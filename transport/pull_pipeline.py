"""Pulls: reads from a peer into staging, then placement out of it, chunk by chunk, several pulls in turn.

    waiting ──(staging free, its turn)──► reading ──(read done)──► placing ──► waiting for the next chunk
                                             │                        │              └─(none left)─► DONE
                                             ├─(error)──► FAILED      └─(error)──► FAILED
                                             └─(deadline)──► UNKNOWN_FATE: its staging stays quarantined
                                                             until the late read is seen to have ended

The daemon chooses where in staging a chunk lands. Two chunks whose ranges overlap never hold them at
once; who waits longest goes first, and nobody overtakes it into a range that it waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvmanager.errors import (
    ChecksumMismatch,
    Draining,
    InvalidArgument,
    KVError,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from kvmanager.killpoints import reach
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.executor import Completion, Outcome, RegionMap
from kvmanager.transport.nixl import NixlReader, ReadResult
from kvmanager.transport.ring import RingPull


@dataclass(frozen=True)
class PullRequest:
    """A pull from one agent. `deadline_ns`: time allowed from the first read on."""

    pull_id: int
    agent_name: str
    agent_metadata: bytes
    ring: RingPull
    deadline_ns: int


@dataclass(frozen=True)
class _Span:
    """Bytes [start, end) of staging."""

    start: int
    end: int

    def overlaps(self, other: _Span) -> bool:
        """Whether any byte is in both."""
        return self.start < other.end and other.start < self.end


@dataclass
class _Pull:
    request: PullRequest
    chunk: int = 0
    deadline_ns: int | None = None
    read_id: int | None = None
    placing: bool = False
    moved_bytes: int = 0
    busy_ns: int = 0
    ended: tuple[Outcome, KVError | None] | None = field(default=None)

    @property
    def span(self) -> _Span:
        """Staging of its current chunk."""
        return _Span(*self.request.ring.staging_range(self.chunk))

    @property
    def in_flight(self) -> bool:
        """Whether its current chunk holds staging."""
        return self.read_id is not None or self.placing


class PullPipeline:
    """All pulls of one mover. `poll` starts at most one read, for over loopback a read blocks until it is done.

    `moved_bytes` of a pull counts bytes read from the peer, `busy_ns` reading and placing.
    """

    def __init__(
        self,
        reader: NixlReader,
        regions: RegionMap,
        staging_region: int,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._reader = reader
        self._regions = regions
        self._staging = staging_region
        self._clock_ns = clock_ns
        self._placer = CpuExecutor(regions)
        self._pulls: dict[int, _Pull] = {}
        self._turns: list[int] = []  # who waits longest comes first
        self._readers: dict[int, _Pull] = {}
        self._quarantine: dict[int, _Span] = {}  # read of unknown fate -> staging it may still write
        self._progressed = False
        self._closed = False

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
        self._start_one()
        ended = [pull for pull in self._pulls.values() if pull.ended is not None and not pull.in_flight]
        return [self._end(pull) for pull in ended]

    def next_poll_s(self) -> float | None:
        """How long the owner may sleep before the next `poll`; None: until something is submitted."""
        if self._progressed or self._placer.outstanding():
            return 0.0
        if self._pulls:
            return 0.001
        return 0.05 if self._quarantine else None

    def _after_read(self, result: ReadResult) -> None:
        self._progressed = True
        pull = self._readers.pop(result.read_id)
        pull.read_id = None
        pull.moved_bytes += result.moved_bytes
        pull.busy_ns += result.busy_ns
        if result.outcome is not Outcome.DONE:
            if result.outcome is Outcome.UNKNOWN_FATE:
                self._quarantine[result.read_id] = pull.span
            pull.ended = (result.outcome, result.error)
        elif pull.ended is None:
            reach("mover.pull.chunk_read")
            if pull.request.ring.expected is not None:
                try:
                    pull.request.ring.verify(pull.chunk, self._regions[self._staging])
                except ChecksumMismatch as error:
                    pull.ended = (Outcome.FAILED, error)
                    return
            pull.placing = True
            self._placer.submit(replace(pull.request.ring.placed(pull.chunk), plan_id=pull.request.pull_id))

    def _after_placement(self, completion: Completion) -> None:
        self._progressed = True
        pull = self._pulls[completion.plan_id]
        pull.placing = False
        pull.busy_ns += completion.busy_ns
        if completion.outcome is Outcome.DONE:
            reach("mover.pull.chunk_placed")
            pull.chunk += 1
        elif pull.ended is None:
            pull.ended = (completion.outcome, completion.error)

    def _start_one(self) -> None:
        """Starts the chunk of the pull that has waited longest, of those whose staging is free."""
        held = [pull.span for pull in self._pulls.values() if pull.in_flight]
        for pull_id in self._turns:
            pull = self._pulls[pull_id]
            if pull.in_flight or pull.ended is not None or self._is_over(pull):
                continue
            span = pull.span
            if any(span.overlaps(late) for late in self._quarantine.values()):
                pull.ended = (
                    Outcome.FAILED,
                    TransferFailed(
                        f"pull {pull_id}: chunk {pull.chunk} needs staging that a read of unknown fate may yet write; "
                        "use other staging or restart this mover"
                    ),
                )
                continue
            if any(span.overlaps(other) for other in held):
                held.append(span)  # later pulls must not take what this one waits for
                continue
            self._turns.remove(pull_id)
            self._turns.append(pull_id)
            self._start(pull)
            return

    def _is_over(self, pull: _Pull) -> bool:
        """Ends a pull that has no chunk left, or no time."""
        if pull.chunk == pull.request.ring.chunks:
            pull.ended = (Outcome.DONE, None)
        elif pull.deadline_ns is not None and self._clock_ns() >= pull.deadline_ns:
            late = f"pull {pull.request.pull_id}: {pull.chunk} of {pull.request.ring.chunks} chunks by its deadline"
            pull.ended = (
                Outcome.FAILED,
                TransferTimeout(f"{late} of {pull.request.deadline_ns} ns; nothing is in flight"),
            )
        return pull.ended is not None

    def _start(self, pull: _Pull) -> None:
        self._progressed = True
        if pull.deadline_ns is None:
            pull.deadline_ns = self._clock_ns() + pull.request.deadline_ns
        addresses, offsets, lengths = pull.request.ring.reads(pull.chunk)
        pull.read_id = self._reader.read(
            pull.request.agent_name, addresses, self._staging, offsets, lengths, pull.deadline_ns
        )
        self._readers[pull.read_id] = pull

    def _end(self, pull: _Pull) -> Completion:
        assert pull.ended is not None
        pull_id = pull.request.pull_id
        del self._pulls[pull_id]
        self._turns.remove(pull_id)
        outcome, error = pull.ended
        return Completion(pull_id, outcome, pull.moved_bytes, pull.busy_ns, error)

    # ------------------------------------------------------------------------------------- control

    def cancel(self, pull_id: int) -> None:
        """Starts nothing more of a pull; a read in flight is waited for, and its bytes are not placed."""
        pull = self._pulls.get(pull_id)
        if pull is None or pull.ended is not None:
            return
        self._progressed = True
        pull.ended = (Outcome.CANCELLED, None)
        if pull.placing:
            self._placer.cancel(pull_id)

    def __contains__(self, pull_id: int) -> bool:
        """Whether the pull is outstanding."""
        return pull_id in self._pulls

    def outstanding(self) -> list[int]:
        """Ids whose completion `poll` has not returned, in the order of submission."""
        return list(self._pulls)

    def abandon(self) -> list[Completion]:
        """For a process that ends: a last result for every pull. Reads in flight are of unknown fate."""
        self._closed = True
        completions = self.poll()
        for pull_id, pull in list(self._pulls.items()):
            if pull.read_id is not None:
                late = TransferFailed(f"pull {pull_id}: the mover stopped during a read")
                pull.ended = (Outcome.UNKNOWN_FATE, late)
            elif pull.ended is None:
                pull.ended = (Outcome.CANCELLED, None)
            completions.append(self._end(pull))
        return completions
