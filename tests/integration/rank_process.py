"""One rank of an engine as a process: `python rank_process.py RUNTIME_DIR ENGINE EPOCH RANK SIZE MEETING BACKEND`.

Attached to the node as a worker, in a torch.distributed group with the other ranks: over gloo, or over NCCL on a GPU
node, where shards and workspace lie in the daemon's HBM and the model computes on the CPU all the same. Obeys lines of
JSON on stdin and answers each with one; an error that it can't mend is an answer too, and its end.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from mode_engine import LAYOUT, MODES, ROWS, model_of

from kvmanager.clients.glm.attention import ShortPrompts
from kvmanager.clients.glm.decode import verify_step
from kvmanager.clients.glm.lent_workspace import LentWorkspace
from kvmanager.clients.glm.pcp_rank import prefill_over_shards
from kvmanager.clients.glm.ranks import RankGroup
from kvmanager.clients.glm.shard_store import ShardStore
from kvmanager.clients.glm.torch_ranks import ThroughDevice, join_ranks
from kvmanager.clients.glm.workspace import GatheredStore, Workspace
from kvmanager.clients.worker import WorkerGroup, connect_worker
from kvmanager.errors import KVError, PoolExhausted
from kvmanager.layout import workspace_group
from kvmanager.protos import kvmanager_pb2 as pb
from tests.glm_ranks import DRAFTS, MAIN_LAYERS

MODE = MODES["PCPxDCP"]


class Rank:
    """What it does when it is told to."""

    def __init__(self, workers: WorkerGroup, ranks: RankGroup, space: Workspace) -> None:
        self._workers, self._ranks, self._space = workers, ranks, space
        (self._worker,) = workers.ranks
        self.device = getattr(self._worker.classes["kv"].device, "device", "cpu")
        self._store = ShardStore(self._worker.classes["kv"].device, LAYOUT, MODE.geometry, self._worker.rank)

    def pages(self, pages: list[int]) -> dict[str, Any]:
        self._store.set_span_pages(np.array(pages, np.int64))
        return {}

    def plans(self, plans: list[str]) -> dict[str, Any]:
        self._workers.run_own_part(pb.Plan.FromString(base64.b64decode(plan)) for plan in plans)
        return {}

    def prefill(self, tokens: list[int], start: int, following: list[int]) -> dict[str, Any]:
        store = GatheredStore(self._store, self._ranks, self._space, MAIN_LAYERS)
        leases = self._space.leases
        try:
            hidden = prefill_over_shards(model_of(ShortPrompts.MQA), store, self._ranks, tokens, start, following)
        except PoolExhausted as refusal:  # nothing was written: the step has not begun
            return {"refused": refusal.pool, "needed": refusal.needed, "free": refusal.free}
        assert self._space.leases == leases + 1, "one lease a step"
        return {"hidden": hidden.tolist()}

    def decode(self, fed: list[int], rows: int) -> dict[str, Any]:
        model = MODE.decoder(self._ranks, ShortPrompts.MQA)
        step = verify_step(model, self._store, fed, rows, DRAFTS)
        return {"accepted": step.accepted, "hidden": step.hidden.tolist(), "drafts": step.drafts}

    def fence(self) -> dict[str, Any]:
        """Raises its own timeline."""
        return {"fence": base64.b64encode(self._workers.fence().SerializeToString()).decode()}

    def renew(self) -> dict[str, Any]:
        try:
            return {"boot_id": self._worker.renew()}
        except KVError as error:  # the next daemon is not there yet
            return {"boot_id": 0, "why": str(error)}


def own_output() -> TextIO:
    """The pipe to the engine for answers alone: libraries such as NCCL print on stdout what they like."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def say(answers: TextIO, **words: Any) -> None:
    print(json.dumps(words), file=answers, flush=True)


def exchanging(ranks: RankGroup, backend: str) -> RankGroup:
    """Over NCCL what is exchanged goes by way of this rank's GPU: its own, or one for all where there are too few.

    Named here: the node's one device has become the current one when its memory was mapped.
    """
    if backend == "gloo":
        return ranks
    own = ranks.rank if torch.cuda.device_count() >= ranks.size else 0
    torch.cuda.set_device(own)
    return ThroughDevice(ranks, torch.device("cuda", own))


def main(runtime_dir: str, engine: str, epoch: str, rank: str, size: str, meeting: str, backend: str) -> None:
    torch.set_num_threads(1)
    answers = own_output()
    workers = WorkerGroup([connect_worker(Path(runtime_dir), engine, int(epoch), int(rank))])
    lent = LentWorkspace(Path(runtime_dir), workspace_group(MODE.group, int(rank)), engine, int(rank), ROWS)
    try:
        with join_ranks(Path(meeting), int(rank), int(size), backend=backend, timeout_s=120.0) as ranks:
            one = Rank(workers, exchanging(ranks, backend), lent.space)
            say(answers, attached=True, workspace=str(lent.space.device), shard=str(one.device))
            for line in sys.stdin:
                order = json.loads(line)
                say(answers, **getattr(one, order.pop("do"))(**order))
    except KVError as error:
        say(answers, error=type(error).__name__, message=str(error))
    lent.close()
    workers.detach()


if __name__ == "__main__":
    main(*sys.argv[1:])
