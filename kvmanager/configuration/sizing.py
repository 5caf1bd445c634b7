"""What a configuration gives: pages a rank, what lies beside them, and whether a request of some length fits.

Pure: nothing is allocated. Whether a request fits is asked of the core itself, on an empty node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvmanager.configuration.config import NodeConfig
from kvmanager.configuration.groups import core_limits, offload_pool_name, plan_memory
from kvmanager.configuration.groupsection import GroupSection
from kvmanager.core.events import (
    Attached,
    AttachRank,
    Open,
    Opened,
    Registered,
    RegisterEngine,
    Replied,
    Step,
    TicketInfo,
)
from kvmanager.core.extents import PoolExtents
from kvmanager.core.node import Node
from kvmanager.core.spec import BOUNCE, GroupSpec, Limits, PoolSpec
from kvmanager.errors import CapacityError
from kvmanager.layout import workspace_format
from kvmanager.units import MIB

CUDA_CONTEXT_BYTES: Final = 518 * MIB
"""Device memory of one process's CUDA context, as measured on an H200 with driver 580.159."""
_KEY_BYTES: Final = 16


@dataclass(frozen=True)
class PoolSize:
    """One pool: `pages` of `page_bytes` each on each of `ranks` ranks (slabs in a hisparse group).

    A replicated group has one host pool over all shares, so `ranks` is 1 there.
    page_total_bytes: of one rank, all pages. unused_bytes: of one rank, too little for a further page.
    Of a pool that shares a region: what its ceiling allows.
    tokens: how many its pages hold, if they hold nothing else (latents alone in a hisparse group).
    """

    pool: str
    tier: str
    ranks: int
    pages: int
    page_bytes: int
    page_total_bytes: int
    unused_bytes: int
    tokens: int


@dataclass(frozen=True)
class Beside:
    """Device memory of one rank that is not pages of its pool, in bytes.

    workspace: what a step over the longest request asked for gathers (a DCP group only): one layer, and the next. A
    pool of its own where the group has workspace_bytes_per_rank, and then admission asks for as much of it.
    staging, context: ring and CUDA context of the rank's mover. hot_buffer: of one request, taken from the slabs.
    """

    group: str
    workspace_bytes: int
    staging_bytes: int
    context_bytes: int
    hot_buffer_bytes: int


@dataclass(frozen=True)
class Fit:
    """One request of `tokens` tokens on an empty group.

    held: pool -> (pages or slabs taken and promised a rank, bytes of them a rank); empty when `refusal` says why not.
    whole_lacks_slabs: of a decode rank, what the host lacks for it to be retracted as a whole.
    """

    group: str
    tokens: int
    held: dict[str, tuple[int, int]]
    refusal: CapacityError | None
    whole_lacks_slabs: int = 0


@dataclass(frozen=True)
class Sizing:
    """The account of one configuration."""

    pools: tuple[PoolSize, ...]
    beside: tuple[Beside, ...]
    fits: tuple[Fit, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, bytes exact."""
        return {
            "pools": [dict(vars(line)) for line in self.pools],
            "beside": [dict(vars(line)) for line in self.beside],
            "fits": [_plain_fit(fit) for fit in self.fits],
        }


def _plain_fit(fit: Fit) -> dict[str, Any]:
    plain: dict[str, Any] = {"group": fit.group, "tokens": fit.tokens, "fits": fit.refusal is None}
    plain["whole_lacks_slabs"] = fit.whole_lacks_slabs
    plain["held"] = {pool: {"pages": pages, "bytes_per_rank": size} for pool, (pages, size) in fit.held.items()}
    if fit.refusal is not None:
        error = fit.refusal
        plain["refusal"] = {"message": str(error), "pool": error.pool, "needed": error.needed, "free": error.free}
    return plain


def size_of(config: NodeConfig, tokens: int) -> Sizing:
    """The account of a configuration, and whether each group holds one request of `tokens` tokens."""
    specs = plan_memory(config).groups
    limits = core_limits(config)
    pools = [line for section, spec in zip(config.groups, specs, strict=True) for line in _pools(section, spec)]
    ranks = [(section, spec) for section, spec in zip(config.groups, specs, strict=True) if not section.workspace_for]
    beside = tuple(_beside(config, section, tokens) for section, _ in ranks)
    return Sizing(tuple(pools), beside, tuple(fit(spec, tokens, limits) for _, spec in ranks))


def _pools(section: GroupSection, spec: GroupSpec) -> list[PoolSize]:
    lines = []
    for pool in spec.pools:
        given = _given(section, pool)
        pages = pool.slabs if pool.extents is None else PoolExtents.of(pool).most_slabs(pool.extents.ceiling)
        unused = given * (section.ranks // pool.ranks) - pages * pool.slab_bytes if pool.extents is None else 0
        fewest = min(count for _, count in pool.per_slab)
        tokens = pages * fewest * (pool.ranks if section.kind == "sharded" else 1) * section.page_rows
        lines.append(
            PoolSize(
                pool.name,
                pool.tier,
                pool.ranks,
                pages,
                pool.slab_bytes,
                pages * pool.slab_bytes,
                unused,
                tokens,
            )
        )
    return lines


def _given(section: GroupSection, pool: PoolSpec) -> int:
    """Bytes a rank that the configuration gives a pool."""
    if pool.tier in ("device", BOUNCE):
        return section.hbm_bytes_per_rank or section.bounce_bytes_per_rank
    if section.host_split == "strict":
        offload = section.offload_bytes_per_rank
        return offload if pool.name == offload_pool_name(section.name) else section.host_bytes_per_rank - offload
    return section.host_bytes_per_rank


def _beside(config: NodeConfig, section: GroupSection, tokens: int) -> Beside:
    gathers = section.kind == "sharded" and section.ranks > 1
    row_bytes = workspace_format(section.kv_format).token_bytes
    return Beside(
        section.name,
        section.geometry.workspace_rows(tokens) * row_bytes if gathers else 0,
        config.mover.staging_bytes,
        CUDA_CONTEXT_BYTES,
        section.hot_slabs * section.unit_bytes,
    )


def fit(spec: GroupSpec, tokens: int, limits: Limits) -> Fit:
    """Opens one request on an empty group. On a decode rank of hybrid HiSparse it arrives by hand-off.

    A group that one engine holds as a whole is asked for all of it: how long a request may be is the engine's matter.
    """
    if spec.one_holder:
        tokens = spec.pools[0].slabs * spec.page_rows
    node = Node([spec], limits)
    prints = tuple(c.layout.fingerprint for chain in spec.chains for c in chain.classes)
    registered = _answer(node, RegisterEngine("sizing", spec.name, b"", _KEY_BYTES, spec.page_rows, prints, spec.ranks))
    assert isinstance(registered, Registered)
    for rank in range(spec.ranks):
        assert isinstance(_answer(node, AttachRank("sizing", registered.epoch, rank, rank)), Attached)
    ticket = TicketInfo("sizing", "", tokens, 0) if spec.sparse is not None else None
    # Keys of an empty index match nothing, so any will do.
    wanted = Open(1, tokens, 0, bytes(tokens // spec.page_rows * _KEY_BYTES), ticket=ticket)
    opened: Opened = _answer(node, Step("sizing", registered.epoch, 1, opens=(wanted,))).opened[0]
    if opened.error is not None:
        if not isinstance(opened.error, CapacityError):
            raise opened.error
        return Fit(spec.name, tokens, {}, opened.error)
    pools = node.state.groups[spec.name].pools.values()
    taken = {pool.name: pool.slabs - pool.free_slabs + pool.promised_slabs for pool in pools}
    sizes = {pool.name: pool.slab_bytes for pool in spec.pools}
    held = {name: (count, count * sizes[name]) for name, count in taken.items() if count}
    return Fit(spec.name, tokens, held, None, opened.whole_lacks_slabs)


def _answer(node: Node, event: RegisterEngine | AttachRank | Step) -> Any:
    """The core's answer. Raises its KVError."""
    reply = node.apply(event, 0)[0]
    assert isinstance(reply, Replied)
    if isinstance(reply.answer, Exception):
        raise reply.answer
    return reply.answer
