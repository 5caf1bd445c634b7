"""What the row kernel is given: the width of its accesses."""

from __future__ import annotations

import numpy as np
import pytest

from kvmanager.core.plans import StridedCopies
from kvmanager.transport.cuda_rows import unit_bytes


def copies(
    row: int = 128, offset: int = 0, target_offset: int = 0, stride: int = 256, target_stride: int = 512
) -> StridedCopies:
    places = np.arange(3, dtype=np.int64) * 4_096
    return StridedCopies(1, 2, places + offset, places + target_offset, (2,), (stride,), (target_stride,), row)


@pytest.mark.parametrize(
    ("change", "addresses", "unit"),
    [
        ({}, (0, 0), 16),
        ({"row": 4}, (0, 0), 4),
        ({"row": 131}, (0, 0), 1),
        ({"offset": 4}, (0, 0), 4),
        ({"offset": 6}, (0, 0), 1),
        ({"target_offset": 8}, (0, 0), 4),
        ({"stride": 132}, (0, 0), 4),
        ({"target_stride": 140}, (0, 0), 4),
        ({"stride": -131}, (0, 0), 1),
        ({}, (1 << 21, 8), 4),
        ({}, (1, 0), 1),
    ],
)
def test_the_widest_access_that_all_rows_allow(change: dict[str, int], addresses: tuple[int, int], unit: int) -> None:
    assert unit_bytes(copies(**change), *addresses) == unit
