"""What is counted and timed while the node works: one observer of the owner loop, one of gRPC calls.

All else is read from the core's state when somebody asks (`metrics.py`). The loop's observer runs in the core,
after the effects have left: nobody waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

from kvmanager.core.events import (
    Effect,
    Event,
    Notified,
    Opened,
    PlanEnded,
    Replied,
    StartPull,
    Step,
    StepDone,
    SubmitPlan,
    Tick,
)
from kvmanager.errors import CapacityError, KVError

_FAST_S: Final = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 5.0)
_SLOW_S: Final = (1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKENS: Final = tuple(float(1 << power) for power in range(6, 21, 2))
_PLANS_MOST: Final = 65_536
"""Plans whose beginning is remembered; a plan beyond is not timed."""
JOBS: Final[Mapping[str, Sequence[str]]] = {
    "writeback": ("offload", "mirror"),
    "writeback_retry": ("writeback_retry", "writeback_again"),
    "eviction": ("eviction",),
    "reclaim": ("reclaim", "host_reclaim"),
    "spill": ("spill",),
    "extent_move": ("extent_move",),
    "lease_expiry": ("expired_ticket", "expired_lease"),
    "host_eviction": ("host_eviction",),
    "checksum": ("summed_page", "checked_page"),
    "scrub": ("scrubbed_page",),
}
"""Background job -> the core's counters of what it did."""
_JOB_COUNTERS: Final = tuple(name for names in JOBS.values() for name in names)


class Meter:
    """Counts and times. `registry` holds what Prometheus is told of it."""

    def __init__(
        self, registry: CollectorRegistry, counters: Mapping[str, int], tenant_of: Callable[[str], str]
    ) -> None:
        """`counters`: the core's own, read in the core; so is `tenant_of(engine)`, "" for one that is not known."""
        self._counters = counters
        self._tenant_of = tenant_of
        self._known = {job: self._done(job) for job in JOBS}
        self._all_done = sum(map(counters.__getitem__, _JOB_COUNTERS))
        self._began: dict[int, tuple[str, int, float]] = {}
        self.copied_bytes: dict[str, int] = {}
        """A plan's purpose -> bytes of those that ended well; read it in the core."""
        self._hot: dict[tuple[str, int], tuple[int, int]] = {}
        self._events = Histogram(
            "kvmanager_core_event_duration_seconds",
            "Time the core takes for one event, its journal record included.",
            ["event"],
            buckets=_FAST_S,
            registry=registry,
        )
        self._event_of: dict[type, Histogram] = {}
        self._match = Histogram(
            "kvmanager_match_duration_seconds",
            "Time the core takes for a message that opens requests: match, admission, pages.",
            buckets=_FAST_S,
            registry=registry,
        )
        self._matched = Histogram(
            "kvmanager_match_tokens",
            "Tokens of a request's prompt that were found in the cache.",
            ["tenant"],
            buckets=(0.0, *_TOKENS),
            registry=registry,
        )
        self._copies = Histogram(
            "kvmanager_copy_duration_seconds",
            "Time from a plan's decision to its end.",
            ["purpose", "outcome"],
            buckets=_SLOW_S,
            registry=registry,
        )
        self._copied = Counter(
            "kvmanager_copied_bytes", "Bytes of plans that ended well.", ["purpose"], registry=registry
        )
        self._handoffs = Histogram(
            "kvmanager_handoff_duration_seconds",
            "Time from the admission of a handed-off request to the end of its pull.",
            ["outcome"],
            buckets=_SLOW_S,
            registry=registry,
        )
        self._refusals = Counter(
            "kvmanager_refusals",
            "Answers and notices that were errors.",
            ["reason", "pool", "tenant"],
            registry=registry,
        )
        self._jobs = Counter(
            "kvmanager_background_job_items",
            "What background jobs did (spans, leases, extents, pages), by what made them run: time, or another event.",
            ["job", "cause"],
            registry=registry,
        )
        for job in JOBS:
            for cause in ("tick", "triggered"):
                self._jobs.labels(job, cause)
        self._hot_rows = Counter(
            "kvmanager_hot_buffer_rows",
            "Rows chosen by the top-k that were not resident, as engines report them.",
            ["result"],
            registry=registry,
        )
        for result in ("hit", "miss"):
            self._hot_rows.labels(result)

    def applied(self, event: Event, effects: Sequence[Effect], took_s: float) -> None:
        """The core has handled an event, and what follows from it has left."""
        kind = type(event)
        timed = self._event_of.get(kind)
        if timed is None:
            timed = self._event_of[kind] = self._events.labels(kind.__name__)
        timed.observe(took_s)
        if isinstance(event, Step) and event.opens:
            self._match.observe(took_s)
        engine = getattr(event, "engine", "")
        for effect in effects:
            self._effect(effect, engine)
        if isinstance(event, PlanEnded):
            self._ended(event)
        self._note_jobs("tick" if kind is Tick else "triggered")

    def _effect(self, effect: Effect, engine: str) -> None:
        """`engine`: who sent the event, if an engine did."""
        match effect:
            case SubmitPlan():
                self._begin(effect.plan.plan_id, effect.plan.purpose.value, effect.plan.total_bytes)
            case StartPull():
                self._begin(effect.plan_id, "", 0)
            case Replied():
                self._answer(effect.answer, engine)
            case Notified():
                notice = effect.notice
                if notice.failed is not None:
                    self._refused(notice.failed.error, effect.engine)
                if notice.ready is not None:
                    self._opened(notice.ready, effect.engine)

    def _begin(self, plan_id: int, purpose: str, size_bytes: int) -> None:
        if len(self._began) < _PLANS_MOST:
            self._began[plan_id] = (purpose, size_bytes, time.monotonic())

    def _ended(self, event: PlanEnded) -> None:
        purpose, size_bytes, since = self._began.pop(event.plan_id, ("", 0, -1.0))
        if since < 0:
            return  # of the daemon before
        took_s = time.monotonic() - since
        if not purpose:
            self._handoffs.labels(event.outcome.value).observe(took_s)
            return
        self._copies.labels(purpose, event.outcome.value).observe(took_s)
        if event.outcome.value == "done":
            self._copied.labels(purpose).inc(size_bytes)
            self.copied_bytes[purpose] = self.copied_bytes.get(purpose, 0) + size_bytes

    def _answer(self, answer: object, engine: str) -> None:
        if isinstance(answer, KVError):
            self._refused(answer, engine)
        elif isinstance(answer, StepDone):
            for opened in answer.opened:
                self._opened(opened, engine)
            errors = [grown.error for grown in answer.grown] + [failed.error for failed in answer.errors]
            for error in errors:
                if error is not None:
                    self._refused(error, engine)

    def _opened(self, opened: Opened, engine: str) -> None:
        if opened.error is not None:
            self._refused(opened.error, engine)
        elif opened.state == "runnable":
            self._matched.labels(self._tenant_of(engine)).observe(opened.cached_tokens)

    def _refused(self, error: KVError, engine: str) -> None:
        pool = error.pool if isinstance(error, CapacityError) else ""
        self._refusals.labels(error.reason, pool, self._tenant_of(engine)).inc()

    def _done(self, job: str) -> int:
        return sum(self._counters[name] for name in JOBS[job])

    def _note_jobs(self, cause: str) -> None:
        all_done = sum(map(self._counters.__getitem__, _JOB_COUNTERS))
        if all_done == self._all_done:  # counters only rise
            return
        self._all_done = all_done
        for job, known in self._known.items():
            done = self._done(job)
            if done != known:
                self._jobs.labels(job, cause).inc(done - known)
                self._known[job] = done

    def hot_rows(self, engine: str, epoch: int, hits: int, misses: int) -> None:
        """Totals of one epoch so far, as its newest message gives them; in the thread that reads its stream."""
        known_hits, known_misses = self._hot.get((engine, epoch), (0, 0))
        if hits < known_hits or misses < known_misses:
            return  # a resend, or an engine that counts anew without registering
        self._hot[engine, epoch] = hits, misses
        self._hot_rows.labels("hit").inc(hits - known_hits)
        self._hot_rows.labels("miss").inc(misses - known_misses)

    def forget_engine(self, engine: str, epoch: int) -> None:
        """The epoch is over."""
        self._hot.pop((engine, epoch), None)


class CallTimer(grpc.ServerInterceptor):  # type: ignore[type-arg]  # not at run time
    """Times calls by method and status; a session is a stream, its messages are core events."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Histogram(
            "kvmanager_rpc_duration_seconds",
            "Time a gRPC call takes in the daemon, on a stream of calls too.",
            ["method", "code"],
            buckets=_FAST_S,
            registry=registry,
        )
        self._call_of: dict[tuple[str, str], Histogram] = {}  # looking one up by its labels takes longer than a note

    def observe(self, method: str, code: str, took_s: float) -> None:
        """One call that came another way, on a stream of calls."""
        timed = self._call_of.get((method, code))
        if timed is None:
            timed = self._call_of[method, code] = self._calls.labels(method, code)
        timed.observe(took_s)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method's handler, timed."""
        handler = continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler
        inner, method = handler.unary_unary, details.method.rpartition("/")[2]

        def timed(request: Any, context: grpc.ServicerContext) -> Any:
            began = time.perf_counter()
            try:
                return inner(request, context)
            finally:
                code = context.code()  # type: ignore[attr-defined]  # not in the stubs
                self.observe(method, "OK" if code is None else code.name, time.perf_counter() - began)

        return grpc.unary_unary_rpc_method_handler(timed, handler.request_deserializer, handler.response_serializer)
