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
from kvmanager.clients.glm.workspace import GatheredStore, Workspace, workspace_bytes
from kvmanager.errors import InvalidArgument
from kvmanager.geometry import Int64Array, ShardGeometry
from kvmanager.layout import KVLayout


class ShardGroup:
    """A shard of one request's rows and a workspace on each of N ranks, and one model for all of them."""

    def __init__(self, model: Glm, memories: Sequence[Bytes], layout: KVLayout, geometry: ShardGeometry) -> None:
        """`memories`: of the ranks, in their order. Raises InvalidArgument when they are not as many as the ranks."""
        if len(memories) != geometry.ranks:
            raise InvalidArgument(f"{len(memories)} memories for {geometry.ranks} ranks; give one a rank")
        self._model = model
        self._geometry = geometry
        self.shards = [ShardStore(memory, layout, geometry, rank) for rank, memory in enumerate(memories)]
        """By rank."""
        self._workspaces: list[Workspace] = []
        self._reserved_bytes = 0

    def start(self, pages: Int64Array, tokens: int) -> None:
        """A request of at most `tokens` tokens. `pages` int64[spans]: each span's page index, the same on all ranks.

        The workspaces grow to what the longest request so far needs.
        """
        for shard in self.shards:
            shard.set_span_pages(pages)
        needed = workspace_bytes(self._geometry, tokens)
        if needed > self._reserved_bytes:
            self._reserved_bytes = needed
            self._workspaces = [Workspace(torch.empty(needed, dtype=torch.uint8)) for _ in self.shards]

    def prefill(self, tokens: Sequence[int], start: int, next_tokens: Sequence[int]) -> Tensor:
        """One step on all ranks, as `pcp_rank.prefill_on_rank`; post-norm hidden [h] of its last token."""
        layers = tuple(range(self._model.config.layers))

        def work(ranks: RankGroup) -> Tensor:
            store = GatheredStore(self.shards[ranks.rank], ranks, self._workspaces[ranks.rank], layers)
            return prefill_over_shards(self._model, store, ranks, tokens, start, next_tokens)

        return run_threads(self._geometry.ranks, work)[WRITER]

    def write_mtp_row(self, next_token: int, post_norm: Tensor, position: int) -> None:
        """Writes the MTP row at `position`, whose next token is known now; `post_norm` [h] is the state there."""
        positions = torch.tensor([position])
        rows = self._model.mtp_layer_rows(torch.tensor([next_token]), post_norm.unsqueeze(0), positions)
        for shard in self.shards:
            self._model.write_rows(self._model.config.mtp_layer, positions, rows, shard)
