"""`[mover]` of the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvmanager.configuration import configvalues as parse
from kvmanager.transport.pacing import LinkRates
from kvmanager.transport.paths import PullPath
from kvmanager.units import MIB, MILLISECOND_NS


def interfaces(value: object) -> str:
    """Names of devices, with commas between; UCX's words for all of them are refused."""
    names = value.split(",") if isinstance(value, str) else []
    if not names or not all(re.fullmatch(r"[A-Za-z0-9_.:-]+", name) for name in names):
        raise ValueError(f"{value!r} is not a list of devices as \"eth1\" or \"mlx5_0:1,eth1\"")
    if {"all", "any"} & set(names):
        raise ValueError(f"{value!r}: name the data network's devices; everybody who reaches the others could read")
    return ",".join(names)


class ExportPath(StrEnum):
    """HOST: from its host copies, at once. DEVICE: from device pages, once the request runs.

    AUTO: HOST where the mover is the CPU, on which it was measured to be faster. On a GPU the bytes would cross the
    link to the device twice at one time, for the request and for the ring that peers read: DEVICE.
    """

    AUTO = "auto"
    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverSection:
    """`[mover]`: staging for pulls, in chunks of `chunk_bytes`; rates of its links in GB/s (1e9 bytes), 0: no limit.

    data_interface: network devices, as UCX names them, that pulls may use; the mover's agent listens nowhere else.

    both_ways_gb_per_s: what write-back keeps to in sum with all else, so that it takes what onboarding leaves.

    return_path: whether decode groups give tickets too, so that what was made there can go back to a prefill node.

    pull_path: how chunks of pulls come, through staging or straight to their pages (see `transport.paths`).

    export_path: where a prefix that is being onboarded for a request is read by other nodes (see `ExportPath`).
    """

    staging_bytes: int = 64 * MIB
    chunk_bytes: int = 8 * MIB
    pull_deadline_ms: int = 20_000
    data_interface: str = "lo"
    to_host_gb_per_s: float = 0.0
    to_device_gb_per_s: float = 0.0
    both_ways_gb_per_s: float = 0.0
    pull_path: str = PullPath.MEASURED
    return_path: bool = False
    export_path: str = ExportPath.AUTO

    @property
    def rates(self) -> LinkRates:
        """The links' rates in bytes a second."""
        rates = (self.to_host_gb_per_s, self.to_device_gb_per_s, self.both_ways_gb_per_s)
        return LinkRates(*(round(rate * 1e9) for rate in rates))

    def exports_from_host(self, device: str) -> bool:
        """Whether tickets may name host copies, on a node whose mover is of this device."""
        return self.export_path == ExportPath.HOST or (self.export_path == ExportPath.AUTO and device == "cpu")

    @property
    def pull_deadline_ns(self) -> int:
        """Our own limit on one pull: a hung peer never errors."""
        return self.pull_deadline_ms * MILLISECOND_NS


MOVER: Final[Mapping[str, parse.Parser]] = {
    "staging_bytes": parse.size,
    "chunk_bytes": parse.size,
    "pull_deadline_ms": parse.count(1),
    "data_interface": interfaces,
    "to_host_gb_per_s": parse.rate,
    "to_device_gb_per_s": parse.rate,
    "both_ways_gb_per_s": parse.rate,
    "pull_path": parse.choice(*PullPath),
    "return_path": parse.switch,
    "export_path": parse.choice(*ExportPath),
}
