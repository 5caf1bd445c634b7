"""Calls of a thread that must not wait: it sends them itself, and takes the answers that are there when it looks.

No other thread has a part in it, and the interpreter's lock is kept throughout: who gives it up to send a few bytes may
wait milliseconds for a thread that computes, and one that only passes on what it is handed waits for it twice a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kvmanager.clients.attach import Attachment
from kvmanager.clients.callline import Question, open_line, read_answer
from kvmanager.clients.callqueue import Answer
from kvmanager.errors import DaemonError, KVError, NotReady, PeerUnreachable
from kvmanager.framing import FrameReader, frame_header
from kvmanager.units import KIB, SECOND_NS
from kvmanager.wire import MESSAGE_MAX_BYTES, error_from_proto

T = TypeVar("T")
MOST_BYTES: Final = 32 * KIB
"""Of a call: to send more takes longer than a hook may. A socket's buffer holds several."""
READ_BYTES: Final = 256 * KIB
LOOK_S: Final = 0.5
"""How often a line on which nothing was asked looks whether it is still there."""
_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
# PyDLL, as opposed to CDLL and to the methods of sockets, keeps the interpreter's lock during a call.
_LIBC: Final = ctypes.PyDLL(None, use_errno=True)
_LIBC.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.recv.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.send.restype = _LIBC.recv.restype = ctypes.c_ssize_t


class NoWaitLine:
    """A connection for calls of an attached engine. One thread asks and hears; `hang_up` may come from any.

    What breaks it ends it: all that was asked fails with NotReady. Then open another one.
    """

    def __init__(
        self, attachment: Attachment, timeout_s: float, failed: Callable[[KVError], None] = lambda _: None
    ) -> None:
        """Connects, and waits for it. Raises NotReady where no daemon answers, else its typed error.

        timeout_s: for each answer. failed: told of each error, and of the line's end; must not wait.
        """
        self.broken = False
        """It ended: nothing is asked any more."""
        self._timeout_s = timeout_s
        self._failed = failed
        self._channel = open_line(attachment, timeout_s)
        self._channel.setblocking(False)
        self._frames = FrameReader(MESSAGE_MAX_BYTES)
        self._room = ctypes.create_string_buffer(READ_BYTES)
        self._asked: deque[tuple[Question[Any], Answer[Any], float]] = deque()
        self._look_at = 0.0

    def fileno(self) -> int:
        """To be waited on; readable when `hear` finds something, or the end."""
        return self._channel.fileno()

    def ask(self, question: Question[T]) -> Answer[T] | None:
        """Sends a call. None, and nothing is sent, where it is too large or too many wait; then ask another way."""
        call = question.call
        call.timeout_ns = int(self._timeout_s * SECOND_NS)
        payload = call.SerializeToString()
        frame = frame_header(payload, (), MESSAGE_MAX_BYTES) + payload
        if len(frame) > MOST_BYTES or self.broken:
            return None
        sent = _LIBC.send(self._channel.fileno(), frame, len(frame), _FLAGS)
        if sent < 0 and ctypes.get_errno() == errno.EAGAIN:
            return None
        answer: Answer[T] = Answer()
        self._asked.append((question, answer, time.monotonic() + self._timeout_s))
        if sent < len(frame):
            # Part of it only: the socket was all but full, so the daemon reads nothing.
            self._end(NotReady(f"the daemon does not read: {_reason(sent)}"))
        return answer

    def hear(self) -> None:
        """Takes the answers that are there."""
        now = time.monotonic()
        if self.broken or (not self._asked and now < self._look_at):
            return
        self._look_at = now + LOOK_S
        try:
            while (count := _LIBC.recv(self._channel.fileno(), self._room, READ_BYTES, _FLAGS)) > 0:
                for frame in self._frames.feed(ctypes.string_at(self._room, count)):
                    self._take(frame.payload)
                if count < READ_BYTES:
                    break
            else:
                if count == 0 or ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
                    raise PeerUnreachable("it ended the connection" if count == 0 else _reason(count))
        except KVError as error:
            self._end(NotReady(f"the daemon does not answer: {error}"))
            return
        if self._asked and now > self._asked[0][2]:
            self._end(NotReady(f"the daemon does not answer within {self._timeout_s:g} s"))

    def _take(self, payload: bytes) -> None:
        if not self._asked:
            raise DaemonError("an answer came that nothing had asked for; is it a kvmanager node?")
        said = read_answer(payload)
        question, answer, _ = self._asked.popleft()
        if said.HasField("error"):
            refused = error_from_proto(said.error)
            answer.set_exception(refused)
            self._failed(refused)
            return
        try:
            answer.set_result(question.take(said))
        except KVError as wrong:
            answer.set_exception(wrong)

    def _end(self, error: NotReady) -> None:
        self.close()
        while self._asked:
            self._asked.popleft()[1].set_exception(error)
        self._failed(error)

    def hang_up(self) -> None:
        """Has it end: the next `hear` finds that out."""
        with contextlib.suppress(OSError):  # it ended before
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends it at once, and nobody hears what was asked; of the thread that asks. Idempotent."""
        self.broken = True
        self._frames.close()
        self._channel.close()


def _reason(result: int) -> str:
    return os.strerror(ctypes.get_errno()) if result < 0 else "its socket is full"
