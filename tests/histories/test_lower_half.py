"""The first half of the long histories; the halves are files so that two workers share them."""

import pytest

from tests.sim.many import hold


@pytest.mark.long
def test_many_long_histories() -> None:
    """About a quarter of an hour of one core."""
    hold(range(10_000, 10_150), 2_000)
