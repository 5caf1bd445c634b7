"""What ranks of an engine exchange: tensors of equal shape, one of each rank.

Code that runs on a rank is the same whether the ranks are threads of one process or processes of their own.
All ranks make the same calls in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Gather(Protocol):
    """A gather under way."""

    def wait(self) -> list[Tensor]:
        """Every rank's tensor, in rank order."""


class RankGroup(Protocol):
    """One rank's view of its group."""

    rank: int
    size: int

    def start_gather(self, tensor: Tensor, received: Tensor) -> Gather:
        """Begins to bring the tensors of all ranks together in `received` [ranks, *shape of the tensor], contiguous.

        Neither may be touched until the gather has ended. Raises PeerUnreachable, here or in `wait`, when a rank is
        lost; the group is of no use after that.
        """


def gather(ranks: RankGroup, tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor, in rank order."""
    return ranks.start_gather(tensor, tensor.new_empty((ranks.size, *tensor.shape))).wait()


def gather_uneven(ranks: RankGroup, tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """As `gather` for tensors that differ in their first dimension; `counts`: that of each rank."""
    return cut_to(gather(ranks, pad_to(tensor, max(counts))), counts)


def pad_to(tensor: Tensor, count: int) -> Tensor:
    """The tensor with zeros behind it, up to `count` in the first dimension."""
    missing = tensor.new_zeros((count - len(tensor), *tensor.shape[1:]))
    return torch.cat((tensor, missing)) if len(missing) else tensor.contiguous()


def cut_to(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """What `pad_to` added is taken away again."""
    return [tensor[:count] for tensor, count in zip(tensors, counts, strict=True)]


def gather_sum(ranks: RankGroup, tensor: Tensor) -> Tensor:
    """The sum over all ranks, added in rank order, so that every rank has the same bits."""
    first, *others = gather(ranks, tensor)
    total = first.clone()
    for other in others:
        total += other
    return total


class _Done:
    """A gather that ended where it began."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[Tensor]:
        return self._tensors


class ThreadRank:
    """A rank that is a thread; made by `run_threads`."""

    def __init__(self, rank: int, slots: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(slots)
        self._slots = slots
        self._barrier = barrier

    def start_gather(self, tensor: Tensor, received: Tensor) -> Gather:
        """Waits for the others at once: threads of one interpreter have nothing to overlap."""
        self._slots[self.rank] = tensor
        self._barrier.wait()
        for own, slot in zip(received, self._slots, strict=True):
            assert slot is not None
            own.copy_(slot)
        self._barrier.wait()
        return _Done(list(received.unbind()))


def run_threads(size: int, work: Callable[[RankGroup], T]) -> list[T]:
    """Runs `work` on `size` ranks, a thread each, and returns what they return; raises the first error."""
    slots: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)

    def one(rank: int) -> T:
        try:
            return work(ThreadRank(rank, slots, barrier))
        except BaseException:
            barrier.abort()  # the others would wait for ever
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
