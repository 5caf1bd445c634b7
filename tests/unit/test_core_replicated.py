"""A group whose ranks all hold all tokens: the host holds them once, and every rank reads them back."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvmanager.core.events import Close, Closing, Open, Progress, TicketInfo, Trim
from kvmanager.core.patterns import Rows
from kvmanager.core.plans import Purpose
from kvmanager.core.pool import PageState
from kvmanager.layout import native_layout
from tests.sim.content import PAGE_ROWS, POISON, Memory, Text
from tests.sim.driver import Client, Driver
from tests.sim.harness import World
from tests.sim.network import Network
from tests.sim.published import learn
from tests.sim.worlds import FORMAT, LIMITS, Regions, replicated

PAGES = 24
"""Pages of the text: every share of 1, 2, 4 or 8 ranks gets some."""
POOL_PAGES = 40
NAMESPACE = b"ns"
PAGE_BYTES = native_layout(FORMAT, PAGE_ROWS).page_bytes


class _Node:
    """One replicated engine over real bytes."""

    def __init__(self, ranks: int) -> None:
        regions = Regions({})
        self.spec = replicated(regions, "r", POOL_PAGES, POOL_PAGES, ranks)
        self.memory = Memory(regions.sizes)
        network = Network(random.Random(ranks), self.memory)
        self.world = World(0, [self.spec], LIMITS, network)
        self.client = Client(self.world, "r", namespace=NAMESPACE)
        self.text = Text()
        self.text.extend(PAGES * PAGE_ROWS, random.Random(7))
        learn(self.text.digests)

    @property
    def kv(self):
        return self.spec.chains[0].classes[0]

    def page(self, region: int, page: int) -> np.ndarray:
        """The bytes of one page of a region."""
        return self.memory.regions[region][page * PAGE_BYTES : (page + 1) * PAGE_BYTES].copy()

    def device_pages(self, spans: tuple) -> list[int]:
        return np.concatenate([run.pages["kv"][0] for run in spans]).tolist()

    def compute(self, pages: list[int]) -> None:
        """Every rank writes every token."""
        for rows, content in self.rows(pages):
            self.memory.fill(self.kv.layout, rows, content)

    def rows(self, pages: list[int]) -> Iterator[tuple[Rows, np.ndarray]]:
        """For each rank: where the tokens of the text's first pages belong, and what they are."""
        position = np.arange(len(pages) * PAGE_ROWS)
        page, slot = np.asarray(pages)[position // PAGE_ROWS], position % PAGE_ROWS
        for region in self.kv.device_regions:
            yield Rows(np.full(len(position), region, np.int32), page, slot), self.text.content(position, NAMESPACE[0])

    def serve(self) -> None:
        """The text is computed, published, and on the host."""
        opened = self.open(1)
        assert opened.state == "runnable"
        self.compute(self.device_pages(opened.spans))
        tokens = PAGES * PAGE_ROWS
        self.client.step(progress=(Progress(1, tokens, tokens),), closes=(Close(1, Closing.FINISHED),))
        self.client.run()

    def open(self, request_id: int):
        tokens = PAGES * PAGE_ROWS
        return self.client.step(opens=(Open(request_id, tokens, 1, self.text.keys(0, PAGES)),)).opened[0]

    def end_plans(self) -> list:
        """All copies are done; the plans."""
        done = []
        while self.world.flights:
            plan_id = min(self.world.flights)
            done.append(self.world.flights[plan_id].plan)
            self.world.end_plan(plan_id)
        return done


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_host_holds_a_token_once_however_many_ranks_there_are(ranks: int) -> None:
    node = _Node(ranks)
    node.serve()
    written = node.end_plans()
    assert {plan.purpose for plan in written} == {Purpose.OFFLOAD}
    assert sum(plan.total_bytes for plan in written) == PAGES * PAGE_BYTES
    host = node.world.node.state.groups["r"].pools["r/host"]
    assert host.account()[PageState.READY] == PAGES * PAGE_BYTES
    assert host.capacity_bytes == POOL_PAGES * PAGE_BYTES
    assert sum(node.memory.sizes[region] for region in node.kv.host_regions) == POOL_PAGES * PAGE_BYTES


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_page_i_lies_in_share_i_mod_n_and_every_rank_wrote_its_own(ranks: int) -> None:
    node = _Node(ranks)
    node.serve()
    table = node.world.node.state.groups["r"].chains[0].table
    source_of = {}
    for plan in node.end_plans():
        for copies in plan.copies:
            source_of.setdefault(copies.target_region, set()).add(copies.source_region)
    for share, region in enumerate(node.kv.host_regions):
        assert source_of[region] == {node.kv.device_regions[share]}, "each rank writes its own share"
    rows = table.rows()
    assert len(rows) == PAGES
    for row in rows.tolist():
        device, host = int(table.pages[0, 0, row, 0]), int(table.pages[0, 1, row, 0])
        held = node.page(node.kv.host_regions[host % ranks], host // ranks)
        assert np.array_equal(held, node.page(node.kv.device_regions[0], device))
    node.world.published.check()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_after_an_onboard_every_rank_has_the_right_bytes(ranks: int) -> None:
    node = _Node(ranks)
    node.serve()
    node.end_plans()
    node.world.apply(Trim("r", "r/hbm", POOL_PAGES))
    hbm = node.world.node.state.groups["r"].pools["r/hbm"]
    assert hbm.free_slabs == POOL_PAGES, "every device copy had a host copy and left"
    for region in node.kv.device_regions:
        assert (node.memory.regions[region] == POISON).all(), "nothing is left that an onboard could rely on"
    waiting = node.open(2)
    assert waiting.state == "waiting"
    assert waiting.cached_tokens == (PAGES - 1) * PAGE_ROWS
    loaded = node.end_plans()
    assert sum(plan.total_bytes for plan in loaded) == ranks * (PAGES - 1) * PAGE_BYTES
    (ready,) = [n.notice.ready for n in node.world.inbox[("e", node.client.epoch)]]
    assert ready.state == "runnable"
    pages = node.device_pages(ready.spans)[: PAGES - 1]
    for rows, content in node.rows(pages):
        assert not node.memory.wrong(node.kv.layout, rows, content).any(), f"region {rows.region[0]}"


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_hand_off_brings_its_bytes_to_every_rank(ranks: int) -> None:
    regions = Regions({})
    spec = replicated(regions, "r", POOL_PAGES, POOL_PAGES, ranks)
    driver = Driver([spec])
    client = Client(driver, "r")
    tokens = PAGES * PAGE_ROWS
    assert client.open(1, tokens, "a", ticket=TicketInfo("t", "peer", tokens, 1_000_000)).state == "waiting"
    (pull,) = driver.pulls.values()
    reached = [region for target in pull.chains[0].targets for spans in target.spans for region in spans.regions]
    assert reached == list(spec.chains[0].classes[0].device_regions)
    assert len({spans.pages.tobytes() for target in pull.chains[0].targets for spans in target.spans}) == 1
    assert {spans.tokens(PAGE_ROWS) for target in pull.chains[0].targets for spans in target.spans} == {tokens}
    driver.end_all()
    assert driver.notices[-1].ready.cached_tokens == tokens
    client.close(1)
    driver.leave(client)
