"""Committed constants of the machine, with their sources beside them in the file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second, one direction, of one GPU's links."""

    host_to_device_bytes_per_s: float
    device_to_host_bytes_per_s: float
    nvlink_bytes_per_s: float
    nic_bytes_per_s: float


def constants() -> dict[str, dict[str, float]]:
    """All tables of the file."""
    return tomllib.loads(files("kvmanager.simulation").joinpath("data/hardware.toml").read_text("utf-8"))


def link_rates() -> LinkRates:
    """Rates of the links."""
    return LinkRates(**constants()["link"])
