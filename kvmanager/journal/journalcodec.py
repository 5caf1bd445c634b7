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
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Final, get_args

import numpy as np

from kvmanager import allocators, core, errors, geometry, layout, units
from kvmanager.core.events import Event
from kvmanager.core.eviction import POLICIES, Policy
from kvmanager.core.spec import GroupSpec, Limits
from kvmanager.core.state import State
from kvmanager.errors import InvariantViolation
from kvmanager.journal import flatvalues, hotevents
from kvmanager.journal.flatvalues import Flat, is_value

_PROTOCOL: Final = 5
_FIRST_CODE: Final = 0x4000
"""First of our copyreg extension codes: a class takes three bytes in a record."""
_SEED: Final = b"kvmanager.journal/2"
_LARGE_BYTES: Final = 4096
"""Arrays from here on are written where they lie."""
Buffer = bytes | bytearray | memoryview


def _modules(package: ModuleType) -> list[ModuleType]:
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


_STORED_MODULES: Final = (*_modules(core), *_modules(allocators), errors, geometry)
_CODE_MODULES: Final = (*_STORED_MODULES, layout, units, hotevents, flatvalues, sys.modules[__name__])


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

for _number, (_module, _name) in enumerate([*_CLASSES, (__name__, "_value")], _FIRST_CODE):
    copyreg.add_extension(_module, _name, _number)


_EVENTS: Final = [Flat(kind) for kind in sorted(get_args(Event), key=lambda kind: str(kind.__name__))]
_EVENT_CODES: Final[dict[type, int]] = {flat.kind: code for code, flat in enumerate(_EVENTS)}  # type: ignore[misc]
_VALUES: Final = [Flat(kind) for kind in _CLASSES.values() if is_value(kind)]


def _value(code: int, *parts: Any) -> Any:
    """Stands in a snapshot for the value class of that number."""
    return _VALUES[code].unpack(parts)


def _reducer(code: int, flat: Flat) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: (_value, (code, *flat.pack(value)))


_REDUCERS: Final[dict[type, Callable[[Any], Any]]] = {
    flat.kind: _reducer(code, flat)  # type: ignore[misc]
    for code, flat in enumerate(_VALUES)
}


def _fixed(name: str) -> Any:
    """Stands in the bytes for a part of the configuration; see `Codec`."""
    raise AssertionError(f"{name} is read by a Codec only")


_FIXED: Final = (_fixed.__module__, _fixed.__qualname__)
_VALUE: Final = (_value.__module__, _value.__qualname__)


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
    """Fingerprint of the source of all that decides how an event is written and how it changes the state."""
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

    def event_bytes(self, event: Event, now: int) -> bytes | memoryview:
        """One event with its time; let go of a view before the next event."""
        packed = hotevents.pack(event, now)
        if packed is not None:
            return packed
        buffer = self._buffer
        buffer.seek(0)
        buffer.truncate()
        self._pickler.clear_memo()
        code = _EVENT_CODES[type(event)]
        self._pickler.dump((now, code, *_EVENTS[code].pack(event)))
        return buffer.getbuffer()

    def state_parts(self, state: State) -> list[Buffer]:
        """A whole state, between two events: what to write, in order. Large arrays are not copied.

        Two lengths of 8 bytes a large array and one for all else come first, then the arrays, each padded to 8 bytes.
        """
        arrays: list[memoryview] = []

        def in_stream(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < _LARGE_BYTES:
                return True
            arrays.append(raw)
            return False

        stream = io.BytesIO()
        pickler = pickle.Pickler(stream, _PROTOCOL, buffer_callback=in_stream)
        pickler.dispatch_table = self._table
        pickler.dump(state)
        parts = [*arrays, stream.getbuffer()]
        index = np.array([len(arrays), *(part.nbytes for part in parts)], "<u8").tobytes()
        return [index, *(padded for part in parts for padded in (part, bytes(-part.nbytes % 8)) if len(padded))]

    def event(self, stored: bytes | memoryview) -> tuple[int, Event]:
        """(now, event). Raises InvariantViolation for bytes that name something else than the core's classes."""
        if hotevents.is_packed(stored):
            return hotevents.unpack(stored)
        parts = self._read(stored)
        return parts[0], _EVENTS[parts[1]].unpack(parts[2:])

    def state(self, stored: bytes) -> State:
        """A state as it was, of `state_parts`. Raises InvariantViolation likewise."""
        count = int(np.frombuffer(stored, "<u8", 1)[0])
        at = 8 * (count + 2)
        parts = []
        for size in np.frombuffer(stored, "<u8", count + 1, 8).tolist():
            parts.append(bytearray(stored[at : at + size]))
            at += size + -size % 8
        state = self._read(parts.pop(), parts)
        if not isinstance(state, State):
            raise InvariantViolation(f"the journal's snapshot holds a {type(state).__name__}")
        return state

    def _read(self, stored: Buffer, arrays: Sequence[bytearray] = ()) -> Any:
        return _Reader(io.BytesIO(stored), self._fixed_parts, arrays).load()


class _Reader(pickle.Unpickler):
    """Finds what is allowed, by name; nothing else can be reached from stored bytes."""

    def __init__(self, file: io.BytesIO, fixed_parts: dict[str, Any], arrays: Sequence[bytearray]) -> None:
        super().__init__(file, buffers=arrays)
        self._fixed_parts = fixed_parts

    def find_class(self, module: str, name: str) -> Any:
        """The allowed thing of that name. Raises InvariantViolation."""
        key = (module, name)
        if key == _FIXED:
            return self._fixed_parts.__getitem__
        if key == _VALUE:
            return _value
        for allowed in (_CLASSES, _OTHERS, _NUMPY):
            if key in allowed:
                return allowed[key]
        raise InvariantViolation(f"the journal names {module}.{name}, which is nothing that it may hold")
