"""What the messages of an engine's session do, whichever way they came."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvmanager.core.events import EngineResumed, Opened
from kvmanager.core.node import Node
from kvmanager.daemon.compatibility import check_ticket
from kvmanager.daemon.loop import OwnerLoop
from kvmanager.daemon.membership import Membership, Registration
from kvmanager.daemon.sessions import SessionHub, SessionStream
from kvmanager.errors import InvalidArgument, KVError
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.services.gate import Gate, check_boot
from kvmanager.services.messages import check_token_ids, step_event


class SessionSteps:
    """Begins sessions and hands their steps to the core. Thread-safe; one thread reads a session."""

    def __init__(
        self,
        boot_id: int,
        loop: OwnerLoop,
        node: Node,
        membership: Membership,
        hub: SessionHub,
        gate: Gate,
        hot_rows: Callable[[str, int, int, int], None],
    ) -> None:
        """`hot_rows(engine, epoch, hits, misses)` is told what engines report."""
        self._boot_id = boot_id
        self._loop = loop
        self._node = node
        self._membership = membership
        self._hub = hub
        self._gate = gate
        self._hot_rows = hot_rows

    @contextmanager
    def session(self, token: str, first: pb.StepRequest) -> Iterator[SessionStream]:
        """The stream of the engine that the first message names, open meanwhile; its end makes the engine suspect.

        Raises StaleBoot, StaleEpoch, and what the core says of an engine that may not go on.
        """
        check_boot(first, self._boot_id)
        key = (self._membership.engine_of(token, first.epoch), first.epoch)
        self._membership.stream_opened(*key)
        stream = self._hub.open(key)
        try:
            self._loop.call(EngineResumed(*key))
            yield stream
        finally:
            self._hub.closed(stream)
            self._membership.stream_ended(*key)

    def read(self, stream: SessionStream, messages: Iterable[pb.StepRequest]) -> None:
        """Takes steps until there are no more, or one can't be taken; then ends the stream behind their answers.

        A KVError that `messages` raises is what the stream ends with.
        """
        try:
            for message in messages:
                self._step(stream, message)
        except KVError as error:
            stream.end(error)
        finally:
            self._loop.settle()  # what the client sent is answered first
            stream.end()

    def _step(self, stream: SessionStream, message: pb.StepRequest) -> None:
        check_boot(message, self._boot_id)
        if message.epoch != stream.key[1]:
            raise InvalidArgument(
                f"step {message.number} names epoch {message.epoch}, this stream began with epoch {stream.key[1]}; "
                "open a stream for each epoch"
            )
        registration = self._membership.registration(*stream.key)
        event = step_event(stream.key[0], message, registration.namespace)
        if message.HasField("hot_rows"):
            self._hot_rows(*stream.key, message.hot_rows.hits, message.hot_rows.misses)
        admitted = []
        refused = []
        for entry, wanted in zip(message.open, event.opens, strict=True):
            try:
                self._check_open(entry, registration)
                admitted.append(wanted)
            except KVError as error:
                refused.append(Opened(wanted.request_id, "refused", error=error))
        named = tuple(wanted.request_id for wanted in event.opens)
        answer = self._hub.answer(stream, self._node, named, tuple(refused))
        self._loop.send(replace(event, opens=tuple(admitted)), answer)

    def _check_open(self, entry: pb.OpenRequest, registration: Registration) -> None:
        """Raises what no state of the core can change: it drains, token ids lack, the ticket is another's."""
        self._gate.check()
        check_token_ids(registration.namespace, entry.prompt_keys, entry.prompt_token_ids, "prompt_token_ids")
        if entry.HasField("ticket"):
            kv_format = self._node.state.groups[registration.group].spec.kv_format
            check_ticket(entry.ticket, registration.namespace, kv_format)
