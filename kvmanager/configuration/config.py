"""The node's configuration: one TOML file, read once, into frozen dataclasses.

An unknown key, a value of the wrong kind and two values that contradict each other are all a
ConfigError that names the key and where it stands. Nothing is repaired, rounded or ignored.
Sizes are whole bytes (`512`, `"64 MiB"`), durations are `_ms` keys; `_ns` properties give them
in the unit that the rest of the program uses. `kvmanager/demo/data/example.toml` explains each key.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from kvmanager.configuration import configvalues as parse
from kvmanager.configuration.configvalues import Parser
from kvmanager.configuration.eventsconfig import EVENTS, EventsSection, check_streams
from kvmanager.configuration.groupchecks import check_group, check_keys_of_kind
from kvmanager.configuration.hostregions import HostShare, shared_host_regions
from kvmanager.configuration.moverconfig import MOVER, MoverSection
from kvmanager.configuration.operationsconfig import OPERATIONS, HealthSection, HistorySection, MetricsSection
from kvmanager.configuration.securityconfig import SECURITY, AccessSection, PeerSection, TlsSection, check_security
from kvmanager.core.eviction import POLICIES
from kvmanager.core.spec import Inclusion, Residency
from kvmanager.errors import ConfigError
from kvmanager.geometry import SEQUENTIAL, ShardGeometry, TokenOrder
from kvmanager.layout import KVFormat, format_named
from kvmanager.units import MILLISECOND_NS, format_bytes

HOUR_MS: Final = 3_600_000

T = TypeVar("T")


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
class GroupSection:
    """`[[group]]`: one memory group.

    Shards of a DCP engine, equal copies on all its ranks, a HiSparse decode rank, a cache in host memory for engines
    with device memory of their own, or ("engine") device memory for one engine's own blocks. token_order to
    offload_bytes_per_rank hold only for kind "hisparse" (empty in the others). residency: where latents of running
    requests lie, see `core.spec.Residency`. host_split: "soft", latents and indexers share the host's slabs; "strict",
    indexers have `offload_bytes_per_rank` of it and latents the rest. Groups of one `host_region` share what their
    `host_bytes_per_rank` sum up to; host_floor, host_ceiling: shares of that (see `hostregions`).
    """

    name: str
    kind: str
    format: str
    ranks: int
    page_rows: int
    host_bytes_per_rank: int = 0
    hbm_bytes_per_rank: int = 0
    interleave: int = 1
    token_order: str = ""
    source_ranks: int = 0
    source_interleave: int = 0
    hot_rows: int = 0
    host_region: str = ""
    host_floor: float = 0.0
    host_ceiling: float = 1.0
    host_extent_bytes: int = 0
    residency: str = Residency.HYBRID
    host_split: str = "soft"
    offload_bytes_per_rank: int = 0
    trust: str = ""
    scrub: bool = False
    bounce_bytes_per_rank: int = 0

    @property
    def kv_format(self) -> KVFormat:
        """The format that `format` names."""
        return format_named(self.format)

    @property
    def geometry(self) -> ShardGeometry:
        """Ranks, rows and interleave of the group's own pool."""
        return ShardGeometry(self.ranks, self.page_rows, self.interleave)

    @property
    def arrival_order(self) -> TokenOrder:
        """Token order in which handed-off spans are stored (hisparse): the source's, or sequential."""
        return TokenOrder(self.source_ranks, self.source_interleave) if self.token_order == "keep" else SEQUENTIAL

    @property
    def unit_bytes(self) -> int:
        """Bytes of the equal pieces that the pools hand out: slabs (hisparse) or whole pages."""
        if self.kind == "hisparse":
            return self.kv_format.slab_bytes(self.page_rows)
        return self.kv_format.page_bytes(self.page_rows)

    @property
    def hbm_units(self) -> int:
        """Whole pages or slabs in one rank's device pool."""
        return self.hbm_bytes_per_rank // self.unit_bytes

    @property
    def host_units(self) -> int:
        """Whole pages or slabs in one rank's host pool."""
        return self.host_bytes_per_rank // self.unit_bytes

    @property
    def host_share(self) -> HostShare:
        """What it says of a host region that it shares."""
        limits = self.host_floor, self.host_ceiling, self.host_extent_bytes, 2 if self.kind == "hisparse" else 1
        return HostShare(self.name, self.ranks, self.unit_bytes, self.host_bytes_per_rank, self.host_region, *limits)

    @property
    def offload_units(self) -> int:
        """Those of the host's slabs that indexer pages have for themselves (a strict split)."""
        return self.offload_bytes_per_rank // self.unit_bytes

    @property
    def hot_slabs(self) -> int:
        """Slabs of one hot buffer."""
        return self.hot_rows // self.page_rows

    @property
    def planned_bytes(self) -> int:
        """Device and host pools and bounce regions of all ranks."""
        return self.ranks * (self.hbm_bytes_per_rank + self.host_bytes_per_rank + self.bounce_bytes_per_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSection:
    """`[[tenant]]`: users that share a cache, and their part of every pool as shares of it."""

    name: str
    uids: tuple[int, ...]
    floor: float = 0.0
    ceiling: float = 1.0
    priority: int = 0
    trust: str = ""


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

    @classmethod
    def from_file(cls, path: Path) -> NodeConfig:
        """Reads and checks a file. Raises ConfigError; a message begins with the path."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"can't read the configuration {path}: {error}") from error
        try:
            return cls.from_text(text)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_text(cls, text: str) -> NodeConfig:
        """Reads and checks TOML text. Raises ConfigError."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"not valid TOML: {error}") from error
        known = (*_TABLES, "group", "tenant", "events")
        for key in table:
            if key not in known:
                raise ConfigError(f"unknown table or key {key!r} at the top level{parse.did_you_mean(key, known)}")
        sections = {name: _read(section, _table(table, name), f"[{name}]") for name, section in _TABLES.items()}
        config = cls(**sections, groups=_groups(table.get("group")), tenants=_tenants(table.get("tenant", [])),
                     events=_events(table.get("events", [])))
        check_streams(config.events, [group.name for group in config.groups])
        _check_mover(config)
        check_security(config)
        return config

    def tenant_of(self, uid: int) -> str:
        """The tenant of a user; one that no [[tenant]] names is a tenant of its own, without limits."""
        return next((tenant.name for tenant in self.tenants if uid in tenant.uids), f"uid {uid}")

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


_POOL_KEYS: Final = ["hbm_bytes_per_rank", "host_bytes_per_rank", "bounce_bytes_per_rank"]
_TABLES: Final[Mapping[str, type[Any]]] = {
    "node": NodeSection,
    "lease": LeaseSection,
    "fence": FenceSection,
    "mover": MoverSection,
    "admission": AdmissionSection,
    "eviction": EvictionSection,
    "offload": OffloadSection,
    "checksums": ChecksumsSection,
    "metrics": MetricsSection,
    "health": HealthSection,
    "history": HistorySection,
    "tls": TlsSection,
    "peer": PeerSection,
    "access": AccessSection,
}
_PARSERS: Final[Mapping[type[Any], Mapping[str, Parser]]] = {
    **OPERATIONS,
    **SECURITY,
    EventsSection: EVENTS,
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
    MoverSection: MOVER,
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
    GroupSection: {
        "name": parse.text,
        "kind": parse.choice("sharded", "replicated", "hisparse", "cache", "engine"),
        "format": parse.kv_format,
        "ranks": parse.count(1),
        "page_rows": parse.count(1),
        "interleave": parse.count(1),
        "hbm_bytes_per_rank": parse.size,
        "host_bytes_per_rank": parse.size,
        "token_order": parse.choice("keep", "sequential"),
        "source_ranks": parse.count(1),
        "source_interleave": parse.count(1),
        "hot_rows": parse.count(1),
        "host_region": parse.text,
        "host_floor": parse.share,
        "host_ceiling": parse.share,
        "host_extent_bytes": parse.size,
        "residency": parse.choice(*Residency),
        "host_split": parse.choice("soft", "strict"),
        "offload_bytes_per_rank": parse.size,
        "trust": parse.text,
        "scrub": parse.switch,
        "bounce_bytes_per_rank": parse.size,
    },
}


def _table(table: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = table.get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{name!r} must be a table: write [{name}]")
    return section


def _read(section: type[T], table: Mapping[str, object], where: str) -> T:
    """One dataclass from one table; every key parsed, none unknown, none missing."""
    parsers = _PARSERS[section]
    values = {}
    for key, value in table.items():
        if key not in parsers:
            raise ConfigError(f"unknown key {key!r} in {where}{parse.did_you_mean(key, tuple(parsers))}")
        try:
            values[key] = parsers[key](value)
        except ValueError as error:
            raise ConfigError(f"{where} {key}: {error}") from error
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if field.name not in values and not has_default:
            raise ConfigError(f"missing key {field.name!r} in {where}")
    return section(**values)


def _events(tables: object) -> tuple[EventsSection, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("event streams are tables: write [[events]]")
    return tuple(_read(EventsSection, table, f"[[events]] of {table.get('group')!r}") for table in tables)


def _tenants(tables: object) -> tuple[TenantSection, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("tenants are tables: write [[tenant]]")
    tenants = tuple(_read(TenantSection, table, f"[[tenant]] {table.get('name')!r}") for table in tables)
    for place, tenant in enumerate(tenants):
        where = f"[[tenant]] {tenant.name!r}"
        if tenant.floor > tenant.ceiling:
            raise ConfigError(f"{where} floor: {tenant.floor} is above its ceiling {tenant.ceiling}")
        for other in tenants[:place]:
            if tenant.name == other.name or set(tenant.uids) & set(other.uids):
                raise ConfigError(f"{where}: its name or one of its uids is taken by [[tenant]] {other.name!r}")
    together = sum(tenant.floor for tenant in tenants)
    if together > 1.0:
        raise ConfigError(f"[[tenant]] floor: {together} of every pool in all; at most 1.0 can be kept")
    return tenants


def _groups(tables: object) -> tuple[GroupSection, ...]:
    if not isinstance(tables, list) or not tables:
        raise ConfigError("no memory group: write at least one [[group]] table")
    groups: list[GroupSection] = []
    for place, table in enumerate(tables, start=1):
        name = table.get("name") if isinstance(table, dict) else None
        where = f"[[group]] {name!r}" if name else f"[[group]] number {place}"
        if not isinstance(table, dict):
            raise ConfigError(f"{where} must be a table")
        group = _read(GroupSection, table, where)
        check_keys_of_kind(group, table, where)
        check_group(group, where)
        if any(group.name == other.name for other in groups):
            raise ConfigError(f"{where} number {place}: the name is taken by an earlier group")
        groups.append(group)
    shared_host_regions([group.host_share for group in groups])
    return tuple(groups)


def _check_mover(config: NodeConfig) -> None:
    mover = config.mover
    if mover.chunk_bytes > mover.staging_bytes:
        raise ConfigError(
            f"[mover] chunk_bytes: {mover.chunk_bytes} bytes do not fit staging_bytes = {mover.staging_bytes}"
        )
    for group in config.groups:
        page_bytes = group.kv_format.page_bytes(group.page_rows)
        if group.kind != "engine" and mover.chunk_bytes < page_bytes:
            raise ConfigError(
                f"[mover] chunk_bytes: {mover.chunk_bytes} bytes do not hold a page of group {group.name!r} "
                f"({page_bytes} bytes)"
            )
