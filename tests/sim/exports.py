"""Tickets that engines ask for: on what runs, and on what still waits for its prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmanager.core.events import Exported, ExportRequestKV, TicketInfo
from kvmanager.errors import InvalidArgument, NotReady, UnknownRequest

if TYPE_CHECKING:
    from tests.sim.engine import SimEngine


def waits(engine: SimEngine) -> bool:
    """Whether some request of an engine, not of a decode rank, waits for bytes."""
    return engine.spec.sparse is None and any(request.waiting for request in engine.requests.values())


def export(engine: SimEngine) -> None:
    """A ticket on some request, mostly on one that waits."""
    draw, world = engine.draw, engine.world
    asked = [r for r in engine.requests.values() if r.waiting or r.committed or draw.random() < 0.5]
    if waits(engine) and draw.random() < 0.7:
        asked = [r for r in asked if r.waiting]
    if not asked:
        return
    request = draw.choice(asked)
    ticket_id = f"t{world.net.applied}"
    expected = len(request.text.digests) if draw.random() < (0.9 if request.waiting else 0.5) else 0
    answer = world.apply(ExportRequestKV(engine.name, engine.epoch, request.request_id, ticket_id, expected))
    if isinstance(answer, NotReady) or (request.waiting and isinstance(answer, UnknownRequest)):
        return  # it waits, or was refused and its engine has not heard of it
    if request.waiting and isinstance(answer, Exported):
        world.happened["export of a request that waits"] += 1
    parts = engine.spec.cache_only and engine.spec.ranks > 1
    nothing = max(expected, request.committed) == 0 and not request.waiting
    if parts or engine.spec.sparse is not None or nothing:
        assert isinstance(answer, InvalidArgument)
        return
    if isinstance(answer, InvalidArgument):
        assert "will not come" in str(answer) or "committed nothing" in str(answer), answer
        return
    assert isinstance(answer, Exported), answer
    if not request.waiting:  # it may have its bytes by now, which its engine has not heard
        assert answer.committed_tokens <= request.committed <= answer.expected_tokens
        assert answer.expected_tokens == max(expected, request.committed)
    assert answer.expected_tokens >= expected
    info = TicketInfo(ticket_id, "here", answer.expected_tokens, answer.lease_ttl_ns)
    engine.tickets.append((info, request.text.fork(answer.expected_tokens), engine.namespace))
    world.net.sources[ticket_id] = (world, engine.spec.name)
    world.happened["export"] += 1
