"""Streams of an engine: who gets a reply, what a resend gets, and which opens stay refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvmanager.core.events import Notice, Notified, Opened, StepDone
from kvmanager.daemon import sessions
from kvmanager.daemon.sessions import SessionHub, SessionStream
from kvmanager.errors import Draining, InvalidArgument, Suspect
from kvmanager.protos import kvmanager_pb2 as pb

KEY = ("e", 1)
NODE = SimpleNamespace(state=SimpleNamespace(any_engine=lambda *_: None))


def hub_of(stored_replies: int = 4, unread_messages: int = 100) -> SessionHub:
    return SessionHub(5, stored_replies, unread_messages, lambda *key: STALLED.append(key))


STALLED: list[tuple[str, int]] = []


def take(stream: SessionStream) -> object:
    assert not silent(stream)
    return stream.get()


def silent(stream: SessionStream) -> bool:
    return not stream._waiting


def refusal(request_id: int, error: Exception) -> Opened:
    return Opened(request_id, "refused", error=error)


def test_a_reply_goes_to_the_stream_that_asked_and_an_error_ends_it() -> None:
    hub = hub_of(4)
    stream = hub.open(KEY)
    hub.answer(stream, NODE, (), ())(StepDone(1))
    reply = take(stream)
    assert (reply.number, reply.boot_id) == (1, 5)
    error = InvalidArgument("no")
    hub.answer(stream, NODE, (), ())(error)
    assert take(stream) is error


def test_a_newer_stream_ends_the_older_one_and_gets_the_notices() -> None:
    hub = hub_of(4)
    older, newer = hub.open(KEY), hub.open(KEY)
    assert take(older) is None
    hub.closed(older)
    hub.notify(Notified("e", 1, Notice(1, draining="why")))
    assert silent(older)
    assert take(newer).notices[0].draining == "why"
    hub.closed(newer)
    hub.notify(Notified("e", 1, Notice(2, draining="why")))
    assert silent(newer)
    hub.end_all()
    assert silent(newer)


def test_refused_opens_join_those_of_the_core() -> None:
    hub = hub_of(4)
    stream = hub.open(KEY)
    done = StepDone(1, opened=(Opened(7, "waiting"),))
    hub.answer(stream, NODE, (7, 8), (refusal(8, Draining("the node drains")),))(done)
    reply = take(stream)
    assert [(o.request_id, o.state) for o in reply.opened] == [(7, pb.OpenReply.WAITING), (8, pb.OpenReply.REFUSED)]
    assert reply.opened[1].error.reason == pb.DRAINING


def test_a_resend_gets_the_first_answer_whatever_holds_now() -> None:
    """Granted before the node drained, or refused before: the stored answer stands."""
    hub = hub_of(4)
    stream = hub.open(KEY)
    granted = StepDone(1, opened=(Opened(7, "waiting"),))
    late = (refusal(7, Draining("the node drains")),)
    hub.answer(stream, NODE, (7,), ())(granted)
    first = take(stream)
    hub.answer(stream, NODE, (7,), late)(granted)
    assert take(stream).SerializeToString() == first.SerializeToString()
    hub.answer(stream, NODE, (7,), late)(StepDone(2))
    second = take(stream)
    hub.answer(stream, NODE, (7,), ())(StepDone(2))
    assert take(stream).SerializeToString() == second.SerializeToString()


def test_every_open_of_a_resend_is_answered_once_by_a_daemon_that_came_later() -> None:
    """It does not know what the one before refused, and may refuse now what that one granted."""
    stored = StepDone(1, opened=(Opened(7, "waiting"),))
    for now in ((), (refusal(7, Draining("now")),), (refusal(8, Draining("now")),)):
        hub = hub_of(4)
        stream = hub.open(KEY)
        hub.answer(stream, NODE, (7, 8), now)(stored)
        opened = take(stream).opened
        assert [(o.request_id, o.state) for o in opened] == [(7, pb.OpenReply.WAITING), (8, pb.OpenReply.REFUSED)]
        assert opened[1].error.reason == pb.DRAINING


def test_refusals_are_kept_as_long_as_replies_and_go_with_the_epoch() -> None:
    hub = hub_of(2)
    stream = hub.open(KEY)
    for number in range(1, 5):
        hub.answer(stream, NODE, (number,), (refusal(number, Draining("x")),))(StepDone(number))
    assert list(hub._refused[KEY]._by_number) == [3, 4]
    hub.forget(*KEY)
    assert hub._refused == {}
    hub.forget(*KEY)


def test_a_client_that_does_not_read_is_suspect_and_what_waited_is_dropped() -> None:
    STALLED.clear()
    hub = hub_of(unread_messages=3)
    stream = hub.open(KEY)
    for number in range(1, 4):
        hub.answer(stream, NODE, (), ())(StepDone(number))
    assert take(stream).number == 1
    hub.answer(stream, NODE, (), ())(StepDone(4))
    assert STALLED == []
    hub.notify(Notified("e", 1, Notice(1, draining="why")))
    assert STALLED == [KEY]
    error = take(stream)
    assert isinstance(error, Suspect)
    assert "3 messages" in str(error)
    hub.answer(stream, NODE, (), ())(StepDone(5))
    stream.end()
    assert silent(stream), "it is over"
    assert STALLED == [KEY]
    fresh = hub.open(KEY)
    hub.answer(fresh, NODE, (), ())(StepDone(5))
    assert take(fresh).number == 5, "a new stream is read again"


def test_bytes_are_bounded_too_but_one_message_always_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    STALLED.clear()
    monkeypatch.setattr(sessions, "UNREAD_MAX_BYTES", 1000)
    stream = hub_of().open(KEY)
    stream.put(pb.StepReply(notices=[pb.Notice(draining="x" * 5000)]))
    assert take(stream).notices[0].draining == "x" * 5000
    for _ in range(3):
        stream.put(pb.StepReply(notices=[pb.Notice(draining="x" * 400)]))
    assert STALLED == [KEY]
    assert isinstance(take(stream), Suspect)
