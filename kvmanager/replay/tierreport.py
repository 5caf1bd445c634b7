"""What a replay with tiers found: the same object for the core in virtual time and for a live node."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

from kvmanager.core.plans import Purpose
from kvmanager.core.spec import MissCosts
from kvmanager.replay.course import Queueing, Served
from kvmanager.replay.stream import Request


@dataclass(frozen=True)
class Rates:
    """What computing a token takes, and each rank's link to the host in both directions."""

    prefill_tokens_per_s: float
    host_to_device_bytes_per_s: float
    device_to_host_bytes_per_s: float

    def miss_costs(self, token_bytes: float, ranks: int) -> MissCosts:
        """The same for the core: `token_bytes` of a token, spread over all ranks."""
        return MissCosts(token_bytes / ranks / self.host_to_device_bytes_per_s, 1 / self.prefill_tokens_per_s)


def published_rates() -> Rates:
    """The rates of the reference deployment, with their sources in the file."""
    told = tomllib.loads(files("kvmanager.replay").joinpath("data/rates.toml").read_text("utf-8"))
    link = told["link"]
    return Rates(
        told["prefill"]["tokens_per_s"], link["host_to_device_bytes_per_s"], link["device_to_host_bytes_per_s"]
    )


@dataclass(frozen=True, kw_only=True)
class TierReport:
    """What a replay found, over the requests after the warm-up. Rates are shares of prompt tokens.

    A link is one rank's. Evictions are spans forgotten, by the tier that needed room; `reclaims` are copies that went
    while the other tier kept one. `partial_span_tokens`: found in spans that the prompt shares in part only.
    queued: requests that waited for room, with the wait that half and 99 % of them stayed below, in seconds of the
    stream. most_*: at one moment of the whole run. high_water_bytes: by pool, most that was not free.
    """

    policy: str
    inclusion: str
    device_tokens: int
    host_tokens: int
    span_tokens: int
    requests: int
    counted_requests: int
    refused: int
    queued: int
    queued_p50_s: float
    queued_p99_s: float
    most_waiting: int
    most_open: int
    most_open_tokens: int
    high_water_bytes: dict[str, int]
    prompt_tokens: int
    device_hit_rate: float
    host_hit_rate: float
    prefix_hit_rate: float
    prefilled_tokens: int
    onboarded_tokens: int
    host_to_device_link_bytes: int
    device_to_host_link_bytes: int
    evictions_for_device: int
    evictions_for_host: int
    device_reclaims: int
    host_reclaims: int
    bypassed: int
    partial_span_reuse: int
    partial_span_tokens: int
    prefill_seconds_avoided: float
    reload_seconds: float
    seconds_saved: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass
class Tally:
    """Sums over the counted part. `before`: counters and bytes when it began."""

    requests: int = 0
    prompt_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    loaded_tokens: int = 0
    refused: int = 0
    before: Counter[str] = field(default_factory=Counter)

    def count(self, request: Request, served: Served) -> None:
        """Adds a request. What was loaded and not used, at the end of a span, was not found on the host."""
        found_on_host = min(served.loaded_tokens, served.cached_tokens)
        self.requests += 1
        self.prompt_tokens += request.tokens
        self.host_tokens += found_on_host
        self.device_tokens += served.cached_tokens - found_on_host
        self.loaded_tokens += served.loaded_tokens
        self.refused += served.refused


@dataclass(frozen=True)
class Cache:
    """What was replayed on. tokens: of the device and of the host pool."""

    policy: str
    inclusion: str
    tokens: tuple[int, int]
    ranks: int
    span_tokens: int


def moved_bytes(purpose: Purpose) -> str:
    """The name of a counter of bytes, all ranks."""
    return f"bytes/{purpose.value}"


def figures(
    cache: Cache, total: int, tally: Tally, after: Mapping[str, int], queueing: Queueing, high_water: dict[str, int],
    rates: Rates,
) -> dict[str, Any]:
    """The fields of a TierReport. after: counters and bytes at the end."""  # fmt: skip
    happened = Counter(after)
    happened.subtract(tally.before)
    prompt, found = max(tally.prompt_tokens, 1), tally.device_tokens + tally.host_tokens
    written = happened[moved_bytes(Purpose.OFFLOAD)] + happened[moved_bytes(Purpose.SPILL)]
    up, down = happened[moved_bytes(Purpose.ONBOARD)] // cache.ranks, written // cache.ranks
    avoided, reload = found / rates.prefill_tokens_per_s, up / rates.host_to_device_bytes_per_s
    return {
        "policy": cache.policy,
        "inclusion": cache.inclusion,
        "device_tokens": cache.tokens[0],
        "host_tokens": cache.tokens[1],
        "span_tokens": cache.span_tokens,
        "requests": total,
        "counted_requests": tally.requests,
        "refused": tally.refused,
        "queued": len(queueing.waits_s),
        "queued_p50_s": queueing.waited_s(0.5),
        "queued_p99_s": queueing.waited_s(0.99),
        "most_waiting": queueing.most_waiting,
        "most_open": queueing.most_open,
        "most_open_tokens": queueing.most_open_tokens,
        "high_water_bytes": high_water,
        "prompt_tokens": tally.prompt_tokens,
        "device_hit_rate": tally.device_tokens / prompt,
        "host_hit_rate": tally.host_tokens / prompt,
        "prefix_hit_rate": found / prompt,
        "prefilled_tokens": tally.prompt_tokens - found,
        "onboarded_tokens": tally.loaded_tokens,
        "host_to_device_link_bytes": up,
        "device_to_host_link_bytes": down,
        "evictions_for_device": happened["eviction"] - happened["host_eviction"],
        "evictions_for_host": happened["host_eviction"],
        "device_reclaims": happened["reclaim"],
        "host_reclaims": happened["host_reclaim"],
        "bypassed": happened["writeback_bypass"],
        "partial_span_reuse": happened["partial_span_reuse"],
        "partial_span_tokens": happened["partial_span_tokens"],
        "prefill_seconds_avoided": avoided,
        "reload_seconds": reload,
        "seconds_saved": avoided - reload,
    }
