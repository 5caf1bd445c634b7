"""All suites by name: those of this package, and what a user's own modules added."""

from __future__ import annotations

from kvmanager.errors import InvalidArgument
from kvmanager.pressure import suites_clients, suites_load, suites_nodes  # noqa: F401  (they add themselves)
from kvmanager.pressure.suite import SUITES, Suite

__all__ = ["SUITES", "suite_named"]


def suite_named(name: str) -> Suite:
    """Raises InvalidArgument."""
    if name not in SUITES:
        raise InvalidArgument(f"no suite {name!r}; there are {', '.join(SUITES)}")
    return SUITES[name]
