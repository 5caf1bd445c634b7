"""Events of engines with memory of their own: leases on pages that their workers copy from or to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class AcquirePrefix:
    """Pins the longest known prefix of `keys`; said again, it changes nothing.

    request_id: the lease's, chosen by the engine.
    lease_ttl_ns: how long it shall last; it ends by itself only for an engine that never attached a rank.
    name: the engine's own name of the request that it is for.
    """

    engine: str
    epoch: int
    request_id: int
    keys: bytes
    lease_ttl_ns: int
    name: str = ""


@dataclass(frozen=True)
class ReserveSpans:
    """Takes pages for what is not known of `keys`, to be filled by the engine; the known prefix is pinned, too.

    token_ids: u32, those of the keys, or none. name: the engine's own name of the request that it is for.
    """

    engine: str
    epoch: int
    request_id: int
    keys: bytes
    lease_ttl_ns: int
    session_id: str = ""
    token_ids: bytes = b""
    name: str = ""


@dataclass(frozen=True)
class EndLease:
    """A lease ends once `fence` (attach id -> timeline value) has passed; empty: no work on its pages is under way.

    committed: its pages are filled then and become findable; needs a fence. committed_tokens: as far as they are, from
    the prompt's first token on; 0: all. failed_pages: those that could not be read; failure: why, in the engine's
    words. summed_pages: those of which `sums` has checksums, made by who filled them: u64, page by page, of each rank
    by rank, section by section. seen: what the fence's timelines show now, as a `TimelinesRead` just before would.
    """

    engine: str
    epoch: int
    request_id: int
    fence: dict[int, int] = field(default_factory=dict)
    committed: bool = False
    committed_tokens: int = 0
    failed_pages: tuple[int, ...] = ()
    failure: str = ""
    summed_pages: tuple[int, ...] = ()
    sums: bytes = b""
    seen: dict[int, int] = field(default_factory=dict)


LeaseEvent = AcquirePrefix | ReserveSpans | EndLease
