"""The nodes under pressure: somebody's running ones, or our own small ones on the CPU."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmanager.clients.admin import AdminClient
from kvmanager.demo.nodes import NodeProcess
from kvmanager.errors import InvalidArgument, KVError
from kvmanager.keeper.lockfile import holder
from kvmanager.layout import GLM53_TINY
from kvmanager.pressure.driver import Target

ROWS: Final = 16
RANKS: Final = 2
DEVICE_SPANS: Final = 24
HOST_SPANS: Final = 48
SOURCE: Final = "source"
GROUPS: Final = ("first", "second")
SHARED: Final = ("node",)
"""Profiles whose groups share their host memory."""
PROFILES: Final = {
    "node": "one node with two groups that share a host region",
    "small-host": "one node whose host pool is a third of its device pool",
    "no-host": "one node without a host tier",
    "tenant": "one node on which our user has a ceiling below the whole pool",
    "pair": "two nodes of which the second takes requests from the first by ticket",
}
DRIVEN: Final = ("sharded", "replicated", "hisparse")


@dataclass(frozen=True)
class Room:
    """What suites measure their load by: spans that the pools hold, and the share of them that we may use."""

    span_tokens: int
    device_spans: int
    host_spans: int
    ceiling: float = 1.0


class Operator:
    """The operator's connection to a daemon, and to those that come after it."""

    def __init__(self, runtime_dir: Path, admin: AdminClient, own: bool) -> None:
        self.runtime_dir, self.admin, self.own = runtime_dir, admin, own

    def pid_of(self, role: str) -> int:
        """Of its daemon or mover now; 0 for none."""
        return holder(self.runtime_dir / ("daemon.lock" if role == "daemon" else "mover-cpu.lock")) or 0

    def signal(self, role: str, number: int) -> None:
        """Signals one of its processes, if it is our own node."""
        pid = self.pid_of(role)
        if self.own and pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def reopen(self) -> None:
        """A new connection, to a daemon that was replaced. Raises KVError."""
        with suppress(KVError):
            self.admin.close()
        self.admin = AdminClient(self.runtime_dir)

    def close(self) -> None:
        """Leaves it; a process that we stopped goes on."""
        for role in ("daemon", "mover"):
            self.signal(role, signal.SIGCONT)
        self.admin.close()


@dataclass
class Node:
    """One memory group of a node, which takes one engine at a time: where it attaches, and how much room it has."""

    name: str
    operator: Operator
    target: Target
    room: Room

    @property
    def admin(self) -> AdminClient:
        """The operator's views."""
        return self.operator.admin


@contextmanager
def own_nodes(profile: str, revision: str, directory: Path) -> Iterator[list[Node]]:
    """Starts the nodes of a profile; they are stopped at the end. Raises NotReady, InvalidArgument."""
    if profile not in PROFILES:
        raise InvalidArgument(f"no profile {profile!r}; there are {', '.join(PROFILES)}")
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        texts = {SOURCE: _source_toml(directory / SOURCE, profile)}
        if profile == "pair":
            texts["target"] = _target_toml(directory / "target")
        processes = [stack.enter_context(NodeProcess(name, directory, text)) for name, text in texts.items()]
        operators = [Operator(p.runtime_dir, p.wait_serving(), own=True) for p in processes]
        for operator in operators:
            stack.callback(operator.close)
        yield [node for operator in operators for node in nodes_of(operator, revision)]


def running_nodes(runtime_dirs: Iterable[Path]) -> tuple[list[Operator], list[Node]]:
    """Groups of running nodes that nobody uses. Raises NotReady, InvalidArgument."""
    operators = [Operator(runtime_dir, AdminClient(runtime_dir), own=False) for runtime_dir in runtime_dirs]
    return operators, [node for operator in operators for node in nodes_of(operator, "")]


def nodes_of(operator: Operator, revision: str) -> list[Node]:
    """The groups that suites can drive and that no engine uses, HiSparse ones last. Raises InvalidArgument."""
    config = json.loads(operator.admin.config().json)
    busy = {engine.group for engine in operator.admin.status().engines if engine.state != "gone"}
    groups = [group for group in config["groups"] if group["kind"] in DRIVEN and group["name"] not in busy]
    if not groups:
        raise InvalidArgument(
            f"the node in {operator.runtime_dir} has no group of kind {', '.join(DRIVEN)} that no engine uses"
        )
    ours = [t["ceiling"] for t in config["tenants"] if os.getuid() in t["uids"]]
    nodes = []
    for group in sorted(groups, key=lambda g: DRIVEN.index(g["kind"])):
        target = Target(
            operator.runtime_dir, group["name"], group["kind"], group["format"], group["ranks"], group["page_rows"],
            revision,
        )  # fmt: skip
        page = max(layout.page_bytes for layout in target.layouts.values())
        device, host = (group[f"{tier}_bytes_per_rank"] // page for tier in ("hbm", "host"))
        room = Room(target.span_tokens, device, host, ours[0] if ours else 1.0)
        nodes.append(Node(f"{config['node']['name']}/{group['name']}", operator, target, room))
    return nodes


def _source_toml(runtime_dir: Path, profile: str) -> str:
    page = GLM53_TINY.page_bytes(ROWS)
    host = {"small-host": DEVICE_SPANS // 3, "no-host": 0}.get(profile, HOST_SPANS)
    tenant = ""
    if profile == "tenant":
        tenant = f'[[tenant]]\nname = "us"\nuids = [{os.getuid()}]\nfloor = 0.25\nceiling = 0.5\n'
    groups = "".join(
        f"""
[[group]]
name = "{name}"
kind = "sharded"
format = "{GLM53_TINY.name}"
ranks = {RANKS}
page_rows = {ROWS}
interleave = 1
hbm_bytes_per_rank = {DEVICE_SPANS * page}
host_bytes_per_rank = {host * page}
"""
        + (f'host_region = "ram"\nhost_extent_bytes = {4 * page}\n' if profile in SHARED else "")
        for name in GROUPS[: 1 if profile == "pair" else None]
    )
    return f"""
[node]
name = "{SOURCE}"
runtime_dir = "{runtime_dir}"
spare = false
[lease]
ticket_ttl_ms = 10000
grace_ms = 100
{tenant}
[mover]
staging_bytes = "4 MiB"
chunk_bytes = "1 MiB"
{groups}
"""


def _target_toml(runtime_dir: Path) -> str:
    slab = GLM53_TINY.slab_bytes(ROWS)
    return f"""
[node]
name = "target"
runtime_dir = "{runtime_dir}"
spare = false
[mover]
staging_bytes = "4 MiB"
chunk_bytes = "1 MiB"
pull_deadline_ms = 2000
[[group]]
name = "decode"
kind = "hisparse"
format = "{GLM53_TINY.name}"
ranks = 1
page_rows = {ROWS}
hbm_bytes_per_rank = {80 * slab}
host_bytes_per_rank = {120 * slab}
token_order = "keep"
source_ranks = {RANKS}
source_interleave = 1
hot_rows = 32
"""
