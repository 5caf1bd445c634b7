"""A decode rank's layer as it runs: resolve the top-k, swap missing rows in, attend to resident and hot rows alike."""

import numpy as np
import pytest
import torch

pytest.importorskip("cupy")
pytest.importorskip("triton")

from glm_support import (
    SCALE,
    attention,
    check_attention,
    generator,
    latent,
    poisoned,
    poisoned_outputs,
    random_rows,
    rows_of,
)
from gpu_regions import host_array

from kvmanager.allocators.cuda_driver import DeviceContext
from kvmanager.clients.glm.gpu.sparse_mla import attend_parts, merge_parts
from kvmanager.clients.glm.gpu_resolver import GpuResolver
from kvmanager.clients.glm.gpu_swapin import RowPieces, SwapIn
from kvmanager.clients.glm.page_table import NO_PAGE, PageTable
from kvmanager.clients.glm.sparse_tables import SparseShape, group_place, pack_request
from kvmanager.geometry import TokenOrder
from kvmanager.layout import GLM53, latent_layout
from kvmanager.transport.pinned import PinnedMemory

pytestmark = pytest.mark.gpu
GROUP, LAYER = (6, 7, 8, 9), 8
SHAPE = SparseShape(2, 4, 2_048, page_rows=64, hot_rows=8_192, most_pages=128, device_pages=400, host_pages=150)
TOKENS = (5_000, 4_477)
ORDERS = (TokenOrder(8, 1), TokenOrder(1, 64))


def test_attention_over_what_the_resolver_found() -> None:
    random = generator()
    DeviceContext("cuda:0")
    layout = latent_layout(GLM53, 64)
    component = latent(layout, LAYER)
    place = group_place(layout, GROUP)
    device = poisoned(SHAPE.device_pages * layout.page_bytes)
    memory = host_array(SHAPE.host_pages * layout.page_bytes)
    memory[:] = 0xFF
    pinned = PinnedMemory(memory)
    host = torch.from_numpy(memory)
    resolver = GpuResolver(SHAPE, [place])
    swap = SwapIn(pinned.device_address(), device.data_ptr())
    device_pages = torch.randperm(SHAPE.device_pages, generator=random).tolist()
    host_pages = torch.randperm(SHAPE.host_pages, generator=random).tolist()
    values = []
    for request, (tokens, order) in enumerate(zip(TOKENS, ORDERS, strict=True)):
        count = -(-tokens // (64 * order.segments)) * order.segments
        resident = np.arange(count) % 3 == 0
        on_device = np.array([device_pages.pop() if here else NO_PAGE for here in resident], dtype=np.int64)
        on_host = np.array([NO_PAGE if here else host_pages.pop() for here in resident], dtype=np.int64)
        table = PageTable(64)
        uids = 1_000_000 * (request + 1) + np.arange(count, dtype=np.int64)
        table.append(order, 0, uids, on_device, on_host, np.zeros(count, dtype=np.int64))
        resolver.tables.write_request(request, *pack_request(table, SHAPE.most_pages))
        hot = np.array([device_pages.pop() for _ in range(SHAPE.hot_slabs)], dtype=np.int64)
        resolver.set_hot_pages(request, hot)
        rows, decoded = random_rows(tokens, random)
        values.append(decoded)
        ordinals, slots = table.resolve(np.arange(tokens))
        here = torch.from_numpy(resident[ordinals])
        at = torch.from_numpy(on_device[ordinals])[here], torch.from_numpy(slots)[here]
        rows_of(device, component)[at[0].cuda(), at[1].cuda()] = rows[here.cuda()]
        at = torch.from_numpy(on_host[ordinals])[~here], torch.from_numpy(slots)[~here]
        rows_of(host, component)[at] = rows[~here.cuda()].cpu()
    result = resolver.resolution()
    counts = torch.full((8,), SHAPE.topk, dtype=torch.int32, device="cuda")
    for step in range(3):
        topk = torch.full((2, 4, SHAPE.topk), -1, dtype=torch.int32)
        for request, tokens in enumerate(TOKENS):
            for row in range(4):
                count = SHAPE.topk - 700 * (row == 1)
                topk[request, row, :count] = torch.randperm(tokens, generator=random)[:count].sort().values
        q = torch.randn((8, 64, 576), generator=random).to(torch.bfloat16).cuda()
        parts, lses, out, lse = poisoned_outputs(8, 8)
        resolver.resolve(0, topk.cuda(), result)
        swap.copy(result, RowPieces(1, place.row_bytes))
        offset = component.offset - place.offset
        attend_parts(q, result.rows.view(8, -1), counts, device, device, offset, SCALE, parts, lses)
        merge_parts(parts, lses, out, lse)
        torch.cuda.synchronize()
        print(f"step {step}: missed {result.miss_count.tolist()}, unreadable {resolver.counters[:, 3].tolist()}")
        assert (resolver.counters[:, 3] == 0).all()
        assert (result.miss_count > 0).all() or step > 0
        chosen = [topk[i // 4, i % 4] for i in range(8)]
        check_attention(
            out, lse, [attention(q[i], values[i // 4][s[s >= 0].long().cuda()]) for i, s in enumerate(chosen)]
        )
    pinned.close()
