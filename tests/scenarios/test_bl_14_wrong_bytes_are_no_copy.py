"""BL-14, of bytes: a copy that arrived but is not what was written fails as one that did not arrive."""

import numpy as np
import pytest

from kvmanager.core.events import CopyOutcome, PlanEnded
from kvmanager.core.pool import PageState
from kvmanager.core.spec import Limits
from kvmanager.errors import ChecksumMismatch
from kvmanager.transport.executor import Outcome, RegionMap
from kvmanager.transport.fake import FakeExecutor
from tests.sim.bytes_driver import BytesClient, BytesDriver, start
from tests.sim.worker import WrongKV

SPAN = 512


class _Mover:
    """A driver's plans, carried out by the fake executor, which flips a bit of some of them."""

    def __init__(self, driver: BytesDriver, seed: int, corrupt_share: float) -> None:
        self.driver = driver
        regions: RegionMap = driver.memory.regions
        self.executor = FakeExecutor(seed, regions, corrupt_share=corrupt_share)

    def run(self) -> None:
        """Until nothing is under way."""
        submitted: set[int] = set()
        while self.driver.plans or self.executor.outstanding():
            for plan_id, plan in self.driver.plans.items():
                if plan_id not in submitted:
                    self.executor.submit(plan)
                    submitted.add(plan_id)
            for ended in self.executor.poll():
                assert ended.outcome is Outcome.DONE
                self.driver.plans.pop(ended.plan_id)
                self.driver.apply(PlanEnded(ended.plan_id, CopyOutcome.DONE, None, ended.sums))


def history(seed: int, checksums: int) -> tuple[BytesDriver, BytesClient, _Mover]:
    """Sessions come and go through a device pool of four spans; every read is checked byte by byte."""
    driver, client = start(4, 40, Limits(checksums=checksums))
    mover = _Mover(driver, seed, 0.15)
    draw = np.random.default_rng(seed)
    for number in range(40):
        what = f"s{draw.integers(6)}"
        opened = client.open(number, 3 * SPAN, what)
        if opened.state == "waiting":
            mover.run()
            opened = next(n.ready for n in reversed(driver.notices) if n.ready and n.ready.request_id == number)
            if opened.state == "refused":
                assert isinstance(opened.error, ChecksumMismatch)
                continue
        client.finish(opened, 3 * SPAN, what)
        mover.run()
    return driver, client, mover


@pytest.mark.parametrize("seed", range(3))
def test_no_wrong_byte_is_served(seed: int) -> None:
    print(f"seed {seed}")
    driver, client, mover = history(seed, checksums=1)
    assert mover.executor.corrupted
    assert driver.counters["bad_copy"] > 0
    assert driver.counters["onboard"] > 0
    withheld = driver.pages("p/host", PageState.QUARANTINED)
    assert withheld == driver.counters["bad_copy"], "a span of this group has one page index"
    driver.leave(client)


def test_without_checksums_the_same_history_serves_wrong_bytes() -> None:
    with pytest.raises(WrongKV):
        history(0, checksums=0)
