"""The node's configuration: one TOML file, read once, into frozen dataclasses.

An unknown key, a value of the wrong kind and two values that contradict each other are all a
ConfigError that names the key and where it stands. Nothing is repaired, rounded or ignored.
Sizes are whole bytes (`512`, `"64 MiB"`), durations are `_ms` keys; `_ns` properties give them
in the unit that the rest of the program uses. `kvmanager/demo/data/example.toml` explains each key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from kvmanager.allocators.cuda_driver import device_ordinal
from kvmanager.core.eviction import POLICIES
from kvmanager.errors import ConfigError, InvalidArgument
from kvmanager.geometry import SEQUENTIAL, ShardGeometry, TokenOrder
from kvmanager.layout import FORMATS, KVFormat
from kvmanager.units import MIB, MILLISECOND_NS, format_bytes, parse_bytes

RUNTIME_DIR_MAX_BYTES: Final = 80
"""A unix socket's path holds 107 bytes; this leaves room for the longest name below the directory."""

HOUR_MS: Final = 3_600_000

Parser = Callable[[object], Any]
T = TypeVar("T")


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a non-empty string")
    return value


def _count(minimum: int) -> Parser:
    def parse(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{value!r} is not a whole number of at least {minimum}")
        return value

    return parse


def _between(minimum: int, maximum: int) -> Parser:
    def parse(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise ValueError(f"{value!r} is not a whole number from {minimum} to {maximum}")
        return value

    return parse


def _size(value: object) -> int:
    if not isinstance(value, (str, int)):
        raise ValueError(f"{value!r} is not a size; write for example 64MiB or 15GiB")
    return parse_bytes(value)


def _factor(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < 1:
        raise ValueError(f"{value!r} is not a number of at least 1.0")
    return float(value)


def _choice(*names: str) -> Parser:
    def parse(value: object) -> str:
        if value not in names:
            raise ValueError(f"{value!r} is not one of {', '.join(names)}{_did_you_mean(value, names)}")
        return str(value)

    return parse


def _device(value: object) -> str:
    if isinstance(value, str) and value.startswith("cuda:"):
        try:
            device_ordinal(value)
        except InvalidArgument as error:
            raise ValueError(str(error)) from None
        return value
    return str(_choice("cpu", "cuda:0")(value))


def _directory(value: object) -> Path:
    path = Path(_text(value))
    if not path.is_absolute():
        raise ValueError(f"{value!r} is not an absolute path")
    length = len(os.fsencode(path))
    if length > RUNTIME_DIR_MAX_BYTES:
        raise ValueError(
            f"{value!r} has {length} bytes; sockets below it need a path of at most {RUNTIME_DIR_MAX_BYTES}"
        )
    return path


def _uids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{value!r} is not a non-empty list of user ids")
    return tuple(_count(0)(entry) for entry in value)


def _did_you_mean(name: object, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSection:
    """`[node]`: who the daemon is and whom it lets in."""

    name: str
    runtime_dir: Path
    device: str = "cpu"
    trust_uids: tuple[int, ...] = dataclasses.field(default_factory=lambda: (os.getuid(),))
    drain_ms: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSection:
    """`[lease]`: rights of parties that can't touch memory."""

    ticket_ttl_ms: int = 30_000
    grace_ms: int = 5_000

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
    """`[fence]`: engines that no longer answer. A stopped process is suspect after `ping_ms` + `silence_ms` at most."""

    action: str = "hold"
    after_ms: int = 30_000
    ping_ms: int = 10_000
    silence_ms: int = 20_000

    @property
    def after_ns(self) -> int:
        """How long an engine is suspect before `action` is taken."""
        return self.after_ms * MILLISECOND_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverSection:
    """`[mover]`: staging for pulls, in chunks of `chunk_bytes`."""

    staging_bytes: int = 64 * MIB
    chunk_bytes: int = 8 * MIB
    pull_deadline_ms: int = 20_000

    @property
    def pull_deadline_ns(self) -> int:
        """Our own limit on one pull: a hung peer never errors."""
        return self.pull_deadline_ms * MILLISECOND_NS


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
    """`[offload]`: how copies between device and host are cut."""

    max_plans_in_flight: int = 8
    batch_spans: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSection:
    """`[[group]]`: one memory group: shards of a DCP engine, equal copies on all its ranks, or a HiSparse decode rank.

    The last four fields hold only for kind "hisparse" (0 in the others).
    """

    name: str
    kind: str
    format: str
    ranks: int
    page_rows: int
    hbm_bytes_per_rank: int
    host_bytes_per_rank: int
    interleave: int = 1
    token_order: str = ""
    source_ranks: int = 0
    source_interleave: int = 0
    hot_rows: int = 0

    @property
    def kv_format(self) -> KVFormat:
        """The format that `format` names."""
        return FORMATS[self.format]

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
    def hot_slabs(self) -> int:
        """Slabs of one hot buffer."""
        return self.hot_rows // self.page_rows

    @property
    def planned_bytes(self) -> int:
        """Device and host pools of all ranks."""
        return self.ranks * (self.hbm_bytes_per_rank + self.host_bytes_per_rank)


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
    groups: tuple[GroupSection, ...]

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
        known = (*_TABLES, "group")
        for key in table:
            if key not in known:
                raise ConfigError(f"unknown table or key {key!r} at the top level{_did_you_mean(key, known)}")
        sections = {name: _read(section, _table(table, name), f"[{name}]") for name, section in _TABLES.items()}
        config = cls(**sections, groups=_groups(table.get("group")))
        _check_mover(config)
        return config

    def group(self, name: str) -> GroupSection:
        """The group called `name`. Raises ConfigError naming the groups there are."""
        for group in self.groups:
            if group.name == name:
                return group
        names = [group.name for group in self.groups]
        raise ConfigError(f"no group {name!r}; this node has {', '.join(names)}{_did_you_mean(name, names)}")

    def planned_bytes(self) -> int:
        """Bytes the node would take: all pools of all ranks, and the staging ring."""
        return self.mover.staging_bytes + sum(group.planned_bytes for group in self.groups)

    def check_memory(self, available: int, limit: str = "MemAvailable of the host") -> None:
        """Refuses a configuration that needs more than `available` bytes of host memory.

        HBM pools on a GPU are not host memory; whether they fit shows when they are made. Raises ConfigError
        naming both figures and the key that takes the most.
        """
        host_keys = ["host_bytes_per_rank"] if self.node.device != "cpu" else _POOL_KEYS
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


_POOL_KEYS: Final = ["hbm_bytes_per_rank", "host_bytes_per_rank"]
_TABLES: Final[Mapping[str, type[Any]]] = {
    "node": NodeSection,
    "lease": LeaseSection,
    "fence": FenceSection,
    "mover": MoverSection,
    "admission": AdmissionSection,
    "eviction": EvictionSection,
    "offload": OffloadSection,
}
_PARSERS: Final[Mapping[type[Any], Mapping[str, Parser]]] = {
    NodeSection: {
        "name": _text,
        "runtime_dir": _directory,
        "device": _device,
        "trust_uids": _uids,
        "drain_ms": _between(0, HOUR_MS),
    },
    LeaseSection: {"ticket_ttl_ms": _count(1), "grace_ms": _count(0)},
    FenceSection: {
        "action": _choice("hold", "kill"),
        "after_ms": _between(0, HOUR_MS),
        "ping_ms": _between(100, HOUR_MS),
        "silence_ms": _between(100, HOUR_MS),
    },
    MoverSection: {"staging_bytes": _size, "chunk_bytes": _size, "pull_deadline_ms": _count(1)},
    AdmissionSection: {"overcommit": _factor, "growth_cap_tokens": _count(1)},
    EvictionSection: {"policy": _choice(*POLICIES)},
    OffloadSection: {"max_plans_in_flight": _count(1), "batch_spans": _count(1)},
    GroupSection: {
        "name": _text,
        "kind": _choice("sharded", "replicated", "hisparse"),
        "format": _choice(*FORMATS),
        "ranks": _count(1),
        "page_rows": _count(1),
        "interleave": _count(1),
        "hbm_bytes_per_rank": _size,
        "host_bytes_per_rank": _size,
        "token_order": _choice("keep", "sequential"),
        "source_ranks": _count(1),
        "source_interleave": _count(1),
        "hot_rows": _count(1),
    },
}
_HISPARSE_KEYS: Final = ("token_order", "source_ranks", "source_interleave", "hot_rows")


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
            raise ConfigError(f"unknown key {key!r} in {where}{_did_you_mean(key, tuple(parsers))}")
        try:
            values[key] = parsers[key](value)
        except ValueError as error:
            raise ConfigError(f"{where} {key}: {error}") from error
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if field.name not in values and not has_default:
            raise ConfigError(f"missing key {field.name!r} in {where}")
    return section(**values)


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
        _check_keys_of_kind(group, table, where)
        _check_group(group, where)
        if any(group.name == other.name for other in groups):
            raise ConfigError(f"{where} number {place}: the name is taken by an earlier group")
        groups.append(group)
    return tuple(groups)


def _check_keys_of_kind(group: GroupSection, table: Mapping[str, object], where: str) -> None:
    for key in _HISPARSE_KEYS:
        if group.kind == "hisparse" and key not in table:
            raise ConfigError(f"missing key {key!r} in {where}: a hisparse group needs it")
        if group.kind != "hisparse" and key in table:
            raise ConfigError(f"{where} {key}: only a group of kind \"hisparse\" has it; remove it")


def _check_group(group: GroupSection, where: str) -> None:
    _check_divides(group.interleave, group.page_rows, f"{where} interleave")
    if group.kind == "replicated" and group.interleave != 1:
        raise ConfigError(f"{where} interleave: every rank holds all tokens, nothing is dealt out; remove it")
    if group.kind != "hisparse":
        least = group.unit_bytes
        _check_holds(group.hbm_bytes_per_rank, least, f"{where} hbm_bytes_per_rank", "one page")
        if group.host_bytes_per_rank:
            _check_holds(group.host_bytes_per_rank, least, f"{where} host_bytes_per_rank", "one page (0: no offload)")
        return
    if group.ranks != 1:
        raise ConfigError(f"{where} ranks: {group.ranks}, but a hisparse group is one decode rank; write ranks = 1")
    _check_divides(group.source_interleave, group.page_rows, f"{where} source_interleave")
    if group.hot_rows % group.page_rows:
        raise ConfigError(
            f"{where} hot_rows: {group.hot_rows} is not a whole number of slabs of {group.page_rows} rows (page_rows)"
        )
    span_pages = group.arrival_order.segments
    indexers_per_slab = group.unit_bytes // group.kv_format.indexer_page_bytes(group.page_rows)
    span_slabs = span_pages + -(-span_pages // indexers_per_slab)
    device_least = (span_slabs + group.hot_slabs) * group.unit_bytes
    what = f"a span ({span_slabs} slabs) and a hot buffer ({group.hot_slabs} slabs)"
    _check_holds(group.hbm_bytes_per_rank, device_least, f"{where} hbm_bytes_per_rank", what)
    _check_holds(group.host_bytes_per_rank, span_slabs * group.unit_bytes, f"{where} host_bytes_per_rank", "a span")


def _check_divides(interleave: int, page_rows: int, what: str) -> None:
    if page_rows % interleave:
        raise ConfigError(f"{what}: {interleave} does not divide page_rows = {page_rows}")


def _check_holds(size_bytes: int, least_bytes: int, what: str, content: str) -> None:
    if size_bytes < least_bytes:
        raise ConfigError(f"{what}: {size_bytes} bytes do not hold {content}; it takes at least {least_bytes} bytes")


def _check_mover(config: NodeConfig) -> None:
    mover = config.mover
    if mover.chunk_bytes > mover.staging_bytes:
        raise ConfigError(
            f"[mover] chunk_bytes: {mover.chunk_bytes} bytes do not fit staging_bytes = {mover.staging_bytes}"
        )
    for group in config.groups:
        page_bytes = group.kv_format.page_bytes(group.page_rows)
        if mover.chunk_bytes < page_bytes:
            raise ConfigError(
                f"[mover] chunk_bytes: {mover.chunk_bytes} bytes do not hold a page of group {group.name!r} "
                f"({page_bytes} bytes)"
            )
