"""HiSparse on a GPU node: a worker attached to a real daemon resolves and gathers on the memory that it lends.

Device tables are written as the replies to step messages tell; hot rows come from the daemon's pinned host region by
the swap-in kernel. The model computes on the CPU in float64, so that its tokens are the reference's or something is
wrong with the rows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_support import compute_pids, memory_is_given_back
from nodes_support import kill_and_wait, node
from sparse_node import check_account, decode_all, sparse_toml

from kvmanager.clients.decode_stores import gpu_stores

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def context() -> None:
    """This process's context and kernels are in the baseline."""
    import numpy as np
    import torch
    from gpu_regions import host_array

    from kvmanager.allocators.cuda_driver import DeviceContext
    from kvmanager.clients.decode_engine import DRAFTS, MOST_RUNNING
    from kvmanager.clients.glm.config import TINY
    from kvmanager.clients.glm.gpu_sparse_rank import GpuSparseRank
    from kvmanager.clients.glm.sparse_rank import sparse_shape
    from kvmanager.clients.glm.sparse_tables import group_place
    from kvmanager.demo.nodes import HOT_ROWS, PAGE_ROWS
    from kvmanager.layout import latent_layout
    from kvmanager.transport.pinned import PinnedMemory, device_address

    DeviceContext("cuda:0")
    latent = latent_layout(TINY.format, PAGE_ROWS)
    memory = host_array(latent.page_bytes)
    pinned = PinnedMemory(memory)
    device = torch.zeros(8 * latent.page_bytes, dtype=torch.uint8, device="cuda:0")
    shape = sparse_shape(
        latent, device.numel(), len(memory), requests=MOST_RUNNING, rows=1 + DRAFTS, topk=TINY.index_topk,
        hot_rows=HOT_ROWS,
    )  # fmt: skip
    groups = [group_place(latent, group) for group in TINY.format.share_groups]
    rank = GpuSparseRank(shape, groups, device, device_address(memory))
    found = rank.swap_in(0, np.full((shape.requests, shape.rows, shape.topk), -1, np.int32))
    assert (found == -1).all()
    pinned.close()


def test_hisparse_on_hbm_and_pinned_memory_of_a_daemon_gives_the_tokens_of_the_reference(tmp_path: Path) -> None:
    with memory_is_given_back(), node(tmp_path, "decode", sparse_toml, device="cuda:0") as served:
        assert decode_all(served, gpu_stores) > 50
        check_account(served)
        assert served.pid_of("daemon") not in compute_pids()
        # Another daemon takes the memory over: what it kept is found, and resolved alike.
        kill_and_wait(served.pid_of("daemon"))
        served.reopen()
        hits = served.counters()["prefix_hit"]
        assert decode_all(served, gpu_stores) > 0
        assert check_account(served)["prefix_hit"] > hits
