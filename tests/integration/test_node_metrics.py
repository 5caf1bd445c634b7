"""Metrics, probes and health of real nodes: what is exported, what it says, and what a stopped process does to it."""

from __future__ import annotations

import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from nodes_support import (
    GROUP,
    PAGES,
    SPAN,
    Node,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    rotate,
    tokens_of,
    wait_for,
)
from prometheus_client.parser import text_string_to_metric_families

from kvmanager.core.pool import PageState
from kvmanager.demo.nodes import NodeProcess
from kvmanager.errors import InvalidArgument
from kvmanager.exitcodes import EXIT_CONFIG
from kvmanager.protos import kvmanager_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING
Labels = dict[str, str]
OPERATIONS = """
[metrics]
listen = "127.0.0.1:0"
[tls]
plain_loopback = true
[health]
probe_ms = 50
core_ms = 2000
mover_ms = 500
evict_ms = 500
history_ms = 2000
"""


class Probed:
    """A node, and what its HTTP listener says."""

    def __init__(self, running: Node) -> None:
        self.node = running
        port = re.findall(r"metrics and probes on 127\.0\.0\.1:(\d+)", running.log())[-1]
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def samples(self) -> dict[str, list[tuple[Labels, float]]]:
        """Sample name -> (labels, value)."""
        found: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def value(self, name: str, **labels: str) -> float:
        """The sum over the samples that have these labels."""
        return total(self.samples().get(name, []), **labels)

    def service(self, name: str = "") -> int:
        with grpc.insecure_channel(f"unix:{self.node.runtime_dir / 'grpc.sock'}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return int(stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status)


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    """One node for all tests: what they look at are differences, or holds whatever was before."""
    with node(tmp_path_factory.mktemp("metrics"), "observed", prefill_toml, more=OPERATIONS) as running:
        yield Probed(running)


def at_rest(probed: Probed) -> tuple[dict[str, list[tuple[Labels, float]]], list[pb.PoolStatus], dict[str, int]]:
    """Samples, pools and counters of one moment: nothing changed between two looks around the scrape."""
    while True:
        probed.node.wait_at_rest()
        before = probed.node.admin.pools(), probed.node.counters()
        samples = probed.samples()
        if before == (probed.node.admin.pools(), probed.node.counters()):
            return samples, list(before[0].pools), before[1]


def total(samples: list[tuple[Labels, float]], **labels: str) -> float:
    """The sum over the samples that have these labels."""
    return sum(value for found, value in samples if labels.items() <= found.items())


def test_what_is_exported_is_what_the_node_holds(probed: Probed) -> None:
    rotate(probed.node, [1, 2, 3, 4])
    samples, pools, counters = at_rest(probed)

    def value(name: str, **labels: str) -> float:
        return total(samples[name], **labels)

    assert counters["offload"]
    assert counters["onboard"]
    for name, count in counters.items():
        assert samples[f"kvmanager_{name}_total"] == [({}, count)], name
    assert len(pools) == 2
    for pool in pools:
        where = {"group": GROUP, "pool": pool.pool, "tier": pool.tier}
        states = {state.name.lower(): getattr(pool, f"{state.name.lower()}_bytes") for state in PageState}
        assert sum(states.values()) == value("kvmanager_pool_capacity_bytes", **where) == pool.capacity_bytes
        for state, held in states.items():
            assert value("kvmanager_pool_bytes", state=state, **where) == held
        assert value("kvmanager_pool_reclaimable_bytes", **where) == pool.reclaimable_bytes
        tenant = f"uid {os.getuid()}"
        assert value("kvmanager_tenant_bytes", tenant=tenant, **where) == pool.ready_bytes > 0
    assert value("kvmanager_cached_spans", group=GROUP) == probed.node.admin.prefixes().spans
    onboards = value("kvmanager_copy_duration_seconds_count", purpose="onboard", outcome="done")
    assert onboards > 0
    page_bytes = pools[0].capacity_bytes // PAGES
    assert value("kvmanager_copied_bytes_total", purpose="onboard") == counters["onboard"] * page_bytes
    assert value("kvmanager_match_tokens_sum", tenant=f"uid {os.getuid()}") == counters["prefix_hit_tokens"] > 0
    assert value("kvmanager_match_tokens_sum") == counters["prefix_hit_tokens"], "nobody else's"
    assert value("kvmanager_history_dropped_events_total") == 0
    assert value("kvmanager_match_duration_seconds_count") == counters["request"]
    done = value("kvmanager_background_job_items_total", job="writeback")
    assert done == counters["offload"]
    assert value("kvmanager_background_job_items_total", job="eviction") == counters["eviction"]
    assert probed.value("kvmanager_rpc_duration_seconds_count", method="Prefixes", code="OK") == 1
    with pytest.raises(InvalidArgument):
        probed.node.admin.map("no such pool")
    assert probed.value("kvmanager_rpc_duration_seconds_count", method="Map", code="INVALID_ARGUMENT") == 1
    assert probed.value("kvmanager_node_state", state="serving") == 1
    assert probed.value("kvmanager_up") == probed.value("kvmanager_ready") == 1


def test_refusals_are_counted_by_reason_and_pool(probed: Probed) -> None:
    before = probed.value("kvmanager_refusals_total", reason="EXHAUSTED")
    engine = prefill_engine(probed.node.runtime_dir)
    engine.open(open_of(1, tokens_of(1, PAGES * SPAN), growth=0))
    result = engine.client.step(fence=engine.workers.fence(), opens=[open_of(2, tokens_of(2, SPAN))])
    pool = result.opened[2].error.pool
    assert pool
    told = {"reason": "EXHAUSTED", "pool": pool, "tenant": f"uid {os.getuid()}"}
    assert probed.value("kvmanager_refusals_total", **told) == before + 1
    assert probed.get("/readyz") == (200, "ready\n")
    # The pool stays full, the refused request keeps its claim, and nobody is admitted.
    wait_for(lambda: probed.get("/readyz")[0] == 503, lambda: str(probed.samples()))
    assert f"pool {pool}: 0 slabs free or reclaimable" in probed.get("/readyz")[1]
    assert probed.service() != SERVING
    engine.close()
    wait_for(lambda: probed.get("/readyz")[0] == 200)
    assert probed.service() == SERVING


def test_hot_rows_are_totals_of_an_epoch(probed: Probed) -> None:
    engine = prefill_engine(probed.node.runtime_dir)
    for hits, misses in ((10, 4), (25, 4)):
        engine.client.hot_rows = hits, misses
        engine.step()
    assert probed.value("kvmanager_hot_buffer_rows_total", result="hit") == 25
    assert probed.value("kvmanager_hot_buffer_rows_total", result="miss") == 4
    engine.close()


def test_a_stopped_mover_is_not_ready_until_it_goes_on(probed: Probed) -> None:
    mover = probed.node.pid_of("mover")
    assert probed.get("/readyz") == (200, "ready\n")
    assert probed.service("kvmanager.mover") == SERVING
    os.kill(mover, signal.SIGSTOP)
    try:
        wait_for(lambda: probed.get("/readyz")[0] == 503)
        assert "mover: has not answered a ping for" in probed.get("/readyz")[1]
        assert probed.service() != SERVING
        assert probed.service("kvmanager.mover") != SERVING
        assert probed.service("kvmanager.core") == SERVING
        assert probed.get("/healthz") == (200, "alive\n"), "a restart of the daemon would not help"
        assert probed.value("kvmanager_part_stalled", part="mover") == 1
        assert probed.value("kvmanager_ready") == 0
    finally:
        os.kill(mover, signal.SIGCONT)
    wait_for(lambda: probed.get("/readyz")[0] == 200)
    assert probed.service() == SERVING
    assert probed.value("kvmanager_part_stalled", part="mover") == 0
    os.kill(mover, signal.SIGKILL)
    wait_for(lambda: probed.node.pid_of("mover") != mover)
    wait_for(lambda: probed.get("/readyz")[0] == 200)


def test_a_history_that_hangs_is_told_of_and_the_node_stays_ready(probed: Probed) -> None:
    """A pipe that nobody reads stands for a disk that does not answer."""
    file = probed.node.runtime_dir / "history" / "history.jsonl"
    assert probed.value("kvmanager_part_late", part="history") == 0
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    rotate(probed.node, [5])
    wait_for(lambda: probed.value("kvmanager_part_late", part="history") == 1)
    status, text = probed.get("/readyz")
    assert status == 200
    assert text.startswith("ready\nhistory: has work and did none for ")
    assert probed.service() == SERVING
    assert probed.value("kvmanager_ready") == 1
    assert [(stall.part, stall.ready) for stall in probed.node.admin.status().stalls] == [("history", True)]
    reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    file.unlink()
    wait_for(lambda: probed.get("/readyz") == (200, "ready\n"))
    os.close(reader)
    assert not probed.node.admin.status().stalls
    assert probed.value("kvmanager_part_late", part="history") == 0
    assert "late: history has work and did none for" in probed.node.log()
    assert "history goes on" in probed.node.log()


def test_other_paths_are_refused_and_a_used_port_is_an_error(probed: Probed, tmp_path: Path) -> None:
    assert probed.get("/")[0] == 404
    port = probed.url.rpartition(":")[2]
    more = f'[metrics]\nlisten = "127.0.0.1:{port}"\n[tls]\nplain_loopback = true'
    second = prefill_toml(tmp_path / "second", more=more)
    with NodeProcess("second", tmp_path, second) as process:
        assert process._process is not None
        assert process._process.wait(30) == EXIT_CONFIG
        assert "[metrics] listen: can't listen on" in process.log_tail()


def test_alert_rules_name_only_what_is_exported(probed: Probed) -> None:
    rotate(probed.node, [1, 2, 3, 4])
    exported = probed.samples()
    rules = yaml.safe_load(files("kvmanager").joinpath("alerts.yaml").read_text(encoding="utf-8"))
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 5
    for rule in alerts:
        named = set(re.findall(r"\bkvmanager_\w+", rule["expr"]))
        assert named
        for name in named:
            assert name in exported or name.removesuffix("_bucket") + "_count" in exported or optional(name), name
        for metric, label, value in re.findall(r'(kvmanager_\w+)\{(\w+)="(\w+)"\}', rule["expr"]):
            assert any(labels.get(label) == value for labels, _ in exported[metric]), (metric, label, value)
        for metric, label in re.findall(r"sum by \(([^)]*)\)\s*\(rate\((kvmanager_\w+)", rule["expr"]):
            assert metric
            assert label
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["remedy"]


def optional(name: str) -> bool:
    """Exported once there was one: by its declaration."""
    from prometheus_client import CollectorRegistry

    from kvmanager.core.state import COUNTERS
    from kvmanager.observing.meter import Meter

    registry = CollectorRegistry()
    Meter(registry, dict.fromkeys(COUNTERS, 0), str)
    bare = re.sub(r"_(total|bucket)$", "", name)
    return bare in {family.name for family in registry.collect()}


def test_names_and_units_follow_the_convention(probed: Probed) -> None:
    rotate(probed.node, [1, 2, 3, 4])
    for family in text_string_to_metric_families(probed.get("/metrics")[1]):
        if family.name.startswith("process_"):
            continue
        assert re.fullmatch(r"kvmanager(_[a-z]+)+", family.name), family.name
        assert family.documentation
        assert not re.search(r"_(ms|ns|mib|gb|count|sum)$", family.name), family.name
        if family.type == "counter":
            assert all(s.name.endswith(("_total", "_created")) for s in family.samples)
        if family.type == "histogram" and "duration" in family.name:
            assert family.name.endswith("_seconds")
        assert all(value is not None for sample in family.samples for value in sample.labels.values())
