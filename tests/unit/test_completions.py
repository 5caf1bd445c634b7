"""A completion can't be dropped: every value of `poll` is used, every outcome has a meaning, all that was sent ends."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmanager.core.events import CopyOutcome
from kvmanager.daemon.movers import _OUTCOMES
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.executor import Outcome

ROOT = Path(__file__).parents[2]
FOLDERS = ("kvmanager", "transport", "clients", "allocators")
RESULTS = ("poll", "abandon")
"""Methods without arguments whose result is what ended: to throw it away is to lose pages."""


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(part.is_symlink() for part in path.parents):
                yield path


def dropped(tree: ast.AST) -> list[int]:
    """Lines that call for completions and do nothing with them: a call as a statement, or named and never read."""
    lines = [
        statement.lineno
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Expr) and any(_is_result(node) for node in [statement.value])
    ]
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        for statement in ast.walk(function):
            if isinstance(statement, ast.Assign) and _is_result(statement.value):
                names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
                lines += [statement.lineno for name in names if name not in read]
    return lines


def _is_result(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in RESULTS and not node.args and not node.keywords


def test_nobody_throws_completions_away() -> None:
    found = {}
    seen = 0
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        seen += sum(_is_result(node) for node in ast.walk(tree))
        if lines := dropped(tree):
            found[str(path.relative_to(ROOT))] = lines
    assert found == {}
    assert seen >= 8, "the calls that this looks for are there"


@pytest.mark.parametrize(
    "text",
    ["def f(e):\n    e.poll()\n", "def f(e):\n    ended = e.poll()\n    return 1\n", "executor.abandon()\n"],
)
def test_the_rule_finds_what_it_is_for(text: str) -> None:
    assert dropped(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    ["def f(e):\n    return e.poll()\n", "def f(e):\n    for c in e.poll():\n        c.x()\n", "e.abandon(ticket)\n"],
)
def test_and_nothing_else(text: str) -> None:
    assert not dropped(ast.parse(text))


def test_every_outcome_is_known_on_the_wire_and_in_the_core() -> None:
    names = {outcome.value for outcome in Outcome}
    wire = {name for name in pb.Completion.Outcome.keys() if name != "OUTCOME_UNSPECIFIED"}  # noqa: SIM118
    assert names == wire == {outcome.name for outcome in CopyOutcome}
    assert {pb.Completion.Outcome.Name(number): outcome.name for number, outcome in _OUTCOMES.items()} == {
        name: name for name in names
    }
