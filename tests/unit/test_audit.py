"""The audit finds each thing that is wrong: one lie at a time is told to a simulated node's core, then taken back."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from kvmanager.core.audit import audit
from kvmanager.core.chainaudit import Passed
from kvmanager.core.digest import state_digest
from kvmanager.core.group import Chain
from kvmanager.core.spans import DEVICE, NO_SPAN
from kvmanager.core.state import State
from kvmanager.errors import InvariantViolation
from tests.sim.simulate import Simulation
from tests.sim.worlds import kind_of

FIRST_SEED, ACTIONS = 10_000, 400


@pytest.fixture(scope="module")
def stored() -> bytes:
    """A core in the middle of the first history that has all that is lied about."""
    for seed in range(FIRST_SEED, FIRST_SEED + 100):
        if kind_of(seed) != "sharded":
            continue
        simulation = Simulation(seed)
        for number in range(ACTIONS):
            simulation._do(number, False)
        state = simulation.worlds[0].node.state
        with suppress(StopIteration):
            print(f"seed {seed}")
            before = pickle.dumps(state)
            _twin(state)
            _parent_and_child(_chain(state))
            _span_of_a_request(state)
            return before
    raise AssertionError("no history has equal spans, children and requests at once")


def _chain(state: State) -> Chain:
    return next(iter(state.groups.values())).chains[0]


def _parent_and_child(chain: Chain) -> tuple[int, int]:
    table = chain.table
    child = next(row for row in table if table.published[row] and table.parent[row] != NO_SPAN)
    return int(table.parent[child]), child


def _column(name: str, changed: Callable[[object], object]) -> Callable[[State], None]:
    """Another value for the column of a span that has a parent."""

    def lie(state: State) -> None:
        chain = _chain(state)
        column = getattr(chain.table, name)
        child = _parent_and_child(chain)[1]
        column[child] = changed(column[child])

    return lie


def _one_more(value: object) -> object:
    return value + 1


def _run(name: str) -> Callable[[State], None]:
    def lie(state: State) -> None:
        run = next(iter(_chain(state).index.runs.values()))
        setattr(run, name, getattr(run, name) + 1)

    return lie


def _used_before_its_child(state: State) -> None:
    chain = _chain(state)
    parent, child = _parent_and_child(chain)
    chain.table.last_used[child] = chain.table.last_used[parent] + 1


def _page_of_another(state: State) -> None:
    table = _chain(state).table
    some, other = [row for row in table if table.copies[0, DEVICE, row]][:2]
    table.pages[0, DEVICE, some] = table.pages[0, DEVICE, other]


def _uid_of_another(state: State) -> None:
    table = _chain(state).table
    some, other = list(table)[:2]
    table.uids[some] = table.uids[other]


def _twin(state: State) -> None:
    """Two spans below one parent get the same keys; the runs go by their first key and are told so."""
    chain = _chain(state)
    table, index = chain.table, chain.index
    roots = [run for run in index.runs.values() if run.parent == NO_SPAN and table.full(int(run.rows[0]))]
    some, other = next(
        (a, b) for a in roots for b in roots if a is not b and (a.namespace, a.segments) == (b.namespace, b.segments)
    )
    first, second = int(some.rows[0]), int(other.rows[0])
    number = next(number for number, run in index.runs.items() if run is other)
    index.heads[other.namespace, table.keys[second][: index.key_bytes]].remove(number)
    table.keys[second] = table.keys[first]
    index.heads[other.namespace, table.keys[first][: index.key_bytes]].append(number)


def _no_head(state: State) -> None:
    _chain(state).index.heads.popitem()


def _strange_head(state: State) -> None:
    _chain(state).index.heads[0, b"nothing"] = [1_000_000]


def _size(state: State) -> None:
    _chain(state).index.sizes[1_000] += 1


def _keys(state: State) -> None:
    table = _chain(state).table
    row = next(row for row in table if table.published[row])
    table.keys[row] = table.keys[row][:-1]


def _page_state(state: State) -> None:
    space = next(iter(next(iter(state.groups.values())).pools.values())).spaces["kv"]
    space.state[np.flatnonzero(space.state == 3)[0]] = 2


def _counter(state: State) -> None:
    next(iter(next(iter(state.groups.values())).pools.values())).spaces["kv"].counts[5] += 1


def _promise(state: State) -> None:
    next(iter(next(iter(state.groups.values())).pools.values())).promised_slabs += 1


def _span_of_a_request(state: State) -> None:
    next(iter(state.holders(next(iter(state.groups))))).chains[0].pop()


def _end_of_a_chain(state: State) -> None:
    next(iter(state.holders(next(iter(state.groups))))).chains[0].end_token += 1


def _timeline(state: State) -> None:
    state.timelines[1_000_000] = 1


LIES: dict[str, tuple[Callable[[State], None], str]] = {
    "parent": (_column("parent", lambda _: NO_SPAN), "children|no path"),
    "children": (_column("children", _one_more), "children differ"),
    "valid": (_column("valid", _one_more), "more segments valid|keys do not cover"),
    "segments": (_column("segments", _one_more), "pages|mixes|not full"),
    "namespace": (_column("namespace", _one_more), "mixes"),
    "pins": (_column("pins", _one_more), "pins of spans"),
    "negative pins": (_column("pins", lambda _: -1), "negative"),
    "busy": (_column("busy", _one_more), "plans of spans"),
    "anchored": (_column("anchored", _one_more), "anchors of spans"),
    "run": (_column("run", _one_more), "spans of another"),
    "place": (_column("place", _one_more), "in other places"),
    "published": (_column("published", lambda _: False), "findable|parent|children|other spans"),
    "last used": (_used_before_its_child, "used later than its parent"),
    "a page twice": (_page_of_another, "two owners"),
    "a uid twice": (_uid_of_another, "uid was given twice"),
    "equal spans": (_twin, "equal spans stand below one parent"),
    "a run's beginning": (_run("at"), "does not end"),
    "a run's parent": (_run("parent"), "no path"),
    "a run's size": (_run("segments"), "mixes"),
    "a run's namespace": (_run("namespace"), "mixes"),
    "a head less": (_no_head, "not under its first key"),
    "a strange head": (_strange_head, "heads name runs"),
    "sizes": (_size, "sizes differ"),
    "keys": (_keys, "keys do not cover"),
    "a page's state": (_page_state, "not ready|counters"),
    "a pool's counter": (_counter, "sum to|counters"),
    "a promise": (_promise, "promised"),
    "a request's span": (_span_of_a_request, "pins of spans|it is owed"),
    "an end of a chain": (_end_of_a_chain, "pages up to"),
    "a timeline": (_timeline, "timelines of"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_found(name: str, stored: bytes) -> None:
    lie, story = LIES[name]
    state: State = pickle.loads(stored)
    passed: Passed = {}
    audit(state, passed)
    audit(state, passed)
    lie(state)
    for known in (passed, None):
        with pytest.raises(InvariantViolation, match=story):
            audit(state, known)


@pytest.mark.parametrize("name", LIES)
def test_a_lie_changes_the_digest(name: str, stored: bytes) -> None:
    state: State = pickle.loads(stored)
    before = state_digest(state)
    assert state_digest(pickle.loads(stored)) == before
    LIES[name][0](state)
    assert state_digest(state) != before
