"""Two hundred kills anywhere, in a file of their own so that they run beside other long tests."""

from __future__ import annotations

import itertools

import pytest

from tests.chaos.run import run_kills
from tests.chaos.schedule import random_kills


@pytest.mark.long
def test_two_hundred_random_kills() -> None:
    """Under two seconds a kill on a free machine; `make chaos KILLS=1000` runs more of them."""
    report = run_kills(itertools.islice(random_kills(5), 200), seed=5)
    report.check()
    assert len(report.missed) <= 25
