"""Values of the core as plain tuples, and back: what naming classes and arrays one by one costs is most of a pickle.

How a field is packed follows from its type hint: values within values, tuples and dictionaries of them, and arrays.
Everything else stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import UnionType
from typing import Any, Final, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

_NOTHING: Final = ()
_COLUMNS_FROM: Final = 8
"""As many values of one class are packed by field: what belongs to a field is one array, or one list."""


class Packing(NamedTuple):
    """How the values of one hint are turned into plain ones, and back: one, or a column of them."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    pack_column: Callable[[Sequence[Any]], Any]
    unpack_column: Callable[[Any], Sequence[Any]]


def is_value(kind: Any) -> bool:
    """Whether it is the class of a frozen dataclass that its fields make up: stored as a call with them."""
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return False
    frozen: bool = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return frozen and all(field.init and not field.kw_only for field in dataclasses.fields(kind))


class Flat:
    """A value as a tuple of its fields."""

    def __init__(self, kind: type) -> None:
        self.kind: Callable[..., Any] = kind
        names = [field.name for field in dataclasses.fields(kind)]
        hints = get_type_hints(kind)
        self._get: Callable[[Any], tuple[Any, ...]] = (
            attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)
        )
        packings = [_packing(hints[name]) for name in names]
        self._nested = [(place, packing) for place, packing in enumerate(packings) if packing is not None]

    def pack(self, value: Any) -> tuple[Any, ...]:
        """The fields."""
        if not self._nested:
            return self._get(value)
        parts = list(self._get(value))
        for place, packing in self._nested:
            part = parts[place]
            if part is not None and part is not _NOTHING:
                parts[place] = packing.pack(part)
        return tuple(parts)

    def unpack(self, parts: tuple[Any, ...]) -> Any:
        """The value again."""
        if not self._nested:
            return self.kind(*parts)
        fields = list(parts)
        for place, packing in self._nested:
            part = fields[place]
            if part is not None and part is not _NOTHING:
                fields[place] = packing.unpack(part)
        return self.kind(*fields)

    def pack_many(self, values: Sequence[Any]) -> tuple[Any, ...] | list[Any]:
        """A tuple of packed values, or a list of columns where there are many."""
        if len(values) < _COLUMNS_FROM:
            return tuple(map(self.pack, values))
        columns: list[Any] = list(zip(*map(self._get, values), strict=True))
        for place, packing in self._nested:
            columns[place] = packing.pack_column(columns[place])
        return columns

    def unpack_many(self, parts: tuple[Any, ...] | list[Any]) -> tuple[Any, ...]:
        """The values again."""
        if isinstance(parts, tuple):
            return tuple(map(self.unpack, parts))
        columns = list(parts)
        for place, packing in self._nested:
            columns[place] = packing.unpack_column(columns[place])
        return tuple(map(self.kind, *columns))


def _one_by_one(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Packing:
    """Of a column, each by itself; None stays."""
    return Packing(
        pack,
        unpack,
        lambda values: [None if value is None else pack(value) for value in values],
        lambda parts: [None if part is None else unpack(part) for part in parts],
    )


def _pack_array(array: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    assert array.dtype.isnative
    return array.dtype.char, array.shape, array.tobytes()


def _unpack_array(parts: tuple[str, tuple[int, ...], bytes]) -> npt.NDArray[Any]:
    char, shape, text = parts
    return np.frombuffer(bytearray(text), char).reshape(shape)


def _pack_arrays(arrays: Sequence[npt.NDArray[Any] | None]) -> tuple[Any, ...] | list[Any]:
    """Those of one dimension and type as one, with the length of each."""
    if all(array is not None and array.ndim == 1 and array.dtype == arrays[0].dtype for array in arrays):  # type: ignore[union-attr]
        lengths = [len(array) for array in arrays]  # type: ignore[arg-type]
        return (lengths, *_pack_array(np.concatenate(arrays)))  # type: ignore[arg-type]
    return [None if array is None else _pack_array(array) for array in arrays]


def _unpack_arrays(parts: tuple[Any, ...] | list[Any]) -> Sequence[Any]:
    if isinstance(parts, list):
        return [None if part is None else _unpack_array(part) for part in parts]
    ends = np.cumsum(parts[0])
    whole = _unpack_array(parts[1:])
    return [whole[end - length : end].copy() for end, length in zip(ends.tolist(), parts[0], strict=True)]


_ARRAY = Packing(_pack_array, _unpack_array, _pack_arrays, _unpack_arrays)


def _packing(hint: Any) -> Packing | None:
    """None where values stay as they are."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is np.ndarray:
        return _ARRAY
    if is_value(hint):
        flat = Flat(hint)
        return _one_by_one(flat.pack, flat.unpack)
    if origin is UnionType and len(arguments) == 2 and arguments[1] is type(None):
        return _packing(arguments[0])
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _of_many(arguments[0])
    if origin is tuple:
        return _of_each([_packing(argument) for argument in arguments])
    if origin is dict:
        return _of_dict(_packing(arguments[1]))
    return None


def _of_many(hint: Any) -> Packing | None:
    if is_value(hint):
        flat = Flat(hint)
        return _one_by_one(flat.pack_many, flat.unpack_many)
    item = _packing(hint)
    if item is None:
        return None
    pack, unpack = item.pack, item.unpack
    return _one_by_one(lambda values: tuple(map(pack, values)), lambda parts: tuple(map(unpack, parts)))


def _of_each(items: list[Packing | None]) -> Packing | None:
    if all(item is None for item in items):
        return None
    as_is = _one_by_one(lambda value: value, lambda part: part)
    found = [item or as_is for item in items]
    return _one_by_one(
        lambda values: tuple(item.pack(value) for item, value in zip(found, values, strict=True)),
        lambda parts: tuple(item.unpack(part) for item, part in zip(found, parts, strict=True)),
    )


def _of_dict(item: Packing | None) -> Packing | None:
    if item is None:
        return None
    pack, unpack = item.pack, item.unpack
    return _one_by_one(
        lambda values: {key: pack(value) for key, value in values.items()},
        lambda parts: {key: unpack(part) for key, part in parts.items()},
    )
