"""What a mover does with other movers: its NIXL agent, pulls into staging, pages packed for peers."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from kvmanager.allocators.cuda_driver import call, device_ordinal
from kvmanager.errors import NotReady, TransferFailed
from kvmanager.mover.movermemory import MoverMemory
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.cuda import DEFAULT_TUNING, CudaExecutor, Tuning
from kvmanager.transport.executor import Completion, RegionMap
from kvmanager.transport.kernel_windows import pause_bridged_by
from kvmanager.transport.nixl import NixlReader, UcxSettings
from kvmanager.transport.pacing import Pacer
from kvmanager.transport.pack_service import PackService
from kvmanager.transport.packed_reads import PackedReads
from kvmanager.transport.packers import CudaPacker
from kvmanager.transport.pull_pipeline import PullPipeline, PullRequest
from kvmanager.wire import RegionKind

PACK_REGION: Final = (1 << 32) - 1
"""The mover's own: the ring that it packs pages in, as large as staging."""
AHEAD_ON_GPU: Final = 12
"""Chunks of one pull in staging: some are packed, one read, some placed, most of which wait for their kernel."""
_log = logging.getLogger("kvmanager.mover")


def placing(staging_bytes: int) -> Tuning:
    """How a GPU's mover places: copies within the GPU go by way of host memory, which costs a decode loop least."""
    return replace(DEFAULT_TUNING, kernel_pause_ns=pause_bridged_by(staging_bytes))


class MoverTransfers:
    """Made with the first ticket. All calls come from the mover's thread.

    Of a CPU mover peers read the regions themselves. A GPU's mover registers its staging and its packing ring alone:
    other processes read the memory of its pages at a six-hundredth of the link.
    """

    def __init__(
        self,
        device: str,
        incarnation: int,
        regions: RegionMap,
        memory: MoverMemory,
        ucx: UcxSettings,
        pacer: Pacer,
        staging: int | None,
    ) -> None:
        """Raises ConfigError when NIXL can't start."""
        self._on_gpu = device != "cpu"
        gpu = device_ordinal(device) if self._on_gpu else None
        self._regions = regions
        self._memory = memory
        self.reader = NixlReader(f"kvmanager-{device}", incarnation, regions, ucx, gpu=gpu or 0, polled=self._on_gpu)
        self._service: PackService | None = None
        if self._on_gpu and staging is not None:
            size = regions.size(staging)
            regions.add_gpu(PACK_REGION, int(call("cuMemAlloc", size)), size)
            self.reader.register(PACK_REGION)
            packer = CudaPacker(regions, device_ordinal(device))
            self._service = PackService(self.reader, regions, packer, PACK_REGION, memory.pageable, gpu)
        self._reads = PackedReads(self.reader, self._service)
        self._placer = self._make_placer(device, pacer, 0 if staging is None else regions.size(staging))
        self._pulls: PullPipeline | None = None
        for region_id in memory.infos:
            self.register(region_id)
        what = "packed pages" if self._service else "the pages themselves"
        _log.info("agent %s: peers read %s", self.reader.name, what)

    def _make_placer(self, device: str, pacer: Pacer, staging_bytes: int) -> CudaExecutor | CpuExecutor:
        if not self._on_gpu:
            return CpuExecutor(self._regions)
        return CudaExecutor(self._regions, device, tuning=placing(staging_bytes), pacer=pacer)

    def register(self, region_id: int) -> None:
        """A region that came: peers may read it, or reads may end in it."""
        kind = self._memory.infos[region_id].kind
        if kind is RegionKind.STAGING or (kind is not RegionKind.TIMELINE and not self._on_gpu):
            self.reader.register(region_id)

    def pull(self, request: PullRequest) -> None:
        """Starts a pull. Raises NotReady without staging; see `PullPipeline.submit`."""
        if self._pulls is None:
            staging = [i for i, info in self._memory.infos.items() if info.kind is RegionKind.STAGING]
            if not staging:
                raise NotReady("this mover has no STAGING region to pull into: add one first")
            ahead = AHEAD_ON_GPU if self._on_gpu else 1
            self._pulls = PullPipeline(
                self._reads, self._regions, staging[0], placer=self._placer, ahead=ahead, straight=not self._on_gpu
            )
        if self._on_gpu and not request.packed:
            raise TransferFailed(
                f"pull {request.pull_id}: a GPU's mover pulls from GPUs' movers, which pack; the source is a cpu node"
            )
        self._pulls.submit(request)

    @property
    def exhausted(self) -> bool:
        """See `PullPipeline.exhausted`."""
        return self._pulls is not None and self._pulls.exhausted

    def poll(self) -> list[Completion]:
        """Moves everything on; the pulls that ended."""
        if self._service is not None:
            self._service.serve()
        if self._pulls is not None:
            return self._pulls.poll()
        if self._service is not None:
            read = self._reads.poll()  # messages of peers come in here
            assert not read, f"{len(read)} reads ended that no pull asked for"
        return []

    def next_poll_s(self) -> float | None:
        """See `PullPipeline.next_poll_s`."""
        waits = [
            None if self._pulls is None else self._pulls.next_poll_s(),
            None if self._service is None else self._service.next_poll_s(),
        ]
        return min((wait for wait in waits if wait is not None), default=None)

    def cancel(self, pull_id: int) -> None:
        """See `PullPipeline.cancel`."""
        if self._pulls is not None:
            self._pulls.cancel(pull_id)

    def __contains__(self, pull_id: int) -> bool:
        return self._pulls is not None and pull_id in self._pulls

    def outstanding(self) -> list[int]:
        """See `PullPipeline.outstanding`."""
        return [] if self._pulls is None else self._pulls.outstanding()

    def abandon(self) -> list[Completion]:
        """See `PullPipeline.abandon`."""
        return [] if self._pulls is None else self._pulls.abandon()
