"""Every fault at every point of a hand-off, and several of them in any order; see `tests.sim.handoff_course`."""

from __future__ import annotations

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from kvmanager.core.events import CopyOutcome
from tests.sim.handoff_course import FAULTS, STAGES, TARGETS, Course


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_goes_wrong(target: str) -> None:
    course = Course(0, target)
    passed = course.play({})
    assert course.ended == [CopyOutcome.DONE]
    assert course.released == {"t": 1}
    assert course.net.happened["grown ticket"] > 0, "the pull overlaps the computation"
    assert 8 < passed.count("pull went on") < STAGES
    assert course.target_world.node.state.counters["handoff"] == 1


POINTS = 30
"""Some more than an undisturbed course passes."""


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_at_every_point(fault: str) -> None:
    for at in range(POINTS):
        target = list(TARGETS)[at % 2]
        print(f"{fault!r} at point {at} of course {at}, {target}")
        Course(at, target, daemons_die="daemon" in fault).play({at: [fault]})


@settings(max_examples=40, deadline=None, print_blob=True)
@given(
    number=st.integers(0, 1_000),
    target=st.sampled_from(list(TARGETS)),
    faults=st.lists(st.tuples(st.integers(0, POINTS), st.sampled_from(list(FAULTS))), min_size=1, max_size=3),
)
def test_faults_at_any_points_in_any_order(number: int, target: str, faults: list[tuple[int, str]]) -> None:
    at: dict[int, list[str]] = {}
    for point, fault in faults:
        at.setdefault(point, []).append(fault)
    note(f"course {number}, {target}: {at}")
    Course(number, target, daemons_die=any("daemon" in fault for _, fault in faults)).play(at)
