"""Exact top-k against a stable sort: ties to the lowest position, ascending, poison beyond each row's length."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("cupy")

from kvmanager.clients.glm.gpu.topk import TopKWorkspace, top_k

pytestmark = pytest.mark.gpu
SEED = 20261130
K = 2_048


def _normal(random: torch.Generator, shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=random, device="cuda")


def _few_values(random: torch.Generator, shape: tuple[int, int]) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=random, device="cuda").float()


def _one_value(random: torch.Generator, shape: tuple[int, int]) -> torch.Tensor:
    del random
    return torch.full(shape, 0.25, device="cuda")


def _mostly_zero(random: torch.Generator, shape: tuple[int, int]) -> torch.Tensor:
    """As relu leaves it, with both zeros; about 1,000 positive values in 10,000."""
    values = torch.randn(shape, generator=random, device="cuda")
    return torch.where(values > 1.3, values, values.sign() * 0)


def _close(random: torch.Generator, shape: tuple[int, int]) -> torch.Tensor:
    """Within one bin of the first count, many of them equal."""
    return 1 + torch.randint(0, 5_000, shape, generator=random, device="cuda") * 2.0**-23


def _masked(random: torch.Generator, shape: tuple[int, int]) -> torch.Tensor:
    values = torch.randn(shape, generator=random, device="cuda")
    return values.masked_fill(torch.rand(shape, generator=random, device="cuda") < 0.9, float("-inf"))


def _all_negative(random: torch.Generator, shape: tuple[int, int]) -> torch.Tensor:
    return -torch.rand(shape, generator=random, device="cuda").exp()


def _check(scores: torch.Tensor, lengths: list[int], k: int) -> None:
    rows, stride = scores.shape
    workspace = TopKWorkspace(rows, stride, "cuda")
    workspace.kept.fill_(-(2**31))
    workspace.kept_counts.fill_(-(2**31))
    workspace.bins.fill_(77)
    selection = torch.full((rows, k), -99, dtype=torch.int32, device="cuda")
    top_k(scores, torch.tensor(lengths, dtype=torch.int32, device="cuda"), selection, workspace)
    for row, length in enumerate(lengths):
        line = scores[row, :length] + 0.0
        order = line.sort(descending=True, stable=True)
        want = order.indices[:k][order.values[:k] > float("-inf")].sort().values.int()
        got = selection[row]
        used = got[got != -1]
        if torch.equal(used, want) and (got[len(want) :] == -1).all():
            continue
        missing = want[~torch.isin(want, used)][:8].tolist()
        extra = used[~torch.isin(used, want)][:8].tolist()
        raise AssertionError(
            f"row {row} of length {length}: {len(used)} chosen, {len(want)} expected; missing {missing}, "
            f"extra {extra}, first {got[:8].tolist()} instead of {want[:8].tolist()}; "
            f"ascending: {bool((used.diff() > 0).all())}"
        )


@pytest.mark.parametrize("values", [_normal, _few_values, _one_value, _mostly_zero, _close, _masked, _all_negative])
def test_choices(values: Callable[[torch.Generator, tuple[int, int]], torch.Tensor]) -> None:
    print(f"seed {SEED}")
    lengths = [0, 1, 5, K - 1, K, K + 1, 2 * K + 3, 10_000, 16_383, 16_384, 20_001, 30_000]
    scores = values(torch.Generator("cuda").manual_seed(SEED), (len(lengths), 30_000))
    for row, length in enumerate(lengths):
        scores[row, length:] = float("inf")
    _check(scores, lengths, K)


@pytest.mark.parametrize("k", [1, 7, 64, 512])
def test_other_k(k: int) -> None:
    random = torch.Generator("cuda").manual_seed(SEED)
    scores = torch.cat([_normal(random, (2, 5_000)), _few_values(random, (2, 5_000))])
    _check(scores, [5_000, 4_097, 5_000, 3], k)


@pytest.mark.parametrize("length", [142_000, 1_048_576])
def test_long_rows(length: int) -> None:
    """Also with a value so frequent that nearly all positions are kept for the last step."""
    random = torch.Generator("cuda").manual_seed(SEED)
    scores = torch.cat(
        [_normal(random, (6, length)), _mostly_zero(random, (1, length)), _one_value(random, (1, length))]
    )
    scores[-2] = scores[-2].masked_fill(torch.rand(length, generator=random, device="cuda") < 0.99, 0.0)
    _check(scores, [length, length - 1, length - 3, 140_000, 100, 4_096, length, length], K)


def test_the_workspace_serves_one_call_after_another() -> None:
    random = torch.Generator("cuda").manual_seed(SEED)
    workspace = TopKWorkspace(3, 8_192, "cuda")
    lengths = torch.full((3,), 8_192, dtype=torch.int32, device="cuda")
    for _ in range(3):
        scores = _normal(random, (3, 8_192))
        selection = torch.empty((3, K), dtype=torch.int32, device="cuda")
        top_k(scores, lengths, selection, workspace)
        want = scores.sort(descending=True, stable=True).indices[:, :K].sort().values
        assert torch.equal(selection.long(), want)
