"""The scheduler's side: what to look up, load and save. No hook waits: the daemon's answers are taken when they come.

A request is looked up when it comes; a lease is taken when its blocks are allocated, and the load goes to the workers
in a later step. What is computed is saved through reservations, one at a time a request: pages are asked for as soon as
blocks are, and each block is copied in the step that completes it, or in the next one where its page came too late.

A prompt that another engine shall go on with gets all its pages, and a ticket on them, before it is scheduled; one that
another engine has computed is scheduled when it has landed in the node's cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from kvmanager.clients.callline import Question
from kvmanager.clients.callqueue import Answer
from kvmanager.clients.leases import Lease, Questions
from kvmanager.clients.vllm.calls import About, Exported, Passed, Tell, Wanted
from kvmanager.clients.vllm.handover import Offer
from kvmanager.clients.vllm.holdings import Export, Held, Line, Load, Pull, Store, result_or
from kvmanager.clients.vllm.orders import Ended, LoadOrder, Orders, Report, SaveOrder
from kvmanager.errors import CapacityError
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import TEXT_CHARS

T = TypeVar("T")
STORE_BLOCKS: Final = 128
"""Most blocks of one reservation."""
LOOKUP_S: Final = 1.0
"""A lookup that takes longer is a miss."""
FRESH_S: Final = 1.0
"""How long a lookup's answer is believed while its request waits."""
PAUSE_S: Final = 0.5
"""After a reservation that was refused."""
ANSWER_S: Final = 5.0
"""How long a request waits for its ticket, for the ranks to be attached, or for a daemon that is away as it pulls."""
_log = logging.getLogger("vllm.kvmanager")


class Scheduling:
    """Called by the engine's scheduler alone, in its thread."""

    def __init__(self, line: Line, block_tokens: int, ranks: int, hold_s: float) -> None:
        self._line = line
        self._tokens = block_tokens
        self._ranks = ranks
        self._hold_s = hold_s
        self._held: dict[str, Held] = {}
        self._stirred: dict[str, Held] = {}  # those that may not be settled
        self._leases: dict[int, tuple[str, str]] = {}  # lease id -> ("load" | "store" | "pull", request id)
        self._reports: dict[int, dict[int, Ended]] = {}  # lease id -> rank -> what it said
        self._attached: dict[int, int] = {}  # rank -> attach id under the line's epoch
        self._values: dict[int, int] = {}  # rank -> timeline value that it reported last
        self._epoch = 0
        self._next_lease = 0

    # ------------------------------------------------------------------------------- lookups

    def arrived(
        self, request_id: str, keys: Sequence[bytes], session_id: str = "", *,
        export_tokens: int = 0, tell: Tell | None = None, offer: Offer | None = None, token_ids: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """A request came; it is looked up ahead of being asked about.

        export_tokens, tell: of its prompt, if another engine shall go on with it. offer: of what another has computed.
        token_ids: its tokens, growing as the keys do, where KV events shall tell them.
        """
        about = About(request_id[:TEXT_CHARS], session_id, keys, token_ids)
        held = Held(request_id, keys, about, asked_s=time.monotonic())
        self._held[request_id] = self._stirred[request_id] = held
        if offer is not None:
            held.pull = Pull(offer, held.asked_s)
        elif export_tokens and tell is not None:
            held.export_tokens, held.tell = export_tokens, tell
        else:
            self._look_up(held)

    def matched(self, request_id: str, tokens: int, computed: int) -> int | None:
        """Tokens that can be loaded behind the first `computed`; None: ask again. `tokens`: of the request."""
        held = self._held.get(request_id)
        if held is None or held.load is not None or held.barred:
            return 0
        if self._exporting(held) or self._pulling(held):
            return None
        if held.pull is not None:
            held.local = computed
            held.saved = max(held.saved, held.pull.offer.tokens // self._tokens)
            more = min(held.pull.offer.tokens, tokens) - computed
            if more <= 0:
                self._end_pull(held, pb.FINISHED)
            return max(more, 0)
        now = time.monotonic()
        if held.lookup is not None:
            self._line.hear()
            if held.lookup.done():
                held.known = result_or(held.lookup, 0)
                held.lookup = None
            elif now - held.asked_s > LOOKUP_S:
                held.lookup, held.known = None, 0
            else:
                return None
        elif held.known is None or now - held.asked_s > FRESH_S:
            held.known, self._stirred[request_id] = None, held
            self._look_up(held)
            return None if held.lookup is not None else 0
        held.local = computed
        held.saved = max(held.saved, held.known // self._tokens)
        return max(min(held.known, tokens) // self._tokens * self._tokens - computed, 0)

    def _look_up(self, held: Held) -> None:
        held.asked_s = time.monotonic()
        if not self._line.up or not held.keys:
            held.known = 0
            return
        wanted = Wanted(held.about, len(held.keys), self._tokens)
        held.lookup = self._read(wanted, lambda to: to.lookup(wanted.keys, wanted.tokens))

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """The request has blocks; where the cache shall fill some, their pages are leased now."""
        held = self._held.get(request_id)
        if held is None:
            return
        held.blocks = list(block_ids)
        self._stirred[request_id] = held
        if external_tokens == 0:
            return
        first, count, held.known = held.local // self._tokens, -(-external_tokens // self._tokens), None
        if held.pull is not None:
            return self._load_pulled(held, held.pull, block_ids[first : first + count])
        lease_id = self._new_lease("load", request_id)
        wanted = Wanted(held.about, first + count, self._tokens)
        asked = self._read(wanted, lambda to: to.acquire(lease_id, wanted.keys, name=wanted.about.name))
        held.load = Load(lease_id, first, list(block_ids[first : first + count]), asked, self._line.epoch)

    def _read(self, wanted: Wanted, make: Callable[[Questions], Question[Any]]) -> Answer[Any]:
        # Where the engine has no other request, a hook that takes longer holds nobody up.
        return self._waited(self._line.read(make, here=wanted.few and len(self._held) == 1))

    def _waited(self, answer: Answer[T]) -> Answer[T]:
        """An answer that an idle engine waits for."""
        self._line.bell.clear()  # what it was rung for is seen before the engine waits again
        answer.wake(self._line.bell.ring)
        return answer

    def _new_lease(self, kind: str, request_id: str) -> int:
        self._next_lease += 1
        self._leases[self._next_lease] = (kind, request_id)
        return self._next_lease

    # ----------------------------------------------------------------------------- hand-offs

    @property
    def ready(self) -> bool:
        """Whether requests can be opened: the daemon is there, and all ranks are attached."""
        return self._line.up and self._epoch == self._line.epoch and len(self._attached) == self._ranks

    def _begin_handover(self, request_id: str, held: Held) -> None:
        """Opens what an export or a pull needs, once it can be."""
        if held.finished_s or not (held.export_tokens or (held.pull is not None and held.pull.asked is None)):
            return
        if not self.ready:
            return
        passed = self._passed()
        if held.export_tokens:
            lease_id, tokens, held.export_tokens = self._new_lease("store", request_id), held.export_tokens, 0
            wanted = Wanted(held.about, tokens // self._tokens, self._tokens)
            tell = held.tell
            assert tell is not None
            asked = self._waited(
                self._line.ask(lambda calls: calls.export(lease_id, wanted, tokens, passed.fence(), tell))
            )
            held.export = Export(lease_id, asked, self._line.epoch, tokens=tokens)
        else:
            pull = held.pull
            assert pull is not None
            pull.request_id = self._new_lease("pull", request_id)
            offer, number = pull.offer, pull.request_id
            wanted = Wanted(held.about, offer.tokens // self._tokens, self._tokens)
            pull.asked = self._waited(
                self._line.ask(lambda calls: calls.pull(number, wanted, offer.tokens, passed.fence(), offer.ticket()))
            )

    def _exporting(self, held: Held) -> bool:
        """Whether the request still waits for its ticket; without one it is prefilled for nobody but this engine."""
        late = not self._line.up or time.monotonic() - held.asked_s > ANSWER_S
        export = held.export
        if export is None:
            if late:
                held.export_tokens = 0
            return bool(held.export_tokens)
        if export.granted:
            return False
        if not export.asked.done() and not late:
            return True
        try:
            exported = export.asked.result(timeout=0)
        except Exception as error:
            _log.warning("a prompt is not exported: %s", error or "no answer in time")
            self._give_up_export(held, export)
            return False
        assert isinstance(exported, Exported)
        lease, export.ticket, export.told = exported.lease, exported.ticket, exported.told
        export.granted, export.renewed_s = True, time.monotonic()
        export.first = lease.tokens // self._tokens
        export.pages = lease.pages[export.first :]
        held.store, held.known, held.asked_s = export, lease.tokens, export.renewed_s
        return False

    def _give_up_export(self, held: Held, export: Export) -> None:
        self._end_store(export)
        held.export = None

    def _pulling(self, held: Held) -> bool:
        """Whether the request still waits for bytes of another node; where they don't come it is computed here."""
        pull = held.pull
        if pull is None or pull.lease is not None:
            return False
        now = time.monotonic()
        if pull.asked is not None and self._line.up:
            pull.begun_s = now
        try:
            if pull.look(self._line) and now - pull.begun_s <= ANSWER_S:
                return True
        except Exception as error:
            _log.warning("a hand-off failed, the prompt is computed: %s", error)
        if pull.lease is None:
            self._end_pull(held, pb.ABORTED)
        return False

    def _end_pull(self, held: Held, reason: pb.CloseReason.ValueType) -> None:
        """Gives it up, or back what it brought; no copy of it is under way."""
        pull, held.pull = held.pull, None
        assert pull is not None
        if pull.asked is not None:
            if pull.landing is not None:
                pull.landing.cancel()
            self._leases.pop(pull.request_id, None)
            self._close(pull.request_id, reason)

    def _close(self, request_id: int, reason: pb.CloseReason.ValueType) -> None:
        passed = self._passed()
        self._line.tell(lambda calls: calls.close(request_id, passed.fence(), reason))

    def _load_pulled(self, held: Held, pull: Pull, block_ids: Sequence[int]) -> None:
        there: Answer[object] = Answer()
        there.set_result(pull.lease)
        held.load = Load(pull.request_id, held.local // self._tokens, list(block_ids), there, self._line.epoch)
        held.pull = None

    def handed_over(self, request_id: str) -> dict[str, Any] | None:
        """What tells of a request's prompt, if that was asked for and all of it is computed; ask before `finished`."""
        held = self._held.get(request_id)
        export = held.export if held is not None else None
        if held is None or export is None or not export.granted or export.failed:
            return None
        return export.told if export.done or held.end >= export.tokens else None

    # --------------------------------------------------------------------------------- steps

    def build(
        self, ends: Mapping[str, int], block_ids: Callable[[str], Sequence[int]], preempted: Sequence[str] = ()
    ) -> Orders:
        """Orders for this step.

        ends: scheduled request -> its tokens that are computed when the step is done. block_ids: of a scheduled
        request; asked only where they matter.
        """
        self._notice_epoch()
        self._line.hear()
        for request_id in preempted:
            if request_id in self._held:
                self._held[request_id].preempt()
        for request_id, end in ends.items():
            running = self._held.get(request_id)
            if running is not None and running.come_to(end, self._tokens, block_ids):
                self._stirred[request_id] = running
        orders = Orders(self._epoch)
        for request_id, held in list(self._stirred.items()):
            self._begin_handover(request_id, held)
            if held.export is not None and not held.finished_s:
                held.export.renew(self._line)
            if held.load is not None and held.load.asked.done():
                self._order_load(request_id, held, held.load, orders)
            self._order_saves(request_id, held, orders)
            if held.finished_s:
                self._leave(request_id, held, orders)
            elif held.settled():
                del self._stirred[request_id]
        return orders

    def _notice_epoch(self) -> None:
        """A daemon that started anew knows none of our leases, and has none of our ranks."""
        if self._epoch == self._line.epoch:
            return
        self._epoch = self._line.epoch
        self._attached.clear()
        self._values.clear()
        for held in self._held.values():
            held.store, held.saved, held.known = None, 0, None
            held.export, held.pull = None, None
        self._stirred.update(self._held)

    def _order_load(self, request_id: str, held: Held, load: Load, orders: Orders) -> None:
        """The answer to an acquire is there: what it covers is loaded, the rest is lost and computed."""
        lease = result_or(load.asked, Lease(0, []))
        if load.epoch != self._epoch or held.finished_s:
            pages: list[int] = []
        else:
            pages = lease.pages[load.first : load.first + len(load.block_ids)]
        order = LoadOrder(
            request_id, load.lease_id if lease.tokens else 0, pages, load.block_ids[: len(pages)],
            load.block_ids[len(pages) :], {page: lease.sums[page] for page in pages if page in lease.sums},
        )  # fmt: skip
        held.barred |= bool(order.lost_block_ids)
        if not pages:
            # Also where the acquire failed: nobody knows whether it was heard.
            order.lease_id = 0
            self._end_load(load.lease_id, None)
        orders.loads.append(order)
        held.load = None

    def _order_saves(self, request_id: str, held: Held, orders: Orders) -> None:
        store = held.store
        if store is None:
            self._reserve(request_id, held)
            return
        if not store.granted and store.asked.done():
            self._granted(held, store)
        if held.store is None or not store.granted or store.failed:
            return
        end = store.complete(held)
        if end > store.ordered:
            ids = held.blocks[store.first + store.ordered : store.first + end]
            pages = store.pages[store.ordered : end]
            summed = store.to_be_summed(store.ordered, end, self._line.checksum_one_in)
            orders.saves.append(SaveOrder(store.lease_id, pages, ids, summed, held.delayed))
            store.ordered = end

    def _reserve(self, request_id: str, held: Held) -> None:
        """Asks for pages for what is not saved: of the prompt also ahead of its computation."""
        wanted = min(len(held.keys), held.saved + STORE_BLOCKS)
        if held.finished_s:
            wanted = min(wanted, held.final)
        ready = self._line.up and len(self._attached) == self._ranks and held.load is None
        if not ready or not held.blocks or wanted <= held.saved or time.monotonic() < held.pause_until:
            return
        lease_id = self._new_lease("store", request_id)
        of = Wanted(held.about, wanted, self._tokens)
        asked = self._line.ask(lambda calls: calls.reserve_of(lease_id, of))
        held.store = Store(lease_id, asked, self._line.epoch)

    def _granted(self, held: Held, store: Store) -> None:
        try:
            lease = store.asked.result()
        except Exception as error:
            # Whether it was heard is not known: an abort of what is not there does no harm.
            self._end_store(store)
            if isinstance(error, CapacityError):
                held.saved = max(held.saved, held.final)  # there is no room for these: others come later
            held.store, held.pause_until = None, time.monotonic() + PAUSE_S
            return
        assert isinstance(lease, Lease)
        store.granted, store.pages, store.first = True, lease.pages, lease.tokens // self._tokens
        store.uids = lease.uids
        if not lease.pages:
            held.saved = max(held.saved, store.first)
            self._end_store(store)
            held.store = None

    # ------------------------------------------------------------------------------- reports

    def reported(self, reports: Sequence[Report]) -> None:
        """What the workers did."""
        for report in reports:
            if report.epoch != self._epoch:
                continue
            if report.attach_id:
                self._attached[report.rank] = report.attach_id
            for ended in report.ended:
                self._values[report.rank] = max(self._values.get(report.rank, 0), ended.value)
                said = self._reports.setdefault(ended.lease_id, {})
                said[report.rank] = ended
                if len(said) == self._ranks:
                    del self._reports[ended.lease_id]
                    self._ended(ended.lease_id, said)

    def _ended(self, lease_id: int, said: dict[int, Ended]) -> None:
        kind, request_id = self._leases.get(lease_id, ("", ""))
        held = self._held.get(request_id)
        if kind in ("load", "pull"):
            if held is not None and not all(ended.ok for ended in said.values()):
                held.barred, held.saved = True, 0
                self._stirred[request_id] = held
            self._end_load(lease_id, said)
        elif kind == "store" and held is not None and held.store is not None and held.store.lease_id == lease_id:
            store = held.store
            store.copied += next(iter(said.values())).copies
            store.failed |= not all(ended.ok for ended in said.values())
            store.said.append(said)
            store.written(self._line, self._tokens, self._passed)
            if store.copied == store.ordered and (store.failed or store.copied == len(store.pages)):
                self._finish_store(held, store)

    def _finish_store(self, held: Held, store: Store) -> None:
        """Publishes what was copied."""
        written = 0 if store.failed else store.first + store.copied
        self._end_store(store)
        held.saved = max(held.saved, written)
        held.store = None
        if store.failed:
            held.pause_until = time.monotonic() + PAUSE_S

    def _passed(self) -> Passed:
        """Covers all that was reported; of all ranks, since a fence names each, and never goes back."""
        return Passed(tuple((attach_id, self._values.get(rank, 0)) for rank, attach_id in self._attached.items()))

    def _end_load(self, lease_id: int, said: dict[int, Ended] | None) -> None:
        kind, _ = self._leases.pop(lease_id, ("load", ""))
        if kind == "pull":
            self._close(lease_id, pb.FINISHED)
            return
        if said is None:
            self._line.tell(lambda calls: calls.done(lease_id, None, [], ""))
            return
        passed = self._passed()
        failed = sorted({page for ended in said.values() for page in ended.failed_pages})
        failure = next((ended.failure for ended in said.values() if ended.failure), "")
        self._line.tell(lambda calls: calls.done(lease_id, passed.fence(), failed, failure))

    def _end_store(self, store: Store) -> None:
        """What was copied is published; copies that were ordered have been reported, so the fence covers them."""
        self._leases.pop(store.lease_id, None)
        store.end(self._line, self._tokens, self._passed())

    # ----------------------------------------------------------------------------------- end

    def finished(self, request_id: str, stop_reason: str) -> bool:
        """A request ended; True: its blocks are still needed, until `Orders.released` names it."""
        held = self._held.get(request_id)
        if held is None:
            return False
        held.finished_s, held.stop_reason = time.monotonic(), stop_reason
        self._stirred[request_id] = held
        if held.pull is not None:
            self._end_pull(held, pb.ABORTED)
        if held.export is not None and not held.export.granted:
            self._give_up_export(held, held.export)
        held.delayed = held.load is None and bool(held.blocks) and self._unsaved(held)
        if not held.delayed:
            held.final = min(held.final, held.store.first + held.store.ordered if held.store else 0)
            held.end, held.blocks = 0, []
        return held.delayed

    def _unsaved(self, held: Held) -> bool:
        """Whether some complete block has a page, or may get one soon."""
        if not self._line.up or len(self._attached) < self._ranks:
            return False
        store = held.store
        if store is not None and store.granted:
            return store.complete(held) > store.ordered or held.final > store.first + len(store.pages)
        return held.final > held.saved

    def _leave(self, request_id: str, held: Held, orders: Orders) -> None:
        """A finished request goes once nothing of it is under way, or it took too long."""
        late = time.monotonic() - held.finished_s > self._hold_s
        store = held.store
        if store is not None and store.granted and store.copied == store.ordered:
            wants_more = held.delayed and store.complete(held) > store.ordered
            if not wants_more or late:
                self._finish_store(held, store)
        if held.delayed and (late or not self._unsaved(held)) and (held.store is None or not held.store.granted):
            orders.released.append(request_id)
            held.delayed, held.blocks = False, []
        elif held.delayed and held.store is not None and held.store.granted and not self._unsaved(held):
            # All copies were ordered by this step at the latest: workers do them before the blocks are given back.
            orders.released.append(request_id)
            held.delayed, held.blocks = False, []
        if not held.delayed and held.load is None and (held.store is None or (late and not held.store.ordered)):
            if held.store is not None:
                self._end_store(held.store)
            del self._held[request_id], self._stirred[request_id]
            if held.about.session_id:
                self._line.turn_ended(held.about.session_id, held.stop_reason)

    @property
    def waiting(self) -> bool:
        """Whether some request waits for the daemon or for a load."""
        loads = any(kind != "store" for kind, _ in self._leases.values())
        return loads or any(held.waits for held in self._stirred.values())

    @property
    def busy(self) -> bool:
        """Whether finished requests still wait for something: the engine should go on stepping."""
        latest = time.monotonic() - 2 * self._hold_s
        return any(held.finished_s > latest for held in self._stirred.values() if held.finished_s)

