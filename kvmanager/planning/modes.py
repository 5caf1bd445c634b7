"""Parallel modes as configurations of a node: the text of a file that `kvmanager serve` takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvmanager.configuration.config import NodeConfig
from kvmanager.configuration.reading import parse_config
from kvmanager.errors import InvalidArgument
from kvmanager.geometry import ShardGeometry
from kvmanager.layout import workspace_format
from kvmanager.planning.models import Model
from kvmanager.units import MIB

HOT_ROWS: Final = 10_240
"""A hot buffer with three draft tokens: five times a top-k of 2,048."""
CHUNK_BYTES: Final = 32 * MIB
STAGING_CHUNKS: Final = 8


class Mode(StrEnum):
    """How a node's GPUs share the work and the KV."""

    DP = "dp"                      # a prompt stays on one GPU, with all its KV
    TP = "tp"                      # heads are split; latents lie on every GPU
    PCP = "pcp"                    # tokens of a step are split; the KV lies on every GPU
    PCP_DCP = "pcp-dcp"            # the same, and every GPU keeps each n-th token
    OFFLOAD_ONLY = "offload-only"  # decode ranks; a request fits the HBM of one GPU
    HISPARSE = "hisparse"          # decode ranks; latents of running requests also on the host


PREFILL: Final = (Mode.DP, Mode.TP, Mode.PCP, Mode.PCP_DCP)
DECODE: Final = (Mode.OFFLOAD_ONLY, Mode.HISPARSE)


@dataclass(frozen=True)
class Machine:
    """What a node has: GPUs, HBM bytes a GPU left for KV pages, host bytes of the whole node."""

    gpus: int
    hbm_bytes: int
    host_bytes: int

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.hbm_bytes < 1:
            raise InvalidArgument(f"{self.gpus} GPUs with {self.hbm_bytes} B of HBM for pages: both must be at least 1")

    @property
    def host_bytes_per_rank(self) -> int:
        """The share of one GPU."""
        return self.host_bytes // self.gpus


def lacks(mode: Mode, model: Model) -> str:
    """Why a mode is not possible with a model's format; "" when it is."""
    if mode in (Mode.DP, Mode.TP) or model.sparse:
        return ""
    if mode is Mode.HISPARSE:
        return "the model has no indexer, so no kernel reads single rows from the host"
    return "the daemon owns device pages of formats with an indexer only; engines keep others' themselves"


def config_text(mode: Mode, model: Model, machine: Machine, page_rows: int, runtime_dir: Path) -> str:
    """The node's TOML file. Raises InvalidArgument for a mode that the model lacks."""
    why = lacks(mode, model)
    if why:
        raise InvalidArgument(f"mode {mode} with model {model.name}: {why}")
    name = f"{model.name}-{mode}"
    each = mode in (Mode.DP, *DECODE)
    groups = [f"rank{rank}" for rank in range(machine.gpus)] if each else ["all"]
    keys = _group_keys(mode, model, machine, page_rows)
    chunk = max(CHUNK_BYTES, -(-_page_bytes(mode, model, machine, page_rows) // MIB) * MIB)
    lines = [f"# {model.name}, {mode}: made by `kvmanager plan`.", "", "[node]", f'name = "{name}"']
    lines += [f'runtime_dir = "{runtime_dir}"', "", "[mover]", f"staging_bytes = {STAGING_CHUNKS * chunk}"]
    lines += [f"chunk_bytes = {chunk}"]
    for group in groups:
        lines += ["", "[[group]]", f'name = "{group}"', *(f"{key} = {value}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def config_of(mode: Mode, model: Model, machine: Machine, page_rows: int, runtime_dir: Path) -> NodeConfig:
    """The same, read. Raises ConfigError, for example where a rank's memory holds no page."""
    return parse_config(config_text(mode, model, machine, page_rows, runtime_dir))


def _page_bytes(mode: Mode, model: Model, machine: Machine, page_rows: int) -> int:
    form = model.on_one_of(machine.gpus) if mode is Mode.TP else model.kv_format
    return form.page_bytes(page_rows)


def _group_keys(mode: Mode, model: Model, machine: Machine, page_rows: int) -> dict[str, str | int]:
    """Keys of each of the node's groups."""
    together = mode in (Mode.TP, Mode.PCP, Mode.PCP_DCP)
    form = model.on_one_of(machine.gpus) if mode is Mode.TP else model.kv_format
    keys: dict[str, str | int] = {"kind": '"cache"', "format": f'"{form.name}"'}
    keys["ranks"] = machine.gpus if together else 1
    keys["page_rows"] = page_rows
    keys["host_bytes_per_rank"] = machine.host_bytes_per_rank
    if not model.sparse:
        return keys
    keys["hbm_bytes_per_rank"] = machine.hbm_bytes
    kinds = {Mode.TP: "replicated", Mode.PCP: "replicated", Mode.HISPARSE: "hisparse"}
    keys["kind"] = f'"{kinds.get(mode, "sharded")}"'
    if mode is Mode.PCP_DCP:
        keys["interleave"] = 1
        if machine.gpus > 1:
            geometry = ShardGeometry(machine.gpus, page_rows, 1)
            longest = min(model.max_tokens, machine.hbm_bytes // form.page_bytes(page_rows) * geometry.span_tokens)
            keys["workspace_bytes_per_rank"] = geometry.workspace_rows(longest) * workspace_format(form).token_bytes
    if mode is Mode.HISPARSE:
        keys |= {"token_order": '"keep"', "source_ranks": machine.gpus, "source_interleave": 1}
        keys["hot_rows"] = -(-HOT_ROWS // page_rows) * page_rows
    return keys
