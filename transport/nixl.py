"""NIXL reads: bytes of another process (on this node or another) into regions of this one.

What the code below leans on, found by trying NIXL 1.5.1:

* Releasing an unfinished transfer does not cancel it: its bytes still arrive. A handle is released only
  once it is terminal; a read that misses its deadline is of unknown fate and its handle is kept.
* A hung peer gives no error, ever, so every read has a deadline of our own.
* The agent needs a progress thread: even where UCX copies straight out of the peer's memory (CMA), the
  first contact is answered by the peer's worker, and an idle peer without the thread never answers.
  Python's API makes that thread spin on a whole core; `_tamed_config` makes it sleep until UCX has an
  event, waking at least each `PROGRESS_WAKE_US` (then 0.1 % of a core when idle).
* Metadata outlives the memory it describes, so a read of freed memory succeeds. Leases, and generations
  checked after the read, are the caller's.

One thread owns a reader. Over loopback `read` blocks for the copy itself: keep reads to some MiB.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvmanager.errors import (
    ConfigError,
    InvalidArgument,
    KVError,
    PeerUnreachable,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from kvmanager.transport.executor import Outcome, RegionMap
from kvmanager.transport.listeners import check_listeners
from kvmanager.transport.runs import join_neighbours

U64Array = npt.NDArray[np.uint64]

PROGRESS_WAKE_US: Final = 100_000
_PACKAGES: Final = ("nixl_cu13", "nixl_cu12")
"""Halves of NIXL, taken directly: the meta package `nixl` picks by what else is imported, and pulls both."""
_HARMLESS_AT_POST: Final = ("nixlRemoteDisconnectError", "nixlNotFoundError", "nixlInvalidParamError")
"""Raised by a post that left nothing in flight. After any other error bytes may still arrive."""


@dataclass(frozen=True, slots=True)
class UcxSettings:
    """What UCX may use. The default stays on this machine: UCX's TCP has no authentication of its own.

    `tcp` must be among the transports even where others move the bytes: it carries failure detection.
    """

    transports: str = "tcp,cma,self"
    net_devices: str = "lo"

    @property
    def interfaces(self) -> list[str]:
        """The names in `net_devices`."""
        return self.net_devices.split(",")

    @classmethod
    def for_device(cls, device: str) -> UcxSettings:
        """The default of a mover. Where there is a GPU, UCX refuses to start without a transport for it."""
        return cls() if device == "cpu" else cls(transports=f"{cls().transports},cuda_copy,cuda_ipc")


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The kind of memory that is read at a peer. `gpu`: its number there, None for host memory."""

    gpu: int | None = None


HOST_MEMORY: Final = PeerMemory()


def load_nixl(settings: UcxSettings) -> ModuleType:
    """The installed NIXL API, with UCX's environment set before its first import.

    For a process of its own (the mover): the environment is the process's. Raises ConfigError when
    NIXL is not installed.
    """
    os.environ["UCX_TLS"] = settings.transports
    os.environ["UCX_NET_DEVICES"] = settings.net_devices
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is not None:
            return importlib.import_module(f"{package}._api")
    raise ConfigError(f"NIXL is not installed: none of {', '.join(_PACKAGES)} is here; pip install nixl-cu13==1.5.1")


@contextmanager
def _tamed_config(bindings: Any) -> Iterator[None]:
    """While active, agents get a progress thread that sleeps: the API writes 0 (spin) into `pthrDelay`."""
    original = bindings.nixlAgentConfig

    class TamedConfig(original):  # type: ignore[misc, valid-type]  # the bindings have no types
        @property
        def pthrDelay(self) -> int:
            return int(original.pthrDelay.fget(self))

        @pthrDelay.setter
        def pthrDelay(self, _microseconds: int) -> None:
            original.pthrDelay.fset(self, PROGRESS_WAKE_US)

    bindings.nixlAgentConfig = TamedConfig
    try:
        yield
    finally:
        bindings.nixlAgentConfig = original


def agent_name(name: str, incarnation: int) -> str:
    """The name that an agent goes by: its process's incarnation is part of it."""
    return f"{name}-{incarnation:016x}"


@dataclass(frozen=True, slots=True)
class ReadResult:
    """How a read ended; UNKNOWN_FATE is followed, perhaps, by the read's id in `NixlReader.settled`."""

    read_id: int
    outcome: Outcome
    moved_bytes: int
    busy_ns: int
    error: KVError | None = None


@dataclass
class _Read:
    peer: str
    handle: Any
    total_bytes: int
    posted_ns: int
    deadline_ns: int


class NixlReader:
    """One NIXL agent that reads. `clock_ns` is monotonic; deadlines are points of it.

    `name` gets the process's incarnation as its tail: a peer must never take a successor for the one it knew.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        regions: RegionMap,
        settings: UcxSettings | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        gpu: int = 0,
        polled: bool = False,
    ) -> None:
        """`gpu`: number of the device that regions without an array lie on.

        `polled`: the owner calls `messages` each few milliseconds, and that is all the progress there is. The thread
        that makes progress else would wait for the same locks as the owner, milliseconds for each message.
        """
        self._gpu = gpu
        settings = settings or UcxSettings()
        api = load_nixl(settings)
        self.name = agent_name(name, incarnation)
        self._regions = regions
        self._clock_ns = clock_ns
        self._bindings = importlib.import_module(f"{api.__package__}._bindings")
        self._errors: tuple[type[Exception], ...] = tuple(
            getattr(self._bindings, e) for e in dir(self._bindings) if e.startswith("nixl") and e.endswith("Error")
        )
        config = api.nixl_agent_config(
            enable_prog_thread=not polled,
            # It would listen on every address, for everybody; metadata goes from daemon to daemon.
            enable_listen_thread=False,
            backends=[],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        start_errors: tuple[type[Exception], ...] = (*self._errors, RuntimeError)
        try:
            with _tamed_config(self._bindings):
                self._agent = api.nixl_agent(self.name, config)
            self._agent.create_backend("UCX", {})
        except start_errors as error:
            raise ConfigError(f"NIXL can't start UCX over {settings}: {_text(error)}") from error
        try:
            check_listeners(settings.interfaces)
        except ConfigError:
            del self._agent  # its sockets close with it
            raise
        self._registered: dict[int, Any] = {}
        self._metadata = b""
        self._peers: dict[str, bytes] = {}
        self._reads: dict[int, _Read] = {}
        self._ended: list[ReadResult] = []
        self._unsettled: dict[int, _Read] = {}
        self._settled: list[int] = []
        self._next_id = 1
        self.descriptors = 0
        """Given to NIXL so far, both sides' counted."""

    # ----------------------------------------------------------------------------- memory and peers

    def register(self, region_id: int) -> None:
        """Makes a whole region readable by peers and a target of reads; metadata taken before does not show it.

        Raises TransferFailed when NIXL can't register it.
        """
        if region_id in self._registered:
            return
        region, (kind, device) = self._regions.find(region_id), self._kind(region_id)
        try:
            registered = self._agent.register_memory([(region.address, region.size_bytes, device, "")], kind)
        except self._errors as error:
            raise TransferFailed(f"NIXL can't register region {region_id}: {_text(error)}") from error
        self._registered[region_id] = registered
        self._metadata = b""

    def _kind(self, region_id: int) -> tuple[str, int]:
        """NIXL's name of the region's memory, and the device that it is on."""
        return ("DRAM", 0) if self._regions.find(region_id).array is not None else ("VRAM", self._gpu)

    def metadata(self) -> bytes:
        """What a peer needs to read this agent's registered regions; opaque."""
        if not self._metadata:
            self._metadata = bytes(self._agent.get_agent_metadata())
        return self._metadata

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Makes a peer known, or takes newer metadata of one.

        Raises TransferFailed for metadata that is not its, PeerUnreachable when nobody answers there (UCX
        connects at once to a peer that it knew before).
        """
        if name == self.name or self._peers.get(name) == metadata:
            return
        try:
            found = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            if type(error).__name__ == "nixlBackendError":
                raise PeerUnreachable(f"agent {name!r} does not answer: {_text(error)}") from error
            raise TransferFailed(f"metadata of agent {name!r} is not usable: {_text(error)}") from error
        found_name = found.decode() if isinstance(found, bytes) else found
        if found_name != name:
            self._agent.remove_remote_agent(found_name)
            raise TransferFailed(f"metadata said to be of agent {name!r} is of {found_name!r}")
        self._peers[name] = metadata

    def _forget_peer(self, name: str) -> None:
        """Drops a peer whose connection broke, so that its next metadata makes a new one."""
        if self._peers.pop(name, None) is not None:
            # NIXL may have dropped it itself, which is what is wanted.
            with suppress(*self._errors):
                self._agent.remove_remote_agent(name)

    # ---------------------------------------------------------------------------------------- reads

    def read(
        self,
        peer: str,
        addresses: U64Array,
        region_id: int,
        offsets: U64Array,
        lengths: U64Array,
        deadline_ns: int,
        memory: PeerMemory = HOST_MEMORY,
        note: bytes = b"",
    ) -> int:
        """Starts a read of `lengths[i]` bytes at the peer's `addresses[i]` into `offsets[i]` of a region.

        `memory`: where the peer's addresses are. `note`: a message that reaches the peer after the last byte.

        Returns its id; every id gets exactly one `ReadResult`, whatever goes wrong on the way.
        Raises InvalidArgument, with nothing started, for arrays that don't match or leave the region.
        """
        self.check(region_id, addresses, offsets, lengths)
        read_id = self._next_id
        self._next_id += 1
        started = self._clock_ns()
        total = int(lengths.sum())
        if total == 0:
            self._ended.append(ReadResult(read_id, Outcome.DONE, 0, 0))
            return read_id
        if peer != self.name and peer not in self._peers:
            gone = PeerUnreachable(f"agent {peer!r} was never added, or its connection broke since")
            self._ended.append(ReadResult(read_id, Outcome.FAILED, 0, 0, gone))
            return read_id
        base = self._regions.address(region_id)
        remote, local, sizes = join_neighbours(
            addresses.astype(np.int64), offsets.astype(np.int64) + base, lengths.astype(np.int64)
        )
        try:
            ours = self._descs(local, sizes, *self._kind(region_id))
            theirs = self._descs(remote, sizes, "DRAM" if memory.gpu is None else "VRAM", memory.gpu or 0)
            handle = self._agent.initialize_xfer("READ", ours, theirs, peer, note)
        except self._errors as error:
            self._ended.append(ReadResult(read_id, Outcome.FAILED, 0, 0, self._typed(peer, error)))
            return read_id
        read = self._reads[read_id] = _Read(peer, handle, total, started, deadline_ns)
        try:
            state = self._agent.transfer(handle)
        except self._errors as error:
            self._fail(read_id, error, sure=type(error).__name__ in _HARMLESS_AT_POST)
        else:
            self._see(read_id, read, state)
        return read_id

    def check(self, region_id: int, addresses: U64Array, offsets: U64Array, lengths: U64Array) -> None:
        """Raises InvalidArgument for reads that can't be: arrays that don't match, empty reads, bytes outside."""
        if not len(addresses) == len(offsets) == len(lengths):
            raise InvalidArgument(f"{len(addresses)} addresses, {len(offsets)} offsets, {len(lengths)} lengths")
        if region_id not in self._registered:
            raise InvalidArgument(f"region {region_id} is not registered with the agent")
        if len(lengths) == 0:
            return
        size = self._regions.size(region_id)
        if int(lengths.max()) > size or int(offsets.max()) > size or int((offsets + lengths).max()) > size:
            raise InvalidArgument(f"a read leaves region {region_id} of {size} bytes")
        if not (lengths > 0).all():
            raise InvalidArgument("a read of 0 bytes among others: leave it out")

    def _descs(self, addresses: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], kind: str, device: int) -> Any:
        rows = np.zeros((len(addresses), 3), dtype=np.uint64)
        rows[:, 0] = addresses
        rows[:, 1] = lengths
        rows[:, 2] = device
        self.descriptors += len(rows)
        return self._agent.get_xfer_descs(rows, kind)

    # ------------------------------------------------------------------------------------- messages

    def send(self, peer: str, message: bytes) -> None:
        """A message to a peer that was added; nobody says whether it arrives.

        Raises PeerUnreachable, TransferFailed.
        """
        try:
            self._agent.send_notif(peer, message)
        except self._errors as error:
            typed = self._typed(peer, error)
            if isinstance(typed, PeerUnreachable):
                self._forget_peer(peer)
            raise typed from error

    def messages(self) -> list[tuple[str, bytes]]:
        """(peer, message), of those that came since the last call."""
        found = self._agent.get_new_notifs()
        return [
            (name.decode() if isinstance(name, bytes) else name, bytes(message))
            for name, messages in found.items()
            for message in messages
        ]

    def poll(self) -> list[ReadResult]:
        """The reads that ended since the last call."""
        for read_id, read in list(self._reads.items()):
            self._look(read_id, read)
        for read_id, read in list(self._unsettled.items()):
            self._look_at_late(read_id, read)
        ended, self._ended = self._ended, []
        return ended

    def _look(self, read_id: int, read: _Read) -> None:
        try:
            state = self._agent.check_xfer_state(read.handle)
        except self._errors as error:
            self._fail(read_id, error, sure=type(error).__name__ == "nixlRemoteDisconnectError")
        else:
            self._see(read_id, read, state)

    def _see(self, read_id: int, read: _Read, state: str) -> None:
        """Acts on a state: DONE ends the read, PROC ends it when its time is up."""
        assert state in ("DONE", "PROC"), state  # errors are raised
        now = self._clock_ns()
        if state == "DONE":
            del self._reads[read_id]
            read.handle.release()
            self._ended.append(ReadResult(read_id, Outcome.DONE, read.total_bytes, now - read.posted_ns))
        elif now >= read.deadline_ns:
            late = TransferTimeout(
                f"agent {read.peer!r} did not deliver {read.total_bytes} bytes in {now - read.posted_ns} ns; "
                "they may still arrive"
            )
            self._leave(read_id, now - read.posted_ns, late)

    def _fail(self, read_id: int, error: Exception, *, sure: bool) -> None:
        """Ends a read after an exception. `sure`: NIXL is known to write nothing more for it."""
        read = self._reads[read_id]
        typed = self._typed(read.peer, error)
        busy = self._clock_ns() - read.posted_ns
        if not sure:
            self._leave(read_id, busy, typed)
            return
        del self._reads[read_id]
        read.handle.release()
        if isinstance(typed, PeerUnreachable):
            self._forget_peer(read.peer)
        self._ended.append(ReadResult(read_id, Outcome.FAILED, 0, busy, typed))

    def _leave(self, read_id: int, busy_ns: int, error: KVError) -> None:
        self._unsettled[read_id] = self._reads.pop(read_id)
        self._ended.append(ReadResult(read_id, Outcome.UNKNOWN_FATE, 0, busy_ns, error))

    def _look_at_late(self, read_id: int, read: _Read) -> None:
        try:
            if self._agent.check_xfer_state(read.handle) != "DONE":
                return
        except self._errors as error:
            if type(error).__name__ != "nixlRemoteDisconnectError":
                return
            self._forget_peer(read.peer)
        del self._unsettled[read_id]
        read.handle.release()
        self._settled.append(read_id)

    def _typed(self, peer: str, error: Exception) -> TransferError:
        if type(error).__name__ == "nixlRemoteDisconnectError":
            return PeerUnreachable(f"agent {peer!r} is gone: {_text(error)}")
        if type(error).__name__ == "nixlNotFoundError":
            return TransferFailed(f"agent {peer!r} is unknown or does not offer these addresses: {_text(error)}")
        return TransferFailed(f"read from agent {peer!r}: {_text(error)}")

    @property
    def pending(self) -> int:
        """Reads without a result yet."""
        return len(self._reads) + len(self._ended)

    @property
    def unsettled(self) -> int:
        """Reads of unknown fate whose bytes may still arrive."""
        return len(self._unsettled)

    def settled(self) -> list[int]:
        """Ids of reads of unknown fate that have become terminal since the last call: their memory is quiet now."""
        settled, self._settled = self._settled, []
        return settled

    def close(self) -> None:
        """Gives everything back to NIXL in the one order that is safe.

        With reads in flight nothing is given back: only the end of the process stops their bytes.
        """
        if self._reads or self._unsettled:
            return
        for name in list(self._peers):
            self._forget_peer(name)
        for registered in self._registered.values():
            self._agent.deregister_memory(registered)
        self._registered.clear()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
