"""What operators ask of the core, and what the core tells of content that it forgot."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Reset:
    """Forget all that is cached in a group, in all tiers."""

    group: str


@dataclass(frozen=True)
class ResetDone:
    """Answer to Reset. held_spans: of the forgotten ones, those whose pages wait for requests, tickets or plans."""

    forgotten_spans: int
    held_spans: int


@dataclass(frozen=True)
class PinPrefix:
    """Keep a cached prefix findable until `UnpinPrefix`. key: of its last segment; pin_id: chosen by the operator."""

    pin_id: str
    group: str
    key: bytes


@dataclass(frozen=True)
class UnpinPrefix:
    """Let a pinned prefix go again: it stays cached, and may be evicted like any other."""

    pin_id: str


@dataclass(frozen=True)
class Pinned:
    """Answer to both. spans, tokens: what the pin holds, or held when it was taken away."""

    pin_id: str
    spans: int
    tokens: int


@dataclass(frozen=True)
class EvictPrefix:
    """Forget the spans that hold a segment with this key, and all behind them; what somebody uses stays."""

    group: str
    key: bytes


@dataclass(frozen=True)
class EvictTenant:
    """Forget all that a tenant has cached in a group and nobody uses."""

    group: str
    tenant: str


@dataclass(frozen=True)
class EvictPool:
    """Have at least `free_slabs` of a pool free, as the group's policy chooses; floors and pins hold."""

    group: str
    pool: str
    free_slabs: int


@dataclass(frozen=True)
class Evicted:
    """Answer to the three. held_spans: of those meant, how many stay, because they or some behind them are in use."""

    forgotten_spans: int
    held_spans: int


@dataclass(frozen=True)
class Cordon:
    """Let nothing new in, or with an empty `why` let everybody in again. Journalled: a restart changes nothing."""

    why: str


OperatorEvent = Reset | PinPrefix | UnpinPrefix | EvictPrefix | EvictTenant | EvictPool | Cordon
OperatorAnswer = ResetDone | Pinned | Evicted


class Loss(StrEnum):
    """Why content was forgotten."""

    EVICTED = "evicted"  # the policy's victim, for room in `pool`
    OPERATOR = "operator"  # evicted by hand
    RESET = "reset"
    BAD_COPY = "bad copy"  # its only copy held other bytes than were written
    FAILED_LOAD = "failed load"  # its copy could not be read


@dataclass(frozen=True)
class Forgot:
    """Spans that can be found no more. An effect for the history; nothing is to be done.

    namespaces: int32[spans]. first_tokens: int64[spans], positions. keys: uint64[spans, segments], the first 8 bytes
    of each segment's key as they lie in memory, 0 behind the last.
    """

    why: Loss
    pool: str
    namespaces: npt.NDArray[np.int32]
    first_tokens: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]
