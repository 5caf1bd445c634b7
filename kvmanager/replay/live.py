"""A replay on a running node: one engine that asks over gRPC what the virtual one asks the core.

One thing happens at a time, in the stream's order. Without a `speed` every copy that was asked for has ended before
the next thing happens, as in virtual time, so that both runs find the same. With one, things happen at the recorded
moments, so many times faster, and copies run beside them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvmanager.clients.admin import AdminClient
from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.core.plans import Purpose
from kvmanager.errors import CapacityError, InvalidArgument
from kvmanager.pressure.driver import Target
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.replay.content import Content
from kvmanager.replay.course import Course, Progressed, Served
from kvmanager.replay.lanes import Source
from kvmanager.replay.stream import BLOCK_TOKENS, Request
from kvmanager.replay.tierreport import Cache, Tally, TierReport, figures, published_rates
from kvmanager.wire import error_from_proto

DRIVEN: Final = ("sharded", "replicated")
COPY_TIMEOUT_S: Final = 120.0
"""How long copies under way may take."""
POLL_S: Final = 0.002
RETRY_S: Final = 0.05


@dataclass(frozen=True)
class LiveTarget:
    """Where to replay. group: "" for the first one that can be driven. speed: 0 for as fast as the node goes.

    write_bytes: rows are written, and a sample of what a request finds is read and compared.
    """

    runtime_dir: Path
    group: str = ""
    speed: float = 0.0
    write_bytes: bool = False


@dataclass(frozen=True, kw_only=True)
class LiveReport(TierReport):
    """The same of a running node, and what only there is to see: times of this machine, and bytes.

    open_*_ms: round trip of the message that opens a request. checked_rows: of what was found, read and compared.
    """

    node: str
    group: str
    speed: float
    wall_s: float
    open_p50_ms: float
    open_p99_ms: float
    copied_bytes: dict[str, int]
    checked_rows: int
    wrong_bytes: int


class LiveEngine:
    """The one engine of a replay on a node. high_water: by pool of its group, most bytes that were seen not free."""

    def __init__(self, target: Target, admin: AdminClient, speed: float, content: Content | None) -> None:
        self._target, self._admin, self._speed, self._content = target, admin, speed, content
        self._engine = AttachedEngine(
            target.runtime_dir, f"replay-{target.revision}", group=target.group, namespace=target.namespace,
            layouts=list(target.layouts.values()), ranks=target.ranks,
        )  # fmt: skip
        self._began_s = time.monotonic()
        self.high_water: dict[str, int] = {}
        self.opens_s: list[float] = []

    def at(self, moment_s: float) -> None:
        """Waits for the moment, where the replay has a speed."""
        if self._speed:
            time.sleep(max(self._began_s + moment_s / self._speed - time.monotonic(), 0.0))

    def tick(self) -> None:
        """The node has a clock of its own."""

    def settle(self) -> None:
        """What was given back is free, and copies have ended; a refusal may pass a moment later."""
        self._step()
        self._wait_for_copies()
        time.sleep(RETRY_S)

    def open(self, number: int, request: Request) -> Served:
        """Admits a request, waits for its bytes, and commits its prompt."""
        tokens = request.tokens + 1
        loaded = self.counts()[f"bytes/{Purpose.ONBOARD.value}"]
        hint = pb.SessionHint(session_id=request.session_id)
        asked = pb.OpenRequest(request_id=number, prompt_tokens=tokens, prompt_keys=request.keys(), session=hint)
        began = time.perf_counter()
        opened = self._step(opens=[asked]).opened[number]
        self.opens_s.append(time.perf_counter() - began)
        try:
            if opened.state == pb.OpenReply.WAITING:
                opened = self._engine.client.wait_ready(number, COPY_TIMEOUT_S)
            elif opened.state == pb.OpenReply.REFUSED:
                raise error_from_proto(opened.error)
        except CapacityError as refusal:
            return Served(refusal=refusal)
        self._note_high_water()
        self._engine.workers.run_plans(opened.worker_plans)
        if self._content is not None:
            self._content.request(self._engine.workers.ranks, request, opened)
        self._step(requests=[RequestStep(number, tokens, tokens)])
        self._wait_for_copies()
        # A page of one rank holds 64 tokens of a span; replicated ranks all load the same.
        ranks = self._target.ranks // self._target.shards
        size = self._target.layouts["kv"].page_bytes * ranks // BLOCK_TOKENS
        moved = self.counts()[f"bytes/{Purpose.ONBOARD.value}"] - loaded
        return Served(opened.cached_tokens, moved // size)

    def close(self, number: int) -> None:
        """The request gives its pages back; what it committed stays cached."""
        self._step(closes=[pb.CloseRequest(request_id=number, reason=pb.FINISHED)])
        self._wait_for_copies()

    def turn_ends(self, request: Request) -> None:
        """The request's answer is complete: its session is idle, or over."""
        if request.session_id:
            ends = pb.TurnEnd(
                session_id=request.session_id, stop_reason=request.stop_reason, session_ends=int(request.last)
            )
            self._step(turn_ends=[ends])
            self._wait_for_copies()

    def _step(self, **what: Any) -> Any:
        result = self._engine.client.step(fence=self._engine.workers.fence(), **what)
        for error in result.errors.values():
            raise error
        return result

    def _wait_for_copies(self) -> None:
        """Until nothing is under way; not where time runs by itself."""
        deadline = time.monotonic() + COPY_TIMEOUT_S
        while not self._speed and time.monotonic() < deadline:
            if not self._admin.transfers().transfers:
                return
            time.sleep(POLL_S)

    def _note_high_water(self) -> None:
        for pool in self._admin.pools().pools:
            if pool.pool.startswith(f"{self._target.group}/"):
                used = pool.capacity_bytes - pool.free_bytes
                self.high_water[pool.pool] = max(self.high_water.get(pool.pool, 0), used)

    def counts(self) -> Counter[str]:
        """The node's counters, and bytes of copies that ended, all ranks."""
        status = self._admin.status()
        moved = {f"bytes/{purpose}": size for purpose, size in status.copied_bytes.items()}
        return Counter(dict(status.counters)) + Counter(moved)

    def leave(self) -> None:
        """Detaches and ends the session."""
        self._engine.close()


def _chosen(admin: AdminClient, where: LiveTarget, revision: str) -> tuple[Target, dict[str, Any]]:
    """The group to drive and the node's configuration. Raises InvalidArgument."""
    config = json.loads(admin.config().json)
    named = [group for group in config["groups"] if where.group in ("", group["name"])]
    fitting = [group for group in named if group["kind"] in DRIVEN and group["page_rows"] == BLOCK_TOKENS]
    if not fitting:
        raise InvalidArgument(
            f"the node in {where.runtime_dir} has no group {where.group!r} of kind {' or '.join(DRIVEN)} with pages of "
            f"{BLOCK_TOKENS} tokens, the blocks of a recorded prompt"
        )
    group = fitting[0]
    target = Target(
        where.runtime_dir, group["name"], group["kind"], group["format"], group["ranks"], group["page_rows"], revision
    )
    return target, config


def _cache_of(target: Target, config: dict[str, Any]) -> Cache:
    group = next(group for group in config["groups"] if group["name"] == target.group)
    page = target.layouts["kv"].page_bytes
    device, host = (group[f"{tier}_bytes_per_rank"] // page for tier in ("hbm", "host"))
    tokens = (device * target.span_tokens, host * target.page_rows * target.ranks)
    inclusion = str(config["offload"]["inclusion"])
    return Cache(str(config["eviction"]["policy"]), inclusion, tokens, target.ranks, target.span_tokens)


def replay_live(
    source: Source, total: int, holds: float, where: LiveTarget, progress: Progressed = None
) -> LiveReport:
    """Replays `total` requests on the node, as an engine of its own name. Raises InvalidArgument, NotReady.

    The keys name this run alone: a node may be used, and replayed on again, without one run finding another's KV.
    """
    revision = secrets.token_hex(4)
    with AdminClient(where.runtime_dir) as admin:
        target, config = _chosen(admin, where, revision)
        content = Content(target) if where.write_bytes else None
        began = time.monotonic()
        engine, tally = LiveEngine(target, admin, where.speed, content), Tally()

        def begin() -> None:
            tally.before = engine.counts()

        try:
            course = Course(engine, source, holds, tally.count, begin, progress)
            course.run(total)
            after = engine.counts()
        finally:
            engine.leave()
        cache = _cache_of(target, config)
        told = figures(cache, total, tally, after, course.queueing, engine.high_water, published_rates())
        return LiveReport(
            **told,
            node=str(config["node"]["name"]),
            group=target.group,
            speed=where.speed,
            wall_s=time.monotonic() - began,
            open_p50_ms=_share_ms(engine.opens_s, 0.5),
            open_p99_ms=_share_ms(engine.opens_s, 0.99),
            copied_bytes={
                name.removeprefix("bytes/"): size - tally.before[name]
                for name, size in sorted(after.items())
                if name.startswith("bytes/")
            },
            checked_rows=content.checked_rows if content else 0,
            wrong_bytes=content.wrong_bytes if content else 0,
        )


def _share_ms(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds)
    return 1e3 * ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0
