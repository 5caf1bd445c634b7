"""A failing history is made smaller and told; proved with a bug put into the core for the length of a test."""

import pytest

from kvmanager.core.state import State
from tests.sim.shrink import broken, failure, smaller, what
from tests.sim.simulate import Simulation


def test_only_what_is_needed_is_left() -> None:
    tried: list[list[int]] = []

    def fails(actions: list[int]) -> bool:
        tried.append(actions)
        return {3, 40, 41} <= set(actions)

    assert smaller(list(range(100)), fails) == [3, 40, 41]
    assert smaller(list(range(100)), fails, most_runs=5) != [3, 40, 41]
    tried.clear()
    assert smaller(list(range(100)), fails, most_actions=150) != [3, 40, 41]
    assert sum(map(len, tried)) < 250
    assert all(actions == sorted(actions) for actions in tried)


def test_fences_that_are_ignored_are_found_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "fence_passed", lambda *_: True)
    simulation = Simulation(0)
    with pytest.raises(Exception, match=r"given away|wrong|poison|free") as caught:
        simulation.run(1_000)
    story = broken(simulation, caught.value, most_runs=30)
    assert f"seed 0 (sharded), action {simulation.at}" in story
    assert "actions are enough: failure(0, [" in story
    assert "engine-main/1 step" in story
    assert story.splitlines()[-1].startswith(f"=> {type(caught.value).__name__}")
    kept = eval(story.split("failure(0, ")[1].split("]")[0] + "]")  # a list of numbers that we printed ourselves
    assert len(kept) < simulation.at / 4
    found = failure(0, kept)
    assert found is not None
    assert what(found[1]).split(" in ")[0] == type(caught.value).__name__
    monkeypatch.undo()
    assert failure(0, kept) is None, "without the bug the same actions hold"
