"""Lookup's answer: what any tier holds, and how much of that from the beginning lies in device memory."""

from __future__ import annotations

import pytest

from kvmanager.core.spans import DEVICE, READY
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.services.cacheanswers import _lookup
from tests.sim.driver import Client, Driver, sharded_group

SPAN, SPANS = 512, 5


@pytest.mark.parametrize("absent", [(), (0,), (2,), (2, 3), (4,), range(SPANS)])
def test_device_tokens_end_at_the_first_span_that_lacks_a_copy(absent: tuple[int, ...]) -> None:
    driver = Driver([sharded_group(16, 16)], audited=False)
    client = Client(driver, "p")
    client.open(1, SPANS * SPAN, "text")
    client.commit(1, SPANS * SPAN)
    client.run()
    engine = next(iter(driver.node.state.engines.values()))
    chain = driver.node.state.groups[engine.group].chains[0]
    keys = bytes(engine.requests[1].keys)
    rows = chain.index.match(keys, len(keys) // 16, engine.namespace).rows
    assert len(rows) == SPANS
    assert (chain.table.copies[:, DEVICE, rows] == READY).all()
    for place in absent:
        chain.table.copies[0, DEVICE, rows[place]] = 0
    asked = pb.LookupRequest(epoch=engine.epoch, keys=keys, prompt_tokens=SPANS * SPAN)
    found = _lookup(driver.node, engine.name, asked)
    assert found.cached_tokens == SPANS * SPAN
    assert found.device_tokens == min(absent, default=SPANS) * SPAN
    asked.prompt_tokens = 2 * SPAN + 64
    found = _lookup(driver.node, engine.name, asked)
    assert found.cached_tokens == 2 * SPAN + 64
    assert found.device_tokens == min(min(absent, default=2), 2) * SPAN, "whole spans"
