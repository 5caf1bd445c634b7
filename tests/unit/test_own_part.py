"""What one rank's process carries out of a plan over the regions of several."""

import numpy as np
import pytest

from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.errors import InvalidArgument
from kvmanager.transport.executor import RegionMap
from tests.plans import copy_whole_pages


def regions(*ids: int) -> RegionMap:
    mapped = RegionMap()
    for region in ids:
        mapped.add(region, np.zeros(64, np.uint8))
    return mapped


def test_each_rank_copies_within_its_regions() -> None:
    """Two ranks, each with HBM of its own; a copy between them is nobody's."""
    plan = CopyPlan(1, Purpose.COPY_ON_WRITE, copy_whole_pages(16, [3, 4], np.array([0]), [3, 4], np.array([2])))
    assert [copies.source_region for copies in regions(1, 3).own_part(plan).copies] == [3]
    assert [copies.target_region for copies in regions(1, 4).own_part(plan).copies] == [4]
    assert regions(1).own_part(plan).total_bytes == 0
    assert regions(3, 4).own_part(plan) == plan
    crossing = CopyPlan(2, Purpose.COPY_ON_WRITE, copy_whole_pages(16, [3], np.array([0]), [4], np.array([2])))
    with pytest.raises(InvalidArgument, match="from region 3 to 4; only one of them is mapped"):
        regions(3).own_part(crossing)
