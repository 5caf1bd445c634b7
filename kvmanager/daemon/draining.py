"""What a node that is told to stop still waits for."""

from __future__ import annotations

from kvmanager.core.node import Node
from kvmanager.core.state import PullJob

NAMED_MAX = 20
"""Requests named of one engine."""


def has_requests(node: Node) -> bool:
    """Whether any engine has a request open."""
    return any(engine.requests for engine in node.state.all_engines())


def still_held(node: Node) -> list[str]:
    """In words: every engine with requests, tickets that are out, plans under way."""
    held = []
    for engine in node.state.all_engines():
        if engine.requests:
            ids = sorted(engine.requests)
            more = f" and {len(ids) - NAMED_MAX} more" if len(ids) > NAMED_MAX else ""
            tokens = sum(request.committed_tokens for request in engine.requests.values())
            held.append(
                f"engine {engine.name} epoch {engine.epoch}{'' if engine.trusted else ' (suspect)'}: request "
                f"{', '.join(map(str, ids[:NAMED_MAX]))}{more}, {tokens} tokens committed"
            )
    if node.state.tickets:
        held.append(f"tickets: {len(node.state.tickets)}")
    if node.state.jobs:
        held.append(f"plans under way: {len(node.state.jobs)}")
    return held


def pulls_of(node: Node) -> frozenset[int]:
    """Plan ids of hand-offs under way."""
    return frozenset(plan_id for plan_id, job in node.state.jobs.items() if isinstance(job, PullJob))
