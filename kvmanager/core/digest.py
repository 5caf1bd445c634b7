"""One digest of all that the core's state holds: equal states, equal digests, in this process or another."""

from __future__ import annotations

import hashlib
import marshal
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import chain
from operator import attrgetter
from types import FunctionType
from typing import Any, Final

import numpy as np

from kvmanager.core.state import State

_LEFT_OUT = frozenset({"now", "effects", "reclaimers", "lenders"})
"""Of `State`: the clock, which every event sets before it is read; what is handed out; what follows from the rest."""
_SCALARS = frozenset({int, float, bool, str, bytes, type(None)})
_MARSHAL = 2
"""The last format that writes a value alike however many hold it."""


def state_digest(state: State) -> str:
    """Hex digest of everything that later events can tell apart, the order of dictionaries included."""
    walk = _Walk()
    walk.attributes(state, {name: value for name, value in vars(state).items() if name not in _LEFT_OUT})
    return hashlib.blake2b(marshal.dumps(walk.parts, _MARSHAL), digest_size=16).hexdigest()


class _Walk:
    """Lists what values are made of, as `parts`: plain ones as they are, tuples say what the next ones belong to.

    Something mutable that was met before is named by its number.
    """

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self._met: dict[int, int] = {}

    def value(self, value: Any) -> None:
        """Any value that the state holds."""
        kind = type(value)
        if kind in _SCALARS:
            self.parts.append(value)
            return
        write, shared = _way(kind)  # type: ignore[arg-type]
        if shared:
            number = self._met.get(id(value))
            if number is not None:
                self.parts.append(("met", number))
                return
            self._met[id(value)] = len(self._met)
        write(self, value)

    def each(self, values: Iterable[Any]) -> None:
        """`value` for each of them; most are plain."""
        for value in values:
            if type(value) in _SCALARS:
                self.parts.append(value)
            else:
                self.value(value)

    def attributes(self, value: Any, named: dict[str, Any]) -> None:
        """An object by its class and attributes."""
        self.parts.append((type(value).__qualname__, len(named)))
        for name in sorted(named):
            self.parts.append(name)
            self.value(named[name])


def _plain(content: Callable[[Any], Any]) -> Callable[[_Walk, Any], None]:
    """Writes what holds no other values as its type and content."""
    return lambda walk, value: walk.parts.append((type(value).__name__, content(value)))


_PLAIN: Final[dict[type, Callable[[_Walk, Any], None]]] = {
    bytearray: _plain(bytes),
    np.ndarray: _plain(lambda array: (array.dtype.str, array.shape, array.tobytes())),
    np.generic: _plain(lambda number: number.item()),
    Enum: _plain(str),
    FunctionType: _plain(lambda function: function.__qualname__),
}
_set = _plain(lambda values: repr(sorted(values)))


@cache
def _way(kind: type) -> tuple[Callable[[_Walk, Any], None], bool]:
    """How values of a type are written, and whether one can be told from an equal one: it may change."""
    plain = next((write for known, write in _PLAIN.items() if issubclass(kind, known)), None)
    if plain is not None:
        return plain, False
    if issubclass(kind, dict):
        return _dict, True
    if issubclass(kind, (list, tuple, deque)):
        return _sequence, not issubclass(kind, tuple)
    if issubclass(kind, (set, frozenset)):
        return _set, not issubclass(kind, frozenset)
    if is_dataclass(kind):
        frozen: bool = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        return _dataclass(kind), not frozen
    if issubclass(kind, Exception):
        return (lambda walk, value: walk.attributes(value, {"args": value.args, **vars(value)})), True
    return (lambda walk, value: walk.attributes(value, vars(value))), True


def _dict(walk: _Walk, value: Any) -> None:
    walk.parts.append((type(value).__name__, len(value)))
    walk.each(chain.from_iterable(value.items()))


def _sequence(walk: _Walk, value: Any) -> None:
    walk.parts.append((type(value).__name__, len(value)))
    walk.each(value)


def _dataclass(kind: type) -> Callable[[_Walk, Any], None]:
    """Writes the fields that are compared: others follow from these."""
    name, compared = kind.__qualname__, sorted(field.name for field in fields(kind) if field.compare)
    # Of two names or more it gives a tuple.
    values = attrgetter(*compared) if len(compared) > 1 else lambda value: [getattr(value, field) for field in compared]

    def write(walk: _Walk, value: Any) -> None:
        walk.parts.append((name,))
        walk.each(values(value))

    return write
