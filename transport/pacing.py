"""How many bytes a second a mover puts on a link: token buckets, by direction and for both together.

A bucket fills at its rate up to `BURST_NS` worth of it. A piece may start while its bucket is not in debt and takes
its bytes out, into debt where they are more than what is there; so pieces of any size keep the rate on average, and
what runs over in any time t is at most rate * (t + BURST_NS) and one piece.

`both_ways` bounds what the two directions take together: onboards and all else that somebody waits for take from it
without asking, write-back starts only while it is not in debt. So write-back gets what onboarding leaves. Nothing here
sleeps: `wait_ns` says when asking again is of use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvmanager.core.plans import Link, Purpose, Urgency
from kvmanager.errors import InvalidArgument
from kvmanager.units import MILLISECOND_NS, SECOND_NS

BURST_NS: Final = 5 * MILLISECOND_NS


@dataclass(frozen=True)
class LinkRates:
    """Most bytes a second from device to host, from host to device, and of both together; 0: no limit."""

    to_host: int = 0
    to_device: int = 0
    both_ways: int = 0

    def __post_init__(self) -> None:
        if min(self.to_host, self.to_device, self.both_ways) < 0:
            raise InvalidArgument(f"{self}: a rate below zero")


NO_LIMITS: Final = LinkRates()


class TokenBucket:
    """Bytes that may be put on a link now."""

    def __init__(self, bytes_per_s: int, now_ns: int) -> None:
        assert bytes_per_s > 0
        self._rate = bytes_per_s
        self._most = bytes_per_s * BURST_NS  # in bytes * nanoseconds a second: whole numbers, nothing is lost
        self._level = self._most
        self._at_ns = now_ns

    def _fill(self, now_ns: int) -> None:
        self._level = min(self._most, self._level + (now_ns - self._at_ns) * self._rate)
        self._at_ns = now_ns

    def wait_ns(self, now_ns: int) -> int:
        """How long it stays in debt."""
        self._fill(now_ns)
        return max(0, -(self._level // self._rate))

    def spend(self, size_bytes: int, now_ns: int) -> None:
        """Takes bytes out."""
        self._fill(now_ns)
        self._level -= size_bytes * SECOND_NS


class Pacer:
    """Says when a piece of a plan may start. Without rates it always may."""

    def __init__(self, rates: LinkRates = NO_LIMITS, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._links: dict[Link, TokenBucket] = {}
        self._both: TokenBucket | None = None
        self.set_rates(rates)

    def set_rates(self, rates: LinkRates) -> None:
        """From now on these; debts are forgotten."""
        now_ns = self._clock_ns()
        wanted = {Link.TO_HOST: rates.to_host, Link.TO_DEVICE: rates.to_device}
        self._links = {link: TokenBucket(rate, now_ns) for link, rate in wanted.items() if rate}
        self._both = TokenBucket(rates.both_ways, now_ns) if rates.both_ways else None

    def wait_ns(self, purpose: Purpose) -> int:
        """How long no piece for this purpose may start; 0: now."""
        link = purpose.link
        if link is None or not (self._links or self._both):
            return 0
        now_ns = self._clock_ns()
        bucket = self._links.get(link)
        waits = [0 if bucket is None else bucket.wait_ns(now_ns)]
        if self._both is not None and purpose.urgency is Urgency.WRITE_BACK:
            waits.append(self._both.wait_ns(now_ns))
        return max(waits)

    def spend(self, purpose: Purpose, size_bytes: int) -> None:
        """A piece for this purpose starts."""
        link = purpose.link
        if link is None or not (self._links or self._both):
            return
        now_ns = self._clock_ns()
        for bucket in (self._links.get(link), self._both):
            if bucket is not None:
                bucket.spend(size_bytes, now_ns)
