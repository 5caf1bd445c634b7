"""Bounce regions: two trust domains share one pool that neither maps, with real bytes in a simulated memory."""

from __future__ import annotations

import random
import secrets

import numpy as np
import pytest

from kvmanager.configuration.groups import plan_memory
from kvmanager.configuration.reading import parse_config
from kvmanager.core.events import CopyOutcome, Opened
from kvmanager.core.leaseevents import AcquirePrefix, EndLease, ReserveSpans
from kvmanager.core.spec import GroupSpec
from kvmanager.errors import CapacityError, ConfigError, KVError
from kvmanager.layout import plain_format, plain_layout
from kvmanager.services.worker_service import _layouts
from kvmanager.wire import RegionKind
from tests.sim.bytes_driver import BytesDriver
from tests.sim.driver import Client, Driver, chain_keys, pages_of

ROWS = 4
FORMAT = plain_format("float32", 1, 1, 8)
PAGE_BYTES = plain_layout(FORMAT, ROWS).page_bytes
BOUNCE_PAGES, POOL_PAGES = 5, 24
DOMAINS = ("ours", "theirs")


def toml(ranks: int = 2, more: str = "", bounce: str = f"bounce_bytes_per_rank = {BOUNCE_PAGES * PAGE_BYTES}") -> str:
    groups = "".join(
        f"""
[[group]]
name = "{name}"
kind = "cache"
format = "{FORMAT.name}"
ranks = {ranks}
page_rows = {ROWS}
host_bytes_per_rank = {POOL_PAGES // 2 * PAGE_BYTES}
host_region = "ram"
host_extent_bytes = {4 * PAGE_BYTES}
trust = "{name}"
{bounce}
{more}
[[tenant]]
name = "{name}"
uids = [{number}]
trust = "{name}"
"""
        for number, name in enumerate(DOMAINS)
    )
    mover = '[mover]\nstaging_bytes = "1 MiB"\nchunk_bytes = "1 MiB"\n'
    return f'[node]\nname = "n"\nruntime_dir = "/tmp/n"\n{mover}{groups}'


def groups(ranks: int = 2) -> list[GroupSpec]:
    return list(plan_memory(parse_config(toml(ranks))).groups)


class Kept(BytesDriver):
    """Freed pages keep their bytes: one region has pages of two groups."""

    apply = Driver.apply


def written(answer: Opened) -> list[int]:
    """Pages of an answer, perhaps none."""
    return pages_of(answer) if answer.spans else []


class Lessee(Client):
    """An engine with memory of its own; it looks only into its bounce region."""

    def __init__(self, driver: BytesDriver, group: str, name: str) -> None:
        super().__init__(driver, group, name, group.encode(), tenant=group)
        self.bytes_driver = driver
        self.regions = self.spec.chains[0].classes[0].device_regions

    def ask(self, event: AcquirePrefix | ReserveSpans) -> Opened:
        answer = self.driver.apply(event)
        if isinstance(answer, KVError):
            raise answer
        assert isinstance(answer, Opened)
        return answer

    def page(self, rank: int, page: int) -> np.ndarray:
        memory = self.bytes_driver.memory.regions[self.regions[rank]]
        return memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]

    def content(self, what: str, rank: int, place: int) -> np.ndarray:
        dice = np.random.default_rng([*self.spec.name.encode(), *what.encode(), rank, place])
        return dice.integers(0, 256, PAGE_BYTES, dtype=np.uint8)

    def reserve(self, lease: int, what: str, segments: int) -> Opened:
        return self.ask(ReserveSpans(self.name, self.epoch, lease, chain_keys(what, segments), 10**9))

    def acquire(self, lease: int, what: str, segments: int) -> Opened:
        return self.ask(AcquirePrefix(self.name, self.epoch, lease, chain_keys(what, segments), 10**9))

    def fill(self, reserved: Opened, what: str) -> None:
        for at, page in enumerate(written(reserved), reserved.cached_tokens // ROWS):
            for rank in range(self.spec.ranks):
                self.page(rank, page)[:] = self.content(what, rank, at)

    def check(self, acquired: Opened, what: str) -> None:
        for at, page in enumerate(pages_of(acquired)):
            for rank in range(self.spec.ranks):
                assert np.array_equal(self.page(rank, page), self.content(what, rank, at)), (what, rank, at)

    def end(self, lease: int, *, committed: bool = False) -> None:
        fence = dict.fromkeys(self.attaches, self.value)
        self.driver.apply(EndLease(self.name, self.epoch, lease, fence, committed=committed))
        self.value += 1
        self.run()

    def store(self, lease: int, what: str, segments: int) -> int:
        """Pages that were written."""
        reserved = self.reserve(lease, what, segments)
        self.fill(reserved, what)
        self.end(lease, committed=True)
        return len(written(reserved))

    def load(self, lease: int, what: str, segments: int) -> int:
        """Tokens that were found, all of them with the right bytes."""
        got = self.acquire(lease, what, segments)
        if got.state == "waiting":
            self.driver.end_all()
            got = self.acquire(lease, what, segments)
        if got.cached_tokens:
            self.check(got, what)
            self.end(lease)
        return got.cached_tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_more_than_the_bounce_region_holds_goes_through_it(ranks: int) -> None:
    driver = Kept(groups(ranks))
    ours, theirs = (Lessee(driver, name, f"engine-{name}") for name in DOMAINS)
    for number, what in enumerate("abc"):
        for lessee in (ours, theirs):
            assert lessee.store(2 * number + 1, what, 4) == 4
            driver.end_all()
    assert driver.counters["offload"] == 2 * 3 * 4
    for number, what in enumerate("cab"):
        for lessee in (ours, theirs):
            assert lessee.load(100 + number, what, 4) == 4 * ROWS
    assert driver.counters["onboard"] > 0
    assert ours.load(200, "d", 4) == 0
    driver.leave(ours, theirs)


def test_a_prompt_longer_than_the_bounce_region_comes_in_part() -> None:
    driver = Kept(groups())
    ours = Lessee(driver, "ours", "e")
    assert ours.store(1, "long", 8) == BOUNCE_PAGES
    driver.end_all()
    assert ours.store(2, "long", 8) == 3, "what is known is not asked for in the bounce region"
    driver.end_all()
    assert ours.load(3, "long", 8) == BOUNCE_PAGES * ROWS
    held = ours.reserve(4, "other", 3)
    assert len(pages_of(held)) == 3
    assert ours.load(5, "long", 8) == 2 * ROWS, "as much as there is room for beside the other lease"
    more = ours.reserve(6, "third", 2)
    assert len(pages_of(more)) == 2
    assert ours.load(7, "long", 8) == 0, "a miss, not a wait"
    with pytest.raises(CapacityError):
        ours.reserve(8, "fourth", 1)
    for lease in (4, 6):
        ours.end(lease)
    driver.leave(ours)


def test_a_lease_that_waits_can_be_given_up_and_a_load_that_fails_is_a_miss() -> None:
    driver = Kept(groups())
    ours = Lessee(driver, "ours", "e")
    for lease, what in enumerate("ab", 1):
        ours.store(lease, what, 4)
        driver.end_all()
    assert ours.acquire(3, "a", 4).state == "waiting"
    ours.end(3)
    driver.end_all()
    assert ours.acquire(4, "b", 4).state == "waiting"
    driver.end(min(driver.plans), CopyOutcome.FAILED)
    assert ours.load(4, "b", 4) < 4 * ROWS, "the copy that could not be read is not offered again"
    assert not driver.notices, "leases are asked for again, nobody is told"
    driver.leave(ours)


def test_histories() -> None:
    """Stores, loads and deaths of both domains' engines; every byte that is read is right."""
    first = secrets.randbits(32)
    for seed in range(first, first + 5):
        print(f"seed {seed}")
        draw = random.Random(seed)
        driver = Kept(groups())
        lessees = [Lessee(driver, name, f"{name}{number}") for name in DOMAINS for number in range(2)]
        found = 0
        for number in range(1, 120):
            lessee, what, segments = draw.choice(lessees), draw.choice("abcdef"), draw.randint(1, 6)
            kind = draw.random()
            if kind < 0.45:
                try:
                    lessee.store(number, what, segments)
                except CapacityError:
                    driver.end_all()
            elif kind < 0.9:
                found += lessee.load(number, what, segments)
            elif kind < 0.95:
                lessee.die()
                lessees[lessees.index(lessee)] = Lessee(driver, lessee.spec.name, f"{lessee.spec.name}/{number}")
            elif driver.plans:
                driver.end(draw.choice(list(driver.plans)), draw.choice(list(CopyOutcome)[:3]))
        assert found
        driver.leave(*lessees)


def test_who_maps_what() -> None:
    """The pool's region is in nobody's attach; each domain's bounce region in its own engines' alone."""
    memory = plan_memory(parse_config(toml()))
    named = {}
    for spec in memory.groups:
        layouts = [layout for rank in range(2) for layout in _layouts(spec, rank)]
        named[spec.name] = {layout.device_region for layout in layouts}
        assert {layout.host_region for layout in layouts} == {0}
    assert named["ours"].isdisjoint(named["theirs"])
    pool = {region.region_id for region in memory.regions if region.pool == "ram"}
    assert len(pool) == 2
    assert pool.isdisjoint(named["ours"] | named["theirs"])
    of_bounce = [region for region in memory.regions if region.pool.endswith("/bounce")]
    assert {region.region_id for region in of_bounce} == named["ours"] | named["theirs"]
    assert {region.kind for region in of_bounce} == {RegionKind.HOST}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (toml(bounce=""), "engines read a cache group's pages in place"),
        (toml(bounce="bounce_bytes_per_rank = 8"), r"bounce_bytes_per_rank: 8 bytes do not hold one page"),
        (toml().replace('kind = "cache"', 'kind = "sharded"', 1), "bounce_bytes_per_rank: only a group of kind"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(text)
