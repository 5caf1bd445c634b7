"""A naive model of the core, from an engine's point of view: what was written where, and what is known to be written.

Nothing here looks into the core. Content is symbolic: position p of a text holds the tuple of words up to its
segment, so that two texts share content exactly as far as they share words. The model knows
  - what each page holds, by the writes that ran and the copies that ended (`device`, `host`),
  - which prefixes were committed and fenced (`believed`): nothing else may ever be found,
  - who holds which page (`Held.pages`): two requests share one only where their words agree to its end.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from kvmanager.core.events import Opened, SpanRunTable
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.layout import native_layout
from tests.sim.worlds import FORMAT

ROWS, RANKS = 4, 2
SPAN = ROWS * RANKS
PAGE_BYTES = native_layout(FORMAT, ROWS).page_bytes
Words = tuple[int, ...]
Content = tuple[Words, ...]
GARBAGE: Words = (-1,)


def chained(words: Words) -> bytes:
    """One 16-byte key a word, each naming all words up to it."""
    out, chain = [], b""
    for word in words:
        chain = hashlib.sha256(chain + bytes([word])).digest()[:16]
        out.append(chain)
    return b"".join(out)


def common(a: Words, b: Words) -> int:
    """Leading words in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass
class Held:
    """A request as its engine knows it.

    words: of all segments that it will ever fill. prompt: tokens. written, committed: tokens. pages: device pages.
    """

    words: Words
    prompt: int
    growth: int
    waiting: bool = False
    written: int = 0
    committed: int = 0
    keys_sent: int = 0
    found: int = 0
    pages: list[int] = field(default_factory=list)

    def at(self, position: int) -> Words:
        """What a position holds once written."""
        return self.words[: position // ROWS + 1]

    @property
    def room(self) -> int:
        """Tokens that its pages hold."""
        return len(self.pages) * SPAN


@dataclass
class Lease:
    """An export: pages and what they hold."""

    pages: list[int]
    content: list[Words]


class Model:
    """Pages and prefixes, as sets and dictionaries."""

    def __init__(self) -> None:
        self.device: dict[int, dict[int, Words]] = {}
        self.host: dict[int, dict[int, Words]] = {}
        self.believed: set[Words] = {()}
        self.requests: dict[int, Held] = {}
        self.leases: dict[str, Lease] = {}
        self.writes: list[tuple[int, int, int, Words]] = []  # timeline value, page, offset in the span, content
        self.commits: list[tuple[int, Held, int]] = []  # timeline value, request, tokens

    # ------------------------------------------------------------------------------- content

    def write(self, value: int, held: Held, tokens: int) -> None:
        """`tokens` more tokens of a request, done when the timelines reach `value`."""
        for position in range(held.written, held.written + tokens):
            self.writes.append((value, held.pages[position // SPAN], position % SPAN, held.at(position)))
        held.written += tokens

    def reached(self, value: int) -> None:
        """All ranks have done everything up to a timeline value."""
        for launched, page, offset, content in self.writes:
            if launched <= value:
                self.device.setdefault(page, {})[offset] = content
        self.writes = [write for write in self.writes if write[0] > value]
        for said, held, tokens in self.commits:
            if said <= value:
                # A key stands for a whole segment, and only what has keys can be found.
                segments = min(tokens // ROWS, held.keys_sent)
                self.believed |= {held.words[:n] for n in range(segments + 1)}
        self.commits = [commit for commit in self.commits if commit[0] > value]

    def engine_died(self) -> None:
        """What was launched and not seen to be done may or may not have been written."""
        for _, page, offset, _ in self.writes:
            self.device.setdefault(page, {})[offset] = GARBAGE
        self.writes, self.commits, self.requests = [], [], {}

    def copied(self, plan: CopyPlan) -> None:
        """A whole-page plan ended well: by its first rank, all ranks being alike."""
        to_host = plan.purpose in (Purpose.OFFLOAD, Purpose.SPILL)
        source, target = (self.device, self.host) if to_host else (self.host, self.device)
        first = plan.copies[0].source_region
        for c in plan.pieces():
            if c.source_region == first:
                for s, t in zip(c.source_offsets.tolist(), c.target_offsets.tolist(), strict=True):
                    for i in range(c.row_bytes // PAGE_BYTES):
                        target[t // PAGE_BYTES + i] = dict(source.get(s // PAGE_BYTES + i, {}))

    def ruined(self, plan: CopyPlan) -> None:
        """A whole-page plan ended badly: its target may hold anything."""
        target = self.host if plan.purpose in (Purpose.OFFLOAD, Purpose.SPILL) else self.device
        for c in plan.pieces():
            for t in c.target_offsets.tolist():
                for i in range(c.row_bytes // PAGE_BYTES):
                    target[t // PAGE_BYTES + i] = dict.fromkeys(range(SPAN), GARBAGE)

    # ------------------------------------------------------------------------------ requests

    def most(self, words: Words, prompt: int) -> int:
        """Tokens that may be found at most; the last token of a prompt is always computed."""
        limit = (prompt - 1) // ROWS
        return max(common(words[:limit], known) for known in self.believed) * ROWS

    def opened(self, held: Held, answer: Opened) -> None:
        """A complete answer: pages, and found content that must be right."""
        (run,) = answer.spans
        held.pages = run.pages["kv"][0].tolist()
        assert min(held.pages) >= 0
        assert len(held.pages) == -(-held.prompt // SPAN)
        assert answer.cached_tokens <= held.prompt - 1
        held.waiting = False
        held.found = held.committed = held.written = answer.cached_tokens
        held.keys_sent = held.prompt // ROWS
        whole = answer.cached_tokens // SPAN * SPAN
        self.holds(held, 0, whole)
        for plan in answer.worker_plans:
            first = next(plan.pieces())
            source = first.source_offsets[0] // PAGE_BYTES
            assert first.target_offsets[0] // PAGE_BYTES == held.pages[whole // SPAN]
            content = dict(self.device.get(int(source), {}))
            self.device[held.pages[whole // SPAN]] = content
        self.holds(held, whole, answer.cached_tokens)

    def holds(self, held: Held, first: int, last: int) -> None:
        """Positions [first, last) of a request hold what they should, as far as their writes have run."""
        due = {(page, offset) for _, page, offset, _ in self.writes}
        for position in range(first, last):
            page, offset = held.pages[position // SPAN], position % SPAN
            if (page, offset) not in due:
                found = self.device.get(page, {}).get(offset)
                assert found == held.at(position), f"position {position} on page {page}: {found}"

    def grown(self, held: Held, runs: tuple[SpanRunTable, ...], kept: int) -> None:
        """A truncate, then a grow."""
        for run in runs:
            held.pages = held.pages[: run.first_span] + run.pages["kv"][0].tolist()
        if not runs:
            held.pages = held.pages[:kept]
        assert len(held.pages) == kept or runs

    # -------------------------------------------------------------------------------- checks

    def check(self) -> None:
        """Every running request and ticket has its own content; no page has two owners that differ."""
        owners: dict[int, Words] = {}
        for held in self.requests.values():
            if held.waiting:
                continue
            self.holds(held, 0, held.written)
            assert len(set(held.pages)) == len(held.pages)
            for ordinal, page in enumerate(held.pages):
                whole = (ordinal + 1) * SPAN <= held.written
                mine = held.words[: (ordinal + 1) * RANKS] if whole else (id(held), ordinal)
                assert owners.setdefault(page, mine) == mine, f"page {page} is written by one and held by another"
        for lease in self.leases.values():
            for position, content in enumerate(lease.content):
                found = self.device.get(lease.pages[position // SPAN], {}).get(position % SPAN)
                assert found == content, f"position {position} of a ticket"
