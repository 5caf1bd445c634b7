"""What a group really admits: requests of one length are opened on an empty core until it refuses one."""

from __future__ import annotations

from dataclasses import replace

from kvmanager.configuration.sizing import fit
from kvmanager.core.events import Open, TicketInfo
from kvmanager.core.spec import GroupSpec, Limits
from kvmanager.errors import CapacityError
from kvmanager.simulation.virtual import KEY_BYTES, VirtualEngine, VirtualNode
from kvmanager.units import SECOND_NS

TRIES = 6
"""Of one request on a decode rank: others let go of HBM between them, so a later one may succeed."""
BATCH_SPANS = 4_096
"""Copies are done at once here, so they are cut as seldom as can be."""


def keys_of(number: int, segments: int) -> bytes:
    """Keys of a prompt that shares nothing with another number's."""
    return b"".join((number << 64 | place + 1).to_bytes(KEY_BYTES, "little") for place in range(segments))


def most_at_once(spec: GroupSpec, tokens: int, limits: Limits, most: int = 1 << 20) -> int:
    """Requests of `tokens` tokens that run at one time in a group; at most `most` are tried."""
    node = VirtualNode([spec], replace(limits, batch_spans=BATCH_SPANS))
    engine = VirtualEngine(node, spec)
    admitted = 0
    while admitted < most and _admits(node, engine, admitted, tokens):
        admitted += 1
    return admitted


def _admits(node: VirtualNode, engine: VirtualEngine, number: int, tokens: int) -> bool:
    """One more request; on a decode rank it arrives by hand-off. All copies and pulls are done at once."""
    keys = keys_of(number + 1, tokens // engine.spec.page_rows)
    for attempt in range(TRIES):
        now = (number * TRIES + attempt + 1) * SECOND_NS
        ticket = None
        if engine.spec.sparse is not None:
            ticket = TicketInfo(f"{number}/{attempt}", "peer", tokens, SECOND_NS)
        opened = engine.step(now, opens=(Open(number + 1, tokens, 0, keys, ticket=ticket),)).opened[0]
        engine.step(now)
        node.end_all(now)
        engine.notices()
        if opened.error is None:
            return True
        if not isinstance(opened.error, CapacityError):
            raise opened.error
        if not opened.error.retry_after_ns or engine.spec.sparse is None:
            return False
    return False


def longest_request(spec: GroupSpec, limits: Limits, most_tokens: int) -> int:
    """Tokens of the longest request that an empty group holds, at most `most_tokens`; 0 for none."""
    low, high = 0, most_tokens
    if fit(spec, high, limits).refusal is None:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if fit(spec, middle, limits).refusal is None:
            low = middle
        else:
            high = middle
    return low
