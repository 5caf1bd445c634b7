"""A worker rank over real memfds and a scripted Worker service; and the tables it reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest

from kvmanager.clients.attach import Attachment
from kvmanager.clients.rankmemory import RankMemory
from kvmanager.clients.tables import NO_PAGE, OrderRun, decode_hot, decode_residency, decode_spans, order_runs
from kvmanager.clients.worker import WorkerGroup, WorkerRank
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.errors import InvalidArgument, LayoutMismatch, StaleEpoch
from kvmanager.geometry import TokenOrder
from kvmanager.layout import GLM53_TINY, indexer_layout, latent_layout
from kvmanager.planwire import plan_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.wire import NO_PAGE as WIRE_NO_PAGE
from kvmanager.wire import error_to_proto, layout_to_proto, pack_u32, pack_u64
from tests.plans import copy_whole_pages

ROWS = 4
PAGES = 6
LATENT = latent_layout(GLM53_TINY, ROWS)
INDEXER = indexer_layout(GLM53_TINY, ROWS)


class ScriptedDaemon(pb_grpc.WorkerServicer):
    """Serves attaches over memfds that the test can read; also plays the attach connection."""

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self.attached: list[pb.AttachRequest] = []
        self.detached: list[int] = []
        self.attach_error: StaleEpoch | None = None
        self.fds_withheld = 0
        self.released = 0
        self.spoil_layout = False
        self.memories: list[RankMemory] = []

    def region(self, region_id: int, kind: pb.RegionKind.ValueType, size: int) -> pb.Region:
        if region_id not in self.memory:
            self.memory[region_id] = os.memfd_create(f"region-{region_id}")
            os.ftruncate(self.memory[region_id], size)
        return pb.Region(region_id=region_id, kind=kind, size_bytes=size)

    def content(self, region_id: int) -> np.ndarray:
        size = os.fstat(self.memory[region_id]).st_size
        return np.frombuffer(os.pread(self.memory[region_id], size, 0), np.uint8)

    def Attach(self, request: pb.AttachRequest, context: Any) -> pb.AttachReply:
        if self.attach_error:
            details = error_to_proto(self.attach_error)
            context.set_trailing_metadata((("kvmanager-error-bin", details.SerializeToString()),))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, details.message)
        self.attached.append(request)
        base = 10 * (request.rank + 1)
        size = PAGES * LATENT.page_bytes
        latent, indexer = layout_to_proto(LATENT), layout_to_proto(INDEXER)
        if self.spoil_layout:
            latent.components[0].offset += 1
        return pb.AttachReply(
            attach_id=100 + request.rank,
            regions=[
                self.region(base, pb.DEVICE, size),
                self.region(base + 1, pb.HOST, size),
                self.region(1, pb.TIMELINE, 4096),
            ],
            timeline_word=7 + request.rank,
            layouts=[
                pb.ClassLayout(page_class="latent", layout=latent, device_region=base, host_region=base + 1),
                pb.ClassLayout(page_class="indexer", layout=indexer, device_region=base),
            ],
            boot_id=5,
        )

    def Detach(self, request: pb.DetachRequest, context: Any) -> pb.DetachReply:  # noqa: ARG002
        self.detached.append(request.attach_id)
        return pb.DetachReply()

    def close(self) -> None:
        """Ends the attach connection."""

    def release_lifeline(self) -> None:
        self.released += 1

    def fetch_fds(self, attach_id: int) -> list[int]:
        base = 10 * (attach_id - 100 + 1)
        fds = [os.dup(self.memory[region]) for region in (base, base + 1, 1)]
        while self.fds_withheld:
            os.close(fds.pop())
            self.fds_withheld -= 1
        return fds


@pytest.fixture
def daemon() -> Iterator[ScriptedDaemon]:
    daemon = ScriptedDaemon()
    yield daemon
    for memory in daemon.memories:
        memory.close()  # the descriptors of mappings are gone when the next test counts them
    for fd in daemon.memory.values():
        os.close(fd)


@pytest.fixture
def address(daemon: ScriptedDaemon, tmp_path: Path) -> Iterator[str]:
    runner = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_WorkerServicer_to_server(daemon, runner)
    address = f"unix:{tmp_path}/s"
    runner.add_insecure_port(address)
    runner.start()
    yield address
    runner.stop(None).wait()


def attach(daemon: ScriptedDaemon, address: str, rank: int = 0) -> WorkerRank:
    made = WorkerRank(cast(Attachment, daemon), grpc.insecure_channel(address), "e", 3, rank)
    daemon.memories.append(made.memory)
    return made


def descriptors_of(daemon: ScriptedDaemon) -> int:
    """Of this process, for memory of this daemon's; other tests' may go at any time."""
    regions = {os.fstat(fd).st_ino for fd in daemon.memory.values()}
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.stat(f"/proc/self/fd/{name}").st_ino in regions
    return found


def test_a_forked_child_gets_no_mapping(daemon: ScriptedDaemon, address: str) -> None:
    """The kernel's flag `dc`, do not copy on fork, stands on every mapping of a region."""
    rank = attach(daemon, address)
    flags: list[list[str]] = []
    region = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            region = "memfd:region" in line
        elif region and line.startswith("VmFlags:"):
            flags.append(line.split()[1:])
    assert len(flags) == len(rank.regions)
    assert all("dc" in each for each in flags)


def test_attach_maps_the_daemons_own_memory(daemon: ScriptedDaemon, address: str) -> None:
    rank = attach(daemon, address, 1)
    assert daemon.attached == [pb.AttachRequest(engine="e", epoch=3, rank=1)]
    assert (rank.attach_id, rank.boot_id) == (101, 5)
    assert rank.classes["latent"].layout == LATENT
    assert rank.classes["indexer"].host is None
    rank.classes["latent"].device[17] = 200
    host = rank.classes["latent"].host
    assert host is not None
    host[-1] = 201
    assert daemon.content(20)[17] == 200
    assert daemon.content(21)[-1] == 201
    os.pwrite(daemon.memory[20], b"\x05", 18)
    assert rank.classes["indexer"].device[18] == 5


def test_fence_raises_every_word_and_names_it(daemon: ScriptedDaemon, address: str) -> None:
    group = WorkerGroup([attach(daemon, address, rank) for rank in range(2)])
    for value in (1, 2):
        fence = group.fence()
        assert np.frombuffer(fence.attach_ids, "<u8").tolist() == [100, 101]
        assert np.frombuffer(fence.values, "<u8").tolist() == [value, value]
        words = daemon.content(1).view("<u8")
        assert words[7:9].tolist() == [value, value]
        assert np.flatnonzero(words).tolist() == [7, 8]
    group.detach()
    assert daemon.detached == [100, 101]


def test_one_plan_copies_over_all_ranks_regions(daemon: ScriptedDaemon, address: str) -> None:
    group = WorkerGroup([attach(daemon, address, rank) for rank in range(2)])
    for rank in group.ranks:
        rank.classes["latent"].device[:100] = 50 + rank.rank
    copies = copy_whole_pages(100, [10, 20], np.array([0]), [10, 20], np.array([3]))
    group.run_plans([plan_to_proto(CopyPlan(1, Purpose.COPY_ON_WRITE, copies))])
    for region, value in ((10, 50), (20, 51)):
        content = daemon.content(region)
        assert (content[300:400] == value).all()
        assert np.count_nonzero(content) == 200


def test_plan_that_leaves_the_ranks_memory_moves_nothing(daemon: ScriptedDaemon, address: str) -> None:
    group = WorkerGroup([attach(daemon, address)])
    size = PAGES * LATENT.page_bytes
    for copies, named in (
        (copy_whole_pages(100, [10], np.array([0]), [10], np.array([size // 100])), "leave region 10"),
        (copy_whole_pages(100, [10], np.array([0]), [99], np.array([1])), "region 99"),
    ):
        with pytest.raises(InvalidArgument, match=named):
            group.run_plans([plan_to_proto(CopyPlan(1, Purpose.COPY_ON_WRITE, copies))])


def test_timeline_never_goes_back(daemon: ScriptedDaemon, address: str) -> None:
    rank = attach(daemon, address)
    rank.raise_timeline(9)
    with pytest.raises(AssertionError):
        rank.raise_timeline(8)


def test_mapping_keeps_no_fd_of_a_failed_attach(daemon: ScriptedDaemon, address: str) -> None:
    rank = attach(daemon, address)  # held, or its descriptors would go meanwhile
    daemon.fds_withheld = 1
    before = descriptors_of(daemon)
    with pytest.raises(InvalidArgument, match="2 fds came for 3 regions"):
        attach(daemon, address)
    assert descriptors_of(daemon) == before
    rank.close()


def test_layout_that_does_not_match_its_fingerprint_is_refused(daemon: ScriptedDaemon, address: str) -> None:
    daemon.spoil_layout = True
    with pytest.raises(LayoutMismatch, match=LATENT.fingerprint):
        attach(daemon, address)


def test_refused_attach_is_typed(daemon: ScriptedDaemon, address: str) -> None:
    daemon.attach_error = StaleEpoch("epoch 3 of e was replaced by 4; register again")
    with pytest.raises(StaleEpoch, match="replaced by 4"):
        attach(daemon, address)


# ------------------------------------------------------------------------------------------ tables


def span_run(first_span: int, first_tokens: list[int], orders: list[tuple[int, int]], ranks: int = 1) -> pb.SpanRun:
    pages = sum(m for m, _ in orders) // ranks
    base = 100 * (first_span + 1)
    return pb.SpanRun(
        first_span=first_span,
        first_tokens=pack_u64(first_tokens),
        segments=pack_u32([m for m, _ in orders]),
        interleave=pack_u32([i for _, i in orders]),
        uids=pack_u64([base + i for i in range(pages)]),
        pages=[
            pb.ClassPages(
                page_class="latent",
                device_pages=pack_u32([base + 10 + i if i else WIRE_NO_PAGE for i in range(pages)]),
                host_pages=pack_u32([base + 20 + i for i in range(pages)]),
            ),
            pb.ClassPages(page_class="indexer", device_pages=pack_u32([base + 30 + i for i in range(pages)])),
        ],
    )


def test_spans_become_arrays() -> None:
    spans = decode_spans(span_run(3, [24, 32, 36], [(2, 1), (1, 1), (1, 1)]))
    assert spans.first_span == 3
    assert spans.first_tokens.tolist() == [24, 32, 36]
    assert spans.segments.tolist() == [2, 1, 1]
    assert spans.interleave.tolist() == [1, 1, 1]
    assert spans.uids.tolist() == [400, 401, 402, 403]
    assert spans.pages["latent"].device.tolist() == [NO_PAGE, 411, 412, 413]
    assert spans.pages["latent"].host.tolist() == [420, 421, 422, 423]
    assert spans.pages["indexer"].device.tolist() == [430, 431, 432, 433]
    assert spans.pages["indexer"].host.tolist() == [NO_PAGE] * 4


def test_spans_are_cut_where_the_order_changes() -> None:
    spans = decode_spans(span_run(0, [0, 8, 16, 20, 24], [(2, 1), (2, 1), (1, 1), (1, 1), (2, 2)]))
    assert list(order_runs(spans, 1)) == [
        OrderRun(TokenOrder(2, 1), 0, slice(0, 4)),
        OrderRun(TokenOrder(1, 1), 16, slice(4, 6)),
        OrderRun(TokenOrder(2, 2), 24, slice(6, 8)),
    ]
    sharded = decode_spans(span_run(0, [0, 32], [(8, 1), (8, 1)], ranks=8))
    assert list(order_runs(sharded, 8)) == [OrderRun(TokenOrder(8, 1), 0, slice(0, 2))]
    assert list(order_runs(decode_spans(pb.SpanRun()), 1)) == []


def test_residency_and_hot_pages_become_arrays() -> None:
    rows = pb.Residency(
        page_class="latent",
        page_ordinals=pack_u32([3, 1]),
        device_pages=pack_u32([WIRE_NO_PAGE, 9]),
        host_pages=pack_u32([8, WIRE_NO_PAGE]),
    )
    decoded = decode_residency(rows)
    assert decoded.page_class == "latent"
    assert decoded.ordinals.tolist() == [3, 1]
    assert decoded.column.device.tolist() == [NO_PAGE, 9]
    assert decoded.column.host.tolist() == [8, NO_PAGE]
    assert decode_hot(pb.HotPages(pages=pack_u32([4, 5]))).tolist() == [4, 5]
    rows.host_pages = pack_u32([8])
    with pytest.raises(InvalidArgument, match="2 pages: 2 device and 1 host"):
        decode_residency(rows)


def test_tables_refuse_arrays_that_disagree() -> None:
    with pytest.raises(InvalidArgument, match="4 segments does not fill 8 ranks"):
        list(order_runs(decode_spans(span_run(0, [0], [(4, 1)])), 8))
    short = span_run(0, [0], [(2, 1)])
    short.segments = pack_u32([3])
    with pytest.raises(InvalidArgument, match="2 pages for 1 spans"):
        list(order_runs(decode_spans(short), 1))
    short.segments = pack_u32([2, 2])
    with pytest.raises(InvalidArgument, match="2 segment counts"):
        decode_spans(short)
    short = span_run(0, [0], [(2, 1)])
    short.pages[0].host_pages = pack_u32([1])
    with pytest.raises(InvalidArgument, match="class 'latent': 2 device and 1 host pages"):
        decode_spans(short)
