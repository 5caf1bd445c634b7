"""Reads of pages that the peer packs first: where its own memory can't be read at the link's rate.

A peer on a GPU keeps its pages in memory that other processes read slowly, so its mover copies what is asked for into
a ring of its own (`pack_service`), and one run is read from there. The ring's room at the peer is the credit: an ask
waits there until a slot is free. A read that ends after the slot's lease counts as failed, whatever it brought.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvmanager.errors import InvalidArgument, TransferError, TransferFailed, TransferTimeout
from kvmanager.transport.executor import Outcome
from kvmanager.transport.nixl import NixlReader, PeerMemory, ReadResult, U64Array
from kvmanager.transport.pack_messages import Ask, Done, Packed, Refused, decode
from kvmanager.transport.turned_pages import Turn

if TYPE_CHECKING:
    from kvmanager.transport.pack_service import PackService

_log = logging.getLogger("kvmanager.mover")


@dataclass
class _Read:
    peer: str
    region_id: int
    offset: int
    size_bytes: int
    asked_ns: int
    deadline_ns: int
    inner: int | None = None  # the agent's read, once the peer has packed


class PackedReads:
    """Direct and packed reads of one agent, with ids of one kind; also the place where its messages come in."""

    def __init__(
        self,
        reader: NixlReader,
        service: PackService | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`service`: what packs for others here."""
        self._reader = reader
        self._service = service
        self._clock_ns = clock_ns
        self._asked: dict[int, _Read] = {}
        self._of_inner: dict[int, int] = {}
        self._ended: list[ReadResult] = []
        self._next_id = 1

    def add_peer(self, name: str, metadata: bytes) -> None:
        """See `NixlReader.add_peer`."""
        self._reader.add_peer(name, metadata)

    def read(
        self, peer: str, addresses: U64Array, region_id: int, offsets: U64Array, lengths: U64Array, deadline_ns: int
    ) -> int:
        """See `NixlReader.read`."""
        inner = self._reader.read(peer, addresses, region_id, offsets, lengths, deadline_ns)
        read_id = self._new_id()
        self._of_inner[inner] = read_id
        return read_id

    def read_packed(
        self, peer: str, addresses: U64Array, region_id: int, offsets: U64Array, lengths: U64Array, deadline_ns: int,
        turn: Turn | None = None,
    ) -> int:  # fmt: skip
        """As `read`, of pages of one size that go to one place, side by side, and that the peer packs, and turns.

        Raises InvalidArgument, with nothing started, for others.
        """
        self._reader.check(region_id, addresses, offsets, lengths)
        page = lengths[:1].sum()
        if not len(addresses) or (lengths != page).any() or (np.diff(offsets) != page).any():
            raise InvalidArgument(f"{len(addresses)} pages that are not of one size and side by side can't be packed")
        read_id, now = self._new_id(), self._clock_ns()
        read = _Read(peer, region_id, int(offsets[0]), int(lengths.sum()), now, deadline_ns)
        ask = Ask(read_id, int(page), max(deadline_ns - now, 1), addresses, self._reader.metadata(), turn)
        try:
            self._reader.send(peer, ask.encode())
        except TransferError as error:
            self._ended.append(ReadResult(read_id, Outcome.FAILED, 0, 0, error))
        else:
            self._asked[read_id] = read
        return read_id

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    # ------------------------------------------------------------------------------------- progress

    def poll(self) -> list[ReadResult]:
        """The reads that ended since the last call."""
        for peer, message in self._reader.messages():
            self._take(peer, message)
        for result in self._reader.poll():
            self._after(result)
        now = self._clock_ns()
        for read_id, read in list(self._asked.items()):
            if read.inner is None and now >= read.deadline_ns:
                # Nothing of it was begun, so nothing can come late.
                self._give_up(read_id, TransferTimeout(f"agent {read.peer!r} packed nothing by the deadline"))
        ended, self._ended = self._ended, []
        return ended

    def _take(self, peer: str, message: bytes) -> None:
        try:
            said = decode(message)
        except InvalidArgument as error:
            _log.warning("agent %s: %s", peer, error)
            return
        if isinstance(said, Ask | Done):
            if self._service is None:
                _log.warning("agent %s asks for packed pages, which this mover does not make", peer)
            elif isinstance(said, Ask):
                self._service.ask(peer, said)
            else:
                self._service.done(peer, said.ask_id)
            return
        read = self._asked.get(said.ask_id)
        if read is None or read.peer != peer or read.inner is not None:
            if isinstance(said, Packed) and read is None:
                self._tell_done(peer, said.ask_id)
            return
        if isinstance(said, Refused):
            self._give_up(said.ask_id, TransferFailed(f"agent {peer!r}: {said.why}"))
        else:
            self._begin(said, read)

    def _begin(self, said: Packed, read: _Read) -> None:
        read.inner = self._reader.read(
            read.peer,
            np.array([said.address], np.uint64),
            read.region_id,
            np.array([read.offset], np.uint64),
            np.array([read.size_bytes], np.uint64),
            read.deadline_ns,
            PeerMemory(said.gpu),
            Done(said.ask_id).encode(),
        )
        self._of_inner[read.inner] = said.ask_id

    def _after(self, result: ReadResult) -> None:
        if result.outcome is Outcome.UNKNOWN_FATE:
            read_id = self._of_inner[result.read_id]  # still needed when it settles
        else:
            read_id = self._of_inner.pop(result.read_id)
        result = replace(result, read_id=read_id)
        read = self._asked.pop(read_id, None)
        if read is not None:
            now = self._clock_ns()
            if result.outcome is Outcome.DONE and now >= read.deadline_ns:
                late = TransferTimeout(f"bytes of agent {read.peer!r} came after the lease of their slot; none is used")
                result = replace(result, outcome=Outcome.FAILED, moved_bytes=0, error=late)
            elif result.outcome is Outcome.FAILED:
                self._tell_done(read.peer, read_id)
            result = replace(result, busy_ns=now - read.asked_ns)
        self._ended.append(result)

    def _give_up(self, read_id: int, error: TransferError) -> None:
        read = self._asked.pop(read_id)
        self._tell_done(read.peer, read_id)
        self._ended.append(ReadResult(read_id, Outcome.FAILED, 0, self._clock_ns() - read.asked_ns, error))

    def _tell_done(self, peer: str, ask_id: int) -> None:
        try:
            self._reader.send(peer, Done(ask_id).encode())
        except TransferError as error:
            _log.info("agent %s is not told of the end of ask %d: %s", peer, ask_id, error)  # its lease ends by itself

    def settled(self) -> list[int]:
        """See `NixlReader.settled`."""
        return [self._of_inner.pop(inner) for inner in self._reader.settled()]
