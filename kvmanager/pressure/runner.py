"""Carries out a schedule on live nodes and asks the observer after each action whether all still holds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvmanager.clients.engine import RequestStep
from kvmanager.errors import InvalidArgument, KVError
from kvmanager.pressure.content import Text
from kvmanager.pressure.driver import Driver, MakeDriver, Target
from kvmanager.pressure.driverprocess import DriverProcess
from kvmanager.pressure.faults import NodeActions
from kvmanager.pressure.nodes import Node
from kvmanager.pressure.observer import Book, Observer, Violation
from kvmanager.pressure.places import Places
from kvmanager.pressure.schedule import Action, Schedule
from kvmanager.pressure.views import Views
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import error_from_proto

PATIENCE_S: Final = 60.0
"""Longest wait for progress and for what must end."""
VERIFIED: Final = 12
"""Texts that are opened once more at the end."""
VERIFY_FROM: Final = 1 << 40
"""Their request ids."""
LOOK_EVERY: Final = 6
"""Actions between two looks at the daemon's account."""


@dataclass
class Client:
    """One engine under pressure."""

    number: int
    node: int
    name: str
    driver: Driver
    paused: bool = False

    @property
    def process(self) -> DriverProcess | None:
        """Where it is a process of its own."""
        return self.driver if isinstance(self.driver, DriverProcess) else None


@dataclass
class Tally:
    """What a run did."""

    actions: int = 0
    granted: int = 0
    refused: int = 0
    hits: int = 0
    failed_pulls: int = 0
    rows_checked: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)


class Runner(NodeActions):
    """One run of one schedule. `make_views` may be replaced by views that lie, in tests."""

    def __init__(
        self,
        nodes: Sequence[Node],
        make: MakeDriver,
        process_command: Sequence[str],
        *,
        always_process: bool = False,
        make_views: Callable[[Node], Views] = Views,
    ) -> None:
        super().__init__(nodes)
        self._make, self._command, self._always = make, list(process_command), always_process
        self._views = [make_views(node) for node in nodes]
        self.observers: list[Observer] = []
        self.clients: dict[int, Client] = {}
        self.tally = Tally()
        self._tickets: dict[int, tuple[pb.Ticket, Text, int]] = {}
        self._finished: dict[tuple[Text, int], int] = {}
        self._connections = 0

    # --------------------------------------------------------------------------------- the whole run

    def run(self, schedule: Schedule) -> None:
        """Everything, then all leave. Raises Violation; what was attached is left in any case."""
        quiet = [not view.leftovers(quiet=True) for view in self._views]
        for node in self.nodes:
            self.observers.append(Observer(node.target, node.room))
        self.note_boots(self._views)
        try:
            for number, action in enumerate(schedule.actions, 1):
                self._act(action)
                self.tally.actions += 1
                if number % LOOK_EVERY == 0:
                    self._look()
            self.settle()
            self._look()
            self._verify()
        except KVError as error:
            self._judge_error(error)
        finally:
            self._leave()
        for node, view, was_quiet in zip(self.nodes, self._views, quiet, strict=True):
            self._check_leftovers(node, view, was_quiet)

    def _act(self, action: Action) -> None:
        method: Callable[..., None] | None = getattr(self, f"do_{action.do}", None)
        if method is None:
            raise Violation("refusal", f"no action {action.do!r}")
        method(**action.args)

    def _judge_error(self, error: KVError) -> None:
        raise Violation("death", f"a client or an operator was refused as a whole: {type(error).__name__}: {error}")

    def _leave(self) -> None:
        self.undo_faults()
        for client in list(self.clients.values()):
            with contextlib.suppress(KVError, AssertionError, OSError):
                self.do_leave(client.number)
            self._forget(client)
        self.tally.rows_checked = sum(observer.rows_checked for observer in self.observers)

    def _check_leftovers(self, node: Node, view: Views, quiet: bool) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while left := view.leftovers(quiet):
            if time.monotonic() > give_up:
                raise Violation("leak", f"node {node.name}, all have left: {'; '.join(left)}")
            time.sleep(0.05)

    # ------------------------------------------------------------------------------------ clients

    def do_connect(self, client: int, node: int | None = None, process: bool = False) -> None:
        """An engine comes. A group takes one: where it has one of ours, this client is that one, too."""
        place = client % len(self._places_of_first()) if node is None else node
        if client in self.clients or place in self.stopped:
            return
        there = next((known for known in self.clients.values() if known.node == place), None)
        if there is None:
            self._connections += 1
            name = f"pressure-{client}-{self._connections}"
            there = Client(client, place, name, self._attach(self.nodes[place].target, name, process))
        self.clients[client] = there

    def _places_of_first(self) -> list[int]:
        return self.beside(0)

    def _attach(self, target: Target, name: str, process: bool) -> Driver:
        """A driver; the group may be taken for a while by an engine of ours that has just left or died."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                if process or self._always:
                    return DriverProcess(self._command, target, name)
                return self._make(target, name)
            except InvalidArgument as error:
                if "is used by engine 'pressure-" not in str(error) or time.monotonic() > give_up:
                    raise
            time.sleep(0.05)

    def do_leave(self, client: int) -> None:
        """It goes, whatever it has open."""
        if (known := self._usable(client)) is not None:
            try:
                known.driver.leave()
            finally:
                self._forget(known)

    def do_kill(self, client: int) -> None:
        """Its process gets SIGKILL."""
        known = self.clients.get(client)
        if known is not None and known.process is not None:
            known.process.kill()
            self._forget(known)
            for observer in self.observers:
                observer.disturbed = True

    def do_pause(self, client: int) -> None:
        """Its process is stopped: it reads nothing and says nothing."""
        known = self.clients.get(client)
        if known is not None and known.process is not None:
            known.process.stop()
            known.paused = True

    def do_resume(self, client: int) -> None:
        """It goes on."""
        known = self.clients.get(client)
        if known is not None and known.process is not None:
            known.process.go()
            known.paused = False

    def _forget(self, client: Client) -> None:
        self.clients = {number: known for number, known in self.clients.items() if known is not client}
        observer = self.observers[client.node]
        for book in list(observer.books.values()):
            observer.closed(book)

    def _usable(self, client: int) -> Client | None:
        known = self.clients.get(client)
        return None if known is None or known.paused or known.node in self.stopped else known

    def _find(self, client: int, request: int, state: str = "running") -> tuple[Client, Observer, Book] | None:
        known = self._usable(client)
        if known is None:
            return None
        observer = self.observers[known.node]
        book = observer.books.get((client, request))
        return None if book is None or book.state != state else (known, observer, book)

    # ----------------------------------------------------------------------------------- requests

    def do_open(
        self, client: int, request: int, text: list[list[int]], prompt: int = 0, growth: int = 0, session: str = "",
        ticket: pb.Ticket | None = None,
    ) -> None:  # fmt: skip
        """A request for a text, of which `prompt` tokens are the prompt (0: all but the growth)."""
        known = self._usable(client)
        if known is None or (client, request) in self.observers[known.node].books:
            return
        observer, whole = self.observers[known.node], Text(tuple((int(p), int(n)) for p, n in text))
        tokens = prompt or len(whole.tokens) - growth
        target = self.nodes[known.node].target
        places = Places(target.shards, target.page_rows)
        book = Book(client, known.name, request, whole, tokens, growth, places, ticket=ticket, session=session)
        observer.books[client, request] = book
        self._ask(known, observer, book)

    def _ask(self, client: Client, observer: Observer, book: Book) -> None:
        keys = book.text.keys(self.nodes[client.node].target.namespace, book.prompt)
        book.keys_sent = len(keys)
        message = pb.OpenRequest(
            request_id=book.request, prompt_tokens=book.prompt, growth_tokens=book.growth, prompt_keys=keys,
            session=pb.SessionHint(session_id=book.session), ticket=book.ticket,
        )  # fmt: skip
        reply = self._step(client, opens=[message])
        (opened,) = reply.opened
        self._take(client, observer, book, opened)

    def _take(self, client: Client, observer: Observer, book: Book, opened: pb.OpenReply) -> None:
        if opened.state == pb.OpenReply.RUNNABLE:
            observer.granted(book, opened, client.driver)
            self.tally.granted += 1
            self.tally.hits += bool(book.cached)
        elif opened.state == pb.OpenReply.WAITING:
            book.state = "waiting"
        else:
            self._refuse(client, observer, book, error_from_proto(opened.error))

    def _refuse(self, client: Client, observer: Observer, book: Book, error: KVError) -> None:
        self.tally.refused += 1
        self.tally.by_reason[error.reason] = self.tally.by_reason.get(error.reason, 0) + 1
        observer.refused(book, error, self._views[client.node].capacities())
        if book.ticket is not None and not book.retry_at:
            self.tally.failed_pulls += 1
            observer.closed(book)
        elif not getattr(error, "retry_after_ns", 1):
            observer.closed(book)  # it will never fit, and this was true

    def _step(
        self, client: Client, opens: Sequence[pb.OpenRequest] = (), rows: Sequence[RequestStep] = (),
        closes: Sequence[pb.CloseRequest] = (),
    ) -> pb.StepReply:  # fmt: skip
        """One message; errors of its rows and closes are violations, except of requests that have failed meanwhile."""
        reply = client.driver.step(opens, rows, closes)
        observer = self.observers[client.node]
        for residency in reply.residency:
            book = observer.find(residency.request_id)
            if book is not None and book.state == "running":
                observer.moved(book, residency)
        grown = {growth.request_id for growth in reply.growth if growth.HasField("error")}
        for failed in reply.errors:
            book = observer.find(failed.request_id)
            error = error_from_proto(failed.error)
            if book is not None and book.state == "waiting":
                self._refuse(client, observer, book, error)
            elif book is not None and failed.request_id not in grown:
                raise Violation("refusal", f"a row or close of {book.name}: {type(error).__name__}: {error}")
        return reply

    def do_advance(self, client: int, request: int, to: int, capacity: int = 0) -> None:
        """Computes up to `to` tokens: writes their rows, commits them, and asks for room for `capacity`."""
        found = self._find(client, request)
        if found is None:
            return
        known, observer, book = found
        to = min(to, len(book.text.tokens), book.most)
        wanted = min(max(capacity, to, book.capacity), book.most)
        if wanted > book.capacity:
            self._row(known, observer, book, RequestStep(request, wanted, book.committed))
        if to > book.committed:
            known.driver.write(request, book.committed, book.text.digests[book.committed : to])
            keys = book.text.keys(self.nodes[known.node].target.namespace, to)
            new = keys[book.keys_sent :]
            book.committed, book.keys_sent = to, max(book.keys_sent, len(keys))
            self._row(known, observer, book, RequestStep(request, book.capacity, to, 0, new))
            observer.note_committed(book)

    def _row(self, client: Client, observer: Observer, book: Book, row: RequestStep) -> None:
        reply = self._step(client, rows=[row])
        book.capacity = row.capacity_tokens
        for growth in reply.growth:
            if growth.request_id == book.request:
                observer.grown(book, growth, row.capacity_tokens)
        if book.places.tokens < book.capacity:
            raise Violation("promise", f"{book.name} has places for {book.places.tokens} of {book.capacity} tokens")

    def do_draft(self, client: int, request: int, tokens: int) -> None:
        """Takes room for drafts and has them rejected."""
        found = self._find(client, request)
        if found is None:
            return
        known, observer, book = found
        wanted = min(book.committed + tokens, book.most)
        if book.committed < book.prompt or wanted <= book.capacity:
            return
        self._row(known, observer, book, RequestStep(request, wanted, book.committed))
        rejected = wanted - book.committed
        self._row(known, observer, book, RequestStep(request, max(book.committed, 1), book.committed, rejected))

    def do_close(self, client: int, request: int, aborted: bool = False) -> None:
        """Ends a request in whatever state it is; a finished one's rows are looked at first."""
        for state in ("running", "waiting"):
            found = self._find(client, request, state)
            if found is not None:
                known, observer, book = found
                if state == "running" and not aborted:
                    observer.check_rows(book, book.committed, "end", known.driver)
                    self._finished[book.text, known.node] = book.committed
                reason = pb.ABORTED if aborted else pb.FINISHED
                self._step(known, closes=[pb.CloseRequest(request_id=request, reason=reason)])
                observer.closed(book)
                return
        if (found := self._find(client, request, "refused")) is not None:
            found[1].closed(found[2])

    def do_export(self, client: int, request: int, ticket: int) -> None:
        """A ticket on what is committed, if that is all of the prompt."""
        found = self._find(client, request)
        if found is not None and found[2].committed >= found[2].prompt:
            known, _, book = found
            self._tickets[ticket] = known.driver.export(request), book.text, book.committed

    def do_pull(self, client: int, request: int, ticket: int) -> None:
        """Opens a request by ticket on another node."""
        if ticket in self._tickets and client in self.clients:
            shown, text, tokens = self._tickets.pop(ticket)
            self.do_open(client, request, [list(piece) for piece in text.pieces], tokens, 0, "", shown)

    # ------------------------------------------------------------------------------------ progress

    def settle(self) -> None:
        """Every fault is undone; every request goes on to its end. Raises Violation when none does for long."""
        self.undo_faults()
        for client in self.clients.values():
            if client.paused:
                self.do_resume(client.number)
        give_up = time.monotonic() + PATIENCE_S
        while books := [book for observer in self.observers for book in observer.books.values()]:
            moved = [self._go_on(book) for book in books]
            if any(moved):
                give_up = time.monotonic() + PATIENCE_S
            elif time.monotonic() > give_up:
                waits = ", ".join(f"{book.name} ({book.state}, {book.most} tokens)" for book in books)
                raise Violation("progress", f"nothing else is open, and none of these goes on: {waits}")
            else:
                time.sleep(0.01)

    def _go_on(self, book: Book) -> bool:
        client = self.clients[book.client]
        observer = self.observers[client.node]
        if book.state == "refused":
            if time.monotonic() < book.retry_at:
                return False
            self._ask(client, observer, book)
            return book.state != "refused"
        if book.state == "waiting":
            return self._hear(client, observer, book)
        self.do_advance(book.client, book.request, book.most)
        self.do_close(book.client, book.request)
        return True

    def _hear(self, client: Client, observer: Observer, book: Book) -> bool:
        try:
            opened = client.driver.ready(book.request)
        except KVError as error:
            if not isinstance(error, KVError) or book.ticket is None:
                raise
            self._refuse(client, observer, book, error)
            return True
        if opened is None:
            return False
        self._take(client, observer, book, opened)
        return True

    def do_settle(self) -> None:
        """In the middle of a schedule."""
        self.settle()

    def do_poll(self) -> None:
        """Hears what has become ready, without waiting."""
        for observer in self.observers:
            for book in list(observer.books.values()):
                client = self._usable(book.client)
                if book.state == "waiting" and client is not None:
                    self._hear(client, observer, book)

    def do_hear(self, most_s: float) -> None:
        """Hears until nobody waits any more, or for so long."""
        give_up = time.monotonic() + most_s
        while time.monotonic() < give_up:
            self.do_poll()
            waiting = [book for observer in self.observers for book in observer.books.values()]
            if not any(book.state == "waiting" and self._usable(book.client) for book in waiting):
                return
            time.sleep(0.02)

    def do_retry(self) -> None:
        """Asks once more for whoever was refused."""
        for observer in self.observers:
            for book in list(observer.books.values()):
                client = self._usable(book.client)
                if book.state == "refused" and client is not None and time.monotonic() >= book.retry_at:
                    self._ask(client, observer, book)

    # ----------------------------------------------------------------------------------------- looks

    def _look(self) -> None:
        """The daemon's account of its bytes against the observer's."""
        for number, (view, observer) in enumerate(zip(self._views, self.observers, strict=True)):
            if number in self.stopped:
                continue
            self.check_boot(number, view)
            observer.check_account(view.pools(), view.status().ledger_ok)

    def _verify(self) -> None:
        """Every finished text once more: what it hits is right."""
        for number, ((text, place), tokens) in enumerate(list(self._finished.items())[-VERIFIED:]):
            client = -1 - place
            pieces: Any = [list(piece) for piece in text.pieces]
            self.do_connect(client, place)
            self.do_open(client, VERIFY_FROM + number, pieces, prompt=tokens)
            self.settle()
