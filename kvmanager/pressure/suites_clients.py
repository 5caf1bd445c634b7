"""Suites of clients that misbehave: slow, stopped, killed, or gone in the middle of a copy."""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvmanager.pressure.nodes import Room
from kvmanager.pressure.schedule import Action
from kvmanager.pressure.suite import Story, connect, quiet, suite


def _warm(story: Story, client: int, spans: int, texts: int) -> Iterator[Action]:
    """Texts that are cached afterwards; the oldest of them on the host only, where there are enough."""
    for _ in range(texts):
        yield story.open(client, [[story.piece(), spans * story.room.span_tokens]])
        yield from story.close(oldest=True)


@suite("slow-reader")
def slow_reader(room: Room, draw: random.Random) -> Iterator[Action]:
    """An engine's process stops while it holds requests; what it holds stays its own, the others go on."""
    story = Story(room, draw)
    yield from connect(0)
    yield from connect(1, process=True)
    spans = max(1, room.device_spans // 8)
    for _ in range(3):
        yield story.open(1, [[story.piece(), story.tokens(spans)]], growth=20)
        yield from story.advance(0.5)
    slow, story.open_ones = story.open_ones, []
    yield Action("pause", {"client": 1})
    for _ in range(14):
        yield story.open(0, [[story.piece(), story.tokens(draw.randint(1, 2 * spans))]])
        yield from story.advance(draw.random())
        if len(story.open_ones) > 2:
            yield from story.close(aborted=0.2)
        yield quiet("retry")
    yield Action("resume", {"client": 1})
    story.open_ones += slow
    for _ in range(4):
        yield from story.close(aborted=0.3)


@suite("abort-in-mid-transfer", needs=("host",))
def abort_in_mid_transfer(room: Room, draw: random.Random) -> Iterator[Action]:
    """Requests that wait for their bytes from the host are given up before, while and after these arrive."""
    story = Story(room, draw)
    yield from connect(0, 1)
    spans = max(1, room.device_spans // 4)
    texts = [[[story.piece(), spans * room.span_tokens]] for _ in range(6)]
    for text in texts:
        yield story.open(0, text)
        yield from story.close(oldest=True)
    for turn in range(36):
        yield story.open(draw.randrange(2), texts[turn % len(texts)])
        if draw.random() < 0.6:
            client, request, _ = story.open_ones.pop()
            yield Action("close", {"client": client, "request": request, "aborted": True})
        if draw.random() < 0.4:
            yield quiet()
        if len(story.open_ones) > 2:
            yield from story.close(aborted=0.5)
        yield quiet("retry")


@suite("killed-clients")
def killed_clients(room: Room, draw: random.Random) -> Iterator[Action]:
    """Engines get SIGKILL with requests open; their pages return once they are dead, and not before."""
    story = Story(room, draw)
    yield from connect(0)
    spans = max(1, room.device_spans // 6)
    shared = [story.piece(), spans * room.span_tokens]
    for _ in range(3):
        yield from connect(1, process=True)
        for _ in range(3):
            yield story.open(1, [shared, [story.piece(), story.tokens(1)]], growth=30)
            yield from story.advance(draw.random())
        yield story.open(0, [shared, [story.piece(), story.tokens(spans)]])
        story.open_ones = [entry for entry in story.open_ones if entry[0] != 1]
        yield Action("kill", {"client": 1})
        for _ in range(3):
            yield story.open(0, [[story.piece(), story.tokens(2 * spans)]])
            yield quiet("retry")
            yield from story.close(aborted=0.2)


@suite("leave-with-all-open")
def leave_with_all_open(room: Room, draw: random.Random) -> Iterator[Action]:
    """Engines detach with requests running and waiting; others take their place at once."""
    story = Story(room, draw)
    yield from connect(0)
    yield from _warm(story, 0, max(1, room.device_spans // 5), 6)
    for turn in range(5):
        client = turn + 1
        yield from connect(client)
        for _ in range(5):
            yield story.open(client, [[story.piece(), story.tokens(draw.randint(1, 4))]], growth=16)
            yield from story.advance(draw.random())
        story.open_ones = []
        yield Action("leave", {"client": client})
        yield story.open(0, [[story.piece(), story.tokens(max(1, room.device_spans // 2))]])
        yield from story.close(aborted=0.5)
