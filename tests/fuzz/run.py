"""A fuzzing run: a real node, one seed, blows for a time; then the node must be as good as new."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.mover import under_fire
from tests.integration import nodes_support as nodes

BATCH = 400
"""Most blows of one process, which holds places of the attach socket until it ends."""
MOVER_BATCH = 200
"""Blows on a mover after each of them."""
HANGS_S = 180.0
"""A batch that is not over so long after its time has met a call that never ends."""
FDS_SPARE = 16
"""A daemon may have so many more descriptors at the end than at the beginning (gRPC's own)."""
LOG_OF_TROUBLE = ("Traceback", "InvariantViolation", "Exception calling application", "core stops")


@dataclass
class Outcome:
    """What was done, by kind and answer."""

    seed: int
    blows: int = 0
    seconds: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)


def fuzz(directory: Path, seed: int, seconds: float, blows: int = 0) -> Outcome:
    """Runs for `seconds`, or, if given, `blows`. Raises AssertionError for what the daemon must not do."""
    outcome = Outcome(seed)
    with (
        nodes.node(directory, "fuzz", nodes.prefill_toml, pages=64) as running,
        under_fire(directory / "mover", seed) as fire,
    ):
        before = nodes.prefill_engine(running.runtime_dir, "before")
        nodes.run_request(before, 1, nodes.tokens_of(1, 2 * nodes.SPAN), 1)
        before.close()
        running.wait_at_rest()
        daemon = running.pid_of("daemon")
        started = _descriptors(daemon)
        began = time.monotonic()
        left = seconds
        while left > 0 if not blows else outcome.blows < blows:
            _batch(running, outcome, min(BATCH, blows - outcome.blows) if blows else BATCH, left if not blows else 1e6)
            outcome.answers.update(fire.volley(min(MOVER_BATCH, blows or MOVER_BATCH)))
            _check(running, daemon)
            left = seconds - (time.monotonic() - began)
        outcome.seconds = time.monotonic() - began
        running.wait_at_rest()
        _check_well(running)
        nodes.wait_for(
            lambda: _descriptors(daemon) <= started + FDS_SPARE,
            lambda: f"{_descriptors(daemon)} descriptors, {started} at first",
        )
        _check(running, daemon)
    outcome.blows += fire.blows
    return outcome


def _batch(running: nodes.Node, outcome: Outcome, count: int, seconds: float) -> None:
    command = [sys.executable, "-m", "tests.fuzz.batch", str(running.runtime_dir), str(outcome.seed)]
    done = subprocess.run(
        [*command, str(outcome.blows), str(count), str(seconds)],
        capture_output=True,
        text=True,
        timeout=HANGS_S + min(seconds, 600.0),
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr}\n{running.process.log_tail()}"
    answers: dict[str, int] = json.loads(done.stdout)
    outcome.answers.update(answers)
    outcome.blows += sum(answers.values())


def _check(running: nodes.Node, daemon: int) -> None:
    """The same daemon lives, answers, its ledger holds, and nothing surprised it."""
    log = running.log()
    trouble = [line for line in log.splitlines() if any(word in line for word in LOG_OF_TROUBLE)]
    assert not trouble, f"{trouble[:5]}\n{running.process.log_tail()}"
    assert running.pid_of("daemon") == daemon, "the daemon died"
    status = running.admin.status()
    assert status.ledger_ok
    assert status.state == "serving", status.state


def _check_well(running: nodes.Node) -> None:
    """Nothing is broken inside, and requests are served."""
    report = running.admin.fsck(checksum_spans=64)
    assert [check.broken for check in report.checks if check.broken] == []
    assert report.bad_copies == 0
    fresh = nodes.prefill_engine(running.runtime_dir, "after")
    nodes.run_request(fresh, 1, nodes.tokens_of(999, 2 * nodes.SPAN), 999)
    assert nodes.run_request(fresh, 2, nodes.tokens_of(999, 2 * nodes.SPAN), 999) > 0
    fresh.close()
    running.wait_at_rest()


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
