"""Kill points: the variable, the table, and that every point is passed somewhere."""

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvmanager import killpoints
from kvmanager.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kvmanager", "transport", "clients", "allocators")
PASS_TWICE = """
from kvmanager.killpoints import reach
for name in {names}:
    print(name, flush=True)
    reach(name)
"""


def run(armed, *names):
    environment = {} if armed is None else {killpoints.VARIABLE: armed}
    return subprocess.run(
        [sys.executable, "-c", PASS_TWICE.format(names=names)],
        env={"PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_process_dies_at_the_nth_passage_of_its_point():
    passed = ("keeper.forget", "keeper.deposit", "keeper.forget", "keeper.forget")
    done = run("keeper.forget:2, mover.pull.ended:1", *passed)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["keeper.forget", "keeper.deposit", "keeper.forget"]


def test_nothing_happens_without_the_variable():
    done = run(None, "keeper.forget", "no point at all")
    assert done.returncode == 0
    assert killpoints.reach is killpoints._pass_by


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("", "no kill point is called ''"),
        ("keeper.sing:1", "no kill point is called 'keeper.sing'; there are keeper.start_child, "),
        ("keeper.forget", "not NAME:PASSAGE"),
        ("keeper.forget:0", "not NAME:PASSAGE"),
        ("keeper.forget:-1", "not NAME:PASSAGE"),
        ("keeper.forget:x", "not NAME:PASSAGE"),
        ("keeper.forget:1,keeper.forget:2", "named twice"),
    ],
)
def test_a_bad_variable_is_a_typed_error_at_the_start(value, complaint):
    with pytest.raises(ConfigError, match=complaint):
        killpoints.parse(value)
    done = run(value)
    assert done.returncode == 1
    assert "ConfigError: KVMANAGER_KILL_AT" in done.stderr


def test_an_armed_process_knows_its_points():
    assert "not in the table" in run("keeper.forget:9", "keeper.sing").stderr


def _placed():
    names = []
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if path.name == "killpoints.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _looks_like_a_point(node.value):
                names.append(node.value)
    return set(names)


def _looks_like_a_point(text):
    return text.split(".")[0] in {"keeper", "daemon", "mover", "engine", "worker"} and text in killpoints.POINTS


def test_every_point_is_passed_somewhere():
    assert set(killpoints.POINTS) == _placed()
