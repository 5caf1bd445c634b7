"""The workers' side: attaches a rank, copies as ordered, and says how it ended.

Saves of running requests run in the engine's thread, since a block may hold something else in the next step; those of
requests that ended, whose blocks are kept for them, and loads in threads of their own. The rank's timeline word is
raised behind each copy, and the report names the value.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from kvmanager.clients.leases import page_rows
from kvmanager.clients.rankmemory import Memory
from kvmanager.clients.vllm.bell import Bell
from kvmanager.clients.vllm.blocks import EngineBlocks
from kvmanager.clients.vllm.orders import Ended, LoadOrder, Orders, Report, SaveOrder
from kvmanager.clients.worker import WorkerRank
from kvmanager.errors import KVError, NotReady, StaleBoot
from kvmanager.transport.checksums import page_sums

LOOK_S: Final = 0.1
SUM_BYTES: Final = 16
"""Of a page on one rank: it is one section."""
_log = logging.getLogger("vllm.kvmanager")


class Copying:
    """One rank. `follow`, `save` and the questions are for the engine's thread."""

    def __init__(self, blocks: EngineBlocks, rank: int, connect: Callable[[int], WorkerRank]) -> None:
        """`connect(epoch)` attaches this rank; it may raise KVError, and is tried again."""
        self._blocks = blocks
        self._rank = rank
        self._connect = connect
        self._lock = threading.Lock()
        self._attached: WorkerRank | None = None
        self._epoch = 0
        self._wanted_epoch = 0
        self._value = 0
        self._rows: Memory | None = None
        self._ended: list[Ended] = []
        self._received: set[str] = set()
        self._released: set[str] = set()
        self._lost: set[int] = set()
        self._said = 0
        self._bell: Bell | None = None
        self._loads: queue.SimpleQueue[tuple[int, LoadOrder] | None] = queue.SimpleQueue()
        self._kept: queue.SimpleQueue[tuple[int, SaveOrder] | set[str] | None] = queue.SimpleQueue()
        self._unsaved = 0
        self._stopping = False
        self._saver = threading.Thread(target=self._save_kept, name="kvmanager-saves", daemon=True)
        self._saver.start()
        self._thread = threading.Thread(target=self._run, name="kvmanager-copies", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------- the engine's thread

    def follow(self, orders: Orders, bell: Bell | None = None) -> None:
        """Takes a step's loads and news. `bell`: to be rung when a load has ended."""
        self._bell = bell
        if orders.epoch != self._wanted_epoch:
            self._wanted_epoch = orders.epoch
        for load in orders.loads:
            self._loads.put((orders.epoch, load))

    def save(self, orders: Orders) -> None:
        """Does a step's saves, and blocks until they are done, but for those of blocks that are kept."""
        for order in orders.saves:
            if order.kept:
                self._count_unsaved(1)
                self._kept.put((orders.epoch, order))
            else:
                self._save(orders.epoch, order)
        if orders.released:
            released = set(orders.released)
            with self._lock:
                if not self._unsaved:
                    self._released |= released
                    return
            self._count_unsaved(1)
            self._kept.put(released)  # behind the copies of their blocks

    def _count_unsaved(self, more: int) -> None:
        with self._lock:
            self._unsaved += more

    def _save_kept(self) -> None:
        """The thread of saves that take their time."""
        while (wanted := self._kept.get()) is not None:
            if isinstance(wanted, set):
                with self._lock:
                    self._released |= wanted
            else:
                self._save(*wanted)
            self._count_unsaved(-1)

    def _save(self, epoch: int, order: SaveOrder) -> None:
        ok, sums = False, {}
        rows = self._rows
        if rows is not None and epoch == self._epoch:
            try:
                self._blocks.save(rows, order.pages, order.block_ids)
                sums = _sums(rows, order.summed)
                ok = True
            except Exception:
                _log.exception("a save failed")
        self._end(Ended(order.lease_id, 0, len(order.pages), ok, sums=sums))

    def received(self) -> set[str]:
        """Requests whose loads have ended since it was asked last."""
        with self._lock:
            received, self._received = self._received, set()
        return received

    def released(self) -> set[str]:
        """Requests whose blocks are not needed any more."""
        with self._lock:
            released, self._released = self._released, set()
        return released

    def lost_blocks(self) -> set[int]:
        """Blocks of received requests that could not be filled; ask after `received`."""
        with self._lock:
            lost, self._lost = self._lost, set()
        return lost

    def report(self) -> Report | None:
        """What ended since, None when there is nothing new."""
        with self._lock:
            ended, self._ended = self._ended, []
            attach_id = self._attached.attach_id if self._attached is not None else 0
            epoch = self._epoch
        if not ended and attach_id == self._said:
            return None
        self._said = attach_id
        return Report(self._rank, epoch, attach_id, ended)

    def close(self) -> None:
        """Ends the thread and detaches."""
        self._stopping = True
        self._loads.put(None)
        self._kept.put(None)
        self._saver.join(timeout=5.0)
        self._thread.join(timeout=5.0)
        self._detach()

    # ----------------------------------------------------------------------------- the copies

    def _end(self, ended: Ended) -> None:
        """Raises the timeline behind a copy and notes it with the value."""
        with self._lock:
            if self._attached is not None:
                self._value += 1
                self._attached.raise_timeline(self._value)
            if ended.lease_id:
                self._ended.append(replace(ended, value=self._value))

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._look()
                with contextlib.suppress(queue.Empty):
                    wanted = self._loads.get(timeout=LOOK_S)
                    if wanted is not None:
                        self._load(*wanted)
            except Exception:
                _log.exception("the copying thread goes on after an error")

    def _load(self, epoch: int, order: LoadOrder) -> None:
        """Never raises: the request must be reported, whatever happened."""
        lost, failed, failure = list(order.lost_block_ids), list[int](), ""
        if order.pages:
            try:
                self._look()
                if self._rows is None or epoch != self._epoch:
                    raise NotReady("this rank is not attached")
                failed = self._differing(self._rows, order.sums)
                right = [place for place, page in enumerate(order.pages) if page not in failed]
                self._blocks.load(
                    self._rows, [order.pages[place] for place in right], [order.block_ids[place] for place in right]
                )
                lost += [block for block, page in zip(order.block_ids, order.pages, strict=True) if page in failed]
                failure = f"{len(failed)} pages are not what was written" if failed else ""
            except Exception as error:
                lost, failure = [*order.block_ids, *order.lost_block_ids], f"{type(error).__name__}: {error}"
        if failure:
            _log.warning("a load of %d blocks failed: %s", len(order.pages), failure)
        self._end(Ended(order.lease_id, 0, len(order.pages), not failure, failed, failure))
        with self._lock:
            self._lost.update(lost)
            self._received.add(order.request_id)
        if self._bell is not None:
            self._bell.ring()

    def _differing(self, rows: Memory, sums: Mapping[int, bytes]) -> list[int]:
        """Pages whose bytes are not those that were written."""
        mine = slice(self._rank * SUM_BYTES, (self._rank + 1) * SUM_BYTES)
        found = _sums(rows, list(sums))
        return [page for page, all_ranks in sums.items() if found[page] != all_ranks[mine]]

    # -------------------------------------------------------------------------------- attach

    def _look(self) -> None:
        """Attaches where the engine registered anew, and goes on with a daemon that was replaced."""
        if self._wanted_epoch != self._epoch:
            self._detach()
            try:
                attached = self._connect(self._wanted_epoch)
            except KVError as error:
                _log.warning("rank %d can't attach: %s", self._rank, error)
                return
            with self._lock:
                self._attached, self._epoch, self._value = attached, self._wanted_epoch, 0
                self._rows = page_rows(attached)
        elif self._attached is not None:
            try:
                self._attached.renew()
            except StaleBoot:
                self._detach()  # a cold start: the memory we have mapped is nobody's
            except KVError:
                pass  # it is away; what is mapped stays good

    def _detach(self) -> None:
        with self._lock:
            attached, self._attached, self._rows, self._epoch = self._attached, None, None, 0
        if attached is not None:
            with contextlib.suppress(KVError):
                attached.detach()
            attached.close()


def _sums(rows: Memory, pages: list[int]) -> dict[int, bytes]:
    """Page -> its checksum on this rank."""
    return {page: words.tobytes() for page, words in zip(pages, page_sums(rows, pages), strict=True)}
