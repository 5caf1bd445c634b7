"""Sparse MLA against float64, over pages of every layout and order, hot rows, splits and shards."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from glm_support import (
    DEVICE,
    FAR_PAGE,
    LAYERS,
    LEADER,
    SCALE,
    Request,
    attention,
    check_attention,
    generator,
    latent,
    poisoned,
    poisoned_outputs,
    random_rows,
    region_of,
    rows_of,
    shuffled_pages,
    table_of,
)  # fmt: skip

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.gpu.pages import device_pages, row_references
from kvmanager.clients.glm.gpu.sparse_mla import (
    DEFAULT_TILING,
    HOT_BIT,
    INTERPRETED,
    Scores,
    Tiling,
    attend_parts,
    merge_parts,
)
from kvmanager.geometry import TokenOrder
from kvmanager.layout import GLM53, latent_layout, layer_major_layout, native_layout

pytestmark = pytest.mark.gpu
K = 128 if INTERPRETED else 2_048
LENGTHS = (1, 130) if INTERPRETED else (1, 63, 64, 700, 2_048, 5_003)
QUERIES = 1 if INTERPRETED else 2
PAGES = 24 if INTERPRETED else 160
ORDERS = (TokenOrder(1, 64), TokenOrder(8, 1), TokenOrder(1, 1), TokenOrder(2, 16))
LAYOUTS = {"native": native_layout, "layer-major": layer_major_layout, "slabs": latent_layout}


class Setting:
    """Requests whose rows lie in a poisoned region, queries on their last tokens, and the queries' selections."""

    def __init__(self, layout_name: str, orders: tuple[TokenOrder, ...], layer: int) -> None:
        random = generator()
        self.layout = LAYOUTS[layout_name](GLM53, 64)
        self.component = latent(self.layout, LEADER)
        self.row_offset = latent(self.layout, layer).offset - self.component.offset
        self.region = region_of(self.layout, PAGES)
        free = shuffled_pages(PAGES, random)
        self.requests = [Request(tokens, orders[i % len(orders)], free) for i, tokens in enumerate(LENGTHS)]
        self.values = []
        for request in self.requests:
            rows, values = random_rows(request.tokens, random)
            rows_of(self.region, latent(self.layout, layer))[request.places()] = rows
            self.values.append(values)
        self.of_request = torch.tensor([i for i in range(len(LENGTHS)) for _ in range(QUERIES)], dtype=torch.int32)
        selections = [self._select(LENGTHS[i], random) for i in self.of_request.tolist()]
        self.selection = torch.stack(selections).to(torch.int32).to(DEVICE)
        self.of_request = self.of_request.to(DEVICE)
        self.q = torch.randn((len(self.selection), 64, 576), generator=random).to(torch.bfloat16).to(DEVICE)
        self.references = torch.full(self.selection.shape, HOT_BIT - 16, dtype=torch.int64, device=DEVICE)
        self.counts = torch.full((len(self.selection),), -7, dtype=torch.int32, device=DEVICE)

    @staticmethod
    def _select(tokens: int, random: torch.Generator) -> torch.Tensor:
        """Some of the positions; unused places lie among them, as nobody promises that they come last."""
        count = min(tokens, K - 3)
        selection = torch.full((K,), -1, dtype=torch.int64)
        places = torch.randperm(K, generator=random)[:count].sort().values
        selection[places] = torch.randperm(tokens, generator=random)[:count].sort().values
        return selection

    def refer(self) -> None:
        table = table_of(self.requests)
        row_references(self.selection, self.of_request, table, self.component, self.references, self.counts)

    def expected(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        results = []
        for q, selection, request in zip(self.q, self.selection, self.of_request.tolist(), strict=True):
            results.append(attention(q, self.values[request][selection[selection >= 0].long()]))
        return results

    def attend(
        self, splits: int, hot: torch.Tensor | None = None, tiling: Tiling | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts, lses, out, lse = poisoned_outputs(len(self.q), splits)
        hot = self.region if hot is None else hot
        attend_parts(
            self.q, self.references, self.counts, self.region, hot, self.row_offset, SCALE, parts, lses, tiling
        )
        merge_parts(parts, lses, out, lse)
        return out, lse


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_every_layout(layout: str, layer: int) -> None:
    setting = Setting(layout, ORDERS, layer)
    setting.refer()
    assert torch.equal(setting.counts.long(), (setting.selection >= 0).sum(dim=1))
    check_attention(*setting.attend(splits=4), setting.expected())


def test_references_are_the_rows_addresses() -> None:
    setting = Setting("native", ORDERS, LEADER)
    setting.refer()
    if not INTERPRETED:
        assert int(setting.references.max()) > 2**32, "this test is about pages beyond 4 GiB"
    for number, request in enumerate(setting.of_request.tolist()):
        selected = setting.selection[number]
        selected = selected[selected >= 0].long()
        pages, slots = setting.requests[request].places()
        component = setting.component
        want = component.offset + pages[selected] * component.page_stride + slots[selected] * component.slot_stride
        assert torch.equal(setting.references[number, : len(want)], want)
        assert (setting.references[number, len(want) :] == -1).all()


@pytest.mark.parametrize("splits", [1, 3, 32])
def test_any_number_of_splits(splits: int) -> None:
    """Also more splits than a query has tiles: empty parts weigh nothing."""
    setting = Setting("native", ORDERS, LAYERS[-1])
    setting.refer()
    check_attention(*setting.attend(splits), setting.expected())


@pytest.mark.parametrize("tiling", [DEFAULT_TILING, *(Tiling(32, 8, 3, scores) for scores in Scores)])
def test_every_way_to_cut_the_work(tiling: Tiling) -> None:
    """The kernel for every GPU, also where this one has its own."""
    setting = Setting("native", ORDERS, LAYERS[-1])
    setting.refer()
    check_attention(*setting.attend(2, tiling=tiling), setting.expected())


def test_hot_rows_and_resident_rows_come_alike() -> None:
    """Half of the rows are moved to a hot buffer, in another order, and their pages poisoned."""
    setting = Setting("native", ORDERS, LAYERS[-1])
    setting.refer()
    expected = setting.expected()
    slabs = latent_layout(GLM53, 64)
    layer = latent(slabs, LAYERS[-1])
    leader = latent(slabs, LEADER)
    assert layer.offset - leader.offset == setting.row_offset, "group rows have one form in pages and in slabs"
    used = setting.references[setting.references >= 0].unique()
    random = generator()
    moved = used[torch.randperm(len(used), generator=random)[: len(used) // 2].to(DEVICE)]
    hot = poisoned(-(-len(moved) // 64) * slabs.page_bytes)
    at = torch.arange(len(moved), device=DEVICE)
    address = leader.offset + at // 64 * leader.page_stride + at % 64 * leader.slot_stride
    within = torch.arange(656, device=DEVICE) + setting.row_offset
    hot[address[:, None] + within] = setting.region[moved[:, None] + within]
    setting.region[moved[:, None] + within] = 0xFF
    order = moved.argsort()
    found = torch.searchsorted(moved[order], setting.references.clamp(min=0)).clamp(max=len(moved) - 1)
    is_moved = moved[order][found] == setting.references
    setting.references = torch.where(is_moved, address[order][found] | HOT_BIT, setting.references)
    check_attention(*setting.attend(splits=4, hot=hot), expected)


def test_unused_references_among_used_ones() -> None:
    """A count covers places that name nothing: they are passed over."""
    setting = Setting("native", ORDERS, LEADER)
    setting.refer()
    expected = setting.expected()
    spread = torch.full((len(setting.q), K), -1, dtype=torch.int64, device=DEVICE)
    for number, count in enumerate(setting.counts.tolist()):
        places = torch.randperm(K, generator=generator())[:count].sort().values.to(DEVICE)
        spread[number, places] = setting.references[number, :count]
    setting.references = spread
    setting.counts.fill_(K)
    check_attention(*setting.attend(splits=4), expected)


def test_queries_without_rows() -> None:
    setting = Setting("native", ORDERS, LEADER)
    setting.selection[::2] = -1
    setting.refer()
    check_attention(*setting.attend(splits=4), setting.expected())
    setting.counts.zero_()
    out, lse = setting.attend(splits=2)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize("tokens", [5, 700])
@pytest.mark.parametrize("interleave", [1, 64])
def test_shards_of_a_decode_rank_merge(tokens: int, interleave: int) -> None:
    """Eight shards with one page a span each; some have no row of the selection, or no token at all."""
    random = generator()
    ranks, queries = 8, 3
    layout = native_layout(GLM53, 64)
    component = latent(layout, LEADER)
    rows, values = random_rows(tokens, random)
    order = TokenOrder(ranks, interleave)
    span, offset = np.divmod(np.arange(tokens), 64 * ranks)
    rank_of, slot = order.place(offset)
    selection = torch.full((queries, K), -1, dtype=torch.int32)
    for number, count in enumerate((min(tokens, K), 2, 1)):
        selection[number, :count] = torch.randperm(tokens, generator=random)[:count].sort().values
    selection = selection.to(DEVICE)
    q = torch.randn((queries, 64, 576), generator=random).to(torch.bfloat16).to(DEVICE)
    outs, lses, out, lse = poisoned_outputs(queries, ranks)
    pages = np.array(shuffled_pages(2, random))
    table = device_pages([[(TokenOrder(1, 1), pages[i : i + 1]) for i in range(2)]], DEVICE)
    for rank in range(ranks):
        region = region_of(layout, 2)
        mine = torch.from_numpy(np.flatnonzero(rank_of == rank))
        at = torch.from_numpy(pages[span])[mine], torch.from_numpy(slot)[mine]
        rows_of(region, component)[at[0].to(DEVICE), at[1].to(DEVICE)] = rows[mine.to(DEVICE)]
        references = torch.empty((queries, K), dtype=torch.int64, device=DEVICE)
        counts = torch.empty(queries, dtype=torch.int32, device=DEVICE)
        of_request = torch.zeros(queries, dtype=torch.int32, device=DEVICE)
        row_references(selection, of_request, table, component, references, counts, (rank, ranks, interleave))
        part, part_lse, shard_out, shard_lse = poisoned_outputs(queries, 2)
        attend_parts(q, references, counts, region, region, 0, SCALE, part, part_lse)
        merge_parts(part, part_lse, shard_out, shard_lse)
        outs[:, rank], lses[:, rank] = shard_out, shard_lse
    assert (lses == float("-inf")).any(), "some shard has nothing to say"
    merge_parts(outs, lses, out, lse)
    expected = [attention(q[i], values[s[s >= 0].long()]) for i, s in enumerate(selection)]
    check_attention(out, lse, expected)


@pytest.mark.parametrize("out_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tiling", [None, DEFAULT_TILING])
def test_a_single_row_comes_back_exactly(tiling: Tiling | None, out_type: torch.dtype) -> None:
    """Every e4m3 code, subnormal ones too, under scales from the least to very great: the weight is 1."""
    exponents = torch.arange(-13, 19)[:: 16 if INTERPRETED else 1]
    codes = torch.arange(512).remainder(256).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x01  # NaN has no value to compare
    rows = torch.zeros((len(exponents), 656), dtype=torch.uint8)
    rows[:, :512] = codes
    scales = torch.exp2((exponents[:, None] + torch.arange(4)).float())
    rows[:, 512:528] = scales.view(torch.uint8)
    values, _ = Fp8Codec().decode_latent(rows, torch.float32)
    region = torch.full((len(rows) * 656,), 0xFF, dtype=torch.uint8)
    region.view(-1, 656)[:] = rows
    region = region.to(DEVICE)
    references = (656 * torch.arange(len(rows), device=DEVICE))[:, None].contiguous()
    counts = torch.ones(len(rows), dtype=torch.int32, device=DEVICE)
    q = torch.full((len(rows), 64, 576), 2.0**-30, dtype=torch.bfloat16, device=DEVICE)
    parts, lses, _, _ = poisoned_outputs(len(rows), 1)
    parts = parts.to(out_type)
    attend_parts(q, references, counts, region, region, 0, SCALE, parts, lses, tiling)
    wrong = parts[:, 0].cpu().float() != values[:, None]
    assert not wrong.any(), (
        f"{int(wrong.sum())} wrong; codes {sorted(set(codes[wrong.any(0).any(0)].tolist()))}, first at row, head, dim "
        f"{wrong.nonzero()[0].tolist()}: {parts[:, 0].cpu()[wrong][:4]} instead of "
        f"{values[:, None].expand(-1, 64, -1)[wrong][:4]}"
    )


@pytest.mark.skipif(INTERPRETED, reason="graphs need a GPU")
def test_a_captured_graph_reads_new_tables() -> None:
    """Static shapes: what a step changes are numbers in device memory."""
    setting = Setting("native", ORDERS, LEADER)
    table = table_of(setting.requests)
    parts, lses, out, lse = poisoned_outputs(len(setting.q), 4)

    def step() -> None:
        row_references(
            setting.selection, setting.of_request, table, setting.component, setting.references, setting.counts
        )
        attend_parts(
            setting.q, setting.references, setting.counts, setting.region, setting.region, 0, SCALE, parts, lses
        )
        merge_parts(parts, lses, out, lse)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    setting.selection.copy_(setting.selection.flip(1))
    setting.selection[0] = -1
    for poison in (parts, lses, out, lse):
        poison.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    check_attention(out, lse, setting.expected())


def test_the_comparison_can_fail() -> None:
    """One row less in one query is seen."""
    setting = Setting("native", ORDERS, LEADER)
    setting.refer()
    expected = setting.expected()
    setting.counts[-1] -= 1
    out, lse = setting.attend(splits=4)
    with pytest.raises(AssertionError):
        check_attention(out, lse, expected)
    assert FAR_PAGE >= 0
