"""What a simulated run came to, and how it stands beside what was published."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from kvmanager.simulation.deployment import Deployment
from kvmanager.simulation.jobs import Rank

GPUS = 16
"""Of both nodes."""
EVEN = 0.05
"""Published as "within a few percent": nobody is ahead by more."""


@dataclass(frozen=True)
class SimulationReport:
    """Of the requests that arrived after the warm-up and were answered; counters and bytes are of the whole run.

    logical_tokens: prompts and answers, cached tokens included. tokens_per_s_per_user: of an answer, over the time from
    arrival to its end; p10: nine tenths are faster. waited_prefill, waited_decode: opens that found no room.
    link_bytes: of the busiest GPU of a node.
    """

    deployment: str
    lanes: int
    seed: int
    counted_s: float
    warm_up_s: float
    requests: int
    refused: int
    ttft_p50_s: float
    ttft_p90_s: float
    tokens_per_s_per_user_p50: float
    tokens_per_s_per_user_p10: float
    logical_tokens_per_s_per_gpu: float
    prompt_tokens: int
    hit_tokens: int
    prefilled_tokens: int
    hit_rate: float
    prefill_busy: float
    decode_busy: float
    most_decoding: int
    waited_prefill: int
    waited_decode: int
    evictions: int
    onboarded: int
    spills: int
    partial_span_tokens: int
    link_bytes: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def report_of(run: Deployment) -> SimulationReport:
    """Sums up a run."""
    done = [job for job in run.jobs if job.end_s >= 0 and job.arrived_s >= run.counting_s >= 0]
    ttft = sorted(job.first_s - job.arrived_s for job in done)
    speed = sorted(job.turn.output_tokens / (job.end_s - job.arrived_s) for job in done)
    prompt = sum(job.turn.prompt_tokens for job in done)
    hit = sum(job.cached_tokens for job in done)
    counted = run.clock.now_s - max(run.counting_s, 0.0)
    logical = prompt + sum(job.turn.output_tokens for job in done)
    counters: Counter[str] = Counter()
    for rank in (*run.prefill_ranks, *run.decode_ranks):
        counters.update(rank.node.counters)
    settings = run.settings
    return SimulationReport(
        deployment=settings.deployment,
        lanes=settings.lanes,
        seed=settings.seed,
        counted_s=counted,
        warm_up_s=run.counting_s,
        requests=len(done),
        refused=sum(bool(job.refused) for job in run.jobs),
        ttft_p50_s=_share(ttft, 0.5),
        ttft_p90_s=_share(ttft, 0.9),
        tokens_per_s_per_user_p50=_share(speed, 0.5),
        tokens_per_s_per_user_p10=_share(speed, 0.1),
        logical_tokens_per_s_per_gpu=logical / counted / GPUS if counted else 0.0,
        prompt_tokens=prompt,
        hit_tokens=hit,
        prefilled_tokens=sum(job.computed_tokens - job.cached_tokens for job in done),
        hit_rate=hit / max(prompt, 1),
        prefill_busy=run.prefill.busy_s / max(run.clock.now_s, 1e-9),
        decode_busy=run.decode.busy_s / max(run.clock.now_s, 1e-9),
        most_decoding=run.decode.most_running,
        waited_prefill=sum(engine.refused_opens for engine in run.prefill.engines),
        waited_decode=sum(rank.refused_opens for rank in run.decode.ranks),
        evictions=counters["eviction"],
        onboarded=counters["onboard"],
        spills=counters["spill"],
        partial_span_tokens=counters["partial_span_tokens"],
        link_bytes={**_links("prefill", run.prefill_ranks), **_links("decode", run.decode_ranks)},
    )


def _links(node: str, ranks: list[Rank]) -> dict[str, int]:
    return {
        f"{node}_to_device": max(rank.to_device.moved_bytes for rank in ranks),
        f"{node}_to_host": max(rank.to_host.moved_bytes for rank in ranks),
        f"{node}_nic": max(rank.nic.moved_bytes for rank in ranks),
    }


def _share(ordered: list[float], share: float) -> float:
    """The value that `share` of them are below; 0 for none."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


@dataclass(frozen=True)
class Comparison:
    """One published ratio beside what came out. published, required: lowest and highest."""

    name: str
    of: str
    to: str
    published: tuple[float, float]
    required: tuple[float, float]
    ratio: float

    @property
    def met(self) -> bool:
        """Whether it is what a run must show."""
        return self.required[0] <= self.ratio <= self.required[1]

    @property
    def sign(self) -> bool:
        """Whether the one that was ahead is ahead here; where neither was, whether they are as near (`EVEN`)."""
        low, high = self.published
        if high <= 1 - EVEN or low >= 1 + EVEN:
            return (self.ratio > 1) is (low > 1)
        return abs(self.ratio - 1) <= 2 * EVEN


def published() -> dict[str, Any]:
    """The committed file."""
    return tomllib.loads(files("kvmanager.simulation").joinpath("data/published.toml").read_text("utf-8"))


def partners(deployment: str, lanes: int) -> list[str]:
    """Configurations that some published ratio at so many sessions sets beside this one."""
    pairs = [(told["of"], told["to"]) for told in published()["comparison"] if lanes in told["lanes"]]
    return sorted({name for pair in pairs if deployment in pair for name in pair} - {deployment})


def compare(lanes: int, reports: Mapping[str, SimulationReport]) -> list[Comparison]:
    """Every published ratio at so many sessions whose two configurations were run."""
    found = []
    for told in published()["comparison"]:
        if lanes not in told["lanes"] or told["of"] not in reports or told["to"] not in reports:
            continue
        below = getattr(reports[told["to"]], told["metric"])
        ratio = getattr(reports[told["of"]], told["metric"]) / below if below else float("inf")
        found.append(
            Comparison(told["name"], told["of"], told["to"], tuple(told["published"]), tuple(told["required"]), ratio)
        )
    return found
