"""The tables of the configuration that are small and tied to no other part: who, how long, how much at once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvmanager.configuration import configvalues as parse
from kvmanager.configuration.configvalues import Parser
from kvmanager.core.eviction import POLICIES
from kvmanager.core.spec import Inclusion
from kvmanager.units import MILLISECOND_NS

HOUR_MS: Final = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSection:
    """`[node]`: who the daemon is and whom it lets in."""

    name: str
    runtime_dir: Path
    device: str = "cpu"
    trust_uids: tuple[int, ...] = dataclasses.field(default_factory=lambda: (os.getuid(),))
    drain_ms: int = 10_000
    spare: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSection:
    """`[lease]`: rights of parties that can't touch memory."""

    ticket_ttl_ms: int = 30_000
    grace_ms: int = 5_000
    session_ttl_ms: int = 600_000

    @property
    def session_ttl_ns(self) -> int:
        """How long a registered engine may be silent before its first rank attaches."""
        return self.session_ttl_ms * MILLISECOND_NS

    @property
    def ticket_ttl_ns(self) -> int:
        """A ticket's life without a heartbeat."""
        return self.ticket_ttl_ms * MILLISECOND_NS

    @property
    def grace_ns(self) -> int:
        """Time between a lease's end and the reuse of what it pinned."""
        return self.grace_ms * MILLISECOND_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceSection:
    """`[fence]`: engines that no longer answer. A stopped process is suspect after `ping_ms` + `silence_ms` at most.

    A rank whose timeline has not moved for `stall_ms` while a fence waits for it makes its engine suspect, too.
    """

    action: str = "hold"
    after_ms: int = 30_000
    ping_ms: int = 10_000
    silence_ms: int = 20_000
    stall_ms: int = 120_000

    @property
    def after_ns(self) -> int:
        """How long an engine is suspect before `action` is taken."""
        return self.after_ms * MILLISECOND_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSection:
    """`[admission]`: how much may be promised at once."""

    overcommit: float = 1.0
    growth_cap_tokens: int = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionSection:
    """`[eviction]`: which cached spans go first when room is needed."""

    policy: str = "return-rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSection:
    """`[offload]`: how copies between device and host are cut, and what stays on the host.

    inclusion: whether a span that came back to the device keeps its host copy. tries: of one host copy, in a row.
    """

    max_plans_in_flight: int = 8
    batch_spans: int = 32
    inclusion: str = Inclusion.AS_NEEDED
    tries: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumsSection:
    """`[checksums]`: which host copies are summed up, and how many are read again after a warm restart, and how long.

    cover: "off" 0, "all" 1, "1/n" n, one span in n, or "auto" None: all. On a GPU that costs 2% of the link.
    """

    cover: int | None = None
    restart_spans: int = 256
    restart_ms: int = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSection:
    """`[[tenant]]`: users that share a cache, and their part of every pool as shares of it."""

    name: str
    uids: tuple[int, ...]
    floor: float = 0.0
    ceiling: float = 1.0
    priority: int = 0
    trust: str = ""


SECTIONS: Final[Mapping[type[Any], Mapping[str, Parser]]] = {
    NodeSection: {
        "name": parse.text,
        "runtime_dir": parse.directory,
        "device": parse.device,
        "trust_uids": parse.uids,
        "drain_ms": parse.between(0, HOUR_MS),
        "spare": parse.switch,
    },
    LeaseSection: {"ticket_ttl_ms": parse.count(1), "grace_ms": parse.count(0), "session_ttl_ms": parse.count(1)},
    FenceSection: {
        "action": parse.choice("hold", "kill"),
        "after_ms": parse.between(0, HOUR_MS),
        "ping_ms": parse.between(100, HOUR_MS),
        "silence_ms": parse.between(100, HOUR_MS),
        "stall_ms": parse.between(100, HOUR_MS),
    },
    AdmissionSection: {"overcommit": parse.factor, "growth_cap_tokens": parse.count(1)},
    EvictionSection: {"policy": parse.choice(*POLICIES)},
    OffloadSection: {
        "max_plans_in_flight": parse.count(1),
        "batch_spans": parse.count(1),
        "inclusion": parse.choice(*Inclusion),
        "tries": parse.count(1),
    },
    ChecksumsSection: {
        "cover": parse.one_in_or_auto,
        "restart_spans": parse.count(0), "restart_ms": parse.between(0, HOUR_MS),
    },
    TenantSection: {
        "name": parse.text,
        "uids": parse.uids,
        "floor": parse.share,
        "ceiling": parse.share,
        "priority": parse.count(0),
        "trust": parse.text,
    },
}
"""Parsers of the keys."""
