"""Values as plain tuples: what comes back is equal to the last bit, one by one and by columns."""

from __future__ import annotations

import hashlib
import marshal
import pickle
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from kvmanager.core.digest import _Walk
from kvmanager.core.events import Grown, Opened, RequestFailed, ResidencyRows, SpanRunTable, StepDone
from kvmanager.core.plans import Box, CopyPlan, PagedCopies, PlacedPages, Purpose
from kvmanager.errors import PoolExhausted
from kvmanager.journal.flatvalues import Flat

RANDOM = np.random.default_rng(7)


def digest(value: object) -> str:
    walk = _Walk()
    walk.value(value)
    return hashlib.sha256(marshal.dumps(walk.parts, 2)).hexdigest()


def back(value: object) -> object:
    flat = Flat(type(value))
    return flat.unpack(pickle.loads(pickle.dumps(flat.pack(value))))


def array(length: int, dtype: type = np.int64) -> npt.NDArray:
    return RANDOM.integers(0, 1 << 30, length).astype(dtype)


def copies(length: int) -> PagedCopies:
    box = Box(1, 2, 3, 4, 5, 6, (3, 4), (640, 64), (640, 128), 64)
    sides = [PlacedPages(array(length), 1, array(1), array(1)) for _ in range(2)]
    return PagedCopies(1, 2, length, sides[0], sides[1], (box,) * length)


def table(spans: int) -> SpanRunTable:
    pages = {"kv": (array(spans), array(spans)), "indexer": (array(spans), array(0))}
    return SpanRunTable("main", 3, array(spans), array(spans, np.int32), array(spans, np.int32),
                        array(spans, np.uint64), pages)  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_a_reply_with_many_of_a_kind_comes_back(count: int) -> None:
    plan = CopyPlan(5, Purpose.COPY_ON_WRITE, tuple(copies(1 + number % 3) for number in range(count)))
    opened = tuple(
        Opened(number, "runnable", 5, (table(number), table(2)), (plan,), None if number % 2 else array(4))
        for number in range(count)
    )
    grown = tuple(Grown(number, (table(1),), 3, None) for number in range(count))
    rows = tuple(ResidencyRows(number, "kv", array(number), array(3), array(0)) for number in range(count))
    errors = (RequestFailed(1, PoolExhausted("full", pool="p", needed=3)),) * count
    reply = StepDone(9, opened, grown, rows, (), errors)
    assert str(back(reply).errors) == str(errors)  # type: ignore[attr-defined]
    alike = StepDone(9, opened, grown, rows)
    assert digest(back(alike)) == digest(alike)


@dataclass(frozen=True)
class One:
    """One array."""

    values: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Many:
    """Many of them."""

    ones: tuple[One, ...]
    named: dict[str, One]
    pair: tuple[int, One]


ODD = {
    "lengths": [array(number % 4) for number in range(20)],
    "types": [array(3, np.int64 if number % 2 else np.int32) for number in range(20)],
    "shapes": [array(6).reshape(2, 3) if number % 2 else array(6) for number in range(20)],
    "strided": [array(12)[::2] for number in range(20)],
    "empty": [array(0) for number in range(20)],
    "bools": [array(5) > 1 << 29 for number in range(20)],
}


@pytest.mark.parametrize("kind", ODD)
def test_columns_keep_each_array_as_it_was(kind: str) -> None:
    ones = tuple(map(One, ODD[kind]))
    value = Many(ones, {"a": ones[0], "b": ones[1]}, (5, ones[2]))
    again = back(value)
    assert isinstance(again, Many)
    for mine, theirs in zip((*ones, *value.named.values(), value.pair[1]),
                            (*again.ones, *again.named.values(), again.pair[1]), strict=True):  # fmt: skip
        assert mine.values.dtype == theirs.values.dtype
        assert mine.values.shape == theirs.values.shape
        assert (mine.values == theirs.values).all()
        assert theirs.values.flags.writeable
    again.ones[0].values[:] = 0
    assert all((one.values == other).all() for one, other in zip(again.ones[1:], ODD[kind][1:], strict=True))
