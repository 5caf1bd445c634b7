"""Pages between tenants, with real bytes that nobody clears: what a tenant is given holds no byte of another one."""

from __future__ import annotations

import random
import secrets
from dataclasses import replace

import numpy as np
import pytest

from kvmanager.core.events import Close, Closing, CopyOutcome, Open, Opened, Progress
from kvmanager.core.leaseevents import EndLease, ReserveSpans
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spec import GroupSpec, Residency
from kvmanager.errors import InvalidArgument, KVError, PoolExhausted
from tests.sim.bytes_driver import BytesClient, BytesDriver, small_group
from tests.sim.content import POISON
from tests.sim.driver import Client, Driver, chain_keys, pages_of
from tests.sim.worlds import Regions, cache, hisparse
from tests.unit.test_core_sparse import ticket

RANKS = 2
ROWS = 4
SPAN = RANKS * ROWS
MARKS = {"a": 0x0A, "b": 0x0B, "c": 0x0C}


class Keeping(BytesDriver):
    """Freed pages keep their bytes, as real memory does."""

    apply = Driver.apply


class Marker(Client):
    """An engine whose tenant's bytes all look the same; it looks at every page that it is told of."""

    def __init__(self, driver: Keeping, tenant: str) -> None:
        super().__init__(driver, "p", f"engine-{tenant}", tenant.encode(), tenant=tenant)
        self.keeping, self.mark = driver, MARKS[tenant]
        self.foreign = 0
        self.open_now: dict[int, list[int]] = {}

    def see(self, pages: list[int], plans: tuple[CopyPlan, ...]) -> None:
        """Carries out what comes with the pages, looks at them, and fills them."""
        for plan in plans:
            self.keeping.move(plan)
        (page_class,) = self.spec.chains[0].classes
        size = page_class.page_bytes
        for region in page_class.device_regions:
            for page in pages:
                there = self.keeping.memory.regions[region][page * size : (page + 1) * size]
                self.foreign += int((~np.isin(there, (0, POISON, self.mark))).sum())
                there[:] = self.mark


def group(*, scrub: bool) -> GroupSpec:
    return replace(small_group(10, 14, ranks=RANKS, page_rows=ROWS), scrub=scrub)


class History:
    """Three tenants open, grow and close at random, while plans end late or fail."""

    def __init__(self, seed: int, *, scrub: bool) -> None:
        self.draw = random.Random(seed)
        self.driver = Keeping([group(scrub=scrub)])
        self.clients = [Marker(self.driver, tenant) for tenant in MARKS]
        self.requests = 0

    def run(self, events: int = 150) -> int:
        """Bytes of others that somebody saw."""
        for _ in range(events):
            self._read_notices()
            client = self.draw.choice(self.clients)
            self.draw.choice((self._open, self._open, self._grow, self._close, self._end_plan))(client)
            client.run()
        foreign = sum(client.foreign for client in self.clients)
        self.driver.leave(*self.clients)
        return foreign

    def _read_notices(self) -> None:
        for opened in [notice.ready for notice in self.driver.notices if notice.ready is not None]:
            owner = next((c for c in self.clients if opened.request_id in c.open_now), None)
            if owner is not None:
                self._opened(owner, opened)
        self.driver.notices.clear()

    def _opened(self, client: Marker, opened: Opened) -> None:
        if opened.state == "refused":
            client.open_now.pop(opened.request_id, None)
            return
        pages = pages_of(opened) if opened.state == "runnable" else []
        client.see(pages, opened.worker_plans)
        client.open_now[opened.request_id] = pages

    def _open(self, client: Marker) -> None:
        if len(client.open_now) < 3:
            self.requests += 1
            tokens, growth = self.draw.randint(1, 4 * SPAN), self.draw.choice((0, 2 * SPAN))
            self._opened(client, client.open(self.requests, tokens, self.draw.randrange(4), growth))

    def _grow(self, client: Marker) -> None:
        for number in [number for number, pages in client.open_now.items() if pages][:1]:
            tokens = len(client.open_now[number]) * SPAN
            for grown in client.commit(number, tokens, tokens + self.draw.choice((0, 1, SPAN))).grown:
                fresh = [page for run in grown.spans for page in run.pages["kv"][0].tolist()]
                client.see(fresh, grown.worker_plans)
                client.open_now[number] += fresh

    def _close(self, client: Marker) -> None:
        if client.open_now:
            number = self.draw.choice(list(client.open_now))
            client.close(number)
            del client.open_now[number]

    def _end_plan(self, _client: Marker) -> None:
        if self.driver.plans:
            outcome = self.draw.choice([CopyOutcome.DONE] * 6 + [CopyOutcome.FAILED, CopyOutcome.CANCELLED])
            self.driver.end(self.draw.choice(list(self.driver.plans)), outcome)


def test_no_byte_of_another_tenant_is_seen() -> None:
    first = secrets.randbits(32)
    scrubbed = 0
    for seed in range(first, first + 6):
        print(f"seed {seed}")
        history = History(seed, scrub=True)
        assert history.run() == 0, f"seed {seed}"
        scrubbed += history.driver.counters["scrubbed_page"]
    assert scrubbed > 0


def test_without_scrubbing_they_are() -> None:
    """So that the test above can fail."""
    histories = [History(seed, scrub=False) for seed in range(6)]
    assert sum(history.run() for history in histories) > 0
    assert not any(history.driver.counters["scrubbed_page"] for history in histories)


@pytest.fixture
def full() -> tuple[Keeping, Marker, Marker]:
    """Tenant a has had every page, and gave all back."""
    driver = Keeping([replace(small_group(10, 0, ranks=RANKS, page_rows=ROWS), scrub=True)])
    ours, theirs = Marker(driver, "a"), Marker(driver, "b")
    opened = ours.open(1, 10 * SPAN)
    assert opened.state == "runnable", "memory that nobody wrote needs nothing"
    ours.see(pages_of(opened), ())
    ours.close(1)
    ours.run()
    return driver, ours, theirs


def test_a_tenant_takes_its_own_pages_again_at_once(full: tuple[Keeping, Marker, Marker]) -> None:
    driver, ours, _ = full
    assert ours.open(2, 10 * SPAN, "other").state == "runnable"
    assert not driver.plans


def test_growth_brings_its_plans(full: tuple[Keeping, Marker, Marker]) -> None:
    driver, _, theirs = full
    opened = theirs.open(1, 2 * SPAN, growth=4 * SPAN)
    assert opened.state == "waiting"
    assert [plan.purpose for plan in driver.plans.values()] == [Purpose.SCRUB]
    opened = BytesClient.ready(theirs, opened)  # type: ignore[arg-type]
    theirs.see(pages_of(opened), opened.worker_plans)
    (grown,) = theirs.commit(1, 2 * SPAN, 4 * SPAN).grown
    assert [plan.purpose for plan in grown.worker_plans] == [Purpose.SCRUB]
    theirs.see(grown.spans[0].pages["kv"][0].tolist(), grown.worker_plans)
    assert theirs.foreign == 0
    assert not driver.plans


@pytest.mark.parametrize("closing", [Closing.FINISHED, Closing.ABORTED])
def test_a_reply_to_a_close_brings_no_zeros(full: tuple[Keeping, Marker, Marker], closing: Closing) -> None:
    """Its fence doesn't cover what the reply brings: pages given with it would be another's before the zeros come."""
    driver, ours, theirs = full
    opened = BytesClient.ready(theirs, theirs.open(1, 2 * SPAN, growth=4 * SPAN))  # type: ignore[arg-type]
    theirs.see(pages_of(opened), opened.worker_plans)
    theirs.run()
    reply = theirs.step((Progress(1, 4 * SPAN, 2 * SPAN),), closes=(Close(1, closing),))
    theirs.run()
    opened = BytesClient.ready(ours, ours.open(2, 10 * SPAN, "more"))  # type: ignore[arg-type]
    ours.see(pages_of(opened), opened.worker_plans)
    before = {region: driver.memory.regions[region].copy() for region in ours.spec.chains[0].classes[0].device_regions}
    theirs.see([], tuple(plan for grown in reply.grown for plan in grown.worker_plans))
    assert all((driver.memory.regions[region] == bytes_).all() for region, bytes_ in before.items())
    assert reply.grown == ()


def test_a_request_whose_scrub_fails_is_told_and_the_next_waits_anew(full: tuple[Keeping, Marker, Marker]) -> None:
    driver, _, theirs = full
    for number, outcome in enumerate((CopyOutcome.FAILED, CopyOutcome.UNKNOWN_FATE), 1):
        assert theirs.open(number, 2 * SPAN).state == "waiting"
        driver.end(min(driver.plans), outcome)
        assert driver.notices[-1].ready is not None
        assert driver.notices[-1].ready.state == "refused"
    held = driver.pool("p/hbm")
    assert held.account()
    opened = BytesClient.ready(theirs, theirs.open(3, 8 * SPAN))  # type: ignore[arg-type]
    theirs.see(pages_of(opened), opened.worker_plans)
    assert theirs.foreign == 0
    driver.leave(theirs)


def test_an_abort_leaves_the_pages_busy_until_the_zeros_are_there(full: tuple[Keeping, Marker, Marker]) -> None:
    driver, ours, theirs = full
    assert theirs.open(1, 10 * SPAN).state == "waiting"
    theirs.close(1)
    assert ours.open(2, SPAN, "more").state == "refused", "the mover still writes there"
    driver.end_all()
    opened = BytesClient.ready(ours, ours.open(3, 10 * SPAN, "more"))  # type: ignore[arg-type]
    ours.see(pages_of(opened), opened.worker_plans)
    assert ours.foreign == 0


def test_a_hand_off_begins_when_its_pages_are_clean(full: tuple[Keeping, Marker, Marker]) -> None:
    driver, _, theirs = full
    assert theirs.open(1, 3 * SPAN, "t", ticket=ticket(3 * SPAN)).state == "waiting"
    assert not driver.pulls
    driver.end(min(driver.plans))
    assert len(driver.pulls) == 1, "only now"
    driver.end_all()
    assert driver.notices[-1].ready is not None
    assert driver.notices[-1].ready.state == "runnable"


def hot_bytes(plan: CopyPlan) -> list[tuple[int, int]]:
    """(offset, bytes) of what the plan clears."""
    assert plan.purpose is Purpose.SCRUB
    return [(at, c.row_bytes) for c in plan.pieces() for at in c.target_offsets.tolist()]


@pytest.mark.parametrize("scrub", [True, False])
def test_a_hot_buffer_of_another_tenants_bytes_comes_with_its_zeros(scrub: bool) -> None:
    """One that is given in mid-run; the request's own pages were cleared when it was opened."""
    spec = replace(hisparse(Regions({}), "d", 44, 200), scrub=scrub)
    driver = Driver([spec])
    ours, theirs = (Client(driver, "d", f"engine-{tenant}", tenant.encode(), tenant=tenant) for tenant in "ab")
    assert ours.open(1, 28 * ROWS).state == "runnable"
    ours.close(1)
    ours.run()
    tokens = 20 * ROWS
    assert theirs.open(1, tokens, "a", ticket=ticket(tokens)).state == "waiting"
    driver.end_all()
    assert driver.notices[-1].ready is not None
    assert driver.notices[-1].ready.state == "runnable"
    theirs.step()
    other = Open(2, 8 * ROWS, 0, chain_keys("b", 8), "b", ticket(8 * ROWS, "u"))
    reply = theirs.step(opens=(other,))
    assert reply.opened[0].state == "refused", "so that the first one lets go of HBM, and gets a hot buffer"
    (hot,) = reply.hot
    slab = spec.pools[0].slab_bytes
    if scrub:
        (plan,) = hot.worker_plans
        cleared = {at // slab for at, size in hot_bytes(plan) for at in range(at, at + size, slab)}
        assert cleared == set(hot.pages.tolist())
        assert sum(size for _, size in hot_bytes(plan)) == len(hot.pages) * slab
        (region,) = spec.chains[0].classes[0].device_regions
        assert {c.target_region for c in plan.pieces()} == {region}
    else:
        assert hot.worker_plans == ()
    driver.leave(ours, theirs)


def test_a_hot_buffer_that_an_open_brings_comes_with_zeros_too_and_ones_own_without() -> None:
    spec = replace(hisparse(Regions({}), "d", 44, 200, residency=Residency.ALWAYS_HOST), scrub=True)
    driver = Driver([spec])
    clients = [Client(driver, "d", f"engine-{tenant}", tenant.encode(), tenant=tenant) for tenant in "ab"]
    tokens = 20 * ROWS
    zeros = []
    assert clients[0].open(10, 28 * ROWS, "all").state == "runnable"  # all of HBM was its own once
    clients[0].close(10)
    clients[0].run()
    for number, client in ((1, clients[0]), (2, clients[0]), (3, clients[1])):
        client.open(number, tokens, number, ticket=ticket(tokens, f"t{number}"))
        driver.end_all()
        ready = driver.notices[-1].ready
        assert ready is not None
        assert (ready.request_id, ready.state) == (number, "runnable")
        assert ready.hot is not None
        zeros.append(sum(plan.total_bytes for plan in ready.worker_plans if plan.purpose is Purpose.SCRUB))
        client.close(number)
        client.run()
        driver.end_all()
    assert zeros == [0, 0, 2 * spec.pools[0].slab_bytes]
    driver.leave(*clients)


def test_a_lease_waits_and_is_asked_for_again() -> None:
    spec = replace(cache(Regions({}), "p", 6, 1), scrub=True)
    driver = Driver([spec])
    clients = [Client(driver, "p", f"engine-{tenant}", tenant.encode(), tenant=tenant) for tenant in "ab"]

    def reserve(client: Client, lease: int, what: str) -> Opened:
        event = ReserveSpans(client.name, client.epoch, lease, chain_keys(what, 6), 1_000_000)
        answer = driver.apply(event)
        if isinstance(answer, KVError):
            raise answer
        assert isinstance(answer, Opened)
        return answer

    assert reserve(clients[0], 1, "a").state == "runnable"
    driver.apply(EndLease(clients[0].name, clients[0].epoch, 1))
    assert reserve(clients[1], 1, "b").state == "waiting"
    assert reserve(clients[1], 1, "b").spans == (), "said again, it changes nothing"
    assert len(driver.plans) == 1
    fence = dict.fromkeys(clients[1].attaches, 0)
    refused = driver.apply(EndLease(clients[1].name, clients[1].epoch, 1, fence, committed=True))
    assert isinstance(refused, InvalidArgument)
    assert "waits for its pages" in str(refused)
    driver.end_all()
    got = reserve(clients[1], 1, "b")
    assert (got.state, len(pages_of(got))) == ("runnable", 6)
    driver.apply(EndLease(clients[1].name, clients[1].epoch, 1))
    assert reserve(clients[0], 2, "c").state == "waiting"
    driver.apply(EndLease(clients[0].name, clients[0].epoch, 2))
    with pytest.raises(PoolExhausted):
        reserve(clients[1], 2, "d")  # the mover still writes there
    driver.end_all()
    assert reserve(clients[0], 3, "d").state == "runnable"
    assert not driver.notices
    driver.leave(*clients)
