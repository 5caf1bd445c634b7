"""The operator's commands: stories, checks, and what changes a running node."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from kvmanager.clients.admin import AdminClient, to_plain
from kvmanager.command import operatescreens as screens
from kvmanager.command.clibase import (
    EXIT_BROKEN,
    AsJson,
    ConfigFile,
    RuntimeDir,
    admin_of,
    find_node,
    one_line_errors,
    print_json,
    show,
)
from kvmanager.command.top import Sample, Top
from kvmanager.configuration.reading import read_config
from kvmanager.errors import InvalidArgument
from kvmanager.observing import explain as stories
from kvmanager.protos import kvmanager_pb2 as pb

GroupName = Annotated[str, typer.Argument(help="A memory group of the node's configuration.")]


def add_to(app: typer.Typer, config_app: typer.Typer) -> None:
    """Makes these commands part of `kvmanager`."""
    commands = (transfers, explain, fsck, top, drain, undrain, evict, pin, unpin, pins, loglevel)
    for command in commands:
        app.command()(command)
    config_app.command("show")(config_show)


def transfers(runtime_dir: RuntimeDir = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Copies and pulls under way, the most urgent and oldest first."""
    show(runtime_dir, config, as_json, AdminClient.transfers, screens.transfers_screen)


_EXPLAINED = "ENGINE/REQUEST, or the engine's own name of the request; of a page POOL:PAGE or POOL:CLASS:PAGE."


def explain(
    kind: Annotated[str, typer.Argument(help="page, request, refusal or miss.")],
    named: Annotated[str, typer.Argument(metavar="ID", help=_EXPLAINED)],
    runtime_dir: RuntimeDir = None,
    config: ConfigFile = None,
    history: Annotated[Path | None, typer.Option(help="Read this history directory instead of asking a node.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell the story of a page, a request, a refusal or a miss: events, holders, cause."""
    if history is None:
        show(runtime_dir, config, as_json, lambda client: client.explain(kind, named), screens.story_screen)
        return
    with one_line_errors():
        story = stories.offline(history, kind, named)
    lines = [pb.StoryLine(at_ns=line.at_ns, text=line.text) for line in story.lines]
    reply = pb.ExplainReply(title=story.title, lines=lines)
    if as_json:
        print_json(to_plain(reply))
    else:
        Console(highlight=False).print(screens.story_screen(reply))


def fsck(
    checksums: Annotated[int, typer.Option(min=0, help="Read so many spans' host copies again and compare sums.")] = 0,
    runtime_dir: RuntimeDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Check ledger, index, spans, pins and leases on a copy of the state; the node goes on serving meanwhile."""
    broken = False

    def ask(client: AdminClient) -> pb.FsckReply:
        nonlocal broken
        reply = client.fsck(checksums)
        broken = bool(reply.bad_copies) or any(check.broken for check in reply.checks)
        return reply

    show(runtime_dir, config, as_json, ask, screens.fsck_screen)
    if broken:
        raise typer.Exit(EXIT_BROKEN)


def top(
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="Looks; 0: until Ctrl-C.")] = 0,
    runtime_dir: RuntimeDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Watch a node: pools, rates, engines and transfers. With --json one object a line."""
    with one_line_errors(), admin_of(find_node(runtime_dir, config)) as client:
        view = Top(Sample.take(client))
        console = Console(highlight=False)
        looks = 0
        try:
            if as_json:
                while not count or looks < count:
                    time.sleep(every)
                    view.add(Sample.take(client))
                    print(json.dumps(view.plain()), flush=True)
                    looks += 1
                return
            whole = console.is_terminal and not count  # a look or two stay readable
            with Live(view.screen(), console=console, auto_refresh=False, screen=whole) as live:
                while not count or looks < count:
                    time.sleep(every)
                    view.add(Sample.take(client))
                    live.update(view.screen(), refresh=True)
                    looks += 1
        except KeyboardInterrupt:
            return


def drain(
    why: Annotated[str, typer.Option(help="Told to engines and kept in the log.")] = "an operator drains the node",
    runtime_dir: RuntimeDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Let no new request or engine in; what runs goes on. Readiness falls. Holds across restarts."""
    with one_line_errors():
        if not why.strip():
            raise InvalidArgument("say why, in a word at least")
    show(runtime_dir, config, as_json, lambda client: client.cordon(why), screens.cordon_screen)


def undrain(runtime_dir: RuntimeDir = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Let new requests and engines in again."""
    show(runtime_dir, config, as_json, lambda client: client.cordon(""), screens.cordon_screen)


def evict(
    group: GroupName,
    key: Annotated[str, typer.Option(help="Spans with this segment and all behind them; first hex digits do.")] = "",
    tenant: Annotated[str, typer.Option(help="All that this tenant has cached.")] = "",
    pool: Annotated[str, typer.Option(help="The policy's victims, until --free percent of this pool are free.")] = "",
    free: Annotated[int, typer.Option(min=1, max=100, help="Percent of --pool.")] = 10,
    runtime_dir: RuntimeDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Forget cached content: a prefix, a tenant's, or a part of a pool. What somebody uses or pins stays."""
    if sum(map(bool, (key, tenant, pool))) != 1:
        raise typer.BadParameter("say what to evict: one of --key, --tenant and --pool")
    request = pb.EvictRequest(group=group)
    if key:
        request.key = key
    elif tenant:
        request.tenant = tenant
    else:
        request.share.pool, request.share.free_percent = pool, free
    show(runtime_dir, config, as_json, lambda client: client.evict(request), screens.evict_screen)


def pin(
    group: GroupName,
    key: Annotated[str, typer.Argument(help="Key of the prefix's last segment in hex; its first digits do.")],
    name: Annotated[str, typer.Option(help="What the pin is called; default: the key's first digits.")] = "",
    runtime_dir: RuntimeDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Keep a cached prefix until it is unpinned. Its pages may still move between device and host."""
    called = name or key[:16]
    show(runtime_dir, config, as_json, lambda client: client.pin(called, group, key), screens.pin_screen)


def unpin(
    name: Annotated[str, typer.Argument(help="The pin, as `kvmanager pins` names it.")],
    runtime_dir: RuntimeDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Let a pinned prefix go; it stays cached as long as there is room."""
    show(runtime_dir, config, as_json, lambda client: client.unpin(name), screens.pin_screen)


def pins(runtime_dir: RuntimeDir = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Prefixes that operators keep."""
    show(runtime_dir, config, as_json, AdminClient.pins, screens.pins_screen)


def loglevel(
    level: Annotated[str, typer.Argument(help="DEBUG, INFO, WARNING or ERROR.")],
    part: Annotated[str, typer.Option(help="A part of the daemon, as its log names it; default: all.")] = "",
    runtime_dir: RuntimeDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Change what the daemon logs, until it ends."""
    asked = level.upper()

    def line(reply: pb.LogLevelReply) -> str:
        return f"{part or 'kvmanager'} logs from {asked} on; before: {reply.before}"

    show(runtime_dir, config, as_json, lambda client: client.loglevel(asked, part), line)


def config_show(
    file: Annotated[Path | None, typer.Argument(help="A TOML file; default: what the running node has.")] = None,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """The effective values, defaults filled in, of a file or of a running node."""
    if (file is None) == (runtime_dir is None):
        raise typer.BadParameter("say which: a FILE, or --runtime-dir of a running node")
    values: dict[str, Any]
    with one_line_errors():
        if file is not None:
            values = json.loads(json.dumps(dataclasses.asdict(read_config(file)), default=str))
        else:
            with admin_of(find_node(runtime_dir, None)) as client:
                values = json.loads(client.config().json)
    if as_json:
        print_json(values)
    else:
        Console(highlight=False).print(screens.config_screen(values))


