"""Whose bytes may lie where: the tenants that wrote each unit of a pool, for groups that scrub pages between tenants.

A unit that one tenant alone was given holds that tenant's bytes, or none. A unit that went from one to another is of
*several* until all of it was overwritten: by zeros (`core.scrubbing`), or by a copy of whole pages. Unsure is several.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvmanager.allocators.fixed import PageArray

NOTHING, SEVERAL = -1, -2
"""Instead of a tenant's number: nobody was ever given the unit; bytes of several may lie there."""

BoolArray = npt.NDArray[np.bool_]


class Writers:
    """`of[unit]`: a tenant's number, NOTHING or SEVERAL (int32). A page of a class takes `width` units in a row."""

    def __init__(self, units: int) -> None:
        self.of = np.full(units, NOTHING, np.int32)

    def given(self, pages: PageArray, width: int, tenant: int) -> None:
        """Pages are a tenant's from now on; below 0: nobody says whose."""
        at = _units(pages, width)
        before = self.of[at]
        same = (before == NOTHING) | (before == tenant)
        self.of[at] = np.where(same & (tenant >= 0), tenant, SEVERAL)

    def forget(self, first: int, end: int) -> None:
        """Units [first, end) were somebody else's for a time."""
        self.of[first:end] = SEVERAL

    def unclean(self, pages: PageArray, width: int) -> BoolArray:
        """Which of the pages may hold bytes of somebody else than who has them, bool[pages]."""
        found: BoolArray = (self.of[_units(pages, width)] == SEVERAL).any(axis=1)
        return found

    def overwritten(self, pages: PageArray, width: int, tenant: int) -> None:
        """All bytes of the pages are a tenant's now, or zeros."""
        self.of[_units(pages, width)] = tenant


def _units(pages: PageArray, width: int) -> npt.NDArray[np.int64]:
    """int64[pages, width]."""
    units: npt.NDArray[np.int64] = pages[:, None] * width + np.arange(width)
    return units
