"""KV events as vLLM publishes them, so that prefix-aware routers need not know who owns the cache.

A PUB socket sends `[topic, sequence, batch]`: the sequence is 8 bytes big-endian, the batch msgpack, an array
`[time in s, events, None]`; events are maps whose "type" is BlockStored, BlockRemoved or AllBlocksCleared. A ROUTER
socket answers a request `[b"", 8 bytes]`, the first sequence number that is wanted, with `[b"", topic, sequence,
batch]` each (older vLLMs than 0.26 leave the topic out) and one with sequence -1, no topic and no batch at the end.

A stream is about one group, tenant, model and weights revision; its medium is "GPU" or "CPU". It begins with
AllBlocksCleared and everything there is, and so does every daemon after a crash, with higher sequence numbers than any
before: the first is the daemon's boot id. A listener that was away sees a gap and asks for what it missed; where that
is no longer kept, AllBlocksCleared and everything are published anew, for all, at most every `RESTATE_S`. `token_ids`
are those of all blocks of an event where the engine's namespace tells them, otherwise empty.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgpack
import zmq

from kvmanager.configuration.eventsconfig import EventsSection
from kvmanager.core.kvevents import KvEvent, SegmentsStored
from kvmanager.errors import ConfigError
from kvmanager.observing.health import JobVitals

END: Final = (-1).to_bytes(8, "big", signed=True)
BATCH_EVENTS: Final = 1_000
"""Most changes in one batch."""
RESTATE_S: Final = 1.0
LINGER_MS: Final = 200
CLOSE_S: Final = 5.0
"""A stream that sends nothing for so long does not keep a daemon from ending."""
_MEDIUM: Final = {"device": "GPU", "host": "CPU"}
_log = logging.getLogger("kvmanager.kvstream")
Place = tuple[int, str, bytes]
"""KV group, tier, key."""


class Changed(NamedTuple):
    """One block that listeners must hear of. what: "stored" or "removed". token_ids: u32, its own, or none."""

    what: str
    key: bytes
    parent: bytes = b""
    token_ids: bytes = b""


@dataclass
class _Known:
    """spans: how many hold it. position: of the segment in its prompt."""

    spans: int
    parent: bytes
    position: int
    token_ids: bytes


class Blocks:
    """What a listener that heard everything knows."""

    def __init__(self) -> None:
        self._known: dict[Place, _Known] = {}

    def take(self, event: KvEvent, width: int) -> list[Changed]:
        """What becomes different for listeners."""
        keys = [event.keys[at : at + width] for at in range(0, len(event.keys), width)]
        changed = []
        if isinstance(event, SegmentsStored):
            parent, ids_bytes = event.parent, len(event.token_ids) // max(len(keys), 1)
            for number, key in enumerate(keys):
                ids = event.token_ids[number * ids_bytes : (number + 1) * ids_bytes]
                new = _Known(0, parent, event.first_segment + number, ids)
                entry = self._known.setdefault((event.chain, event.tier, key), new)
                entry.spans += 1
                if entry.spans == 1:
                    changed.append(Changed("stored", key, parent, ids))
                parent = key
            return changed
        for key in keys:
            place = (event.chain, event.tier, key)
            entry = self._known[place]
            entry.spans -= 1
            if entry.spans == 0:
                del self._known[place]
                changed.append(Changed("removed", key))
        return changed

    def clear(self) -> None:
        """Knows nothing."""
        self._known.clear()

    def all(self) -> Iterator[tuple[int, str, Changed]]:
        """(KV group, tier, block) of everything, parents first, those of one prompt one after the other."""
        below: dict[tuple[int, str, bytes], list[bytes]] = {}
        roots = []
        ordered = sorted(self._known.items(), key=lambda item: item[1].position)
        for (chain, tier, key), known in ordered:
            parent = known.parent
            if parent and (chain, tier, parent) in self._known:
                below.setdefault((chain, tier, parent), []).append(key)
            else:
                roots.append((chain, tier, key))
        # Roots come by position, so that what hangs on another tier's segment follows it.
        for root in roots:
            waiting = [root]
            while waiting:
                place = waiting.pop()
                known = self._known[place]
                yield *place[:2], Changed("stored", place[2], known.parent, known.token_ids)
                waiting += [(*place[:2], key) for key in below.get(place, ())[::-1]]


class KvStream:
    """One stream. `tell` and `begin` are called in the core; a thread of its own publishes."""

    def __init__(self, section: EventsSection, block_tokens: int, first_sequence: int) -> None:
        """Raises ConfigError when it can't listen."""
        self._section = section
        self._block_tokens = block_tokens
        self._sequence = first_sequence
        self._inbox: queue.SimpleQueue[tuple[KvEvent, int] | None] = queue.SimpleQueue()
        self._blocks = Blocks()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=section.buffer_batches)
        self._whole = False
        """Whether what is kept begins with everything."""
        self._restated_s = 0.0
        self._told = 0  # changes; of the core
        self._taken = self._published = 0  # changes; of the thread
        self._over = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._context = zmq.Context()
        try:
            self._publisher = self._socket(zmq.PUB, section.endpoint)
            self._replay = self._socket(zmq.ROUTER, section.replay_endpoint)
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"[[events]] of {section.group!r}: can't listen: {error}") from error
        self._thread = threading.Thread(target=self._run, name="kvstream", daemon=True)
        self._failure: Callable[[BaseException], None] = lambda _error: None

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.set_hwm(self._section.hwm)
        made.bind(endpoint)
        return made

    def start(self, on_failure: Callable[[BaseException], None]) -> None:
        """Begins to publish what it is told."""
        self._failure = on_failure
        self._thread.start()

    def tell(self, event: KvEvent, key_bytes: int) -> None:
        """One change; does not block."""
        self._told += 1
        self._inbox.put((event, key_bytes))
        os.eventfd_write(self._wake, 1)

    @property
    def name(self) -> str:
        """As health and metrics call it."""
        return f"events at {self._section.endpoint}"

    def vitals(self) -> JobVitals:
        """done: changes that were published."""
        published = self._published  # before what was told: what comes in between is waiting
        return JobVitals(self._told != published, published)

    def close(self) -> None:
        """Publishes what it was told and ends; leaves it as it is when that takes longer than CLOSE_S."""
        if self._thread.is_alive():
            self._inbox.put(None)
            os.eventfd_write(self._wake, 1)
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():  # it has the sockets: they are not another thread's to close
            _log.error("%s sends nothing for %g s: what waits is not published", self.name, CLOSE_S)
            return
        self._context.destroy(linger=LINGER_MS)
        os.close(self._wake)

    # ------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._wake, zmq.POLLIN)
            poller.register(self._replay, zmq.POLLIN)
            self._drain()
            self._restate()
            self._published = self._taken
            while not self._over:
                ready = dict(poller.poll())
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    while self._publish_some():
                        pass
                if self._replay in ready:
                    self._answer()
        except Exception as error:
            _log.exception("a KV event stream stops")
            self._failure(error)

    def _drain(self) -> None:
        """What was there at the beginning: listeners get it as a whole."""
        while not self._inbox.empty() and not self._over:
            work = self._inbox.get()
            if work is None:
                self._over = True
            else:
                self._blocks.take(*work)
                self._taken += 1

    def _publish_some(self) -> bool:
        events: list[dict[str, Any]] = []
        for _ in range(BATCH_EVENTS):
            if self._inbox.empty():
                break
            work = self._inbox.get()
            if work is None:
                self._over = True
                break
            event, width = work
            self._add(events, event, self._blocks.take(event, width))
            self._taken += 1
        if events:
            self._send(events)
        self._published = self._taken
        return not self._inbox.empty() and not self._over

    def _add(self, events: list[dict[str, Any]], event: KvEvent, changed: list[Changed]) -> None:
        """One wire event a run of changes that follow each other."""
        last: Changed | None = None
        for block in changed:
            if block.what == "removed":
                if last is None:
                    events.append(self._removed(event.chain, event.tier))
                events[-1]["block_hashes"].append(self._hash(block.key))
            else:
                if last is None or not _follows(last, block):
                    events.append(self._stored(event.chain, event.tier, block.parent))
                self._store(events[-1], block)
            last = block

    def _store(self, event: dict[str, Any], block: Changed) -> None:
        event["block_hashes"].append(self._hash(block.key))
        event["token_ids"] += memoryview(block.token_ids).cast("I").tolist()

    def _restate(self) -> None:
        """Everything anew, for all; what was kept before is not needed any more."""
        events: list[dict[str, Any]] = [{"type": "AllBlocksCleared"}]
        last: tuple[int, str, Changed] | None = None
        for chain, tier, block in self._blocks.all():
            if last is None or last[:2] != (chain, tier) or not _follows(last[2], block):
                events.append(self._stored(chain, tier, block.parent))
            self._store(events[-1], block)
            last = chain, tier, block
        self._kept.clear()
        self._send(events)
        self._whole = True
        self._restated_s = time.monotonic()

    def _send(self, events: list[dict[str, Any]]) -> None:
        batch: bytes = msgpack.packb([time.time(), events, None], use_bin_type=True)
        if len(self._kept) == self._kept.maxlen:
            self._whole = False
        self._kept.append((self._sequence, batch))
        self._publisher.send_multipart([self._section.topic.encode(), self._sequence.to_bytes(8, "big"), batch])
        self._sequence += 1

    def _answer(self) -> None:
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            _log.warning("a replay request with frames of %s bytes is ignored", [len(frame) for frame in frames])
            return
        wanted = int.from_bytes(frames[2], "big")
        missed = wanted < self._kept[0][0] and not self._whole
        if missed and time.monotonic() - self._restated_s >= RESTATE_S:
            self._restate()
        topic = self._section.topic.encode()
        for sequence, batch in list(self._kept):
            if sequence >= wanted:
                self._replay.send_multipart([frames[0], b"", topic, sequence.to_bytes(8, "big"), batch])
        self._replay.send_multipart([frames[0], b"", b"", END, b""])

    def _stored(self, chain: int, tier: str, parent: bytes) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": [],
            "parent_block_hash": self._hash(parent) if parent else None,
            "token_ids": [],
            "block_size": self._block_tokens,
            "lora_id": None,
            "medium": _MEDIUM[tier],
            "lora_name": None,
            "group_idx": chain,
        }

    def _removed(self, chain: int, tier: str) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": [], "medium": _MEDIUM[tier], "group_idx": chain}

    def _hash(self, key: bytes) -> bytes | int:
        return int.from_bytes(key[-8:], "big") if self._section.hashes == "int" else key


def _follows(before: Changed, block: Changed) -> bool:
    """Whether both belong in one event: it has the token ids of all its blocks, or of none."""
    return before.key == block.parent and bool(before.token_ids) == bool(block.token_ids)
