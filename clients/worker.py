"""A worker rank: its mapped regions, its timeline word, and the copies that it runs itself.

The regions are the daemon's own memory, mapped: nothing is copied on the way. A worker writes to
pages it was given and to its timeline word, never to anything else.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt

from kvmanager.clients.attach import Attachment, attach, grpc_channel
from kvmanager.errors import InvalidArgument, KVError, TransferFailed
from kvmanager.killpoints import reach
from kvmanager.layout import KVLayout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.executor import Outcome, RegionMap
from kvmanager.wire import error_from_rpc, layout_from_proto, pack_u64, plan_from_proto

Memory = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ClassMemory:
    """The memory of one page class: its layout, and the mapped regions of each tier.

    `host` is None where the worker never reads the host tier.
    """

    layout: KVLayout
    device: Memory
    host: Memory | None


class WorkerRank:
    """One attached rank of an engine; owns its connection. Detach it after the engine's last step."""

    def __init__(self, attachment: Attachment, channel: grpc.Channel, engine: str, epoch: int, rank: int) -> None:
        """Attaches and maps the regions; `channel` carries the attachment's token.

        Raises the daemon's typed error, or LayoutMismatch when a layout's fingerprint is not what its
        components say.
        """
        self._attachment = attachment
        self._channel = channel
        self._stub = pb_grpc.WorkerStub(channel)
        self.rank = rank
        try:
            reply = self._stub.Attach(pb.AttachRequest(engine=engine, epoch=epoch, rank=rank))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        self.attach_id: int = reply.attach_id
        self.boot_id: int = reply.boot_id
        self.descriptors = {region.region_id: region for region in reply.regions}
        fds = attachment.fetch_fds(reply.attach_id)
        self.regions = _map_regions(reply.regions, fds)
        """region_id -> uint8[size_bytes]."""
        self.classes = {entry.page_class: self._class_memory(entry) for entry in reply.layouts}
        """page class -> layout and memory."""
        self._timeline = _timeline_words(reply.regions, self.regions)
        self._word: int = reply.timeline_word

    def _class_memory(self, entry: pb.ClassLayout) -> ClassMemory:
        host = self.regions[entry.host_region] if entry.host_region else None
        return ClassMemory(layout_from_proto(entry.layout), self.regions[entry.device_region], host)

    def raise_timeline(self, value: int) -> None:
        """Says that all work before `value` is done. Call it after the last write of that work.

        On the `cpu` device the word is a plain aligned 64-bit store: x86 keeps it after the stores
        before it; elsewhere the interpreter's lock release between two calls is the barrier.
        """
        assert value >= int(self._timeline[self._word]), f"timeline of attach {self.attach_id} would go back"
        reach("worker.timeline.before_raise")
        self._timeline[self._word] = value
        reach("worker.timeline.after_raise")

    def detach(self) -> None:
        """A clean leave. Raises the daemon's typed error."""
        try:
            self._stub.Detach(pb.DetachRequest(attach_id=self.attach_id))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        self._attachment.release_lifeline()

    def close(self) -> None:
        """Ends the connection. The mappings live on until nobody holds a view of them."""
        self._channel.close()
        self._attachment.close()


def connect_worker(runtime_dir: Path, engine: str, epoch: int, rank: int) -> WorkerRank:
    """Attaches rank `rank` of `engine` to the node in `runtime_dir`. Raises what `attach` and `WorkerRank` raise."""
    attachment = attach(runtime_dir, "worker", f"{engine}/{rank}")
    channel = grpc_channel(attachment)
    try:
        return WorkerRank(attachment, channel, engine, epoch, rank)
    except BaseException:
        channel.close()
        attachment.release_lifeline()  # nothing is mapped
        attachment.close()
        raise


class WorkerGroup:
    """The ranks of one engine that live in this process, and the counter behind their fences."""

    def __init__(self, ranks: Sequence[WorkerRank]) -> None:
        """Ranks in rank order."""
        self.ranks = tuple(ranks)
        self.regions = RegionMap()
        """Regions of all ranks; one that several ranks map (the timelines) is in it once."""
        for rank in ranks:
            for region_id, memory in rank.regions.items():
                if region_id not in self.regions:
                    self.regions.add(region_id, memory)
        self._value = 0

    def run_plans(self, plans: Iterable[pb.Plan]) -> None:
        """Carries out the daemon's copies (copy-on-write) before the request's first write.

        A plan may span the regions of several ranks. Raises the plan's typed error when it did not
        end as a whole, InvalidArgument for a plan that names other memory.
        """
        executor = CpuExecutor(self.regions)
        for plan in plans:
            executor.submit(plan_from_proto(plan))
        while executor.outstanding():
            for completion in executor.poll():
                if completion.outcome is not Outcome.DONE:
                    raise completion.error or TransferFailed(f"plan {completion.plan_id}: {completion.outcome}")

    def fence(self) -> pb.Fence:
        """Raises every rank's word past the work done so far and names the values.

        Call it once a message, after the work and before the message is sent.
        """
        self._value += 1
        for rank in self.ranks:
            rank.raise_timeline(self._value)
        return pb.Fence(
            attach_ids=pack_u64([rank.attach_id for rank in self.ranks]),
            values=pack_u64([self._value] * len(self.ranks)),
        )

    def detach(self) -> None:
        """Detaches and closes every rank, also after one failed; raises the first error."""
        errors = []
        for rank in self.ranks:
            try:
                rank.detach()
            except KVError as error:
                errors.append(error)
            finally:
                rank.close()
        if errors:
            raise errors[0]


def _map_regions(regions: Iterable[pb.Region], fds: Sequence[int]) -> dict[int, Memory]:
    """Maps each region, in order, and closes the fds: a mapping outlives its fd.

    A child that this process forks has none of the mappings: nobody else would know that it can write to them.
    """
    described = list(regions)
    try:
        if len(described) != len(fds):
            raise InvalidArgument(f"{len(fds)} fds came for {len(described)} regions")
        return {
            region.region_id: _map(fd, region.size_bytes)
            for region, fd in zip(described, fds, strict=True)
        }
    finally:
        for fd in fds:
            os.close(fd)


def _map(fd: int, size_bytes: int) -> Memory:
    mapping = mmap.mmap(fd, size_bytes)
    mapping.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(mapping, dtype=np.uint8)


def _timeline_words(regions: Iterable[pb.Region], memories: Mapping[int, Memory]) -> npt.NDArray[np.uint64]:
    """The TIMELINE region as u64 words. Raises InvalidArgument when there is not exactly one."""
    found = [region for region in regions if region.kind == pb.TIMELINE]
    if len(found) != 1:
        raise InvalidArgument(f"{len(found)} timeline regions; an attach has exactly 1")
    return memories[found[0].region_id].view("<u8")
