"""Hybrid, always-host and offload-only: one engine, three configurations, the tokens of the reference each time."""

from functools import cache

import numpy as np
import pytest
import torch

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.reference import ReferenceRun
from kvmanager.clients.glm.weights import Profile, make_weights
from kvmanager.core.audit import audit
from kvmanager.core.events import Trim
from kvmanager.core.spec import (
    ChainSpec,
    GroupSpec,
    Limits,
    PageClass,
    Placement,
    PoolSpec,
    Residency,
    SparseSpec,
)
from kvmanager.geometry import SEQUENTIAL
from kvmanager.layout import indexer_layout, latent_layout
from tests.sim.bytes_driver import BytesDriver
from tests.sim.decoder import Decoder, Decoding
from tests.sim.driver import Client

torch.set_num_threads(1)
ROWS, HOT_ROWS, WANTED = 16, 128, 24
PROMPTS = (90, 70)


@cache
def model() -> Glm:
    return Glm(TINY, make_weights(TINY, 2, Profile.CALM), torch.float64, Fp8Codec())


@cache
def expected(number: int) -> tuple[list[int], list[int]]:
    """A prompt and the reference's answer to it."""
    prompt = np.random.default_rng(number).integers(0, TINY.vocab, PROMPTS[number - 1]).tolist()
    return prompt, ReferenceRun(model()).turn(prompt, WANTED)


def group(residency: Residency, slabs: int, host: int) -> GroupSpec:
    latents, indexers = latent_layout(TINY.format, ROWS), indexer_layout(TINY.format, ROWS)
    classes = (
        PageClass("latent", latents, "d/hbm", (1,), "d/host", (2,)),
        PageClass("indexer", indexers, "d/hbm", (1,), "d/host", (2,)),
    )
    chain = ChainSpec("main", Placement.SHARDED, 1, ROWS, SEQUENTIAL, SEQUENTIAL, classes)
    slab = TINY.format.slab_bytes(ROWS)
    both = (("latent", 1), ("indexer", slab // indexers.page_bytes))
    pools = (
        PoolSpec("d/hbm", "device", 1, slabs, slab, (*both, ("hot", 1))),
        PoolSpec("d/host", "host", 1, host, slab, both),
    )
    sparse = SparseSpec("latent", "hot", HOT_ROWS // ROWS, residency=residency)
    return GroupSpec("d", 1, ROWS, TINY.format, (chain,), pools, sparse)


def decoder(residency: Residency, slabs: int = 34, host: int = 40) -> Decoder:
    driver = BytesDriver([group(residency, slabs, host)], Limits(checksums=1))
    return Decoder(driver, Client(driver, "d"), model(), HOT_ROWS)


def serve(engine: Decoder, requests: list[Decoding]) -> None:
    """Decodes all of them, side by side as far as they are admitted."""
    waiting = list(requests)
    for _ in range(200):
        if waiting and engine.start(waiting[0]):
            waiting.pop(0)
        if not (waiting or engine.running):
            return
        engine.step()
        engine.driver.end_all()
    raise AssertionError("they do not end")


@pytest.mark.parametrize("residency", list(Residency))
def test_hisparse_modes_give_the_tokens_of_the_reference(residency: Residency) -> None:
    engine = decoder(residency, 16 if residency is Residency.OFFLOAD_ONLY else 34)
    requests = [Decoding(number, list(expected(number)[0]), WANTED) for number in (1, 2)]
    serve(engine, requests)
    for request in requests:
        assert request.outputs[:WANTED] == expected(request.request_id)[1]
    counters = engine.driver.counters
    if residency is Residency.OFFLOAD_ONLY:
        assert (counters["spill"], engine.swapped) == (0, 0), "a request fits in HBM or waits"
        assert counters["refusal"] > 0
    else:
        assert counters["spill"] > 0
        assert engine.swapped > 20, "rows that were pushed out were read"
    audit(engine.driver.node.state)
    engine.driver.leave(engine.client)


@pytest.mark.parametrize("residency", list(Residency))
def test_hisparse_retracted_and_resumed_with_the_same_tokens(residency: Residency) -> None:
    """Retracted in the middle of a page; all its device pages are poisoned before it goes on."""
    engine = decoder(residency)
    prompt, answer = expected(1)
    request = Decoding(1, list(prompt), WANTED)
    assert engine.start(request)
    for _ in range(4):
        engine.step()
        engine.driver.end_all()
    assert request.rows % ROWS
    engine.retract(request)
    engine.driver.end_all()
    engine.driver.apply(Trim("d", "d/hbm", 34))
    assert engine.driver.pool("d/hbm").free_slabs == 34, "nothing of it is left in HBM"
    while not request.done:
        if not engine.running:
            assert engine.resume(request)
        engine.step()
        engine.driver.end_all()
    assert request.outputs[:WANTED] == answer
    assert engine.driver.counters["resumption"] == 1
    engine.driver.leave(engine.client)
