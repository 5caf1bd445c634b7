"""An engine with memory of its own, as a client of a cache group: leases on pages that it copies from and to.

Calls may be repeated: a lease's id is chosen by the engine. The client decides nothing and keeps nothing but its epoch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import grpc
import numpy as np

from kvmanager.clients.attach import Attachment, attach, grpc_channel
from kvmanager.clients.engine import EngineClient
from kvmanager.clients.rankmemory import Memory
from kvmanager.clients.worker import WorkerGroup, WorkerRank, connect_worker
from kvmanager.errors import DaemonError, KVError, NotReady
from kvmanager.layout import KVLayout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.units import SECOND_NS
from kvmanager.wire import (
    ERROR_METADATA_KEY,
    TEXT_CHARS,
    error_from_proto,
    error_from_rpc,
    pack_u32,
    unpack_u32,
    unpack_u64,
)

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


class _CallStream:
    """A stream of calls, each answered in its turn: a queue going out, a thread reading in."""

    def __init__(self, stub: pb_grpc.EngineStub) -> None:
        self._outgoing: queue.SimpleQueue[pb.CacheCall | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[pb.CacheAnswer | grpc.RpcError | None] = queue.SimpleQueue()
        self._call = stub.CacheCalls(iter(self._outgoing.get, None))
        threading.Thread(target=self._read, name="cache-calls", daemon=True).start()

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._answers.put(answer)
            self._answers.put(None)
        except grpc.RpcError as error:
            self._answers.put(error)
        finally:
            self._outgoing.put(None)

    def ask(self, call: pb.CacheCall, timeout_s: float) -> pb.CacheAnswer | grpc.RpcError | None:
        """The answer; why the stream broke; None for its end. Raises queue.Empty after `timeout_s`."""
        self._outgoing.put(call)
        return self._answers.get(timeout=timeout_s)

    def close(self) -> None:
        """Ends it at once."""
        self._call.cancel()


class LeaseCalls:
    """The lease calls of one registered engine. Raises the daemon's typed errors, NotReady when it does not answer.

    They go one after the other over one stream, which is opened anew when it broke. Thread-safe.
    """

    def __init__(self, channel: grpc.Channel, client: EngineClient, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._stub = pb_grpc.EngineStub(channel)
        self._client = client
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._stream: _CallStream | None = None

    def lookup(self, keys: bytes, tokens: int) -> int:
        """Tokens of the prefix that the cache holds now; pins nothing."""
        client = self._client
        request = pb.LookupRequest(boot_id=client.boot_id, epoch=client.epoch, keys=keys, prompt_tokens=tokens)
        return int(self._ask(pb.CacheCall(lookup=request)).lookup.cached_tokens)

    def acquire(self, lease_id: int, keys: bytes, lease_ttl_ns: int = LEASE_TTL_NS, name: str = "") -> Lease:
        """Pins the longest known prefix of the keys; none known: there is no lease.

        `name`: the engine's own of the request that it is for; `explain` knows it by that.
        """
        request = pb.AcquireRequest(
            boot_id=self._client.boot_id, epoch=self._client.epoch, request_id=lease_id, keys=keys,
            lease_ttl_ns=lease_ttl_ns, name=name,
        )  # fmt: skip
        reply = self._ask(pb.CacheCall(acquire=request)).acquire
        return _lease(reply.tokens, reply.spans, _sums(reply))

    def done(
        self, lease_id: int, fence: pb.Fence | None = None, failed_pages: Sequence[int] = (), failure: str = ""
    ) -> None:
        """The copies out of the pages have ended, or will have with the fence. Raises UnknownLease.

        `failed_pages`: those whose bytes are not right; they are not offered again. `failure`: why copies failed.
        """
        request = pb.DoneRequest(
            boot_id=self._client.boot_id, epoch=self._client.epoch, lease_id=lease_id,
            failed_pages=pack_u32(failed_pages), fence=fence, failure=failure[:TEXT_CHARS],
        )  # fmt: skip
        self._ask(pb.CacheCall(done=request))

    def reserve(
        self, lease_id: int, keys: bytes, session_id: str = "", lease_ttl_ns: int = LEASE_TTL_NS,
        token_ids: bytes = b"", name: str = "",
    ) -> Lease:  # fmt: skip
        """Pages for what is not known of the keys, perhaps fewer than it takes. Raises PoolExhausted for none.

        `token_ids`: u32, those of the keys, where the namespace asks for them.
        """
        reserve = pb.StoreReserve(
            keys=keys, lease_ttl_ns=lease_ttl_ns, request_id=lease_id, session=pb.SessionHint(session_id=session_id),
            token_ids=token_ids, name=name,
        )  # fmt: skip
        reply = self._store(reserve=reserve)
        return _lease(reply.tokens, reply.spans, {})

    def commit(
        self, lease_id: int, fence: pb.Fence, tokens: int = 0, sums: Mapping[int, bytes] = MappingProxyType({})
    ) -> None:
        """The lease's pages are filled once the fence has passed, up to that many tokens; 0: all of them.

        `sums`: page -> checksums as in `Lease.sums`, of what was written. Raises UnknownLease.
        """
        commit = pb.StoreCommit(
            lease_id=lease_id, fence=fence, tokens=tokens, summed_pages=pack_u32(list(sums)),
            sums=b"".join(sums.values()),
        )  # fmt: skip
        self._store(commit=commit)

    def abort(self, lease_id: int, fence: pb.Fence | None = None) -> None:
        """Gives the pages back; nothing of them is published. Raises UnknownLease."""
        self._store(abort=pb.StoreAbort(lease_id=lease_id, fence=fence))

    def _store(self, **step: Any) -> pb.StoreReply:
        request = pb.StoreRequest(boot_id=self._client.boot_id, epoch=self._client.epoch, **step)
        return self._ask(pb.CacheCall(store=request)).store

    def _ask(self, call: pb.CacheCall) -> pb.CacheAnswer:
        """Asks, and once more on a new stream when the one there was has broken: calls may be repeated."""
        call.timeout_ns = int(self._timeout_s * SECOND_NS)
        with self._lock:
            fresh = self._stream is None
            answer = self._exchange(call)
            if not fresh and not isinstance(answer, pb.CacheAnswer):
                answer = self._exchange(call)
        if answer is None:
            raise NotReady("the daemon does not answer: it ended the stream")
        if isinstance(answer, grpc.RpcError):
            raise _reason(answer) from answer
        if answer.HasField("error"):
            raise error_from_proto(answer.error)
        return answer

    def _exchange(self, call: pb.CacheCall) -> pb.CacheAnswer | grpc.RpcError | None:
        if self._stream is None:
            self._stream = _CallStream(self._stub)
        try:
            answer = self._stream.ask(call, self._timeout_s)
        except queue.Empty:
            self._stream.close()  # an answer that comes late would pass for the next one's
            self._stream = None
            raise NotReady(f"the daemon does not answer within {self._timeout_s:g} s") from None
        if not isinstance(answer, pb.CacheAnswer):
            self._stream = None
        return answer

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise _reason(error) from error


def _reason(error: grpc.RpcError) -> KVError:
    """The daemon's own word, else that it does not answer."""
    return error_from_rpc(error) if _typed(error) else NotReady(f"the daemon does not answer: {error.code().name}")


def _typed(error: grpc.RpcError) -> bool:
    """Whether the daemon itself refused."""
    metadata: Any = error.trailing_metadata()
    return any(key == ERROR_METADATA_KEY for key, _ in metadata or ())


def _lease(tokens: int, spans: Sequence[pb.SpanRun], sums: dict[int, bytes]) -> Lease:
    uids = [uid for run in spans for uid in unpack_u64(run.uids, "uids").tolist()]
    return Lease(tokens, lease_pages(spans), uids, sums)


def _sums(reply: pb.AcquireReply) -> dict[int, bytes]:
    pages = unpack_u32(reply.summed_pages, "summed_pages").tolist()
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
        pages += unpack_u32(run.pages[0].device_pages, "device_pages").tolist()
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
                channel, engine=name, group=group, namespace=namespace, layout_fingerprints=[layout.fingerprint],
                ranks=ranks, renew=self._attach_again,
            )  # fmt: skip
            epoch = self.client.epoch
            self.workers = WorkerGroup([connect_worker(runtime_dir, name, epoch, rank) for rank in range(ranks)])
            for rank in self.workers.ranks:
                undo.callback(rank.close)
            self._calls = LeaseCalls(channel, self.client)
            self.lookup = self._calls.lookup
            self.acquire = self._calls.acquire
            self.reserve = self._calls.reserve
            self._rows = [page_rows(rank) for rank in self.workers.ranks]
            self._undo = undo.pop_all()

    def page(self, rank: int, page: int) -> Memory:
        """The bytes of a page on a rank, to be read or written."""
        row: Memory = self._rows[rank][page]
        return row

    def done(self, lease_id: int, failed_pages: Sequence[int] = (), failure: str = "") -> None:
        """See `LeaseCalls.done`."""
        self._calls.done(lease_id, self.workers.fence(), failed_pages, failure)

    def commit(self, lease_id: int, tokens: int = 0, sums: Mapping[int, bytes] = MappingProxyType({})) -> None:
        """See `LeaseCalls.commit`; what was written so far is fenced."""
        self._calls.commit(lease_id, self.workers.fence(), tokens, sums)

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
                self.workers.detach()
            finally:
                self.client.close()
                self._rows = [np.empty((0, 0), np.uint8)]
