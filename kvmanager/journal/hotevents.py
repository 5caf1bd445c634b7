"""The events that a serving node has most of as packed numbers: some two thirds of a pickle's time.

    Step           code, now, epoch, number, notices seen, counts | fence: ids, values | engine | rows and their keys
    TimelinesRead  code, now, count | ids, values

Little-endian. A step that opens or closes a request or gives token ids, and a number that does not fit, is
stored the other way.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any, Final

from kvmanager.core.events import Event, Progress, Step, TimelinesRead

_STEP_CODE: Final = 1
_TIMELINES_CODE: Final = 2
_STEP: Final = "<BqQQQHHB"
_TIMELINES: Final = "<BqH"
_ROW: Final = struct.Struct("<QQQQI")


@functools.cache
def _with_pairs(head: str, count: int) -> struct.Struct:
    """A head and as many pairs of words behind it."""
    return struct.Struct(f"{head}{2 * count}Q")


def _pack_step(step: Step, now: int) -> bytes | None:
    if step.opens or step.closes or step.turn_ends:
        return None
    fence, rows, name = step.fence, step.progress, step.engine.encode()
    count = len(fence)
    head = _with_pairs(_STEP, count).pack(
        _STEP_CODE, now, step.epoch, step.number, step.notices_seen, count, len(rows), len(name), *fence,
        *fence.values(),
    )  # fmt: skip
    parts = [head, name]
    for row in rows:
        keys = row.new_keys
        if row.token_ids:
            return None
        parts += (
            _ROW.pack(row.request_id, row.capacity_tokens, row.committed_tokens, row.rejected_tokens, len(keys)), keys
        )  # fmt: skip
    return b"".join(parts)


def _pack_timelines(read: TimelinesRead, now: int) -> bytes:
    values = read.values
    count = len(values)
    return _with_pairs(_TIMELINES, count).pack(_TIMELINES_CODE, now, count, *values, *values.values())


_PACKERS: Final[dict[type, Callable[[Any, int], bytes | None]]] = {Step: _pack_step, TimelinesRead: _pack_timelines}


def pack(event: Event, now: int) -> bytes | None:
    """The event with its time; None when it is to be stored the other way."""
    packer = _PACKERS.get(type(event))
    if packer is None:
        return None
    try:
        return packer(event, now)
    except struct.error:
        return None


def is_packed(stored: bytes | memoryview) -> bool:
    """Whether `pack` made it; a pickle begins otherwise."""
    return stored[0] in (_STEP_CODE, _TIMELINES_CODE)


def unpack(stored: bytes | memoryview) -> tuple[int, Event]:
    """(now, event) of what `pack` made."""
    return _unpack_step(stored) if stored[0] == _STEP_CODE else _unpack_timelines(stored)


def _unpack_step(stored: bytes | memoryview) -> tuple[int, Event]:
    _, now, epoch, number, notices_seen, fenced, count, name_bytes = struct.unpack_from(_STEP, stored)
    fence, at = _pairs(stored, _STEP, fenced)
    name = bytes(stored[at : at + name_bytes]).decode()
    at += name_bytes
    rows = []
    for _ in range(count):
        request_id, capacity, committed, rejected, key_bytes = _ROW.unpack_from(stored, at)
        at += _ROW.size + key_bytes
        rows.append(Progress(request_id, capacity, committed, rejected, bytes(stored[at - key_bytes : at])))
    assert at == len(stored), "a step is as long as its counts say"
    return now, Step(name, epoch, number, notices_seen, fence, tuple(rows))


def _unpack_timelines(stored: bytes | memoryview) -> tuple[int, Event]:
    _, now, count = struct.unpack_from(_TIMELINES, stored)
    return now, TimelinesRead(_pairs(stored, _TIMELINES, count)[0])


def _pairs(stored: bytes | memoryview, head: str, count: int) -> tuple[dict[int, int], int]:
    """The pairs behind a head, and where they end."""
    whole = _with_pairs(head, count)
    words = whole.unpack_from(stored)[-2 * count :] if count else ()
    return dict(zip(words[:count], words[count:], strict=True)), whole.size
