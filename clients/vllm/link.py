"""The scheduler's line to the daemon: a thread of its own makes the calls, so that no hook of the engine ever waits.

The daemon away, slow or restarted is a miss: calls fail at once while it is down, and the thread comes back by itself.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc

from kvmanager.clients.attach import Attachment, attach, grpc_channel
from kvmanager.clients.callline import Question, SteadyLine
from kvmanager.clients.callqueue import Answer, CallQueue
from kvmanager.clients.engine import EngineClient
from kvmanager.clients.leases import Lease, Questions
from kvmanager.clients.nowaitline import NoWaitLine
from kvmanager.clients.vllm.bell import Bell
from kvmanager.clients.vllm.calls import EngineCalls
from kvmanager.clients.vllm.reads import Reads
from kvmanager.clients.vllm.settings import Settings
from kvmanager.errors import KVError, NotReady, StaleBoot, StaleEpoch, Suspect, UnknownLease, VersionMismatch
from kvmanager.protos import kvmanager_pb2 as pb

LOOK_S: Final = 0.1
"""How often an idle line looks whether the daemon is still there."""
RETRY_S: Final = 0.1
TURN_TIMEOUT_S: Final = 1.0
REFUSED_RETRY_S: Final = 2.0
MOST_WAITING: Final = 4096
T = TypeVar("T")
Call = Callable[[EngineCalls], Any]
_log = logging.getLogger("vllm.kvmanager")


@dataclass
class _Wanted:
    """A call, for the epoch in which it means something; one with `kept` is said again after a break."""

    call: Call
    answer: Answer[Any]
    epoch: int
    kept: bool


class _Connection:
    """One registration."""

    def __init__(
        self, settings: Settings, namespace: pb.Namespace, fingerprint: str, ranks: int, noticed: Callable[[], None]
    ) -> None:
        with contextlib.ExitStack() as undo:
            self.attachment: Attachment = attach(settings.runtime_dir, "engine", settings.engine)
            undo.callback(self.attachment.close)
            channel = grpc_channel(self.attachment)
            undo.callback(channel.close)
            self.client = EngineClient(
                channel, attachment=self.attachment, engine=settings.engine, group=settings.group, namespace=namespace,
                layout_fingerprints=[fingerprint], ranks=ranks, renew=self.attachment.renew,
                noticed=noticed,
            )  # fmt: skip
            self.client.step()  # its stream tells the daemon that this epoch lives
            self.calls = EngineCalls(self.attachment, channel, self.client, settings.call_timeout_s)
            undo.callback(self.calls.hang_up)
            self.questions = Questions(self.client)
            self._timeout_s = settings.call_timeout_s
            self._undo = undo.pop_all()

    def look(self) -> None:
        """Goes on with the daemon that is there now. Raises NotReady while there is none, StaleBoot for a cold one."""
        boot_id = self.attachment.renew()
        if boot_id != self.client.boot_id:
            self.client.boot_id = boot_id
            self.client.step()

    def reads(self, heard: Callable[[KVError | None], None]) -> Reads:
        """For questions that wait for nothing else. Raises NotReady."""
        line = NoWaitLine(self.attachment, self._timeout_s, heard)
        return Reads(line, CallQueue(SteadyLine(self.attachment, self._timeout_s), heard), self.questions)

    def close(self) -> None:
        """Leaves on purpose."""
        with self._undo, contextlib.suppress(KVError):
            self.client.close()


class Link:
    """Thread-safe, but for `read` and `hear`; nothing here waits but the line's own thread."""

    def __init__(
        self, settings: Settings, namespace: pb.Namespace, fingerprint: str, ranks: int, config_hint: str = ""
    ) -> None:
        """`config_hint`: what the node's configuration should say, for people."""
        self._connect: Callable[[], _Connection] = lambda: _Connection(
            settings, namespace, fingerprint, ranks, self._poke
        )
        self._hint = config_hint
        self._wanted: queue.SimpleQueue[_Wanted | None] = queue.SimpleQueue()
        self._again: deque[_Wanted] = deque()
        self._pulls: dict[int, Answer[Lease | None]] = {}
        self._pulls_lock = threading.Lock()
        self._reads: Reads | None = None
        self._used: Reads | None = None  # those of before, until the scheduler's thread asks again
        self._in_doubt = False
        self._stopping = False
        self.epoch = 0
        """Of the registration; 0 before the first."""
        self.up = False
        """Whether the daemon answered last."""
        self.bell = Bell()
        """For who waits for an answer."""
        self.checksum_one_in = 0
        """Of how many stored pages one is to have a checksum; 0: none."""
        self._refused = ""
        self._thread = threading.Thread(target=self._run, name="kvmanager-link", daemon=True)
        self._thread.start()

    def read(self, make: Callable[[Questions], Question[T]], *, here: bool) -> Answer[T]:
        """Makes a call at once, beside the others, whose order does not matter to it; fails as `ask` does.

        here: in this thread, which is faster and takes its time. One thread reads, and takes the answers with `hear`.
        """
        reads = self._reads
        if not self.up or reads is None or not self._use(reads):
            answer: Answer[T] = Answer()
            answer.set_exception(NotReady("the daemon is away"))
            return answer
        return reads.ask(make, here=here)

    def hear(self) -> None:
        """Takes the answers to what was read that are there."""
        if self._used is not None:
            self._used.hear()

    def _use(self, reads: Reads) -> bool:
        if reads is self._used:
            return True
        if not reads.adopt(self.bell):
            return False
        if self._used is not None:
            self._used.close()
        self._used = reads
        return True

    def _heard(self, error: KVError | None) -> None:
        """A read was answered, or their line broke."""
        if error is not None:
            self._in_doubt = True
            self._poke()

    def _open_reads(self) -> None:
        assert self._connection is not None
        if self._reads is not None and self._reads.broken:
            self._reads.hang_up()
            self._reads = None
        if self._reads is None:
            self._reads = self._connection.reads(self._heard)

    def ask(self, call: Callable[[EngineCalls], T]) -> Answer[T]:
        """Makes a call soon; fails with NotReady while the daemon is away."""
        return self._put(call, kept=False)

    def tell(self, call: Callable[[EngineCalls], T]) -> Answer[T]:
        """Makes a call that ends something, again and again until it is heard; fails when its epoch is over."""
        return self._put(call, kept=True)

    def landed(self, request_id: int) -> Answer[Lease | None]:
        """What a pull brings, once it is there; fails with why it does not come. Cancel it to ask no more."""
        answer: Answer[Lease | None] = Answer()
        with self._pulls_lock:
            self._pulls[request_id] = answer
        self._poke()
        return answer

    def _poke(self) -> None:
        """Has the thread look at pulls, and at the session where that is in doubt."""
        self._wanted.put(None)

    def turn_ended(self, session_id: str, stop_reason: str) -> None:
        """A session's turn is over."""
        self.ask(lambda _calls: self._end_turn(session_id, stop_reason))

    def _end_turn(self, session_id: str, stop_reason: str) -> None:
        assert self._connection is not None
        end = pb.TurnEnd(session_id=session_id, stop_reason=stop_reason)
        self._connection.client.step(turn_ends=[end], timeout_s=TURN_TIMEOUT_S)

    def _put(self, call: Callable[[EngineCalls], T], *, kept: bool) -> Answer[T]:
        answer: Answer[T] = Answer()
        if (not self.up and not kept) or self._wanted.qsize() > MOST_WAITING or not self.epoch:
            answer.set_exception(NotReady("the daemon is away"))
            return answer
        self._wanted.put(_Wanted(call, answer, self.epoch, kept))
        return answer

    def close(self) -> None:
        """Leaves; what was not heard is given up. By the thread that reads."""
        self._stopping = True
        self._wanted.put(None)
        self._thread.join(timeout=5.0)
        if self._used is not None:
            self._used.close()
            self._used = None
        self.bell.close()

    # ------------------------------------------------------------------------------ the thread

    _connection: _Connection | None = None

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._serve()
            except Exception as error:
                self._down(error)
        self._fail_waiting(NotReady("the engine shuts down"))
        self._forget()

    def _serve(self) -> None:
        """Connects, or goes on, and then makes calls until something breaks."""
        if self._connection is None:
            self._connection = self._connect()
            client = self._connection.client
            self.epoch, self.checksum_one_in, self._refused = client.epoch, client.checksum_one_in, ""
            of = client.namespace
            _log.info("registered as epoch %d: model %r, revision %r", self.epoch, of.model, of.weights_revision)
        else:
            self._connection.look()
        self._open_reads()
        self.up = True
        while self._again:
            self._make(self._again[0])
            self._again.popleft()
        while not self._stopping:
            try:
                wanted = self._wanted.get(timeout=LOOK_S)
            except queue.Empty:
                self._connection.look()
                self._look_at_pulls()
                continue
            if wanted is not None:
                self._make(wanted)
            else:
                self._check_session()
                self._look_at_pulls()

    def _check_session(self) -> None:
        """After a read that failed: a message shows whether the daemon is there and trusts us."""
        assert self._connection is not None
        if self._in_doubt:
            self._in_doubt = False
            self._connection.look()
            self._connection.client.step()
            self._open_reads()

    def _look_at_pulls(self) -> None:
        assert self._connection is not None
        with self._pulls_lock:
            self._pulls = {request: answer for request, answer in self._pulls.items() if not answer.cancelled}
            waiting = list(self._pulls.items())
        for request_id, answer in waiting:
            lease, failure = None, None
            try:
                lease = self._connection.calls.landed(request_id)
            except KVError as error:
                failure = error
            if lease is None and failure is None:
                continue
            with self._pulls_lock:
                del self._pulls[request_id]
            if failure is not None:
                answer.set_exception(failure)
            else:
                answer.set_result(lease)

    def _make(self, wanted: _Wanted) -> None:
        """Makes one call. Raises when the daemon is away or does not know us; the call is then told, or kept."""
        assert self._connection is not None
        if wanted.epoch != self.epoch:
            wanted.answer.set_exception(StaleEpoch("the daemon started anew"))
            return
        try:
            wanted.answer.set_result(wanted.call(self._connection.calls))
        except Suspect as error:
            self._unheard(wanted, error)
            raise
        except (NotReady, StaleBoot) as error:
            self._unheard(wanted, error)
            raise NotReady("the daemon is away or was replaced") from error  # whether it knows us shows when we look
        except UnknownLease as error:
            wanted.answer.set_exception(error)  # a call that was heard before: it has ended
        except KVError as error:
            wanted.answer.set_exception(error)
            if wanted.kept:
                _log.warning("the end of a lease was refused: %s", error)
            if isinstance(error, StaleEpoch):
                raise
        except Exception as error:
            wanted.answer.set_exception(error)
            raise

    def _unheard(self, wanted: _Wanted, error: KVError) -> None:
        if not wanted.kept:
            wanted.answer.set_exception(error)
        elif not self._again or self._again[0] is not wanted:
            self._again.append(wanted)

    def _down(self, error: Exception) -> None:
        """The daemon is away, or does not know us any more."""
        if self.up:
            _log.warning("the daemon is away: %s", error)
        self.up = False
        self._fail_waiting(error)
        if isinstance(error, KVError) and not isinstance(error, NotReady) and self._connection is None:
            self._say_refused(error)
            time.sleep(REFUSED_RETRY_S)
        if isinstance(error, (StaleBoot, StaleEpoch)) or not isinstance(error, (KVError, grpc.RpcError)):
            self._forget()
        if isinstance(error, Suspect) and self._connection is not None:
            with contextlib.suppress(KVError, grpc.RpcError):
                self._connection.client.step()
        time.sleep(RETRY_S)

    def _say_refused(self, error: KVError) -> None:
        """Once for each reason: it is tried again and again."""
        if str(error) == self._refused:
            return
        self._refused = str(error)
        if isinstance(error, VersionMismatch):
            _log.error("refused, the engine runs without the cache: %s", error)
        else:
            _log.error("refused: %s; the node's configuration needs a group like\n%s", error, self._hint)

    def _forget(self) -> None:
        """The epoch is over: nothing of it needs an end any more."""
        if self._connection is not None:
            self._connection.close()
        if self._reads is not None:
            self._reads.hang_up()
        self._connection = self._reads = None
        with self._pulls_lock:
            pulls, self._pulls = self._pulls, {}
        for pull in pulls.values():
            pull.set_exception(StaleEpoch("the daemon started anew"))
        for wanted in self._again:
            wanted.answer.set_exception(StaleEpoch("the daemon started anew"))
        self._again.clear()

    def _fail_waiting(self, error: Exception) -> None:
        while not self._wanted.empty():
            wanted = self._wanted.get_nowait()
            if wanted is None:
                continue
            if wanted.kept and not self._stopping:
                self._again.append(wanted)
            else:
                wanted.answer.set_exception(error)
