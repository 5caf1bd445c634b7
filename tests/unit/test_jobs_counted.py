"""Background jobs and histograms: what the meter exports, job by job, and what makes each count."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
import yaml
from prometheus_client import CollectorRegistry

from kvmanager.core.events import MoverJoined, Tick
from kvmanager.core.state import COUNTERS
from kvmanager.observing.meter import JOBS, CallTimer, Meter

OF_NO_JOB = frozenset({
    # What engines, operators and other nodes ask for, and what is found out meanwhile.
    "prefix_hit", "prefix_hit_tokens", "prompt_tokens", "partial_span_reuse", "partial_span_tokens", "onboard",
    "draft_truncation", "handoff", "export", "refusal", "failed_plan", "quarantined_copy", "request", "step",
    "writeback_given_up", "writeback_bypass", "writeback_cancelled", "bad_copy", "bad_pull", "restart_check",
    "acquire", "acquired_tokens", "store", "stored_tokens", "failed_load", "retraction", "resumption",
})  # fmt: skip


def sample(registry: CollectorRegistry, job: str, cause: str) -> float | None:
    return registry.get_sample_value("kvmanager_background_job_items_total", {"job": job, "cause": cause})


def test_every_counter_is_a_jobs_or_known_to_be_none() -> None:
    """A counter that is new must be put on one side: background work that nobody sees is what the rule is against."""
    of_jobs = [name for names in JOBS.values() for name in names]
    assert len(of_jobs) == len(set(of_jobs))
    assert set(of_jobs) <= set(COUNTERS)
    assert set(COUNTERS) - set(of_jobs) == OF_NO_JOB


@pytest.mark.parametrize("job", JOBS)
def test_a_job_is_counted_by_what_made_it_run(job: str) -> None:
    registry, counters = CollectorRegistry(), dict.fromkeys(COUNTERS, 0)
    meter = Meter(registry, counters, str)
    assert [sample(registry, job, cause) for cause in ("tick", "triggered")] == [0.0, 0.0], "there from the start"
    for name in JOBS[job]:
        counters[name] += 2
        meter.applied(Tick(), [], 0.0)
        counters[name] += 3
        meter.applied(MoverJoined(1), [], 0.0)
    done = len(JOBS[job])
    assert [sample(registry, job, cause) for cause in ("tick", "triggered")] == [2.0 * done, 3.0 * done]
    assert sum(sample(registry, other, cause) or 0 for other in JOBS for cause in ("tick", "triggered")) == 5 * done


def test_there_are_histograms_of_calls_matches_copies_and_hand_offs() -> None:
    registry = CollectorRegistry()
    Meter(registry, dict.fromkeys(COUNTERS, 0), str)
    CallTimer(registry)
    kinds = {family.name: family.type for family in registry.collect()}
    named = [name for name, kind in kinds.items() if kind == "histogram"]
    for what in ("match", "copy", "handoff", "core_event"):
        assert f"kvmanager_{what}_duration_seconds" in named
    assert any(re.search(r"(rpc|call)\w*_duration_seconds", name) for name in named), named


def test_rules_name_the_units_that_their_metrics_have() -> None:
    """A limit on seconds is on a metric in seconds, one on a share on bytes of the same kind."""
    rules = yaml.safe_load(files("kvmanager").joinpath("alerts.yaml").read_text(encoding="utf-8"))
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        if "histogram_quantile" in rule["expr"]:
            assert re.search(r"_seconds_bucket\[", rule["expr"]), rule["alert"]
        for counter in re.findall(r"(?:rate|increase)\((\w+)", rule["expr"]):
            assert counter.endswith(("_total", "_bucket")), (rule["alert"], counter)
