"""A daemon that dies between two events or inside a record of its journal, and another one that goes on.

The mover, the engines and all memory live on. What the dead daemon had not handed out is lost: the answer to the
event, plans and notices. The journal must give back the state to the last bit, and everybody then does what the
real ones do: engines open their streams again, notices come again, a message without an answer is sent again.
"""

from __future__ import annotations

import os

from kvmanager.core.audit import audit
from kvmanager.core.digest import state_digest
from kvmanager.core.events import (
    READS,
    AttachRank,
    Effect,
    EngineResumed,
    Event,
    ExportRequestKV,
    MoverGone,
    Notified,
    PlanEnded,
    Recovered,
    RegisterEngine,
    Replied,
)
from kvmanager.core.node import Node
from kvmanager.journal import journal
from kvmanager.journal.journalcodec import Codec, configuration
from tests.chaos.schedule import Kill
from tests.sim.harness import World

HALF_BYTES = 64 << 20
REPLAYED_BYTES = 4 << 10
"""A log that a next daemon replayed and that is longer than this is behind a snapshot for the one after it."""
REGISTERS = (RegisterEngine, AttachRank, ExportRequestKV)
"""Said again, these get something new: the simulated engines wait for the answer, so it is not lost."""
LOOKED_AT_EVERY = 6
"""Of events that change nothing, said to do so and not: two digests cost as much as many events."""


class Crashes:
    """The journal of a world, and its daemon's deaths. `arm` kills it at the next event that will do."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._codec = Codec(world.specs, world.limits)
        self._prints = journal.Fingerprints(configuration(world.specs, world.limits, world.policy))
        self._fd = journal.create(HALF_BYTES)
        self._journal = journal.Journal(self._fd, self._codec, self._prints, HALF_BYTES)
        self._journal.snapshot(world.node)
        self._torn: float | None = None
        self._mute = False
        self._left_out = False
        self._idle_events = 0
        self._digest = ""
        self._busy = False
        self._boot_id = 1

    def close(self) -> None:
        """Gives the journal's memory back."""
        self._journal.close()
        os.close(self._fd)

    def arm(self, kill: Kill) -> None:
        """The next event that will do is not survived: it is lost in the middle of its record, or its effects are.

        After a death behind a snapshot there is no record at all.
        """
        if kill.point == "daemon.journal.snapshot":
            self._journal.snapshot(self.world.node)
        lost_effects = kill.point == "daemon.apply.after"
        self._torn, self._mute = (None, True) if lost_effects else (self.world.draw.random(), False)

    def before(self, event: Event) -> bool:
        """Ahead of an event: perhaps the daemon dies while it writes its record. True: nobody says the event again."""
        node, now = self.world.node, self.world.now
        if self._torn is not None and not self._busy:
            record = self._journal.record(event, now)
            at = self._journal._at
            # Where the memory holds the record's last bytes already (zeros), it is whole without them.
            last = max(i for i, byte in enumerate(record) if self._journal._memory[at + i] != byte)
            cut, self._torn = int(self._torn * (last + 1)), None
            self._journal._memory[at : at + cut] = record[:cut]
            self._die(event, f"{cut} of {len(record)} bytes into a record")
            node = self.world.node
            if isinstance(event, MoverGone):
                return True  # the next daemon met the next mover at once, and knows no other
        self._left_out = node.idle(event, now) or isinstance(event, READS)
        self._idle_events += self._left_out
        looked_at = self._left_out and self._idle_events % LOOKED_AT_EVERY == 0
        self._digest = state_digest(node.state) if looked_at else ""
        return False

    def after(self, event: Event, effects: list[Effect]) -> bool:
        """An event was applied: it is kept if it must be. True when the daemon died with its effects."""
        node = self.world.node
        if self._digest:
            assert self._digest == state_digest(node.state), f"{event} was said to change nothing"
        if self._left_out:
            assert all(isinstance(effect, Replied) for effect in effects), f"{event} was said to do nothing"
        if not self._left_out:
            self._journal.append(event, self.world.now, 0.0)
        if self._mute and not self._busy and not isinstance(event, REGISTERS):
            self._mute = False
            self._die(event, "with all effects of an event")
            return True
        return False

    def replace(self) -> None:
        """Another daemon's core goes on where this one stopped, with no other trace."""
        world = self.world
        before = state_digest(world.node.state)
        self._journal.close()
        self._journal = journal.Journal(self._fd, self._codec, self._prints, HALF_BYTES)
        node = self._journal.recover()
        assert state_digest(node.state) == before, "the journal gave back another state"
        audit(node.state)
        if self._journal.log_bytes > REPLAYED_BYTES:
            self._journal.snapshot(node)
        _move_in(world.node, node)
        world.node = world.published.node = node
        world.listener.restart(node)

    def _die(self, event: Event, how: str) -> None:
        """It dies over an event."""
        world = self.world
        world.net.note(f"daemon died: node {world.number}, {how}")
        self._busy = True
        self.replace()
        for plan_id, pull in list(world.pulls.items()):
            if pull.generations is None:
                del world.pulls[plan_id]
            pull.orphaned = True
        self._boot_id += 1
        if isinstance(event, PlanEnded):
            world.apply(event, 0)  # a mover keeps what it told, and tells it before it lists what it carries
        carried = [*world.flights, *(flight.plan.plan_id for flight in world.lost), *world.pulls]
        world.apply(Recovered(self._boot_id, world.mover, frozenset(carried)), 0)
        for engine in world.engines:
            live = world.node.state.engines.get(engine.name)
            if live is None or live.epoch != engine.epoch or engine.stale:
                continue
            if not engine.cut:
                world.apply(EngineResumed(engine.name, engine.epoch), 0)
            unseen = [notice for notice in live.notices if notice.sequence > engine.seen]
            world.inbox[(engine.name, engine.epoch)] = [Notified(engine.name, engine.epoch, n) for n in unseen]
        self._busy = False


def _move_in(old: Node, new: Node) -> None:
    """Those who know the old core's groups and pools see the new ones' content in them from now on."""
    for name, group in new.state.groups.items():
        known = old.state.groups[name]
        for pool_name, pool in group.pools.items():
            vars(known.pools[pool_name]).clear()
            vars(known.pools[pool_name]).update(vars(pool))
            group.pools[pool_name] = known.pools[pool_name]
        vars(known).clear()
        vars(known).update(vars(group))
        new.state.groups[name] = known
    new.state.reclaimers = new.state._reclaimers()
    new.state.lenders = new.state._lenders()
