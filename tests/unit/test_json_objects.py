"""docs/json.md against what commands print: each key with its type is there, and no other is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvmanager.command.cli import app
from kvmanager.command.screens import map_units
from kvmanager.command.top import Sample, Top
from kvmanager.demo.report import LEAST_COUNT, MECHANISMS, TurnRecord, make_report
from kvmanager.pressure.press import SuiteReport
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import pack_u32

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
SEEN = " (if any)"
Types = dict[str, set[str]]


def documented(title: str) -> Types:
    """Path -> types; "absent" is one of them where it need not be there."""
    block = PAGE.split(f"\n## {title}\n")[1].split("```text\n")[1].split("```")[0]
    found: Types = {}
    for line in block.splitlines():
        path, _, types = line.partition(": ")
        found[path] = set(types.removesuffix(SEEN).split(" or "))
        found[path] |= {"absent"} if types.endswith(SEEN) else set()
    return found


def printed(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """(path, type) of all that is in an object."""
    match value:
        case dict():
            for name, inner in value.items():
                yield from printed(inner, f"{where}.{name}".removeprefix("."))
        case list():
            for inner in value:
                yield from printed(inner, where + "[]")
        case _:
            kinds = {bool: "bool", int: "number", float: "number", str: "text", type(None): "null"}
            yield where, kinds[type(value)]


def differs(title: str, value: Any) -> list[str]:
    """What of the object is not documented, and what is documented and not there."""
    wanted = documented(title)
    patterns = {path: re.compile(re.escape(path).replace(r"\*", r"[^.]+")) for path in wanted}
    seen = set()
    wrong = []
    for path, kind in json_of(value):
        names = [name for name, pattern in patterns.items() if pattern.fullmatch(path)]
        seen.update(names)
        if not any(kind in wanted[name] for name in names):
            wrong.append(f"{path}: {kind} is not documented")
    missing = [name for name, types in wanted.items() if name not in seen and "absent" not in types]
    return sorted({*wrong, *(f"{name} is not there" for name in missing)})


def json_of(value: Any) -> Iterator[tuple[str, str]]:
    return printed(json.loads(json.dumps(value)))


@pytest.mark.parametrize(
    ("title", "command"),
    [
        ("plan", "plan"),
        ("config check", f"config check {ROOT}/kvmanager/deployments/prefill-pcp8-dcp8.toml"),
        ("replay", "replay --requests 40 --lanes 4"),
        ("replay with tiers", "replay --requests 40 --lanes 4 --host-tokens 100000 --hold 0.5"),
        ("simulate", "simulate --seconds 5 --concurrency 2 --alone"),
    ],
)
def test_what_a_command_prints_is_what_is_documented(title: str, command: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "--json"])
    assert done.exit_code == 0, done.output
    assert differs(title, json.loads(done.stdout)) == []


def test_what_a_demo_found_is_what_is_documented() -> None:
    turn = TurnRecord(1, "s", 100, 40, (1, 2), (1, 2), drafts_proposed=6, drafts_accepted=3)
    report = make_report(
        [turn], planned_turns=1, counters=dict.fromkeys(MECHANISMS, LEAST_COUNT), ledger_failures=[], other_failures=[],
        seconds=1.0,
    )  # fmt: skip
    assert differs("demo", report.to_json()) == []


def test_what_suites_found_is_what_is_documented() -> None:
    report = SuiteReport("churn", 7, "passed").as_dict()
    assert differs("pressure", {"seed": 7, "failed": 0, "suites": [report]}) == []


def test_a_look_of_top_and_a_map_are_what_is_documented() -> None:
    status = pb.StatusReply(node="n", state="serving", counters={"request": 1, "step": 2})
    pools = pb.PoolsReply(pools=[pb.PoolStatus(pool="p/hbm", capacity_bytes=4)])
    top = Top(Sample(0.0, status, pools, pb.TransfersReply()))
    top.add(Sample(1.0, status, pools, pb.TransfersReply()))
    assert differs("top", top.plain()) == []
    reply = pb.MapReply(pool="p", states=b"\x00\x03", classes=b"\xff\x00", class_names=["kv"], pins=pack_u32([0, 1]))
    shown = {"pool": reply.pool, "class_names": list(reply.class_names), "units": map_units(reply)}
    assert differs("map", shown) == []


def test_a_key_that_is_new_lost_or_of_another_type_is_found() -> None:
    good = {"boot_id": 1, "version": "9", "seconds": 0.5}
    assert differs("upgrade", good) == []
    assert differs("upgrade", {**good, "more": 1}) == ["more: number is not documented"]
    assert differs("upgrade", {**good, "version": 9}) == ["version: number is not documented"]
    del good["seconds"]
    assert differs("upgrade", good) == ["seconds is not there"]


def test_every_verb_with_an_object_of_its_own_is_on_the_page() -> None:
    titles = {title for title in re.findall(r"^## (.+)$", PAGE, flags=re.M) if " with " not in title}
    others = {"serve", "map", "top", "upgrade", "demo", "replay", "plan", "simulate", "pressure", "config check"}
    assert titles == others
    for title in titles:
        assert documented(title)
