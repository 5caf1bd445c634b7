"""Suites in which the node itself changes: drained, squeezed, reset, hung, killed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvmanager.pressure.nodes import Room
from kvmanager.pressure.schedule import Action
from kvmanager.pressure.suite import Story, connect, quiet, suite

HUNG_S = 30
"""Longer than any call of one daemon to another may take."""


def _work(story: Story, clients: int, turns: int, spans: int) -> Iterator[Action]:
    """Texts that come back now and then."""
    draw = story.draw
    texts = [[[story.piece(), story.tokens(draw.randint(1, spans))]] for _ in range(turns)]
    for _ in range(turns):
        yield story.open(draw.randrange(clients), draw.choice(texts), growth=draw.randint(0, 8))
        yield from story.advance(draw.random())
        if len(story.open_ones) > 3:
            yield from story.close(aborted=0.2)
        yield quiet(draw.choice(("poll", "retry")))


@suite("drain")
def drain(room: Room, draw: random.Random) -> Iterator[Action]:
    """The node is cordoned under load and let in again: what runs goes on, what is new is told so."""
    story = Story(room, draw)
    yield from connect(0, 1)
    for _ in range(3):
        yield from _work(story, 2, 6, max(1, room.device_spans // 5))
        yield Action("cordon")
        yield from _work(story, 2, 4, max(1, room.device_spans // 5))
        yield Action("uncordon")


@suite("host-squeezed", profile="small-host", needs=("host",))
def host_squeezed(room: Room, draw: random.Random) -> Iterator[Action]:
    """A host pool smaller than the device's, most of it pinned by the operator and emptied under load."""
    story = Story(room, draw)
    yield from connect(0, 1)
    spans = max(1, room.host_spans // 4)
    for number in range(2):
        text = [[story.piece(), spans * room.span_tokens]]
        yield story.open(0, text)
        yield from story.close(oldest=True)
        yield Action("pin", {"pin": f"pressure-{number}", "text": text})
    for _ in range(4):
        yield from _work(story, 2, 8, max(1, room.device_spans // 5))
        yield Action("evict", {"percent": draw.choice((50, 80, 100)), "tier": draw.choice(("host", "hbm"))})


@suite("reset-under-load")
def reset_under_load(room: Room, draw: random.Random) -> Iterator[Action]:
    """All that is cached is forgotten while requests share it."""
    story = Story(room, draw)
    yield from connect(0, 1)
    for _ in range(5):
        yield from _work(story, 2, 8, max(1, room.device_spans // 5))
        yield Action("reset")


@suite("daemon-killed", needs=("own",))
def daemon_killed(room: Room, draw: random.Random) -> Iterator[Action]:
    """The daemon and the mover get SIGKILL under load: engines go on with the same pages, no byte is lost."""
    story = Story(room, draw)
    yield from connect(0, 1)
    for turn in range(3):
        yield from _work(story, 2, 7, max(1, room.device_spans // 5))
        yield Action("kill_mover" if turn == 1 else "kill_daemon")
        yield from story.advance()


def _offer(story: Story, ticket: int, spans: int) -> Iterator[Action]:
    """One request is computed on the first node and closed there; a ticket keeps its pages."""
    yield story.open(0, [[story.piece(), story.tokens(spans)]])
    client, request, tokens = story.open_ones.pop()
    yield Action("advance", {"client": client, "request": request, "to": tokens})
    yield Action("export", {"client": client, "request": request, "ticket": ticket})
    yield Action("close", {"client": client, "request": request})


def _pull(ticket: int) -> Action:
    """It is opened by ticket on the second."""
    return Action("pull", {"client": 9, "request": 1000 + ticket, "ticket": ticket})


@suite("pulls-given-up", profile="pair", needs=("peer",))
def pulls_given_up(room: Room, draw: random.Random) -> Iterator[Action]:
    """Hand-offs are aborted before, while and after their bytes come."""
    story = Story(room, draw)
    yield from connect(0)
    yield from connect(9, node=1)
    for ticket in range(14):
        yield from _offer(story, ticket, draw.randint(1, 6))
        yield _pull(ticket)
        if draw.random() < 0.5:
            yield quiet()
        if draw.random() < 0.6:
            yield Action("close", {"client": 9, "request": 1000 + ticket, "aborted": True})
        elif ticket % 3 == 0:
            yield Action("settle")


@suite("hung-peer", profile="pair", needs=("peer", "own"))
def hung_peer(room: Room, draw: random.Random) -> Iterator[Action]:
    """The source's daemon hangs before or in a hand-off: that fails with a word, and nothing is lost."""
    story = Story(room, draw)
    yield from connect(0)
    yield from connect(9, node=1)
    yield from _offer(story, 0, 2)
    yield _pull(0)
    yield Action("settle")
    for ticket, role in enumerate(("daemon", "daemon"), 1):
        yield from _offer(story, ticket, draw.randint(2, 6))
        early = draw.random() < 0.3
        if early:
            yield _pull(ticket)
        yield Action("stop", {"node": 0, "role": role})
        if not early:
            yield _pull(ticket)
        yield Action("hear", {"most_s": HUNG_S if role == "daemon" else 3})
        yield Action("go", {"node": 0})
        yield Action("settle")
