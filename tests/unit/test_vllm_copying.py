"""The workers' side of the vLLM connector: which copies the engine's thread waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from kvmanager.clients.vllm.copying import Copying
from kvmanager.clients.vllm.orders import Orders, SaveOrder

WAIT_S = 60.0


class Blocks:
    """Notes copies; those of blocks in `held` take until `go_on`."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.held: set[int] = set()
        self.go_on = threading.Event()

    def save(self, _rows: object, _pages: list[int], block_ids: list[int]) -> None:
        if self.held & set(block_ids):
            assert self.go_on.wait(WAIT_S)
        self.saved += block_ids


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
def copying(blocks: Blocks) -> Iterator[Copying]:
    held = SimpleNamespace(layout=SimpleNamespace(page_bytes=4), device=np.zeros(400, np.uint8))
    rank = SimpleNamespace(
        attach_id=7, classes={"page": held}, raise_timeline=lambda _: None, renew=lambda: None, detach=lambda: None,
        close=lambda: None,
    )  # fmt: skip
    made = Copying(blocks, 0, lambda _epoch: rank)  # type: ignore[arg-type, return-value]
    made.follow(Orders(1))
    wait(lambda: made.report() is not None)
    yield made
    blocks.go_on.set()
    made.close()


def wait(done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def step(copying: Copying, orders: Orders) -> None:
    copying.follow(orders)
    copying.save(orders)


def test_a_save_of_a_running_request_is_done_when_the_step_is(copying: Copying, blocks: Blocks) -> None:
    step(copying, Orders(1, saves=[SaveOrder(5, [0, 1], [10, 11])], released=["r"]))
    assert blocks.saved == [10, 11]
    assert copying.released() == {"r"}
    report = copying.report()
    assert report is not None
    assert [(ended.lease_id, ended.ok, ended.copies) for ended in report.ended] == [(5, True, 2)]


def test_blocks_that_are_kept_are_copied_beside_the_engine_and_given_back_behind_it(
    copying: Copying, blocks: Blocks
) -> None:
    blocks.held = {10}
    step(copying, Orders(1, saves=[SaveOrder(5, [0], [10], kept=True), SaveOrder(6, [1], [20])], released=["r"]))
    assert blocks.saved == [20], "the engine goes on"
    step(copying, Orders(1, released=["s"]))
    assert copying.released() == set(), "the block of one of them is still read"
    blocks.go_on.set()
    released: set[str] = set()

    def all_released() -> bool:
        released.update(copying.released())
        return released == {"r", "s"}

    wait(all_released)
    assert blocks.saved == [20, 10]
    report = copying.report()
    assert report is not None
    assert [(ended.lease_id, ended.value) for ended in report.ended] == [(6, 1), (5, 2)]

    def at_once() -> bool:
        step(copying, Orders(1, released=["t"]))
        return copying.released() == {"t"}

    wait(at_once)  # nothing is copied any more
