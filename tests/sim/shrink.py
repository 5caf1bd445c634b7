"""A failing history made smaller: actions are left out as long as the same thing goes wrong."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable

from tests.sim.simulate import FINISH, SimReport, Simulation
from tests.sim.story import tell

MOST_RUNS = 200
MOST_ACTIONS = 25_000
"""Done again in all while a history is made smaller: about two minutes."""


class Broken(AssertionError):
    """A history went wrong; says how, with a small history that does too."""


def what(error: BaseException) -> str:
    """The kind of failure: its type, where it was raised, and its words without numbers."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    words = re.sub(r"[\[{(].*|\d+", "#", str(error).split("\n")[0])
    return f"{type(error).__name__} in {frame.name}: {words[:60]}"


def failure(seed: int, actions: list[int]) -> tuple[Simulation, Exception] | None:
    """What goes wrong in these actions of a history."""
    simulation = Simulation(seed)
    try:
        simulation.replay(actions)
    except Exception as error:
        return simulation, error
    return None


def smaller(
    actions: list[int],
    fails: Callable[[list[int]], bool],
    most_runs: int = MOST_RUNS,
    most_actions: int = MOST_ACTIONS,
) -> list[int]:
    """Delta debugging: drops ever smaller pieces while the rest still fails; at most so many tries and actions."""
    runs, done, pieces = 0, 0, 2
    while len(actions) > 1 and runs < most_runs and done < most_actions:
        size = -(-len(actions) // pieces)
        for start in range(0, len(actions), size):
            rest = actions[:start] + actions[start + size :]
            runs, done = runs + 1, done + len(rest)
            if rest and fails(rest):
                actions, pieces = rest, max(pieces - 1, 2)
                break
            if runs >= most_runs or done >= most_actions:
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(actions))
    return actions


def broken(simulation: Simulation, error: Exception, most_runs: int = MOST_RUNS) -> str:
    """The report on a failure: what, how to see it again, and the story of the smallest history found."""
    seed, kind = simulation.seed, what(error)
    whole = [*range(simulation.at + 1), FINISH]

    def fails(actions: list[int]) -> bool:
        found = failure(seed, actions)
        return found is not None and what(found[1]) == kind

    head = f"seed {seed} ({simulation.kind}), action {simulation.at}: {error!r}"
    if not fails(whole):
        # Bytes are checked more often in a replay, and find this earlier, or in other words.
        again = failure(seed, whole)
        if again is None:
            return "\n".join([head, "a replay of the same actions does not fail", *tell(simulation.net.story)[-60:]])
        kind = what(again[1])
    actions = smaller(whole, fails, most_runs)
    found = failure(seed, actions)
    assert found is not None
    small, last = found
    return "\n".join(
        [
            head,
            f"{len(actions)} of {len(whole)} actions are enough: failure({seed}, {actions})",
            *tell(small.net.story)[-120:],
            f"=> {type(last).__name__}: {last}",
        ]
    )


def simulate(seed: int, events: int) -> SimReport:
    """Runs one history. What goes wrong is made smaller and told as a story."""
    simulation = Simulation(seed)
    try:
        return simulation.run(events)
    except Exception as error:
        print(f"seed {seed} ({simulation.kind}), action {simulation.at}: {what(error)}; making it smaller", flush=True)
        raise Broken(broken(simulation, error)) from error
