"""`kvmanager`: run a node, look at a node, run the demo.

Exit codes: 0 ok, 1 failed or refused, 2 wrong usage, 3 the node can't be reached, 4 fsck found something broken, 78 the
configuration can't be used.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from kvmanager import __version__
from kvmanager.clients.admin import AdminClient
from kvmanager.command import operatecli, screens
from kvmanager.command.clibase import AsJson, ConfigFile, RuntimeDir, find_node, one_line_errors, print_json, show
from kvmanager.command.mapscreen import map_screen
from kvmanager.configuration.hostfit import fit_here
from kvmanager.configuration.reading import read_config
from kvmanager.configuration.sizing import size_of
from kvmanager.errors import KVError, NotReady
from kvmanager.exitcodes import EXIT_CONFIG, EXIT_FAILED
from kvmanager.keeper import lockfile, refusal
from kvmanager.planning.cli import plan
from kvmanager.pressure import cli as pressurecli
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import KEEPER_LOCK
from kvmanager.simulation.cli import simulate
from kvmanager.units import format_bytes

UPGRADE_S: Final = 60.0

app = typer.Typer(
    help="The KV-cache memory of this machine: run a node, look at it, run the demo.\n\n"
    "Exit codes: 0 ok, 1 failed or refused, 2 wrong usage, 3 the node can't be reached, 4 fsck found something broken, "
    "78 the configuration can't be used.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at a configuration without running it.", no_args_is_help=True)
app.add_typer(config_app, name="config")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvmanager {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version  # its callback has ended the program


@app.command()
def serve(
    config: Annotated[Path, typer.Option("--config", help="The node's TOML file.")],
    cold: Annotated[bool, typer.Option("--cold", help="Give up memory that systemd kept of an earlier life.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a node in the foreground until SIGTERM or Ctrl-C."""
    with one_line_errors():
        node = read_config(config)
    planned = node.planned_bytes()
    start = {"node": node.node.name, "pid": os.getpid(), "runtime_dir": str(node.node.runtime_dir)}
    if as_json:
        print(json.dumps({**start, "planned_bytes": planned}), flush=True)
    else:
        print(f"node {node.node.name} in {node.node.runtime_dir}: {format_bytes(planned)}", flush=True)
    # The keeper must not carry what this program has loaded, so it takes this process's place.
    command = [sys.executable, "-m", "kvmanager.keeper", "--config", str(config)]
    where = ["--runtime-dir", str(node.node.runtime_dir), "--device", node.node.device]
    where += ["--drain-ms", str(node.node.drain_ms), *(["--spare"] if node.node.spare else [])]
    where += ["--cold"] if cold else []
    where += [f"--mover=--ucx-devices={node.mover.data_interface}"]
    os.execv(sys.executable, [*command, *where])


@config_app.command("check")
def config_check(
    file: Annotated[Path, typer.Argument(help="The node's TOML file.")],
    tokens: Annotated[int, typer.Option(min=1, help="Length of a request: does it fit, and what does it take?")] = (
        1_048_576
    ),
    here: Annotated[bool, typer.Option("--here", help="Fail with 78 where this machine does not hold it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a file, and show what it would allocate on this machine and which requests it can hold."""
    with one_line_errors():
        config = read_config(file)
        sizing, fit = size_of(config, tokens), fit_here(config)
    if as_json:
        print_json({**sizing.as_dict(), "machine": fit.as_dict()})
    else:
        console = Console(highlight=False)
        console.print(screens.sizing_screen(sizing))
        console.print(screens.machine_screen(fit))
    if here and fit.problems:
        raise typer.Exit(EXIT_CONFIG)


@app.command()
def upgrade(runtime_dir: RuntimeDir = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Replace the running daemon by the installed version; engines pause, attach again and go on."""
    began = time.monotonic()
    with one_line_errors():
        where = find_node(runtime_dir, config)
        keeper = lockfile.holder(where / KEEPER_LOCK)
        if keeper and refusal.read(where) is not None:  # no daemon is there to ask: the keeper tries what is installed
            before = 0
            os.kill(keeper, signal.SIGUSR2)
        else:
            with AdminClient(where) as client:
                before = client.upgrade().boot_id
        reply = _successor(where, before)
    report = {"boot_id": reply.boot_id, "version": reply.version, "seconds": round(time.monotonic() - began, 3)}
    if as_json:
        print_json(report)
    else:
        print(f"version {reply.version} serves as boot {reply.boot_id}, {report['seconds']} s")


def _successor(where: Path, boot_id: int) -> Any:
    """The status of the daemon that comes after `boot_id`. Raises NotReady when none serves in time."""
    deadline = time.monotonic() + UPGRADE_S
    while True:
        with suppress(KVError), AdminClient(where) as client:
            reply = client.status()
            if reply.boot_id > boot_id and reply.state == "serving":
                return reply
        if time.monotonic() > deadline:
            raise NotReady(f"no new daemon serves in {where} after {UPGRADE_S:g} s; see the node's log")
        time.sleep(0.05)


@app.command()
def status(runtime_dir: RuntimeDir = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Engines, movers, counters, and whether the ledger adds up."""
    show(runtime_dir, config, as_json, AdminClient.status, screens.status_screen)


@app.command()
def pools(runtime_dir: RuntimeDir = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Bytes of each pool by state."""
    show(runtime_dir, config, as_json, AdminClient.pools, screens.pools_screen)


@app.command("map")
def map_(
    pool: Annotated[str, typer.Argument(help="A pool, as `kvmanager pools` names it.")],
    first: Annotated[int, typer.Option(min=0, help="Draw from this page on.")] = 0,
    count: Annotated[int, typer.Option(min=0, help="Pages to draw; 0: all that follow.")] = 0,
    runtime_dir: RuntimeDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """A pool page by page; of a large one many pages a character. With --json one entry a page of all."""

    def draw(reply: pb.MapReply) -> Text:
        return map_screen(reply, first, count)

    def plain(reply: Any) -> dict[str, Any]:
        return {"pool": reply.pool, "class_names": list(reply.class_names), "units": screens.map_units(reply)}

    show(runtime_dir, config, as_json, lambda client: client.map(pool), draw, plain)


@app.command()
def requests(runtime_dir: RuntimeDir = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """What the engines' requests hold."""
    show(runtime_dir, config, as_json, AdminClient.requests, screens.requests_screen)


@app.command()
def prefixes(
    runtime_dir: RuntimeDir = None,
    config: ConfigFile = None,
    limit: Annotated[int, typer.Option(min=1, help="Most prefixes to list.")] = 100,
    as_json: AsJson = False,
) -> None:
    """What the prefix cache holds, newest first."""
    show(runtime_dir, config, as_json, lambda client: client.prefixes(limit), screens.prefixes_screen)


@app.command()
def leases(runtime_dir: RuntimeDir = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Tickets that are out."""
    show(runtime_dir, config, as_json, AdminClient.leases, screens.leases_screen)


@app.command()
def reset(
    group: Annotated[str, typer.Argument(help="A memory group of the node's configuration.")],
    runtime_dir: RuntimeDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Forget all that a group has cached, in HBM and on the host; running requests keep what they hold."""
    show(runtime_dir, config, as_json, lambda client: client.reset(group), screens.reset_screen)


@app.command()
def demo(
    as_json: AsJson = False,
    inject_fault: Annotated[bool, typer.Option(help="Corrupt one byte on purpose; the demo must then fail.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the model's weights.")] = 1,
    runtime_dir: Annotated[
        Path | None, typer.Option(help="Put the nodes' configurations, logs and sockets here, and keep them.")
    ] = None,
) -> None:
    """Replay real agent sessions through a prefill and a decode node on this machine, and check every token."""
    from kvmanager.demo.run import DemoOptions, run_demo  # loads torch

    with one_line_errors():
        report = run_demo(DemoOptions(seed=seed, inject_fault=inject_fault, runtime_dir=runtime_dir))
    if as_json:
        print_json(report.to_json())
    else:
        Console(highlight=False).print(report.render())
    if not report.passed:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def replay(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="JSON lines of sessions, Mooncake's JSON lines or Azure's CSV, also .xz; generate:COUNT, "
            "bundled:mooncake or bundled:azure-code; default: the bundled sessions."
        ),
    ] = None,
    node: Annotated[Path | None, typer.Option(help="Replay on the node that runs in this directory.")] = None,
    lanes: Annotated[int, typer.Option(min=1, help="Sessions that run at one time.")] = 64,
    pool_tokens: Annotated[int, typer.Option(min=1, help="What the cache holds, in tokens.")] = 2_000_000,
    requests: Annotated[int, typer.Option(min=1, help="Requests to replay; the first quarter is not counted.")] = 8_000,
    seed: Annotated[int, typer.Option(help="Of the order of sessions and their starts.")] = 42,
    policy: Annotated[str, typer.Option(help="lru, return-rate or return-cost.")] = "return-rate",
    host_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a host pool behind it; 0: one tier.")] = 0,
    inclusion: Annotated[
        str, typer.Option(help="inclusive, exclusive or as-needed: whether what was loaded stays on the host.")
    ] = "as-needed",
    ranks: Annotated[int, typer.Option(min=1, help="DCP ranks: a span is 64 tokens times this.")] = 8,
    min_peak: Annotated[int, typer.Option(min=0, help="Only sessions with a prompt of so many tokens.")] = 0,
    hints: Annotated[bool, typer.Option(help="Whether requests tell their session and why its turns stop.")] = True,
    rules: Annotated[str, typer.Option(help="tables or agentx: where sessions start, warm-up, idle time.")] = "tables",
    hold: Annotated[
        float, typer.Option(min=0, max=1, help="Share of its service time that a request holds its pages; others wait.")
    ] = 0.0,
    group: Annotated[str, typer.Option(help="Of the node; default: the first that can be driven.")] = "",
    speed: Annotated[
        float, typer.Option(min=0, help="On a node: times faster than recorded; 0: as fast as it goes.")
    ] = 0.0,
    write_bytes: Annotated[bool, typer.Option("--bytes", help="On a node: write rows, and compare those found.")] = (
        False
    ),
    as_json: AsJson = False,
) -> None:
    """Replay recorded agent sessions on the core in virtual time, or on a node: what pools and policies are worth."""
    from kvmanager.replay import cli as replays

    asked = replays.Asked(file, lanes, requests, seed, min_peak, hints, rules, hold)
    report: replays.Report
    with one_line_errors():
        if node is not None:
            report = replays.replay_file_live(asked, replays.LiveTarget(node, group, speed, write_bytes))
        elif host_tokens or hold:
            report = replays.replay_file_in_tiers(
                asked, pool_tokens=pool_tokens, host_tokens=host_tokens, inclusion=inclusion, policy=policy, ranks=ranks
            )
        else:
            report = replays.replay_file(asked, pool_tokens=pool_tokens, policy=policy, ranks=ranks)
    if as_json:
        print_json(report.as_dict())
    else:
        Console(highlight=False).print(replays.render(report))


operatecli.add_to(app, config_app)
app.command()(plan)
app.command()(simulate)
pressurecli.add_to(app)


def main() -> None:
    """Entry point of the `kvmanager` command."""
    app()


if __name__ == "__main__":
    main()
