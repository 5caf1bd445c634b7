"""An engine with memory of its own, as a client of a cache group: leases on pages that it copies from and to.

Calls may be repeated: a lease's id is chosen by the engine. The client decides nothing and keeps nothing but its epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy as np

from kvmanager.clients.attach import Attachment, attach, grpc_channel
from kvmanager.clients.callline import Question, Refused, SteadyLine
from kvmanager.clients.engine import EngineClient
from kvmanager.clients.rankmemory import Memory
from kvmanager.clients.worker import WorkerGroup, WorkerRank, connect_worker
from kvmanager.errors import DaemonError, KVError
from kvmanager.layout import KVLayout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.units import SECOND_NS
from kvmanager.wire import TEXT_CHARS, listed_u32, listed_u64, pack_u32

T = TypeVar("T")
LEASE_TTL_NS: Final = 60 * SECOND_NS
CALL_TIMEOUT_S: Final = 5.0
"""The daemon answers from memory; a call that takes this long is not answered."""


@dataclass(frozen=True)
class Lease:
    """Pages of a lease, one a segment: of an acquired prefix, or to be filled behind the `tokens` that are known.

    uids: of the pages' content. sums: page -> its checksums, u64, those of rank 0 first, where they are known.
    """

    tokens: int
    pages: list[int]
    uids: list[int] = field(default_factory=list)
    sums: dict[int, bytes] = field(default_factory=dict)


class Questions:
    """Lease calls of one registered engine, as messages to the daemon of the boot that it knows now."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def lookup(self, keys: bytes, tokens: int) -> Question[int]:
        """Tokens of the prefix that the cache holds now; pins nothing."""
        client = self._client
        request = pb.LookupRequest(boot_id=client.boot_id, epoch=client.epoch, keys=keys, prompt_tokens=tokens)
        return Question(pb.CacheCall(lookup=request), lambda answer: int(answer.lookup.cached_tokens))

    def acquire(
        self, lease_id: int, keys: bytes, lease_ttl_ns: int = LEASE_TTL_NS, name: str = ""
    ) -> Question[Lease]:  # fmt: skip
        """Pins the longest known prefix of the keys; none known: there is no lease.

        `name`: the engine's own of the request that it is for; `explain` knows it by that.
        """
        request = pb.AcquireRequest(
            boot_id=self._client.boot_id, epoch=self._client.epoch, request_id=lease_id, keys=keys,
            lease_ttl_ns=lease_ttl_ns, name=name,
        )  # fmt: skip
        return Question(pb.CacheCall(acquire=request), lambda answer: _acquired(answer.acquire))

    def done(
        self, lease_id: int, fence: pb.Fence | None = None, failed_pages: Sequence[int] = (), failure: str = ""
    ) -> Question[None]:
        """See `LeaseCalls.done`."""
        request = pb.DoneRequest(
            boot_id=self._client.boot_id, epoch=self._client.epoch, lease_id=lease_id,
            failed_pages=pack_u32(failed_pages), fence=fence, failure=failure[:TEXT_CHARS],
        )  # fmt: skip
        return Question(pb.CacheCall(done=request), _nothing)

    def reserve(
        self, lease_id: int, keys: bytes, session_id: str = "", lease_ttl_ns: int = LEASE_TTL_NS,
        token_ids: bytes = b"", name: str = "",
    ) -> Question[Lease]:  # fmt: skip
        """See `LeaseCalls.reserve`."""
        reserve = pb.StoreReserve(
            keys=keys, lease_ttl_ns=lease_ttl_ns, request_id=lease_id, session=pb.SessionHint(session_id=session_id),
            token_ids=token_ids, name=name,
        )  # fmt: skip
        return Question(self._store(reserve=reserve), lambda answer: _reserved(answer.store))

    def commit(
        self, lease_id: int, fence: pb.Fence, tokens: int = 0, sums: Mapping[int, bytes] = MappingProxyType({})
    ) -> Question[None]:
        """See `LeaseCalls.commit`."""
        commit = pb.StoreCommit(
            lease_id=lease_id, fence=fence, tokens=tokens, summed_pages=pack_u32(list(sums)),
            sums=b"".join(sums.values()),
        )  # fmt: skip
        return Question(self._store(commit=commit), _nothing)

    def abort(self, lease_id: int, fence: pb.Fence | None = None) -> Question[None]:
        """See `LeaseCalls.abort`."""
        return Question(self._store(abort=pb.StoreAbort(lease_id=lease_id, fence=fence)), _nothing)

    def _store(self, **step: Any) -> pb.CacheCall:
        return pb.CacheCall(
            store=pb.StoreRequest(boot_id=self._client.boot_id, epoch=self._client.epoch, **step)
        )


class LeaseCalls:
    """The lease calls of one registered engine. Raises the daemon's typed errors, NotReady when it does not answer.

    They go one after the other over one line, which is opened anew when it broke. Thread-safe.
    """

    def __init__(self, attachment: Attachment, client: EngineClient, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._line = SteadyLine(attachment, timeout_s)
        self._client = client
        self._timeout_s = timeout_s
        self.questions: Final = Questions(client)
        """Its calls as messages."""
        self._lock = threading.Lock()

    def lookup(self, keys: bytes, tokens: int) -> int:
        """See `Questions.lookup`."""
        return self._answered(self.questions.lookup(keys, tokens))

    def acquire(self, lease_id: int, keys: bytes, lease_ttl_ns: int = LEASE_TTL_NS, name: str = "") -> Lease:
        """See `Questions.acquire`."""
        return self._answered(self.questions.acquire(lease_id, keys, lease_ttl_ns, name))

    def done(
        self, lease_id: int, fence: pb.Fence | None = None, failed_pages: Sequence[int] = (), failure: str = ""
    ) -> None:
        """The copies out of the pages have ended, or will have with the fence. Raises UnknownLease.

        `failed_pages`: those whose bytes are not right; they are not offered again. `failure`: why copies failed.
        """
        self._answered(self.questions.done(lease_id, fence, failed_pages, failure))

    def release(self, lease_id: int, fence: pb.Fence | None = None) -> None:
        """As `done` for copies that ended well, said and not waited for: it is on its way when this returns.

        The daemon's answer is read with the next call's, and logged where it is an error; a daemon that was replaced
        before it heard is told with the next call after `renew`. Raises NotReady.
        """
        with self._lock:
            self._line.tell(lambda: self.questions.done(lease_id, fence))

    def settle(self) -> None:
        """Waits until all that was released was heard. Raises NotReady."""
        with self._lock:
            self._line.settle()

    def reserve(
        self, lease_id: int, keys: bytes, session_id: str = "", lease_ttl_ns: int = LEASE_TTL_NS,
        token_ids: bytes = b"", name: str = "",
    ) -> Lease:  # fmt: skip
        """Pages for what is not known of the keys, perhaps fewer than it takes. Raises PoolExhausted for none.

        `token_ids`: u32, those of the keys, where the namespace asks for them.
        """
        return self._answered(self.questions.reserve(lease_id, keys, session_id, lease_ttl_ns, token_ids, name))

    def commit(
        self, lease_id: int, fence: pb.Fence, tokens: int = 0, sums: Mapping[int, bytes] = MappingProxyType({})
    ) -> None:
        """The lease's pages are filled once the fence has passed, up to that many tokens; 0: all of them.

        `sums`: page -> checksums as in `Lease.sums`, of what was written. Raises UnknownLease.
        """
        self._answered(self.questions.commit(lease_id, fence, tokens, sums))

    def commit_and_reserve(self, lease_id: int, fence: pb.Fence, then: Question[Lease]) -> Lease:
        """`commit`, and the `reserve` of what is stored next, in one go: half the round trips of a row of stores.

        `then`: of `Questions.reserve`. Raises what the commit raises, and then nothing is reserved; PoolExhausted when
        the pages are committed and none are reserved.
        """
        with self._lock:
            committed, reserved = self._line.exchange_all([self.questions.commit(lease_id, fence), then])
            if isinstance(committed, Refused) and not isinstance(reserved, Refused):
                self._line.tell(lambda: self.questions.abort(then.call.store.reserve.request_id))
        for answer in (committed, reserved):
            if isinstance(answer, Refused):
                raise answer.error
        lease: Lease = reserved
        return lease

    def abort(self, lease_id: int, fence: pb.Fence | None = None) -> None:
        """Gives the pages back; nothing of them is published. Raises UnknownLease."""
        self._answered(self.questions.abort(lease_id, fence))

    def _answered(self, question: Question[T]) -> T:
        with self._lock:
            return self._line.exchange(question)

    def hang_up(self) -> None:
        """Ends the line. Idempotent."""
        self._line.close()


def _lease(tokens: int, spans: Sequence[pb.SpanRun], sums: dict[int, bytes]) -> Lease:
    uids = [uid for run in spans for uid in listed_u64(run.uids, "uids")]
    return Lease(tokens, lease_pages(spans), uids, sums)


def _nothing(_: pb.CacheAnswer) -> None:
    pass


def _reserved(reply: pb.StoreReply) -> Lease:
    return _lease(reply.tokens, reply.spans, {})


def _acquired(reply: pb.AcquireReply) -> Lease:
    return _lease(reply.tokens, reply.spans, _sums(reply))


def _sums(reply: pb.AcquireReply) -> dict[int, bytes]:
    pages = listed_u32(reply.summed_pages, "summed_pages")
    each, rest = divmod(len(reply.sums), len(pages)) if pages else (0, len(reply.sums))
    if rest or each % 8:
        raise DaemonError(f"{len(reply.sums)} bytes of sums for {len(pages)} pages")
    return {page: reply.sums[at * each : (at + 1) * each] for at, page in enumerate(pages)}


def lease_pages(spans: Sequence[pb.SpanRun]) -> list[int]:
    """Page indexes of all spans of a cache group, in token order."""
    pages: list[int] = []
    for run in spans:
        if len(run.pages) != 1:
            raise DaemonError(f"a cache group has one page class, the answer has {len(run.pages)}")
        pages += listed_u32(run.pages[0].device_pages, "device_pages")
    return pages


def page_rows(worker: WorkerRank) -> Memory:
    """The cache's pages on one rank, uint8[pages, page_bytes]; no copy."""
    (held,) = worker.classes.values()
    page_bytes = held.layout.page_bytes
    memory: Memory = held.device
    return memory[: len(memory) // page_bytes * page_bytes].reshape(-1, page_bytes)


class CacheEngine:
    """A whole engine in one process: scheduler and all ranks. For small engines and tests."""

    def __init__(
        self, runtime_dir: Path, name: str, *, group: str, namespace: pb.Namespace, layout: KVLayout, ranks: int
    ) -> None:
        """Registers and attaches. Raises the daemon's typed errors, NotReady when no node is there."""
        with ExitStack() as undo:
            self._attachment: Attachment = attach(runtime_dir, "engine", name)
            undo.callback(self._attachment.close)
            channel = grpc_channel(self._attachment)
            undo.callback(channel.close)
            self.client = EngineClient(
                channel, attachment=self._attachment, engine=name, group=group, namespace=namespace,
                layout_fingerprints=[layout.fingerprint], ranks=ranks, renew=self._attach_again,
            )  # fmt: skip
            epoch = self.client.epoch
            self.workers = WorkerGroup([connect_worker(runtime_dir, name, epoch, rank) for rank in range(ranks)])
            for rank in self.workers.ranks:
                undo.callback(rank.close)
            self._calls = LeaseCalls(self._attachment, self.client)
            undo.callback(self._calls.hang_up)
            self.lookup = self._calls.lookup
            self.acquire = self._calls.acquire
            self.reserve = self._calls.reserve
            self.settle = self._calls.settle
            self._rows = [page_rows(rank) for rank in self.workers.ranks]
            self._undo = undo.pop_all()

    def page(self, rank: int, page: int) -> Memory:
        """The bytes of a page on a rank, to be read or written."""
        row: Memory = self._rows[rank][page]
        return row

    def done(self, lease_id: int, failed_pages: Sequence[int] = (), failure: str = "") -> None:
        """See `LeaseCalls.done`."""
        self._calls.done(lease_id, self.workers.fence(), failed_pages, failure)

    def release(self, lease_id: int) -> None:
        """See `LeaseCalls.release`."""
        self._calls.release(lease_id, self.workers.fence())

    def commit(self, lease_id: int, tokens: int = 0, sums: Mapping[int, bytes] = MappingProxyType({})) -> None:
        """See `LeaseCalls.commit`; what was written so far is fenced."""
        self._calls.commit(lease_id, self.workers.fence(), tokens, sums)

    def commit_and_reserve(self, lease_id: int, then_lease_id: int, then_keys: bytes) -> Lease:
        """See `LeaseCalls.commit_and_reserve`."""
        then = self._calls.questions.reserve(then_lease_id, then_keys)
        return self._calls.commit_and_reserve(lease_id, self.workers.fence(), then)

    def abort(self, lease_id: int) -> None:
        """See `LeaseCalls.abort`."""
        self._calls.abort(lease_id)

    def renew(self) -> None:
        """Goes on after the daemon was replaced. Raises StaleBoot when the new one knows nothing of us."""
        self.client.boot_id = self._attach_again()
        self.client.step()  # a stream tells the daemon that this epoch lives

    def _attach_again(self) -> int:
        for rank in self.workers.ranks:
            rank.renew()
        return self._attachment.renew()

    def close(self) -> None:
        """Detaches the ranks and leaves."""
        with self._undo:
            try:
                with suppress(KVError):  # the daemon is away
                    self._calls.settle()
                self.workers.detach()
            finally:
                self.client.close()
                self._rows = [np.empty((0, 0), np.uint8)]
