"""Whether the values of one `[[group]]` fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvmanager.configuration.groupsection import GroupSection
from kvmanager.errors import ConfigError

_HISPARSE_KEYS: Final = ("token_order", "source_ranks", "source_interleave", "hot_rows")
_HOST_KEYS: Final = ("host_bytes_per_rank", "host_region", "host_floor", "host_ceiling", "host_extent_bytes")
_PLAIN_KINDS: Final = ("cache", "engine")
_SPLIT_KEYS: Final = ("residency", "host_split", "offload_bytes_per_rank")


def check_keys_of_kind(group: GroupSection, table: Mapping[str, object], where: str) -> None:
    """Refuses keys that the group's kind does not have, and the lack of those that it needs. Raises ConfigError."""
    for key in _HISPARSE_KEYS:
        if group.kind == "hisparse" and key not in table:
            raise ConfigError(f"missing key {key!r} in {where}: a hisparse group needs it")
        if group.kind != "hisparse" and key in table:
            raise ConfigError(f"{where} {key}: only a group of kind \"hisparse\" has it; remove it")
    _check_split(group, table, where)
    _check_cache(group, table, where)
    if "workspace_bytes_per_rank" in table and (group.kind != "sharded" or group.ranks < 2):
        what = 'only ranks of a group of kind "sharded" gather layers from each other'
        raise ConfigError(f"{where} workspace_bytes_per_rank: {what}; remove it")
    if group.kind != "cache" and "hbm_bytes_per_rank" not in table:
        raise ConfigError(f"missing key 'hbm_bytes_per_rank' in {where}")
    for key in _HOST_KEYS:
        if group.kind == "engine" and key in table:
            raise ConfigError(f"{where} {key}: an engine group has device memory only; remove it")
    if group.kind != "engine" and "host_bytes_per_rank" not in table:
        raise ConfigError(f"missing key 'host_bytes_per_rank' in {where}")


def _check_cache(group: GroupSection, table: Mapping[str, object], where: str) -> None:
    """What only groups of engines with memory of their own have, and what they have not."""
    if group.kind != "cache" and "bounce_bytes_per_rank" in table:
        raise ConfigError(f'{where} bounce_bytes_per_rank: only a group of kind "cache" has it; remove it')
    if group.kind == "cache" and group.host_region and not group.bounce_bytes_per_rank:
        raise ConfigError(
            f"{where} host_region: engines read a cache group's pages in place, so it shares none; with "
            "bounce_bytes_per_rank they would map that much in place of it"
        )
    if group.kind == "cache" and "hbm_bytes_per_rank" in table:
        raise ConfigError(f"{where} hbm_bytes_per_rank: a cache group has no device memory; remove it")


def _check_split(group: GroupSection, table: Mapping[str, object], where: str) -> None:
    """How a decode rank uses its host memory."""
    for key in _SPLIT_KEYS:
        if group.kind != "hisparse" and key in table:
            raise ConfigError(f"{where} {key}: only a group of kind \"hisparse\" has it; remove it")
    if (group.host_split == "strict") != ("offload_bytes_per_rank" in table):
        raise ConfigError(
            f'{where} offload_bytes_per_rank: indexer pages have host memory of their own where host_split = "strict", '
            "and only there"
        )
    if group.host_split == "strict" and group.host_region:
        raise ConfigError(f'{where} host_split: "strict" splits the group\'s own host memory; it shares no host_region')


def check_group(group: GroupSection, where: str) -> None:
    """Refuses values that do not fit together. Raises ConfigError."""
    _check_divides(group.interleave, group.page_rows, f"{where} interleave")
    plain = not group.kv_format.index_value_bytes
    if plain != (group.kind in _PLAIN_KINDS):
        what = "a plain format kv/..." if group.kind in _PLAIN_KINDS else "a format with indexer rows"
        raise ConfigError(f"{where} format: {group.format!r}, but a group of kind {group.kind!r} holds {what}")
    if group.kind in ("replicated", *_PLAIN_KINDS) and group.interleave != 1:
        raise ConfigError(f"{where} interleave: every rank holds all tokens, nothing is dealt out; remove it")
    if group.kind == "cache":
        _check_holds(group.host_bytes_per_rank, group.unit_bytes, f"{where} host_bytes_per_rank", "one page")
        if group.bounce_bytes_per_rank:
            _check_holds(group.bounce_bytes_per_rank, group.unit_bytes, f"{where} bounce_bytes_per_rank", "one page")
        return
    if group.kind == "engine" and group.ranks != 1:
        raise ConfigError(f"{where} ranks: {group.ranks}, but an engine group is of one worker; write ranks = 1")
    if group.kind == "hisparse":
        _check_decode_rank(group, where)
        return
    _check_holds(group.hbm_bytes_per_rank, group.unit_bytes, f"{where} hbm_bytes_per_rank", "one page")
    if group.host_bytes_per_rank:
        what = "one page (0: no offload)"
        _check_holds(group.host_bytes_per_rank, group.unit_bytes, f"{where} host_bytes_per_rank", what)


def _check_decode_rank(group: GroupSection, where: str) -> None:
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
    if group.host_split == "strict":
        indexers = (span_slabs - span_pages) * group.unit_bytes
        _check_holds(group.offload_bytes_per_rank, indexers, f"{where} offload_bytes_per_rank", "a span's indexers")
        left = group.host_bytes_per_rank - group.offload_bytes_per_rank
        _check_holds(left, span_pages * group.unit_bytes, f"{where} host_bytes_per_rank", "a span beside the indexers")


def _check_divides(interleave: int, page_rows: int, what: str) -> None:
    if page_rows % interleave:
        raise ConfigError(f"{what}: {interleave} does not divide page_rows = {page_rows}")


def _check_holds(size_bytes: int, least_bytes: int, what: str, content: str) -> None:
    if size_bytes < least_bytes:
        raise ConfigError(f"{what}: {size_bytes} bytes do not hold {content}; it takes at least {least_bytes} bytes")
