"""Histories in which prefixes are exported while they are onboarded: what a reader finds, and may keep, is right.

A reader looks at the bytes that a ticket names and then asks whether they are still what was exported. Freed pages
are poisoned at once, so a copy that was let go under its reader is seen.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from kvmanager.core.events import (
    AcceptTicket,
    CheckTicket,
    Closing,
    CopyOutcome,
    Exported,
    ExportRequestKV,
    MoverGone,
    Opened,
    ReleaseTicket,
    Tick,
    TicketPages,
)
from kvmanager.core.patterns import Rows
from kvmanager.core.spans import NO_PAGE
from kvmanager.core.spec import Limits, Placement
from kvmanager.errors import KVError
from tests.sim.bytes_driver import BytesClient, BytesDriver, pattern, start
from tests.sim.content import PAGE_ROWS
from tests.sim.worlds import Regions, replicated

LIMITS = Limits(export_from_host=True, checksums=1, ticket_ttl_ns=60_000, ticket_grace_ns=20_000, batch_spans=2)
ENDS = [CopyOutcome.DONE] * 8 + [CopyOutcome.FAILED, CopyOutcome.UNKNOWN_FATE]
SESSIONS = "abcde"
MOST_OPEN = 2


@dataclass
class Held:
    """A request that is open. `opened`: its tables, once it runs."""

    what: str
    tokens: int
    opened: Opened | None = None


class EveryRank(BytesClient):
    """An engine of a replicated group: all ranks hold all tokens."""

    def rows(self, opened: Opened, first: int, last: int, rank: int = 0) -> Rows:
        c, rows = self.spec.chains[0].classes[0], self.spec.page_rows
        positions = np.arange(first, last)
        pages = np.asarray(opened.spans[0].pages["kv"][0], np.int64)[positions // rows]
        assert (pages >= 0).all()
        return Rows(np.full(len(positions), c.device_regions[rank], np.int32), pages, positions % rows)

    def write(self, opened: Opened, what: object, first: int, last: int) -> None:
        super().write(opened, what, first, last)
        for rank in range(1, self.spec.ranks):
            rows = self.rows(opened, first, last, rank)
            self.driver.memory.fill(self.layout, rows, pattern(what, np.arange(first, last)))


def engine(ranks: int, page_rows: int, placement: Placement) -> tuple[BytesDriver, BytesClient]:
    if placement is Placement.SHARDED:
        return start(6, 11, LIMITS, ranks=ranks, page_rows=page_rows)
    driver = BytesDriver([replicated(Regions({}), "p", 6, 11, ranks)], LIMITS)
    return driver, EveryRank(driver, "p")


class History:
    """One node, one engine, and whoever reads its tickets."""

    def __init__(self, seed: int, ranks: int, page_rows: int, placement: Placement) -> None:
        self.draw = random.Random(seed)
        self.driver, self.client = engine(ranks, page_rows, placement)
        self.placement = placement
        self.span = page_rows if placement is Placement.REPLICATED else ranks * page_rows
        for number, what in enumerate(SESSIONS):
            self.client.serve(1_000 + number, 4 * self.span, what)
        self.requests: dict[int, Held] = {}
        self.tickets: dict[str, str] = {}
        self.next = 1
        self.told = 0
        self.happened: Counter[str] = Counter()

    def hears(self) -> None:
        """What waited runs, or was refused."""
        notices, self.told = self.driver.notices[self.told :], len(self.driver.notices)
        for ready in (notice.ready for notice in notices):
            held = self.requests.get(ready.request_id) if ready else None
            if held is not None and held.opened is None:
                assert ready is not None
                self._answered(ready, held)

    def _answered(self, answer: Opened, held: Held) -> None:
        if answer.state == "refused":
            del self.requests[answer.request_id]
        elif answer.state == "runnable":
            self.client.write(answer, held.what, answer.cached_tokens, held.tokens)
            self.client.read(answer, held.what, held.tokens)
            held.opened = answer
            self.client.commit(answer.request_id, held.tokens)
            self.client.run()

    def opens(self) -> None:
        held = Held(self.draw.choice(SESSIONS), self.draw.randint(1, 4 * self.span))
        number, self.next = self.next, self.next + 1
        self.requests[number] = held
        answer = self.client.open(number, held.tokens, held.what)
        self._answered(answer, held)
        if answer.state == "waiting" and self.draw.random() < 0.7:
            self.exports(number)

    def exports(self, number: int) -> None:
        held, ticket_id = self.requests[number], f"t{number}"
        expected = held.tokens if self.draw.random() < 0.7 else held.tokens // self.span * self.span
        answer = self.driver.apply(ExportRequestKV("e", self.client.epoch, number, ticket_id, expected))
        if isinstance(answer, Exported):
            self.happened["waited" if held.opened is None else "ran"] += 1
            self.tickets[ticket_id] = held.what

    def reads(self, ticket_id: str) -> None:
        """All that a ticket names. Whether it may be kept, its source says afterwards."""
        pages = self.driver.apply(AcceptTicket(ticket_id, "d"))
        if not isinstance(pages, TicketPages):
            assert isinstance(pages, KVError)
            return
        for _ in range(self.draw.randint(0, 3)):  # meanwhile
            self.acts(self.draw.choice(["opens", "closes", "plan", "plan", "time"]))
        what = self.tickets[ticket_id]
        wrong = self.driver.memory.wrong(
            self.client.layout, self._rows(pages), pattern(what, np.arange(pages.committed_tokens))
        )
        if self.driver.apply(CheckTicket(ticket_id, pages.generations)) is not None:
            self.happened["stale"] += 1
            return
        assert not wrong.any(), f"{int(wrong.sum())} wrong rows of ticket {ticket_id}"
        on_host = int((pages.spans[0].pages["kv"][0] == NO_PAGE).sum())
        self.happened["read on the host"] += on_host > 0
        self.happened["read on both"] += 0 < on_host < len(pages.spans[0].segments)

    def _rows(self, pages: TicketPages) -> Rows:
        c = self.client.spec.chains[0].classes[0]
        ranks = self.client.spec.ranks
        if self.placement is Placement.REPLICATED:
            return self._shared_rows(pages)
        device, host = pages.spans[0].pages["kv"]
        positions = np.arange(pages.committed_tokens)
        span, rank = positions // self.span, positions % ranks
        on_host = device[span] == NO_PAGE
        regions = np.where(on_host, np.asarray(c.host_regions)[rank], np.asarray(c.device_regions)[rank])
        return Rows(
            regions.astype(np.int32), np.where(on_host, host[span], device[span]), positions % self.span // ranks
        )

    def _shared_rows(self, pages: TicketPages) -> Rows:
        """Of a replicated chain: rank 0's device pages, or host page i in share i mod n."""
        c, shares = self.client.spec.chains[0].classes[0], self.client.spec.ranks
        positions = np.arange(pages.committed_tokens)
        device, host = (side[positions // self.span] for side in pages.spans[0].pages["kv"])
        on_host = device == NO_PAGE
        regions = np.where(on_host, np.asarray(c.host_regions)[host % shares], c.device_regions[0])
        return Rows(regions.astype(np.int32), np.where(on_host, host // shares, device), positions % self.span)

    def acts(self, action: str) -> None:
        draw, running = self.draw, [n for n, held in self.requests.items() if held.opened is not None]
        match action:
            case "opens" if len(self.requests) < MOST_OPEN:
                self.opens()
            case "opens":
                self.acts("closes")
            case "export" if self.requests:
                number = draw.choice(list(self.requests))
                if f"t{number}" not in self.tickets:
                    self.exports(number)
            case "read" if self.tickets:
                self.reads(draw.choice(list(self.tickets)))
            case "release" if self.tickets:
                ticket_id = draw.choice(list(self.tickets))
                del self.tickets[ticket_id]
                self.driver.apply(ReleaseTicket(ticket_id, "d"))
            case "closes" if running:
                number = draw.choice(running)
                del self.requests[number]
                self.client.close(number, draw.choice(list(Closing)))
                self.client.run()
            case "plan" if self.driver.plans:
                self.driver.end(draw.choice(list(self.driver.plans)), draw.choice(ENDS))
            case "time" | "mover":
                self._meanwhile(action)
        self.hears()

    def _meanwhile(self, action: str) -> None:
        if action == "time":
            self.driver.apply(Tick(), passes=self.draw.choice((1_000, 5_000, 90_000)))
        elif self.draw.random() < 0.1:
            self.driver.plans.clear()
            self.driver.apply(MoverGone())

    def play(self, actions: int) -> Counter[str]:
        wanted = ["opens"] * 4 + ["plan"] * 7 + ["read"] * 5 + ["closes"] * 3 + ["export", "release", "time", "mover"]
        for _ in range(actions):
            self.acts(self.draw.choice(wanted))
        self.driver.leave(self.client)
        return self.happened


@pytest.mark.parametrize(
    ("ranks", "page_rows", "placement"),
    [(8, 8, Placement.SHARDED), (2, 4, Placement.SHARDED), (1, 8, Placement.SHARDED),
     (3, PAGE_ROWS, Placement.REPLICATED)],
)  # fmt: skip
def test_what_readers_may_keep_is_right(ranks: int, page_rows: int, placement: Placement) -> None:
    happened: Counter[str] = Counter()
    for seed in range(6):
        try:
            happened += History(seed, ranks, page_rows, placement).play(120)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    for name in ("waited", "ran", "stale", "read on the host", "read on both"):
        assert happened[name] > 0, (name, happened)
