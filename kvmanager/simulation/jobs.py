"""One turn on its way through the deployment, and what a node's copies do to its links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvmanager.core.plans import Purpose
from kvmanager.core.spec import GroupSpec, Limits
from kvmanager.simulation.clock import Clock, Link
from kvmanager.simulation.rates import LinkRates
from kvmanager.simulation.turns import Turn
from kvmanager.simulation.virtual import VirtualEngine, VirtualNode

UP = (Purpose.ONBOARD, Purpose.PLACE, Purpose.CHECK)
"""Copies that go to the device; all others leave it."""


@dataclass
class Job:
    """Moments in s, -1 for not yet. cached_tokens: of the prompt, found at the prefill node.

    refused: why it can't be served at all. source: where its KV lies when it is handed over.
    """

    number: int
    turn: Turn
    arrived_s: float
    done: Callable[[Job], None]
    cached_tokens: int = 0
    computed_tokens: int = 0
    first_s: float = -1.0
    end_s: float = -1.0
    produced_tokens: float = 0.0
    granted_tokens: int = 0
    prefilled_s: float = -1.0
    handed_s: float = -1.0
    refused: str = ""
    source: Rank | None = None
    release: Callable[[], None] = lambda: None

    @property
    def ticket_id(self) -> str:
        """Of its hand-off."""
        return f"ticket-{self.number}"


class Rank:
    """A memory group of its own core (a GPU, or eight that share each prompt), its links, and its one engine.

    Transfers of a group of several GPUs use all their links alike, so a link carries bytes of one GPU.
    """

    def __init__(self, spec: GroupSpec, limits: Limits, policy: str, clock: Clock, rates: LinkRates) -> None:
        self.spec, self.clock = spec, clock
        self.node = VirtualNode([spec], limits, policy)
        self.engine = VirtualEngine(self.node, spec)
        self.to_device = Link(rates.host_to_device_bytes_per_s)
        self.to_host = Link(rates.device_to_host_bytes_per_s)
        self.nic = Link(rates.nic_bytes_per_s)
        self._under_way: set[int] = set()
        self.on_change: Callable[[], None] = lambda: None

    @property
    def token_bytes(self) -> int:
        """Of one token, all layers."""
        return self.spec.kv_format.token_bytes

    def carry_out(self) -> None:
        """Puts copies that were asked for onto their links."""
        for plan_id, plan in list(self.node.plans.items()):
            if plan_id in self._under_way:
                continue
            self._under_way.add(plan_id)
            link = self.to_device if plan.purpose in UP else self.to_host
            end = link.send(self.clock.now_s, plan.total_bytes // self.spec.ranks)
            self.clock.at(end, lambda plan_id=plan_id: self._ended(plan_id))  # type: ignore[misc]

    def _ended(self, plan_id: int) -> None:
        self._under_way.discard(plan_id)
        self.node.end(plan_id, self.clock.ns)
        self.carry_out()
        self.on_change()
