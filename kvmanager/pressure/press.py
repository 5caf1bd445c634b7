"""Runs suites: nodes to run on, what is skipped and why, and what becomes of a failing schedule."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from kvmanager.errors import KVError
from kvmanager.pressure.driver import MakeDriver, OwnDriver, driver_named
from kvmanager.pressure.driverprocess import own_command
from kvmanager.pressure.nodes import Node, own_nodes, running_nodes
from kvmanager.pressure.observer import Violation
from kvmanager.pressure.runner import Runner, Tally
from kvmanager.pressure.schedule import Action, Schedule, save, smaller
from kvmanager.pressure.suite import Suite
from kvmanager.pressure.suites import suite_named
from kvmanager.pressure.views import Views

OWN_DRIVER: Final = "kvmanager.pressure.driver:OwnDriver"
CLEAN_S: Final = 5.0
SHRINK_RUNS: Final = 24
SHRINK_S: Final = 240.0
"""No further run is begun to make a schedule smaller after that."""


@dataclass(frozen=True)
class Options:
    """Where and with what. Without a `runtime_dir` each suite runs on nodes that are started for it.

    driver: the class of an engine's own client; driver_command: its program instead, which then runs every client.
    """

    runtime_dir: Path | None = None
    peer_dir: Path | None = None
    driver: str = OWN_DRIVER
    driver_command: tuple[str, ...] = ()
    save_to: Path = Path()
    shrink_runs: int = SHRINK_RUNS
    make_views: Callable[[Node], Views] = Views


@dataclass
class SuiteReport:
    """What came of one suite. `outcome`: "passed", "failed" or "skipped"."""

    suite: str
    seed: int
    outcome: str
    why: str = ""
    invariant: str = ""
    actions: int = 0
    smallest: int = 0
    saved: str = ""
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Press:
    """Holds the nodes from one suite to the next. A context manager."""

    def __init__(self, options: Options, say: Callable[[str], object] = print) -> None:
        self._options, self._say = options, say
        self._grounds: dict[str, tuple[ExitStack, list[Node]]] = {}
        self._runs = 0
        self._made = tempfile.TemporaryDirectory(prefix="kvm-p-")

    def __enter__(self) -> Press:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for profile in list(self._grounds):
            self._spoil(profile)
        self._made.cleanup()

    # ----------------------------------------------------------------------------------------- nodes

    def _nodes(self, profile: str) -> list[Node]:
        if profile not in self._grounds:
            with ExitStack() as stack:
                self._grounds[profile] = (ExitStack(), self._start(stack, profile))
                self._grounds[profile][0].push(stack.pop_all())
        return self._grounds[profile][1]

    def _start(self, stack: ExitStack, profile: str) -> list[Node]:
        options = self._options
        if options.runtime_dir is None:
            self._runs += 1
            return stack.enter_context(own_nodes(profile, "", Path(self._made.name) / f"{self._runs}"))
        where = [options.runtime_dir, *([options.peer_dir] if options.peer_dir is not None else [])]
        operators, nodes = running_nodes(where)
        for operator in operators:
            stack.callback(operator.close)
        return nodes

    def _spoil(self, profile: str) -> None:
        stack, _ = self._grounds.pop(profile, (ExitStack(), []))
        stack.close()

    def _lacks(self, suite: Suite) -> str:
        """What a node does not have that a suite needs; empty: nothing."""
        if self._options.runtime_dir is not None and "own" in suite.needs:
            return "it stops and kills processes of the node, which is done to nodes of its own only"
        if self._options.runtime_dir is not None and "peer" in suite.needs and self._options.peer_dir is None:
            return "it needs a second node (--peer-dir)"
        room = self._nodes(suite.profile)[0].room
        if "host" in suite.needs and not room.host_spans:
            return "the group has no host tier"
        if "ceiling" in suite.needs and room.ceiling >= 1.0:
            return "no tenant with a ceiling is configured for this user"
        return ""

    # ------------------------------------------------------------------------------------------ runs

    def press(self, name: str, seed: int) -> SuiteReport:
        """One suite. Raises InvalidArgument for one that there is not, NotReady where no node can be had."""
        suite = suite_named(name)
        if lacking := self._lacks(suite):
            return SuiteReport(name, seed, "skipped", lacking)
        room = self._nodes(suite.profile)[0].room
        return self.replay(suite.schedule(room, seed))

    def replay(self, schedule: Schedule) -> SuiteReport:
        """One schedule; where it fails, a smaller one that fails alike is saved."""
        began = time.monotonic()
        report = SuiteReport(schedule.suite, schedule.seed, "passed", actions=len(schedule.actions))
        broken, report.tally = self._attempt(schedule)
        if broken is not None:
            report.outcome, report.why, report.invariant = "failed", broken.says, broken.invariant
            small, last = self._shrink(schedule, broken)
            path = self._options.save_to / f"pressure-{schedule.suite}-{schedule.seed}.json"
            save(small, path, last.invariant, last.says)
            report.saved, report.smallest = str(path), len(small.actions)
        report.seconds = round(time.monotonic() - began, 2)
        return report

    def _attempt(self, schedule: Schedule) -> tuple[Violation | None, Tally]:
        """The invariant that broke, if one did; then the nodes are not used again."""
        self._runs += 1
        nodes = self._nodes(schedule.profile)
        for node in nodes:
            node.target = replace(node.target, revision=f"{schedule.seed}-{self._runs}")
        runner = self._runner(nodes)
        try:
            runner.run(schedule)
        except Violation as broken:
            if broken.invariant == "death" or not self._is_clean(nodes):
                self._spoil(schedule.profile)
            return broken, runner.tally
        return None, runner.tally

    def _is_clean(self, nodes: Sequence[Node]) -> bool:
        """Whether nodes that something went wrong on can be used again: they say that all is given back."""
        give_up = time.monotonic() + CLEAN_S
        try:
            while any(view.leftovers(quiet=True) for view in map(Views, nodes)):
                if time.monotonic() > give_up:
                    return False
                time.sleep(0.05)
            return all(Views(node).status().ledger_ok for node in nodes)
        except KVError:
            return False

    def _runner(self, nodes: Sequence[Node]) -> Runner:
        options = self._options
        make: MakeDriver = OwnDriver if options.driver == OWN_DRIVER else driver_named(options.driver)
        command = options.driver_command or own_command(options.driver)
        always = bool(options.driver_command)
        return Runner(nodes, make, command, always_process=always, make_views=options.make_views)

    def _shrink(self, schedule: Schedule, broken: Violation) -> tuple[Schedule, Violation]:
        deadline, last = time.monotonic() + SHRINK_S, broken
        self._say(f"{schedule.suite} seed {schedule.seed}: {broken}; making it smaller")

        def fails(actions: Sequence[Action]) -> bool:
            nonlocal last
            if time.monotonic() > deadline:
                return False
            try:
                found, _ = self._attempt(schedule.only(actions))
            except KVError as error:
                self._say(f"  no node for another try: {error}")
                return False
            if found is None or found.invariant != broken.invariant:
                return False
            last = found
            return True

        actions = smaller(schedule.actions, fails, self._options.shrink_runs)
        return schedule.only(actions), last
