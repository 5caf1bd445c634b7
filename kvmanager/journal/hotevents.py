"""The events that a serving node has most of as packed numbers: some two thirds of a pickle's time.

    Step           code, now, epoch, number, notices seen, counts | fence: ids, values | engine | rows and their keys
    TimelinesRead  code, now, count | ids, values
    ReserveSpans, AcquirePrefix
                   code, now, epoch, request, ttl, lengths | engine, session, name, keys, token ids
    EndLease       code, now, epoch, request, committed tokens, committed, counts | fence: ids, values | seen | engine

Little-endian. A step that opens or closes a request or gives token ids, an end of a lease with sums or failures, and a
number that does not fit, is stored the other way.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any, Final

from kvmanager.core.events import Event, Progress, Step, TimelinesRead
from kvmanager.core.leaseevents import AcquirePrefix, EndLease, ReserveSpans

_STEP_CODE: Final = 1
_TIMELINES_CODE: Final = 2
_RESERVE_CODE: Final = 3
_ACQUIRE_CODE: Final = 4
_END_CODE: Final = 5
_STEP: Final = "<BqQQQHHB"
_TIMELINES: Final = "<BqH"
_LEASE: Final = struct.Struct("<BqQQQHHHII")
_END: Final = "<BqQQQBHHH"
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


def _pack_reserve(asked: ReserveSpans, now: int) -> bytes:
    engine, session, name = asked.engine.encode(), asked.session_id.encode(), asked.name.encode()
    keys, token_ids = asked.keys, asked.token_ids
    head = _LEASE.pack(
        _RESERVE_CODE, now, asked.epoch, asked.request_id, asked.lease_ttl_ns, len(engine), len(session), len(name),
        len(keys), len(token_ids),
    )  # fmt: skip
    return b"".join((head, engine, session, name, keys, token_ids))


def _pack_acquire(asked: AcquirePrefix, now: int) -> bytes:
    engine, name, keys = asked.engine.encode(), asked.name.encode(), asked.keys
    head = _LEASE.pack(
        _ACQUIRE_CODE, now, asked.epoch, asked.request_id, asked.lease_ttl_ns, len(engine), 0, len(name), len(keys), 0
    )
    return b"".join((head, engine, name, keys))


def _pack_end(end: EndLease, now: int) -> bytes | None:
    if end.failed_pages or end.failure or end.summed_pages or end.sums:
        return None
    fence, seen, engine = end.fence, end.seen, end.engine.encode()
    head = _with_pairs(_END, len(fence) + len(seen)).pack(
        _END_CODE, now, end.epoch, end.request_id, end.committed_tokens, end.committed, len(fence), len(seen),
        len(engine), *fence, *fence.values(), *seen, *seen.values(),
    )  # fmt: skip
    return head + engine


_PACKERS: Final[dict[type, Callable[[Any, int], bytes | None]]] = {
    Step: _pack_step,
    TimelinesRead: _pack_timelines,
    ReserveSpans: _pack_reserve,
    AcquirePrefix: _pack_acquire,
    EndLease: _pack_end,
}


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
    return stored[0] in _UNPACKERS


def unpack(stored: bytes | memoryview) -> tuple[int, Event]:
    """(now, event) of what `pack` made."""
    return _UNPACKERS[stored[0]](stored)


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


def _unpack_lease(stored: bytes | memoryview) -> tuple[int, Event]:
    code, now, epoch, request_id, ttl_ns, *lengths = _LEASE.unpack_from(stored)
    at, parts = _LEASE.size, []
    for length in lengths:
        parts.append(bytes(stored[at : at + length]))
        at += length
    assert at == len(stored), "a lease's event is as long as its counts say"
    engine, session, name = (part.decode() for part in parts[:3])
    keys, token_ids = parts[3:]
    if code == _ACQUIRE_CODE:
        return now, AcquirePrefix(engine, epoch, request_id, keys, ttl_ns, name)
    return now, ReserveSpans(engine, epoch, request_id, keys, ttl_ns, session, token_ids, name)


def _unpack_end(stored: bytes | memoryview) -> tuple[int, Event]:
    _, now, epoch, request_id, tokens, committed, fenced, seen, name_bytes = struct.unpack_from(_END, stored)
    whole = _with_pairs(_END, fenced + seen)
    words = whole.unpack_from(stored)[-2 * (fenced + seen) :] if fenced + seen else ()
    pairs = [
        dict(zip(some[: len(some) // 2], some[len(some) // 2 :], strict=True))
        for some in (words[: 2 * fenced], words[2 * fenced :])
    ]
    assert whole.size + name_bytes == len(stored), "a lease's end is as long as its counts say"
    engine = bytes(stored[whole.size :]).decode()
    fence, shown = pairs
    return now, EndLease(engine, epoch, request_id, fence, bool(committed), tokens, seen=shown)


_UNPACKERS: Final[dict[int, Callable[[bytes | memoryview], tuple[int, Event]]]] = {
    _STEP_CODE: _unpack_step,
    _TIMELINES_CODE: _unpack_timelines,
    _RESERVE_CODE: _unpack_lease,
    _ACQUIRE_CODE: _unpack_lease,
    _END_CODE: _unpack_end,
}
