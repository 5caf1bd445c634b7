"""Session streams: replies and notices on their way to each engine."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvmanager.core.events import Notified, Opened, StepDone
from kvmanager.core.node import Node
from kvmanager.errors import Draining, KVError, Suspect
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.services.messages import notice_message, step_reply
from kvmanager.wire import MESSAGE_MAX_BYTES

EngineKey = tuple[str, int]
UNREAD_MAX_BYTES = 2 * MESSAGE_MAX_BYTES
"""What may wait for a client that does not read its stream; one message more and it is suspect."""
Outgoing = pb.StepReply | KVError | None
"""A reply, the error that ends the stream, or its end."""


class SessionStream:
    """One open stream: a bounded queue that its gRPC thread drains. Thread-safe; `put` never waits."""

    def __init__(self, key: EngineKey, most_messages: int, stalled: Callable[[str, int], None]) -> None:
        """`stalled(*key)` is called once, when more waits than `most_messages` or UNREAD_MAX_BYTES."""
        self.key = key
        self._most_messages = most_messages
        self._stalled = stalled
        self._waiting: deque[Outgoing] = deque()
        self._waiting_bytes = 0
        self._ended = False
        self._changed = threading.Condition()

    def put(self, message: pb.StepReply) -> None:
        """Queues a message. With too many unread ones the stream ends with Suspect, and what waited is dropped.

        Nothing is lost by that: the core keeps replies and notices until they were seen.
        """
        size = message.ByteSize()
        with self._changed:
            if self._ended:
                return
            # A single message of any size that the wire allows is taken.
            full = self._waiting and self._waiting_bytes + size > UNREAD_MAX_BYTES
            if not full and len(self._waiting) < self._most_messages:
                self._waiting.append(message)
                self._waiting_bytes += size
                self._changed.notify()
                return
            unread = f"{len(self._waiting)} messages ({self._waiting_bytes} bytes)"
            self._waiting.clear()
        self.end(Suspect(f"{unread} of the session were not read; read it all the time, and open a new one now"))
        self._stalled(*self.key)

    def get(self) -> Outgoing:
        """The next message; waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            message = self._waiting.popleft()
            if isinstance(message, pb.StepReply):
                self._waiting_bytes -= message.ByteSize()
            return message

    def end(self, error: KVError | None = None) -> None:
        """Ends the stream after what waits, with an error or without; later ends and messages are dropped."""
        with self._changed:
            if not self._ended:
                self._ended = True
                self._waiting.append(error)
                self._changed.notify()


class _Refused:
    """Opens that the daemon refused before the core saw them, by step number: a resend gets the same answer."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._by_number: OrderedDict[int, tuple[Opened, ...]] = OrderedDict()

    def first(self, number: int, refused: tuple[Opened, ...]) -> tuple[Opened, ...]:
        """What was refused when this number came first: now, or earlier."""
        first = self._by_number.setdefault(number, refused)
        while len(self._by_number) > self._kept:
            self._by_number.popitem(last=False)
        return first


def _forgotten() -> KVError:
    return Draining("the daemon refused this before it was restarted; open it again in a new message")


class SessionHub:
    """The newest stream of each engine epoch. `answer` and `notify` run in the core."""

    def __init__(
        self, boot_id: int, stored_replies: int, unread_messages: int, stalled: Callable[[str, int], None]
    ) -> None:
        """`unread_messages`: most that wait for a client to read. `stalled(engine, epoch)`: one does not read."""
        self._boot_id = boot_id
        self._stored_replies = stored_replies
        self._unread_messages = unread_messages
        self._stalled = stalled
        self._streams: dict[EngineKey, SessionStream] = {}
        self._refused: dict[EngineKey, _Refused] = {}
        self._cancels: set[Callable[[], object]] = set()
        self._lock = threading.Lock()

    def open(self, key: EngineKey) -> SessionStream:
        """A new stream; an older one of the same epoch ends."""
        stream = SessionStream(key, self._unread_messages, self._stalled)
        with self._lock:
            older = self._streams.get(key)
            self._streams[key] = stream
        if older is not None:
            older.end()
        return stream

    def closed(self, stream: SessionStream) -> None:
        """The stream is over."""
        with self._lock:
            if self._streams.get(stream.key) is stream:
                del self._streams[stream.key]

    @contextmanager
    def ended_by(self, cancel: Callable[[], object]) -> Iterator[None]:
        """While it runs, `end_all` also calls `cancel`: of a stream that has no session."""
        with self._lock:
            self._cancels.add(cancel)
        try:
            yield
        finally:
            with self._lock:
                self._cancels.discard(cancel)

    def answer(
        self, stream: SessionStream, node: Node, named: tuple[int, ...], refused: tuple[Opened, ...]
    ) -> Callable[[StepDone | KVError], None]:
        """What to do with the core's answer to a step: send it with the notices not seen yet, or end the stream.

        `named`: requests that the message opens. `refused`: those of them that were kept from the core. Each gets one
        answer: the core's, else what it was refused with when it came first. That a daemon before this one refused
        it, nobody knows any more; the core's stored reply says nothing of it then.
        """

        def deliver(answer: StepDone | KVError) -> None:
            if isinstance(answer, KVError):
                stream.end(answer)
                return
            engine = node.state.any_engine(*stream.key)
            notices = list(engine.notices) if engine else []
            earlier = self._refused.setdefault(stream.key, _Refused(self._stored_replies))
            known = {opened.request_id for opened in answer.opened}
            kept = [opened for opened in earlier.first(answer.number, refused) if opened.request_id not in known]
            known.update(opened.request_id for opened in kept)
            lost = [Opened(number, "refused", error=_forgotten()) for number in named if number not in known]
            stream.put(step_reply(self._boot_id, replace(answer, opened=(*answer.opened, *kept, *lost)), notices))

        return deliver

    def forget(self, engine: str, epoch: int) -> None:
        """The epoch is gone: nothing is sent again."""
        self._refused.pop((engine, epoch), None)

    def notify(self, effect: Notified) -> None:
        """Pushes a notice on the engine's stream; without one it waits in the core."""
        with self._lock:
            stream = self._streams.get((effect.engine, effect.epoch))
        if stream is not None:
            message = pb.StepReply(boot_id=self._boot_id, notices=[notice_message(effect.notice)])
            stream.put(message)

    def end_all(self, error: KVError | None = None) -> None:
        """Ends every stream, with an error or without."""
        with self._lock:
            streams, cancels = list(self._streams.values()), list(self._cancels)
        for stream in streams:
            stream.end(error)
        for cancel in cancels:
            cancel()
