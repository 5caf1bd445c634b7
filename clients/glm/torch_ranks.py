"""Ranks that are processes of their own, over torch.distributed: gloo on the CPU, NCCL on GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from kvmanager.clients.glm.ranks import Gather


class _Pending:
    """A gather of torch.distributed; `sent` is kept until it has ended."""

    def __init__(self, work: dist.Work | None, sent: Tensor, received: list[Tensor]) -> None:
        self._work = work
        self._sent = sent
        self._received = received

    def wait(self) -> list[Tensor]:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._received


class TorchRank:
    """The rank of the calling process in the default process group, which the engine has made."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def start_gather(self, tensor: Tensor) -> Gather:
        """Begins an all-gather that runs beside what is computed until `wait`."""
        sent = tensor.contiguous()
        received = [torch.empty_like(sent) for _ in range(self.size)]
        return _Pending(dist.all_gather(received, sent, async_op=True), sent, received)
