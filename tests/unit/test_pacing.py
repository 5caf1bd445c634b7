"""Link rates in virtual time: the clock is a number that the test moves; nothing here sleeps."""

import random

import numpy as np
import pytest

from kvmanager.configuration.reading import parse_config
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.errors import ConfigError, InvalidArgument
from kvmanager.transport.cpu import SLICE_BYTES, CpuExecutor
from kvmanager.transport.executor import RegionMap
from kvmanager.transport.pacing import BURST_NS, LinkRates, Pacer, TokenBucket
from kvmanager.units import MIB, MILLISECOND_NS, SECOND_NS
from tests.minimal_config import minimal_toml
from tests.plans import strided

RATE = 1_000 * MIB
NODE = minimal_toml() + "[mover]\n"


class Clock:
    """Nanoseconds that pass when told to."""

    def __init__(self):
        self.now_ns = 1

    def __call__(self):
        return self.now_ns


@pytest.mark.parametrize("seed", range(5))
def test_a_bucket_keeps_its_rate_whatever_is_taken(seed):
    """In every window: at most the rate, the burst and one piece; and all of the rate where enough is asked for."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    clock = Clock()
    bucket = TokenBucket(RATE, clock())
    taken = []
    while clock.now_ns < SECOND_NS:
        wait_ns = bucket.wait_ns(clock())
        if wait_ns:
            assert bucket.wait_ns(clock() + wait_ns - 1) > 0, "asked a moment earlier it still waits"
            clock.now_ns += wait_ns
            assert bucket.wait_ns(clock()) == 0
        piece = draw.randint(1, 4 * MIB)
        bucket.spend(piece, clock())
        taken.append((clock(), piece))
        clock.now_ns += draw.choice((0, 1, MILLISECOND_NS // 2))
    for first in range(0, len(taken), 7):
        total = 0
        for at_ns, piece in taken[first:]:
            total += piece
            assert total <= RATE * (at_ns - taken[first][0] + BURST_NS) / SECOND_NS + 4 * MIB
    assert sum(piece for _, piece in taken) >= 0.95 * RATE


def test_waiting_saves_up_no_more_than_the_burst():
    clock = Clock()
    bucket = TokenBucket(RATE, clock())
    clock.now_ns += 3600 * SECOND_NS
    bucket.spend(RATE * BURST_NS // SECOND_NS, clock())
    assert bucket.wait_ns(clock()) == 0
    bucket.spend(MIB, clock())
    assert bucket.wait_ns(clock()) == pytest.approx(MIB * SECOND_NS / RATE, abs=1)


class Bench:
    """A cpu executor with rates, and what it has moved by purpose."""

    def __init__(self, **rates):
        self.clock = Clock()
        regions = RegionMap()
        for region in (1, 2):
            regions.add(region, np.zeros(256 * MIB, np.uint8))  # touched at its head only
        self.pacer = Pacer(LinkRates(**rates), self.clock)
        self.executor = CpuExecutor(regions, clock_ns=self.clock, pacer=self.pacer)
        self.sizes = {}
        self.moved = dict.fromkeys(Purpose, 0)

    def submit(self, plan_id, purpose, pages=1):
        copies = strided(1, 2, np.zeros(pages, np.int64), np.zeros(pages, np.int64), (), (), (), 2 * MIB)
        self.sizes[plan_id] = purpose, pages * 2 * MIB
        self.executor.submit(CopyPlan(plan_id, purpose, (copies,)))

    def run(self, milliseconds):
        """Polls as a mover does: again at once when it may, else when `wait_ns` is over."""
        end_ns = self.clock.now_ns + milliseconds * MILLISECOND_NS
        while self.clock.now_ns < end_ns:
            for completion in self.executor.poll():
                purpose, size = self.sizes.pop(completion.plan_id)
                assert completion.moved_bytes == size
                self.moved[purpose] += size
            wait_ns = self.executor.wait_ns() if self.executor.outstanding() else end_ns - self.clock.now_ns
            self.clock.now_ns += max(1000, min(wait_ns, end_ns - self.clock.now_ns))


def test_write_back_keeps_to_its_link_and_onboards_are_not_held_up():
    bench = Bench(to_host=RATE)
    for plan_id in range(200):
        bench.submit(plan_id, Purpose.OFFLOAD if plan_id % 2 else Purpose.MIRROR)
    for plan_id in range(200, 250):
        bench.submit(plan_id, Purpose.ONBOARD)
    bench.run(100)
    written = bench.moved[Purpose.OFFLOAD] + bench.moved[Purpose.MIRROR]
    assert 0.9 * RATE / 10 <= written <= RATE / 10 + RATE * BURST_NS / SECOND_NS + SLICE_BYTES
    assert bench.moved[Purpose.ONBOARD] == 100 * MIB
    bench.run(1000)
    assert not bench.sizes


def test_onboards_keep_to_theirs():
    bench = Bench(to_device=RATE)
    for plan_id in range(100):
        bench.submit(plan_id, Purpose.ONBOARD)
    bench.submit(100, Purpose.OFFLOAD, 50)
    bench.run(100)
    assert 0.9 * RATE / 10 <= bench.moved[Purpose.ONBOARD] <= RATE / 10 + RATE * BURST_NS / SECOND_NS + SLICE_BYTES
    assert bench.moved[Purpose.OFFLOAD] == 100 * MIB


def test_write_back_gets_what_onboarding_leaves():
    """Onboards take three quarters of both ways; write-back the rest, and all of it when they have ended."""
    bench = Bench(to_device=3 * RATE // 4, both_ways=RATE)
    for plan_id in range(1000):
        bench.submit(plan_id, Purpose.ONBOARD)
        bench.submit(1000 + plan_id, Purpose.OFFLOAD)
    bench.run(400)
    loaded, written = bench.moved[Purpose.ONBOARD], bench.moved[Purpose.OFFLOAD]
    assert loaded == pytest.approx(0.3 * RATE, rel=0.1)
    assert written == pytest.approx(0.1 * RATE, rel=0.2)
    for plan_id in [p for p, (purpose, _) in bench.sizes.items() if purpose is Purpose.ONBOARD]:
        bench.executor.cancel(plan_id)
        del bench.sizes[plan_id]
    bench.executor.poll()
    before = bench.moved[Purpose.OFFLOAD]
    bench.moved[Purpose.OFFLOAD] = 0
    bench.run(400)
    assert bench.moved[Purpose.OFFLOAD] == pytest.approx(0.4 * RATE, rel=0.1)
    assert before < bench.moved[Purpose.OFFLOAD]


def test_an_onboard_never_waits_for_both_ways():
    bench = Bench(both_ways=RATE)
    for plan_id in range(20):
        bench.submit(plan_id, Purpose.ONBOARD, 10)
    bench.submit(100, Purpose.OFFLOAD)
    for _ in range(400):  # no time passes
        bench.executor.poll()
    assert bench.executor.outstanding() == [100]
    debt = 400 * MIB - RATE * BURST_NS // SECOND_NS
    assert bench.executor.wait_ns() == pytest.approx(debt * SECOND_NS / RATE, rel=0.1)


def test_a_cancelled_plan_ends_while_its_link_has_no_room():
    bench = Bench(to_host=RATE)
    bench.submit(1, Purpose.OFFLOAD, 100)
    bench.submit(2, Purpose.OFFLOAD)
    bench.executor.poll()
    bench.executor.poll()
    assert bench.executor.wait_ns() > 0
    bench.executor.cancel(1)
    assert bench.executor.wait_ns() == 0
    (completion,) = bench.executor.poll()
    assert (completion.plan_id, completion.outcome.value) == (1, "CANCELLED")
    assert 0 < completion.moved_bytes < 200 * MIB


def test_new_rates_hold_from_then_on():
    bench = Bench(to_host=MIB)
    bench.submit(1, Purpose.OFFLOAD, 100)
    bench.executor.poll()
    assert bench.executor.wait_ns() > SECOND_NS
    bench.pacer.set_rates(LinkRates())
    bench.run(100)
    assert not bench.sizes


def test_bad_rates_are_refused():
    with pytest.raises(InvalidArgument, match="below zero"):
        LinkRates(to_host=-1)
    for value in ("-1", "0.0001", "nan", "inf", "true", '"5"'):
        with pytest.raises(ConfigError, match="to_host_gb_per_s"):
            parse_config(NODE + f"to_host_gb_per_s = {value}\n")


def test_rates_are_configured_in_gigabytes_a_second():
    config = parse_config(NODE + "to_host_gb_per_s = 20.5\nboth_ways_gb_per_s = 60\n")
    assert config.mover.rates == LinkRates(to_host=20_500_000_000, to_device=0, both_ways=60_000_000_000)
