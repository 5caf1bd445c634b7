"""One request of 1,048,576 tokens at its true size: 64 GiB of pinned host memory, 15 GiB of HBM, every byte checked.

The core decides as in a daemon, its plans are carried out by the copy engines, its replies go into the resolver's
tables, and rows chosen by a top-k are swapped in from where the tables say. Takes 65 GiB of host memory.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kvmanager.allocators.cuda_driver import DeviceContext
from kvmanager.clients.glm.gpu_resolver import GpuResolver
from kvmanager.clients.glm.gpu_swapin import RowPieces, SwapIn
from kvmanager.clients.glm.sparse_tables import PAGE_ROW, SPAN_ROW, SparseShape, group_place
from kvmanager.configuration.groups import core_limits, plan_memory
from kvmanager.core.audit import audit
from kvmanager.core.events import CopyOutcome, SpanRunTable, StartPull, Trim
from kvmanager.errors import KVError
from kvmanager.layout import GLM53, latent_layout
from kvmanager.transport.cuda_copies import CudaCopies
from kvmanager.transport.executor import RegionMap
from kvmanager.transport.pinned import PinnedMemory
from tests.sim.driver import Client, Driver
from tests.sim.million import ARRIVED_PAGES, CLASSES, MOST_PAGES, Million
from tests.unit.test_true_size import config_of

pytestmark = pytest.mark.gpu

HBM_SLABS, HOST_SLABS, PER_SLAB, ROWS, TOPK = 4_814, 20_541, 18, 64, 2_048
LATENT = latent_layout(GLM53, ROWS)
SLAB = LATENT.page_bytes
LANES = {"latent": SLAB // 8, "indexer": SLAB // PER_SLAB // 8}
SALT = {"latent": 0x1F3D5B79A7C5E311, "indexer": 0x2545F4914F6CDD1D}
CHUNK = 64
DEADLINE_S = 150


def content(page_class: str, ordinals: torch.Tensor, first: int = 0, lanes: int = 0) -> torch.Tensor:
    """What pages of these ordinals hold, int64[pages, lanes], from lane `first` on: made from the names alone."""
    lane = torch.arange(first, first + (lanes or LANES[page_class]), dtype=torch.int64, device="cuda")
    mixed = (ordinals.cuda()[:, None] + 1) * SALT[page_class] + lane * 0x1E3779B97F4A7C15
    return mixed ^ (mixed >> 29)


class GpuDriver(Driver):
    """A driver whose plans move real bytes between HBM and pinned host memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        DeviceContext("cuda:0")
        began = time.perf_counter()
        size = HOST_SLABS * SLAB
        self.host = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        parts = np.array_split(self.host[::4096], 64)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda part: part.fill(0xA5), parts))
        self.pinned = PinnedMemory(self.host)
        print(f"\n{size / 2**30:.1f} GiB faulted and pinned in {time.perf_counter() - began:.1f} s", flush=True)
        self.hbm = torch.full((HBM_SLABS * SLAB,), 0xA5, dtype=torch.uint8, device="cuda")
        self.on_host = torch.from_numpy(self.host)
        latent = self.specs[0].chains[0].classes[0]
        regions = RegionMap()
        regions.add_gpu(latent.device_regions[0], self.hbm.data_ptr(), self.hbm.numel())
        regions.add(latent.host_regions[0], self.host)
        self.copies = CudaCopies(regions, 0)
        self.stream = torch.cuda.Stream()
        self.moved_bytes = 0

    def end(self, plan_id: int, outcome: CopyOutcome = CopyOutcome.DONE, error: KVError | None = None) -> None:
        plan = self.plans.get(plan_id)
        if plan is not None and outcome is CopyOutcome.DONE:
            for piece in plan.pieces():
                self.copies.issue(piece, self.stream.cuda_stream)
            self.stream.synchronize()
            self.moved_bytes += plan.total_bytes
        super().end(plan_id, outcome, error)

    def view(self, tier: str, page_class: str) -> torch.Tensor:
        """Pages of a class in a tier, int64[pages, lanes]."""
        memory = self.hbm if tier == "device" else self.on_host
        return memory.view(torch.int64).view(-1, LANES[page_class])

    def close(self) -> None:
        torch.cuda.synchronize()
        self.pinned.close()


@dataclass
class GpuMillion(Million):
    """The request, with the resolver's tables beside the worker's. uids: int64[pages]."""

    uids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def _pulled(self, pull: StartPull) -> None:
        regions = {self.client.spec.chains[0].classes[0].device_regions[0]: "device"}
        for target in (target for part in pull.chains for target in part.targets):
            for run in target.spans:
                ordinals = run.first_token // ROWS + np.arange(len(run.pages))
                self._fill(regions.get(run.regions[0], "host"), target.page_class, run.pages, ordinals)

    def _fill(self, tier: str, page_class: str, pages: np.ndarray, ordinals: np.ndarray) -> None:
        view = self.driver.view(tier, page_class)
        for at in range(0, len(pages), CHUNK):
            some = torch.from_numpy(pages[at : at + CHUNK])
            made = content(page_class, torch.from_numpy(ordinals[at : at + CHUNK]))
            if tier == "device":
                view[some.cuda()] = made
                continue
            for page, row in zip(some.tolist(), made, strict=True):
                view[page].copy_(row, non_blocking=True)
        torch.cuda.synchronize()

    def _write(self, first: int, last: int) -> None:
        """New pages as a whole; those that arrived in part were filled to their end."""
        ordinals = np.arange(max(first // ROWS, ARRIVED_PAGES), last // ROWS)
        for name in CLASSES if len(ordinals) else ():
            assert (self.device[name][ordinals] >= 0).all()
            self._fill("device", name, self.device[name][ordinals], ordinals)

    def compare_all(self) -> None:
        """Every byte of every page, read over PCIe where it lies on the host."""
        began = time.perf_counter()
        for name in CLASSES:
            device, host = self.device[name], self.host[name]
            away = np.flatnonzero(device < 0)
            assert (host[away] >= 0).all()
            self._compare("device", name, device[device >= 0], np.flatnonzero(device >= 0))
            self._compare("host", name, host[away], away)
        away_gib = int((self.device["latent"] < 0).sum()) * SLAB / 2**30
        spent = time.perf_counter() - began
        print(f"all pages hold their bytes, {away_gib:.1f} GiB of latents on the host; {spent:.1f} s")

    def _compare(self, tier: str, name: str, pages: np.ndarray, ordinals: np.ndarray) -> None:
        view = self.driver.view(tier, name)
        landing = torch.empty((CHUNK, LANES[name]), dtype=torch.int64, device="cuda")
        for at in range(0, len(pages), CHUNK):
            some, wanted = pages[at : at + CHUNK], torch.from_numpy(ordinals[at : at + CHUNK])
            if tier == "device":
                found = view[torch.from_numpy(some).cuda()]
            else:
                for place, page in enumerate(some.tolist()):
                    landing[place].copy_(view[page], non_blocking=True)
                found = landing[: len(some)]
            bad = (found != content(name, wanted)).any(dim=1)
            assert not bool(bad.any()), f"{name} pages of ordinals {wanted[bad.cpu()].tolist()[:8]} on {tier} are wrong"


class Chooser:
    """Rows chosen by a top-k, through the resolver and the swap-in."""

    def __init__(self, driver: GpuDriver) -> None:
        shape = SparseShape(1, 4, TOPK, ROWS, 10_240, MOST_PAGES, HBM_SLABS, HOST_SLABS)
        self.driver, self.shape = driver, shape
        self.places = [group_place(LATENT, group) for group in GLM53.share_groups]
        self.resolver = GpuResolver(shape, self.places)
        self.swap = SwapIn(driver.pinned.device_address(), driver.hbm.data_ptr())
        self.result = self.resolver.resolution()
        self.hot: np.ndarray | None = None

    def load(self, request: GpuMillion) -> None:
        """The tables as the replies told them."""
        pages = len(request.device["latent"])
        ordinal = np.arange(pages)
        spans, rows = np.zeros(pages, SPAN_ROW), np.zeros(pages, PAGE_ROW)
        arrived = ordinal < ARRIVED_PAGES
        spans["first"] = np.where(arrived, ordinal // 8 * 8, ordinal)
        spans["segments"], spans["interleave"] = np.where(arrived, 8, 1), np.where(arrived, 1, ROWS)
        rows["uid"], rows["device"], rows["host"] = request.uids, request.device["latent"], request.host["latent"]
        self.resolver.tables.write_request(0, spans, rows)
        if self.hot is None or not np.array_equal(self.hot, request.hot):
            self.hot = request.hot
            self.resolver.set_hot_pages(0, self.hot)

    def choose(self, request: GpuMillion, group: int, seed: int) -> int:
        """Resolves and gathers rows of a top-k over all positions, and compares them; how many came from the host."""
        draw = np.random.default_rng(seed)
        some = np.stack([draw.choice(request.tokens, TOPK, replace=False) for _ in range(4)])
        topk = torch.from_numpy(some.astype(np.int32))[None].cuda()
        place = self.places[group]
        self.resolver.resolve(group, topk, self.result)
        self.swap.copy(self.result, RowPieces(1, place.row_bytes))
        torch.cuda.synchronize()
        offsets = self.result.rows.reshape(-1)
        assert int(offsets.min()) >= 0, "some chosen row could be read nowhere"
        ordinal, slot = request.places(0, request.tokens)
        ordinal, slot = (torch.from_numpy(part[some.reshape(-1)]) for part in (ordinal, slot))
        lanes = place.row_bytes // 8
        words = self.driver.hbm.view(torch.int64)
        found = words[offsets[:, None] // 8 + torch.arange(lanes, device="cuda")]
        first = (place.offset + slot * place.row_bytes) // 8
        lane = first.cuda()[:, None] + torch.arange(lanes, device="cuda")
        mixed = (ordinal.cuda()[:, None] + 1) * SALT["latent"] + lane * 0x1E3779B97F4A7C15
        bad = (found != (mixed ^ (mixed >> 29))).any(dim=1)
        assert not bool(bad.any()), f"group {group}: {int(bad.sum())} of {len(bad)} chosen rows are wrong"
        return int(self.result.miss_count[0])


def uids_of(runs: tuple[SpanRunTable, ...]) -> np.ndarray:
    return np.concatenate([run.uids for run in runs]).astype(np.int64)


@pytest.fixture
def driver() -> Iterator[GpuDriver]:
    config = config_of("decode-hisparse")
    spec = plan_memory(config).groups[0]
    made = GpuDriver([spec], core_limits(config), audited=False)
    yield made
    made.close()


def test_one_million_tokens_at_true_size(driver: GpuDriver) -> None:
    began = time.perf_counter()

    def say(what: str) -> None:
        spent = time.perf_counter() - began
        print(f"{spent:6.1f} s  {what}; {driver.moved_bytes / 2**30:.1f} GiB moved by plans", flush=True)
        assert spent < DEADLINE_S, "GPU minutes are few"

    name = driver.specs[0].name
    request = GpuMillion(driver, Client(driver, name))
    chooser = Chooser(driver)
    ready = request.arrive()
    request.uids = uids_of(ready.spans)
    say("1,040,000 tokens arrived")
    chooser.load(request)
    misses = [chooser.choose(request, group, seed) for seed, group in enumerate((0, 2, 5, 21))]
    assert min(misses) > 1_000, misses
    say(f"chosen rows are right, {misses} of them came from the host")
    while request.tokens < 1_048_576:
        request.step(3)  # pages: its window, which is renewed as older ones leave
        request.uids = uids_of(driver.node.state.engines["e"].requests[1].tables())
        chooser.load(request)
        chooser.choose(request, request.tokens // ROWS % 22, request.tokens)
    request.compare_all()
    say("1,048,576 tokens")
    assert not request.retract().errors
    driver.apply(Trim(name, f"{name}/hbm", HBM_SLABS))
    assert driver.pool(f"{name}/hbm").free_slabs == HBM_SLABS
    assert driver.pool(f"{name}/host").slabs - driver.pool(f"{name}/host").free_slabs == 17_295
    driver.hbm.fill_(0x5A)
    torch.cuda.synchronize()
    audit(driver.node.state)
    say("retracted, and all of HBM overwritten")
    ready = request.resume()
    request.uids = uids_of(ready.spans)
    request.compare_all()
    chooser.load(request)
    misses = [chooser.choose(request, group, seed) for seed, group in enumerate((0, 2, 5, 21))]
    say(f"resumed, chosen rows are right, {misses} of them came from the host")
    audit(driver.node.state)
