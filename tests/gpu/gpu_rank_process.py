"""One rank of a group on its own GPU: `python gpu_rank_process.py MEETING RANK SIZE BACKEND`; says what it has checked.

With TRITON_INTERPRET=1 and gloo it runs on a CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from glm_support import (
    DEVICE,
    LEADER,
    SCALE,
    attention,
    check_attention,
    generator,
    latent,
    poisoned_outputs,
    random_rows,
    region_of,
    rows_of,
    shuffled_pages,
)

from kvmanager.clients.glm.gpu.pages import device_pages, row_references
from kvmanager.clients.glm.gpu.sparse_mla import INTERPRETED, attend_parts, merge_parts
from kvmanager.clients.glm.ranks import RankGroup, gather
from kvmanager.clients.glm.torch_ranks import join_ranks
from kvmanager.clients.glm.workspace import TOKEN_BYTES, Workspace
from kvmanager.geometry import TokenOrder
from kvmanager.layout import GLM53, native_layout

K = 64 if INTERPRETED else 2_048
TOKENS = 200 if INTERPRETED else 5_000
ROWS, LAYERS = (300, 4) if INTERPRETED else (70_000, 12)


def noise(rank: int, layer: int) -> torch.Tensor:
    """uint8[ROWS, 656] that any rank can make."""
    random = torch.Generator(DEVICE).manual_seed(100 * layer + rank)
    return torch.randint(0, 256, (ROWS, 656), dtype=torch.uint8, device=DEVICE, generator=random)


def check_gathers(ranks: RankGroup) -> None:
    """Layer after layer in the two halves of a workspace, each gather under way while the layer before is read."""
    memory = torch.full((2 * ranks.size * ROWS * TOKEN_BYTES,), 0xFF, dtype=torch.uint8, device=DEVICE)
    halves = Workspace(memory).lease(ranks.size * ROWS)
    received = [half.latent.view(ranks.size, ROWS, 656) for half in halves]
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    coming = ranks.start_gather(noise(ranks.rank, 0), received[0])
    for layer in range(LAYERS):
        coming.wait()
        if layer + 1 < LAYERS:
            coming = ranks.start_gather(noise(ranks.rank, layer + 1), received[(layer + 1) % 2])
        for rank in range(ranks.size):
            wrong += (received[layer % 2][rank] != noise(rank, layer)).sum()
    assert int(wrong) == 0, f"{int(wrong)} bytes of the gathered layers differ"
    print(f"rank {ranks.rank}: {LAYERS} layers gathered", flush=True)


def check_merge(ranks: RankGroup, interleave: int) -> None:
    """DCP decode: attention over the own shard by the kernels, merged over all ranks, against float64."""
    random, queries = generator(), 3  # the same numbers on every rank
    layout = native_layout(GLM53, 64)
    component = latent(layout, LEADER)
    rows, values = random_rows(TOKENS, random)
    order = TokenOrder(ranks.size, interleave)
    span, offset = np.divmod(np.arange(TOKENS), 64 * ranks.size)
    rank_of, slot = order.place(offset)
    selection = torch.full((queries, K), -1, dtype=torch.int32)
    for number, count in enumerate((K, 2, 1)):
        selection[number, :count] = torch.randperm(TOKENS, generator=random)[:count].sort().values
    selection = selection.to(DEVICE)
    q = torch.randn((queries, 64, 576), generator=random).to(torch.bfloat16).to(DEVICE)
    pages = np.array(shuffled_pages(int(span.max()) + 1, random))
    table = device_pages([[(TokenOrder(1, 1), pages[i : i + 1]) for i in range(len(pages))]], DEVICE)
    region = region_of(layout, len(pages))
    mine = torch.from_numpy(np.flatnonzero(rank_of == ranks.rank))
    at = torch.from_numpy(pages[span])[mine], torch.from_numpy(slot)[mine]
    rows_of(region, component)[at[0].to(DEVICE), at[1].to(DEVICE)] = rows[mine.to(DEVICE)]
    references = torch.empty((queries, K), dtype=torch.int64, device=DEVICE)
    counts = torch.empty(queries, dtype=torch.int32, device=DEVICE)
    of_request = torch.zeros(queries, dtype=torch.int32, device=DEVICE)
    shard = (ranks.rank, ranks.size, interleave)
    row_references(selection, of_request, table, component, references, counts, shard)
    part, part_lse, own, own_lse = poisoned_outputs(queries, 2)
    attend_parts(q, references, counts, region, region, 0, SCALE, part, part_lse)
    merge_parts(part, part_lse, own, own_lse)
    outs, lses = torch.stack(gather(ranks, own), dim=1), torch.stack(gather(ranks, own_lse), dim=1)
    _, _, out, lse = poisoned_outputs(queries, 1)
    merge_parts(outs, lses, out, lse)
    check_attention(out, lse, [attention(q[i], values[s[s >= 0].long()]) for i, s in enumerate(selection)])
    same = torch.stack(gather(ranks, out))
    assert (same == same[0]).all(), "ranks disagree"
    print(f"rank {ranks.rank}: merged, interleave {interleave}", flush=True)


def main(meeting: str, rank: str, size: str, backend: str) -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(int(rank))
    with join_ranks(Path(meeting), int(rank), int(size), backend=backend) as ranks:
        check_gathers(ranks)
        for interleave in (1, 64):
            check_merge(ranks, interleave)
    print(f"rank {rank}: done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
