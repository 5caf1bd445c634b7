"""Messages that nobody meant: random bytes, damaged good ones, and fields of every kind filled at random."""

from __future__ import annotations

import json
import random
import struct
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

EDGES: Final = (0, 1, 2, 3, 15, 16, 31, 32, 63, 64, 255, 256, 4095, 4096, 65535, 1 << 20, (1 << 31) - 1, 1 << 31,
                (1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
"""Numbers at which something ends."""
DEPTH: Final = 4
_BITS: Final = {
    FieldDescriptor.TYPE_UINT32: (32, False), FieldDescriptor.TYPE_UINT64: (64, False),
    FieldDescriptor.TYPE_INT32: (32, True), FieldDescriptor.TYPE_INT64: (64, True),
}  # fmt: skip
_FLOATS: Final = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


def number(dice: random.Random, bits: int, *, signed: bool) -> int:
    """Small, at an edge, or anything that fits."""
    kind = dice.random()
    value = dice.randrange(8) if kind < 0.4 else dice.choice(EDGES) if kind < 0.8 else dice.getrandbits(bits)
    value %= 1 << bits
    return value - (1 << bits) if signed and value >= 1 << (bits - 1) else value


def blob(dice: random.Random, most: int = 256) -> bytes:
    """Packed numbers, or bytes that are none."""
    kind = dice.random()
    if kind < 0.2:
        return b""
    if kind < 0.7:
        code, bits = dice.choice((("I", 32), ("Q", 64)))
        values = [number(dice, bits, signed=False) for _ in range(dice.randrange(1, 9))]
        return struct.pack(f"<{len(values)}{code}", *values)
    return dice.randbytes(dice.randrange(most))


def text(dice: random.Random, known: tuple[str, ...]) -> str:
    """A name that means something here, or one that does not."""
    kind = dice.random()
    if known and kind < 0.5:
        return dice.choice(known)
    if kind < 0.6:
        return ""
    letters = "aZ0/_-.:'\"\\ \n\x00\N{SNOWMAN}\N{COMBINING ACUTE ACCENT}{}%"
    return "".join(dice.choice(letters) for _ in range(dice.choice((1, 3, 40, 3000))))


def fill(dice: random.Random, message: Message, known: tuple[str, ...], depth: int = DEPTH) -> None:
    """Sets some of the fields."""
    for field in message.DESCRIPTOR.fields:
        if dice.random() < 0.35:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.message_type is not None:
            if depth == 0:
                continue
            if field.is_repeated:
                for _ in range(dice.choice((0, 1, 1, 2, 5))):
                    fill(dice, getattr(message, field.name).add(), known, depth - 1)
            else:
                getattr(message, field.name).SetInParent()
                fill(dice, getattr(message, field.name), known, depth - 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(_value(dice, field, known) for _ in range(dice.choice((0, 1, 3))))
        else:
            setattr(message, field.name, _value(dice, field, known))


def _value(dice: random.Random, field: FieldDescriptor, known: tuple[str, ...]) -> Any:
    if field.type in _BITS:
        bits, signed = _BITS[field.type]
        return number(dice, bits, signed=signed)
    if field.type == FieldDescriptor.TYPE_ENUM:
        assert field.enum_type is not None
        return dice.choice([*(value.number for value in field.enum_type.values), 77])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return dice.random() < 0.5
    if field.type in _FLOATS:
        return dice.choice((0.0, -1.0, 1e300, float("nan"), float("inf")))
    return blob(dice) if field.type == FieldDescriptor.TYPE_BYTES else text(dice, known)


def damaged(dice: random.Random, good: bytes) -> bytes:
    """Some bits turned, bytes cut out, doubled, or put in."""
    data = bytearray(good)
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(data) + 1)
        kind = dice.randrange(4)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del data[at : at + dice.randrange(1, 9)]
        elif kind == 2:
            data[at:at] = data[max(at - 8, 0) : at]
        else:
            data[at:at] = dice.randbytes(dice.randrange(1, 9))
    return bytes(data)


def frame(dice: random.Random) -> tuple[bytes, int]:
    """What somebody writes into the attach socket, and how many descriptors go with it."""
    kind = dice.randrange(6)
    if kind == 0:
        return dice.randbytes(dice.randrange(1, 200)), 0
    if kind == 1:  # a header that promises what does not come, or more than is taken
        return struct.pack("<II", dice.choice(EDGES) % (1 << 32), dice.choice(EDGES) % (1 << 32)) + b"{}", 0
    roles = ("engine", "worker", "operator", "reader", "peer", "", "root", None, 7, [], {"a": 1})
    said: dict[str, Any] = {"role": dice.choice(roles), "name": dice.choice(("n", "", "x" * 201, None, 3, "\x00"))}
    if kind == 2:
        said = dice.choice(({"fds_for": number(dice, 64, signed=False)}, {"fds_for": "1"}, {"fds_for": True}, {}))
    if kind == 3:
        said |= {"leave": True}
    payload = json.dumps(said).encode()
    if kind == 4:
        payload = b"[" * dice.choice((1, 100, 60_000)) if dice.random() < 0.3 else damaged(dice, payload)
    fds = dice.choice((0, 0, 0, 1, 3))
    announced = fds if dice.random() < 0.7 else dice.randrange(70)
    whole = struct.pack("<II", len(payload), announced) + payload
    return (whole + whole if dice.random() < 0.2 else whole[: dice.randrange(1, len(whole) + 1)]), fds
