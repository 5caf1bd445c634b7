"""A decode rank's requests, from the work that is asked for to its answer, and the daemon's replies in their tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kvmanager.clients.decode_stores import DecodeStore
from kvmanager.clients.engine import StepResult
from kvmanager.clients.keys import KeyChain
from kvmanager.clients.tables import Int64Array, decode_hot, decode_residency, decode_spans, order_runs
from kvmanager.errors import InvalidArgument
from kvmanager.protos import kvmanager_pb2 as pb

LATENT: Final = "latent"
INDEXER: Final = "indexer"


@dataclass(frozen=True)
class DecodeWork:
    """A prompt int64[L] and the answer wanted: `output_tokens`, `first_token` included.

    `ticket`: of the prompt's rows, where it was computed elsewhere, with its first token; without one this rank
    computes what it does not find.
    """

    prompt: Int64Array
    first_token: int | None
    ticket: pb.Ticket | None
    output_tokens: int
    session: pb.SessionHint
    stop_reason: str


@dataclass
class Drafts:
    """Drafts waiting to be verified, and how they have fared. `rejected`: not told yet."""

    waiting: list[int] = field(default_factory=list)
    rejected: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass(eq=False)
class Running:
    """A request whose prompt is here. `opened` is the daemon's table of it at that time.

    `tokens`: prompt, then the answer as far as it is known; `committed` of them have final rows.
    """

    request_id: int
    work: DecodeWork
    opened: pb.OpenReply
    tokens: list[int]
    committed: int
    keys: KeyChain
    store: DecodeStore
    drafts: Drafts = field(default_factory=Drafts)

    @property
    def fed(self) -> list[int]:
        """Tokens of its next step: the last one known, and drafts after it."""
        return [self.tokens[self.committed], *self.drafts.waiting]

    @property
    def stalled(self) -> bool:
        """Whether its next step has no room: the daemon had none to give."""
        return not self.finished and self.store.capacity_tokens < self.committed + len(self.fed)

    @property
    def answer(self) -> list[int]:
        """Tokens of the answer so far."""
        return self.tokens[len(self.work.prompt) :][: self.work.output_tokens]

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return len(self.answer) == self.work.output_tokens


@dataclass(frozen=True)
class Decoded:
    """An answer: token ids, and what drafts and the hot buffer did for it (counts)."""

    request_id: int
    tokens: tuple[int, ...]
    drafts_proposed: int
    drafts_accepted: int
    swap_in_rows: int


@dataclass(frozen=True)
class Turnover:
    """What a step changed: requests whose KV has arrived (decoded from the next step on), and answers completed."""

    arrived: list[Running]
    finished: list[Decoded]


@dataclass
class Asked:
    """Work whose request is not running yet. `retry_at`, `deadline`: on the monotonic clock, seconds.

    `resumes`: the request that was retracted and goes on where it stopped.
    """

    request_id: int
    work: DecodeWork
    keys: KeyChain
    request: pb.OpenRequest
    deadline: float
    retry_at: float = 0.0
    resumes: Running | None = None


def apply_reply(request: Running, result: StepResult) -> None:
    """Brings the worker's table up to date before the step's first row is read or written."""
    store = request.store
    growth = result.growth.get(request.request_id)
    if growth is not None:
        store.truncate_spans(growth.spans[0].first_span if growth.spans else growth.spans_kept)
        for run in growth.spans:
            append_run(store, run)
    for rows in result.residency.get(request.request_id, ()):
        decoded = decode_residency(rows)
        if decoded.page_class != LATENT:
            raise InvalidArgument(f"residency of class {decoded.page_class!r}; only {LATENT!r} pages move")
        store.set_residency(decoded.ordinals, decoded.column.device, decoded.column.host)
    hot = result.hot.get(request.request_id)
    if hot is not None:
        store.set_hot_pages(decode_hot(hot))


def append_run(store: DecodeStore, run: pb.SpanRun) -> None:
    """Adds a run of spans to the worker's table."""
    spans = decode_spans(run)
    latent, indexer = spans.pages[LATENT], spans.pages[INDEXER]
    for part in order_runs(spans, ranks=1):
        store.append_spans(
            part.order,
            part.first_token,
            spans.uids[part.pages],
            latent.device[part.pages],
            latent.host[part.pages],
            indexer.device[part.pages],
        )


def closing(request: Running) -> pb.CloseRequest:
    """Its answer is complete."""
    return pb.CloseRequest(request_id=request.request_id, reason=pb.FINISHED, stop_reason=request.work.stop_reason)


def decoded_of(request: Running) -> Decoded:
    """Its answer, and what drafts and the hot buffer did for it."""
    drafts, swapped = request.drafts, request.store.counters.swap_in_rows
    return Decoded(request.request_id, tuple(request.answer), drafts.proposed, drafts.accepted, swapped)
