"""Hybrid HiSparse residency: mirrors, releases, hot buffers, and what workers are told."""

import numpy as np
import pytest

from kvmanager.core.events import AcceptTicket, CheckTicket, ExportRequestKV, Open, ReleaseTicket, TicketInfo, Trim
from kvmanager.core.pool import PageState
from kvmanager.core.residency import first_resident
from kvmanager.core.spec import Limits
from kvmanager.errors import InvalidArgument, StalePage
from kvmanager.geometry import SEQUENTIAL
from tests.sim.driver import Client, Driver, chain_keys
from tests.sim.worlds import SOURCE_ORDER, Regions, hisparse

ROWS, SPAN = 4, 32


def decode(slabs: int, host_pages: int = 200, arrival=SOURCE_ORDER, hot: int = 2) -> tuple[Driver, Client]:
    driver = Driver([hisparse(Regions({}), "d", slabs, host_pages, arrival, hot)])
    return driver, Client(driver, "d")


def ticket(tokens: int, name: str = "t") -> TicketInfo:
    return TicketInfo(name, "peer", tokens, 1_000_000)


@pytest.mark.parametrize(
    ("ends", "widths", "sealed", "tail", "first"),
    [
        ([4, 8, 12, 16], [1, 1, 1, 1], 16, 2, 2),
        ([4, 8, 12, 16], [1, 1, 1, 1], 15, 2, 1),
        ([4, 8, 12, 16], [1, 1, 1, 1], 0, 2, 0),
        ([32, 64, 68], [8, 8, 1], 68, 2, 1),
        ([32, 64], [8, 8], 64, 2, 1),
        ([32], [8], 32, 2, 0),
        ([], [], 0, 2, 0),
    ],
)
def test_first_resident(ends, widths, sealed, tail, first):
    assert first_resident(ends, widths, sealed, tail) == first


def test_an_open_without_a_ticket_is_resident_and_its_own():
    driver, client = decode(40)
    opened = client.open(1, 37, "a", growth=8)
    assert (opened.state, opened.cached_tokens, opened.hot) == ("runnable", 0, None)
    device, host = opened.spans[0].pages["latent"]
    assert (device >= 0).all()
    assert (host == -1).all()
    client.commit(1, 37, capacity=40)
    client.run()
    assert driver.plans, "sealed pages are mirrored"
    driver.end_all()
    assert driver.counters["mirror"] == 9
    assert client.step().residency == (), "a mirror of a resident page is nobody's to read"
    client.close(1)
    client.run()
    again = client.open(2, 37, "a")
    assert again.cached_tokens == 36
    driver.leave(client)


def test_a_mirror_of_a_resident_page_is_reclaimable_and_made_again_when_hbm_runs_short():
    driver, client = decode(40)
    client.open(1, 100, "a")
    client.commit(1, 100)
    client.run()
    driver.end_all()
    pool = driver.pool("d/host")
    assert driver.pages("d/host", PageState.READY) > 25 * pool.units_per_slab
    driver.apply(Trim("d", "d/host", 200))
    assert driver.counters["host_reclaim"] >= 25
    assert driver.pages("d/host", PageState.READY) == 0
    assert driver.plans, "too little of HBM is free or clean: some are made anew"
    assert client.open(2, 40, "b").state == "refused", "HBM is full of pages that only it holds"
    driver.end_all()
    for _ in range(3):
        client.open(2, 40, "b")
        client.step()
        client.run()
        driver.end_all()
    assert driver.counters["spill"] > 0
    assert 2 in driver.node.state.engines["e"].requests
    driver.leave(client)


def test_a_host_copy_stays_as_long_as_a_worker_may_read_it():
    """Its place was told: nothing takes it away before the request ends."""
    driver, client = decode(44)
    tokens = 20 * ROWS
    client.open(1, tokens, "a", ticket=ticket(tokens))
    driver.end_all()
    (rows,) = client.step(opens=(Open(2, 8 * ROWS, 0, chain_keys("b", 8), "b", ticket(8 * ROWS, "u")),)).residency
    driver.apply(Trim("d", "d/host", 200))
    space = driver.pool("d/host").spaces["latent"]
    assert (space.state[rows.host] == PageState.READY).all()
    taken = space.generation[rows.host].copy()
    client.run()
    client.close(1)
    client.run()
    driver.end_all()
    driver.apply(Trim("d", "d/host", 200))
    assert ((space.state[rows.host] == PageState.FREE) | (space.generation[rows.host] != taken)).all()
    driver.leave(client)


def test_an_open_without_a_ticket_never_starts_on_the_host():
    """What the engine writes itself has nobody else to fill it: it fits in HBM or it waits."""
    driver, client = decode(12)
    assert client.open(1, 15 * ROWS, "a").state == "refused"
    assert client.open(2, 5 * ROWS, "a").state == "runnable"
    driver.leave(client)


@pytest.mark.parametrize(("arrival", "spans"), [(SOURCE_ORDER, 4), (SEQUENTIAL, 25)])
def test_a_hand_off_lands_partly_on_the_host(arrival, spans):
    driver, client = decode(40, arrival=arrival)
    tokens = 3 * SPAN + 3
    assert client.open(1, tokens, "a", ticket=ticket(tokens)).state == "waiting"
    (pull,) = driver.pulls.values()
    covered = {}
    for target in pull.chains[0].targets:
        covered.setdefault(target.page_class, []).extend(
            np.arange(spans.first_token, min(target.end, spans.first_token + spans.tokens(ROWS)))
            for spans in target.spans
        )
    for positions in covered.values():
        assert np.sort(np.concatenate(positions)).tolist() == list(range(tokens))
    driver.end_all()
    ready = driver.notices[-1].ready
    assert (ready.state, ready.cached_tokens) == ("runnable", tokens)
    assert len(ready.spans[0].first_tokens) == spans
    device, host = ready.spans[0].pages["latent"]
    assert ((device >= 0) | (host >= 0)).all()
    assert (device[-1:] >= 0).all(), "the unsealed page is resident"
    if (device < 0).any():
        assert ready.hot is not None
        assert len(ready.hot) == 2
    driver.leave(client)


def test_pressure_releases_and_the_slab_drains_until_the_next_fence():
    driver, client = decode(44)
    tokens = 20 * ROWS  # two sealed spans of eight pages, and one that is not
    assert client.open(1, tokens, "a", ticket=ticket(tokens)).state == "waiting"
    driver.end_all()
    assert driver.counters["mirror"] == 2, "spans"
    assert driver.counters["spill"] == 0
    client.step()
    reply = client.step(opens=(Open(2, 8 * ROWS, 0, chain_keys("b", 8), "b", ticket(8 * ROWS, "u")),))
    assert reply.opened[0].state == "refused"
    # The running request releases towards what was lacking: its first span, since a tail stays.
    (hot,) = reply.hot
    (rows,) = reply.residency
    assert (hot.request_id, len(hot.pages)) == (1, 2)
    assert rows.ordinals.tolist() == list(range(8))
    assert (rows.device == -1).all()
    assert (rows.host >= 0).all()
    assert driver.counters["spill"] == 1
    draining = driver.pages("d/hbm", PageState.DRAINING)
    assert draining == 8 * driver.pool("d/hbm").units_per_slab
    client.step()  # its fence names the step that writes the new rows
    assert driver.pages("d/hbm", PageState.DRAINING) == draining
    client.run()
    assert driver.pages("d/hbm", PageState.DRAINING) == 0
    assert client.open(3, 8 * ROWS, "b", ticket=ticket(8 * ROWS, "v")).state == "waiting"
    driver.end_all()
    driver.leave(client)


def test_a_shared_page_is_released_only_when_every_holder_has_a_hot_buffer():
    driver, client = decode(46)
    tokens = 20 * ROWS
    client.open(1, tokens, "a")
    client.commit(1, tokens)
    client.run()
    driver.end_all()
    again = client.open(2, tokens, "a", growth=4 * ROWS)
    assert again.cached_tokens == 19 * ROWS
    assert again.hot is None
    state = driver.node.state
    for i in range(20):
        client.open(10 + i, 12 * ROWS, ("x", i), ticket=ticket(12 * ROWS, f"t{i}"))
        client.step()
        client.run()
        driver.end_all()
    chain = state.groups["d"].chains[0]
    requests = state.engines["e"].requests
    gone = [row for row in requests[2].chains[0].rows if chain.table.copies[0, 0, row] == 0]
    assert gone, "there was pressure"
    assert driver.counters["spill"] > 0
    for number in (1, 2):
        if set(gone) & set(requests[number].chains[0].rows):
            assert len(requests[number].hot) == 2
    driver.leave(client)


def test_another_epochs_readers_keep_a_page_resident():
    driver, client = decode(30)
    tokens = 10 * ROWS
    client.open(1, tokens, "a")
    client.commit(1, tokens)
    client.run()
    driver.end_all()
    newer = Client(driver, "d")
    assert newer.open(1, tokens + 1, "a").cached_tokens == tokens
    newer.open(2, 20 * ROWS, "b", ticket=ticket(20 * ROWS))
    for _ in range(4):
        newer.step()
        newer.run()
        driver.end_all()
    assert driver.counters["spill"] == 0, "the old epoch's kernels may still read these pages"
    client.die()
    driver.leave(newer)


def test_long_decode_inside_its_promise():
    """A decode far longer than HBM: pages are mirrored and released behind it, and growth never fails."""
    driver, client = decode(60, host_pages=90)
    growth = 80 * ROWS
    keys = chain_keys("a", 90)
    assert client.open(1, 4 * ROWS, "a", growth=growth).state == "runnable"
    sent = 4
    for tokens in range(4 * ROWS, 4 * ROWS + growth + 1):
        last = tokens // ROWS
        capacity = min(tokens + 2, 4 * ROWS + growth)
        reply = client.commit(1, tokens, capacity, keys[sent * 16 : last * 16])
        sent = max(sent, last)
        assert not reply.errors
        assert all(grown.error is None for grown in reply.grown), (tokens, reply.grown)
        client.run()
        driver.end_all()
    resident = driver.node.state.engines["e"].requests[1].chains[0].table_from(0).pages["latent"][0]
    assert (resident < 0).sum() > 50
    assert (resident[-2:] >= 0).all()
    driver.leave(client)


def test_a_decode_group_exports_nothing_unless_it_is_told_to():
    driver, client = decode(40)
    client.open(1, 8, "a")
    client.commit(1, 8)
    client.run()
    assert isinstance(driver.apply(ExportRequestKV("e", client.epoch, 1, "t")), InvalidArgument)
    driver.leave(client)


def returning(slabs: int) -> tuple[Driver, Client]:
    groups = [hisparse(Regions({}), "d", slabs, 200, SOURCE_ORDER, 2)]
    driver = Driver(groups, Limits(return_path=True))
    return driver, Client(driver, "d")


def test_a_returned_request_is_read_where_it_lies_and_a_move_is_found():
    """A ticket keeps content, not places: under pressure latents leave HBM, and what was read before is not used."""
    driver, client = returning(40)
    client.open(1, 100, "a")
    client.commit(1, 100)
    client.run()
    driver.end_all()
    growing = driver.apply(ExportRequestKV("e", client.epoch, 1, "g", expected_tokens=104))
    assert isinstance(growing, InvalidArgument)
    assert driver.apply(ExportRequestKV("e", client.epoch, 1, "t")).committed_tokens == 100
    pages = driver.apply(AcceptTicket("t", "h"))
    (table,) = pages.spans
    assert {name: len(device) for name, (device, _) in table.pages.items()} == {"latent": 25, "indexer": 25}
    assert (table.pages["latent"][0] >= 0).all()
    driver.apply(CheckTicket("t", pages.generations))
    other = client.open(2, 60, "b")
    for _ in range(4):
        client.step()
        client.run()
        driver.end_all()
        if other.state == "refused":
            other = client.open(2, 60, "b")
    moved = driver.apply(AcceptTicket("t", "h"))
    device, host = moved.spans[0].pages["latent"]
    assert (device < 0).any(), "some have left HBM"
    assert ((device >= 0) | (host >= 0)).all()
    assert isinstance(driver.apply(CheckTicket("t", pages.generations)), StalePage)
    driver.apply(CheckTicket("t", moved.generations))
    driver.apply(ReleaseTicket("t", "h"))
    driver.leave(client)
