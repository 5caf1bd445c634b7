"""The temporary full copy of one layer that PCP ranks with DCP shards attend over."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvmanager.clients.glm.ranks import Gather, RankGroup, pad_to
from kvmanager.clients.glm.shard_store import ShardStore
from kvmanager.errors import InvariantViolation, KVError, PoolExhausted
from kvmanager.geometry import ShardGeometry
from kvmanager.layout import INDEX_VALUE_BYTES, LATENT_ROW_BYTES

INDEX_ROW_BYTES: Final = INDEX_VALUE_BYTES + 4
"""Key and scale."""
TOKEN_BYTES: Final = LATENT_ROW_BYTES + INDEX_ROW_BYTES
"""Bytes a token of one full copy: one layer's latent row and indexer key."""


@dataclass(frozen=True)
class FullCopy:
    """One layer of a context, shard after shard.

    Latent rows uint8[rows, 656], indexer keys with scales uint8[rows, 132]: views of a workspace, which hold layer
    after layer.
    """

    latent: Tensor
    index: Tensor


class Workspace:
    """Device memory for two full copies; one step holds it at a time.

    `memory`: uint8, one dimension. `pool`: its line in an account, for refusals.
    """

    def __init__(self, memory: Tensor, pool: str = "workspace") -> None:
        self._memory = memory
        self._pool = pool
        self.held = False
        """Whether a step has it."""
        self.leases = 0
        """Leases so far."""

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._memory.device

    def lease(self, rows: int) -> tuple[FullCopy, FullCopy]:
        """Takes it for a step: a copy of `rows` rows to compute from, one to gather the next layer in.

        Raises PoolExhausted where it is too small.
        """
        if self.held:
            raise InvariantViolation("the workspace is held by a step that has not ended")
        needed = 2 * rows * TOKEN_BYTES
        if needed > len(self._memory):
            raise PoolExhausted(
                f"a step over {rows} rows needs {needed} bytes of workspace; it has {len(self._memory)}",
                pool=self._pool,
                needed=needed,
                free=len(self._memory),
            )
        self.held = True
        self.leases += 1
        first, second = self._memory[:needed].view(2, -1)
        return _full_copy(first, rows), _full_copy(second, rows)

    def end(self) -> None:
        """The step is over."""
        assert self.held
        self.held = False


def _full_copy(memory: Tensor, rows: int) -> FullCopy:
    index = rows * LATENT_ROW_BYTES
    return FullCopy(memory[:index].view(rows, LATENT_ROW_BYTES), memory[index:].view(rows, INDEX_ROW_BYTES))


def workspace_bytes(geometry: ShardGeometry, tokens: int) -> int:
    """What a step needs whose context ends with `tokens` tokens: every shard as long as the longest, twice."""
    return geometry.workspace_rows(tokens) * TOKEN_BYTES


@dataclass
class _Coming:
    """Shards of one layer on their way into `copy`, of the context before the step."""

    layer: int
    copy: FullCopy
    gathers: list[Gather]


@dataclass
class _Step:
    """A step under way. `rows` int64[tokens]: where each position lies in a copy; `free`: the copy not in use.

    `own`: this rank's positions of the context before the step; `longest`: rows of a shard in a copy.
    """

    rows: Tensor
    own: Tensor
    longest: int
    leaders: frozenset[int]
    copy: FullCopy
    free: FullCopy
    layer: int = -1
    coming: _Coming | None = None


class GatheredStore:
    """A `KVStore` over one rank's shard whose reads come from a full copy of the layer being computed.

    Rows come and go as CPU tensors, wherever shard and workspace lie.

    A step is `begin`, the layers in order, `end`. The first write to a layer makes it the one in the copy: earlier
    tokens' rows come from all shards, the step's own rows from the write, which has those of all ranks. The shards of
    the next layer are asked for at that time, and land in the other half of the workspace while this layer is computed.
    """

    def __init__(self, shard: ShardStore, ranks: RankGroup, workspace: Workspace, layers: tuple[int, ...]) -> None:
        """`layers`: those that are attended, in their order; rows of others are stored only."""
        assert (shard.rank, shard.geometry.ranks) == (ranks.rank, ranks.size)
        self._shard = shard
        self._ranks = ranks
        self._workspace = workspace
        self._next = dict(zip(layers, (*layers[1:], None), strict=True))
        self._first = layers[0]
        self._step: _Step | None = None

    def begin(self, start: int, end: int, leaders: frozenset[int]) -> None:
        """A step over positions start..end-1, rows of earlier ones being in the shards. Raises as `lease` does."""
        geometry = self._shard.geometry
        longest = geometry.longest_shard(end)
        copy, free = self._workspace.lease(geometry.ranks * longest)
        spans, ranks, slots = geometry.place(torch.arange(end).numpy())
        rows = torch.from_numpy(ranks * longest + spans * geometry.page_rows + slots)
        self._step = _Step(rows, self._shard.own_positions(start), longest, leaders, copy, free)
        try:
            self._ask(self._first)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """The step's last layer is done, or it failed; then what still travels has landed or never will."""
        step = self._running
        if step.coming is not None:
            for gather in step.coming.gathers:
                with contextlib.suppress(KVError):  # whoever ends a step that failed knows why
                    gather.wait()
        self._step = None
        self._workspace.end()

    def write_latent(self, layer: int, positions: Tensor, rows: Tensor) -> None:
        """Stores the rows uint8[T, 656] of the whole step: those of this rank for good, all of them in the copy."""
        self._shard.write_latent(layer, positions, rows)
        if layer in self._next:
            self._enter(layer)
            _put(self._running.copy.latent, self._running.rows[positions], rows)

    def write_index(self, layer: int, positions: Tensor, values: Tensor, scales: Tensor) -> None:
        """Stores keys uint8[T, 128] and scales float32[T] likewise; after the layer's latent rows."""
        self._shard.write_index(layer, positions, values, scales)
        if layer in self._next:
            step = self._of(layer)
            _put(step.copy.index, step.rows[positions], _index_rows(values, scales))

    def index_keys(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """(uint8[tokens, 128], float32[tokens]) of positions 0..tokens-1."""
        step = self._of(layer)
        rows = _get(step.copy.index, step.rows[:tokens])
        scales = rows[:, INDEX_VALUE_BYTES:].contiguous().view(torch.float32).view(-1)
        return rows[:, :INDEX_VALUE_BYTES], scales

    def prepare(self, leader: int, selection: Tensor) -> None:
        """Nothing to do: the copy has every row."""

    def latent_rows(self, layer: int, selection: Tensor) -> Tensor:
        """uint8[T, k, 656]."""
        step = self._of(layer)
        return _get(step.copy.latent, step.rows[selection.clamp(min=0)])

    @property
    def _running(self) -> _Step:
        if self._step is None:
            raise InvariantViolation("rows are read or written outside a step")
        return self._step

    def _of(self, layer: int) -> _Step:
        """The step, in which `layer` is the one in the copy."""
        step = self._running
        if step.layer != layer:
            raise InvariantViolation(f"layer {layer} is asked for while layer {step.layer} is in the copy")
        return step

    def _enter(self, layer: int) -> None:
        """Makes `layer` the one in the copy, and asks for the one after it."""
        step = self._running
        if layer == step.layer:
            return
        coming = step.coming
        if coming is None or coming.layer != layer:
            raise InvariantViolation(f"layer {layer} out of its order")
        for gather in coming.gathers:
            gather.wait()
        step.coming = None
        step.layer, step.copy, step.free = layer, coming.copy, step.copy
        following = self._next[layer]
        if following is not None:
            self._ask(following)

    def _ask(self, layer: int) -> None:
        """Begins to gather the shards of `layer` in the copy that is not in use."""
        step = self._running
        step.coming = _Coming(layer, step.free, [])
        self._gather(self._shard.latent_rows(layer, step.own), step.free.latent)
        if layer in step.leaders:
            self._gather(_index_rows(*self._shard.index_keys_of(layer, step.own)), step.free.index)

    def _gather(self, shard: Tensor, rows: Tensor) -> None:
        step = self._running
        assert step.coming is not None
        shards = rows.view(self._ranks.size, step.longest, rows.shape[1])
        step.coming.gathers.append(self._ranks.start_gather(pad_to(shard, step.longest), shards))


def _put(copy: Tensor, at: Tensor, rows: Tensor) -> None:
    """Stores rows of the CPU, wherever the copy lies."""
    copy[at.to(copy.device)] = rows.to(copy.device)


def _get(copy: Tensor, at: Tensor) -> Tensor:
    return copy[at.to(copy.device)].cpu()


def _index_rows(values: Tensor, scales: Tensor) -> Tensor:
    return torch.cat((values, scales.contiguous().view(torch.uint8).view(len(scales), 4)), dim=1)
