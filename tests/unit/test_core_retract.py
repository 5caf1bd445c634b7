"""Joint cover of latent and indexer pages, retraction and resumption, step by step."""

import itertools

import numpy as np
import pytest

from kvmanager.core.events import Close, Closing, CopyOutcome, Open, Progress, Trim
from kvmanager.core.pool import PageState
from kvmanager.core.spec import Limits, Residency
from kvmanager.errors import InvalidArgument, PoolExhausted
from kvmanager.geometry import SEQUENTIAL
from tests.sim.driver import Client, Driver, chain_keys
from tests.sim.worlds import Regions, hisparse, sharded

ROWS, TOKENS = 4, 42
LIMITS = Limits()


def decode(
    slabs: int = 40, host: int = 60, limits: Limits = LIMITS, **kind: object
) -> tuple[Driver, Client]:
    driver = Driver([hisparse(Regions({}), "d", slabs, host, SEQUENTIAL, **kind)], limits)
    return driver, Client(driver, "d")


def running(client: Client) -> None:
    client.open(1, TOKENS, "a", growth=8)
    client.commit(1, TOKENS)
    client.run()


def resumed(client: Client, tokens: int = TOKENS, what: object = "a"):
    wanted = Open(1, tokens, 8, chain_keys(what, tokens // ROWS), str(what))
    return client.step(opens=(wanted,)).opened[0]


@pytest.mark.parametrize("offload", [0, 8])
def test_hisparse_prefix_left_hbm_with_its_indexers_and_comes_back(offload: int) -> None:
    driver, client = decode(offload=offload)
    client.serve(1, TOKENS, "a")
    driver.apply(Trim("d", "d/hbm", 40))
    assert driver.pool("d/hbm").free_slabs == 40
    opened = client.open(2, TOKENS + 2, "a")
    assert (opened.state, opened.cached_tokens) == ("waiting", 40)
    (plan,) = driver.plans.values()
    indexer = client.spec.chains[0].classes[1]
    assert {(c.source_region, c.target_region) for c in plan.pieces()} == {
        (indexer.host_regions[0], indexer.device_regions[0])
    }, "latents are read where they lie"
    driver.end_all()
    ready = driver.notices[-1].ready
    pages = ready.spans[0].pages
    assert (pages["indexer"][0] >= 0).all()
    assert (pages["latent"][0][:10] < 0).all()
    assert (pages["latent"][1][:10] >= 0).all()
    assert ready.hot is not None
    driver.leave(client)


@pytest.mark.parametrize("pool", ["d/host", "d/offload"])
def test_hisparse_both_parts_of_a_prefix_go_together(pool: str) -> None:
    driver, client = decode(offload=8)
    client.serve(1, TOKENS, "a")
    driver.apply(Trim("d", "d/hbm", 40))
    driver.apply(Trim("d", pool, 60))
    assert [driver.pages(name, PageState.READY) for name in ("d/host", "d/offload")] == [0, 0]
    assert client.open(2, TOKENS, "a").cached_tokens == 0
    driver.leave(client)


def test_hisparse_slots_of_a_retracted_request_return_after_its_rows_are_on_the_host() -> None:
    driver, client = decode()
    running(client)
    client.close(1, Closing.RETRACTED)
    client.run()
    state = driver.node.state.groups["d"].chains[0].table
    held = state.rows()
    for plan in list(driver.plans):
        driver.apply(Trim("d", "d/hbm", 40))
        device, host = state.copies[:, 0, held], state.copies[:, 1, held]
        assert ((device != 0) | (host == 2)).all(), "some rows are nowhere"
        driver.end(plan)
    driver.end_all()
    driver.apply(Trim("d", "d/hbm", 40))
    assert driver.pool("d/hbm").free_slabs == 40
    driver.apply(Trim("d", "d/host", 60))
    assert (state.copies[:, 1, held] == 2).all(), "its host copies are its own"
    assert resumed(client).state == "waiting"
    driver.end_all()
    ready = driver.notices[-1].ready
    device, host = ready.spans[0].pages["latent"]
    assert (ready.cached_tokens, len(device)) == (TOKENS, 11)
    assert (device[-3:] >= 0).all(), "the unsealed page and the last two"
    assert ((device >= 0) | (host >= 0)).all()
    assert (state.copies[:, 1, held[-1]] == 0).all(), "what is written again has no host copy"
    client.commit(1, TOKENS + 4, TOKENS + 6)
    client.run()
    driver.end_all()
    driver.leave(client)


@pytest.mark.parametrize("outcome", [CopyOutcome.FAILED, CopyOutcome.UNKNOWN_FATE])
def test_hisparse_a_copy_that_fails_is_made_again_before_the_slots_return(outcome: CopyOutcome) -> None:
    driver, client = decode()
    running(client)
    client.close(1, Closing.RETRACTED)
    client.run()
    for plan in list(driver.plans):
        driver.end(plan, outcome)
    table = driver.node.state.groups["d"].chains[0].table
    driver.apply(Trim("d", "d/hbm", 40))
    assert driver.pool("d/hbm").free_slabs < 40
    driver.end_all()
    driver.apply(Trim("d", "d/hbm", 40))
    assert driver.pool("d/hbm").free_slabs == 40
    assert (table.copies[:, 1, table.rows()] == 2).all()
    driver.leave(client)


def test_hisparse_what_can_not_be_retracted_goes_on() -> None:
    driver, client = decode(host=10)
    opened = client.open(1, TOKENS, "a", growth=8)
    assert opened.whole_lacks_slabs == 13 + 7 - 10, "latent pages and slabs of two indexer pages"
    client.commit(1, TOKENS)
    client.run()
    (failed,) = client.close(1, Closing.RETRACTED).errors
    assert isinstance(failed.error, PoolExhausted)
    client.run()
    assert not client.commit(1, TOKENS + 1, TOKENS + 2).errors
    driver.leave(client)


@pytest.mark.parametrize("host", [10, 60])
def test_hisparse_only_who_could_not_be_retracted_grows_in_the_same_message(host: int) -> None:
    driver, client = decode(host=host)
    running(client)
    more = (Progress(1, TOKENS + 8, TOKENS),)
    reply = client.step(more, closes=(Close(1, Closing.RETRACTED),))
    assert [e.request_id for e in reply.errors] == [1][: host == 10]
    assert [(grown.request_id, grown.error) for grown in reply.grown] == [(1, None)][: host == 10]
    client.run()
    driver.end_all()
    driver.leave(client)


def test_hisparse_a_resume_without_room_for_its_hot_buffer_may_be_asked_for_again() -> None:
    """With more promised than there is, the hot buffer is among what must be there at once."""
    driver, client = decode(slabs=33, limits=Limits(overcommit=1.5))
    running(client)
    client.close(1, Closing.RETRACTED)
    client.run()
    driver.end_all()
    assert client.open(2, TOKENS, "b", growth=8).state == "runnable"
    client.commit(2, TOKENS)
    client.run()
    driver.end_all()
    assert isinstance(resumed(client).error, PoolExhausted)
    assert isinstance(resumed(client).error, PoolExhausted), "what was refused is as it was"
    client.close(2)
    client.run()
    driver.end_all()
    driver.apply(Trim("d", "d/hbm", 40))
    assert resumed(client).state == "waiting"
    driver.end_all()
    driver.leave(client)


def test_hisparse_an_open_whose_hot_buffer_takes_the_room_of_what_it_found_is_refused() -> None:
    """With more promised than there is, the hot buffer is not asked for with the pages that must be there at once.

    How much a trim takes of which class depends on where pages lie, so all rooms about the one in question are tried.
    """
    refused = 0
    for slabs, trim in itertools.product(range(19, 23), range(3, 10)):
        driver, client = decode(slabs=slabs, limits=Limits(overcommit=1.5))
        client.serve(1, TOKENS, "a")
        assert client.open(2, 24, "b").state == "runnable"
        client.commit(2, 24)
        client.run()
        driver.end_all()
        driver.apply(Trim("d", "d/hbm", trim))
        opened = client.open(3, TOKENS + 2, "a")
        if opened.error is not None:
            assert isinstance(opened.error, PoolExhausted), (slabs, trim)
            assert list(driver.node.state.engines["e"].requests) == [2]
            refused += 1
        driver.end_all()
        driver.leave(client)
    assert 0 < refused < 28


def test_hisparse_who_finds_what_a_resumed_request_is_brought_back_waits_for_it() -> None:
    """Its latent pages could be read on the host, but what is being filled on the device is told as being there."""
    driver, client = decode()
    running(client)
    client.close(1, Closing.RETRACTED)
    client.run()
    driver.end_all()
    driver.apply(Trim("d", "d/hbm", 40))
    assert resumed(client).state == "waiting"
    table = driver.node.state.groups["d"].chains[0].table
    latents = {
        row for job in driver.node.state.jobs.values() for row in job.rows if job.page_class == 0 and table.pins[row]
    }
    assert latents
    for plan in [plan for plan, job in driver.node.state.jobs.items() if job.page_class != 0]:
        driver.end(plan)
    other = client.open(2, TOKENS, "a")
    assert other.cached_tokens > 0
    assert latents & set(driver.node.state.engines["e"].requests[2].chains[0].rows.array.tolist())
    assert other.state == "waiting"
    driver.end_all()
    ready = [notice.ready for notice in driver.notices if notice.ready is not None]
    assert sorted(opened.request_id for opened in ready) == [1, 2]
    driver.leave(client)


def test_hisparse_a_resume_names_what_was_retracted() -> None:
    driver, client = decode()
    running(client)
    client.close(1, Closing.RETRACTED)
    early = resumed(client)
    assert isinstance(early.error, PoolExhausted)
    assert early.error.retry_after_ns > 0
    client.run()
    driver.end_all()
    assert isinstance(resumed(client, TOKENS + 1).error, InvalidArgument)
    assert isinstance(resumed(client, what="b").error, InvalidArgument)
    assert resumed(client).state == "runnable", "nobody took its pages"
    table = driver.node.state.groups["d"].chains[0].table
    assert (table.copies[:, 1, table.rows()[-1]] == 0).all(), "what is written again has no host copy"
    driver.leave(client)


def test_hisparse_a_retracted_request_can_be_closed_and_its_engine_may_die() -> None:
    driver, client = decode()
    running(client)
    client.close(1, Closing.RETRACTED)
    client.run()
    driver.end_all()
    client.close(1)
    client.run()
    assert client.open(2, TOKENS, "a").cached_tokens == 40, "its prefix stays in the cache"
    client.close(2, Closing.RETRACTED)
    client.run()
    driver.leave(client)


def test_only_a_decode_rank_retracts() -> None:
    driver = Driver([sharded(Regions({}), "p", 10, 10)])
    client = Client(driver, "p")
    client.open(1, 40, "a")
    (failed,) = client.step(closes=(Close(1, Closing.RETRACTED),)).errors
    assert isinstance(failed.error, InvalidArgument)
    driver.leave(client)


def test_hisparse_offload_only_never_leaves_hbm_while_it_runs() -> None:
    driver, client = decode(slabs=20, residency=Residency.OFFLOAD_ONLY)
    assert client.open(1, TOKENS, "a").state == "runnable"
    refused = client.open(2, TOKENS, "b")
    assert refused.error.pool == "d/hbm"
    client.commit(1, TOKENS)
    client.run()
    driver.end_all()
    assert driver.counters["spill"] == 0
    client.close(1)
    client.run()
    driver.end_all()
    assert client.open(2, TOKENS, "b").state == "runnable", "the prefix is on the host"
    client.close(2)
    client.run()
    driver.end_all()
    again = client.open(3, TOKENS, "a")
    assert (again.state, again.cached_tokens) == ("waiting", 40)
    driver.end_all()
    assert (driver.notices[-1].ready.spans[0].pages["latent"][0] >= 0).all()
    driver.leave(client)


def test_hisparse_always_host_releases_what_is_sealed_and_mirrored() -> None:
    driver, client = decode(residency=Residency.ALWAYS_HOST)
    running(client)
    driver.end_all()
    (rows,) = client.step().residency
    assert rows.ordinals.tolist() == list(range(8)), "the unsealed page and the last two stay"
    assert (rows.device == -1).all()
    assert np.unique(rows.host).size == 8
    driver.leave(client)
