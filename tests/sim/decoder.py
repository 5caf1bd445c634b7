"""A decode engine over the core and the CPU store: real pages, real tokens, no processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvmanager.clients.glm.decode import verify_step
from kvmanager.clients.glm.hisparse import HiSparseStore
from kvmanager.clients.glm.model import Glm
from kvmanager.core.events import Close, Closing, Grown, Open, Opened, Progress, SpanRunTable, StepDone
from kvmanager.geometry import TokenOrder
from kvmanager.layout import indexer_layout, latent_layout
from tests.sim.bytes_driver import BytesDriver
from tests.sim.driver import Client

DRAFTS = 3
AHEAD = DRAFTS + 2


@dataclass
class Decoding:
    """A request of the engine. `rows`: positions with final rows, which are committed by the next message."""

    request_id: int
    prompt: list[int]
    wanted: int
    outputs: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    store: HiSparseStore | None = None
    rows: int = 0
    keys_sent: int = 0

    @property
    def done(self) -> bool:
        return len(self.outputs) >= self.wanted


class Decoder:
    """Computes its prompts itself. One message a step for all requests; copies land when the test says so."""

    def __init__(self, driver: BytesDriver, client: Client, model: Glm, hot_rows: int) -> None:
        self.driver, self.client, self.model, self.hot_rows = driver, client, model, hot_rows
        latent = client.spec.chains[0].classes[0]
        memory = driver.memory
        regions = [latent.device_regions[0], latent.host_regions[0]]
        self.hbm, self.host = (
            memory.bytes[memory.base[region] : memory.base[region] + memory.sizes[region]] for region in regions
        )
        self.running: dict[int, Decoding] = {}
        self.swapped = 0

    def _keys(self, request: Decoding, first: int, last: int) -> bytes:
        return b"".join((request.request_id << 32 | n).to_bytes(16, "little") for n in range(first, last))

    def _ask(self, request: Decoding, tokens: int, growth: int) -> Opened:
        whole = tokens // self.client.spec.page_rows
        wanted = Open(request.request_id, tokens, growth, self._keys(request, 0, whole))
        reply = self.client.step(opens=(wanted,))
        self._take(reply)
        opened = reply.opened[0]
        if opened.state == "waiting":
            self.driver.end_all()
            found = [n.ready for n in self.driver.notices if n.ready and n.ready.request_id == request.request_id]
            self.client.seen += len(self.driver.notices)
            self.driver.notices.clear()
            opened = found[-1]
        return opened

    def start(self, request: Decoding) -> bool:
        """Asks for a request and computes its prompt; False when it is refused."""
        opened = self._ask(request, len(request.prompt), request.wanted + AHEAD)
        if opened.state == "refused":
            return False
        self._begin(request, opened)
        length = len(request.prompt)
        positions = torch.arange(length)
        hidden = self.model.forward(torch.tensor(request.prompt), positions, request.store)
        request.outputs = self.model.greedy(hidden[-1:])
        rest = torch.tensor([*request.prompt[1:], *request.outputs])
        self.model.mtp_rows(rest, hidden, positions, request.store)
        request.rows = length
        return True

    def _begin(self, request: Decoding, opened: Opened) -> None:
        format_, rows = self.client.spec.kv_format, self.client.spec.page_rows
        layouts = latent_layout(format_, rows), indexer_layout(format_, rows)
        request.store = HiSparseStore(self.hbm, self.host, *layouts, format_.share_groups, self.hot_rows)
        for run in opened.spans:
            _append(request.store, run)
        if opened.hot is not None:
            request.store.set_hot_pages(opened.hot)
        self.running[request.request_id] = request

    def step(self) -> None:
        """One message, then a verified step of every request. All work is done; copies are not ended here."""
        closing = [request for request in self.running.values() if request.done]
        reply = self.client.step(
            tuple(self._progress(request) for request in self.running.values()),
            closes=tuple(Close(request.request_id, Closing.FINISHED) for request in closing),
        )
        for request in closing:
            self._left(request)
        self._take(reply)
        for request in self.running.values():
            assert request.store is not None
            fed = [request.outputs[-1], *request.drafts]
            result = verify_step(self.model, request.store, fed, request.rows, DRAFTS)
            request.outputs += result.accepted
            request.drafts = result.drafts
            request.rows += len(result.accepted)
        self.client.run()

    def _progress(self, request: Decoding) -> Progress:
        whole = request.rows // self.client.spec.page_rows
        keys = self._keys(request, request.keys_sent, whole) if whole > request.keys_sent else b""
        if request.keys_sent == 0:
            keys = self._keys(request, len(request.prompt) // self.client.spec.page_rows, whole)
        request.keys_sent = whole
        return Progress(request.request_id, request.rows + AHEAD, request.rows, 0, keys)

    def _take(self, reply: StepDone) -> None:
        assert not reply.errors, reply.errors
        for grown in reply.grown:
            self._grown(grown)
        for rows in reply.residency:
            if rows.request_id in self.running:
                self.running[rows.request_id].store.set_residency(rows.ordinals, rows.device, rows.host)
        for hot in reply.hot:
            if hot.request_id in self.running:
                self.running[hot.request_id].store.set_hot_pages(hot.pages)

    def _grown(self, grown: Grown) -> None:
        assert grown.error is None, grown.error
        request = self.running.get(grown.request_id)
        if request is None:
            return
        request.store.truncate_spans(grown.spans[0].first_span if grown.spans else grown.spans_kept)
        for run in grown.spans:
            _append(request.store, run)

    def _left(self, request: Decoding) -> None:
        self.swapped += request.store.counters.swap_in_rows
        del self.running[request.request_id]

    def retract(self, request: Decoding) -> None:
        """Commits what is final and gives up the request's device pages."""
        progress = (self._progress(request),)
        reply = self.client.step(progress, closes=(Close(request.request_id, Closing.RETRACTED),))
        assert not reply.errors, reply.errors
        self._left(request)
        self._take(reply)
        self.client.run()

    def resume(self, request: Decoding) -> bool:
        """Goes on with a retracted request; False when it is refused."""
        opened = self._ask(request, request.rows, request.wanted + AHEAD - len(request.outputs))
        if opened.state == "refused":
            return False
        assert opened.cached_tokens == request.rows
        self._begin(request, opened)
        return True


def _append(store: HiSparseStore, run: SpanRunTable) -> None:
    latent, indexer = run.pages["latent"], run.pages["indexer"]
    at = 0
    for first, segments, interleave in zip(run.first_tokens, run.segments, run.interleave, strict=True):
        part = slice(at, at + int(segments))
        at += int(segments)
        store.append_spans(
            TokenOrder(int(segments), int(interleave)), int(first), run.uids[part].astype(np.int64),
            latent[0][part], latent[1][part], indexer[0][part],
        )  # fmt: skip
