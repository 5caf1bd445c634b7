"""First touches of mapped memory, ahead of need: each costs a fault, and with it several times the copy of a page."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvmanager.allocators.backing import fault_in
from kvmanager.units import MIB

PIECE_BYTES: Final = 4 * MIB
"""Faulted in at once: while it lasts, the process's other threads can't map or unmap memory."""


class FirstTouch:
    """Faults mapped arrays in, in a thread of its own; content stays. The memory is there: this takes page tables."""

    def __init__(self, arrays: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Begins. The mappings begin at a page of the system's, as all do."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(tuple(arrays),), name="first-touch", daemon=True)
        self._thread.start()

    def _run(self, arrays: tuple[npt.NDArray[np.uint8], ...]) -> None:
        for array in arrays:
            for offset in range(0, len(array), PIECE_BYTES):
                if self._over.is_set():
                    return
                fault_in(array[offset : offset + PIECE_BYTES])

    def close(self) -> None:
        """Ends it after the piece that it is at, and lets go of the arrays. Idempotent."""
        self._over.set()
        self._thread.join()
