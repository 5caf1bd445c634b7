"""Ranks as processes: `python -m tests.glm_rank_process` reads a group a line, and forks its ranks.

A line is JSON: `meeting` (a path), `size`, `interleave`, `timeout_s`, `absent` (ranks that never come), and `dying`
(rank: [signal, read]): such a rank sends itself that signal before the given read of latent rows, in the middle of a
step. The ranks compute the prompt over shards, then the answer where they lie. The reply is a line with what each said,
or the signal that ended it. A rank that has said something lives on until all others have, so that nobody learns of a
lost rank from the end of another one's process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmanager.clients.glm.shard_store import ShardStore
from kvmanager.clients.glm.torch_ranks import join_ranks
from kvmanager.errors import KVError
from kvmanager.geometry import ShardGeometry
from tests.glm_ranks import (
    PROMPT,
    ROWS,
    assert_rows,
    decode_shards,
    expected_hidden,
    plain_model,
    plain_rows,
    poisoned_workspace,
    prefill_shards,
    shard_of,
    the_prompt,
)


class Dying:
    """A shard whose rank gets a signal at one of its reads."""

    def __init__(self, shard: ShardStore, signal_number: int, read: int) -> None:
        self._shard = shard
        self._signal = signal_number
        self._left = read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shard, name)

    def latent_rows(self, layer: int, selection: Tensor) -> Tensor:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._signal)
        return self._shard.latent_rows(layer, selection)


def rank_work(rank: int, group: dict[str, Any]) -> dict[str, object]:
    geometry = ShardGeometry(group["size"], ROWS, group["interleave"])
    shard, space = shard_of(rank, geometry), poisoned_workspace(geometry)
    dying = group["dying"].get(str(rank))
    used: Any = Dying(shard, *dying) if dying else shard
    said: dict[str, object] = {}
    try:
        with join_ranks(Path(group["meeting"]), rank, group["size"], timeout_s=group["timeout_s"]) as ranks:
            first = prefill_shards(plain_model(), ranks, used, space)
            assert_rows(shard, plain_rows(plain_model(), the_prompt()), shard.own_positions(PROMPT))
            said["tokens"] = decode_shards(ranks, used, first)
    except KVError as error:
        said["error"] = type(error).__name__
        said["message"] = str(error)
    return {**said, "leases": space.leases, "held": space.held}


def fork_rank(rank: int, group: dict[str, Any], hold: tuple[int, int]) -> tuple[int, int]:
    """(pid, end of a pipe that it writes what it says to). It lives until the pipe `hold` has no writer."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writes)
        return pid, reads
    code = 1
    try:
        os.close(reads)
        os.close(hold[1])
        os.write(writes, json.dumps(rank_work(rank, group)).encode())
        os.close(writes)
        os.read(hold[0], 1)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def run_group(group: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank said; `signal` where one ended it, `lives` where it had to be killed here."""
    present = [rank for rank in range(group["size"]) if rank not in group["absent"]]
    hold = os.pipe()
    ranks = {rank: fork_rank(rank, group, hold) for rank in present}
    said: list[dict[str, Any]] = [{} for _ in range(group["size"])]
    for rank in sorted(present, key=lambda rank: str(rank) in group["dying"]):
        pid, reads = ranks[rank]
        if str(rank) in group["dying"]:
            said[rank]["lives"] = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            os.kill(pid, signal.SIGKILL)
        with os.fdopen(reads, "rb") as pipe:
            said[rank] |= json.loads(pipe.read() or b"{}")
    for end in (hold[1], hold[0]):
        os.close(end)
    for rank in present:
        _, status = os.waitpid(ranks[rank][0], 0)
        said[rank]["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return said


if __name__ == "__main__":
    torch.set_num_threads(1)
    expected_hidden()
    for line in sys.stdin:
        print(json.dumps(run_group(json.loads(line))), flush=True)
