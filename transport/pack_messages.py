"""What two movers say to each other about pages that are packed before they are read: NIXL notifications.

reader                         packer
│── Ask(pages, lease) ─────────►│  copies the pages side by side into a slot of its ring, turned if so asked
│◄───────────── Packed(slot) ───│
│── READ of the slot ──────────►│  its notification, behind the last byte, is Done(ask)
│── Done(ask) ─────────────────►│  for an ask whose answer is not needed any more
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvmanager.errors import InvalidArgument
from kvmanager.transport.turned_pages import Turn

U64Array = npt.NDArray[np.uint64]

_MAGIC: Final = b"kvp1"
_ASK: Final = struct.Struct("<4scQQQII")
_TURNED: Final = struct.Struct("<4scQQQIII")
_PACKED: Final = struct.Struct("<4scQQi")
_SHORT: Final = struct.Struct("<4scQ")


@dataclass(frozen=True)
class Ask:
    """Pack these pages: `addresses` uint64[pages] in the packer's process, `page_bytes` each.

    `lease_ns`: how long the slot stays as it is, from when this came. `metadata`: of the reader's agent. `turn`: how
    the pages are to be turned; None: as they are.
    """

    ask_id: int
    page_bytes: int
    lease_ns: int
    addresses: U64Array
    metadata: bytes
    turn: Turn | None = None

    def encode(self) -> bytes:
        """The message."""
        numbers = (self.ask_id, self.page_bytes, self.lease_ns, len(self.addresses), len(self.metadata))
        rest = self.addresses.astype("<u8").tobytes() + self.metadata
        if self.turn is None:
            return _ASK.pack(_MAGIC, b"A", *numbers) + rest
        turn = self.turn.encode()
        return _TURNED.pack(_MAGIC, b"T", *numbers, len(turn)) + rest + turn

    @classmethod
    def decode(cls, message: bytes) -> Ask:
        """The other way. Raises InvalidArgument, struct.error."""
        head = _TURNED if message[4:5] == b"T" else _ASK
        ask_id, page_bytes, lease_ns, pages, metadata_bytes, *turn_bytes = head.unpack_from(message)[2:]
        at = head.size + 8 * pages
        if len(message) != at + metadata_bytes + sum(turn_bytes):
            raise InvalidArgument(f"a torn message of {len(message)} bytes from another mover: pages lack")
        addresses = np.frombuffer(message, "<u8", pages, head.size).astype(np.uint64)
        turn = Turn.decode(message[at + metadata_bytes :]) if turn_bytes else None
        return cls(ask_id, page_bytes, lease_ns, addresses, message[at : at + metadata_bytes], turn)


@dataclass(frozen=True)
class Packed:
    """They lie at `address` of the packer's process, on its GPU number `gpu` (None: in host memory)."""

    ask_id: int
    address: int
    gpu: int | None

    def encode(self) -> bytes:
        """The message."""
        return _PACKED.pack(_MAGIC, b"P", self.ask_id, self.address, -1 if self.gpu is None else self.gpu)


@dataclass(frozen=True)
class Refused:
    """They can't be packed."""

    ask_id: int
    why: str

    def encode(self) -> bytes:
        """The message."""
        return _SHORT.pack(_MAGIC, b"R", self.ask_id) + self.why.encode()


@dataclass(frozen=True)
class Done:
    """The reader needs the slot of an ask no more."""

    ask_id: int

    def encode(self) -> bytes:
        """The message."""
        return _SHORT.pack(_MAGIC, b"D", self.ask_id)


def decode(message: bytes) -> Ask | Packed | Refused | Done:
    """The message in these bytes. Raises InvalidArgument."""
    kind = message[4:5] if message[:4] == _MAGIC else b""
    try:
        if kind in (b"A", b"T"):
            return Ask.decode(message)
        if kind == b"P":
            _, _, ask_id, address, gpu = _PACKED.unpack(message)
            return Packed(ask_id, address, None if gpu < 0 else gpu)
        if kind == b"R":
            _, _, ask_id = _SHORT.unpack_from(message)
            return Refused(ask_id, message[_SHORT.size :].decode(errors="replace"))
        if kind == b"D":
            _, _, ask_id = _SHORT.unpack(message)
            return Done(ask_id)
    except struct.error as error:
        raise InvalidArgument(f"a torn message of {len(message)} bytes from another mover: {error}") from error
    raise InvalidArgument(f"a message of {len(message)} bytes from another mover that this version does not know")
