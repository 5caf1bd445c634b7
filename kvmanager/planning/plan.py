"""The plan: what each mode holds and how fast it hands over, and which one to take.

Capacities are what the core admits; for formats without an indexer, whose device pages are the engine's, pages of
`--hbm-free` are counted by the same rule (whole pages of one rank).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvmanager.configuration.config import NodeConfig
from kvmanager.configuration.groups import core_limits, plan_memory
from kvmanager.configuration.sizing import PoolSize, size_of
from kvmanager.errors import ConfigError, InvalidArgument
from kvmanager.planning.capacity import longest_request, most_at_once
from kvmanager.planning.models import Model
from kvmanager.planning.modes import DECODE, PREFILL, Machine, Mode, config_of, lacks
from kvmanager.simulation.rates import LinkRates


@dataclass(frozen=True)
class Length:
    """Requests of one length on a node.

    at_once: that run at one time. cached: whose KV the host pools hold beside. bytes: of one, all layers.
    onboard_s: over the PCIe links of those ranks that hold a part. handoff_s: by link, to one decode rank.
    """

    tokens: int
    bytes: int
    at_once: int
    cached: int
    onboard_s: float
    handoff_s: dict[str, float]


@dataclass(frozen=True)
class ModePlan:
    """One mode. why_not: why it is not possible; all else is empty then. pools: of one group, there are `groups`.

    workspace_bytes: on each GPU beside its pages, for what a step over the longest request gathers.
    """

    mode: Mode
    why_not: str
    groups: int = 0
    longest_tokens: int = 0
    hbm_page_bytes: int = 0
    hbm_pages_per_rank: int = 0
    pools: tuple[PoolSize, ...] = ()
    lengths: tuple[Length, ...] = ()
    workspace_bytes: int = 0

    def holds(self, tokens: int) -> bool:
        """Whether one request of so many tokens fits."""
        return not self.why_not and self.longest_tokens >= tokens


@dataclass(frozen=True)
class Plan:
    """All modes of one node. recommended: of the role, for requests of `context` tokens; None when none holds one."""

    model: str
    token_bytes: int
    machine: Machine
    page_rows: int
    context: int
    modes: tuple[ModePlan, ...]
    recommended: Mode | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, bytes exact."""
        return asdict(self)


def make_plan(
    model: Model,
    machine: Machine,
    lengths: tuple[int, ...],
    context: int,
    decode: bool,
    page_rows: int,
    links: LinkRates,
) -> Plan:
    """Raises InvalidArgument for lengths that the model does not have."""
    for tokens in (*lengths, context):
        if not 1 <= tokens <= model.max_tokens:
            raise InvalidArgument(f"a context of {tokens} tokens: model {model.name} has 1 to {model.max_tokens}")
    modes = tuple(_mode_plan(mode, model, machine, lengths, page_rows, links) for mode in (*PREFILL, *DECODE))
    chosen, reason = _recommend(modes, context, DECODE if decode else PREFILL, model, machine, page_rows)
    token_bytes = model.kv_format.token_bytes
    return Plan(model.name, token_bytes, machine, page_rows, context, modes, chosen, reason)


def _mode_plan(
    mode: Mode, model: Model, machine: Machine, lengths: tuple[int, ...], page_rows: int, links: LinkRates
) -> ModePlan:
    why = lacks(mode, model)
    if why:
        return ModePlan(mode, why)
    try:
        config = config_of(mode, model, machine, page_rows, Path("/run/kvmanager"))
    except (ConfigError, InvalidArgument) as error:
        return ModePlan(mode, str(error))
    spec = plan_memory(config).groups[0]
    first = spec.name
    pools = tuple(pool for pool in size_of(config, 1).pools if pool.pool.startswith(f"{first}/"))
    if model.sparse:
        unit = config.groups[0].unit_bytes
        longest = longest_request(spec, core_limits(config), model.max_tokens)
    else:
        unit = config.groups[0].kv_format.page_bytes(page_rows)
        longest = min(machine.hbm_bytes // unit * page_rows, model.max_tokens)
    pages = machine.hbm_bytes // unit
    told = tuple(_length(mode, model, machine, config, pools, tokens, longest, pages, links) for tokens in lengths)
    workspace = spec.workspace.pages * spec.workspace.page_bytes if spec.workspace else 0
    return ModePlan(mode, "", _serving(config), longest, unit, pages, pools, told, workspace)


def _serving(config: NodeConfig) -> int:
    """Groups that requests are opened in."""
    return sum(not group.workspace_for for group in config.groups)


def _length(
    mode: Mode,
    model: Model,
    machine: Machine,
    config: NodeConfig,
    pools: tuple[PoolSize, ...],
    tokens: int,
    longest: int,
    pages: int,
    links: LinkRates,
) -> Length:
    section = config.groups[0]
    at_once = 0
    if tokens <= longest:
        if model.sparse:
            at_once = most_at_once(plan_memory(config).groups[0], tokens, core_limits(config))
        else:
            at_once = pages // -(-tokens // section.page_rows)
    size = model.kv_format.token_bytes * tokens
    sharers = machine.gpus if mode is Mode.PCP_DCP or (mode is Mode.TP and model.heads > 1) else 1
    host = [pool for pool in pools if pool.tier == "host"]
    held = _host_pages(mode, model, host[0].pages, section.page_rows) if host else 0
    held *= section.page_rows * (machine.gpus if mode is Mode.PCP_DCP else 1)
    cached = held // _host_tokens(mode, tokens, section.page_rows, machine.gpus)
    # Replicated ranks each load all of it; shards are read from as many adapters, and arrive over the target's one.
    onboard = size / sharers / links.host_to_device_bytes_per_s
    handoff = {"nic": size / links.nic_bytes_per_s, "nvlink": size / links.nvlink_bytes_per_s}
    groups = _serving(config)
    return Length(tokens, size, at_once * groups, cached * groups, onboard, handoff)


def _host_pages(mode: Mode, model: Model, units: int, page_rows: int) -> int:
    """Pages of tokens in the host pool; a decode rank's slabs hold latents, and many indexer pages each."""
    if mode is not Mode.HISPARSE:
        return units
    form = model.kv_format
    per_slab = form.slab_bytes(page_rows) // form.indexer_page_bytes(page_rows)
    return units * per_slab // (per_slab + 1)


def _host_tokens(mode: Mode, tokens: int, page_rows: int, gpus: int) -> int:
    """Tokens of host pages that a request's KV fills, the last span in whole."""
    span = page_rows * (gpus if mode is Mode.PCP_DCP else 1)
    return -(-tokens // span) * span


def _recommend(
    modes: tuple[ModePlan, ...], context: int, of: tuple[Mode, ...], model: Model, machine: Machine, page_rows: int
) -> tuple[Mode | None, str]:
    """Of the modes that hold a request of `context` tokens, the one that runs most of them at one time."""
    fitting = [plan for plan in modes if plan.mode in of and plan.holds(context)]
    if not fitting:
        longest = max((plan.longest_tokens for plan in modes if plan.mode in of), default=0)
        return None, f"no mode holds a request of {context} tokens; the longest that fits is {longest}"
    counts = {plan.mode: _at_once(plan, model, machine, page_rows, context) for plan in fitting}
    best = max(fitting, key=lambda plan: counts[plan.mode])
    runs = ", ".join(f"{mode} {count}" for mode, count in counts.items())
    return best.mode, f"requests of {context} tokens at one time, on the node: {runs}"


def _at_once(plan: ModePlan, model: Model, machine: Machine, page_rows: int, context: int) -> int:
    if not model.sparse:
        return plan.groups * (plan.hbm_pages_per_rank // -(-context // page_rows))
    config = config_of(plan.mode, model, machine, page_rows, Path("/run/kvmanager"))
    return plan.groups * most_at_once(plan_memory(config).groups[0], context, core_limits(config))
