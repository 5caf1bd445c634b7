"""The demo: recorded agent sessions through a prefill node and a decode node, checked token by token.

For each turn: match the prefix, prefill the rest, commit, hand over by ticket, decode. The turns of a
session go to the same decode rank. Between turns the recorded tokens are used, whatever was decoded.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from rich.console import Console

from kvmanager.clients.admin import AdminClient
from kvmanager.clients.decode_engine import Decoded, DecodeEngine
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.prefill_engine import Prefilled, PrefillEngine
from kvmanager.demo.expected import ExpectedAnswers, demo_model
from kvmanager.demo.fault import inject_fault
from kvmanager.demo.nodes import (
    DECODE_NODE,
    DECODE_RANKS,
    DEMO_SIZES,
    HOT_ROWS,
    NAMESPACE,
    PAGE_ROWS,
    PREFILL_GROUP,
    PREFILL_NODE,
    SOURCE_RANKS,
    NodeProcess,
    PoolSizes,
    decode_toml,
    prefill_toml,
)
from kvmanager.demo.progress import Progress
from kvmanager.demo.report import DemoReport, TurnRecord, ledger_failures, make_report
from kvmanager.demo.sessions import DemoPlan, ScaledTurn, load_sessions, plan_demo
from kvmanager.errors import KVError, NotReady
from kvmanager.geometry import ShardGeometry
from kvmanager.protos import kvmanager_pb2 as pb

QUEUED_TURNS: Final = 2
"""Turns handed to a decode rank and not answered: one being decoded, one waiting. More would pin prefill pages."""
LEAVE_TIMEOUT_S: Final = 20.0
"""Until a node has noticed that its engines left, and everything in flight has ended."""


@dataclass(frozen=True)
class DemoOptions:
    """What a run of the demo can be told.

    `seed` chooses sessions and weights. `inject_fault` corrupts one byte, so that the run must fail.
    `runtime_dir`: where sockets, configurations and logs lie, kept afterwards; None: a temporary directory.
    """

    seed: int = 0
    inject_fault: bool = False
    runtime_dir: Path | None = None


@dataclass(frozen=True)
class DemoScale:
    """How much is replayed, and in how little memory."""

    lanes: int = 4
    turns_per_lane: int = 3
    output_cap_tokens: int = 12
    sizes: PoolSizes = DEMO_SIZES


FULL: Final = DemoScale()


def run_demo(options: DemoOptions, scale: DemoScale = FULL, console: Console | None = None) -> DemoReport:
    """Runs the demo, progress on `console` (standard error when None).

    What went wrong is in the report. Raises KVError only where no replay could start.
    """
    started = time.monotonic()
    plan = plan_demo(
        load_sessions(),
        vocab=TINY.vocab,
        segment_tokens=PAGE_ROWS,
        lanes=scale.lanes,
        turns_per_lane=scale.turns_per_lane,
        output_cap_tokens=scale.output_cap_tokens,
        seed=options.seed,
    )
    with ExitStack() as stack:
        expected = ExpectedAnswers(plan.turns, options.seed)
        stack.callback(expected.close)
        progress = stack.enter_context(Progress(console or Console(stderr=True), len(plan.turns)))
        directory = _directory(stack, options.runtime_dir)
        nodes = _start_nodes(stack, directory, scale.sizes)
        progress.say("demo", f"two nodes serve; look at one: kvmanager pools --runtime-dir {directory / PREFILL_NODE}")
        progress.watch(nodes.counters)
        replay = _Replay(plan, options, directory, expected, progress)
        replay.run()
        progress.say("demo", "the engines have left; checking the ledgers")
        ledger = nodes.settled_failures()
        return make_report(
            replay.records,
            planned_turns=len(plan.turns),
            counters={**nodes.counters(), "swap_in_miss": replay.swap_in_rows},
            ledger_failures=ledger,
            other_failures=replay.failures + nodes.deaths(),
            seconds=time.monotonic() - started,
        )


def _directory(stack: ExitStack, runtime_dir: Path | None) -> Path:
    if runtime_dir is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvm-demo-")))
    runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return runtime_dir.resolve()


def _start_nodes(stack: ExitStack, directory: Path, sizes: PoolSizes) -> _Nodes:
    """Both nodes, serving; the stack stops them."""
    processes = [
        NodeProcess(PREFILL_NODE, directory, prefill_toml(directory / PREFILL_NODE, TINY.format, sizes)),
        NodeProcess(DECODE_NODE, directory, decode_toml(directory / DECODE_NODE, TINY.format, sizes)),
    ]
    for process in processes:
        stack.enter_context(process)
    views = {process.name: stack.enter_context(process.wait_serving()) for process in processes}
    return _Nodes(processes, views)


class _Nodes:
    """Both nodes as an operator sees them."""

    def __init__(self, processes: Sequence[NodeProcess], views: Mapping[str, AdminClient]) -> None:
        self._processes = processes
        self._views = views
        self._counters: dict[str, Counter[str]] = {name: Counter() for name in views}

    def counters(self) -> Mapping[str, int]:
        """Counters of both nodes, summed; the last known ones of a node that does not answer."""
        for name, view in self._views.items():
            try:
                self._counters[name] = Counter(dict(view.status().counters))
            except KVError:
                continue
        return sum(self._counters.values(), Counter())

    def settled_failures(self) -> list[str]:
        """What is still held `LEAVE_TIMEOUT_S` after the engines left; returns as soon as nothing is."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        while True:
            failures = [failure for name in self._views for failure in self._failures_of(name)]
            if not failures or time.monotonic() > deadline:
                return failures
            time.sleep(0.05)

    def _failures_of(self, name: str) -> list[str]:
        view = self._views[name]
        try:
            status = view.status()
            failures = ledger_failures(name, view.pools().pools, view.leases().leases, view.requests().requests)
        except KVError as error:
            return [f"node {name} does not answer: {error}"]
        if not status.ledger_ok:
            failures.append(f"node {name}: its own audit says that the ledger does not sum up")
        left = [engine for engine in status.engines if engine.state != "gone"]
        return failures + [f"node {name}: engine {engine.engine} is still {engine.state}" for engine in left]

    def deaths(self) -> list[str]:
        """Nodes that ended on their own, with the end of their logs."""
        return [f"node {process.name} died:\n{process.log_tail()}" for process in self._processes if process.died()]


class _Replay:
    """Drives the engines through the plan. The prefill engine has this thread, each decode rank one of its own."""

    def __init__(
        self, plan: DemoPlan, options: DemoOptions, directory: Path, expected: ExpectedAnswers, progress: Progress
    ) -> None:
        self._plan = plan
        self._options = options
        self._directory = directory
        self._expected = expected
        self._progress = progress
        self._model = demo_model(options.seed)
        self._answers: list[tuple[int, ScaledTurn, Prefilled, Decoded]] = []
        self._lock = threading.Lock()
        self.records: list[TurnRecord] = []
        """Answered turns, in replay order."""
        self.failures: list[str] = []
        """What stopped the replay, or should have."""

    @property
    def swap_in_rows(self) -> int:
        """Rows that steps found neither resident nor hot."""
        return sum(decoded.swap_in_rows for _, _, _, decoded in self._answers)

    def run(self) -> None:
        """Replays all turns, closes the engines, and compares; a failure ends it early and is noted."""
        torch.set_num_threads(1)
        try:
            with ExitStack() as stack:
                self._drive(stack)
        except KVError as error:
            self.failures.append(f"the replay stopped: {type(error).__name__}: {error}")
        self._progress.say("demo", "waiting for the reference run")
        self._compare()

    def _drive(self, stack: ExitStack) -> None:
        prefill_dir, decode_dir = self._directory / PREFILL_NODE, self._directory / DECODE_NODE
        prefill = PrefillEngine(
            prefill_dir,
            "prefill",
            group=PREFILL_GROUP,
            namespace=NAMESPACE,
            geometry=ShardGeometry(SOURCE_RANKS, PAGE_ROWS, 1),
            model=self._model,
        )
        stack.callback(prefill.close)
        ranks = [_DecodeRank(stack, decode_dir, name, self._model) for name in DECODE_RANKS]
        for number, turn in enumerate(self._plan.turns):
            rank = ranks[self._plan.lanes.index(turn.session_id) % len(ranks)]
            rank.wait_below(QUEUED_TURNS)
            prefilled = self._prefill(prefill, number, turn)
            rank.submit(partial(self._decode, rank.engine, number, turn, prefilled))
        for rank in ranks:
            rank.wait_below(1)

    def _prefill(self, engine: PrefillEngine, number: int, turn: ScaledTurn) -> Prefilled:
        what = f"turn {number + 1}, session {turn.session_id}: "
        self._progress.say("prefill", what + "matching")
        prefilled = engine.prefill(
            turn.prompt,
            _session(turn),
            turn.stop_reason,
            lambda done: self._progress.say("prefill", what + f"{done}/{len(turn.prompt)} tokens"),
        )
        self._progress.say("prefill", what + "done")
        return prefilled

    def _decode(self, engine: DecodeEngine, number: int, turn: ScaledTurn, prefilled: Prefilled) -> None:
        what = f"turn {number + 1}, session {turn.session_id}: "
        self._progress.say(engine.name, what + "pulling")
        request = engine.admit(turn.prompt, prefilled.first_token, prefilled.ticket, turn.output_tokens, _session(turn))
        if self._options.inject_fault and number == 0:
            prompt = torch.from_numpy(turn.prompt)
            place = inject_fault(self._model, prompt, prefilled.first_token, request.opened, engine.latent)
            self._progress.say("demo", f"flipped one bit: {place}")
        decoded = engine.generate(
            request,
            turn.stop_reason,
            lambda done: self._progress.say(engine.name, what + f"{done}/{turn.output_tokens} tokens"),
        )
        with self._lock:
            self._answers.append((number, turn, prefilled, decoded))
        self._progress.turn_done(
            f"session {turn.session_id}, {prefilled.prompt_tokens} prompt tokens ({prefilled.cached_tokens} reused), "
            f"{len(decoded.tokens)} decoded, {decoded.drafts_accepted}/{decoded.drafts_proposed} drafts accepted"
        )

    def _compare(self) -> None:
        for number, turn, prefilled, decoded in sorted(self._answers, key=lambda answer: answer[0]):
            try:
                expected = self._expected.of(number)
            except NotReady as error:
                self.failures.append(str(error))
                return
            self.records.append(
                TurnRecord(
                    turn=number,
                    session_id=turn.session_id,
                    prompt_tokens=prefilled.prompt_tokens,
                    cached_tokens=prefilled.cached_tokens,
                    answer=decoded.tokens,
                    expected=expected,
                    drafts_proposed=decoded.drafts_proposed,
                    drafts_accepted=decoded.drafts_accepted,
                )
            )


class _DecodeRank:
    """A decode engine and its thread."""

    def __init__(self, stack: ExitStack, runtime_dir: Path, name: str, model: Glm) -> None:
        self.engine = DecodeEngine(
            runtime_dir,
            name,
            group=name,
            namespace=NAMESPACE,
            page_rows=PAGE_ROWS,
            hot_rows=HOT_ROWS,
            model=model,
        )
        stack.callback(self.engine.close)
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix=name, initializer=torch.set_grad_enabled, initargs=(False,)
        )
        stack.callback(self._thread.shutdown, cancel_futures=True)
        self._turns: deque[Future[None]] = deque()

    def submit(self, decode: Callable[[], None]) -> None:
        """Queues a turn."""
        self._turns.append(self._thread.submit(decode))

    def wait_below(self, turns: int) -> None:
        """Waits until fewer than `turns` turns are unanswered; raises what ended one of them."""
        while len(self._turns) >= turns:
            self._turns.popleft().result()


def _session(turn: ScaledTurn) -> pb.SessionHint:
    return pb.SessionHint(session_id=turn.session_id)
