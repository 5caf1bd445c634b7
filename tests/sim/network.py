"""What the nodes of a simulation share: the clock, the dice, memory, the story so far, and the wire between them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmanager.core.events import AcceptTicket, CheckTicket, Effect, Event, ReleaseTicket, RenewTickets
from kvmanager.errors import PeerUnreachable
from tests.sim.content import Memory

if TYPE_CHECKING:
    from tests.sim.harness import World


@dataclass(frozen=True)
class Entry:
    """One event of the story: which node got it, when, and what came of it."""

    node: int
    now: int
    event: Event
    effects: list[Effect]


@dataclass
class Network:
    """`draw` decides everything; nothing else is random. `cut`: no message gets from node to node."""

    draw: random.Random
    memory: Memory
    now: int = 0
    cut: bool = False
    happened: Counter[str] = field(default_factory=Counter)
    story: list[Entry | str] = field(default_factory=list)
    applied: int = 0
    sources: dict[str, tuple[World, str]] = field(default_factory=dict)  # ticket -> its node and group

    def note(self, what: str) -> None:
        """Something that happened outside of all nodes."""
        self.story.append(what)
        self.happened[what.split(":")[0]] += 1

    def ask(self, ticket_id: str, event: AcceptTicket | CheckTicket | ReleaseTicket | RenewTickets) -> object:
        """The answer of the node that gave the ticket; PeerUnreachable where it or its answer is lost."""
        lost = PeerUnreachable(f"the node of ticket {ticket_id} does not answer")
        if self.cut:
            self.happened["message lost"] += 1
            return lost
        answer = self.sources[ticket_id][0].apply(event)
        if self.draw.random() < 0.01:
            self.happened["answer lost"] += 1
            return lost
        return answer
