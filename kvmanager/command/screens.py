"""What `kvmanager` shows people: replies of the admin service as tables that fit 80 columns."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvmanager.configuration.hostfit import HostFit
from kvmanager.configuration.sizing import Fit, Sizing
from kvmanager.errors import DaemonError
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.units import SECOND_NS, format_bytes
from kvmanager.wire import unpack_u32

STATES: Final = ("free", "reserved", "filling", "ready", "draining", "quarantined")
"""In the order of MapReply.states."""
STATE_TITLES: Final = ("free", "resv", "fill", "ready", "drain", "quar")
STATE_CHARACTERS: Final = (".", "r", "+", "", "d", "!")
"""Of a map; ready units show their class instead."""
NO_CLASS: Final = 255
UNOWNED_EXTENT: Final = 0xFFFFFFFF


def new_table(title: str, *columns: str, text: int = 1) -> Table:
    """A table whose first `text` columns are text and whose others are numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        if place < text:
            table.add_column(column, overflow="ellipsis", no_wrap=True)
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def or_nothing(table: Table, nothing: str) -> RenderableType:
    """The table, or a word where it is empty."""
    return table if table.row_count else Text(nothing)


def seconds(duration_ns: int) -> str:
    """A duration."""
    return f"{duration_ns / SECOND_NS:,.1f} s"


def share(part: int, whole: int) -> str:
    """A percentage that never hides a remainder: 0 only for nothing."""
    if part == 0:
        return "-"
    return "<1%" if part * 100 < whole else f"{part * 100 // whole}%"


def status_screen(reply: pb.StatusReply) -> RenderableType:
    """The node in a few lines, its engines and movers, and its counters."""
    ledger = "adds up" if reply.ledger_ok else "DOES NOT ADD UP: run the audit and keep the log"
    head = Text(
        f"node {reply.node}: {reply.state} for {seconds(reply.uptime_ns)}, version {reply.version}, "
        f"boot {reply.boot_id:016x}\nledger {ledger}"
        + (
            f"\nmemory {format_bytes(reply.faulted_in_bytes)} of {format_bytes(reply.memory_bytes)} faulted in"
            if reply.faulted_in_bytes < reply.memory_bytes
            else ""
        )
    )
    stalls = [
        Text(f"{stall.part} {stall.why}; the node is {'ready all the same' if stall.ready else 'NOT READY'}")
        for stall in reply.stalls
    ]
    engines = new_table("engines", "engine", "group", "state", "epoch", "ranks", "requests", text=3)
    for engine in reply.engines:
        counts = (engine.epoch, engine.ranks_attached, engine.requests)
        engines.add_row(engine.engine, engine.group, engine.state, *map(str, counts))
    suspects = [
        f"{engine.engine} epoch {engine.epoch} is suspect for {seconds(engine.suspect_ns)}: "
        + (f"its pages are held while {engine.held_by}" if engine.held_by else "its pages return now")
        + {"": "", "kill": "; its processes were sent SIGKILL", "hold": "; nothing is done about them"}[
            engine.fence
        ]
        for engine in reply.engines
        if engine.state == "suspect"
    ]
    movers = new_table("movers", "device", "agent", "pid", "plans out", text=2)
    for mover in reply.movers:
        movers.add_row(
            mover.device, "started" if mover.agent_started else "not started", str(mover.pid), str(mover.outstanding)
        )
    paths = [
        Text(f"pulls of {mover.device} from {path.agent_name}: {path.chosen}")
        for mover in reply.movers
        for path in mover.pull_paths
    ]
    counters = new_table("counters", "since start", "count")
    for name, count in sorted(reply.counters.items()):
        counters.add_row(name, f"{count:,}")
    return Group(
        head, *stalls, "", or_nothing(engines, "no engine"), *map(Text, suspects), "",
        or_nothing(movers, "no mover"), *paths, "", or_nothing(counters, "nothing counted yet"),
    )  # fmt: skip


def _shared_regions(regions: Iterable[pb.SharedRegionStatus]) -> RenderableType:
    """Who owns how many extents of the host regions that pools share."""
    table = new_table("shared host regions", "region", "pool", "extents", "floor", "most", "a rank", "moved", text=2)
    for region in regions:
        owners = unpack_u32(region.owners, "SharedRegionStatus.owners")
        floors = unpack_u32(region.floor_extents, "SharedRegionStatus.floor_extents").tolist()
        most = unpack_u32(region.most_extents, "SharedRegionStatus.most_extents").tolist()
        for number, pool in enumerate(region.pools):
            count = int((owners == number).sum())
            size = format_bytes(count * region.extent_bytes)
            table.add_row(region.name, pool, f"{count:,}", f"{floors[number]:,}", f"{most[number]:,}", size, "")
        left = format_bytes(region.unowned_bytes // region.ranks)
        unowned = int((owners == UNOWNED_EXTENT).sum())
        table.add_row(region.name, "(nobody)", f"{unowned:,}", "", "", left, f"{region.moves:,}")
    return table


def pools_screen(reply: pb.PoolsReply) -> RenderableType:
    """Two tables: shares of the six exclusive states, and the overlays in bytes."""
    states = new_table("states", "pool", "tier", "ranks", "capacity", *STATE_TITLES, text=2)
    overlays = new_table("of which", "pool", "tier", "pinned", "reclaimable", "promised", text=2)
    for pool in reply.pools:
        parts = [getattr(pool, f"{name}_bytes") for name in STATES]
        capacity = pool.capacity_bytes
        shares = [share(part, capacity) for part in parts]
        states.add_row(pool.pool, pool.tier, str(pool.ranks), format_bytes(capacity), *shares)
        sizes = (pool.pinned_bytes, pool.reclaimable_bytes, pool.promised_bytes)
        overlays.add_row(pool.pool, pool.tier, *map(format_bytes, sizes))
    classes = [
        f"{pool.pool}/{pool.tier}: " + ", ".join(f"{count:,} {name}" for name, count in sorted(classes.items()))
        for pool in reply.pools
        if (classes := dict(pool.pages_by_class))
    ]
    if not reply.pools:
        return Text("no pool")
    parts_shown: list[RenderableType] = [states, "", overlays]
    if classes:
        parts_shown += ["", Text("\n".join(["pages by class", *classes]))]
    if reply.regions:
        parts_shown += ["", _shared_regions(reply.regions)]
    return Group(*parts_shown)


def class_letters(names: Sequence[str]) -> list[str]:
    """A different lower-case letter for each class, its initial where that is free."""
    taken = {character for character in STATE_CHARACTERS if character}
    letters = []
    for name in names:
        letter = next(each for each in (*name.lower(), *string.ascii_lowercase) if each.isalpha() and each not in taken)
        taken.add(letter)
        letters.append(letter)
    return letters


def map_units(reply: pb.MapReply) -> list[dict[str, Any]]:
    """One entry a unit: state, class (None: unassigned), pins.

    Raises DaemonError when the reply's arrays do not describe the same units.
    """
    pins = unpack_u32(reply.pins, "MapReply.pins")
    if not len(reply.states) == len(reply.classes) == len(pins):
        raise DaemonError(
            f"the map of {reply.pool} has {len(reply.states)} states, {len(reply.classes)} classes and {len(pins)} pin "
            "counts; daemon and command are of different versions"
        )
    names = {**dict(enumerate(reply.class_names)), NO_CLASS: None}
    try:
        return [
            {"state": STATES[state], "class": names[class_], "pins": int(count)}
            for state, class_, count in zip(reply.states, reply.classes, pins, strict=True)
        ]
    except (IndexError, KeyError) as error:
        raise DaemonError(f"the map of {reply.pool} holds an unknown state or class {error}") from error


def requests_screen(reply: pb.RequestsReply) -> RenderableType:
    """What each request holds, in tokens and spans."""
    table = new_table(
        "", "engine", "state", "session", "id", "prompt", "cached", "commit", "fenced", "spans", "host", text=3
    )
    for request in reply.requests:
        table.add_row(
            request.engine,
            request.state,
            request.session_id,
            str(request.request_id),
            *(str(n) for n in (request.prompt_tokens, request.cached_tokens, request.committed_tokens)),
            *(str(n) for n in (request.fenced_tokens, request.spans, request.host_only_spans)),
        )
    return or_nothing(table, "no request")


def prefixes_screen(reply: pb.PrefixesReply) -> RenderableType:
    """One line a cached prefix, newest first."""
    table = new_table("", "group", "chain", "key", "tokens", "device", "host", "pins", "idle", text=3)
    for prefix in reply.prefixes:
        counts = (prefix.tokens, prefix.device_tokens, prefix.host_tokens, prefix.pins)
        table.add_row(prefix.group, prefix.chain, prefix.key[:12], *map(str, counts), seconds(prefix.idle_ns))
    total = Text(f"{reply.spans:,} spans, {reply.tokens:,} tokens in all")
    return Group(or_nothing(table, "no prefix"), total)


def leases_screen(reply: pb.LeasesReply) -> RenderableType:
    """One line a ticket that is out."""
    table = new_table("", "lease", "kind", "holder", "request", "tokens", "expires in", text=3)
    for lease in reply.leases:
        counts = (lease.request_id, lease.tokens)
        table.add_row(lease.lease_id[:16], lease.kind, lease.holder, *map(str, counts), seconds(lease.expires_in_ns))
    return or_nothing(table, "no lease")


def reset_screen(reply: pb.ResetReply) -> RenderableType:
    """What was forgotten."""
    held = f", {reply.held_spans} of them held until requests or copies end" if reply.held_spans else ""
    return f"{reply.forgotten_spans} spans forgotten{held}"


def sizing_screen(sizing: Sizing) -> RenderableType:
    """What a configuration would allocate, what lies beside it, and which groups hold the request asked for."""
    pools = new_table("pages", "pool", "ranks", "pages", "a page", "a rank", "unused", "tokens")
    for line in sizing.pools:
        sizes = (line.page_bytes, line.page_total_bytes, line.unused_bytes)
        pools.add_row(line.pool, str(line.ranks), f"{line.pages:,}", *map(format_bytes, sizes), f"{line.tokens:,}")
    beside = new_table("beside the pages, device memory a rank", "group", "workspace", "ring", "context", "hot buffer")
    for rank in sizing.beside:
        parts = (rank.workspace_bytes, rank.staging_bytes, rank.context_bytes, rank.hot_buffer_bytes)
        beside.add_row(rank.group, *(format_bytes(part) if part else "-" for part in parts))
    notes = Text(
        "workspace: a layer and the next, taken once a step; a pool of its own with workspace_bytes_per_rank.\n"
        "ring, context: of the rank's mover. hot buffer: of one request, taken from the slabs."
    )
    return Group(pools, "", beside, notes, "", *map(_fit_line, sizing.fits))


def machine_screen(fit: HostFit) -> RenderableType:
    """What the node takes of this machine, what there is, and whether that is enough."""
    table = new_table("on this machine", "what", "needed", "there is", "by", text=1)
    table.columns[3].justify = "left"
    table.columns[3].overflow, table.columns[3].no_wrap = "fold", False
    table.add_row("host memory", format_bytes(fit.host_bytes), format_bytes(fit.host_available_bytes), fit.host_limit)
    if fit.device != "cpu":
        there = format_bytes(fit.device_total_bytes) if fit.device_total_bytes else "not known"
        table.add_row(fit.device, format_bytes(fit.device_bytes), there, "all of its memory, used or not")
    lines = [f"{fit.regions:,} regions; room for {fit.clients:,} attached processes by the limit of descriptors"]
    if fit.running_pid:
        lines.append(f"a node runs there now (keeper {fit.running_pid}): what it holds is not counted as available")
    if fit.certificate_until:
        lines.append(f"certificate for {', '.join(fit.certificate_hosts)}, valid until {fit.certificate_until}")
    lines += [f"does not fit: {problem}" for problem in fit.problems] or ["fits"]
    return Group("", table, Text("\n".join(lines)))


def _fit_line(fit: Fit) -> Text:
    if fit.refusal is not None:
        return Text(f"{fit.group}: a request of {fit.tokens:,} tokens does not fit: {fit.refusal}")
    held = [f"{pages:,} of {pool} ({format_bytes(size)} a rank)" for pool, (pages, size) in fit.held.items()]
    lacks = f"; the host lacks {fit.whole_lacks_slabs:,} slabs to retract it whole" if fit.whole_lacks_slabs else ""
    return Text(f"{fit.group}: a request of {fit.tokens:,} tokens takes {', '.join(held)}{lacks}")
