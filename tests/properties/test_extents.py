"""Two models in one host region, against a model of its bytes: no two pools use one at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvmanager.core.events import CopyOutcome, MoverGone, MoverJoined, Tick
from kvmanager.core.operatorevents import Reset
from kvmanager.core.pool import PageState
from kvmanager.core.spans import HOST
from kvmanager.core.spec import Limits
from kvmanager.layout import GLM53, GLM53_TINY
from tests.sim.driver import Client, Driver, sharded_group
from tests.sim.worlds import Regions, sharing

RANKS, ROWS = 2, 16
SPAN = RANKS * ROWS
NAMES = ("large", "small")
EXTENT = 3 * GLM53.page_bytes(ROWS) + 4096
FREE, BUSY = int(PageState.FREE), (PageState.RESERVED, PageState.FILLING, PageState.DRAINING, PageState.QUARANTINED)


class ExtentsMachine(RuleBasedStateMachine):
    """Each byte of the region on rank 0 has a model owner: the extent's; each used page must lie in one."""

    @initialize(
        extents=st.integers(1, 5), floors=st.tuples(*[st.integers(0, 1)] * 2), room=st.tuples(*[st.integers(0, 4)] * 2)
    )
    def start(self, extents: int, floors: tuple[int, int], room: tuple[int, int]) -> None:
        floors = floors if sum(floors) <= extents else (0, 0)
        self.limits = [(floor, max(1, min(extents, floor + more))) for floor, more in zip(floors, room, strict=True)]
        groups = [
            sharded_group(6, 1, ranks=RANKS, page_rows=ROWS, name="large"),
            sharded_group(24, 1, ranks=RANKS, page_rows=ROWS, name="small", kv_format=GLM53_TINY),
        ]
        specs = sharing(Regions({1: 0}), groups, extents, EXTENT, self.limits)
        self.driver = Driver(specs, Limits(batch_spans=3, plans_in_flight=2, claim_hold_ns=1))
        self.region = self.driver.node.state.regions["ram"]
        self.clients = {name: Client(self.driver, name, name) for name in NAMES}
        self.open: dict[str, list[int]] = {name: [] for name in NAMES}
        self.next_id = 1

    def page_bytes(self, name: str) -> int:
        (page_class,) = self.driver.node.state.groups[name].chains[0].spec.classes
        return page_class.page_bytes

    @rule(name=st.sampled_from(NAMES), what=st.integers(0, 5), spans=st.integers(1, 12))
    def serve(self, name: str, what: int, spans: int) -> None:
        client, request = self.clients[name], self.next_id
        self.next_id += 1
        if client.open(request, spans * SPAN, what).state == "runnable":
            client.commit(request, spans * SPAN)
            client.run()
            self.open[name].append(request)

    @rule(name=st.sampled_from(NAMES))
    def close(self, name: str) -> None:
        if self.open[name]:
            self.clients[name].close(self.open[name].pop(0))
            self.clients[name].run()

    @rule(outcome=st.sampled_from([CopyOutcome.DONE] * 4 + list(CopyOutcome)), first=st.booleans())
    def plan_ends(self, outcome: CopyOutcome, first: bool) -> None:
        if self.driver.plans:
            self.driver.end(min(self.driver.plans) if first else max(self.driver.plans), outcome)

    @rule()
    def mover_dies(self) -> None:
        self.driver.plans.clear()
        self.driver.apply(MoverGone())
        self.driver.apply(MoverJoined(self.next_id))

    @rule()
    def time_passes(self) -> None:
        self.driver.apply(Tick(), passes=1_000_000)

    @rule(name=st.sampled_from(NAMES))
    def reset(self, name: str) -> None:
        self.driver.apply(Reset(name))

    @invariant()
    def no_byte_is_used_twice_or_outside_its_owner(self) -> None:
        owner_of = np.repeat(self.region.owner, EXTENT)
        used = np.zeros(len(owner_of), bool)
        for number, name in enumerate(NAMES):
            pool, size = self.driver.pool(f"{name}/host"), self.page_bytes(name)
            for page in np.flatnonzero(pool.spaces["kv"].state != FREE).tolist():
                place = slice(page * size, (page + 1) * size)
                assert (owner_of[place] == number).all(), f"page {page} of {name} lies in another's extent"
                assert not used[place].any(), f"page {page} of {name} lies on a used one"
                used[place] = True
            whole = sum(
                self.region.owner[e] == number and (e + 1) * EXTENT // size - -(-e * EXTENT // size)
                for e in range(self.region.extents)
            )
            assert pool.slabs == whole, "every whole page of its extents is the pool's"

    @invariant()
    def limits_hold(self) -> None:
        counts = np.bincount(self.region.owner[self.region.owner >= 0], minlength=2).tolist()
        for count, (floor, ceiling) in zip(counts, self.limits, strict=True):
            assert floor <= count <= ceiling

    @invariant()
    def what_is_in_use_is_its_owners_and_every_byte_is_accounted_for(self) -> None:
        account = self.region.account({p.name: p for p in (self.driver.pool(f"{name}/host") for name in NAMES)})
        assert account.total_bytes == self.region.extents * EXTENT * RANKS
        for number, name in enumerate(NAMES):
            space, size = self.driver.pool(f"{name}/host").spaces["kv"], self.page_bytes(name)
            table = self.driver.node.state.groups[name].chains[0].table
            rows = np.flatnonzero(table.live & (table.busy > 0))
            busy = set(np.flatnonzero(np.isin(space.state, BUSY)).tolist())
            busy |= {page for row in rows.tolist() for page in table.page_list(0, HOST, row).tolist()}
            for page in busy:
                assert self.region.owner[page * size // EXTENT] == number

    def teardown(self) -> None:
        self.driver.end_all()
        self.driver.apply(MoverGone())
        self.driver.leave(*self.clients.values())


TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
