"""`[mover]` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from kvmanager.transport.pacing import LinkRates
from kvmanager.units import MIB, MILLISECOND_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverSection:
    """`[mover]`: staging for pulls, in chunks of `chunk_bytes`; rates of its links in GB/s (1e9 bytes), 0: no limit.

    both_ways_gb_per_s: what write-back keeps to in sum with all else, so that it takes what onboarding leaves.
    """

    staging_bytes: int = 64 * MIB
    chunk_bytes: int = 8 * MIB
    pull_deadline_ms: int = 20_000
    to_host_gb_per_s: float = 0.0
    to_device_gb_per_s: float = 0.0
    both_ways_gb_per_s: float = 0.0

    @property
    def rates(self) -> LinkRates:
        """The links' rates in bytes a second."""
        rates = (self.to_host_gb_per_s, self.to_device_gb_per_s, self.both_ways_gb_per_s)
        return LinkRates(*(round(rate * 1e9) for rate in rates))

    @property
    def pull_deadline_ns(self) -> int:
        """Our own limit on one pull: a hung peer never errors."""
        return self.pull_deadline_ms * MILLISECOND_NS
