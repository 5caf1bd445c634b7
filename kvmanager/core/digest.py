"""One digest of all that the core's state holds: equal states, equal digests, in this process or another."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import fields, is_dataclass
from enum import Enum
from types import FunctionType
from typing import Any

import numpy as np

from kvmanager.core.state import State

_LEFT_OUT = frozenset({"now", "effects", "reclaimers"})
"""Of `State`: the clock, which every event sets before it is read; what is handed out; what follows from the rest."""
_SCALARS = (int, float, bool, str, type(None))


def state_digest(state: State) -> str:
    """Hex digest of everything that later events can tell apart, the order of dictionaries included."""
    walk = _Walk()
    walk.attributes(state, {name: value for name, value in vars(state).items() if name not in _LEFT_OUT})
    return walk.hash.hexdigest()


def _never_changes(value: Any) -> bool:
    """Whether nobody can tell it from an equal one."""
    if isinstance(value, (tuple, frozenset)):
        return True
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


class _Walk:
    """Feeds values to a hash; something mutable that was met before is named by its number."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self._met: dict[int, int] = {}

    def value(self, value: Any) -> None:
        """Any value that the state holds."""
        if isinstance(value, (bytes, bytearray)):
            self._put("bytes", bytes(value))
        elif isinstance(value, np.ndarray):
            self._put(f"array {value.dtype.str} {value.shape}", np.ascontiguousarray(value).tobytes())
        elif isinstance(value, Enum):
            self._put("enum", str(value).encode())
        elif isinstance(value, (*_SCALARS, np.generic)):
            self._put(type(value).__name__, repr(value).encode())
        elif isinstance(value, FunctionType):
            self._put("function", value.__qualname__.encode())
        else:
            self._composite(value)

    def _put(self, kind: str, content: bytes) -> None:
        self.hash.update(f"{kind}:{len(content)}:".encode())
        self.hash.update(content)

    def _composite(self, value: Any) -> None:
        if not _never_changes(value):
            number = self._met.setdefault(id(value), len(self._met))
            if number != len(self._met) - 1:
                self._put("met", b"%d" % number)
                return
        name = type(value).__name__
        if isinstance(value, dict):
            self._put(name, b"%d" % len(value))
            for key, item in value.items():
                self.value(key)
                self.value(item)
        elif isinstance(value, (list, tuple, deque)):
            self._put(name, b"%d" % len(value))
            for item in value:
                self.value(item)
        elif isinstance(value, (set, frozenset)):
            self._put(name, repr(sorted(value)).encode())
        elif is_dataclass(value):
            compared = [field.name for field in fields(value) if field.compare]  # others follow from these
            self.attributes(value, {name: getattr(value, name) for name in compared})
        elif isinstance(value, Exception):
            self.attributes(value, {"args": value.args, **vars(value)})
        else:
            self.attributes(value, vars(value))

    def attributes(self, value: Any, named: dict[str, Any]) -> None:
        """An object by its class and attributes."""
        self._put("object", type(value).__qualname__.encode())
        for name in sorted(named):
            self._put("name", name.encode())
            self.value(named[name])
