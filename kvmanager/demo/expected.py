"""The reference run's answers, computed in a process of its own while the demo replays."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import torch

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.reference import ReferenceRun
from kvmanager.clients.glm.weights import Profile, make_weights
from kvmanager.demo.sessions import ScaledTurn
from kvmanager.errors import NotReady

ANSWER_TIMEOUT_S: Final = 300.0


def demo_model(seed: int) -> Glm:
    """The model of the demo's workers and of its reference run: float64, fp8 rows, weights from `seed`."""
    return Glm(TINY, make_weights(TINY, seed, Profile.CALM), torch.float64, Fp8Codec())


@dataclass(frozen=True)
class _Task:
    session_id: str
    prompt: list[int]
    output_tokens: int


class ExpectedAnswers:
    """Answers of all turns, in order; a session's turns share what their prompts share."""

    def __init__(self, turns: Sequence[ScaledTurn], seed: int) -> None:
        """Starts the process."""
        tasks = [_Task(turn.session_id, turn.prompt.tolist(), turn.output_tokens) for turn in turns]
        context = multiprocessing.get_context("spawn")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_compute, args=(tasks, seed, sender), name="reference", daemon=True)
        self._process.start()
        sender.close()
        self._answers: list[tuple[int, ...]] = []

    def of(self, turn: int) -> tuple[int, ...]:
        """Token ids of the answer to turn `turn`; waits for it.

        Raises NotReady when the process died or takes longer than `ANSWER_TIMEOUT_S` for one answer.
        """
        while len(self._answers) <= turn:
            if not self._receiver.poll(ANSWER_TIMEOUT_S):
                raise NotReady(f"no reference answer for turn {len(self._answers)} in {ANSWER_TIMEOUT_S:.0f} s")
            try:
                self._answers.append(self._receiver.recv())
            except EOFError:
                self._process.join()
                code = self._process.exitcode
                raise NotReady(f"the reference run ended with exit code {code} before turn {turn}") from None
        return self._answers[turn]

    @property
    def ready(self) -> int:
        """Answers received so far; takes in what has arrived."""
        while self._receiver.poll() and self._process.is_alive():
            try:
                self._answers.append(self._receiver.recv())
            except EOFError:
                break
        return len(self._answers)

    def close(self) -> None:
        """Ends the process, finished or not."""
        self._process.kill()
        self._process.join()
        self._receiver.close()


def _compute(tasks: Sequence[_Task], seed: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    model = demo_model(seed)
    runs: dict[str, ReferenceRun] = {}
    for task in tasks:
        run = runs.setdefault(task.session_id, ReferenceRun(model))
        sender.send(tuple(run.turn(task.prompt, task.output_tokens)))
