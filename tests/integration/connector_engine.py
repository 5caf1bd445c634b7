"""An engine that steps like vLLM and has its connector's parts, but no model: a row depends on all tokens before."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvmanager.clients.vllm.blocks import EngineBlocks
from kvmanager.clients.vllm.copying import Copying
from kvmanager.clients.vllm.handover import offer_of, params_of
from kvmanager.clients.vllm.link import Link
from kvmanager.clients.vllm.scheduling import Scheduling
from kvmanager.clients.vllm.settings import Settings
from kvmanager.clients.worker import connect_worker
from kvmanager.layout import plain_layout
from kvmanager.protos import kvmanager_pb2 as pb
from tests.sim.driver import chain_keys

BLOCKS = 64
WAIT_S = 60.0


def rows_of(tokens: list[int], layers: int, heads: int, content: int) -> torch.Tensor:
    """float32[layers, heads, tokens, content]: what a model would have made of the tokens."""
    made = torch.empty(layers, heads, len(tokens), content)
    state = 1
    for place, token in enumerate(tokens):
        state = (state * 1103515245 + token * 12345 + 7) % (1 << 31)
        values = np.random.default_rng(state).standard_normal((layers, heads, content), np.float32)
        made[:, :, place] = torch.from_numpy(values)
    return made


@dataclass
class Running:
    """A request in the engine. loaded, computed: tokens of its prompt, by where they came from."""

    request: Any
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    loaded: int = 0
    computed: int = 0
    loading: bool = False
    ended: dict[str, Any] | None = None


class ConnectorEngine:
    """One engine; `step` is its loop's body. Blocks are given in order and come back when they are released."""

    def __init__(
        self, runtime_dir: Path, name: str, namespace: pb.Namespace, *, rows: int, shape: tuple[int, int, int]
    ) -> None:
        """shape: layers, heads, float32 values of a head's row."""
        self.rows, self.shape = rows, shape
        self.namespace = namespace
        self.name = name
        whole = torch.full((shape[0], BLOCKS, shape[1], rows, shape[2]), float("nan"))
        self.layers = {f"layer.{n}": whole[n] for n in range(shape[0])}
        blocks = EngineBlocks(self.layers)
        settings = Settings(runtime_dir, "kv", name)
        self.link = Link(settings, namespace, plain_layout(blocks.format, rows).fingerprint, 1)
        self.scheduling = Scheduling(self.link, rows, 1, hold_s=5.0)
        self.copying = Copying(blocks, 0, lambda epoch: connect_worker(runtime_dir, name, epoch, 0))
        self.free = list(range(1, BLOCKS))
        self.running: dict[str, Running] = {}
        self.kept: dict[str, list[int]] = {}
        self.until(lambda: self.scheduling.ready, what="not attached")

    def add(self, request_id: str, tokens: list[int], params: dict[str, Any] | None = None) -> Running:
        """A request comes; `params`: its kv_transfer_params. Raises InvalidArgument for a ticket of another prompt."""
        keys = chain_keys((self.namespace.model, self.rows, tuple(tokens)), len(tokens) // self.rows, 32)
        request = SimpleNamespace(
            request_id=request_id, prompt_token_ids=tokens, num_prompt_tokens=len(tokens),
            kv_transfer_params=params or {}, block_hashes=[keys[at : at + 32] for at in range(0, len(keys), 32)],
        )  # fmt: skip
        offer = offer_of(request.kv_transfer_params, request)
        self.scheduling.arrived(
            request_id, request.block_hashes,
            export_tokens=len(tokens) if request.kv_transfer_params.get("do_remote_decode") else 0, offer=offer,
            tell=lambda ticket: params_of(ticket, request),
            token_ids=tokens if self.namespace.token_ids else (),
        )  # fmt: skip
        self.running[request_id] = Running(request, tokens)
        return self.running[request_id]

    def step(self, most: int = 1 << 30) -> None:
        """One step, in which each request computes at most so many tokens."""
        scheduled: dict[str, int] = {}
        for request_id, held in self.running.items():
            if held.ended is None and not held.loading:
                if not held.blocks and not self._admit(request_id, held):
                    continue
                if not held.loading and most:
                    end = min(len(held.tokens), held.loaded + held.computed + most)
                    scheduled[request_id] = end
        orders = self.scheduling.build(scheduled, lambda request_id: self.running[request_id].blocks)
        self.copying.follow(orders)
        for request_id, end in scheduled.items():
            self._compute(self.running[request_id], end)
        self.copying.save(orders)
        self._loaded()
        for request_id in self.copying.released():
            self.free += self.kept.pop(request_id)
        report = self.copying.report()
        if report is not None:
            self.scheduling.reported([report])
        for request_id, held in list(self.running.items()):
            if held.ended is None and held.loaded + held.computed == len(held.tokens) and not held.loading:
                self._finish(request_id, held, "length")

    def _admit(self, request_id: str, held: Running) -> bool:
        external = self.scheduling.matched(request_id, len(held.tokens), 0)
        if external is None:
            return False
        count = -(-len(held.tokens) // self.rows)
        held.blocks, self.free = self.free[:count], self.free[count:]
        assert len(held.blocks) == count
        self.scheduling.allocated(request_id, held.blocks, external)
        held.loading, held.loaded = bool(external), external
        return True

    def _compute(self, held: Running, end: int) -> None:
        start = held.loaded + held.computed
        made = rows_of(held.tokens[:end], *self.shape)
        for position in range(start, end):
            block, slot = divmod(position, self.rows)
            for layer, tensor in enumerate(self.layers.values()):
                tensor[held.blocks[block], :, slot] = made[layer, :, position]
        held.computed += end - start

    def _loaded(self) -> None:
        received, lost = self.copying.received(), self.copying.lost_blocks()
        for request_id in received:
            held = self.running[request_id]
            held.loading = False
            bad = [place for place, block in enumerate(held.blocks) if block in lost]
            if bad:
                held.loaded = min(bad) * self.rows
            if held.ended is not None:
                self.free += held.blocks

    def _finish(self, request_id: str, held: Running, reason: str) -> None:
        told = self.scheduling.handed_over(request_id)
        kept = self.scheduling.finished(request_id, reason)
        held.ended = told or {}
        if kept:
            self.kept[request_id] = held.blocks
        elif not held.loading:
            self.free += held.blocks

    def abort(self, request_id: str) -> None:
        """The user left."""
        self._finish(request_id, self.running[request_id], "abort")

    def right(self, held: Running) -> bool:
        """Whether the request's blocks hold what its tokens make; ask before others get them."""
        expected = rows_of(held.tokens, *self.shape)
        for position in range(len(held.tokens)):
            block, slot = divmod(position, self.rows)
            for layer, tensor in enumerate(self.layers.values()):
                if not torch.equal(tensor[held.blocks[block], :, slot], expected[layer, :, position]):
                    return False
        return True

    def until(self, done: Any, most: int = 1 << 30, what: str = "") -> None:
        """Steps until `done()`."""
        give_up = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < give_up, what
            self.step(most)
            time.sleep(0.001)

    def serve(self, request_id: str, tokens: list[int], params: dict[str, Any] | None = None) -> Running:
        """A request from its coming to its end."""
        held = self.add(request_id, tokens, params)
        self.until(lambda: held.ended is not None, what=f"{request_id} did not end")
        return held

    def rest(self) -> None:
        """Steps until nothing of requests that ended is under way."""
        self.until(lambda: not self.scheduling.busy and len(self.free) == BLOCKS - 1, what="not at rest")
        self.running.clear()

    def close(self) -> None:
        """Leaves."""
        self.copying.close()
        self.link.close()
