"""What an engine's thread waits for while it has nothing to do."""

from __future__ import annotations

import threading
from typing import Any


class Bell:
    """Rung when something is there that an engine without other work waits for.

    Pickled, it is left behind: in another process nobody rings it.
    """

    def __init__(self) -> None:
        self.rung = threading.Event()

    def wait(self, most_s: float) -> None:
        """Waits until it is rung, or so long."""
        if self.rung.wait(most_s):
            self.rung.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_bell, ()


def _no_bell() -> None:
    return None
