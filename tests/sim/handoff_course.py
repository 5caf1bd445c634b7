"""One hand-off between two nodes from its first token to its last page, and everything that may go wrong on the way.

A course passes the same points each time; a test says at which of them what happens. Whatever it is, a ticket is
released once at most and by its holder, pages stay while somebody may read or write them, bytes that are published
are right, and in the end nobody holds anything.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from kvmanager.core.events import (
    AcceptTicket,
    Close,
    Closing,
    CopyOutcome,
    Exported,
    ExportRequestKV,
    Open,
    Progress,
    ReleaseTicket,
    RenewTickets,
    Tick,
    TicketInfo,
)
from kvmanager.core.pool import PageState
from kvmanager.core.spans import DEVICE
from kvmanager.errors import InvalidArgument, KVError, UnknownLease
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from tests.chaos.schedule import SOURCE, at_point
from tests.sim.content import PAGE_ROWS, Text
from tests.sim.engine import SimEngine
from tests.sim.harness import World
from tests.sim.published import learn
from tests.sim.simulate import Simulation
from tests.sim.worker import ChainTable, Claim, SimRequest
from tests.sim.worlds import KINDS, LIMITS, Nodes, Regions, hisparse, sharded

REQUEST = 1
TARGETS = {"keep": TokenOrder(2, 1), "permute": SEQUENTIAL}
TOKENS = 21
OTHERS_TOKENS = 30
STAGES = 60
"""Of a pull, at most: its deadline passes before."""
TICK_NS = 10_000


_SEED_OF_TWO = list(KINDS).index("handoff")


def _nodes(target: str, regions: Regions, _draw: random.Random) -> Nodes:
    """Just large enough: two source ranks, and the pages of a few requests."""
    return [[sharded(regions, "prefill", 7, 3, 2)], [hisparse(regions, target, 16, 20, TARGETS[target])]]


def _two_nodes(number: int, target: str) -> Simulation:
    """A world whose engines, which draw their namespaces, have drawn the same one."""
    seed = _SEED_OF_TWO + len(KINDS) * number
    while True:
        made = Simulation(seed, partial(_nodes, target))
        if made.engines["prefill"].namespace == made.engines[target].namespace:
            return made
        made._close()
        seed += 1_000 * len(KINDS)


class Course:
    """A prompt computed at one node while another one fetches what there is of it. `target`: a group of the other."""

    def __init__(self, number: int, target: str, *, daemons_die: bool = True) -> None:
        """`daemons_die`: they keep journals."""
        self.simulation = _two_nodes(number, target)
        self.net = self.simulation.net
        self.draw = self.simulation.draw
        self.draw.seed(f"course {number}")
        if not daemons_die:
            self.simulation._close()
        self.source_world, self.target_world = self.simulation.worlds
        self.source = self.simulation.engines["prefill"]
        self.target = self.simulation.engines[target]
        self.text = Text()
        self.text.extend(TOKENS + self.draw.randrange(PAGE_ROWS), self.draw)
        learn(self.text.digests)
        self.ticket: TicketInfo | None = None
        self.point = ""
        self.ended: list[CopyOutcome] = []
        self.released: Counter[str] = Counter()
        self._source_claims: list[Claim] = []
        self._asked = self.net.ask
        self.net.ask = self._ask  # type: ignore[method-assign]
        self._lose_answer = False
        self._end_pull = self.target_world.end_pull
        self.target_world.end_pull = self._note_end  # type: ignore[method-assign]

    # ------------------------------------------------------------------------------ the course

    def points(self) -> Iterator[str]:
        """The names of the points, each as it is passed."""
        yield "registered"
        self._open(self.source, None)
        yield "source opened"
        while self._computed() < TOKENS // 2 and self._goes_on(self.source):
            pass
        yield "half is computed"
        self._export()
        yield "exported"
        if self.ticket is not None and self._open(self.target, self.ticket):
            yield "target opened"
        for stage in range(STAGES):
            if not self.target_world.pulls:
                break
            self.target_world.advance_pull(next(iter(self.target_world.pulls)))
            self.target_world.apply(Tick(), passes=TICK_NS)
            yield "pull went on"
            if stage % 3 == 1:
                self._goes_on(self.source)
                yield "source went on"
        yield "pull over"
        self._goes_on(self.target)
        yield "target computes"
        self._close(self.source, Closing.FINISHED)
        yield "source closed"
        self._close(self.target, Closing.FINISHED)
        yield "target closed"

    def play(self, faults: Mapping[int, Sequence[str]]) -> list[str]:
        """The whole course with faults at the points of these numbers. The names of the points."""
        passed = []
        try:
            for number, point in enumerate(self.points()):
                passed.append(point)
                self.point = f"{number} ({point})"
                self.watch()
                for fault in faults.get(number, ()):
                    self.net.note(f"fault at point {self.point}: {fault}")
                    FAULTS[fault](self)
                    self.watch()
            self._end()
        finally:
            self.simulation._close()
        return passed

    def watch(self) -> None:
        """What must hold at every moment."""
        assert all(count == 1 for count in self.released.values()), self.released
        if self.ticket is not None and self.ticket.ticket_id in self.source_world.node.state.tickets:
            for claim in self._source_claims:
                claim.hold(f"a ticket at point {self.point}")
        for pull in self.target_world.pulls.values():
            for claim in pull.claims:
                claim.hold(f"a pull at point {self.point}")
        for flight in self.target_world.late:
            for claim in flight.claims:
                states = claim.pool.spaces[claim.page_class].state[claim.pages]
                assert (states == PageState.QUARANTINED).all(), self.point
        for world in self.simulation.worlds:
            world.published.check()

    def _end(self) -> None:
        self.simulation._wire(cut=False)
        self.simulation._finish()
        self.watch()
        for world in self.simulation.worlds:
            assert not world.node.state.tickets
        done = self.target_world.node.state.counters["handoff"]
        assert done <= 1, "a hand-off counted twice"
        assert self.ended.count(CopyOutcome.DONE) <= 1

    # --------------------------------------------------------------------------------- engines

    def _alive(self, engine: SimEngine) -> bool:
        return not (engine.stale or engine.cut) and engine in engine.world.engines and engine.ranks != []

    def _computed(self) -> int:
        request = self.source.requests.get(REQUEST)
        return TOKENS if request is None else request.done

    def _open(self, engine: SimEngine, ticket: TicketInfo | None) -> bool:
        if not self._alive(engine):
            return False
        text = self.text if ticket is None else self.text.fork(ticket.committed_tokens)
        tokens = len(text.digests)
        group = engine.world.node.state.groups[engine.spec.name]
        tables = [ChainTable(chain, group) for chain in engine.spec.chains]
        request = SimRequest(REQUEST, text.fork(tokens), engine.namespace, tokens, 0, tables)
        wanted = Open(REQUEST, tokens, 0, text.keys(0, tokens // PAGE_ROWS), "s", ticket)
        engine.send([], opens=[(wanted, request)])
        return True

    def _goes_on(self, engine: SimEngine) -> bool:
        """One message, and all the work that it allows. False when there is nobody to do it."""
        if not self._alive(engine):
            return False
        engine._read_notices()
        progress = []
        for request in engine.requests.values():
            if request.waiting:
                continue
            last = request.done // PAGE_ROWS
            keys = request.text.keys(request.keys_sent, last) if last > request.keys_sent else b""
            request.keys_sent, request.committed = max(request.keys_sent, last), request.done
            request.capacity = max(request.prompt, request.done)
            progress.append(Progress(request.request_id, request.capacity, request.done, request.rejected, keys))
            request.rejected = 0
        engine.send(progress)
        engine.catch_up()
        return bool(engine.requests)

    def _close(self, engine: SimEngine, closing: Closing) -> None:
        if self._alive(engine):
            engine._read_notices()
            if REQUEST in engine.requests:
                engine.send([], [Close(REQUEST, closing)])
                engine.catch_up()

    def _export(self) -> None:
        if not self._alive(self.source) or REQUEST not in self.source.requests:
            return
        event = ExportRequestKV(self.source.name, self.source.epoch, REQUEST, "t", TOKENS)
        answer = self.source_world.apply(event)
        if isinstance(answer, KVError):
            return
        assert isinstance(answer, Exported), answer
        self.ticket = TicketInfo("t", "here", answer.expected_tokens, answer.lease_ttl_ns)
        self.net.sources["t"] = (self.source_world, self.source.spec.name)

    # ------------------------------------------------------------------------- between the nodes

    def _ask(self, ticket_id: str, event: AcceptTicket | ReleaseTicket) -> object:
        answer = self._asked(ticket_id, event)
        if isinstance(event, ReleaseTicket) and answer is None:
            self.released[ticket_id] += 1
        if isinstance(event, AcceptTicket) and not isinstance(answer, KVError):
            self._claim_source()
        if self._lose_answer:
            self._lose_answer = False
            return self._lost(ticket_id)
        return answer

    def _lost(self, ticket_id: str) -> object:
        cut, self.net.cut = self.net.cut, True
        try:
            return self._asked(ticket_id, RenewTickets(()))
        finally:
            self.net.cut = cut

    def _claim_source(self) -> None:
        """The pages of the ticket, as they are now: they are read until it is gone."""
        state = self.source_world.node.state
        ticket = state.tickets["t"]
        group = state.groups[ticket.group]
        self._source_claims = [
            Claim.on(group.pools[c.device_pool], c.name, chain.table.page_lists(0, DEVICE, np.asarray(rows, np.int64)))
            for chain, rows in ((group.chains[number], rows) for number, rows in ticket.rows)
            for c in chain.spec.classes
        ]

    def _note_end(self, plan_id: int, outcome: CopyOutcome, error: KVError | None = None) -> None:
        self.ended.append(outcome)
        self._end_pull(plan_id, outcome, error)

    # ---------------------------------------------------------------------------------- faults

    def _dies(self, engine: SimEngine) -> None:
        if engine not in engine.world.engines:
            return
        engine.stale, engine.cut = True, False
        while not engine.lose_rank():
            pass
        engine.gone()
        self._replaced(engine)

    def _replaced(self, engine: SimEngine) -> None:
        """For the end: nobody is left who could leave."""
        self.simulation.engines = {key: e for key, e in self.simulation.engines.items() if e is not engine}

    def _suspect(self, engine: SimEngine) -> None:
        if self._alive(engine):
            engine.break_stream()
            self.simulation.dying.append(engine)
            self._replaced(engine)

    def _cuts(self, engine: SimEngine) -> None:
        """The stream breaks and comes back."""
        if self._alive(engine):
            engine.cut_stream()
            self.target_world.apply(Tick(), passes=TICK_NS)
            engine.resume_stream()

    def _daemon_dies(self, world: World, point: str) -> None:
        assert world.crashes is not None
        world.crashes.arm(at_point(SOURCE, point))

    def _pull_ends(self, outcome: CopyOutcome) -> None:
        for plan_id in list(self.target_world.pulls):
            self.target_world.end_pull(plan_id, outcome)

    def _lands_late(self) -> None:
        self._pull_ends(CopyOutcome.UNKNOWN_FATE)
        self.target_world.land_late()

    def _thief(self) -> None:
        """Another node wants the ticket; it gets it only where nobody has it yet, and never together with our pull."""
        state = self.source_world.node.state
        if self.ticket is None or "t" not in state.tickets:
            return
        held = state.tickets["t"].holder
        answer = self.source_world.apply(AcceptTicket("t", "thief"))
        if held:
            assert isinstance(answer, KVError), answer
        given = self.source_world.apply(ReleaseTicket("t", "thief"))
        assert held == "" or isinstance(given, (InvalidArgument, UnknownLease)), given
        if given is None:
            self.released["t"] += 1

    def _releases_twice(self) -> None:
        """The holder says it again after the end; before that it gives the ticket back too early."""
        if self.ticket is None:
            return
        for pull in self.target_world.pulls.values():
            self._ask("t", ReleaseTicket("t", pull.holder))
            assert isinstance(self._ask("t", ReleaseTicket("t", pull.holder)), KVError)

    def _presses(self) -> None:
        """Others want all the memory of the source: whatever is not held there is given away."""
        if not self._alive(self.source):
            return
        for request_id in range(REQUEST + 1, REQUEST + 5):
            text = Text()
            text.extend(OTHERS_TOKENS, self.draw)
            learn(text.digests)
            group = self.source_world.node.state.groups[self.source.spec.name]
            tables = [ChainTable(chain, group) for chain in self.source.spec.chains]
            request = SimRequest(request_id, text, self.source.namespace, OTHERS_TOKENS, 0, tables)
            keys = text.keys(0, OTHERS_TOKENS // PAGE_ROWS)
            self.source.send([], opens=[(Open(request_id, OTHERS_TOKENS, 0, keys, "x"), request)])
        closes = [Close(r, Closing.ABORTED) for r in list(self.source.requests) if r != REQUEST]
        self.source.send([], closes)
        self.source.catch_up()

    def _opens_again(self) -> None:
        """The target's engine gives up and asks anew, with the ticket that it has."""
        if self.ticket is None or not self._alive(self.target):
            return
        self._close(self.target, Closing.ABORTED)
        if not self.target_world.pulls:
            self._open(self.target, self.ticket)

    def _partition(self) -> None:
        self.simulation._wire(cut=not self.net.cut)

    def _loses_answer(self) -> None:
        self._lose_answer = True

    def _expires(self, world: World) -> None:
        world.apply(Tick(), passes=2 * LIMITS.ticket_ttl_ns)


FAULTS: dict[str, Callable[[Course], None]] = {
    "source aborts": lambda c: c._close(c.source, Closing.ABORTED),
    "source closes": lambda c: c._close(c.source, Closing.FINISHED),
    "source engine dies": lambda c: c._dies(c.source),
    "source engine is suspect": lambda c: c._suspect(c.source),
    "source stream is cut": lambda c: c._cuts(c.source),
    "source daemon dies over a record": lambda c: c._daemon_dies(c.source_world, "daemon.journal.append"),
    "source daemon dies with its effects": lambda c: c._daemon_dies(c.source_world, "daemon.apply.after"),
    "source mover dies": lambda c: c.source_world.kill_mover(),
    "source is full": lambda c: c._presses(),
    "lease expires": lambda c: c._expires(c.source_world),
    "lease expires and the source is full": lambda c: (c._expires(c.source_world), c._presses()),
    "lease is renewed": lambda c: c.source_world.apply(RenewTickets(("t", "unknown"))),
    "another node takes the ticket": lambda c: c._thief(),
    "released early and twice": lambda c: c._releases_twice(),
    "nodes are cut off or joined": lambda c: c._partition(),
    "an answer is lost": lambda c: c._loses_answer(),
    "target aborts": lambda c: c._close(c.target, Closing.ABORTED),
    "target opens again": lambda c: c._opens_again(),
    "target engine dies": lambda c: c._dies(c.target),
    "target engine is suspect": lambda c: c._suspect(c.target),
    "target stream is cut": lambda c: c._cuts(c.target),
    "target daemon dies over a record": lambda c: c._daemon_dies(c.target_world, "daemon.journal.append"),
    "target daemon dies with its effects": lambda c: c._daemon_dies(c.target_world, "daemon.apply.after"),
    "target mover dies": lambda c: c.target_world.kill_mover(),
    "pull fails": lambda c: c._pull_ends(CopyOutcome.FAILED),
    "pull is of unknown fate": lambda c: c._pull_ends(CopyOutcome.UNKNOWN_FATE),
    "bytes land late": lambda c: c._lands_late(),
}  # fmt: skip
