"""What the demo found, and whether that is a pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table

from kvmanager.protos import kvmanager_pb2 as pb

MECHANISMS: Final = (
    "offload",
    "onboard",
    "eviction",
    "spill",
    "swap_in_miss",
    "draft_truncation",
    "partial_span_reuse",
)
"""Each must have happened, or the demo showed nothing about it."""
LEAST_COUNT: Final = 3
ALSO_COUNTED: Final = ("prefix_hit", "handoff")
LEAST_DISTINCT_TOKENS: Final = 10.0
"""Mean number of different tokens in a turn's answer below which equal answers prove little."""


@dataclass(frozen=True)
class TurnRecord:
    """One replayed turn. Tokens are counts, except the two answers: token ids, the first one from prefill."""

    turn: int
    session_id: str
    prompt_tokens: int
    cached_tokens: int
    answer: tuple[int, ...]
    expected: tuple[int, ...]
    drafts_proposed: int
    drafts_accepted: int

    @property
    def equal(self) -> bool:
        """Whether the answer is the reference run's."""
        return self.answer == self.expected

    def difference(self) -> str:
        """Where the answer leaves the reference run, for people."""
        pairs = zip(self.answer, self.expected, strict=False)
        place = next((i for i, (got, want) in enumerate(pairs) if got != want), None)
        where = f"turn {self.turn} of session {self.session_id}"
        if place is None:
            return f"{where}: {len(self.answer)} tokens, the reference run has {len(self.expected)}"
        return f"{where}: token {place} is {self.answer[place]}, the reference run has {self.expected[place]}"


@dataclass(frozen=True)
class DemoReport:
    """The demo's result; `failures` is empty exactly when it passed."""

    tokens_equal: bool
    ledger_ok: bool
    counters: Mapping[str, int]
    seconds: float
    sessions: int
    turns: int
    prefilled_tokens: int
    cached_tokens: int
    decoded_tokens: int
    distinct_tokens_mean: float
    drafts_proposed: int
    drafts_accepted: int
    acceptance: float
    failures: Sequence[str] = field(default_factory=tuple)

    @property
    def passed(self) -> bool:
        """Whether everything held."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for json.dumps."""
        return {**asdict(self), "counters": dict(self.counters), "failures": list(self.failures)}

    def render(self) -> RenderableType:
        """The report for people."""
        facts = Table(title="demo: " + ("passed" if self.passed else "FAILED"), show_header=False)
        facts.add_row("tokens equal the reference run's", _yes(self.tokens_equal))
        facts.add_row("ledger sums up, nothing leased or pinned", _yes(self.ledger_ok))
        facts.add_row("sessions, turns", f"{self.sessions}, {self.turns}")
        facts.add_row("tokens prefilled, reused, decoded", _counts(self))
        facts.add_row("distinct tokens a turn, mean", f"{self.distinct_tokens_mean:.1f}")
        facts.add_row("drafts accepted", f"{self.drafts_accepted} of {self.drafts_proposed} ({self.acceptance:.0%})")
        facts.add_row("seconds", f"{self.seconds:.1f}")
        counts = Table("mechanism", "count", "at least")
        for name in MECHANISMS:
            counts.add_row(name, str(self.counters.get(name, 0)), str(LEAST_COUNT))
        for name in ALSO_COUNTED:
            counts.add_row(name, str(self.counters.get(name, 0)), "")
        return Group(facts, counts, *(f"failed: {failure}" for failure in self.failures))


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def _counts(report: DemoReport) -> str:
    return f"{report.prefilled_tokens}, {report.cached_tokens}, {report.decoded_tokens}"


def make_report(
    records: Sequence[TurnRecord],
    *,
    planned_turns: int,
    counters: Mapping[str, int],
    ledger_failures: Sequence[str],
    other_failures: Sequence[str],
    seconds: float,
) -> DemoReport:
    """Judges a replay. A turn without a record counts as wrong tokens."""
    distinct = [len(set(record.answer)) for record in records]
    distinct_mean = sum(distinct) / len(distinct) if distinct else 0.0
    token_failures = [record.difference() for record in records if not record.equal]
    if len(records) < planned_turns:
        token_failures.append(f"{planned_turns - len(records)} of {planned_turns} turns have no answer")
    if distinct_mean < LEAST_DISTINCT_TOKENS:
        token_failures.append(
            f"answers have {distinct_mean:.1f} distinct tokens a turn on average; "
            f"below {LEAST_DISTINCT_TOKENS:.0f} they prove little"
        )
    count_failures = [
        f"{name} happened {counters.get(name, 0)} times, at least {LEAST_COUNT} were to be shown"
        for name in MECHANISMS
        if counters.get(name, 0) < LEAST_COUNT
    ]
    proposed = sum(record.drafts_proposed for record in records)
    accepted = sum(record.drafts_accepted for record in records)
    return DemoReport(
        tokens_equal=not token_failures,
        ledger_ok=not ledger_failures,
        counters={name: counters.get(name, 0) for name in (*MECHANISMS, *ALSO_COUNTED)},
        seconds=round(seconds, 3),
        sessions=len({record.session_id for record in records}),
        turns=len(records),
        prefilled_tokens=sum(record.prompt_tokens - record.cached_tokens for record in records),
        cached_tokens=sum(record.cached_tokens for record in records),
        decoded_tokens=sum(len(record.answer) for record in records),
        distinct_tokens_mean=round(distinct_mean, 2),
        drafts_proposed=proposed,
        drafts_accepted=accepted,
        acceptance=round(accepted / proposed, 4) if proposed else 0.0,
        failures=(*token_failures, *ledger_failures, *count_failures, *other_failures),
    )


def ledger_failures(
    node: str,
    pools: Iterable[pb.PoolStatus],
    leases: Iterable[pb.LeaseStatus],
    requests: Iterable[pb.RequestStatus],
) -> list[str]:
    """What a node without clients still holds, or counts wrongly; empty when all is well."""
    failures = []
    for pool in pools:
        states = {
            "free": pool.free_bytes,
            "reserved": pool.reserved_bytes,
            "filling": pool.filling_bytes,
            "ready": pool.ready_bytes,
            "draining": pool.draining_bytes,
            "quarantined": pool.quarantined_bytes,
        }
        where = f"node {node}, pool {pool.pool} ({pool.tier})"
        if sum(states.values()) != pool.capacity_bytes:
            failures.append(f"{where}: states sum to {sum(states.values())} B of {pool.capacity_bytes} B: {states}")
        held = {name: states[name] for name in ("reserved", "filling", "draining", "quarantined")}
        held |= {"pinned": pool.pinned_bytes, "promised": pool.promised_bytes}
        failures += [f"{where}: {count} B still {name}" for name, count in held.items() if count]
    failures += [f"node {node}: lease {lease.lease_id} of {lease.holder} is still held" for lease in leases]
    failures += [
        f"node {node}: request {request.request_id} of {request.engine} is still {request.state}"
        for request in requests
    ]
    return failures
