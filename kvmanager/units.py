"""Byte and time units. Names elsewhere carry their unit last: `page_bytes`, `lease_ttl_ns`."""

from __future__ import annotations

import re
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

MICROSECOND_NS: Final = 1_000
MILLISECOND_NS: Final = 1_000_000
SECOND_NS: Final = 1_000_000_000

_BYTES = re.compile(r"\s*(\d+)\s*(B|KiB|MiB|GiB|TiB)?\s*")
_SCALE = {None: 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": GIB << 10}


def parse_bytes(text: str | int) -> int:
    """Bytes from `512`, `"512"`, `"64 MiB"` or `"15GiB"`.

    Raises ValueError for anything else: fractions and decimal units are refused because
    a pool's size must be exact.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"{text} bytes is negative")
        return text
    match = _BYTES.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 64MiB or 15GiB")
    return int(match.group(1)) * _SCALE[match.group(2)]


def format_bytes(count: int) -> str:
    """A size for people: `3.34 MiB`. Exact bytes belong in `--json`."""
    for unit, scale in (("TiB", GIB << 10), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"
