"""A prefill engine whose PCP x DCP ranks are threads of one process: computes prompts and exports them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.clients.glm.lent_workspace import lent_workspaces
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.shard_group import ShardGroup
from kvmanager.clients.keys import KeyChain
from kvmanager.clients.tables import Int64Array, decode_spans
from kvmanager.errors import InvalidArgument, InvariantViolation
from kvmanager.geometry import ShardGeometry
from kvmanager.layout import native_layout
from kvmanager.protos import kvmanager_pb2 as pb

CHUNK_TOKENS: Final = 256
"""Most prompt tokens computed between two messages."""
PAGE_CLASS: Final = "kv"

Told = Callable[[int], None]


@dataclass(frozen=True)
class Prefilled:
    """A computed prompt: who reads it next shows `ticket`; `first_token` is the first of the answer."""

    ticket: pb.Ticket
    first_token: int
    prompt_tokens: int
    cached_tokens: int


class PrefillEngine:
    """One prompt at a time. Uses only the public client API; the daemon decides where rows lie.

    The ranks' workspaces are the daemon's, too: the group has `workspace_bytes_per_rank`.
    """

    def __init__(
        self,
        runtime_dir: Path,
        name: str,
        *,
        group: str,
        namespace: pb.Namespace,
        geometry: ShardGeometry,
        model: Glm,
    ) -> None:
        """Registers `name` with the node and attaches all ranks. Raises the daemon's typed errors."""
        layout = native_layout(model.config.format, geometry.page_rows)
        self._model = model
        self._geometry = geometry
        self._namespace = namespace
        self._requests = 0
        with ExitStack() as undo:
            self._engine = AttachedEngine(
                runtime_dir, name, group=group, namespace=namespace, layouts=[layout], ranks=geometry.ranks
            )
            undo.callback(self._engine.close)
            spaces = undo.enter_context(lent_workspaces(runtime_dir, group, name, geometry))
            memories = [rank.classes[PAGE_CLASS].device for rank in self._engine.workers.ranks]
            self._ranks = ShardGroup(model, memories, spaces, layout, geometry)
            self._undo = undo.pop_all()

    def prefill(self, prompt: Int64Array, session: pb.SessionHint, told: Told) -> Prefilled:
        """Computes what the cache lacks of `prompt` int64[L], commits it and exports it.

        `told` hears the number of positions done, after each chunk. Raises the daemon's typed errors; PoolExhausted
        that names the workspace for a prompt whose steps don't fit there.
        """
        self._requests += 1
        request_id, length = self._requests, len(prompt)
        keys = KeyChain(self._namespace)
        opened = self._engine.open(
            pb.OpenRequest(
                request_id=request_id,
                prompt_tokens=length,
                prompt_keys=keys.extend(prompt),
                prompt_token_ids=keys.token_ids(),
                session=session,
            )
        )
        self._ranks.start(self._span_pages(opened, length))
        self._engine.workers.run_plans(opened.worker_plans)
        first_token = self._compute(request_id, prompt.tolist(), opened.cached_tokens, told)
        ticket = self._engine.client.export(request_id)
        # No stop reason: the turn goes on at the decode node; `end_turns` tells its end.
        self._engine.step(closes=[pb.CloseRequest(request_id=request_id, reason=pb.FINISHED)])
        return Prefilled(ticket, first_token, length, opened.cached_tokens)

    def end_turns(self, ends: Sequence[pb.TurnEnd]) -> None:
        """Tells the node that turns are over whose prompts were prefilled here. Raises the daemon's typed errors."""
        self._engine.step(turn_ends=ends)

    def _span_pages(self, opened: pb.OpenReply, length: int) -> Int64Array:
        """Page index of each span. Raises InvalidArgument where the tables are not what this group computes on."""
        runs = [decode_spans(run) for run in opened.spans]
        order = self._geometry.order
        for run in runs:
            if (run.segments != order.segments).any() or (run.interleave != order.interleave).any():
                raise InvalidArgument(f"spans of orders {run.segments}, {run.interleave}; this group writes {order}")
        pages = np.concatenate([run.pages[PAGE_CLASS].device for run in runs])
        if len(pages) < self._geometry.spans(length) or (pages < 0).any():
            raise InvalidArgument(f"{int((pages >= 0).sum())} pages for a prompt of {length} tokens")
        return pages

    def _compute(self, request_id: int, tokens: list[int], cached: int, told: Told) -> int:
        """Computes positions [cached, L) and commits them chunk by chunk; the greedy next token."""
        length = len(tokens)
        if not 0 <= cached < length:
            raise InvariantViolation(f"request {request_id}: {cached} of {length} prompt tokens are cached")
        hidden = torch.empty(0)
        first_token = 0
        for start in range(cached, length, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, length)
            hidden = self._ranks.prefill(tokens[start:end], start, tokens[start + 1 : end + 1])
            if end == length:
                first_token = self._finish(hidden, length - 1)
            self._engine.step([RequestStep(request_id, length, end)])
            told(end)
        return first_token

    def _finish(self, hidden: torch.Tensor, position: int) -> int:
        """The first token of the answer; the last position's MTP row depends on it, so it is written here."""
        (token,) = self._model.greedy(hidden.unsqueeze(0))
        self._ranks.write_mtp_row(token, hidden, position)
        return token

    def close(self) -> None:
        """Leaves the node. Raises the first error of a detach."""
        self._undo.close()
