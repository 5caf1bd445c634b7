"""A pytest plug-in: a test that takes `pressure_report` runs once for every suite.

    def test_under_pressure(pressure_report):
        assert pressure_report.outcome == "passed", pressure_report.why

A suite whose needs the node lacks is skipped with the reason. `pressure` is a `Press` for anything else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvmanager.pressure.press import Press, SuiteReport

OWN = "kvmanager.pressure.driver:OwnDriver"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the plug-in."""
    group = parser.getgroup("kvmanager pressure")
    group.addoption("--pressure-runtime-dir", type=Path, default=None, help="a running node; default: nodes of its own")
    group.addoption("--pressure-peer-dir", type=Path, default=None, help="a second node for hand-offs")
    group.addoption("--pressure-driver", default=OWN, help="an engine's own client, module:class")
    group.addoption("--pressure-seed", type=int, default=None, help="of the schedules; default: a new one, printed")
    group.addoption("--pressure-suites", default="", help="only these, with commas between them")
    group.addoption("--pressure-save-to", type=Path, default=Path(), help="where a failing schedule is saved")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a suite."""
    if "pressure_report" in metafunc.fixturenames:
        from kvmanager.pressure.suites import SUITES

        chosen = metafunc.config.getoption("--pressure-suites")
        names = chosen.split(",") if chosen else list(SUITES)
        metafunc.parametrize("pressure_report", names, indirect=True)


@pytest.fixture(scope="session")
def pressure(pytestconfig: pytest.Config) -> Iterator[Press]:
    """Nodes to press on, kept from one suite to the next."""
    from kvmanager.pressure.press import Options, Press

    option = pytestconfig.getoption
    options = Options(
        option("--pressure-runtime-dir"), option("--pressure-peer-dir"), option("--pressure-driver"),
        save_to=option("--pressure-save-to"),
    )  # fmt: skip
    with Press(options) as press:
        yield press


@pytest.fixture(scope="session")
def pressure_seed(pytestconfig: pytest.Config) -> int:
    """The seed of this session, printed with every report."""
    seed = pytestconfig.getoption("--pressure-seed")
    return random.SystemRandom().randrange(1 << 30) if seed is None else int(seed)


@pytest.fixture
def pressure_report(request: pytest.FixtureRequest, pressure: Press, pressure_seed: int) -> SuiteReport:
    """What came of one suite."""
    print(f"kvmanager pressure {request.param} --seed {pressure_seed}")
    report = pressure.press(request.param, pressure_seed)
    if report.outcome == "skipped":
        pytest.skip(f"{report.suite}: {report.why}")
    return report
