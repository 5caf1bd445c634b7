"""Whole runs: one configuration, a request of a million tokens, and what the deployment could gain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvmanager.replay.stream import Session
from kvmanager.simulation.costs import Costs
from kvmanager.simulation.deployment import Deployment, Settings
from kvmanager.simulation.report import SimulationReport, published, report_of
from kvmanager.simulation.turns import one_request, plays

MILLION_TOKENS: Final = 1_048_576
MILLION_OUTPUT: Final = 256
GAINS: Final[dict[str, dict[str, Any]]] = {
    "as published: LRU, whole spans of 512 tokens, inclusive tiers": {},
    "return-rate eviction": {"policy": "return-rate"},
    "reuse of 64 tokens under DCP": {"whole_spans": False},
    "exclusive tiers": {"inclusion": "exclusive"},
    "return path: answers come back to the prefill node": {"return_path": True},
    "gather overlapped": {"overlap": True},
    "all of them": {
        "policy": "return-rate", "whole_spans": False, "inclusion": "exclusive", "return_path": True, "overlap": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Million:
    """One request of 1,048,576 tokens, its answer of 256 included. expected: as published."""

    served: bool
    expected: bool
    ttft_s: float
    refusal: str


def simulate(settings: Settings, sessions: Sequence[Session], most_tokens: int, costs: Costs) -> SimulationReport:
    """One run over recorded sessions whose prompts and answers have at most `most_tokens` tokens."""
    run = Deployment(settings, plays(sessions, most_tokens, settings.seed), costs)
    run.run()
    return report_of(run)


def million(deployment: str, costs: Costs) -> Million:
    """Whether a configuration serves the longest request of the model."""
    play = one_request(MILLION_TOKENS - MILLION_OUTPUT, MILLION_OUTPUT)
    run = Deployment(Settings(deployment, 1, seconds=1e6), iter([play]), costs)
    run.run(warm_up=False)
    (job,) = run.jobs
    served = job.end_s >= 0
    return Million(served, published()["one_million"][deployment], job.first_s if served else 0.0, job.refused)


def gains(
    settings: Settings, sessions: Sequence[Session], most_tokens: int, costs: Costs, of: Iterable[str] = GAINS
) -> dict[str, SimulationReport]:
    """The same run with one thing changed at a time, and with all of them."""
    return {name: simulate(replace(settings, **GAINS[name]), sessions, most_tokens, costs) for name in of}
