"""Core events and states as bytes, and back: pickle that knows the core's own classes and nothing else.

What never changes while a node runs (specs, limits) is not stored but named, and taken from the configuration
when it is read. `CODE` and `SCHEMA` say which program wrote bytes: events mean the same only to the same core,
a snapshot to any whose classes have the same fields.
"""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import hashlib
import importlib
import io
import pickle
import pkgutil
from collections.abc import Callable, Iterable
from enum import Enum
from operator import attrgetter
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

import numpy as np

from kvmanager import allocators, core, errors, geometry, layout, units
from kvmanager.core.events import Event
from kvmanager.core.eviction import POLICIES, Policy
from kvmanager.core.spec import GroupSpec, Limits
from kvmanager.core.state import State
from kvmanager.errors import InvariantViolation

_PROTOCOL: Final = 5
_FIRST_CODE: Final = 0x4000
"""First of our copyreg extension codes: a class takes three bytes in a record."""
_SEED: Final = b"kvmanager.journal/1"


def _modules(package: ModuleType) -> list[ModuleType]:
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


_STORED_MODULES: Final = (*_modules(core), *_modules(allocators), errors, geometry)
_CODE_MODULES: Final = (*_STORED_MODULES, layout, units)


def _classes() -> dict[tuple[str, str], type]:
    """Classes that may be read, by (module, name)."""
    return {
        (module.__name__, name): value
        for module in _STORED_MODULES
        for name, value in sorted(vars(module).items())
        if isinstance(value, type) and value.__module__ == module.__name__
    }


_CLASSES: Final = _classes()
_OTHERS: Final[dict[tuple[str, str], Any]] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (collections.OrderedDict, collections.deque, collections.Counter, set, frozenset, bytearray)
} | {(policy.__module__, policy.__qualname__): policy for policy in POLICIES.values()}  # type: ignore[attr-defined]


def _numpy_names() -> dict[tuple[str, str], Any]:
    """What numpy's own arrays and scalars are made of when they are read."""
    samples = (np.zeros(1), np.zeros((2, 2))[:, :1], np.int64(1), np.bool_(True), np.dtype(np.int64))
    makers = [sample.__reduce_ex__(_PROTOCOL)[0] for sample in samples] + [np.zeros(1).__reduce__()[0]]
    found = {(maker.__module__, maker.__qualname__): maker for maker in makers if callable(maker)}
    return found | {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype}


_NUMPY: Final = _numpy_names()

for _number, (_module, _name) in enumerate(_CLASSES, _FIRST_CODE):
    copyreg.add_extension(_module, _name, _number)


def _is_value(kind: type) -> bool:
    """A frozen dataclass that its fields make up: stored as a call with them."""
    if not dataclasses.is_dataclass(kind):
        return False
    frozen: bool = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return frozen and all(field.init and not field.kw_only for field in dataclasses.fields(kind))


def _reducer(kind: type) -> Callable[[Any], tuple[type, tuple[Any, ...]]]:
    names = [field.name for field in dataclasses.fields(kind)]
    if len(names) > 1:
        several = attrgetter(*names)
        return lambda value: (kind, several(value))
    return lambda value: (kind, tuple(getattr(value, name) for name in names))


class _Flat:
    """A value as a tuple of its fields, values within it likewise: naming a class in a record costs more than all else.

    Fields of other types stay as they are.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        names = [field.name for field in dataclasses.fields(kind)]
        hints = get_type_hints(kind)
        self._get: Callable[[Any], tuple[Any, ...]] = (
            attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)
        )
        found = [(place, *_nested(hints[name])) for place, name in enumerate(names)]
        self._nested = [(place, _Flat(kind), many) for place, kind, many in found if kind is not None]

    def pack(self, value: Any) -> tuple[Any, ...]:
        """The fields."""
        if not self._nested:
            return self._get(value)
        parts = list(self._get(value))
        for place, flat, many in self._nested:
            part = parts[place]
            if part:
                parts[place] = tuple(map(flat.pack, part)) if many else flat.pack(part)
        return tuple(parts)

    def unpack(self, parts: tuple[Any, ...]) -> Any:
        """The value again."""
        if not self._nested:
            return self.kind(*parts)
        fields = list(parts)
        for place, flat, many in self._nested:
            part = fields[place]
            if part:
                fields[place] = tuple(map(flat.unpack, part)) if many else flat.unpack(part)
        return self.kind(*fields)


def _nested(hint: Any) -> tuple[type | None, bool]:
    """(the value class that a field holds, whether it holds many of it); (None, False) for other fields."""
    arguments = get_args(hint)
    if get_origin(hint) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis and _is_value(arguments[0]):
        return arguments[0], True
    if get_origin(hint) is UnionType and len(arguments) == 2 and arguments[1] is type(None) and _is_value(arguments[0]):
        return arguments[0], False
    return (hint, False) if isinstance(hint, type) and _is_value(hint) else (None, False)


_EVENTS: Final = [_Flat(kind) for kind in sorted(get_args(Event), key=lambda kind: str(kind.__name__))]
_EVENT_CODES: Final[dict[type, int]] = {flat.kind: code for code, flat in enumerate(_EVENTS)}
_REDUCERS: Final[dict[type, Callable[[Any], Any]]] = {
    kind: _reducer(kind) for kind in _CLASSES.values() if _is_value(kind)
}


def _fixed(name: str) -> Any:
    """Stands in the bytes for a part of the configuration; see `Codec`."""
    raise AssertionError(f"{name} is read by a Codec only")


_FIXED: Final = (_fixed.__module__, _fixed.__qualname__)


def _schema() -> str:
    """Fingerprint of the classes and the fields of all that is stored."""
    digest = hashlib.sha256(_SEED)
    for (module, name), kind in _CLASSES.items():
        if dataclasses.is_dataclass(kind):
            parts: Iterable[str] = [f"{field.name}: {field.type}" for field in dataclasses.fields(kind)]
        elif issubclass(kind, Enum):
            parts = [f"{member.name} = {member.value!r}" for member in kind]
        else:
            made = getattr(kind.__init__, "__code__", None)
            parts = made.co_names if made is not None else ()
        digest.update(f"{module}.{name}({', '.join(parts)})\n".encode())
    return digest.hexdigest()


def _code() -> str:
    """Fingerprint of the source of all that decides how an event changes the state."""
    digest = hashlib.sha256(_SEED + np.__version__.encode())
    for module in _CODE_MODULES:
        assert module.__file__ is not None
        digest.update(hashlib.sha256(Path(module.__file__).read_bytes()).digest())
    return digest.hexdigest()


SCHEMA: Final = _schema()
CODE: Final = _code()


def configuration(groups: Iterable[GroupSpec], limits: Limits, policy: Policy) -> str:
    """Fingerprint of what a state was made with: memory groups, limits, policy."""
    name = getattr(policy, "__qualname__", repr(policy))
    return hashlib.sha256(_SEED + repr((tuple(groups), limits, name)).encode()).hexdigest()


class Codec:
    """Writes and reads for one configuration. Not thread-safe: the owner loop's."""

    def __init__(self, groups: Iterable[GroupSpec], limits: Limits) -> None:
        self._fixed_parts: dict[str, Any] = {"limits": limits}
        for spec in groups:
            self._fixed_parts[spec.name] = spec
            self._fixed_parts |= {f"{spec.name}/{chain.name}": chain for chain in spec.chains}
        self._fixed_names = {id(part): name for name, part in self._fixed_parts.items()}
        kinds = {type(part) for part in self._fixed_parts.values()}
        self._table = {**_REDUCERS, **dict.fromkeys(kinds, self._reduce_fixed)}
        self._buffer = io.BytesIO()
        self._pickler = pickle.Pickler(self._buffer, _PROTOCOL)
        self._pickler.dispatch_table = self._table

    def _reduce_fixed(self, part: object) -> tuple[Any, ...]:
        return _fixed, (self._fixed_names[id(part)],)

    def event_bytes(self, event: Event, now: int) -> memoryview:
        """One event with its time; let go of the view before the next event."""
        buffer = self._buffer
        buffer.seek(0)
        buffer.truncate()
        self._pickler.clear_memo()
        code = _EVENT_CODES[type(event)]
        self._pickler.dump((now, code, *_EVENTS[code].pack(event)))
        return buffer.getbuffer()

    def state_bytes(self, state: State) -> bytes:
        """A whole state, between two events."""
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, _PROTOCOL)
        pickler.dispatch_table = self._table
        pickler.dump(state)
        return buffer.getvalue()

    def event(self, stored: bytes | memoryview) -> tuple[int, Event]:
        """(now, event). Raises InvariantViolation for bytes that name something else than the core's classes."""
        parts = self._read(stored)
        return parts[0], _EVENTS[parts[1]].unpack(parts[2:])

    def state(self, stored: bytes) -> State:
        """A state as it was. Raises InvariantViolation likewise."""
        state = self._read(stored)
        if not isinstance(state, State):
            raise InvariantViolation(f"the journal's snapshot holds a {type(state).__name__}")
        return state

    def _read(self, stored: bytes | memoryview) -> Any:
        return _Reader(io.BytesIO(stored), self._fixed_parts).load()


class _Reader(pickle.Unpickler):
    """Finds what is allowed, by name; nothing else can be reached from stored bytes."""

    def __init__(self, file: io.BytesIO, fixed_parts: dict[str, Any]) -> None:
        super().__init__(file)
        self._fixed_parts = fixed_parts

    def find_class(self, module: str, name: str) -> Any:
        """The allowed thing of that name. Raises InvariantViolation."""
        key = (module, name)
        if key == _FIXED:
            return self._fixed_parts.__getitem__
        for allowed in (_CLASSES, _OTHERS, _NUMPY):
            if key in allowed:
                return allowed[key]
        raise InvariantViolation(f"the journal names {module}.{name}, which is nothing that it may hold")
