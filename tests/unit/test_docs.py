"""The documents say what is so: every command in them is one, every alert has a remedy, the wire's page is fresh."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
import typer.main
import yaml

from kvmanager.command import cli
from kvmanager.configuration.reload import RELOADABLE
from tests.apidoc import anchors, page

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
OPERATING = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")


def commands(text: str) -> Iterator[str]:
    """Every `kvmanager ...` in a code span or in an indented block, without comments; of `A, B`, both."""
    spans = re.findall(r"`(kvmanager [^`]+)`", re.sub(r"\s+", " ", text))
    blocks = re.findall(r"^ {4}(?:\S*/)?(kvmanager .*)$", text, flags=re.M)
    for line in [*spans, *(block.partition("#")[0].rstrip(" &") for block in blocks)]:
        first, *others = line.split(", ")
        yield from (first, *(f"kvmanager {other}" for other in others))


def rows(text: str, head: str) -> list[list[str]]:
    """Cells of the table whose first column is called so."""
    lines = text[text.index(f"| {head} |") :].splitlines()
    table = lines[2 : next((n for n, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def check(line: str) -> None:
    """Raises click.UsageError unless the line's verb, arguments and options exist."""
    words = shlex.split(line)[1:]
    command: click.Command = typer.main.get_command(cli.app)
    name = "kvmanager"
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in command.commands:
            raise click.UsageError(f"no command {name!r}")
        command = command.commands[name]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    options = [word for word in words if word.startswith("-")]
    if unknown := set(options) - known - {"--help"}:
        raise click.UsageError(f"{name} has no {unknown}")
    if hasattr(command, "commands"):
        return
    needed = [p for p in command.params if p.param_type_name == "argument" and p.required]
    flags = {o for p in command.params if getattr(p, "is_flag", False) for o in (*p.opts, *p.secondary_opts)}
    values = sum(word not in flags for word in options)
    given = len(words) - len(options) - values
    most = len([p for p in command.params if p.param_type_name == "argument"])
    if given > most or (given and given < len(needed)):
        raise click.UsageError(f"{name} takes {len(needed)} to {most} arguments, not {given}")


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda path: path.name)
def test_every_command_in_a_document_is_one(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    wrong = []
    for line in commands(text):
        try:
            check(line)
        except click.UsageError as error:
            wrong.append(f"{line}: {error}")
    assert wrong == []


@pytest.mark.parametrize(
    "line", ["kvmanager defrag", "kvmanager evict GROUP --all", "kvmanager pin GROUP", "kvmanager status NODE"]
)
def test_a_command_that_is_none_is_found(line: str) -> None:
    with pytest.raises(click.UsageError):
        check(line)


def test_the_failure_table_has_a_command_in_each_line_and_a_line_for_each_alert() -> None:
    table = rows(OPERATING, "symptom")
    assert all(len(row) == 3 for row in table), [row for row in table if len(row) != 3]
    for symptom, look, remedy in table:
        spans = re.findall(r"`([^`]+)`", look)
        assert any(span.startswith(("kvmanager ", "systemctl ")) for span in spans), symptom
        assert remedy, symptom
    rules = yaml.safe_load(files("kvmanager").joinpath("alerts.yaml").read_text(encoding="utf-8"))
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    named = [alert for symptom, _, _ in table for alert in re.findall(r"\bKvmanager\w+", symptom)]
    assert sorted(named) == sorted(alerts)


def test_the_table_of_reloadable_keys_is_the_programs() -> None:
    said = {cells[0].strip("`"): set(re.findall(r"`(\w+)`", cells[1])) for cells in rows(OPERATING, "table")}
    assert said == {table: set(keys) for table, keys in RELOADABLE.items()}


def test_exit_codes_are_the_ones_of_the_help() -> None:
    said = {int(cells[0]) for cells in rows(OPERATING, "code")}
    assert said == {int(code) for code in re.findall(r"\b(\d+) ", str(cli.app.info.help).partition("Exit codes: ")[2])}


def test_the_page_of_the_wire_is_fresh() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert text == page(), "docs/api.md is stale: run `make docs`"
    links = set(re.findall(r"\]\(#([\w-]+)\)", text))
    assert links <= set(anchors(text)), links - set(anchors(text))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("top.svg", ("ledger adds up", "prefill/hbm", "prompt_tokens", "attached")),
        ("map.svg", ("pool prefill/hbm", "a character is", "free", "ready, kv")),
    ],
)
def test_pictures_show_the_screens(name: str, parts: tuple[str, ...]) -> None:
    """Drawn by `python -m tests.pictures`; lines of at most 80 characters, none cut off."""
    drawn = ElementTree.parse(ROOT / "docs" / name).getroot()
    lines: dict[str, str] = {}
    for text in drawn.iter("{http://www.w3.org/2000/svg}text"):
        where = text.get("clip-path", "")
        lines[where] = lines.get(where, "") + "".join(text.itertext()).replace("\xa0", " ")
    shown = "\n".join(lines.values())
    assert all(part in shown for part in parts), shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert f"docs/{name}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_between_documents_lead_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
            assert target.startswith("http") or (path.parent / target).exists(), (path.name, target)
