"""Lanes that play one session after the other: who asks next, and when.

Closed loop: a lane's next request starts a gap after the answer to the one before it ended, whenever that was. Gaps are
the recorded ones, capped. Each play of a session has keys of its own: two plays never share a prefix.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Protocol

from kvmanager.errors import InvalidArgument
from kvmanager.replay.stream import GAP_CAP_S, Request, Session, number_nodes

FIRST_START_SPREAD_S: Final = 20.0
NEXT_SESSION_AFTER_S: Final = 0.5
ONE_TOKEN_S: Final = 0.1
"""What a warm-up request of one token takes: its prompt is cached."""


class Source(Protocol):
    """Where requests come from."""

    @property
    def next_s(self) -> float:
        """When the next request starts; infinity while none is due."""

    def take(self) -> Request:
        """That request."""

    def ended(self, request: Request, end_s: float) -> None:
        """Its answer ends then."""

    def idle(self, now_s: float) -> None:
        """Nothing runs now."""


@dataclass(frozen=True)
class Rules:
    """How lanes begin, and what is cut.

    first_step(session, dice): where a lane's first session begins. one_token_requests: with how many of them a lane
    warms up behind the request before that point; None: there is no warm-up, a lane begins at the point itself.
    idle_cap_s: when nothing runs for longer, all that is to come comes earlier.
    """

    first_step: Callable[[Session, random.Random], int]
    one_token_requests: int | None = None
    idle_cap_s: float = float("inf")


def _somewhere(session: Session, dice: random.Random) -> int:
    """The step that runs at a moment drawn evenly over the session's length (gaps capped); never the last."""
    lengths = [min(step.gap_s, GAP_CAP_S) + step.service_s for step in session.steps]
    mark, passed = dice.random() * sum(lengths), 0.0
    for number, length in enumerate(lengths[:-1]):
        passed += length
        if passed > mark:
            return number
    return 0


def _middle_half(session: Session, dice: random.Random) -> int:
    """The request before a point at 25 to 75 % of the session's turns."""
    return max(0, int(dice.uniform(0.25, 0.75) * len(session.steps)) - 1)


RULES: Final = {
    "tables": Rules(_somewhere),
    "agentx": Rules(_middle_half, one_token_requests=10, idle_cap_s=10.0),
}
"""`tables`: as the published hit-rate tables were made. `agentx`: InferenceX's replay of the same sessions."""


@dataclass
class _Lane:
    """A play of a session, and the step that comes next. warm_left: warm-up requests to come; 0: it is warm."""

    play: int
    session: Session
    at: int
    warm_left: int = 0


class Lanes:
    """`count` sessions at one time, taken in an order drawn from `seed`, again and again. Raises InvalidArgument."""

    def __init__(self, sessions: list[Session], count: int, seed: int, rules: Rules) -> None:
        if not sessions or count < 1:
            raise InvalidArgument(f"{len(sessions)} sessions on {count} lanes: at least one of each is needed")
        dice = random.Random(seed)
        self._sessions, self._rules = sessions, rules
        self._order = list(range(len(sessions)))
        dice.shuffle(self._order)
        self._plays = 0
        self._waiting: list[tuple[float, int]] = []
        self._held: list[tuple[int, float]] = []  # warm lanes and their gaps
        self._lanes: list[_Lane] = []
        self._runs: dict[int, int] = {}  # play -> its lane
        warm = 0 if rules.one_token_requests is None else 1 + rules.one_token_requests
        for number in range(count):
            lane = self._next_session()
            lane.at, lane.warm_left = rules.first_step(lane.session, dice), warm
            self._lanes.append(lane)
            self._runs[lane.play] = number
            heapq.heappush(self._waiting, (dice.random() * FIRST_START_SPREAD_S, number))
        self._cold = count if warm else 0

    def _next_session(self) -> _Lane:
        session = self._sessions[self._order[self._plays % len(self._order)]]
        if not session.nodes:
            number_nodes(session)
        self._plays += 1
        return _Lane(self._plays - 1, session, 0)

    @property
    def next_s(self) -> float:
        """When the next request starts; infinity while all lanes wait for answers."""
        return self._waiting[0][0] if self._waiting else float("inf")

    def take(self) -> Request:
        """The next request, as if its answer took as long as the recorded one."""
        start_s, number = heapq.heappop(self._waiting)
        lane = self._lanes[number]
        step = lane.session.steps[lane.at]
        last = lane.at + 1 == len(lane.session.steps)
        nodes = lane.session.nodes[lane.at]
        request = Request(start_s, start_s + step.service_s, lane.play, nodes, step.stop_reason, last)
        if not lane.warm_left:
            return request
        extra = lane.warm_left <= (self._rules.one_token_requests or 0)
        end_s = start_s + ONE_TOKEN_S if extra else request.end_s
        return replace(request, end_s=end_s, last=last and lane.warm_left == 1, warm_up=True)

    def ended(self, request: Request, end_s: float) -> None:
        """The lane's next request follows after its gap; behind the warm-up when all lanes are warm."""
        number = self._runs[request.play]
        lane = self._lanes[number]
        if lane.warm_left > 1:
            lane.warm_left -= 1
            heapq.heappush(self._waiting, (end_s, number))
            return
        lane.at += 1
        gap = min(lane.session.steps[lane.at].gap_s, GAP_CAP_S) if not request.last else NEXT_SESSION_AFTER_S
        if request.last:
            del self._runs[request.play]
            self._lanes[number] = self._next_session()
            self._runs[self._lanes[number].play] = number
        if lane.warm_left:
            lane.warm_left = 0
            self._warmed(number, end_s, gap)
        else:
            heapq.heappush(self._waiting, (end_s + gap, number))

    def _warmed(self, number: int, end_s: float, gap_s: float) -> None:
        """A warm lane waits for the others, so that all go on at one moment."""
        self._cold -= 1
        self._held.append((number, gap_s))
        if not self._cold:
            for held, gap in self._held:
                heapq.heappush(self._waiting, (end_s + gap, held))

    def idle(self, now_s: float) -> None:
        """All that is to come comes earlier, by what the next would come later than the cap allows."""
        surplus = self.next_s - now_s - self._rules.idle_cap_s
        if 0 < surplus < float("inf"):
            self._waiting = [(moment - surplus, number) for moment, number in self._waiting]


def told(source: Source, requests: int) -> Iterator[Request]:
    """`requests` requests in order of their start, each answered when the recorded one was."""
    runs_until_s = 0.0
    for _ in range(requests):
        if source.next_s > runs_until_s:
            source.idle(runs_until_s)
        request = source.take()
        runs_until_s = max(runs_until_s, request.end_s)
        yield request
        source.ended(request, request.end_s)


def stream(sessions: list[Session], lanes: int, requests: int, seed: int) -> Iterator[Request]:
    """The same of lanes, by the rules of the tables. Raises InvalidArgument."""
    return told(Lanes(sessions, lanes, seed, RULES["tables"]), requests)
