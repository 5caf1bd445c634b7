"""Memory that is faulted in ahead of need keeps its content, and can be let go of at any time."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from kvmanager.allocators.backing import create_memfd, map_fd
from kvmanager.transport.firsttouch import PIECE_BYTES, FirstTouch

SIZE = 2 * PIECE_BYTES + 4096


def _mapped(array: np.ndarray) -> int:
    """Bytes of the array's mapping that this process can touch without a fault."""
    start = f"{array.ctypes.data:x}-"
    lines = Path("/proc/self/smaps").read_text(encoding="ascii").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(start))
    return int(next(line for line in lines[at:] if line.startswith("Rss:")).split()[1]) * 1024


def test_it_is_mapped_and_its_content_stays() -> None:
    fd = create_memfd("first-touch", SIZE)
    os.pwrite(fd, b"kept", PIECE_BYTES)
    memory = map_fd(fd, SIZE)
    os.close(fd)
    assert _mapped(memory) == 0
    touch = FirstTouch([memory])
    touch._thread.join()
    assert _mapped(memory) == SIZE
    assert bytes(memory[PIECE_BYTES : PIECE_BYTES + 4]) == b"kept"
    touch.close()
    touch.close()


def test_it_ends_where_it_is_told_to() -> None:
    fd = create_memfd("first-touch", SIZE)
    memory = map_fd(fd, SIZE)
    os.close(fd)
    touch = FirstTouch([memory] * 1000)
    touch.close()
    assert not touch._thread.is_alive()
