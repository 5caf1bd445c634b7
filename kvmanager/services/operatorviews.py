"""What the core says to operators' questions, read between two events."""

from __future__ import annotations

import numpy as np

from kvmanager.core.group import Group
from kvmanager.core.node import Node
from kvmanager.core.pins import pin_tokens
from kvmanager.core.plans import Purpose, Urgency
from kvmanager.core.spans import DEVICE
from kvmanager.core.state import CheckJob, CopyJob, OperatorPin, PullJob, ScrubJob, State
from kvmanager.errors import InvalidArgument
from kvmanager.protos import kvmanager_pb2 as pb

KEY_DIGITS_MIN = 8
"""Hex digits that name a key at least."""


def transfers(node: Node, device: str) -> pb.TransfersReply:
    """Every plan and pull, the most urgent and oldest first."""
    found = [_transfer(node.state, plan_id, job, device) for plan_id, job in node.state.jobs.items()]
    order = {urgency.name.lower(): urgency.value for urgency in Urgency}
    found.sort(key=lambda each: (order[each.urgency], -each.age_ns, each.plan_id))
    return pb.TransfersReply(transfers=found)


def _transfer(
    state: State, plan_id: int, job: CopyJob | PullJob | CheckJob | ScrubJob, device: str
) -> pb.TransferStatus:
    group = state.groups[job.group]
    said = pb.TransferStatus(plan_id=plan_id, device=device, group=job.group, age_ns=max(state.now - job.since, 0))
    match job:
        case PullJob():
            said.purpose, urgency, said.waiters, said.ticket_id = "pull", Urgency.WAITED_FOR, 1, job.ticket.ticket_id
            said.spans = sum(len(rows) for _, rows in job.rows)
            for number, rows in job.rows:
                for c in range(len(group.chains[number].spec.classes)):
                    said.moved_bytes += _bytes(group, number, c, rows)
        case ScrubJob():
            said.purpose, urgency, said.spans = Purpose.SCRUB.value, Purpose.SCRUB.urgency, len(job.rows)
            said.waiters = 1
            said.moved_bytes = _bytes(group, job.chain, job.page_class, job.rows)
        case CheckJob():
            said.purpose, urgency, said.spans = Purpose.CHECK.value, Purpose.CHECK.urgency, len(job.rows)
            said.moved_bytes = _bytes(group, job.chain, job.page_class, job.rows)
        case CopyJob():
            to_host = Purpose.OFFLOAD if group.spec.sparse is None else Purpose.MIRROR
            purpose = Purpose.ONBOARD if job.target_tier == DEVICE else to_host
            said.purpose, urgency, said.spans = purpose.value, purpose.urgency, len(job.rows)
            said.waiters, said.gives_way = len(job.waiters), job.gives_way
            said.moved_bytes = _bytes(group, job.chain, job.page_class, job.rows)
    said.urgency = urgency.name.lower()
    return said


def _bytes(group: Group, number: int, page_class: int, rows: list[int]) -> int:
    """Bytes of the spans' pages of a class over all ranks."""
    chain = group.chains[number]
    pages = int(chain.widths(np.asarray(rows, np.int64)).sum())
    return pages * chain.spec.classes[page_class].page_bytes * chain.spec.ranks


def pins(node: Node) -> pb.PinsReply:
    """All pins, oldest first."""
    return pb.PinsReply(pins=[pin_status(node.state, pin) for pin in node.state.pins.values()])


def pin_status(state: State, pin: OperatorPin) -> pb.PinStatus:
    """One pin."""
    return pb.PinStatus(
        pin_id=pin.pin_id,
        group=pin.group,
        key=pin.key.hex(),
        spans=sum(len(rows) for _, rows in pin.rows),
        tokens=pin_tokens(state.groups[pin.group], pin),
        age_ns=max(state.now - pin.since, 0),
    )


def full_key(node: Node, group_name: str, text: str) -> bytes:
    """The one cached key that begins with these hex digits. Raises InvalidArgument for none, and for several."""
    group = node.state.groups.get(group_name)
    if group is None:
        raise InvalidArgument(f"no group {group_name!r} on this node; it has {', '.join(sorted(node.state.groups))}")
    digits = text.lower()
    whole = digits[: len(digits) // 2 * 2]
    try:
        start = bytes.fromhex(whole)
        last = int(digits[len(whole) :] or "0", 16)
    except ValueError as error:
        raise InvalidArgument(f"{text!r} is not a key in hex (kvmanager prefixes shows keys)") from error
    if not KEY_DIGITS_MIN <= len(digits) <= 2 * group.key_bytes:
        raise InvalidArgument(f"a key has {KEY_DIGITS_MIN} to {2 * group.key_bytes} hex digits here, not {len(digits)}")
    found: set[bytes] = set()
    for chain in group.chains:
        table = chain.table
        rows = np.flatnonzero(table.live & table.published)
        for keys in table.keys.texts(rows):
            at = keys.find(start)
            while at >= 0:
                if at % group.key_bytes == 0:
                    found.add(keys[at : at + group.key_bytes])
                at = keys.find(start, at + 1)
    if len(whole) < len(digits):
        found = {key for key in found if key[len(start)] >> 4 == last}
    if len(found) != 1:
        raise InvalidArgument(f"{len(found)} cached keys of {group_name} begin with {text!r}; one is needed")
    return found.pop()
