"""Reads the node's configuration: one TOML file, once, into a NodeConfig.

An unknown key, a value of the wrong kind and two values that contradict each other are all a ConfigError that names
the key and where it stands. Nothing is repaired, rounded or ignored.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from kvmanager.configuration import configvalues as parse
from kvmanager.configuration.config import NodeConfig
from kvmanager.configuration.configvalues import Parser
from kvmanager.configuration.eventsconfig import EVENTS, EventsSection, check_streams
from kvmanager.configuration.groupchecks import check_group, check_keys_of_kind
from kvmanager.configuration.groupsection import GROUP, GroupSection
from kvmanager.configuration.hostregions import shared_host_regions
from kvmanager.configuration.moverconfig import MOVER, MoverSection
from kvmanager.configuration.operationsconfig import OPERATIONS, HealthSection, HistorySection, MetricsSection
from kvmanager.configuration.sections import (
    SECTIONS,
    AdmissionSection,
    ChecksumsSection,
    EvictionSection,
    FenceSection,
    LeaseSection,
    NodeSection,
    OffloadSection,
    TenantSection,
)
from kvmanager.configuration.securitychecks import check_security
from kvmanager.configuration.securityconfig import SECURITY, AccessSection, PeerSection, TlsSection
from kvmanager.configuration.workspaces import with_workspaces
from kvmanager.errors import ConfigError

T = TypeVar("T")

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
    **SECTIONS,
    **OPERATIONS,
    **SECURITY,
    EventsSection: EVENTS,
    MoverSection: MOVER,
    GroupSection: GROUP,
}


def read_config(path: Path) -> NodeConfig:
    """Reads and checks a file. Raises ConfigError; a message begins with the path."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the configuration {path}: {error}") from error
    try:
        return parse_config(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_config(text: str) -> NodeConfig:
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
    config = NodeConfig(
        **sections, groups=_groups(table.get("group")), tenants=_tenants(table.get("tenant", [])),
        events=_events(table.get("events", [])),
    )  # fmt: skip
    check_streams(config.events, [group.name for group in config.groups])
    _check_mover(config)
    check_security(config)
    return config


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
    return with_workspaces(groups)


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
