"""The reference deployment in virtual time: one prefill node, one decode node, lanes of agent sessions.

The configurations are the published files of this package, each memory group with a core of its own. Time comes from
the roofline and the links, never from this machine, so a run is a function of its settings and its seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from typing import Final

from kvmanager.configuration.groups import plan_memory
from kvmanager.configuration.reading import parse_config
from kvmanager.core.spec import Inclusion, Limits
from kvmanager.errors import InvalidArgument
from kvmanager.replay.stream import BLOCK_TOKENS
from kvmanager.simulation.clock import Clock
from kvmanager.simulation.costs import Chunk, Costs
from kvmanager.simulation.decode import DecodeNode
from kvmanager.simulation.jobs import Job, Rank
from kvmanager.simulation.prefill import PrefillNode
from kvmanager.simulation.rates import link_rates
from kvmanager.simulation.turns import Play, Turn, starting_point

DEPLOYMENTS: Final = {
    "dp8-offload": ("prefill-dp8", "decode-offload-only"),
    "dp8-hisparse": ("prefill-dp8", "decode-hisparse"),
    "pcp8dcp8-offload": ("prefill-pcp8-dcp8", "decode-offload-only"),
    "pcp8dcp8-hisparse": ("prefill-pcp8-dcp8", "decode-hisparse"),
}
SPAN_BLOCKS: Final = 8
"""Blocks of 64 tokens in what an engine under DCP8 reuses as a whole: 512 tokens."""
BATCH_SPANS: Final = 256
"""Copies are cut more coarsely than a node does (32), for the sake of this machine's time."""
START_SPREAD_S: Final = 20.0
IDLE_CAP_S: Final = 10.0
NEXT_SESSION_AFTER_S: Final = 0.5
NO_LEASE_ENDS_NS: Final = 1 << 60
"""Heartbeats are not modelled: a ticket lives until it is released."""


@dataclass(frozen=True)
class Settings:
    """One run. seconds: of virtual time that count, after the warm-up.

    whole_spans: a prompt reuses whole spans of its prefill engine only, as an engine with blocks of that size does.
    overlap: the gather of a layer's shards runs beside the layer before it. return_path: a decode rank sends an
    answer's KV back to the prefill node, where the session's next prompt finds it. decode_hbm_bytes: for pages on each
    decode rank, instead of the published configuration's; 0: as published.
    """

    deployment: str
    lanes: int
    seconds: float = 900.0
    seed: int = 42
    policy: str = "lru"
    inclusion: str = "inclusive"
    whole_spans: bool = True
    overlap: bool = False
    return_path: bool = False
    decode_hbm_bytes: int = 0

    def __post_init__(self) -> None:
        if self.deployment not in DEPLOYMENTS:
            raise InvalidArgument(f"no deployment {self.deployment!r}; there are {', '.join(DEPLOYMENTS)}")
        if self.lanes < 1 or self.seconds <= 0:
            raise InvalidArgument(f"{self.lanes} lanes for {self.seconds} s: at least one lane and some time")


def ranks_of(name: str, limits: Limits, policy: str, clock: Clock, hbm_bytes: int = 0) -> list[Rank]:
    """The groups of a published configuration, each with a core of its own. hbm_bytes: of a rank; 0: as published."""
    config = parse_config(files("kvmanager").joinpath(f"deployments/{name}.toml").read_text("utf-8"))
    if hbm_bytes:
        config = replace(config, groups=tuple(replace(g, hbm_bytes_per_rank=hbm_bytes) for g in config.groups))
    groups = [spec for spec in plan_memory(config).groups if not spec.one_holder]  # workspaces hold no KV
    return [Rank(spec, limits, policy, clock, link_rates()) for spec in groups]


@dataclass
class Lane:
    """One session at a time."""

    play: Play
    warmed: bool = False


class Deployment:
    """Both nodes and the lanes. jobs: every request that was sent, in order. counting_s: when the warm-up was over."""

    def __init__(self, settings: Settings, sessions: Iterator[Play], costs: Costs) -> None:
        self.settings, self.clock = settings, Clock()
        self._costs = costs.overlapped() if settings.overlap else costs
        prefill, decode = DEPLOYMENTS[settings.deployment]
        limits = Limits(
            inclusion=Inclusion(settings.inclusion),
            ticket_ttl_ns=NO_LEASE_ENDS_NS,
            pull_deadline_ns=NO_LEASE_ENDS_NS,
            growth_cap_tokens=1 << 20,
            batch_spans=BATCH_SPANS,
        )
        self.prefill_ranks = ranks_of(prefill, limits, settings.policy, self.clock)
        # Answers are not asked for again in these sessions, and each decode rank keeps what it has by recency.
        self.decode_ranks = ranks_of(decode, limits, "lru", self.clock, settings.decode_hbm_bytes)
        self.sharded = self.prefill_ranks[0].spec.ranks > 1
        engine = costs.told["engine"]
        whole = SPAN_BLOCKS if settings.whole_spans and self.sharded else 1
        self.prefill = PrefillNode(
            self.prefill_ranks, self.clock, self._prefill_s, int(engine["step_tokens"]), self._handed, whole
        )
        self.decode = DecodeNode(
            self.decode_ranks, self.clock, self._costs.decode_s, engine["accepted_tokens"], self._ended
        )
        self.jobs: list[Job] = []
        self.counting_s = -1.0
        self._sessions = sessions
        self._arrivals: list[tuple[float, int, int, Turn]] = []
        self._flying = 0
        self._lanes: list[Lane] = []
        self._lane_of: dict[int, int] = {}
        self._held: list[int] = []

    def _prefill_s(self, batches: list[list[Chunk]]) -> float:
        return self._costs.pcp_prefill_s(batches[0], True) if self.sharded else self._costs.dp_prefill_s(batches)

    # -------------------------------------------------------------------------------------- lanes

    def run(self, warm_up: bool = True) -> None:
        """Until the counted time is over, or nothing is left to do."""
        dice = random.Random(self.settings.seed)
        for number in range(self.settings.lanes):
            play = next(self._sessions, None)
            if play is None:
                break
            if warm_up:
                starting_point(play, dice)
            self._lanes.append(Lane(play))
            self._next_turn(number, dice.random() * START_SPREAD_S)
        if not warm_up:
            self.counting_s = 0.0
        while self._advance():
            if self.counting_s >= 0 and self.clock.now_s > self.counting_s + self.settings.seconds:
                return

    def _advance(self) -> bool:
        """The next thing of all: an arrival or what the nodes do."""
        if self._flying == 0 and self._arrivals:
            self._cut_idle_time()
        if self._arrivals and self._arrivals[0][0] <= self.clock.next_s:
            moment, _, lane, turn = heapq.heappop(self._arrivals)
            self.clock.at(moment, partial(self._arrive, lane, turn))
        if self.clock.next_s == float("inf"):
            return False
        self.clock.advance()
        return True

    def _cut_idle_time(self) -> None:
        """Nobody computes: the next arrival comes after 10 s at the latest, and all others as much earlier."""
        surplus = self._arrivals[0][0] - self.clock.now_s - IDLE_CAP_S
        if surplus > 0:
            self._arrivals = [(moment - surplus, *rest) for moment, *rest in self._arrivals]  # type: ignore[misc]

    def _next_turn(self, lane: int, at_s: float) -> None:
        turn = self._lanes[lane].play.take()
        if turn is None:
            play = next(self._sessions, None)
            if play is None:
                return
            self._lanes[lane].play = play
            turn = play.take()
            assert turn is not None
        heapq.heappush(self._arrivals, (at_s, len(self.jobs) + len(self._arrivals), lane, turn))

    def _arrive(self, lane: int, turn: Turn) -> None:
        job = Job(len(self.jobs) + 1, turn, self.clock.now_s, self._ended)
        self.jobs.append(job)
        self._lane_of[job.number] = lane
        self._flying += 1
        self.prefill.submit(job)

    def _handed(self, job: Job) -> None:
        self.decode.submit(job)

    def _ended(self, job: Job) -> None:
        """An answer is complete, or its prompt can't be served: the lane's next turn follows after its gap."""
        self._flying -= 1
        lane = self._lane_of.pop(job.number)
        self.prefill.turn_ends(job)
        if job.refused:
            self._lanes[lane].play.at = len(self._lanes[lane].play.turns)
        elif self.settings.return_path:
            self._send_back(lane, job)
        self._lanes[lane].warmed = True
        if self.counting_s < 0:
            self._held.append(lane)
            if all(each.warmed for each in self._lanes):
                self.counting_s = self.clock.now_s
                for held in self._held:
                    self._go_on(held)
            return
        self._go_on(lane)

    def _send_back(self, lane: int, job: Job) -> None:
        """The answer's whole blocks, as far as the session's next prompt goes on with them."""
        play, turn = self._lanes[lane].play, job.turn
        if play.at >= len(play.turns):
            return
        following = play.turns[play.at].nodes
        blocks = len(turn.nodes)
        if len(following) <= blocks or (following[:blocks] != turn.nodes).any():
            return
        answered = (turn.prompt_tokens + turn.output_tokens) // BLOCK_TOKENS
        self.prefill.take_back(job, replace(turn, nodes=following[:answered]))

    def _go_on(self, lane: int) -> None:
        play = self._lanes[lane].play
        gap = play.turns[play.at].gap_s if play.at < len(play.turns) else NEXT_SESSION_AFTER_S
        self._next_turn(lane, self.clock.now_s + gap)
