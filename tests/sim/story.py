"""Events and effects as a story for people: a line each, who did what to which request, ticket, plan or page."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvmanager.core.events import (
    Close,
    Notified,
    Open,
    Opened,
    PlanEnded,
    Progress,
    Replied,
    SpanRunTable,
    StartPull,
    Step,
    StepDone,
    SubmitPlan,
    TimelinesRead,
)
from tests.sim.network import Entry

WIDE = 300


def tell(story: Iterable[Entry | str]) -> list[str]:
    """The lines of a story."""
    lines: list[str] = []
    for entry in story:
        if isinstance(entry, str):
            lines.append(f"* {entry}")
            continue
        lines.append(f"{entry.now // 1000:>7} node {entry.node}: {_event(entry.event)}")
        lines += [f"{'':>8}-> {text}" for effect in entry.effects for text in _effect(effect)]
    return lines


def same_effect(one: object, other: object) -> bool:
    """Whether two effects say the same, to the last page."""
    with np.printoptions(threshold=100_000):
        return repr(one) == repr(other)


def _short(text: str) -> str:
    return text if len(text) <= WIDE else text[:WIDE] + "..."


def _event(event: object) -> str:
    match event:
        case Step():
            parts = [f"{event.engine}/{event.epoch} step {event.number}"]
            parts += [_progress(p) for p in event.progress]
            parts += [_close(c) for c in event.closes]
            parts += [_open(o) for o in event.opens]
            parts.append("fence " + _words(event.fence))
            return ", ".join(parts)
        case TimelinesRead():
            return f"timelines {_words(event.values)}"
        case PlanEnded():
            return f"plan {event.plan_id} {event.outcome.value}" + (f" ({event.error})" if event.error else "")
        case _:
            return _short(repr(event))


def _words(values: dict[int, int]) -> str:
    """Attach ids by value: `7: 1-4, 6: 5`."""
    by_value: dict[int, list[int]] = {}
    for attach, value in values.items():
        by_value.setdefault(value, []).append(attach)
    return ", ".join(f"{value} on {_ranges(attaches)}" for value, attaches in by_value.items())


def _ranges(numbers: Iterable[int]) -> str:
    """`1-4,6` for 1, 2, 3, 4, 6."""
    ordered = np.unique(np.fromiter(numbers, np.int64))
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs if len(run))


def _progress(p: Progress) -> str:
    rejected = f", {p.rejected_tokens} rejected" if p.rejected_tokens else ""
    return f"request {p.request_id}: {p.committed_tokens} committed, room for {p.capacity_tokens}{rejected}"


def _close(c: Close) -> str:
    return f"closes {c.request_id} ({c.closing.value})"


def _open(o: Open) -> str:
    ticket = f" by ticket {o.ticket.ticket_id}" if o.ticket else ""
    return f"opens {o.request_id}: {o.prompt_tokens}+{o.growth_tokens} tokens of {o.session_id}{ticket}"


def _effect(effect: object) -> list[str]:
    match effect:
        case Replied(answer=StepDone() as done):
            lines = [_opened(opened) for opened in done.opened]
            for grown in done.grown:
                what = f"fails: {grown.error}" if grown.error else "; ".join(map(_run, grown.spans))
                lines.append(f"request {grown.request_id} keeps {grown.spans_kept} spans, grows {what}")
            for rows in done.residency:
                lines.append(f"request {rows.request_id}: {rows.page_class} pages {_ranges(rows.ordinals)} moved")
            lines += [f"request {hot.request_id} gets hot pages {_ranges(hot.pages)}" for hot in done.hot]
            lines += [f"request {failed.request_id}: {failed.error!r}" for failed in done.errors]
            return lines or ["done"]
        case Replied():
            return [_short(repr(effect.answer))]
        case Notified():
            ready = effect.notice.ready
            said = _opened(ready) if ready else _short(repr(effect.notice))
            return [f"tells {effect.engine}/{effect.epoch}: {said}"]
        case SubmitPlan():
            return [_short(str(effect.plan).replace("\n", ";"))]
        case StartPull():
            pages = "; ".join(
                f"{target.page_class} {_ranges(run.pages)}"
                for part in effect.chains for target in part.targets for run in target.spans
            )
            return [f"pull {effect.plan_id} of ticket {effect.ticket.ticket_id} into {effect.group}: {pages}"]
        case _:
            return [_short(repr(effect))]


def _opened(opened: Opened) -> str:
    why = f": {opened.error}" if opened.error else f", {opened.cached_tokens} found"
    runs = "".join(f"; {_run(run)}" for run in opened.spans)
    return f"request {opened.request_id} {opened.state}{why}{runs}"


def _run(run: SpanRunTable) -> str:
    pages = [
        f"{name} {_ranges(device[device >= 0])}" + (f" host {_ranges(host[host >= 0])}" if (host >= 0).any() else "")
        for name, (device, host) in run.pages.items()
    ]
    return f"{run.chain} from span {run.first_span} on {', '.join(pages)}"
