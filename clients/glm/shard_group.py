"""The ranks of a PCP x DCP group as threads of one process: what an engine with all its ranks in one place runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.pcp import WRITER
from kvmanager.clients.glm.pcp_rank import prefill_over_shards
from kvmanager.clients.glm.ranks import RankGroup, run_threads
from kvmanager.clients.glm.region_rows import Bytes
from kvmanager.clients.glm.shard_store import ShardStore
from kvmanager.clients.glm.workspace import GatheredStore, Workspace
from kvmanager.errors import InvalidArgument
from kvmanager.geometry import Int64Array, ShardGeometry
from kvmanager.layout import KVLayout


class ShardGroup:
    """A shard of one request's rows and a workspace on each of N ranks, and one model for all of them."""

    def __init__(
        self, model: Glm, memories: Sequence[Bytes | Tensor], spaces: Sequence[Workspace], layout: KVLayout,
        geometry: ShardGeometry,
    ) -> None:  # fmt: skip
        """`memories`, `spaces`: of the ranks, in their order; a step takes each workspace as one lease.

        Raises InvalidArgument when they are not as many as the ranks.
        """
        if not len(memories) == len(spaces) == geometry.ranks:
            each = f"{len(memories)} memories and {len(spaces)} workspaces"
            raise InvalidArgument(f"{each} for {geometry.ranks} ranks; give one of each a rank")
        self._model = model
        self._geometry = geometry
        self.shards = [ShardStore(memory, layout, geometry, rank) for rank, memory in enumerate(memories)]
        """By rank."""
        self._spaces = spaces

    def start(self, pages: Int64Array) -> None:
        """A request. `pages` int64[spans]: each span's page index, the same on all ranks."""
        for shard in self.shards:
            shard.set_span_pages(pages)

    def prefill(self, tokens: Sequence[int], start: int, next_tokens: Sequence[int]) -> Tensor:
        """One step on all ranks, as `pcp_rank.prefill_on_rank`; post-norm hidden [h] of its last token.

        Raises PoolExhausted, and computes nothing, where the workspaces don't hold the context.
        """
        layers = tuple(range(self._model.config.layers))

        def work(ranks: RankGroup) -> Tensor:
            store = GatheredStore(self.shards[ranks.rank], ranks, self._spaces[ranks.rank], layers)
            return prefill_over_shards(self._model, store, ranks, tokens, start, next_tokens)

        return run_threads(self._geometry.ranks, work)[WRITER]

    def write_mtp_row(self, next_token: int, post_norm: Tensor, position: int) -> None:
        """Writes the MTP row at `position`, whose next token is known now; `post_norm` [h] is the state there."""
        positions = torch.tensor([position])
        rows = self._model.mtp_layer_rows(torch.tensor([next_token]), post_norm.unsqueeze(0), positions)
        for shard in self.shards:
            self._model.write_rows(self._model.config.mtp_layer, positions, rows, shard)
