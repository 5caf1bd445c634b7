"""`[[events]]` of the configuration: streams of KV events for prefix-aware routers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvmanager.configuration import configvalues as parse
from kvmanager.configuration.configvalues import Parser
from kvmanager.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsSection:
    """`[[events]]`: one stream, about the keys of one group, model and weights revision.

    tenant: whose; "": that of the user who runs the node. hashes: "bytes", the whole keys, or "int", their low 64 bits.
    hash_seed: what the engine's namespace says (vLLM: its PYTHONHASHSEED).
    buffer_batches: kept for a replay. hwm: messages that wait for one slow listener; what is beyond is lost to it.
    """

    group: str
    model: str
    weights_revision: str
    endpoint: str
    replay_endpoint: str
    tenant: str = ""
    topic: str = ""
    hashes: str = "bytes"
    hash_seed: str = ""
    buffer_batches: int = 10_000
    hwm: int = 100_000


def endpoint(value: object) -> str:
    """Where ZeroMQ binds: `tcp://ADDRESS:PORT` or `ipc://PATH`."""
    where = parse.text(value)
    if not re.fullmatch(r"tcp://[^/]+:(\d+|\*)|ipc:///.+", where):
        raise ValueError(f"{value!r} is neither tcp://ADDRESS:PORT nor ipc:///PATH")
    return where


def any_text(value: object) -> str:
    """A string, perhaps empty."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value


def check_streams(streams: tuple[EventsSection, ...], groups: list[str]) -> None:
    """Raises ConfigError for a group that there is not, or two that would bind the same."""
    taken: set[str] = set()
    for stream in streams:
        if stream.group not in groups:
            raise ConfigError(f"[[events]] group: no group {stream.group!r}; this node has {', '.join(groups)}")
        for where in (stream.endpoint, stream.replay_endpoint):
            if where in taken:
                raise ConfigError(f"[[events]] endpoint: {where} is taken by another socket of this node")
            taken.add(where)


EVENTS: Final[Mapping[str, Parser]] = {
    "group": parse.text,
    "model": parse.text,
    "weights_revision": any_text,
    "endpoint": endpoint,
    "replay_endpoint": endpoint,
    "tenant": any_text,
    "topic": any_text,
    "hashes": parse.choice("bytes", "int"),
    "hash_seed": any_text,
    "buffer_batches": parse.between(1, 1_000_000),
    "hwm": parse.between(1, 10_000_000),
}
"""Parsers of the keys."""
