"""Ranks that are processes of their own, over torch.distributed: gloo on the CPU, NCCL on GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from kvmanager.clients.glm.ranks import Gather, RankGroup
from kvmanager.errors import InvalidArgument, PeerUnreachable

GATHER_TIMEOUT_S: Final = 60.0
"""How long a gather waits for a rank that lives and does not come; a dead one is noticed at once."""

# The same call under its newer name: torch renamed it in 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Pending:
    """A gather of torch.distributed; `sent` is kept until it has ended."""

    def __init__(self, ranks: TorchRank, work: dist.Work, sent: Tensor, received: Tensor) -> None:
        self._ranks = ranks
        self._work: dist.Work | None = work
        self._sent = sent
        self._received = received

    def wait(self) -> list[Tensor]:
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise self._ranks.lost(error) from error
            self._work = None
        return list(self._received.unbind())


class TorchRank:
    """The rank of the calling process in the default process group; made by `join_ranks`.

    A gather that can't end, because another rank died or did not come in time, raises PeerUnreachable, and this rank
    leaves the group: so the ranks that wait for this one fail as well, and nothing is written into anybody's memory
    from then on. On GPUs a gather is in order with the current stream, which waits for it; there NCCL's own watchdog
    ends the process of a rank whose peer is lost, unless TORCH_NCCL_BLOCKING_WAIT=1 lets it raise here.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._lost = ""

    def start_gather(self, tensor: Tensor, received: Tensor) -> Gather:
        """Begins an all-gather that runs beside what is computed until `wait`."""
        if not received.is_contiguous() or received.shape != (self.size, *tensor.shape):
            raise InvalidArgument(f"a gather of {tuple(tensor.shape)} on {self.size} ranks into {received.shape}")
        if self._lost:
            raise PeerUnreachable(self._lost)
        sent = tensor.contiguous()
        try:
            work = _all_gather(received.view(self.size * sent.shape[0], *sent.shape[1:]), sent, async_op=True)
        except RuntimeError as error:
            raise self.lost(error) from error
        return _Pending(self, work, sent, received)

    def lost(self, error: RuntimeError) -> PeerUnreachable:
        """Leaves the group; what to raise, now and at every later gather."""
        if not self._lost:
            self._lost = f"rank {self.rank} of {self.size}: a rank of the engine is gone or does not come: {error}"
            dist.destroy_process_group()
        return PeerUnreachable(self._lost)


class _Fetched:
    """A gather on a GPU whose result is wanted elsewhere."""

    def __init__(self, gather: Gather, gathered: Tensor, received: Tensor) -> None:
        self._gather = gather
        self._gathered = gathered
        self._received = received

    def wait(self) -> list[Tensor]:
        self._gather.wait()
        # By way of the CPU: memory that a daemon lent is mapped for its own GPU, and no other may write to it.
        self._received.copy_(self._gathered.cpu())
        return list(self._received.unbind())


class ThroughDevice:
    """A rank that computes elsewhere than where its group exchanges: a model on the CPU, over NCCL.

    What lies on `device` is gathered in place; all else goes by way of it.
    """

    def __init__(self, ranks: RankGroup, device: torch.device) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._ranks = ranks
        self._device = device

    def start_gather(self, tensor: Tensor, received: Tensor) -> Gather:
        """See `RankGroup.start_gather`."""
        sent = tensor.to(self._device)
        if received.device == self._device:
            return self._ranks.start_gather(sent, received)
        gathered = torch.empty(received.shape, dtype=received.dtype, device=self._device)
        return _Fetched(self._ranks.start_gather(sent, gathered), gathered, received)


@contextlib.contextmanager
def join_ranks(
    meeting: Path, rank: int, size: int, *, backend: str = "gloo", timeout_s: float = GATHER_TIMEOUT_S
) -> Iterator[TorchRank]:
    """Makes this process rank `rank` of `size` on one machine, until the end of the block.

    `meeting`: a file that the ranks find each other by, none there before; each group needs one of its own. Leaving the
    block, by an error too, ends the others' gathers with PeerUnreachable over gloo. Over NCCL a rank that leaves while
    a gather is under way waits for it, as the others do: whoever started the ranks ends them. Raises PeerUnreachable
    when not all ranks come within `timeout_s`.
    """
    try:
        dist.init_process_group(
            backend,
            init_method=meeting.absolute().as_uri(),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise PeerUnreachable(f"rank {rank} of {size}: not all ranks came to {meeting}: {error}") from error
    try:
        yield TorchRank()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
