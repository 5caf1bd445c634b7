"""The suites on nodes of their own: all hold here. A few of them by default, all of them in `make test-long`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmanager.pressure.press import Options, Press, SuiteReport
from kvmanager.pressure.suites import SUITES

ROOT = Path(__file__).resolve().parents[2]
OURS = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
QUICK = ("fork-storm", "killed-clients")


@pytest.fixture(scope="module")
def press(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Press]:
    with Press(Options(save_to=tmp_path_factory.mktemp("failed"))) as press:
        yield press


def check(report: SuiteReport) -> None:
    told = Path(report.saved).read_text(encoding="utf-8") if report.saved else ""
    assert report.outcome == "passed", f"{report}\n{told}"
    assert report.tally.granted > 5
    assert report.tally.hits > 0
    assert report.tally.rows_checked > 500


@pytest.mark.parametrize("name", QUICK)
def test_a_suite(press: Press, name: str) -> None:
    check(press.press(name, seed=11))


@pytest.mark.long
@pytest.mark.parametrize("name", SUITES)
def test_every_suite(press: Press, name: str) -> None:
    report = press.press(name, seed=7)
    check(report)
    if name == "hung-peer":
        told = {"TRANSFER_TIMEOUT", "TRANSFER_FAILED", "PEER_UNREACHABLE", "UNKNOWN_LEASE", "LEASE_EXPIRED"}
        assert told & set(report.tally.by_reason), report.tally
    if name in ("fill", "draft-storm", "tenant-ceiling"):
        assert report.tally.refused > 0


PLUGGED = """
def test_under_pressure(pressure_report):
    assert pressure_report.outcome == "passed", pressure_report.why
"""


def test_the_plug_in_runs_suites(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(PLUGGED)
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider"]
    command += ["-p", "kvmanager.pressure.plugin", "--pressure-seed", "3", "--pressure-suites", "no-host", "."]
    done = subprocess.run(command, cwd=tmp_path, env=OURS, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_command_says_what_it_found_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvmanager.command.cli", "pressure", "no-host", "--seed", "4", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=OURS, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["failed"] == 0
    assert [(suite["suite"], suite["outcome"]) for suite in report["suites"]] == [("no-host", "passed")]
    assert list(tmp_path.iterdir()) == []
    command = [*command[:4], "nothing"]
    wrong = subprocess.run(command, cwd=tmp_path, env=OURS, capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert "no suite" in wrong.stderr
