"""Values of configuration keys: a function takes what TOML gave, and returns it checked or raises ValueError."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from kvmanager.allocators.cuda_driver import device_ordinal
from kvmanager.errors import InvalidArgument
from kvmanager.layout import FORMATS, format_named
from kvmanager.units import parse_bytes

RUNTIME_DIR_MAX_BYTES: Final = 80
"""A unix socket's path holds 107 bytes; this leaves room for the longest name below the directory."""
LEAST_RATE_GB_PER_S: Final = 0.001
"""A megabyte a second: a span then takes seconds."""
Parser = Callable[[object], Any]


def text(value: object) -> str:
    """A non-empty string."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a non-empty string")
    return value


def count(minimum: int) -> Parser:
    """A parser of whole numbers of at least `minimum`."""
    def parse(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{value!r} is not a whole number of at least {minimum}")
        return value

    return parse


def between(minimum: int, maximum: int) -> Parser:
    """A parser of whole numbers from `minimum` to `maximum`."""
    def parse(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise ValueError(f"{value!r} is not a whole number from {minimum} to {maximum}")
        return value

    return parse


def size(value: object) -> int:
    """Bytes, also as `"64 MiB"`."""
    if not isinstance(value, (str, int)):
        raise ValueError(f"{value!r} is not a size; write for example 64MiB or 15GiB")
    return parse_bytes(value)


def factor(value: object) -> float:
    """A finite number of at least 1."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < 1:
        raise ValueError(f"{value!r} is not a number of at least 1.0")
    return float(value)


def rate(value: object) -> float:
    """GB/s: a finite number of at least 0.001, or 0 for no limit."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number of GB/s")
    if value != 0 and value < LEAST_RATE_GB_PER_S:
        raise ValueError(f"{value!r} GB/s would never end a copy: at least {LEAST_RATE_GB_PER_S}, or 0 for no limit")
    return float(value)


def share(value: object) -> float:
    """A number from 0 to 1."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError(f"{value!r} is not a share from 0.0 to 1.0")
    return float(value)


def switch(value: object) -> bool:
    """TOML's true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def one_in_or_auto(value: object) -> int | None:
    """How many of which there is one: "off" 0, "all" 1, "1/16" 16; "auto" None."""
    if value == "auto":
        return None
    if value in ("off", "all"):
        return int(value == "all")
    first, _, many = value.partition("/") if isinstance(value, str) else ("", "", "")
    if first != "1" or not many.isascii() or not many.isdigit() or int(many) < 1:
        raise ValueError(f'{value!r} is not "auto", "off", "all" or a share as "1/16"')
    return int(many)


def choice(*names: str) -> Parser:
    """A parser of one of some names."""
    def parse(value: object) -> str:
        if value not in names:
            raise ValueError(f"{value!r} is not one of {', '.join(names)}{did_you_mean(value, names)}")
        return str(value)

    return parse


def kv_format(value: object) -> str:
    """The name of a KV format."""
    try:
        return format_named(text(value)).name
    except InvalidArgument as error:
        raise ValueError(f"{error}{did_you_mean(value, tuple(FORMATS))}") from None


def device(value: object) -> str:
    """Where the device pools lie."""
    if isinstance(value, str) and value.startswith("cuda:"):
        try:
            device_ordinal(value)
        except InvalidArgument as error:
            raise ValueError(str(error)) from None
        return value
    return str(choice("cpu", "cuda:0")(value))


def directory(value: object) -> Path:
    """An absolute path short enough for sockets below it."""
    path = Path(text(value))
    if not path.is_absolute():
        raise ValueError(f"{value!r} is not an absolute path")
    length = len(os.fsencode(path))
    if length > RUNTIME_DIR_MAX_BYTES:
        raise ValueError(
            f"{value!r} has {length} bytes; sockets below it need a path of at most {RUNTIME_DIR_MAX_BYTES}"
        )
    return path


def uids(value: object) -> tuple[int, ...]:
    """User ids, at least one."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{value!r} is not a non-empty list of user ids")
    return tuple(count(0)(entry) for entry in value)


def did_you_mean(name: object, known: Sequence[str]) -> str:
    """A hint at the known name that is closest, or nothing."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
