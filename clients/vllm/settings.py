"""The connector's configuration, from `kv_connector_extra_config`, and what the engine says of itself."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvmanager.errors import ConfigError
from kvmanager.layout import KVFormat
from kvmanager.protos import kvmanager_pb2 as pb

KEY_HASHES: Final = {"sha256": "vllm_sha256", "sha256_cbor": "sha256_cbor"}
"""vLLM's name of a block hash -> ours. Others are made anew in every process, so their keys mean nothing to others."""
KEY_BYTES: Final = 32
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "config.json")


@dataclass(frozen=True)
class Settings:
    """Where the daemon is and who asks.

    namespace: said by the user, to keep apart what looks alike. weights: the user's name for model and weights, in
    place of the folder they lie in and its files' times, which differ from machine to machine. hold_s: how long a
    finished request's blocks may be kept for their save. call_timeout_s: a daemon that answers nothing for so long is
    away. memory_group: the node's group of kind "engine" that the engine's own blocks lie in; "": in memory of the
    engine. memory_wait_s: how long its start waits for that.
    token_ids: whether KV events tell the token ids of what it stores; keys with and without are never shared.
    """

    runtime_dir: Path
    group: str
    engine: str
    namespace: str = ""
    hold_s: float = 2.0
    call_timeout_s: float = 1.0
    weights: str = ""
    memory_group: str = ""
    memory_wait_s: float = 30.0
    token_ids: bool = False

    @classmethod
    def of(cls, extra: Mapping[str, Any], engine_id: str) -> Settings:
        """Reads the connector's keys. Raises ConfigError for one that is missing, unknown or of the wrong type."""
        known: dict[str, type[Any]] = {
            "runtime_dir": str, "group": str, "engine": str, "namespace": str, "hold_s": float, "call_timeout_s": float,
            "weights": str, "memory_group": str, "memory_wait_s": float,
            "token_ids": bool,
        }  # fmt: skip
        for key, value in extra.items():
            if key not in known:
                raise ConfigError(f"kv_connector_extra_config: unknown key {key!r}; known are {', '.join(known)}")
            wanted = (int, float) if known[key] is float else known[key]
            if not isinstance(value, wanted):
                raise ConfigError(f"kv_connector_extra_config: {key} is {value!r}, not a {known[key].__name__}")
        for key in ("runtime_dir", "group"):
            if not extra.get(key):
                raise ConfigError(f"kv_connector_extra_config: missing key {key!r}")
        return cls(
            Path(extra["runtime_dir"]),
            extra["group"],
            extra.get("engine") or f"vllm-{engine_id}",
            extra.get("namespace", ""),
            float(extra.get("hold_s", 2.0)),
            float(extra.get("call_timeout_s", 1.0)),
            extra.get("weights", ""),
            extra.get("memory_group", ""),
            float(extra.get("memory_wait_s", 30.0)),
            extra.get("token_ids", False),
        )


def revision_of(model: str, revision: str | None, parts: Mapping[str, object]) -> str:
    """What tells two sets of weights apart: the revision, for a local folder its files, and what `parts` names.

    model: "" for one whose files do not count.
    """
    digest = hashlib.sha256()
    folder = Path(model)
    if model and folder.is_dir():
        for path in sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)}):
            seen = path.stat()
            digest.update(f"{path.name}:{seen.st_size}:{seen.st_mtime_ns}\n".encode())
    for name, value in sorted(parts.items()):
        digest.update(f"{name}={value}\n".encode())
    return f"{revision or ''}/{digest.hexdigest()[:16]}"


def namespace_of(model: str, revision: str, kv_format: KVFormat, key_hash: str, key_tokens: int) -> pb.Namespace:
    """The namespace of an engine's keys. Raises ConfigError for a hash whose keys mean nothing elsewhere."""
    if key_hash not in KEY_HASHES:
        raise ConfigError(f"prefix_caching_hash_algo {key_hash!r}: its keys change with every process; use sha256_cbor")
    return pb.Namespace(
        model=model, weights_revision=revision, kv_format=kv_format.name, key_hash=KEY_HASHES[key_hash],
        key_bytes=KEY_BYTES, key_tokens=key_tokens, hash_seed=os.environ.get("PYTHONHASHSEED", ""),
    )  # fmt: skip


def group_table(settings: Settings, kv_format: KVFormat, page_rows: int, ranks: int) -> str:
    """The lines that a node's configuration needs for this engine."""
    shape = f'format = "{kv_format.name}"\nranks = {ranks}\npage_rows = {page_rows}\n'
    lines = f'[[group]]\nname = "{settings.group}"\nkind = "cache"\n{shape}host_bytes_per_rank = "8 GiB"\n'
    if settings.memory_group:
        lines += f'[[group]]\nname = "{settings.memory_group}"\nkind = "engine"\n{shape}hbm_bytes_per_rank = "8 GiB"\n'
    return lines
