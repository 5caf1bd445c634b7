"""Schedules and texts of the pressure suites are data: reproducible, saved and loaded whole, made smaller."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kvmanager.errors import InvalidArgument
from kvmanager.layout import GLM53_TINY, native_layout
from kvmanager.pressure.content import Text, write_rows, wrong_bytes
from kvmanager.pressure.nodes import PROFILES, Room
from kvmanager.pressure.runner import Runner
from kvmanager.pressure.schedule import Action, Schedule, load, save, smaller
from kvmanager.pressure.suites import SUITES, suite_named

ROOM = Room(32, 24, 24)


def test_there_are_the_suites_that_were_promised():
    assert len(SUITES) >= 12
    assert all(suite.about and suite.profile in PROFILES for suite in SUITES.values())
    assert {need for suite in SUITES.values() for need in suite.needs} <= {"host", "peer", "own", "ceiling"}
    with pytest.raises(InvalidArgument, match="fork-storm"):
        suite_named("nothing")


@pytest.mark.parametrize("name", SUITES)
def test_a_seed_gives_the_same_schedule_and_every_action_is_known(name: str):
    suite = SUITES[name]
    schedule = suite.schedule(ROOM, 5)
    assert schedule == suite.schedule(ROOM, 5) != suite.schedule(ROOM, 6)
    assert len(schedule.actions) > 20
    assert all(hasattr(Runner, f"do_{action.do}") for action in schedule.actions)
    opened = [(a.args["client"], a.args["request"]) for a in schedule.actions if a.do == "open"]
    assert len(opened) == len(set(opened))


def test_a_giant_has_a_million_tokens_where_they_fit():
    giant = SUITES["giant-beside-short"].schedule(Room(512, 2100, 0), 1)
    assert max(sum(n for _, n in a.args["text"]) for a in giant.actions if a.do == "open") == 1 << 20


def test_a_saved_schedule_is_the_same_again(tmp_path: Path):
    schedule = SUITES["hung-peer"].schedule(ROOM, 3)
    save(schedule, tmp_path / "s" / "a.json", "leak", "words")
    assert load(tmp_path / "s" / "a.json") == schedule


@pytest.mark.parametrize("text", ["", "[]", '{"format": "other"}', '{"format": "kvmanager-pressure/1"}'])
def test_what_is_no_schedule_is_refused(tmp_path: Path, text: str):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"x\.json"):
        load(tmp_path / "x.json")


def test_a_schedule_is_made_smaller_to_what_it_takes():
    draw = random.Random(1)
    for _ in range(20):
        needed = sorted(draw.sample(range(60), 3))
        actions = [Action("wait", {"ms": number}) for number in range(60)]
        tries = []

        def fails(rest, needed=needed, tries=tries):
            tries.append(len(rest))
            return set(needed) <= {action.args["ms"] for action in rest}

        assert [action.args["ms"] for action in smaller(actions, fails, most_runs=400)] == needed
        assert len(smaller(actions, fails, most_runs=3)) >= 3
    assert smaller(actions, lambda _: False) == tuple(actions)
    assert Schedule("s", 1, "node", tuple(actions)).only(actions[:2]).actions == tuple(actions[:2])


def test_texts_that_begin_alike_have_the_same_rows_as_far_as_they_do():
    one, other = Text(((7, 100),)), Text(((7, 60), (8, 100)))
    assert np.array_equal(one.tokens[:60], other.tokens[:60])
    assert np.array_equal(one.digests[:60], other.digests[:60])
    assert not (one.digests[60:] == other.digests[60:100]).any()
    moved = Text(((8, 1), (7, 100)))  # the same tokens one place further
    assert not set(moved.digests.tolist()) & set(one.digests.tolist())
    assert len(set(one.digests.tolist())) == 100


def test_rows_are_wrong_wherever_a_byte_is():
    layout = native_layout(GLM53_TINY, 16)
    memory = np.zeros(3 * layout.page_bytes, np.uint8)
    pages, slots, digests = np.array([2, 0, 2]), np.array([5, 6, 7]), Text(((1, 3),)).digests
    write_rows(memory, layout, pages, slots, digests)
    assert wrong_bytes(memory, layout, pages, slots, digests) == 0
    assert wrong_bytes(memory, layout, pages, slots, digests[::-1]) > 1000
    for component in layout.components:
        at = component.offset + 2 * component.page_stride + 7 * component.slot_stride
        memory[at] ^= 1
        assert wrong_bytes(memory, layout, pages, slots, digests) == 1, component
        memory[at] ^= 1
