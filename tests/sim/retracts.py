"""Retraction by a simulated engine: requests give up their device pages, and are resumed from what was committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmanager.core.events import Close, Closing, Open, StepDone
from kvmanager.errors import CapacityError, UnknownRequest
from tests.sim.content import PAGE_ROWS
from tests.sim.worker import SimRequest

if TYPE_CHECKING:
    from tests.sim.engine import SimEngine


def choose(engine: SimEngine, ending: set[int]) -> list[Close]:
    """On a decode rank some running request, of those that do not end by themselves, is retracted now and then."""
    if engine.spec.sparse is None or len(engine.retracted) > 1 or engine.draw.random() > 0.15:
        return []
    if not all(c.host_pool for chain in engine.spec.chains for c in chain.classes):
        return []
    running = [r.request_id for r in engine.requests.values() if not r.waiting and r.committed]
    running = [number for number in running if number not in ending]
    return [Close(engine.draw.choice(running), Closing.RETRACTED)] if running else []


def kept(closes: list[Close], reply: StepDone) -> set[int]:
    """Requests that were to be retracted and go on: the host has no room for all of them."""
    asked = {close.request_id for close in closes if close.closing is Closing.RETRACTED}
    going_on = {e.request_id for e in reply.errors if e.request_id in asked and not isinstance(e.error, UnknownRequest)}
    for error in reply.errors:
        assert error.request_id not in going_on or isinstance(error.error, CapacityError), error
    return going_on


def closed(engine: SimEngine, close: Close) -> None:
    """A close was done. What a retracted request wrote beyond its commits is no longer part of it."""
    request = engine.requests.pop(close.request_id, None)
    if close.closing is Closing.RETRACTED and request is not None:
        request.text = request.text.fork(request.committed)
        request.prompt, request.growth, request.rejected = request.committed, engine.draw.choice((0, 3, 10, 40)), 0
        engine.retracted[close.request_id] = request
        engine.world.happened["retracted"] += 1


def resume(request: SimRequest) -> Open:
    """Asks for a retracted request again."""
    keys = request.text.keys(0, request.prompt // PAGE_ROWS)
    return Open(request.request_id, request.prompt, request.growth, keys)
