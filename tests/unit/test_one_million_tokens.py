"""A request that grows to the model's maximum on a decode rank, is retracted and resumed: true counts, virtual time.

The published configuration only accounts; the same page counts with pages of a few bytes are checked byte by byte.
"""

from dataclasses import replace

import pytest

from kvmanager.configuration.groups import core_limits, plan_memory
from kvmanager.core.audit import audit
from kvmanager.core.events import Trim
from kvmanager.core.pool import PageState
from kvmanager.core.spec import ChainSpec, GroupSpec, Limits, PageClass, Placement, PoolSpec, SparseSpec
from kvmanager.errors import PoolExhausted
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import KVFormat, indexer_layout, latent_layout
from tests.sim.bytes_driver import BytesDriver
from tests.sim.driver import Client, Driver
from tests.sim.million import MOST_PAGES, PROMPT_PAGES, Million
from tests.unit.test_true_size import config_of

HBM_SLABS, HOST_SLABS, PER_SLAB, HOT_SLABS = 4_814, 20_541, 18, 160
SMALL = KVFormat("small", (tuple(range(9)),), latent_row_bytes=8, index_value_bytes=2, index_scale_bytes=2)
ROWS = 4
LIMITS = Limits(checksums=0)


def small_group() -> GroupSpec:
    """The deployment's rank with its numbers of slabs, of 288 bytes."""
    latents, indexers = latent_layout(SMALL, ROWS), indexer_layout(SMALL, ROWS)
    assert latents.page_bytes == PER_SLAB * indexers.page_bytes
    classes = (
        PageClass("latent", latents, "d/hbm", (1,), "d/host", (2,)),
        PageClass("indexer", indexers, "d/hbm", (1,), "d/host", (2,)),
    )
    chain = ChainSpec("main", Placement.SHARDED, 1, ROWS, SEQUENTIAL, TokenOrder(8, 1), classes)
    both = (("latent", 1), ("indexer", PER_SLAB))
    pools = (
        PoolSpec("d/hbm", "device", 1, HBM_SLABS, latents.page_bytes, (*both, ("hot", 1))),
        PoolSpec("d/host", "host", 1, HOST_SLABS, latents.page_bytes, both),
    )
    return GroupSpec("d", 1, ROWS, SMALL, (chain,), pools, SparseSpec("latent", "hot", HOT_SLABS))


def published(split: str) -> GroupSpec:
    """The first rank of the published decode node."""
    config = config_of("decode-hisparse")
    section = config.groups[0]
    if split == "strict":
        section = replace(section, host_split="strict", offload_bytes_per_rank=16 << 30)
    return plan_memory(replace(config, groups=(section,))).groups[0]


def million(spec: GroupSpec, driver: Driver) -> Million:
    return Million(driver, Client(driver, spec.name))


def test_grows_to_the_maximum_is_retracted_whole_and_resumed_with_every_byte() -> None:
    """All 16,384 pages are read after each change: some seconds, for nothing less shows that no row is lost."""
    spec = small_group()
    driver = BytesDriver([spec], LIMITS, audited=False)
    request = million(spec, driver)
    ready = request.arrive()
    assert ready.whole_lacks_slabs == 0
    request.check()
    assert (request.device["latent"] < 0).sum() > 11_000, "HBM holds less than a third"
    while request.tokens < MOST_PAGES * ROWS:
        request.step(16)
    assert len(request.device["latent"]) == MOST_PAGES
    request.check()
    audit(driver.node.state)
    assert not request.retract().errors
    host = driver.pool("d/host")
    indexers = -(-MOST_PAGES // PER_SLAB)
    assert host.slabs - host.free_slabs == MOST_PAGES + indexers == 17_295
    driver.apply(Trim("d", "d/hbm", HBM_SLABS))
    assert driver.pool("d/hbm").free_slabs == HBM_SLABS, "all of HBM is given back, and poisoned here"
    other = request.client.open(2, 4_000 * ROWS, "other")
    assert other.state == "runnable", "somebody else has HBM meanwhile"
    request.client.close(2)
    request.client.run()
    audit(driver.node.state)
    request.resume()
    request.check()
    assert (request.device["latent"][-2:] >= 0).all()
    assert (request.device["indexer"] >= 0).all()
    request.client.close(1)
    request.client.run()
    driver.leave(request.client)
    audit(driver.node.state)


@pytest.mark.parametrize("split", ["soft", "strict"])
def test_the_published_rank_at_its_true_size(split: str) -> None:
    """1,040,000 tokens grow to 1,048,576; a strict split says at admission that it can't be retracted whole."""
    spec = published(split)
    assert sum(p.slabs for p in spec.pools if p.tier == "host") == HOST_SLABS
    driver = Driver([spec], core_limits(config_of("decode-hisparse")), audited=False)
    request = million(spec, driver)
    ready = request.arrive()
    assert PROMPT_PAGES * request.rows == 1_040_000
    while request.tokens < 1_048_576:
        request.step(4)
    request.check()
    reply = request.retract()
    if split == "soft":
        assert ready.whole_lacks_slabs == 0
        assert not reply.errors
        driver.apply(Trim(spec.name, f"{spec.name}/hbm", HBM_SLABS))
        assert driver.pool(f"{spec.name}/hbm").free_slabs == HBM_SLABS
        request.resume()
        request.check()
    else:
        assert ready.whole_lacks_slabs == MOST_PAGES - 15_406
        (failed,) = reply.errors
        assert isinstance(failed.error, PoolExhausted)
        assert failed.error.pool == f"{spec.name}/host"
        resident = int((request.device["latent"] >= 0).sum())
        assert resident >= MOST_PAGES - 15_406, "what the host lacks stays in HBM"
        request.check()
        assert driver.pages(f"{spec.name}/offload", PageState.READY) == MOST_PAGES
    audit(driver.node.state)
    driver.leave(request.client)
