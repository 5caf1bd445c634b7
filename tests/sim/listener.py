"""A router beside a simulated node: it hears what the core tells of its cache, and knows the truth after every event.

The truth is read from the pages: a published span counts on the device when all its page classes have pages there that
hold final content, and on the host when some have, and the others on the device. Where an engine fills a page, what is
valid of it is final, unless it is being loaded from the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvmanager.core.events import Effect
from kvmanager.core.group import Chain, Group
from kvmanager.core.kvevents import KvEvent, SegmentsRemoved, SegmentsStored
from kvmanager.core.node import Node
from kvmanager.core.pool import PageState
from kvmanager.core.spans import DEVICE, HOST, NO_PAGE, NO_SPAN
from kvmanager.core.spec import BOUNCE
from tests.sim.content import PAGE_ROWS

Place = tuple[str, int, int, str]
"""Group, chain, namespace, tier."""
Known = dict[tuple[str, int], tuple[object, dict[Place, dict[bytes, int]]]]
"""By group and chain: what was looked at, and what could be fetched."""
_READY, _FILLING = int(PageState.READY), int(PageState.FILLING)
_MIXED = 255


def ids_told(namespace: int, keys: bytes) -> bytes:
    """The token ids of segments, made of their keys of 16 bytes so that each can be known again.

    Only engines of one namespace tell them; `namespace` is the first byte of what they register with.
    """
    return b"".join(keys[at : at + 4] * PAGE_ROWS for at in range(0, len(keys), 16)) if namespace == b"a"[0] else b""


class Listener:
    """What was heard: how often each key is in each place."""

    def __init__(self, node: Node) -> None:
        self.heard: dict[Place, dict[bytes, int]] = {}
        self.stored = self.removed = self.told_ids = 0
        self._known: Known = {}
        self.restart(node)

    def restart(self, node: Node) -> None:
        """Another daemon: it begins with everything."""
        self._node = node
        self.heard.clear()
        self._hear(node.announce(frozenset(node.state.groups)))
        self.check()

    def after(self, effects: Sequence[Effect]) -> None:
        """An event's effects, before anything else is done with them."""
        news = [effect for effect in effects if isinstance(effect, KvEvent)]
        assert list(effects[: len(news)]) == news, "what is told of the cache comes before replies and plans"
        self._hear(news)
        self.check()

    def _hear(self, news: Sequence[KvEvent]) -> None:
        for event in news:
            width = self._node.state.groups[event.group].key_bytes
            keys = [event.keys[at : at + width] for at in range(0, len(event.keys), width)]
            assert keys
            place = event.group, event.chain, event.namespace, event.tier
            known = self.heard.setdefault(place, {})
            if isinstance(event, SegmentsStored):
                self.stored += len(keys)
                numbers = self._node.state.namespaces
                asked = next(digest for digest, number in numbers.items() if number == event.namespace)
                assert event.token_ids == ids_told(asked[0], event.keys)
                self.told_ids += len(event.token_ids) // (4 * PAGE_ROWS)
                assert (event.parent == b"") == (event.first_segment == 0)
                if event.parent:
                    assert any(self.heard.get((*place[:3], tier), {}).get(event.parent) for tier in ("device", "host"))
                for key in keys:
                    known[key] = known.get(key, 0) + 1
            else:
                assert isinstance(event, SegmentsRemoved)
                self.removed += len(keys)
                for key in keys:
                    assert known.get(key, 0) > 0, "removed more often than stored"
                    known[key] -= 1
                    if not known[key]:
                        del known[key]

    def check(self) -> None:
        """What was heard is what is there."""
        assert {place: known for place, known in self.heard.items() if known} == truth(self._node, self._known)


def truth(node: Node, known: Known) -> dict[Place, dict[bytes, int]]:
    """What can be fetched, counted page by page. `known`: what was found before, and in what."""
    found: dict[Place, dict[bytes, int]] = {}
    for group in node.state.groups.values():
        for number, chain in enumerate(group.chains):
            seen = group.key_bytes, _looked_at(chain)
            if (group.spec.name, number) not in known or known[group.spec.name, number][0] != seen:
                known[group.spec.name, number] = seen, _fetchable(group, number)
            found.update(known[group.spec.name, number][1])
    return found


def _looked_at(chain: Chain) -> list[bytes]:
    """All that `_fetchable` looks at, byte for byte."""
    table, places = chain.table, chain.spec.class_tiers
    columns = [table.live, table.published, table.parent, table.valid, table.namespace, table.pages]
    states = [chain.pool(c, tier).spaces[chain.spec.classes[c].name].state for c, tier in places]
    return [column.tobytes() for column in (*columns, *table.keys.columns, *states)]


def _fetchable(group: Group, number: int) -> dict[Place, dict[bytes, int]]:
    """Of one chain."""
    found: dict[Place, dict[bytes, int]] = {}
    chain = group.chains[number]
    table = chain.table
    rows = (table.live & table.published).nonzero()[0]
    above = table.parent[rows]
    assert table.published[above[above != NO_SPAN]].all()
    valid, namespace = table.valid[rows], table.namespace[rows]
    ends = (valid * group.key_bytes).tolist()
    texts = [text[:end] for text, end in zip(table.keys.texts(rows), ends, strict=True)]
    keys = np.frombuffer(b"".join(texts), f"V{group.key_bytes}")
    of = np.repeat(np.arange(len(rows)), valid)
    for space in set(namespace.tolist()):
        for tier, here in _tiers(chain, rows):
            there = keys[(here & (namespace == space))[of]].tolist()
            if there:
                place = group.spec.name, number, space, tier
                assert place not in found
                found[place] = dict(Counter(there))
    return found


def _tiers(chain: Chain, rows: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Tiers, and which of the spans can be fetched from each (bool[rows])."""
    device, somewhere, final = (np.full(len(rows), start) for start in (True, True, False))
    for c in range(chain.table.classes):
        host = _state(chain, rows, c, HOST) == _READY if chain.has_host(c) else np.zeros(len(rows), bool)
        states = _state(chain, rows, c, DEVICE)
        here = (states == _READY) | ((states == _FILLING) & ~host)
        device &= here
        somewhere &= here | host
        final |= host
    tier = chain.pool(0, DEVICE).tier
    if tier == BOUNCE:  # through it the pool is read: what can be fetched from either is on the host
        return [("host", somewhere)]
    return [(tier, device), ("host", final & somewhere)]


def _state(chain: Chain, rows: np.ndarray, page_class: int, tier: int) -> np.ndarray:
    """The one state of all pages of a class that each span has in a tier; _MIXED where it has none, or several."""
    pages = chain.table.pages[page_class, tier, rows]
    states = chain.pool(page_class, tier).spaces[chain.spec.classes[page_class].name].state[pages]
    none = pages == NO_PAGE
    least, most = np.where(none, _MIXED, states).min(axis=1), np.where(none, 0, states).max(axis=1)
    return np.where(least == most, least, _MIXED)
