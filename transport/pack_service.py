"""Packs pages for peers: copies what a reader asks for side by side into a ring, and tells where it lies.

Peers take turns, and an ask waits until the ring has room: that is what holds a fast reader back. A slot is free again
when its reader is done, or a while after the lease that the reader itself named: later than that it uses nothing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvmanager.errors import DeviceError, InvalidArgument, KVError, TransferError
from kvmanager.transport.executor import RegionMap
from kvmanager.transport.nixl import NixlReader
from kvmanager.transport.pack_messages import Ask, Packed, Refused
from kvmanager.transport.packers import Packer

SLOT_GRACE_NS: Final = 1_000_000_000
MOST_ASKS: Final = 256
"""Waiting, of one peer."""
_log = logging.getLogger("kvmanager.mover")


@dataclass
class _Slot:
    """Bytes [start, end) of the ring, held for an ask until `until_ns`. `number`: while it is being filled."""

    start: int
    end: int
    until_ns: int
    number: int | None
    dropped: bool = False


class PackService:
    """Asks by peer, and the slots of the ring `region` that their answers hold. Polled by the mover's thread."""

    def __init__(
        self,
        reader: NixlReader,
        regions: RegionMap,
        packer: Packer,
        region: int,
        sources: Callable[[], list[int]],
        gpu: int | None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`packer`: this service's own. `sources`: regions that may be read. `gpu`: where the ring is."""
        self._reader = reader
        self._regions = regions
        self._packer = packer
        self._region = region
        self._sources = sources
        self._gpu = gpu
        self._clock_ns = clock_ns
        self._asks: dict[str, deque[tuple[Ask, int]]] = {}  # with when it came
        self._slots: dict[tuple[str, int], _Slot] = {}
        self._filling: dict[int, tuple[str, int]] = {}
        self._next_number = 1
        self._heard_ns = 0

    def ask(self, peer: str, ask: Ask) -> None:
        """Takes an ask; the answer, or why there is none, goes to the peer."""
        self._heard_ns = self._clock_ns()
        try:
            self._reader.add_peer(peer, ask.metadata)
        except TransferError as error:
            _log.warning("agent %s asks for pages and can't be answered: %s", peer, error)
            return
        waiting = self._asks.setdefault(peer, deque())
        if len(waiting) >= MOST_ASKS:
            self._refuse(peer, ask.ask_id, f"{MOST_ASKS} asks of this agent wait already")
        else:
            waiting.append((ask, self._heard_ns))

    def done(self, peer: str, ask_id: int) -> None:
        """The peer needs nothing more of an ask."""
        self._heard_ns = self._clock_ns()
        slot = self._slots.get((peer, ask_id))
        if slot is not None:
            slot.dropped = True
            self._free_if_quiet((peer, ask_id), slot)
        elif peer in self._asks:
            self._asks[peer] = deque(each for each in self._asks[peer] if each[0].ask_id != ask_id)

    def serve(self) -> None:
        """Packs on."""
        now = self._clock_ns()
        for key, slot in list(self._slots.items()):
            if now >= slot.until_ns:
                slot.dropped = True
                self._free_if_quiet(key, slot)
        for number, error in self._packer.poll():
            self._packed(number, error)
        while self._start_next(now):
            pass

    def next_poll_s(self) -> float:
        """How long the owner may sleep: messages of peers make no descriptor readable."""
        if self._packer.outstanding():
            return 0.0 if self._gpu is None else 0.0001
        return 0.0005 if self._asks or self._slots or self._clock_ns() - self._heard_ns < 2_000_000_000 else 0.01

    def outstanding(self) -> int:
        """Slots held and asks that wait."""
        return len(self._slots) + sum(len(waiting) for waiting in self._asks.values())

    def _start_next(self, now: int) -> bool:
        """Packs for the peer whose turn it is; False when nobody waits or there is no room."""
        if not self._asks:
            return False
        peer = next(iter(self._asks))
        waiting = self._asks.pop(peer)
        while waiting and now - waiting[0][1] >= waiting[0][0].lease_ns:
            waiting.popleft()  # its reader has given up
        if not waiting:
            return True
        ask, came_ns = waiting[0]
        try:
            self._check(ask)
            start = self._room(len(ask.addresses) * ask.page_bytes)
        except KVError as error:
            waiting.popleft()
            self._refuse(peer, ask.ask_id, str(error))
        else:
            if start is None:
                self._asks = {peer: waiting, **self._asks}  # first again, when there is room
                return False
            waiting.popleft()
            self._pack(peer, ask, start, came_ns)
        if waiting:
            self._asks[peer] = waiting
        return True

    def _pack(self, peer: str, ask: Ask, start: int, came_ns: int) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        until = came_ns + ask.lease_ns + SLOT_GRACE_NS
        end = start + len(ask.addresses) * ask.page_bytes
        self._slots[peer, ask.ask_id] = _Slot(start, end, until, number)
        self._filling[number] = peer, ask.ask_id
        ring = self._regions.address(self._region)
        self._packer.start(number, ask.addresses.astype(np.int64), ring + start, ask.page_bytes, ask.turn)

    def _check(self, ask: Ask) -> None:
        """Raises InvalidArgument unless all pages lie in regions that peers may read, and can be turned if so asked."""
        if ask.turn is not None:
            ask.turn.check(len(ask.addresses), ask.page_bytes)
        ids = sorted(self._sources(), key=self._regions.address)
        begins = np.array([self._regions.address(i) for i in ids], np.uint64)
        sizes = np.array([self._regions.size(i) for i in ids], np.uint64)
        place = np.searchsorted(begins, ask.addresses, side="right") - 1
        page = np.uint64(ask.page_bytes)
        bad = (place < 0) | (ask.addresses - begins[place] + page > sizes[place])
        if ask.page_bytes == 0 or not len(bad) or bad.any():
            raise InvalidArgument(f"{int(bad.sum())} of {len(bad)} addresses are of no page of {ask.page_bytes} B here")

    def _room(self, size_bytes: int) -> int | None:
        """Where so many bytes are free. Raises InvalidArgument for more than the ring has."""
        total = self._regions.size(self._region)
        if not 0 < size_bytes <= total:
            raise InvalidArgument(f"{size_bytes} bytes at once; the ring that they are packed in has {total}")
        at = 0
        for slot in sorted(self._slots.values(), key=lambda s: s.start):
            if slot.start - at >= size_bytes:
                return at
            at = slot.end
        return at if total - at >= size_bytes else None

    def _packed(self, number: int, error: DeviceError | None) -> None:
        key = self._filling.pop(number)
        peer, ask_id = key
        slot = self._slots[key]
        slot.number = None
        if error is not None:
            slot.dropped = True
            self._refuse(peer, ask_id, str(error))
        elif not slot.dropped:
            address = self._regions.address(self._region) + slot.start
            self._answer(peer, Packed(ask_id, address, self._gpu).encode())
        self._free_if_quiet(key, slot)

    def _free_if_quiet(self, key: tuple[str, int], slot: _Slot) -> None:
        if slot.dropped and slot.number is None:
            del self._slots[key]

    def _refuse(self, peer: str, ask_id: int, why: str) -> None:
        self._answer(peer, Refused(ask_id, why).encode())

    def _answer(self, peer: str, message: bytes) -> None:
        try:
            self._reader.send(peer, message)
        except TransferError as error:
            _log.info("agent %s is not told what was packed: %s", peer, error)
