"""What the operator's commands show people, in 80 columns."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvmanager.command.screens import new_table, or_nothing, seconds
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.units import SECOND_NS, format_bytes


def transfers_screen(reply: pb.TransfersReply) -> RenderableType:
    """One line a plan or pull."""
    shown = new_table("", "group", "what", "urgency", "plan", "spans", "bytes", "age", "waiting", text=3)
    for each in reply.transfers:
        numbers = (str(each.plan_id), f"{each.spans:,}", format_bytes(each.moved_bytes), seconds(each.age_ns))
        gives_way = " (gives way)" if each.gives_way else ""
        shown.add_row(each.group, each.purpose + gives_way, each.urgency, *numbers, str(each.waiters))
    return Group(or_nothing(shown, "nothing is under way"), *map(pull_path_line, reply.paths))


def pull_path_line(path: pb.PullPath) -> Text:
    """How chunks come from a peer, and what was measured."""
    what = {"ring": "through staging", "direct": "straight to their pages"}.get(path.chosen, "not decided yet")
    rates = [
        f"{rate / 1e9:.2f} GB/s {way}" if rate else f"{way} not tried"
        for way, rate in (("through staging", path.ring_bytes_per_s), ("straight", path.direct_bytes_per_s))
    ]
    return Text(f"pulls from {path.agent_name}: {what} ({', '.join(rates)})")


def story_screen(reply: pb.ExplainReply) -> RenderableType:
    """One paragraph a line of the story."""
    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0), title=reply.title)
    shown.title_justify = "left"
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for line in reply.lines:
        shown.add_row(_clock(line.at_ns), line.text)
    return shown


def _clock(at_ns: int) -> str:
    if at_ns == 0:
        return "now"
    return datetime.fromtimestamp(at_ns / SECOND_NS).astimezone().strftime("%m-%d %H:%M:%S.%f")[:-3]


def fsck_screen(reply: pb.FsckReply) -> RenderableType:
    """One line a check, and what it cost."""
    shown = new_table("", "check", "result", "took", text=2)
    for check in reply.checks:
        shown.add_row(check.name, "BROKEN" if check.broken else "ok", f"{check.took_ns / 1e6:,.1f} ms")
    stories = [Text(f"{check.name}: {check.broken}") for check in reply.checks if check.broken]
    said = f"{reply.spans:,} spans looked at; the core stood still for {reply.blocked_ns / 1e6:,.1f} ms"
    if reply.compared_spans or reply.bad_copies:
        said += f"\n{reply.compared_spans:,} host copies read again, {reply.bad_copies:,} pages not what was written"
    if stories:
        said += "\nthe daemon stops now: it must not go on like this; keep its log"
    return Group(shown, *stories, Text(said))


def cordon_screen(reply: pb.CordonReply) -> RenderableType:
    """How the node stands."""
    return Text(f"the node is {reply.state}" + (f"; before: drained, {reply.before}" if reply.before else ""))


def evict_screen(reply: pb.EvictReply) -> RenderableType:
    """What was forgotten."""
    held = f", {reply.held_spans:,} stay" if reply.held_spans else ""
    return Text(f"{reply.forgotten_spans:,} spans forgotten{held}")


def pin_screen(reply: pb.PinStatus) -> RenderableType:
    """One pin."""
    upto = f"up to key {reply.key} of {reply.group}"
    return Text(f"{reply.pin_id}: {reply.spans:,} spans, {reply.tokens:,} tokens {upto}")


def pins_screen(reply: pb.PinsReply) -> RenderableType:
    """One line a pin."""
    shown = new_table("", "pin", "group", "key", "spans", "tokens", "age", text=3)
    for pin in reply.pins:
        shown.add_row(pin.pin_id, pin.group, pin.key[:16], f"{pin.spans:,}", f"{pin.tokens:,}", seconds(pin.age_ns))
    return or_nothing(shown, "no pin")


def config_screen(values: dict[str, Any]) -> RenderableType:
    """Tables and keys, as in the file."""
    lines = []
    for name, section in values.items():
        for each in section if isinstance(section, list) else [section]:
            head = f"[[{name.removesuffix('s')}]]" if isinstance(section, list) else f"[{name}]"
            lines += [head, *(f"{key} = {json_value(value)}" for key, value in each.items()), ""]
    return Text("\n".join(lines).rstrip())


def json_value(value: object) -> str:
    """As TOML would have it, near enough to read."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
