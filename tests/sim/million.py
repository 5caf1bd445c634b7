"""One request of 16,250 pages (1,040,000 tokens of 64 a page) on a decode rank, driven step by step, bytes included."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvmanager.core.events import Close, Closing, Open, Opened, Progress, StartPull, StepDone, TicketInfo
from kvmanager.core.patterns import Rows
from tests.sim.bytes_driver import BytesDriver, pattern
from tests.sim.driver import Client, Driver
from tests.sim.worker import WrongKV

PROMPT_PAGES = 16_250
MOST_PAGES = 16_384
SPAN_PAGES = 8
ARRIVED_PAGES = 16_256
"""The prompt ends inside a span of eight pages, which new tokens fill."""
CLASSES = ("latent", "indexer")


@dataclass
class Million:
    """The request and its worker's table: pages by ordinal, int64, and the hot buffer.

    `driver`: with bytes, what is written and read is checked against the positions' pattern.
    """

    driver: Driver
    client: Client
    device: dict[str, np.ndarray] = field(default_factory=dict)
    host: dict[str, np.ndarray] = field(default_factory=dict)
    hot: np.ndarray | None = None
    tokens: int = 0

    @property
    def rows(self) -> int:
        """Tokens of a page."""
        return self.client.spec.page_rows

    def keys(self, first: int, last: int) -> bytes:
        """Keys of pages [first, last)."""
        return b"".join(number.to_bytes(16, "little") for number in range(1 + first, 1 + last))

    # ----------------------------------------------------------------------------- life

    def arrive(self) -> Opened:
        """Comes by hand-off; the answer when all of it is there."""
        self.tokens = PROMPT_PAGES * self.rows
        growth = (MOST_PAGES - PROMPT_PAGES) * self.rows
        ticket = TicketInfo("t", "peer", self.tokens, 1)
        asked = Open(1, self.tokens, growth, self.keys(0, PROMPT_PAGES), "s", ticket)
        opened = self.client.step(opens=(asked,)).opened[0]
        assert opened.state == "waiting", opened.error
        for pull in list(self.driver.pulls.values()):
            self._pulled(pull)
        return self._ready()

    def _ready(self) -> Opened:
        """The tables, when what it waits for has come."""
        self.driver.end_all()
        ready = [n.ready for n in self.driver.notices if n.ready and n.ready.request_id == 1][-1]
        assert ready.state == "runnable", ready.error
        self.client.seen += len(self.driver.notices)
        self.driver.notices.clear()
        (run,) = ready.spans
        for name in CLASSES:
            self.device[name], self.host[name] = (pages.copy() for pages in run.pages[name])
        self.hot = ready.hot
        return ready

    def step(self, pages: int) -> None:
        """Commits what was written and writes `pages` further pages."""
        before = self.tokens // self.rows
        upto = min(before + pages, MOST_PAGES) * self.rows
        # Rows of a page are written one step, and are committed, with its key, by the next.
        reply = self.client.step((Progress(1, upto, self.tokens),))
        self._take(reply)
        self._write(self.tokens, upto)
        self.client.run()
        reply = self.client.step((Progress(1, upto, upto, 0, self.keys(before, upto // self.rows)),))
        self._take(reply)
        self.tokens = upto
        self.client.run()
        self.driver.end_all()

    def _take(self, reply: StepDone) -> None:
        assert not reply.errors, reply.errors
        for grown in reply.grown:
            assert grown.error is None, grown.error
            for run in grown.spans:
                for name in CLASSES:
                    self.device[name] = np.concatenate((self.device[name], run.pages[name][0]))
                    self.host[name] = np.concatenate((self.host[name], run.pages[name][1]))
        for rows in reply.residency:
            self.device[rows.page_class][rows.ordinals] = rows.device
            self.host[rows.page_class][rows.ordinals] = rows.host
        for hot in reply.hot:
            self.hot = hot.pages

    def retract(self) -> StepDone:
        """Gives up the device pages; all copies have landed."""
        reply = self.client.step(closes=(Close(1, Closing.RETRACTED),))
        self.client.run()
        self.driver.end_all()
        return reply

    def resume(self) -> Opened:
        """Goes on; the answer when what must be on the device is there."""
        asked = Open(1, self.tokens, 0, self.keys(0, self.tokens // self.rows))
        opened = self.client.step(opens=(asked,)).opened[0]
        assert opened.state == "waiting", opened.error
        return self._ready()

    # ---------------------------------------------------------------------------- bytes

    def places(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """(page ordinal, slot) of positions, by the rule of the token orders."""
        positions = np.arange(first, last)
        span, offset = np.divmod(positions, SPAN_PAGES * self.rows)
        arrived = positions < ARRIVED_PAGES * self.rows
        ordinal = np.where(arrived, span * SPAN_PAGES + offset % SPAN_PAGES, positions // self.rows)
        return ordinal, np.where(arrived, offset // SPAN_PAGES, positions % self.rows)

    def _pulled(self, pull: StartPull) -> None:
        """What the mover does for a hand-off."""
        if not isinstance(self.driver, BytesDriver):
            return
        classes = {c.name: c for c in self.client.spec.chains[0].classes}
        for target in (target for part in pull.chains for target in part.targets):
            for run in target.spans:
                last = min(target.end, run.first_token + run.tokens(self.rows))
                rows = run.rows(self.rows, run.first_token, last)
                rows = Rows(rows.region, run.pages[rows.page], rows.slot)
                content = pattern("m", np.arange(run.first_token, last))
                self.driver.memory.fill(classes[target.page_class].layout, rows, content)

    def _write(self, first: int, last: int) -> None:
        if not isinstance(self.driver, BytesDriver) or first == last:
            return
        ordinal, slot = self.places(first, last)
        for c in self.client.spec.chains[0].classes:
            pages = self.device[c.name][ordinal]
            assert (pages >= 0).all(), "new rows go to resident pages"
            rows = Rows(np.full(len(pages), c.device_regions[0], np.int32), pages, slot)
            self.driver.memory.fill(c.layout, rows, pattern("m", np.arange(first, last)))

    def check(self, first: int = 0, last: int | None = None) -> None:
        """Every row that a kernel would read holds its pattern, wherever the table says that it is. Raises WrongKV."""
        last = self.tokens if last is None else last
        ordinal, slot = self.places(first, last)
        for c in self.client.spec.chains[0].classes:
            device, host = self.device[c.name][ordinal], self.host[c.name][ordinal]
            assert ((device >= 0) | (host >= 0)).all(), f"{c.name} pages are nowhere"
            assert c.name == "latent" or (device >= 0).all(), "indexer pages are read on the device"
            assert (device >= 0).all() or self.hot is not None
            if not isinstance(self.driver, BytesDriver):
                continue
            region = np.where(device >= 0, c.device_regions[0], c.host_regions[0]).astype(np.int32)
            rows = Rows(region, np.where(device >= 0, device, host), slot)
            wrong = self.driver.memory.wrong(c.layout, rows, pattern("m", np.arange(first, last)))
            if wrong.any():
                raise WrongKV(f"{c.name}: {int(wrong.sum())} rows, the first at position {first + int(wrong.argmax())}")
