"""Stories from the history: what happened to a request, why it was refused, why its prefix was not found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from kvmanager.errors import InvalidArgument, UnknownRequest
from kvmanager.observing.history import lines
from kvmanager.observing.historyrecords import Record
from kvmanager.units import format_bytes
from kvmanager.wire import TEXT_CHARS

DIGITS_MAX: Final = 20
KINDS: Final = ("page", "request", "refusal", "miss")


@dataclass(frozen=True)
class StoryLine:
    """One thing that happened at `at_ns` (wall clock, since 1970), or that is so now (0)."""

    at_ns: int
    text: str


@dataclass(frozen=True)
class Story:
    """A title, and lines from old to new."""

    title: str
    lines: tuple[StoryLine, ...]


def check_kind(kind: str) -> None:
    """Raises InvalidArgument."""
    if kind not in KINDS:
        raise InvalidArgument(f"can't explain a {kind!r}; say one of {', '.join(KINDS)}")


def is_number(text: str) -> bool:
    """Whether it is a decimal number of at most 64 bits' length."""
    return text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX


def request_name(text: str) -> str:
    """Checked ENGINE/REQUEST. Raises InvalidArgument."""
    engine, slash, number = text.rpartition("/")
    if not (slash and engine and is_number(number)):
        raise InvalidArgument(f"{text!r} names no request; write ENGINE/REQUEST, as in decode-0/41")
    return f"{engine}/{int(number)}"


def records_of(directory: Path, text: str) -> list[Record]:
    """What the history has of a request: ENGINE/REQUEST, or the name that its engine has for it.

    vLLM adds eight random digits to the id that its user knows, and in front the number of one of several samples:
    where nobody has just that name, those that are made of it are meant. Raises InvalidArgument for no text at all.
    """
    if not text:
        raise InvalidArgument("no request is named; write ENGINE/REQUEST, or the engine's own name of it")
    found: list[Record] = []
    with suppress(InvalidArgument):
        name = request_name(text)
        found = [record for record in lines(directory, f'"request":"{name}"') if record.get("request") == name]
    if not found:
        named = text[:TEXT_CHARS]
        alike = [record for record in lines(directory, json.dumps(named)[1:-1]) if record.get("name")]
        found = [record for record in alike if record["name"] == named]
        made_of_it = re.compile(rf"(\d+_)?{re.escape(named)}-[0-9a-f]{{8}}")
        found = found or [record for record in alike if made_of_it.fullmatch(record["name"])]
    return found


def happened(records: Sequence[Record], kind: str) -> tuple[StoryLine, ...]:
    """What the history says of a request, its refusals, or its misses. Nothing where it says nothing."""
    if kind == "request":
        return tuple(_line(record) for record in records)
    if kind == "refusal":
        return tuple(_line(record) for record in records if record["what"] == "refusal")
    opens = [record for record in records if record["what"] in ("open", "store")]
    return tuple(line for record in opens for line in _miss(record))


def still_open(records: Sequence[Record]) -> list[tuple[str, int]]:
    """(ENGINE/REQUEST, epoch) of what began and did not end, as far as the history says. epoch 0: it says nothing."""
    began: dict[tuple[str, int], None] = {}
    for record in records:
        place = record.get("request", ""), int(record.get("epoch", 0))
        if record["what"] in ("open", "store"):
            began[place] = None
        elif record["what"] in ("lease_end", "close"):
            began.pop(place, None)
    return list(began)


def offline(directory: Path, kind: str, text: str) -> Story:
    """A story from files alone. Raises InvalidArgument, or UnknownRequest where they say nothing."""
    check_kind(kind)
    if kind == "page":
        raise InvalidArgument("who holds a page is known to the running daemon only; name the node, not its history")
    found = happened(records_of(directory, text), kind)
    if not found:
        raise nothing_known(kind, text, directory)
    return Story(f"{kind} {text}", found)


def nothing_known(kind: str, text: str, directory: Path) -> UnknownRequest:
    """The error for an id that nobody knows."""
    first = next(iter(lines(directory)), None)
    # As screens show times: in the time zone of who reads it, which for a running node is the daemon's.
    began = datetime.fromtimestamp(first["t"]).astimezone() if first else None
    since = f"begins at {began:%Y-%m-%d %H:%M:%S%z}" if began else "is empty"
    what = {"refusal": "no refusal of request", "miss": "no opening of request"}.get(kind, "no request")
    return UnknownRequest(f"{what} {text!r} is known; the history in {directory} {since}")


def _line(record: Record) -> StoryLine:
    return StoryLine(int(record.get("t", 0) * 1e9), words(record))


def _miss(record: Record) -> Iterable[StoryLine]:
    yield _line(record)
    miss = record.get("miss")
    at = int(record["t"] * 1e9)
    if miss is None:
        yield StoryLine(at, "nothing was missed: all that may be found of the prompt was found")
        return
    yield StoryLine(at, f"the first segment that was missing is {miss['key']}..., at token {miss['at_tokens']:,}")
    yield StoryLine(at, f"why: {_reason(miss, record)}")


def _reason(miss: Record, record: Record) -> str:
    why: str = miss["why"]
    ago = ""
    if miss.get("forgotten_t"):
        ago = f" {max(record['t'] - miss['forgotten_t'], 0.0):,.1f} s before"
    said: dict[str, str] = {
        "not yet fenced": f"{miss.get('written_by')} was writing it, and its work was not known to be complete",
        "evicted": f"it was evicted{ago}, by policy {miss.get('policy')}, for room in {miss.get('pool') or 'its pool'}",
        "operator": f"an operator had it evicted{ago}",
        "reset": f"an operator had the group reset{ago}",
        "bad copy": f"its only copy was not what had been written, and was taken out{ago}",
        "failed load": f"its copy could not be loaded{ago}",
        "other namespace": "a prompt that begins like this one was seen only in another namespace (other "
        "tenant, model, weights revision or KV format)",
        "never seen": "nothing of it is in the history: it was never cached, or lost before the history begins",
    }
    return said.get(why, why)


def words(record: Record) -> str:
    """A record as a sentence."""
    what = record["what"]
    text = _SAID[what](record) if what in _SAID else what
    return " ".join(text.split())


def _opened(r: Record) -> str:
    if r["state"] == "lease":
        return f"lease {_lease(r)} to load: {_found(r)}"
    of = f" of session {r['session']}" if r.get("session") else ""
    by = f", by ticket {r['ticket']}" if r.get("ticket") else ""
    missed = f", {r['miss']['missed_tokens']:,} missed ({r['miss']['why']})" if r.get("miss") else ""
    return (f"opened as {r['state']}{of} in {r['group']}, tenant {r['tenant'] or '-'}: {r['prompt_tokens']:,} tokens, "
            f"{r['cached_tokens']:,} found{missed}{by}")  # fmt: skip


def _lease(r: Record) -> str:
    return f"{r['request']} of epoch {r.get('epoch', '?')}"


def _found(r: Record) -> str:
    missed = f", {r['miss']['missed_tokens']:,} missed ({r['miss']['why']})" if r.get("miss") else ""
    return f"{r['prompt_tokens']:,} tokens in {r['group']}, {r['cached_tokens']:,} found{missed}"


def _stored(r: Record) -> str:
    session = f" of session {r['session']}" if r["session"] else ""
    return f"lease {_lease(r)} to store{session}: {_found(r)}"


def _lease_ended(r: Record) -> str:
    if r["how"] == "stored":
        return f"lease {_lease(r)} ended: stored up to token {r['tokens']:,}"
    if r["how"] == "failed":
        pages = f"; pages that could not be read: {', '.join(map(str, r['failed_pages']))}" if r["failed_pages"] else ""
        return f"lease {_lease(r)} ended: a copy failed: {r['failure'] or 'no reason told'}{pages}"
    return f"lease {_lease(r)} ended: {r['how']}"


def _refused(r: Record) -> str:
    text = f"refused {r['of']}: {r['message']}"
    if r.get("pool"):
        text += f"; pool {r['pool']}: needed {r['needed']:,}, free {r['free']:,}"
        text += f", held by {r['holder']}" if r["holder"] else ""
        text += f"; ask again in {r['retry_after_ms']:,} ms" if r["retry_after_ms"] else "; asking again can't help"
    return text


def _forgot(r: Record) -> str:
    room = f" for room in {r['pool']}" if r["pool"] else ""
    return f"{r['spans']:,} spans of namespace {r['namespace']} forgotten: {r['why']}{room}, policy {r['policy']}"


_SAID: Final[dict[str, Callable[[Record], str]]] = {
    "open": _opened,
    "refusal": _refused,
    "store": _stored,
    "lease_end": _lease_ended,
    "ready": lambda _: "its bytes have arrived: runnable",
    "close": lambda r: f"closed: {r['closing']} {r['stop_reason']}",
    "export": lambda r: f"exported as ticket {r['ticket']} {r.get('refused', '')}",
    "forgot": _forgot,
    "plan": lambda r: f"plan {r['plan']} begins: {r['purpose']} {format_bytes(r['bytes']) if 'bytes' in r else ''}",
    "plan_end": lambda r: f"plan {r['plan']} ended: {r['outcome']} after {r['ms']} ms {r.get('error', '')}",
    "engine": lambda r: f"engine {r['engine']} epoch {r['epoch']}: {r['now']}",
    "mover": lambda r: f"mover {r['now']}",
    "daemon": lambda r: f"daemon {r['now']}",
    "operator": lambda r: f"operator: {r['asks']} {r.get('refused', '')}",
    "dropped": lambda r: f"{r['events']} events are missing here: the history fell behind",
}
