"""The published deployments at their true size, through a node's own configuration; regions only account here.

What is expected is computed from the layout's published numbers alone, never by the product.
"""

from dataclasses import replace
from importlib.resources import files

import pytest

from kvmanager.configuration.config import NodeConfig
from kvmanager.configuration.groups import core_limits, plan_memory
from kvmanager.configuration.reading import parse_config
from kvmanager.configuration.sizing import Sizing, size_of
from kvmanager.configuration.sizing import fit as fit_of
from kvmanager.core.audit import audit
from kvmanager.core.events import TicketInfo
from kvmanager.core.pool import PageState
from kvmanager.errors import PoolExhausted
from tests.sim.driver import Client, Driver

GIB = 1 << 30
ROWS = 64
LAYERS, LEADERS = 79, 22
LATENT_PAGE = LAYERS * ROWS * 656
INDEXER_PAGE = LEADERS * ROWS * 132
PAGE = LATENT_PAGE + INDEXER_PAGE
SLAB = 18 * INDEXER_PAGE
LENGTHS = (142_000, 250_000, 1_000_000, 1_048_576)
MODES = ("prefill-dp8", "prefill-tp8", "prefill-pcp8", "prefill-pcp8-dcp8", "decode-offload-only", "decode-hisparse")


def up(a: int, b: int) -> int:
    return (a + b - 1) // b


def config_of(mode: str) -> NodeConfig:
    text = files("kvmanager").joinpath(f"deployments/{mode}.toml").read_text(encoding="utf-8")
    return parse_config(text)


def sizing(mode: str, tokens: int) -> Sizing:
    return size_of(config_of(mode), tokens)


def test_the_layout_is_the_published_one() -> None:
    assert (LATENT_PAGE, INDEXER_PAGE, PAGE, SLAB) == (3_316_736, 185_856, 3_502_592, 3_345_408)
    pools = {line.pool: line for mode in MODES for line in sizing(mode, 1).pools}
    assert pools["prefill0/hbm"].page_bytes == PAGE
    assert pools["decode0/hbm"].page_bytes == SLAB


@pytest.mark.parametrize("mode", MODES)
def test_pools_hold_what_the_facts_say(mode: str) -> None:
    """15 GiB of HBM and 64 GiB of host memory a rank, on 8 ranks."""
    unit = SLAB if mode == "decode-hisparse" else PAGE
    hbm, host = 15 * GIB // unit, 64 * GIB // unit
    assert (hbm, host) == ((4_814, 20_541) if unit == SLAB else (4_598, 19_619))
    lines = sizing(mode, 1).pools
    tokens = {"hbm": 0, "host": 0}
    for line in lines:
        group, kind = line.pool.split("/")
        if "-workspace-" in group:
            assert (mode, line.page_total_bytes, line.unused_bytes) == ("prefill-pcp8-dcp8", 2 * 788 * 1_048_576, 0)
            continue
        replicated_host = mode in ("prefill-tp8", "prefill-pcp8") and kind == "host"
        assert line.pages == {"hbm": hbm, "host": host * (8 if replicated_host else 1)}[kind]
        assert line.page_total_bytes == line.pages * unit
        given = {"hbm": 15 * GIB, "host": 64 * GIB * (8 if replicated_host else 1)}[kind]
        assert line.page_total_bytes + line.unused_bytes == given
        tokens[kind] = max(tokens[kind], line.tokens)
    # Eight shards, eight copies, or eight ranks of their own.
    together = {"prefill-pcp8-dcp8": (8, 8), "prefill-tp8": (1, 8), "prefill-pcp8": (1, 8)}.get(mode, (1, 1))
    assert (tokens["hbm"], tokens["host"]) == (hbm * ROWS * together[0], host * ROWS * together[1])
    if mode == "prefill-pcp8-dcp8":
        assert (tokens["hbm"], tokens["host"]) == (2_354_176, 10_044_928)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("mode", ["prefill-dp8", "prefill-tp8", "prefill-pcp8", "decode-offload-only"])
def test_a_whole_copy_on_one_gpu_ends_near_294k_tokens(mode: str, tokens: int) -> None:
    pages = up(tokens, ROWS)
    for fit in sizing(mode, tokens).fits:
        if tokens <= 294_272:
            assert fit.refusal is None
            assert fit.held == {f"{fit.group}/hbm": (pages, pages * PAGE)}
            continue
        error = fit.refusal
        assert isinstance(error, PoolExhausted)
        assert (error.pool, error.needed, error.free) == (f"{fit.group}/hbm", pages, 4_598)
        assert error.retry_after_ns == 0, "no retry can help"


@pytest.mark.parametrize("mode", ["prefill-dp8", "prefill-tp8", "prefill-pcp8", "decode-offload-only"])
def test_the_longest_request_of_one_gpu(mode: str) -> None:
    assert sizing(mode, 294_272).fits[0].refusal is None
    assert isinstance(sizing(mode, 294_273).fits[0].refusal, PoolExhausted)


@pytest.mark.parametrize(
    ("tokens", "spans", "size"),
    [
        (142_000, 278, 973_720_576),
        (250_000, 489, 1_712_767_488),
        (1_000_000, 1_954, 6_844_064_768),
        (1_048_576, 2_048, 7_173_308_416),
    ],
)
def test_dcp_holds_an_eighth_on_each_gpu(tokens: int, spans: int, size: int) -> None:
    assert (spans, size) == (up(tokens, 8 * ROWS), up(tokens, 8 * ROWS) * PAGE)
    (fits,) = sizing("prefill-pcp8-dcp8", tokens).fits
    assert fits.held == {"prefill/hbm": (spans, size)}
    assert round(7_173_308_416 / GIB, 2) == 6.68


def test_the_longest_request_over_dcp_shards_is_what_the_workspace_holds() -> None:
    """The model has no longer ones; pages alone would hold 2.2 times as many tokens."""
    refusal = sizing("prefill-pcp8-dcp8", 1_048_577).fits[0].refusal
    assert isinstance(refusal, PoolExhausted)
    assert (refusal.pool, refusal.needed, refusal.free) == ("prefill-workspace-0/hbm", 32_769, 32_768)
    config = config_of("prefill-pcp8-dcp8")
    alone, limits = replace(plan_memory(config).groups[0], workspace=None), core_limits(config)
    assert fit_of(alone, 2_354_176, limits).held == {"prefill/hbm": (4_598, 16_104_918_016)}
    assert isinstance(fit_of(alone, 2_354_177, limits).refusal, PoolExhausted)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_hisparse_keeps_the_head_in_hbm_and_the_rest_on_the_host(tokens: int) -> None:
    """Spans of eight pages arrive in the source's order; HBM holds what is left beside indexer, hot buffer and tail."""
    spans = up(tokens, 8 * ROWS)
    latents = 8 * spans
    indexer_slabs, hot_slabs = up(latents, 18), 10_240 // ROWS
    # The tail: a span that is not full, and the last whole one, which is at least two pages.
    tail = 8 if tokens % (8 * ROWS) == 0 else 16
    room = 4_814 - indexer_slabs - hot_slabs - tail
    resident = min(spans - tail // 8, room // 8) * 8 + tail
    for fit in sizing("decode-hisparse", tokens).fits:
        hbm, host = f"{fit.group}/hbm", f"{fit.group}/host"
        # A hot buffer is promised also where nothing has to be read from the host yet.
        assert fit.held[hbm] == (resident + indexer_slabs + hot_slabs, (resident + indexer_slabs + hot_slabs) * SLAB)
        assert fit.held[host] == (latents, latents * SLAB)
    if tokens == 1_048_576:
        assert (latents, indexer_slabs) == (16_384, 911)
        assert round(indexer_slabs * SLAB / GIB, 2) == 2.84
        assert latents + indexer_slabs == 17_295, "what a retraction of all of it to the host would take"
        assert round(17_295 * SLAB / GIB, 2) == 53.89


def test_what_lies_beside_the_pages() -> None:
    (dcp,) = sizing("prefill-pcp8-dcp8", 1_048_576).beside
    assert dcp.workspace_bytes == 2 * 788 * 1_048_576, "a layer, and the next one on its way"
    assert round(dcp.workspace_bytes / GIB, 2) == 1.54
    assert dcp.context_bytes > 0
    decode = sizing("decode-hisparse", 1).beside
    assert len(decode) == 8
    assert {(rank.workspace_bytes, rank.staging_bytes, rank.hot_buffer_bytes) for rank in decode} == {
        (0, 256 << 20, 160 * SLAB)
    }
    assert round(10_240 * LAYERS * 656 / 2**20) == 506, "rows alone; slabs take 0.9% more"


def arrives(driver: Driver, decoder: Client, number: int) -> bool:
    """A request of 142K tokens comes by hand-off; a refused one asks again while others let go of HBM."""
    for attempt in range(4):
        ticket = TicketInfo(f"{decoder.name}/{number}/{attempt}", "peer", 142_000, 1)
        opened = decoder.open(number, 142_000, (decoder.name, number), ticket=ticket)
        decoder.step()
        decoder.run()
        driver.end_all()
        decoder.seen = decoder.seen + len(driver.notices)
        driver.notices.clear()
        if opened.state == "waiting":
            return True
    assert isinstance(opened.error, PoolExhausted)
    assert opened.error.pool == f"{decoder.name}/hbm"
    return False


def test_sixteen_gpus_and_both_nodes_host_memory_full_of_work() -> None:
    """The prefill node and the decode node in one core: c64 at 142K tokens, ten million tokens offloaded."""
    specs = [spec for mode in ("prefill-pcp8-dcp8", "decode-hisparse") for spec in plan_memory(config_of(mode)).groups]
    assert sum(pool.slabs * pool.slab_bytes * pool.ranks for spec in specs for pool in spec.pools) > 1_240 * GIB
    driver = Driver(specs, core_limits(config_of("prefill-pcp8-dcp8")), audited=False)
    prefill = Client(driver, "prefill", "prefill")
    for number in range(70):
        assert prefill.serve(number, 142_000, number).state == "runnable"
    assert driver.pages("prefill/host", PageState.READY) == 70 * 278, "each tail as far as it is full"
    running = [prefill.open(100 + number, 142_000, ("new", number)).state for number in range(17)]
    assert running == ["runnable"] * 16 + ["refused"], "16 x 278 of 4,598 page indexes"
    decoders = [Client(driver, f"decode{rank}", f"decode{rank}") for rank in range(8)]
    for decoder in decoders:
        # 2,224 latent pages each: the host's 20,541 slabs hold nine, and HBM what the host lacks for the tenth. That is
        # 1,699 pages, beside 124 slabs of indexer pages, 160 of a hot buffer and a tail of 16 for each of the ten.
        assert 20_541 + 4_814 - 10 * (124 + 160 + 16) >= 10 * 2_224
        assert [arrives(driver, decoder, number) for number in range(11)] == [True] * 10 + [False]
    driver.end_all()
    audit(driver.node.state)
    driver.leave(prefill, *decoders)
    audit(driver.node.state)
