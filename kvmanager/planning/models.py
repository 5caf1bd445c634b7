"""Models to plan for: known ones by name, others by a small TOML file.

    name = "llama-3.1-70b"
    max_tokens = 131072
    [gqa]                      # or: format = "NAME", or a table [mla]
    layers = 80
    heads = 8                  # KV heads
    head_bytes = 512           # K and V of one head, one token, one layer
    dtype = "bfloat16"

`[mla]` has layers, row_bytes (latent and rope values of a token and layer) and dtype.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from kvmanager.errors import InvalidArgument
from kvmanager.layout import KVFormat, format_named, plain_format

KNOWN: Final = ("glm-5.3",)
_TABLES: Final = {"gqa": ("layers", "heads", "head_bytes", "dtype"), "mla": ("layers", "row_bytes", "dtype")}


@dataclass(frozen=True)
class Model:
    """A model's KV. heads: KV heads that tensor parallelism can deal out; 1: every rank needs all of a token's rows."""

    name: str
    max_tokens: int
    kv_format: KVFormat
    layers: int
    heads: int
    head_bytes: int
    dtype: str

    @property
    def sparse(self) -> bool:
        """Whether it has an indexer, so that the daemon may own its device pages and HiSparse is possible."""
        return self.kv_format.index_value_bytes > 0

    def on_one_of(self, ranks: int) -> KVFormat:
        """What one of `ranks` tensor-parallel ranks keeps of a token. Raises InvalidArgument."""
        if self.sparse or self.heads == 1:
            return self.kv_format
        if self.heads % ranks and ranks % self.heads:
            raise InvalidArgument(f"model {self.name}: {self.heads} KV heads can't be dealt out over {ranks} ranks")
        return plain_format(self.dtype, self.layers, max(1, self.heads // ranks), self.head_bytes)


def load_model(name: str) -> Model:
    """A model by its name or the path of its file. Raises InvalidArgument."""
    if name in KNOWN:
        return _model(files("kvmanager.planning").joinpath(f"data/{name}.toml").read_text("utf-8"), name)
    path = Path(name)
    if path.suffix != ".toml":
        raise InvalidArgument(f"no model {name!r}: known are {', '.join(KNOWN)}; others by a file NAME.toml")
    try:
        return _model(path.read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"can't read the model file {name}: {error}") from error


def _model(text: str, where: str) -> Model:
    try:
        told = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{where}: not valid TOML: {error}") from error
    kinds = [kind for kind in ("format", *_TABLES) if kind in told]
    if len(kinds) != 1:
        raise InvalidArgument(f"{where}: say what a token's KV is by one of format, [gqa], [mla]; it has {kinds}")
    kind = kinds[0]
    _check_keys(told, ("name", "max_tokens", kind), where)
    name, max_tokens = _text(told, "name", where), _count(told, "max_tokens", where)
    if kind == "format":
        form = format_named(_text(told, "format", where))
        if not form.index_value_bytes:
            raise InvalidArgument(f"{where}: write a format without an indexer as a table [gqa] or [mla]")
        return Model(name, max_tokens, form, form.layers, 1, 0, "")
    table = told[kind]
    if not isinstance(table, dict):
        raise InvalidArgument(f"{where}: write [{kind}] as a table")
    _check_keys(table, _TABLES[kind], f"{where} [{kind}]")
    layers, dtype = _count(table, "layers", where), _text(table, "dtype", where)
    heads = _count(table, "heads", where) if kind == "gqa" else 1
    row = _count(table, "head_bytes" if kind == "gqa" else "row_bytes", where)
    return Model(name, max_tokens, plain_format(dtype, layers, heads, row), layers, heads, row, dtype)


def _check_keys(table: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    if set(table) != set(keys):
        raise InvalidArgument(f"{where}: has the keys {', '.join(sorted(table))}; it takes {', '.join(keys)}")


def _count(table: dict[str, Any], key: str, where: str) -> int:
    value = table[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(f"{where} {key}: {value!r} is not a whole number of at least 1")
    return value


def _text(table: dict[str, Any], key: str, where: str) -> str:
    value = table[key]
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{where} {key}: {value!r} is not a non-empty string")
    return value
