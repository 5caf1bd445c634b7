"""Ranks that compute on one device and exchange on another."""

from __future__ import annotations

import pytest
import torch

from kvmanager.clients.glm.ranks import RankGroup, gather, gather_uneven, run_threads
from kvmanager.clients.glm.torch_ranks import ThroughDevice

HERE = torch.empty(0).device
ELSEWHERE = torch.device("cpu", 0)
"""The same memory by another name: what is gathered here goes by way of it."""


def test_the_two_are_told_apart() -> None:
    assert HERE != ELSEWHERE


@pytest.mark.parametrize("device", [HERE, ELSEWHERE], ids=str)
def test_what_is_gathered_by_way_of_a_device_is_what_was_sent(device: torch.device) -> None:
    def work(ranks: RankGroup) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        through = ThroughDevice(ranks, device)
        assert (through.rank, through.size) == (ranks.rank, 3)
        own = torch.full((4, 2), float(ranks.rank), dtype=torch.float64)
        received = torch.full((3, 4, 2), -1.0, dtype=torch.float64)
        through.start_gather(own, received).wait()
        return gather(through, own), gather_uneven(through, own[: ranks.rank + 1], [1, 2, 3]), received

    for everybodys, uneven, received in run_threads(3, work):
        assert [part.unique().tolist() for part in everybodys] == [[0.0], [1.0], [2.0]]
        assert [len(part) for part in uneven] == [1, 2, 3]
        assert received[:, 0, 0].tolist() == [0.0, 1.0, 2.0]


def test_nothing_is_there_before_the_wait() -> None:
    """The caller may go on with what lies there until then."""

    def work(ranks: RankGroup) -> list[float]:
        received = torch.full((2, 1), -1.0)
        coming = ThroughDevice(ranks, ELSEWHERE).start_gather(torch.ones(1), received)
        before = received.flatten().tolist()
        coming.wait()
        return before + received.flatten().tolist()

    assert run_threads(2, work) == [[-1.0, -1.0, 1.0, 1.0]] * 2
