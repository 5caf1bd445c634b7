"""Suites of load alone: lengths, forks, drafts, sessions, memory that runs out."""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvmanager.pressure.nodes import Room
from kvmanager.pressure.schedule import Action
from kvmanager.pressure.suite import GIANT_TOKENS, Story, connect, quiet, suite


@suite("fill")
def fill(room: Room, draw: random.Random) -> Iterator[Action]:
    """Requests until nothing more is admitted, all open at once; then all to their ends."""
    story = Story(room, draw)
    yield from connect(0, 1)
    most = max(1, room.device_spans // 6)
    filled = 0
    while filled < 1.6 * room.device_spans:
        spans = draw.randint(1, most)
        filled += spans
        yield story.open(draw.randrange(2), [[story.piece(), story.tokens(spans)]], growth=draw.randint(0, 40))
        yield from story.advance(draw.random())
    yield Action("settle")
    for _ in range(4):  # and once more into a pool full of what they left
        yield story.open(draw.randrange(2), [[story.piece(), story.tokens(most)]])
    yield quiet("retry")


@suite("churn", needs=("host",))
def churn(room: Room, draw: random.Random) -> Iterator[Action]:
    """Prompts over twice the size of both tiers come, go and come back."""
    story = Story(room, draw)
    yield from connect(0, 1, 2)
    most = max(1, room.device_spans // 5)
    texts: list[list[list[int]]] = []
    while sum(n for text in texts for _, n in text) < 2 * (room.device_spans + room.host_spans) * room.span_tokens:
        texts.append([[story.piece(), story.tokens(draw.randint(1, most))]])
    for turn in range(2 * len(texts)):
        text = texts[turn % len(texts)] if draw.random() < 0.5 else draw.choice(texts)
        yield story.open(draw.randrange(3), text)
        yield from story.advance(draw.random())
        if len(story.open_ones) > 3:
            yield from story.close(aborted=0.2)
        if turn % 5 == 0:
            yield quiet(draw.choice(("poll", "retry")))


@suite("long-tail")
def long_tail(room: Room, draw: random.Random) -> Iterator[Action]:
    """Lengths with a heavy tail: most are of one span, a few of half the pool."""
    story = Story(room, draw)
    yield from connect(0, 1)
    for _ in range(40):
        spans = min(room.device_spans / 2, 0.6 * draw.paretovariate(0.9))
        yield story.open(draw.randrange(2), [[story.piece(), story.tokens(spans)]], growth=draw.randint(0, 20))
        yield from story.advance(draw.random())
        while len(story.open_ones) > 5:
            yield from story.close(aborted=0.15)
        yield quiet("retry")


@suite("giant-beside-short")
def giant(room: Room, draw: random.Random) -> Iterator[Action]:
    """A request that takes nearly all of the pool (1M tokens where it holds them) beside a stream of short ones."""
    story = Story(room, draw)
    yield from connect(0, 1)
    whole = min(GIANT_TOKENS, (room.device_spans - 2) * room.span_tokens)
    for turn in range(3):
        piece = story.piece()
        for _ in range(4):
            yield story.open(1, [[story.piece(), story.tokens(1)]])
        yield story.open(0, [[piece, whole]], growth=room.span_tokens)
        giant_request = story.open_ones.pop()
        for part in (0.3, 0.6, 0.9):
            yield story.open(1, [[story.piece(), story.tokens(draw.random() * 2)]])
            yield from story.close(oldest=True)
            yield quiet("retry")
            yield Action("advance", {"client": 0, "request": giant_request[1], "to": int(whole * part)})
        if turn == 1:
            yield Action("close", {"client": 0, "request": giant_request[1], "aborted": True})
        yield Action("settle")


@suite("fork-storm")
def fork_storm(room: Room, draw: random.Random) -> Iterator[Action]:
    """One prefix, forked at any token by many at once: spans are shared, and copied on write."""
    story = Story(room, draw)
    yield from connect(0, 1, 2)
    root = [story.piece(), int(room.device_spans / 3) * room.span_tokens]
    for _ in range(3):
        yield story.open(0, [root])
        yield from story.advance()
        for _ in range(8):
            kept = draw.randint(room.span_tokens // 2, root[1])
            text = [[root[0], kept], [story.piece(), draw.randint(1, 2 * room.span_tokens)]]
            yield story.open(draw.randrange(3), text, growth=draw.randint(0, 10))
            if draw.random() < 0.5:
                yield from story.advance(draw.random())
        while len(story.open_ones) > 2:
            yield from story.close(aborted=0.3)
        yield quiet("retry")


@suite("draft-storm")
def draft_storm(room: Room, draw: random.Random) -> Iterator[Action]:
    """Requests grow to their promise, with drafts taken and rejected in every step, while the pool is full."""
    story = Story(room, draw)
    yield from connect(0, 1)
    for _ in range(6):
        spans = max(1, room.device_spans // 8)
        yield story.open(draw.randrange(2), [[story.piece(), story.tokens(2 * spans)]], growth=spans * room.span_tokens)
    for _ in range(60):
        client, request, tokens = draw.choice(story.open_ones)
        if draw.random() < 0.6:
            yield Action("draft", {"client": client, "request": request, "tokens": draw.randint(1, 40)})
        else:
            yield Action("advance", {"client": client, "request": request, "to": draw.randint(1, tokens)})
        yield quiet("retry")


@suite("session-flood")
def session_flood(room: Room, draw: random.Random) -> Iterator[Action]:
    """Many engines with many sessions of few tokens; engines come and go all the time."""
    story = Story(room, draw)
    engines = list(range(8))
    yield from connect(*engines)
    roots = [[story.piece(), story.tokens(1.5)] for _ in range(6)]
    for turn in range(90):
        client = draw.choice(engines)
        text = [draw.choice(roots), [story.piece(), draw.randint(1, room.span_tokens)]]
        yield story.open(client, text, session=f"s{draw.randrange(30)}")
        if len(story.open_ones) > 12:
            yield from story.close(aborted=0.1)
        if turn % 15 == 14:
            leaver = draw.choice(engines)
            story.open_ones = [entry for entry in story.open_ones if entry[0] != leaver]
            yield Action("leave", {"client": leaver})
            yield from connect(leaver)


@suite("tenant-ceiling", profile="tenant", needs=("ceiling",))
def tenant_ceiling(room: Room, draw: random.Random) -> Iterator[Action]:
    """Our tenant at its ceiling: it gets its share and no more, and makes room from its own cache."""
    story = Story(room, draw)
    yield from connect(0, 1)
    ours = max(1, int(room.device_spans * room.ceiling))
    yield story.open(0, [[story.piece(), (ours + 1) * room.span_tokens]])  # never
    story.open_ones.pop()
    for _ in range(24):
        yield story.open(draw.randrange(2), [[story.piece(), story.tokens(draw.randint(1, max(1, ours // 2)))]])
        yield from story.advance(draw.random())
        while len(story.open_ones) > 3:
            yield from story.close(aborted=0.2)
        yield quiet("retry")


@suite("no-host", profile="no-host")
def no_host(room: Room, draw: random.Random) -> Iterator[Action]:
    """Without a tier behind: what is evicted is gone, and nothing else is."""
    story = Story(room, draw)
    yield from connect(0, 1)
    texts = [[[story.piece(), story.tokens(draw.randint(1, max(1, room.device_spans // 5)))]] for _ in range(20)]
    for _ in range(50):
        yield story.open(draw.randrange(2), draw.choice(texts))
        yield from story.advance(draw.random())
        if len(story.open_ones) > 3:
            yield from story.close(aborted=0.2)
        yield quiet("retry")
