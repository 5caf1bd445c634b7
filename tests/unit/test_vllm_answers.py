"""Answers between two threads, and the bell of an idle engine."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator

import pytest

from kvmanager.clients.callqueue import Answer
from kvmanager.clients.vllm.bell import Bell
from kvmanager.errors import NotReady

WAIT_S = 60.0


def test_an_answer_is_there_once_it_is_set() -> None:
    answer: Answer[int] = Answer()
    assert not answer.done()
    with pytest.raises(TimeoutError):
        answer.result(timeout=0)
    answer.set_result(3)
    assert answer.done()
    assert answer.result(timeout=0) == 3


def test_an_answer_raises_what_the_call_raised() -> None:
    answer: Answer[int] = Answer()
    answer.set_exception(NotReady("away"))
    assert answer.done()
    with pytest.raises(NotReady, match="away"):
        answer.result()


def test_who_waits_for_an_answer_is_woken() -> None:
    for number in range(200):
        answer: Answer[int] = Answer()
        thread = threading.Thread(target=answer.set_result, args=(number,))
        thread.start()
        assert answer.result(timeout=WAIT_S) == number
        thread.join()


@pytest.fixture
def bell() -> Iterator[Bell]:
    made = Bell()
    yield made
    made.close()


def test_a_bell_that_was_rung_before_is_heard_at_once(bell: Bell) -> None:
    bell.ring()
    bell.ring()
    bell.wait(WAIT_S)
    assert not bell.rung
    bell.wait(0)


def test_a_wait_ends_when_another_thread_rings(bell: Bell) -> None:
    for _ in range(200):
        thread = threading.Thread(target=bell.ring)
        thread.start()
        while not bell.rung:  # a wait may end too early, never too late
            bell.wait(WAIT_S)
        bell.clear()
        thread.join()
    bell.clear()
    assert not bell.rung


def test_a_ring_that_was_taken_back_is_not_heard(bell: Bell) -> None:
    bell.ring()
    bell.clear()
    assert not has_something(bell)


def has_something(bell: Bell) -> bool:
    """Whether a wait would end at once."""
    return bool(bell._watched.poll(0))


def test_a_bell_is_rung_by_an_answer_whether_it_comes_before_or_after() -> None:
    for early in (True, False):
        bell, answer = Bell(), Answer[int]()
        if early:
            answer.set_result(1)
        answer.wake(bell.ring)
        if not early:
            answer.set_exception(NotReady("away"))
        assert bell.rung
        bell.close()


def test_what_comes_on_a_watched_line_ends_the_wait_until_it_is_read(bell: Bell) -> None:
    near, far = socket.socketpair()
    with near, far:
        bell.watch(near)
        assert not has_something(bell)
        far.send(b"x")
        bell.wait(WAIT_S)
        assert has_something(bell)
        near.recv(1)
        assert not has_something(bell)
    bell.ring()
    bell.wait(WAIT_S)
    assert not has_something(bell)  # a line that was closed is not watched any more


def test_ringing_a_closed_bell_does_nothing() -> None:
    bell = Bell()
    bell.close()
    bell.ring()


def test_a_bell_does_not_come_along_to_another_process(bell: Bell) -> None:
    assert pickle.loads(pickle.dumps(bell)) is None
