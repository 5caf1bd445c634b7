"""`kvmanager pressure`: suites, replays of saved schedules, and a verdict."""

from __future__ import annotations

import random
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvmanager.command.clibase import AsJson, one_line_errors, print_json
from kvmanager.exitcodes import EXIT_FAILED

if TYPE_CHECKING:
    from kvmanager.pressure.press import SuiteReport

SEEDS = 1 << 30


def add_to(app: typer.Typer) -> None:
    """Makes it part of `kvmanager`."""
    app.command()(pressure)


def pressure(
    suites: Annotated[list[str] | None, typer.Argument(help="Names; see --list.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every suite.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Only tell which suites there are.")] = False,
    runtime_dir: Annotated[
        Path | None, typer.Option("--runtime-dir", "--socket", help="A running node; without it, nodes of its own.")
    ] = None,
    peer_dir: Annotated[Path | None, typer.Option(help="A second node, which takes hand-offs from the first.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the schedules; default: a new one, printed.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Do again what this file says, instead of suites.")] = None,
    save_to: Annotated[Path, typer.Option(help="Where a failing schedule is saved.")] = Path(),
    driver: Annotated[
        str, typer.Option(help="An engine's own client, module:class (docs/pressure.md).")
    ] = "kvmanager.pressure.driver:OwnDriver",
    driver_command: Annotated[str, typer.Option(help="The same as a program that reads JSON lines.")] = "",
    as_json: AsJson = False,
) -> None:
    """Drive a node to the edge through the public API, and check from outside what must hold."""
    from kvmanager.pressure.press import Options, Press  # loads gRPC clients
    from kvmanager.pressure.schedule import load
    from kvmanager.pressure.suites import SUITES

    if list_:
        told = {name: suite.about for name, suite in SUITES.items()}
        if as_json:
            print_json(told)
        else:
            Console(highlight=False).print("\n".join(f"{name:<24} {about}" for name, about in told.items()))
        return
    names = list(SUITES) if all_ else list(suites or [])
    if bool(names) == (replay is not None):
        raise typer.BadParameter("say what to run: names of suites, --all, or --replay FILE")
    chosen = random.SystemRandom().randrange(SEEDS) if seed is None else seed
    console = Console(stderr=True, highlight=False)
    options = Options(runtime_dir, peer_dir, driver, tuple(shlex.split(driver_command)), save_to)
    reports: list[SuiteReport] = []
    with one_line_errors(), Press(options, console.print) as press:
        if replay is None:
            console.print(f"seed {chosen}")
            for name in names:
                reports.append(press.press(name, chosen))
                console.print(_line(reports[-1]))
        else:
            reports.append(press.replay(load(replay)))
            console.print(_line(reports[-1]))
    failed = [report for report in reports if report.outcome == "failed"]
    if as_json:
        print_json({"seed": chosen, "failed": len(failed), "suites": [report.as_dict() for report in reports]})
    else:
        Console(highlight=False).print(_table(reports))
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _line(report: SuiteReport) -> str:
    told = vars(report)
    line = f"{told['outcome'].upper():<8}{told['suite']} seed {told['seed']}, {told['seconds']} s"
    if told["why"]:
        line += f": {told['invariant']}{': ' if told['invariant'] else ''}{told['why']}"
    return line + (f"; {told['smallest']} actions are enough: {told['saved']}" if told["saved"] else "")


def _table(reports: list[SuiteReport]) -> Table:
    table = Table(title="under pressure", title_justify="left")
    for head in ("suite", "outcome", "actions", "granted", "hits", "refused", "rows compared"):
        table.add_column(head, justify="left" if head in ("suite", "outcome") else "right")
    for report in reports:
        tally = report.tally
        cells = (report.actions, tally.granted, tally.hits, tally.refused, tally.rows_checked)
        table.add_row(report.suite, report.outcome, *(f"{cell:,}" for cell in cells))
    return table
