"""Answers between two threads, and the bell of an idle engine."""

from __future__ import annotations

import pickle
import threading

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


def test_a_bell_that_was_rung_before_is_heard_at_once() -> None:
    bell = Bell()
    bell.rung.set()
    bell.wait(WAIT_S)
    assert not bell.rung.is_set()
    bell.wait(0)


def test_a_bell_is_rung_by_an_answer_whether_it_comes_before_or_after() -> None:
    for early in (True, False):
        bell, answer = Bell(), Answer[int]()
        if early:
            answer.set_result(1)
        answer.wake(bell.rung)
        if not early:
            answer.set_exception(NotReady("away"))
        assert bell.rung.is_set()


def test_a_bell_does_not_come_along_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(Bell())) is None
