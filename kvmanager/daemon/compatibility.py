"""Whether a ticket's KV can be used by an engine: asked when the request is opened, before any address is known."""

from __future__ import annotations

from kvmanager.errors import LayoutMismatch
from kvmanager.layout import KVFormat
from kvmanager.protos import kvmanager_pb2 as pb

_SAME_KV = ("model", "weights_revision", "kv_format")
"""Fields of a namespace that decide which values a token's KV has; how keys are made does not."""


def check_ticket(ticket: pb.Ticket, namespace: pb.Namespace, kv_format: KVFormat) -> None:
    """Raises LayoutMismatch, naming both sides' values, unless a token's KV is the same on both sides."""
    ours = kv_format.fingerprint
    if ticket.kv_fingerprint != ours:
        raise LayoutMismatch(
            f"ticket {ticket.ticket_id}: the source's KV format is {ticket.namespace.kv_format!r} with fingerprint "
            f"{ticket.kv_fingerprint!r}, this group's is {kv_format.name!r} with {ours!r}; "
            "export from a group of the same format"
        )
    for field in _SAME_KV:
        source, target = getattr(ticket.namespace, field), getattr(namespace, field)
        if source != target:
            raise LayoutMismatch(
                f"ticket {ticket.ticket_id}: the source's {field} is {source!r}, this engine registered {target!r}; "
                "hand over between engines that serve the same model"
            )
