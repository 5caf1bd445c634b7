"""A worker rank: its mapped regions, its timeline word, and the copies that it runs itself.

The regions are the daemon's own memory, mapped: nothing is copied on the way. A worker writes to
pages it was given and to its timeline word, never to anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvmanager.clients.attach import Attachment, attach, grpc_channel
from kvmanager.clients.rankmemory import Memory, RankMemory, map_rank
from kvmanager.errors import KVError, TransferFailed
from kvmanager.killpoints import reach
from kvmanager.layout import KVLayout
from kvmanager.planwire import plan_from_proto, plan_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.executor import Outcome, RegionMap
from kvmanager.wire import error_from_rpc, layout_from_proto, pack_u64, region_from_proto


@dataclass(frozen=True)
class ClassMemory:
    """The memory of one page class: its layout, and the mapped regions of each tier.

    `device` is a torch tensor on a GPU node (uint8[size_bytes], no copy), else a numpy array. `host` is None
    where the worker never reads the host tier.
    """

    layout: KVLayout
    device: Any
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
        self.memory: RankMemory = map_rank([region_from_proto(region) for region in reply.regions], fds)
        """The rank's regions."""
        self.regions = self.memory.arrays
        """region_id -> uint8[size_bytes], of regions that are host memory."""
        self.classes = {entry.page_class: self._class_memory(entry) for entry in reply.layouts}
        """page class -> layout and memory."""
        self._word: int = reply.timeline_word

    def _class_memory(self, entry: pb.ClassLayout) -> ClassMemory:
        host = self.memory.arrays[entry.host_region] if entry.host_region else None
        return ClassMemory(layout_from_proto(entry.layout), self.memory.device_view(entry.device_region), host)

    def raise_timeline(self, value: int) -> None:
        """Says that all work before `value` is done. Call it after the last write of that work.

        On the `cpu` device the word is a plain aligned 64-bit store: x86 keeps it after the stores
        before it; elsewhere the interpreter's lock release between two calls is the barrier. On a GPU it is a
        write in torch's current stream, behind all that was queued there: join side streams first, and issue
        it after a CUDA graph, never in one.
        """
        assert value >= self.memory.timeline_value(self._word), f"timeline of attach {self.attach_id} would go back"
        reach("worker.timeline.before_raise")
        self.memory.raise_timeline(self._word, value)
        reach("worker.timeline.after_raise")

    def detach(self) -> None:
        """A clean leave; on a GPU, once all work of this process there has ended. Raises the daemon's typed error."""
        if self.memory.gpu is not None:
            self.memory.gpu.wait()
        try:
            self._stub.Detach(pb.DetachRequest(attach_id=self.attach_id))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        self._attachment.release_lifeline()

    def renew(self) -> int:
        """Attaches this process anew after the daemon was replaced: rank, mappings and timeline word stay as they are.

        Raises what `Attachment.renew` raises; returns the daemon's boot id.
        """
        self.boot_id = self._attachment.renew()
        return self.boot_id

    def close(self) -> None:
        """Ends the connection. The mappings live on until nobody holds a view of them."""
        self.memory.close()
        if self.memory.gpu is not None:
            self.memory.gpu.close()
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
            rank.memory.add_to(self.regions)
        self._value = 0

    def run_plans(self, plans: Iterable[pb.Plan]) -> None:
        """Carries out the daemon's copies (copy-on-write, zeros over pages of others) before the first write there.

        On a GPU they are queued in torch's current stream, which the first write must follow. A plan may span
        the regions of several ranks. Raises the plan's typed error when it did not end as a whole,
        InvalidArgument for a plan that names other memory.
        """
        gpu = self.ranks[0].memory.gpu
        if gpu is not None:
            gpu.run_plans(map(plan_from_proto, plans), self.regions)
            return
        executor = CpuExecutor(self.regions)
        for plan in map(plan_from_proto, plans):
            executor.submit(plan)
        while executor.outstanding():
            for completion in executor.poll():
                if completion.outcome is not Outcome.DONE:
                    raise completion.error or TransferFailed(f"plan {completion.plan_id}: {completion.outcome}")

    def run_own_part(self, plans: Iterable[pb.Plan]) -> None:
        """As `run_plans` where other ranks of the engine are other processes: each copies what lies in its regions.

        Raises what `run_plans` does, InvalidArgument for a copy from one rank's regions to another's too.
        """
        self.run_plans(plan_to_proto(self.regions.own_part(plan_from_proto(plan))) for plan in plans)

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
