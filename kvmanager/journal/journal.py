r"""The journal: every event that changed the core, in memory that outlives the daemon.

The core is deterministic, so a snapshot of its state and the events since make the same state again, stored
replies included. An event is appended after the core has applied it and before any of its effects leaves:

    page 0   [magic | version | size of a half | boot id, twice]
    half 0   [header | snapshot | record record ...     ]      header: sequence, who wrote it, length and checksum
    half 1   [header | snapshot | record record ... torn]      record: length, checksum, bytes

A snapshot goes into the half that is not in use, and counts once its header is there, which is written last: a
kill at any byte leaves one complete half. The checksum of a record begins with its half's sequence number, so that
what an earlier use of the half left behind never passes for one; what does not check ends the log.

The file is a sparse memfd of fixed size. It takes what is written: one snapshot and at most `LOG_BYTES` and one
record of log, and while a snapshot is made a second one. A half that can't hold that stops the daemon.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvmanager.core.events import Event
from kvmanager.core.node import Node
from kvmanager.errors import ConfigError, InvariantViolation
from kvmanager.journal.journalcodec import CODE, SCHEMA, Buffer, Codec
from kvmanager.killpoints import reach
from kvmanager.units import MIB

HALF_BYTES: Final = 512 * MIB
LOG_BYTES: Final = 32 * MIB
"""Log beyond which a snapshot is due at once; an eighth of it is enough when the core has nothing else to do."""
REPLAY_S: Final = 0.5
"""Core time in the log beyond which a snapshot is due at once: what a replay takes. Half of it when idle."""

_MAGIC: Final = b"kvmjrnl\0"
_VERSION: Final = 2
_PAGE: Final = mmap.PAGESIZE
_BOOT_AT: Final = 256
"""Where the two latest boot ids lie, in every version: a torn one leaves the other."""
_BOOT: Final = struct.Struct("<QI")
_TOP: Final = struct.Struct("<8sIQ")
_HEAD: Final = struct.Struct("<8sQ64s64s64sQII")
_RECORD: Final = struct.Struct("<II")
_PARTS_MOST: Final = 512
"""Of one write; the kernel takes 1024."""
_log = logging.getLogger("kvmanager.journal")


class JournalMismatch(ConfigError):
    """What is stored was written by another program or for another configuration."""


@dataclass(frozen=True)
class Fingerprints:
    """Who wrote a journal: 64 hex digits each."""

    configuration: str
    schema: str = SCHEMA
    code: str = CODE

    def check(self, stored: Fingerprints, *, log_empty: bool) -> None:
        """Raises JournalMismatch where these can't go on from what `stored` ones wrote."""
        for what, ours, theirs in (
            ("configuration (memory groups, limits or policy)", self.configuration, stored.configuration),
            ("program, with other stored classes,", self.schema, stored.schema),
        ):
            if ours != theirs:
                raise JournalMismatch(
                    f"the node's memory was left by a daemon with another {what} than this one: {theirs[:12]}, not "
                    f"{ours[:12]}; start what was running before, or give up the cache with `kvmanager serve --cold`"
                )
        if not log_empty and self.code != stored.code:
            raise JournalMismatch(
                f"the node's memory was left by another version of the core ({stored.code[:12]}, not "
                f"{self.code[:12]}) that had no time to write a snapshot; start that version once more and upgrade "
                "with `kvmanager upgrade`, or give up the cache with `kvmanager serve --cold`"
            )


@dataclass(frozen=True)
class _Half:
    """A complete half. `prints`: who wrote it; `log_start`: offset of the first record within the file."""

    number: int
    sequence: int
    prints: Fingerprints
    snapshot: bytes
    log_start: int


def file_bytes(half_bytes: int) -> int:
    """Size of a journal's file."""
    return _PAGE + 2 * half_bytes


class Journal:
    """Appends events and makes snapshots; one thread. The descriptor stays the caller's."""

    def __init__(self, fd: int, codec: Codec, fingerprints: Fingerprints, half_bytes: int = HALF_BYTES) -> None:
        """On the file of `create`. Call `snapshot` for a new one, `recover` for an old one, before anything else."""
        assert half_bytes % _PAGE == 0
        self._fd = fd
        self._memory = mmap.mmap(fd, file_bytes(half_bytes))
        self._codec = codec
        self._prints = fingerprints
        self._half_bytes = half_bytes
        self._sequence = 0
        self._at = 0  # where the next record goes
        self._end = 0
        self._log_bytes = 0
        self._spent_s = 0.0
        self._seed = 0
        self.snapshot_bytes = 0
        self.snapshot_s = 0.0

    def close(self) -> None:
        """Lets go of the file's mapping; the journal stays."""
        self._memory.close()

    # ------------------------------------------------------------------------------ writing

    def append(self, event: Event, now: int, spent_s: float) -> None:
        """One event that the core has applied, which took it `spent_s`. Raises InvariantViolation when it is full."""
        reach("daemon.journal.append")
        stored = self._codec.event_bytes(event, now)
        first = self._at + _RECORD.size
        end = first + len(stored)
        if end > self._end:
            raise InvariantViolation(f"a half of the journal, {self._half_bytes} bytes, is full")
        reach("daemon.journal.append")
        self._memory[first:end] = stored
        self._memory[self._at : first] = _RECORD.pack(len(stored), zlib.crc32(stored, self._seed))
        self._log_bytes += end - self._at
        self._at = end
        self._spent_s += spent_s

    def record(self, event: Event, now: int) -> bytes:
        """The bytes that `append` would write."""
        stored = self._codec.event_bytes(event, now)
        return _RECORD.pack(len(stored), zlib.crc32(stored, self._seed)) + bytes(stored)

    def due(self, *, idle: bool) -> bool:
        """Whether a snapshot should be made now; `idle`: the core has nothing else to do."""
        if idle:
            return self._log_bytes > LOG_BYTES // 8 or self._spent_s > REPLAY_S / 2
        return self._log_bytes > LOG_BYTES or self._spent_s > REPLAY_S

    @property
    def log_bytes(self) -> int:
        """Bytes of records since the last snapshot."""
        return self._log_bytes

    def snapshot(self, node: Node) -> None:
        """Puts the state into the other half and goes on there. Raises InvariantViolation when it does not fit."""
        start = time.perf_counter()
        parts = self._codec.state_parts(node.state)
        length = sum(len(part) for part in parts)
        sequence = self._sequence + 1
        base = self._base(sequence % 2)
        log_start = base + _HEAD.size + length
        if log_start + LOG_BYTES > base + self._half_bytes:
            raise InvariantViolation(
                f"a snapshot of {length} bytes and its log do not fit half a journal, {self._half_bytes} bytes"
            )
        self._forget(base, self._half_bytes)
        checksum = _write(self._fd, parts, base + _HEAD.size)
        reach("daemon.journal.snapshot")
        self._write_head(base, sequence, length, checksum)
        older = self._sequence
        self._follow(sequence, log_start)
        if older:
            self._forget(self._base(older % 2), self._half_bytes)
        self.snapshot_bytes = length
        self.snapshot_s = time.perf_counter() - start

    def _write_head(self, base: int, sequence: int, length: int, checksum: int) -> None:
        prints = self._prints
        names = [name.encode() for name in (prints.configuration, prints.schema, prints.code)]
        head = _HEAD.pack(_MAGIC, sequence, *names, length, checksum, 0)[:-4]
        self._memory[base : base + _HEAD.size] = head + zlib.crc32(head).to_bytes(4, "little")

    def _base(self, half: int) -> int:
        return _PAGE + half * self._half_bytes

    def _follow(self, sequence: int, at: int) -> None:
        self._sequence = sequence
        self._seed = sequence & 0xFFFFFFFF
        self._at = at
        self._end = self._base(sequence % 2) + self._half_bytes
        self._log_bytes = 0
        self._spent_s = 0.0

    def _forget(self, start: int, size: int) -> None:
        """Gives whole pages back to the host; they read as zeros."""
        first = -(-start // _PAGE) * _PAGE
        self._memory[start:first] = bytes(first - start)
        if first < start + size:
            self._memory.madvise(mmap.MADV_REMOVE, first, start + size - first)

    # ------------------------------------------------------------------------------ reading

    def recover(self) -> Node:
        """The core as it was when the last whole record was written; what came after that is dropped.

        Raises JournalMismatch for a file of another program or configuration, InvariantViolation for one that no
        kill can have left behind.
        """
        halves = [half for half in map(self._half, (0, 1)) if half is not None]
        if not halves:
            raise InvariantViolation("neither half of the journal is complete")
        half = max(halves, key=lambda each: each.sequence)
        records, end = self._records(half)
        self._prints.check(half.prints, log_empty=not records)
        node = Node.of(self._codec.state(half.snapshot))
        start = time.perf_counter()
        for record in records:
            now, event = self._codec.event(record)
            node.apply(event, now)
        spent_s = time.perf_counter() - start
        self._follow(half.sequence, end)
        self._log_bytes = end - half.log_start
        self._spent_s = spent_s
        self.snapshot_bytes = len(half.snapshot)
        # A torn record's bytes are a client's: they must never be read as records that follow what comes next.
        self._forget(end, self._end - end)
        if self._prints != half.prints:
            self.snapshot(node)
        _log.info(
            "read a snapshot of %d bytes and %d events, replayed in %.3f s", len(half.snapshot), len(records), spent_s
        )
        return node

    def _half(self, number: int) -> _Half | None:
        base = self._base(number)
        head = self._memory[base : base + _HEAD.size]
        magic, sequence, *names, length, checksum, own = _HEAD.unpack(head)
        if magic != _MAGIC or own != zlib.crc32(head[:-4]) or length > self._half_bytes - _HEAD.size:
            return None
        snapshot = self._memory[base + _HEAD.size : base + _HEAD.size + length]
        if zlib.crc32(snapshot) != checksum or sequence % 2 != number:
            return None
        prints = Fingerprints(*(name.decode() for name in names))
        return _Half(number, sequence, prints, snapshot, base + _HEAD.size + length)

    def _records(self, half: _Half) -> tuple[list[bytes], int]:
        """Whole records in order, and where they end."""
        at, end = half.log_start, self._base(half.number) + self._half_bytes
        seed = half.sequence & 0xFFFFFFFF
        records = []
        while at + _RECORD.size <= end:
            length, checksum = _RECORD.unpack_from(self._memory, at)
            first = at + _RECORD.size
            if length == 0 or first + length > end:
                break
            record = self._memory[first : first + length]
            if zlib.crc32(record, seed) != checksum:
                break
            records.append(record)
            at = first + length
        return records, at


def _write(fd: int, parts: Sequence[Buffer], at: int) -> int:
    """Writes all parts one after the other from offset `at`; their checksum. Raises InvariantViolation when cut short.

    By the descriptor, not the mapping: memory that nobody had before comes without a fault and a clearing a page.
    """
    checksum = 0
    for first in range(0, len(parts), _PARTS_MOST):
        some = parts[first : first + _PARTS_MOST]
        for part in some:
            checksum = zlib.crc32(part, checksum)
        length = sum(len(part) for part in some)
        if os.pwritev(fd, some, at) != length:
            raise InvariantViolation(f"the journal took less than the {length} bytes that were written to it")
        at += length
    return checksum


def create(half_bytes: int = HALF_BYTES) -> int:
    """A new file for a journal, close-on-exec; the caller owns the descriptor."""
    fd = os.memfd_create("kvmanager:journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, file_bytes(half_bytes))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.pwrite(fd, _TOP.pack(_MAGIC, _VERSION, half_bytes), 0)
    return fd


def check_format(fd: int) -> None:
    """Raises JournalMismatch for a file that this version can't read."""
    magic, version, half_bytes = _TOP.unpack(os.pread(fd, _TOP.size, 0))
    if magic != _MAGIC or version != _VERSION or os.fstat(fd).st_size != file_bytes(half_bytes):
        raise JournalMismatch(
            f"the node's journal has format {version}, this version reads {_VERSION}: start the version that wrote "
            "it, or give up the cache with `kvmanager serve --cold`"
        )


def _boot_ids(fd: int) -> list[int]:
    """The boot ids noted in both places, 0 where none is."""
    found = []
    for number, checksum in _BOOT.iter_unpack(os.pread(fd, 2 * _BOOT.size, _BOOT_AT)):
        found.append(number if checksum == zlib.crc32(number.to_bytes(8, "little")) else 0)
    return found


def next_boot_id(fd: int, clock_ns: int) -> int:
    """A boot id above all that are noted in a journal's file, also where the clock was set back."""
    return max(clock_ns, max(_boot_ids(fd)) + 1)


def note_boot_id(fd: int, boot_id: int) -> None:
    """Makes `boot_id` the floor of the next one, in the place of the older of the two."""
    noted = _boot_ids(fd)
    place = noted.index(min(noted))
    os.pwrite(fd, _BOOT.pack(boot_id, zlib.crc32(boot_id.to_bytes(8, "little"))), _BOOT_AT + place * _BOOT.size)
