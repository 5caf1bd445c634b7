"""The replay: a prefill engine, two decode ranks, and the recorded turns through them in rounds.

A round is one turn of each session. Prompts are prefilled one after the other and pulled by their decode
rank as soon as they are ready; a rank decodes what the round brought it side by side. The turns of a
session go to one rank. Between turns the recorded tokens are used, whatever was decoded.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

from kvmanager.clients.decode_engine import DecodeEngine
from kvmanager.clients.decode_work import Decoded, DecodeWork
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.prefill_engine import Prefilled, PrefillEngine
from kvmanager.demo.expected import ExpectedAnswers
from kvmanager.demo.fault import inject_fault
from kvmanager.demo.nodes import (
    DECODE_NODE,
    DECODE_RANKS,
    HOT_ROWS,
    NAMESPACE,
    PAGE_ROWS,
    PREFILL_GROUP,
    PREFILL_NODE,
    SOURCE_RANKS,
)
from kvmanager.demo.progress import Progress
from kvmanager.demo.report import TurnRecord
from kvmanager.demo.sessions import DemoPlan, ScaledTurn
from kvmanager.errors import InvalidArgument, KVError, NotReady
from kvmanager.geometry import ShardGeometry
from kvmanager.protos import kvmanager_pb2 as pb

ARRIVAL_TIMEOUT_S: Final = 5.0
"""How long a rank waits for a request to arrive before it decodes those it has."""


@dataclass(frozen=True)
class Handed:
    """A turn that was prefilled and is given to a decode rank."""

    number: int
    turn: ScaledTurn
    prefilled: Prefilled


@dataclass(frozen=True)
class Answered:
    """A turn with its answer."""

    handed: Handed
    decoded: Decoded


class DecodeRank:
    """A decode engine and its thread: pulls at once what it is handed, decodes when told to."""

    def __init__(self, runtime_dir: Path, name: str, model: Glm, progress: Progress, *, faulty: bool) -> None:
        """Registers and attaches. `faulty`: corrupt one byte of the first request that can't hide it."""
        self._engine = DecodeEngine(
            runtime_dir,
            name,
            group=name,
            namespace=NAMESPACE,
            page_rows=PAGE_ROWS,
            hot_rows=HOT_ROWS,
            model=model,
        )
        self._model = model
        self._progress = progress
        self._faulty = faulty
        self._handed: dict[int, Handed] = {}
        self._thread = ThreadPoolExecutor(1, name, torch.set_num_threads, (1,))

    def __enter__(self) -> DecodeRank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._engine.close()

    def pull(self, handed: Handed) -> Future[None]:
        """Starts to take over a turn's KV."""
        return self._thread.submit(self._pull, handed)

    def decode(self) -> Future[list[Answered]]:
        """Starts to decode everything pulled before."""
        return self._thread.submit(self._decode)

    def _pull(self, handed: Handed) -> None:
        self._say(f"pulling turn {handed.number + 1}, session {handed.turn.session_id}")
        work = DecodeWork(
            prompt=handed.turn.prompt,
            first_token=handed.prefilled.first_token,
            ticket=handed.prefilled.ticket,
            output_tokens=handed.turn.output_tokens,
            session=pb.SessionHint(session_id=handed.turn.session_id),
            stop_reason=handed.turn.stop_reason,
        )
        request_id = self._engine.submit(work)
        self._handed[request_id] = handed
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
        while time.monotonic() < deadline:
            if any(request.request_id == request_id for request in self._engine.admit()):
                return

    def _decode(self) -> list[Answered]:
        if self._faulty:
            self._corrupt()
        answered = []
        while not self._engine.idle:
            turnover = self._engine.step()
            lengths = ", ".join(
                f"turn {self._handed[request.request_id].number + 1}: {len(request.answer)} tokens"
                for request in self._engine.running
            )
            self._say(lengths or "done")
            for decoded in turnover.finished:
                answered.append(Answered(self._handed.pop(decoded.request_id), decoded))
                self._tell(answered[-1])
        return answered

    def _corrupt(self) -> None:
        """One byte, once. Raises InvalidArgument when no request here has a byte that can't hide."""
        for request in self._engine.running:
            prompt = torch.from_numpy(request.work.prompt)
            first_token = request.tokens[len(prompt)]
            place = inject_fault(self._model, prompt, first_token, request.opened, self._engine.latent)
            if place is not None:
                self._faulty = False
                turn = self._handed[request.request_id].number + 1
                self._progress.say("demo", f"flipped one bit for turn {turn}: {place}")
                return
        raise InvalidArgument("nothing to corrupt: the next step reads no row from host memory; make the pool smaller")

    def _say(self, what: str) -> None:
        self._progress.say(self._engine.name, what)

    def _tell(self, answered: Answered) -> None:
        prefilled, decoded = answered.handed.prefilled, answered.decoded
        self._progress.turn_done(
            f"session {answered.handed.turn.session_id}, {prefilled.prompt_tokens} prompt tokens "
            f"({prefilled.cached_tokens} reused), {len(decoded.tokens)} decoded, "
            f"{decoded.drafts_accepted}/{decoded.drafts_proposed} drafts accepted"
        )


class Replay:
    """Drives the engines through the plan. The prefill engine has this thread, each decode rank one of its own."""

    def __init__(
        self, plan: DemoPlan, model: Glm, directory: Path, expected: ExpectedAnswers, progress: Progress
    ) -> None:
        self._plan = plan
        self._model = model
        self._directory = directory
        self._expected = expected
        self._progress = progress
        self._answers: list[Answered] = []
        self.records: list[TurnRecord] = []
        """Answered turns, in replay order."""
        self.failures: list[str] = []
        """What stopped the replay, or should have."""

    @property
    def swap_in_rows(self) -> int:
        """Rows that steps found neither resident nor hot."""
        return sum(answered.decoded.swap_in_rows for answered in self._answers)

    def run(self, *, faulty: bool) -> None:
        """Replays all turns, closes the engines, and compares; a failure ends it early and is noted.

        `faulty`: one byte is corrupted on the way.
        """
        torch.set_num_threads(1)
        try:
            with ExitStack() as stack:
                self._drive(stack, faulty=faulty)
        except KVError as error:
            self.failures.append(f"the replay stopped: {type(error).__name__}: {error}")
        self._progress.say("demo", "waiting for the reference run")
        self._compare()

    def _drive(self, stack: ExitStack, *, faulty: bool) -> None:
        prefill = PrefillEngine(
            self._directory / PREFILL_NODE,
            PREFILL_GROUP,
            group=PREFILL_GROUP,
            namespace=NAMESPACE,
            geometry=ShardGeometry(SOURCE_RANKS, PAGE_ROWS, 1),
            model=self._model,
        )
        stack.callback(prefill.close)
        decode_dir = self._directory / DECODE_NODE
        ranks = [
            stack.enter_context(
                DecodeRank(decode_dir, name, self._model, self._progress, faulty=faulty and name == DECODE_RANKS[0])
            )
            for name in DECODE_RANKS
        ]
        numbered = list(enumerate(self._plan.turns))
        for first in range(0, len(numbered), len(self._plan.lanes)):
            turns = numbered[first : first + len(self._plan.lanes)]
            answers = self._round(prefill, ranks, turns)
            self._answers += itertools.chain.from_iterable(answer.result() for answer in answers)
            prefill.end_turns([self._end_of(number, turn) for number, turn in turns])

    def _end_of(self, number: int, turn: ScaledTurn) -> pb.TurnEnd:
        """What the prefill node is told once a turn's answer is complete."""
        more = any(later.session_id == turn.session_id for later in self._plan.turns[number + 1 :])
        return pb.TurnEnd(session_id=turn.session_id, stop_reason=turn.stop_reason, session_ends=int(not more))

    def _round(
        self, prefill: PrefillEngine, ranks: list[DecodeRank], turns: list[tuple[int, ScaledTurn]]
    ) -> list[Future[list[Answered]]]:
        """One turn of each session; ranks start to decode when they have all of theirs."""
        by_rank: list[list[tuple[int, ScaledTurn]]] = [[] for _ in ranks]
        for number, turn in turns:
            by_rank[self._plan.lanes.index(turn.session_id) % len(ranks)].append((number, turn))
        answers = []
        for rank, share in zip(ranks, by_rank, strict=True):
            pulls = [rank.pull(Handed(number, turn, self._prefill(prefill, number, turn))) for number, turn in share]
            answers.append(rank.decode())
            for pull in pulls:
                pull.result()
        return answers

    def _prefill(self, engine: PrefillEngine, number: int, turn: ScaledTurn) -> Prefilled:
        what = f"turn {number + 1}, session {turn.session_id}: "
        self._progress.say("prefill", what + "matching")
        prefilled = engine.prefill(
            turn.prompt,
            pb.SessionHint(session_id=turn.session_id),
            lambda done: self._progress.say("prefill", what + f"{done}/{len(turn.prompt)} tokens"),
        )
        self._progress.say("prefill", what + "done")
        return prefilled

    def _compare(self) -> None:
        for answered in sorted(self._answers, key=lambda answered: answered.handed.number):
            handed, decoded = answered.handed, answered.decoded
            try:
                expected = self._expected.of(handed.number)
            except NotReady as error:
                self.failures.append(str(error))
                return
            self.records.append(
                TurnRecord(
                    turn=handed.number + 1,
                    session_id=handed.turn.session_id,
                    prompt_tokens=handed.prefilled.prompt_tokens,
                    cached_tokens=handed.prefilled.cached_tokens,
                    answer=decoded.tokens,
                    expected=expected,
                    drafts_proposed=decoded.drafts_proposed,
                    drafts_accepted=decoded.drafts_accepted,
                )
            )
