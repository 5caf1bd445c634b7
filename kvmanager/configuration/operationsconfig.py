"""`[metrics]`, `[health]` and `[[events]]` of the configuration: what the node tells those who run it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from kvmanager.configuration import configvalues as parse
from kvmanager.configuration.configvalues import Parser
from kvmanager.units import MILLISECOND_NS

UNIX: Final = "unix:"
_HOUR_MS: Final = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSection:
    """`[metrics]`: where /metrics, /healthz and /readyz are served, `ADDRESS:PORT` or `unix:PATH`; "": nowhere."""

    listen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSection:
    """`[health]`: how long each part may stand still before health tells of it. Looked at every `probe_ms`.

    core_ms: until the core answers, and between its ticks. mover_ms: until the mover answers a ping, or is there again.
    copy_ms: with plans under way and none of them ended. job_ms: for a background job that has work and does none.
    evict_ms: for a pool that refuses requests, has less room than they ask for, and admits nobody. After these the node
    is not ready. It stays ready, and is said to be late, after history_ms and events_ms: for the thread that writes the
    history, and for each that publishes KV events, with something to tell and none of it told.
    """

    probe_ms: int = 1_000
    core_ms: int = 5_000
    mover_ms: int = 5_000
    copy_ms: int = 60_000
    job_ms: int = 60_000
    evict_ms: int = 60_000
    history_ms: int = 30_000
    events_ms: int = 30_000

    @property
    def core_ns(self) -> int:
        """As nanoseconds."""
        return self.core_ms * MILLISECOND_NS

    @property
    def mover_ns(self) -> int:
        """As nanoseconds."""
        return self.mover_ms * MILLISECOND_NS

    @property
    def copy_ns(self) -> int:
        """As nanoseconds."""
        return self.copy_ms * MILLISECOND_NS

    @property
    def job_ns(self) -> int:
        """As nanoseconds."""
        return self.job_ms * MILLISECOND_NS

    @property
    def evict_ns(self) -> int:
        """As nanoseconds."""
        return self.evict_ms * MILLISECOND_NS

    @property
    def history_ns(self) -> int:
        """As nanoseconds."""
        return self.history_ms * MILLISECOND_NS

    @property
    def events_ns(self) -> int:
        """As nanoseconds."""
        return self.events_ms * MILLISECOND_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySection:
    """`[history]`: what happened, in files that `kvmanager explain` reads. max_bytes: of all of them; 0: none is kept.

    directory: unset, `history` in the runtime directory.
    """

    max_bytes: int = 64 << 20
    directory: Path = Path()


def listen_address(value: object) -> str:
    """`ADDRESS:PORT` with a numeric address (IPv6 in brackets), or `unix:` and an absolute path; "" for "off"."""
    where = parse.text(value)
    if where == "off":
        return ""
    if where.startswith(UNIX):
        parse.directory(where.removeprefix(UNIX))
        return where
    host, _, port = where.rpartition(":")
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise ValueError(f"{value!r} is neither ADDRESS:PORT with a numeric address nor unix:PATH") from None
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{value!r}: the port is a number from 0 to 65535")
    return where


_PROBE: Final = parse.between(10, _HOUR_MS)
OPERATIONS: Final[Mapping[type[Any], Mapping[str, Parser]]] = {
    MetricsSection: {"listen": listen_address},
    HistorySection: {"max_bytes": parse.size, "directory": parse.directory},
    HealthSection: dict.fromkeys((field.name for field in fields(HealthSection)), _PROBE),
}
"""Parsers of the keys."""
