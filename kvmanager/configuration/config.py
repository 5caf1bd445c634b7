"""The node's configuration: frozen dataclasses, as `reading` made them of one TOML file.

Sizes are whole bytes, durations are `_ms` keys; `_ns` properties give them in the unit that the rest of the program
uses. `kvmanager/demo/data/example.toml` explains each key.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmanager.configuration import configvalues as parse
from kvmanager.configuration.eventsconfig import EventsSection
from kvmanager.configuration.groupsection import GroupSection
from kvmanager.configuration.moverconfig import MoverSection
from kvmanager.configuration.operationsconfig import HealthSection, HistorySection, MetricsSection
from kvmanager.configuration.sections import (
    AdmissionSection,
    ChecksumsSection,
    EvictionSection,
    FenceSection,
    LeaseSection,
    NodeSection,
    OffloadSection,
    TenantSection,
)
from kvmanager.configuration.securityconfig import AccessSection, PeerSection, TlsSection
from kvmanager.errors import ConfigError
from kvmanager.units import format_bytes

_POOL_KEYS: Final = ["hbm_bytes_per_rank", "host_bytes_per_rank", "bounce_bytes_per_rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Everything a node reads at its start, checked."""

    node: NodeSection
    lease: LeaseSection
    fence: FenceSection
    mover: MoverSection
    admission: AdmissionSection
    eviction: EvictionSection
    offload: OffloadSection
    checksums: ChecksumsSection
    metrics: MetricsSection
    health: HealthSection
    history: HistorySection
    tls: TlsSection
    peer: PeerSection
    access: AccessSection
    groups: tuple[GroupSection, ...]
    tenants: tuple[TenantSection, ...] = ()
    events: tuple[EventsSection, ...] = ()

    def tenant_of(self, uid: int) -> str:
        """The tenant of a user; one that no [[tenant]] names is a tenant of its own, without limits."""
        return next((tenant.name for tenant in self.tenants if uid in tenant.uids), f"uid {uid}")

    def trust_of(self, uid: int) -> str:
        """The trust domain of a user's engines."""
        return next((tenant.trust for tenant in self.tenants if uid in tenant.uids), "")

    @property
    def history_dir(self) -> Path:
        """Where the history lies."""
        unset = self.history.directory == Path()
        return self.node.runtime_dir / "history" if unset else self.history.directory

    def group(self, name: str) -> GroupSection:
        """The group called `name`. Raises ConfigError naming the groups there are."""
        for group in self.groups:
            if group.name == name:
                return group
        names = [group.name for group in self.groups]
        raise ConfigError(f"no group {name!r}; this node has {', '.join(names)}{parse.did_you_mean(name, names)}")

    def planned_bytes(self) -> int:
        """Bytes the node would take: all pools of all ranks, and the staging ring."""
        return self.mover.staging_bytes + sum(group.planned_bytes for group in self.groups)

    def check_memory(self, available: int, limit: str = "MemAvailable of the host") -> None:
        """Refuses a configuration that needs more than `available` bytes of host memory.

        HBM pools on a GPU are not host memory; whether they fit shows when they are made. Raises ConfigError
        naming both figures and the key that takes the most.
        """
        host_keys = _POOL_KEYS[1:] if self.node.device != "cpu" else _POOL_KEYS
        parts = {"[mover] staging_bytes": self.mover.staging_bytes}
        for group in self.groups:
            for key in host_keys:
                parts[f"[[group]] {group.name!r} {key}"] = group.ranks * getattr(group, key)
        needed = sum(parts.values())
        if needed <= available:
            return
        largest = max(parts, key=lambda key: parts[key])
        raise ConfigError(
            f"pool larger than memory: {needed} bytes ({format_bytes(needed)}) needed, {available} bytes "
            f"({format_bytes(available)}) available by {limit}; lower {largest}, which takes "
            f"{format_bytes(parts[largest])}"
        )
