"""What goes into the core and what comes out. Values only; arrays are numpy, one entry a request or page."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum

import numpy as np
import numpy.typing as npt

from kvmanager.core.kvevents import KvEvent
from kvmanager.core.leaseevents import LeaseEvent
from kvmanager.core.operatorevents import Forgot, OperatorAnswer, OperatorEvent
from kvmanager.core.plans import CopyPlan
from kvmanager.core.spanplans import SpanRun
from kvmanager.errors import KVError
from kvmanager.geometry import Int64Array


class CopyOutcome(StrEnum):
    """How a plan or pull ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN_FATE = "unknown_fate"  # bytes may still arrive


class Closing(Enum):
    """Why an engine closes a request."""

    FINISHED = "finished"
    ABORTED = "aborted"
    RETRACTED = "retracted"  # not at all: it gives up its device pages; an open of its id resumes it


@dataclass(frozen=True)
class RegisterEngine:
    """An engine announces itself; a live engine of the same name is replaced (its epoch becomes stale)."""

    engine: str
    group: str
    namespace: bytes  # canonical digest of tenant and namespace; part of every key
    key_bytes: int
    key_tokens: int
    layout_fingerprints: tuple[str, ...]
    ranks: int
    note: bytes = b""  # kept for the shell as long as the epoch
    tenant: str = ""


@dataclass(frozen=True)
class AttachRank:
    """A rank's process mapped the group's memory and owns timeline word `word`."""

    engine: str
    epoch: int
    rank: int
    word: int
    note: bytes = b""  # kept for the shell as long as the attach


@dataclass(frozen=True)
class DetachRank:
    """A rank left, or its process is known to be dead: it can write no more."""

    attach_id: int


@dataclass(frozen=True)
class TimelinesRead:
    """Values of timeline words by attach id, as read from shared memory."""

    values: dict[int, int]


@dataclass(frozen=True)
class EngineSuspect:
    """The engine's stream broke: nothing more is granted to this epoch."""

    engine: str
    epoch: int


@dataclass(frozen=True)
class EngineResumed:
    """The same epoch opened its stream again."""

    engine: str
    epoch: int


@dataclass(frozen=True)
class MoverGone:
    """The mover's process is dead (its pidfd is readable): its plans failed, late writes are impossible."""


@dataclass(frozen=True)
class MoverJoined:
    """A mover's process took the node's regions; `incarnation` names it."""

    incarnation: int


@dataclass(frozen=True)
class Recovered:
    """A new daemon took over; its core was read back. known_plans: what mover process `incarnation` still carries."""

    boot_id: int
    incarnation: int
    known_plans: frozenset[int]  # ends that the mover had kept were told before


@dataclass(frozen=True)
class EngineGone:
    """All processes of the engine are dead (their pidfds are readable), or left cleanly."""

    engine: str
    epoch: int


@dataclass(frozen=True)
class TicketInfo:
    """The part of a ticket that the target core needs. committed_tokens: what it covers when it is final."""

    ticket_id: str
    node_address: str
    committed_tokens: int
    lease_ttl_ns: int


@dataclass(frozen=True)
class Open:
    """A request asks to be admitted. `keys`: one a whole segment of the prompt; `token_ids`: u32, theirs, or none."""

    request_id: int
    prompt_tokens: int
    growth_tokens: int
    keys: bytes
    session_id: str = ""
    ticket: TicketInfo | None = None
    token_ids: bytes = b""
    name: str = ""  # the engine's own name of it


@dataclass(frozen=True)
class Progress:
    """What one request did and needs; see RequestVector on the wire."""

    request_id: int
    capacity_tokens: int
    committed_tokens: int
    rejected_tokens: int = 0
    new_keys: bytes = b""
    token_ids: bytes = b""


@dataclass(frozen=True)
class Close:
    """A request ends. With a stop reason its session's turn ends too; without one it goes on until TurnEnded."""

    request_id: int
    closing: Closing
    stop_reason: str = ""
    session_ends: bool = False


@dataclass(frozen=True)
class TurnEnded:
    """A session's turn is over, wherever its last part ran; `session_ends`: no further turn will come."""

    session_id: str
    stop_reason: str
    session_ends: bool = False


@dataclass(frozen=True)
class Step:
    """One numbered message of an engine. `fence`: attach id -> timeline value."""

    engine: str
    epoch: int
    number: int
    notices_seen: int = 0
    fence: dict[int, int] = field(default_factory=dict)
    progress: tuple[Progress, ...] = ()
    opens: tuple[Open, ...] = ()
    closes: tuple[Close, ...] = ()
    turn_ends: tuple[TurnEnded, ...] = ()


@dataclass(frozen=True)
class PlanEnded:
    """A copy plan or a pull ended. sums: as asked for, uint64[pages, sections * SUM_WORDS], when it is DONE."""

    plan_id: int
    outcome: CopyOutcome
    error: KVError | None = None
    sums: npt.NDArray[np.uint64] | None = None


@dataclass(frozen=True)
class ExportRequestKV:
    """An engine asks for a ticket on a request. expected_tokens: to cover in the end, if more than is committed."""

    engine: str
    epoch: int
    request_id: int
    ticket_id: str  # drawn by the shell: the core has no randomness
    expected_tokens: int = 0


@dataclass(frozen=True)
class RenewTickets:
    """Heartbeat of the tickets' holder."""

    ticket_ids: tuple[str, ...]


@dataclass(frozen=True)
class AcceptTicket:
    """The target asks where the ticket's pages are. tenant: for whom; None: the caller does not tell tenants apart."""

    ticket_id: str
    holder: str
    tenant: str | None = None


@dataclass(frozen=True)
class CheckTicket:
    """The target asks whether what it read is still what was exported."""

    ticket_id: str
    generations: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class ReleaseTicket:
    """The target has what it needs."""

    ticket_id: str
    holder: str


@dataclass(frozen=True)
class Drain:
    """The node takes no new work; every engine is told why."""

    why: str


@dataclass(frozen=True)
class Trim:
    """Keep at least `free_slabs` of a pool free: the policy's victims go until then, as far as they may."""

    group: str
    pool: str
    free_slabs: int


@dataclass(frozen=True)
class CheckCopies:
    """Have at most `spans` host copies read and compared with their sums, chosen evenly; none after `most_ns`."""

    spans: int
    most_ns: int


@dataclass(frozen=True)
class Tick:
    """Time passes: leases expire without any new work."""


Event = (
    RegisterEngine | AttachRank | DetachRank | TimelinesRead | EngineSuspect | EngineResumed | EngineGone | MoverGone
    | MoverJoined | Recovered | Step | PlanEnded | LeaseEvent | ExportRequestKV | RenewTickets | AcceptTicket
    | CheckTicket | ReleaseTicket | Drain | Trim | OperatorEvent | CheckCopies | Tick
)

READS = (CheckTicket,)
"""Events that ask and change nothing."""


# ----------------------------------------------------------------------------------- effects
@dataclass(frozen=True)
class SpanRunTable:
    """Consecutive spans of a request's chain; page arrays are concatenated in span order.

    first_tokens int64[spans], segments and interleave int32[spans], uids uint64[pages of the first class];
    pages: class -> (device int64[pages], host int64[pages]), -1 where none.
    """

    chain: str
    first_span: int
    first_tokens: Int64Array
    segments: npt.NDArray[np.int32]
    interleave: npt.NDArray[np.int32]
    uids: npt.NDArray[np.uint64]
    pages: dict[str, tuple[Int64Array, Int64Array]]


@dataclass(frozen=True)
class Opened:
    """Answer to an Open. whole_lacks_slabs: of the host, missing even in an empty pool to retract it whole, longest."""

    request_id: int
    state: str  # "runnable", "waiting", "refused"
    cached_tokens: int = 0
    spans: tuple[SpanRunTable, ...] = ()
    worker_plans: tuple[CopyPlan, ...] = ()
    hot: Int64Array | None = None
    error: KVError | None = None
    whole_lacks_slabs: int = 0


@dataclass(frozen=True)
class Grown:
    """Pages added to or taken from a request. worker_plans: what its worker does to them before its first write."""

    request_id: int
    spans: tuple[SpanRunTable, ...]
    spans_kept: int
    error: KVError | None = None
    worker_plans: tuple[CopyPlan, ...] = ()


@dataclass(frozen=True)
class ResidencyRows:
    """New rows for the worker's residency table: page ordinals of the request, device and host pages (-1 none)."""

    request_id: int
    page_class: str
    ordinals: Int64Array
    device: Int64Array
    host: Int64Array


@dataclass(frozen=True)
class HotGrant:
    """The request's hot-buffer slabs (all of them). worker_plans: what its worker does to them first."""

    request_id: int
    pages: Int64Array
    worker_plans: tuple[CopyPlan, ...] = ()


@dataclass(frozen=True)
class RequestFailed:
    """An operation on a request was refused; what it held, it still holds."""

    request_id: int
    error: KVError


@dataclass(frozen=True)
class StepDone:
    """The stored reply to a numbered message."""

    number: int
    opened: tuple[Opened, ...] = ()
    grown: tuple[Grown, ...] = ()
    residency: tuple[ResidencyRows, ...] = ()
    hot: tuple[HotGrant, ...] = ()
    errors: tuple[RequestFailed, ...] = ()


@dataclass(frozen=True)
class Notice:
    """Something that happened without being asked for; kept until the engine has seen it."""

    sequence: int
    ready: Opened | None = None
    failed: RequestFailed | None = None
    draining: str = ""


@dataclass(frozen=True)
class Registered:
    """Answer to RegisterEngine."""

    epoch: int


@dataclass(frozen=True)
class Attached:
    """Answer to AttachRank."""

    attach_id: int


@dataclass(frozen=True)
class Exported:
    """Answer to ExportRequestKV. expected_tokens: as asked; the ticket grows until committed_tokens is as much."""

    ticket_id: str
    committed_tokens: int
    lease_ttl_ns: int
    expected_tokens: int


@dataclass(frozen=True)
class TicketPages:
    """Answer to AcceptTicket: pages by chain, their generations (uint32, in table order); final: it grows no more."""

    ticket_id: str
    committed_tokens: int
    spans: tuple[SpanRunTable, ...]
    generations: npt.NDArray[np.uint32]
    final: bool


@dataclass(frozen=True)
class TicketsRenewed:
    """Answer to RenewTickets: ids that are not known (any more)."""

    unknown_ids: tuple[str, ...]


@dataclass(frozen=True)
class Replied:
    """The answer to the event just applied, for its sender."""

    answer: (
        StepDone | Opened | Registered | Attached | Exported | TicketPages | TicketsRenewed | OperatorAnswer | KVError
        | None
    )


@dataclass(frozen=True)
class Notified:
    """The engine has a new notice."""

    engine: str
    epoch: int
    notice: Notice


@dataclass(frozen=True)
class SubmitPlan:
    """A plan for the mover."""

    plan: CopyPlan


@dataclass(frozen=True)
class CancelPlan:
    """No more of a plan is to be started. It ends all the same, and until then its pages are out of reach."""

    plan_id: int


@dataclass(frozen=True)
class PullTarget:
    """Where pulled rows go, for one page class: positions below `end` of the spans (ascending)."""

    page_class: str
    spans: tuple[SpanRun, ...]
    end: int


@dataclass(frozen=True)
class ChainPull:
    """What of one chain is fetched, from first_position on. `targets`: one or two a page class (device, host)."""

    chain: str
    first_position: int
    targets: tuple[PullTarget, ...]


@dataclass(frozen=True)
class StartPull:
    """Fetch a ticket's KV, chain by chain, for an engine of `tenant`."""

    plan_id: int
    group: str
    ticket: TicketInfo
    chains: tuple[ChainPull, ...]
    deadline_ns: int
    tenant: str = ""


@dataclass(frozen=True)
class FenceEngine:
    """The engine, or `stalled` attaches of it alone, is suspect for `fence_after_ns`: end or hold their processes."""

    engine: str
    epoch: int
    stalled: tuple[int, ...] = ()


@dataclass(frozen=True)
class AbandonTicket:
    """Tell the source that a ticket will not be used: nothing was or will be read."""

    ticket: TicketInfo


Effect = Replied | Notified | SubmitPlan | CancelPlan | StartPull | AbandonTicket | FenceEngine | Forgot | KvEvent
