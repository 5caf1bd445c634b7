"""Whether this machine has what a configuration would allocate; nothing is allocated to find out."""

from __future__ import annotations

import resource
from dataclasses import asdict, dataclass
from typing import Any

from kvmanager.allocators.backing import host_room
from kvmanager.allocators.cuda_driver import call, device_handle, device_ordinal
from kvmanager.configuration.config import NodeConfig
from kvmanager.configuration.groups import plan_memory
from kvmanager.errors import ConfigError, DeviceError
from kvmanager.keeper import lockfile
from kvmanager.runtime_dir import KEEPER_LOCK
from kvmanager.services.certificates import look_at
from kvmanager.wire import RegionKind

FDS_A_CLIENT = 4
"""Descriptors that the daemon keeps of one attached process, at most."""


@dataclass(frozen=True)
class HostFit:
    """What the node would take of this machine, in bytes, and what there is.

    host_limit: what says how much host memory is left. device_total_bytes: 0 on a node without a GPU, and where it is
    not known. regions: pieces of memory, a descriptor each. clients: processes that may be attached at one time with
    the descriptors that are left. running_pid: the keeper of a node that runs on this runtime_dir already, 0 for none.
    certificate_hosts, certificate_until: what this node's certificate is for, and its end; nothing without one.
    problems: why `kvmanager serve` would refuse; empty when it would not.
    """

    host_bytes: int
    host_available_bytes: int
    host_limit: str
    device: str
    device_bytes: int
    device_total_bytes: int
    regions: int
    clients: int
    running_pid: int
    certificate_hosts: tuple[str, ...]
    certificate_until: str
    problems: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        lists = {"certificate_hosts": list(self.certificate_hosts), "problems": list(self.problems)}
        return {**asdict(self), **lists, "fits": not self.problems}


def fit_here(config: NodeConfig) -> HostFit:
    """Looks at this machine."""
    regions = plan_memory(config).regions
    on_gpu = config.node.device != "cpu"
    device_bytes = sum(r.size_bytes for r in regions if on_gpu and r.kind in (RegionKind.DEVICE, RegionKind.STAGING))
    room = host_room()
    problems = []
    try:
        config.check_memory(room.available_bytes, room.limit)
    except ConfigError as error:
        problems.append(str(error))
    total = 0
    if on_gpu:
        try:
            total = call("cuDeviceTotalMem", device_handle(device_ordinal(config.node.device)))
        except DeviceError as error:
            problems.append(f"device {config.node.device}: {error}")
        else:
            if device_bytes > total:
                problems.append(f"device {config.node.device} has {total} bytes; {device_bytes} are needed")
    certificate, unusable = look_at(config.tls, config.peer)
    problems += unusable
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HostFit(
        sum(region.size_bytes for region in regions) - device_bytes,
        room.available_bytes,
        room.limit,
        config.node.device,
        device_bytes,
        total,
        len(regions),
        max(descriptors - len(regions), 0) // FDS_A_CLIENT,
        lockfile.holder(config.node.runtime_dir / KEEPER_LOCK) or 0,
        certificate.hosts,
        certificate.valid_until,
        tuple(problems),
    )
