"""Lets the tests import their support modules, and keeps the result of a run on a GPU when asked to.

With GPU_TESTS_JSON set to a file, the run writes there which machine it was on, and what passed in which file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

for folder in ("gpu", "integration"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))


class Results:
    """Outcomes by test file."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._began = time.monotonic()
        self._outcomes: dict[str, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test passes in its call; it may fail or be skipped in any phase."""
        if report.when == "call" or not report.passed:
            self._outcomes.setdefault(report.location[0], Counter())[report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        """Writes the file. The machine is read last: it needs a CUDA context, which no test should inherit."""
        from tests.bench.gpu_figures import machine

        result = {
            "machine": machine(),
            "seconds": round(time.monotonic() - self._began, 1),
            "files": {name: dict(outcomes) for name, outcomes in sorted(self._outcomes.items())},
        }
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps results when a file is named for them."""
    if target := os.environ.get("GPU_TESTS_JSON"):
        config.pluginmanager.register(Results(Path(target)))
