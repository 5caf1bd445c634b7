"""Real nodes whose keeper is killed, upgraded, or killed together with the daemon, while engines are attached."""

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest
from nodes_support import (
    SPAN,
    kill_and_wait,
    node,
    prefill_engine,
    prefill_toml,
    run_request,
    tokens_of,
    wait_for,
)

from kvmanager.demo.nodes import NodeProcess
from kvmanager.errors import KVError
from kvmanager.keeper.lockfile import holder
from kvmanager.killpoints import VARIABLE as KILL_AT


@pytest.fixture
def served(tmp_path):
    with node(tmp_path, "prefill", prefill_toml) as running:
        yield running


class Traffic:
    """An engine that runs request after request, more prompts than HBM holds, and checks the bytes of every hit."""

    def __init__(self, runtime_dir):
        self.engine = prefill_engine(runtime_dir)
        self.done = 0
        self.hits = 0
        self.refused = []
        self.failure = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            while not self._stop.is_set():
                seed = self.done % 4
                try:
                    request_id = self.done + 1000 * len(self.refused)
                    self.hits += run_request(self.engine, request_id, tokens_of(seed, 5 * SPAN), seed)
                except KVError as error:
                    self.refused.append(error)
                self.done += 1
        except BaseException as error:
            self.failure = error

    def goes_on(self, requests=8):
        """Waits for as many requests more, from one that began from now on."""
        goal = self.done + 1 + requests
        wait_for(lambda: self.failure is not None or self.done >= goal, lambda: f"{self.done} of {goal}")
        assert self.failure is None, self.failure

    def stop(self):
        self._stop.set()
        self._thread.join()
        assert self.failure is None, self.failure
        self.engine.close()


@contextlib.contextmanager
def next_keeper(tmp_path):
    """`kvmanager serve` once more on the same configuration."""
    process = NodeProcess("prefill", tmp_path, prefill_toml(tmp_path / "prefill"))
    with process:
        yield process


def kill_keeper(served):
    served.process._process.kill()
    served.process._process.wait()


def test_engines_go_on_through_the_keepers_death_and_under_the_next_one(served, tmp_path):
    traffic = Traffic(served.runtime_dir)
    traffic.goes_on()
    before = served.admin.status()
    daemon = served.pid_of("daemon")
    kill_keeper(served)
    traffic.goes_on()
    with next_keeper(tmp_path) as keeper:
        wait_for(lambda: f"found the daemon, pid {daemon}" in served.log())
        wait_for(lambda: "a new keeper holds all" in served.log())
        memory = {os.readlink(entry) for entry in Path(f"/proc/{keeper.pid}/fd").iterdir()}
        assert sum("memfd:kvmanager:" in name for name in memory) >= 5  # two ranks' HBM and host, the timelines
        traffic.goes_on()
        mover = served.admin.status().movers[0].pid
        assert mover == before.movers[0].pid
        kill_and_wait(mover)
        wait_for(lambda: served.admin.status().movers[0].pid not in (0, mover))
        traffic.goes_on()
        traffic.stop()
        assert traffic.hits > 0
        after = served.admin.status()
        assert after.boot_id == before.boot_id
        assert served.log().count("started the daemon") == 1
        served.wait_at_rest()
        keeper._process.send_signal(signal.SIGTERM)
        assert keeper._process.wait(20) == 0
        assert holder(served.runtime_dir / "daemon.lock") is None
        assert [path.name for path in served.runtime_dir.iterdir()] == ["history"]


def test_a_daemon_found_by_a_keeper_is_restarted_by_it(served, tmp_path):
    kill_keeper(served)
    with next_keeper(tmp_path) as served.process:
        wait_for(lambda: "a new keeper holds all" in served.log())
        boot_id = served.admin.status().boot_id
        kill_and_wait(served.pid_of("daemon"))
        wait_for(lambda: served.log().count("started the daemon") == 2)
        served.reopen()
        assert served.admin.status().boot_id > boot_id
        Traffic(served.runtime_dir).stop()


def test_engines_go_on_through_an_upgrade_of_the_keeper(served):
    traffic = Traffic(served.runtime_dir)
    traffic.goes_on()
    before = served.admin.status()
    for count in (1, 2):
        served.process._process.send_signal(signal.SIGUSR2)
        wait_for(lambda count=count: served.log().count("upgraded in place") == count)
        traffic.goes_on()
    kill_and_wait(before.movers[0].pid)
    wait_for(lambda: served.admin.status().movers[0].pid not in (0, before.movers[0].pid))
    traffic.goes_on()
    traffic.stop()
    assert served.admin.status().boot_id == before.boot_id
    served.wait_at_rest()


def test_a_second_keeper_leaves_the_first_ones_node_alone(served, tmp_path):
    traffic = Traffic(served.runtime_dir)
    with next_keeper(tmp_path) as rival:
        assert rival._process.wait(20) == 78
        assert f"a keeper, pid {served.process.pid}, has {served.runtime_dir} already" in served.log()
    traffic.goes_on()
    traffic.stop()


def test_when_keeper_and_daemon_die_the_next_start_is_cold_and_says_so(served, tmp_path):
    traffic = Traffic(served.runtime_dir)
    traffic.goes_on()
    mover = served.admin.status().movers[0].pid
    kill_keeper(served)
    kill_and_wait(served.pid_of("daemon"))
    assert Path(f"/proc/{mover}").exists(), "the mover does not know yet"
    with next_keeper(tmp_path) as keeper:
        served.process = keeper
        served.reopen()
        wait_for(lambda: len(traffic.refused) > 0)
        log = served.log()
        assert "cold start, the cache is lost" in log
        assert "killed what was left: mover-cpu" in log
        wait_for(lambda: not Path(f"/proc/{mover}").exists())
        assert served.admin.status().movers[0].pid != mover
        assert served.counters()["prefix_hit"] == 0
        traffic._stop.set()
        traffic._thread.join()
        again = Traffic(served.runtime_dir)
        again.goes_on()
        again.stop()
        served.wait_at_rest()
    with contextlib.suppress(KVError):
        traffic.engine.close()


POINTS = ["daemon.apply.after:60", "mover.plan.half_copied:1"]
MORE_POINTS = [
    "daemon.plan.submitted:2", "daemon.completion.received:1", "daemon.apply.before:50", "daemon.reply.after:9",
    "mover.plan.received:2", "mover.plan.completed:2",
]  # fmt: skip


@pytest.mark.parametrize("point", [*POINTS, *(pytest.param(point, marks=pytest.mark.long) for point in MORE_POINTS)])
def test_a_node_comes_back_from_a_kill_point(tmp_path, monkeypatch, point):
    """Each point is passed in a running node; whatever died there, the ledger holds and hits have the right bytes."""
    monkeypatch.setenv(KILL_AT, point)
    victim = {"daemon": "daemon", "mover": "mover-cpu"}[point.split(".")[0]]
    with node(tmp_path, "prefill", prefill_toml) as running:
        traffic = Traffic(running.runtime_dir)
        wait_for(lambda: f"the {victim} ended with -9" in running.log())
        traffic._stop.set()
        traffic._thread.join()
        with contextlib.suppress(KVError):
            traffic.engine.close()
        running.reopen()
        again = Traffic(running.runtime_dir)
        again.goes_on()
        again.stop()
        running.wait_at_rest()
        assert running.log().count(f"the {victim} ended") == 1
