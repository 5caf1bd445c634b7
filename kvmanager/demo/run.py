"""The demo: recorded agent sessions through a prefill node and a decode node, checked token by token.

For each turn: match the prefix, prefill the rest, commit, hand over by ticket, decode. The turns of a
session go to the same decode rank. Between turns the recorded tokens are used, whatever was decoded.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from kvmanager.clients.glm.config import TINY
from kvmanager.demo.expected import ExpectedAnswers, demo_model
from kvmanager.demo.nodes import (
    DEMO_SIZES,
    PAGE_ROWS,
    PREFILL_NODE,
    DemoNodes,
    PoolSizes,
)
from kvmanager.demo.progress import Progress
from kvmanager.demo.replay import Replay
from kvmanager.demo.report import DemoReport, make_report
from kvmanager.demo.sessions import load_sessions, plan_demo


@dataclass(frozen=True)
class DemoOptions:
    """What a run of the demo can be told.

    `seed` chooses the sessions and the model's weights. `inject_fault` corrupts one byte, so that the run must fail.
    `runtime_dir`: where sockets, configurations and logs lie, kept afterwards; None: a temporary directory.
    """

    seed: int = 1
    inject_fault: bool = False
    runtime_dir: Path | None = None


@dataclass(frozen=True)
class DemoScale:
    """How much is replayed, and in how little memory."""

    lanes: int = 4
    turns_per_lane: int = 3
    output_cap_tokens: int = 12
    prefill_limit_tokens: int = 12_000
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
        prefill_limit_tokens=scale.prefill_limit_tokens,
        seed=options.seed,
    )
    with ExitStack() as stack:
        expected = ExpectedAnswers(plan.turns, options.seed)
        stack.callback(expected.close)
        progress = stack.enter_context(Progress(console or Console(stderr=True), len(plan.turns)))
        directory = _directory(stack, options.runtime_dir)
        nodes = DemoNodes(stack, directory, TINY.format, scale.sizes)
        progress.say("demo", f"two nodes serve; look at one: kvmanager pools --runtime-dir {directory / PREFILL_NODE}")
        progress.watch(nodes.counters)
        stack.callback(progress.unwatch)
        replay = Replay(plan, demo_model(options.seed), directory, expected, progress)
        replay.run(faulty=options.inject_fault)
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
