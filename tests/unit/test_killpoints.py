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


OBEY = """
import sys
from kvmanager.killpoints import reach
for line in sys.stdin:
    reach(line.strip())
    print("passed", flush=True)
"""


def obeying(order):
    return subprocess.Popen(
        [sys.executable, "-c", OBEY],
        env={"PYTHONPATH": str(ROOT), killpoints.VARIABLE: order.value},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def passes(process, name):
    """Whether it lives on behind the point."""
    process.stdin.write(f"{name}\n")
    process.stdin.flush()
    return process.stdout.readline() == "passed\n"


def test_an_order_in_a_file_comes_to_processes_that_run_and_is_carried_out_once(tmp_path):
    order = killpoints.KillOrder(tmp_path / "order")
    assert order.over
    with obeying(order) as one, obeying(order) as other:
        assert passes(one, "keeper.forget")
        order.give("keeper.forget", 2)
        assert passes(one, "keeper.forget")
        assert passes(other, "keeper.forget"), "each process counts its own passages"
        assert passes(one, "keeper.deposit")
        assert not order.over
        assert not passes(one, "keeper.forget")
        assert one.wait() == -signal.SIGKILL
        assert order.over
        assert all(passes(other, "keeper.forget") for _ in range(3)), "one death for one order"
        order.give("mover.pull.ended", 1)
        order.withdraw()
        assert passes(other, "mover.pull.ended")
        order.give("mover.pull.ended", 1)
        assert not passes(other, "mover.pull.ended")
    order.close()


def test_a_bad_order_is_refused_where_it_is_given(tmp_path):
    order = killpoints.KillOrder(tmp_path / "order")
    with pytest.raises(ConfigError, match="no kill point is called"):
        order.give("keeper.sing", 1)
    assert order.over
    done = run(f"@{tmp_path / 'none'}")
    assert "ConfigError: KVMANAGER_KILL_AT: no order in" in done.stderr


def test_an_order_by_name_is_for_a_first_child_only():
    by_name, by_file = {"A": "b", killpoints.VARIABLE: "keeper.forget:1"}, {killpoints.VARIABLE: "@/order"}
    assert killpoints.of_child(by_name, first=True) == by_name
    assert killpoints.of_child(by_name, first=False) == {"A": "b"}
    assert killpoints.of_child(by_file, first=False) == by_file


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
def test_a_bad_variable_ends_the_program_with_78(value, complaint):
    with pytest.raises(ConfigError, match=complaint):
        killpoints.parse(value)
    done = run(value)
    assert done.returncode == 78
    assert done.stderr.startswith("error: KVMANAGER_KILL_AT: ")
    assert done.stderr.count("\n") == 1, "a plain message"


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
    return text in killpoints.POINTS


def test_every_point_is_passed_somewhere():
    assert set(killpoints.POINTS) == _placed()
