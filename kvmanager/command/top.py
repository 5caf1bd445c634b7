"""`kvmanager top`: one screen of 80 columns, with rates from the counters' differences."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from kvmanager.clients.admin import AdminClient
from kvmanager.command.operatescreens import transfers_screen
from kvmanager.command.screens import STATE_TITLES, STATES, new_table, or_nothing, seconds, share
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.units import format_bytes

RATES: Final = (
    "request", "refusal", "step", "prompt_tokens", "prefix_hit_tokens", "offload", "onboard", "reclaim", "eviction",
    "handoff", "failed_plan", "bad_copy",
)  # fmt: skip
TRANSFERS_MAX: Final = 6
ENGINES_MAX: Final = 8


@dataclass(frozen=True)
class Sample:
    """One look at a node, at `at_s` of a steady clock."""

    at_s: float
    status: pb.StatusReply
    pools: pb.PoolsReply
    transfers: pb.TransfersReply

    @classmethod
    def take(cls, client: AdminClient) -> Sample:
        """Asks the node."""
        return cls(time.monotonic(), client.status(), client.pools(), client.transfers())


class Top:
    """The newest look, and the one before."""

    def __init__(self, first: Sample) -> None:
        self._before = self._now = first

    def add(self, sample: Sample) -> None:
        """One more look."""
        self._before, self._now = self._now, sample

    def rates(self) -> dict[str, float]:
        """Counts a second since the look before; 0 after the daemon was replaced."""
        passed = self._now.at_s - self._before.at_s
        old, new = self._before.status, self._now.status
        if passed <= 0 or old.boot_id != new.boot_id:
            return dict.fromkeys(RATES, 0.0)
        return {name: (new.counters[name] - old.counters[name]) / passed for name in RATES if name in new.counters}

    def plain(self) -> dict[str, Any]:
        """As one object."""
        status = self._now.status
        pools = {
            pool.pool: {name: getattr(pool, f"{name}_bytes") for name in ("capacity", *STATES, "pinned", "promised")}
            for pool in self._now.pools.pools
        }
        return {
            "node": status.node, "state": status.state, "boot_id": status.boot_id, "uptime_ns": status.uptime_ns,
            "ledger_ok": status.ledger_ok, "engines": len(status.engines),
            "transfers": len(self._now.transfers.transfers),
            "requests": sum(engine.requests for engine in status.engines),
            "per_second": self.rates(), "pools": pools,
        }  # fmt: skip

    def screen(self) -> RenderableType:
        """Everything, in 80 columns."""
        status = self._now.status
        ledger = "ledger adds up" if status.ledger_ok else "LEDGER DOES NOT ADD UP"
        head = Text(f"{status.node}: {status.state} for {seconds(status.uptime_ns)}, {ledger}", style="bold")
        return Group(head, self._pools(), "", self._rates(), "", self._engines(), "", self._transfers())

    def _pools(self) -> RenderableType:
        shown = new_table("", "pool", "bytes", "pin", *STATE_TITLES)
        for pool in self._now.pools.pools:
            parts = [share(getattr(pool, f"{name}_bytes"), pool.capacity_bytes) for name in STATES]
            shown.add_row(
                pool.pool, format_bytes(pool.capacity_bytes), share(pool.pinned_bytes, pool.capacity_bytes), *parts
            )
        return or_nothing(shown, "no pool")

    def _rates(self) -> RenderableType:
        shown = new_table("", "a second", "", "since start", "a second ", " ", "since start ", text=1)
        rates, counters = self.rates(), self._now.status.counters
        cells = [(name, f"{rate:,.1f}", f"{counters[name]:,}") for name, rate in rates.items()]
        for left, right in zip(cells[::2], [*cells[1::2], ("", "", "")], strict=False):
            shown.add_row(*left, *right)
        return shown

    def _engines(self) -> RenderableType:
        shown = new_table("", "engine", "group", "state", "ranks", "requests", text=3)
        for engine in self._now.status.engines[:ENGINES_MAX]:
            shown.add_row(engine.engine, engine.group, engine.state, str(engine.ranks_attached), str(engine.requests))
        more = len(self._now.status.engines) - ENGINES_MAX
        return Group(or_nothing(shown, "no engine"), *([Text(f"and {more} more")] if more > 0 else []))

    def _transfers(self) -> RenderableType:
        every = self._now.transfers.transfers
        more = len(every) - TRANSFERS_MAX
        shown = transfers_screen(pb.TransfersReply(transfers=every[:TRANSFERS_MAX]))
        return Group(shown, *([Text(f"and {more} more")] if more > 0 else []))
