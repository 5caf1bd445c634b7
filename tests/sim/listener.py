"""A router beside a simulated node: it hears what the core tells of its cache, and knows the truth after every event.

The truth is read from the pages: a published span counts on the device when all its page classes have pages there that
hold final content, and on the host when some have, and the others on the device. Where an engine fills a page, what is
valid of it is final, unless it is being loaded from the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvmanager.core.events import Effect
from kvmanager.core.group import Chain
from kvmanager.core.kvevents import KvEvent, SegmentsRemoved, SegmentsStored
from kvmanager.core.node import Node
from kvmanager.core.pool import PageState
from kvmanager.core.spans import DEVICE, HOST, NO_SPAN
from tests.sim.content import PAGE_ROWS

Place = tuple[str, int, int, str]
"""Group, chain, namespace, tier."""


def ids_told(namespace: int, keys: bytes) -> bytes:
    """The token ids of segments, made of their keys of 16 bytes so that each can be known again.

    Only engines of one namespace tell them; `namespace` is the first byte of what they register with.
    """
    return b"".join(keys[at : at + 4] * PAGE_ROWS for at in range(0, len(keys), 16)) if namespace == b"a"[0] else b""


class Listener:
    """What was heard: how often each key is in each place."""

    def __init__(self, node: Node) -> None:
        self.heard: dict[Place, Counter[bytes]] = {}
        self.stored = self.removed = self.told_ids = 0
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
            known = self.heard.setdefault(place, Counter())
            if isinstance(event, SegmentsStored):
                self.stored += len(keys)
                numbers = self._node.state.namespaces
                asked = next(digest for digest, number in numbers.items() if number == event.namespace)
                assert event.token_ids == ids_told(asked[0], event.keys)
                self.told_ids += len(event.token_ids) // (4 * PAGE_ROWS)
                assert (event.parent == b"") == (event.first_segment == 0)
                if event.parent:
                    assert any(self.heard.get((*place[:3], tier), {}).get(event.parent) for tier in ("device", "host"))
                known.update(keys)
            else:
                assert isinstance(event, SegmentsRemoved)
                self.removed += len(keys)
                for key in keys:
                    assert known[key] > 0, "removed more often than stored"
                    known[key] -= 1
                    if not known[key]:
                        del known[key]

    def check(self) -> None:
        """What was heard is what is there."""
        assert {place: known for place, known in self.heard.items() if known} == truth(self._node)


def truth(node: Node) -> dict[Place, Counter[bytes]]:
    """What can be fetched, counted page by page."""
    found: dict[Place, Counter[bytes]] = {}
    for group in node.state.groups.values():
        for number, chain in enumerate(group.chains):
            width, table = group.key_bytes, chain.table
            for row in table:
                if not table.published[row]:
                    continue
                assert table.parent[row] == NO_SPAN or table.published[table.parent[row]]
                keys = [bytes(table.keys[row][at * width : (at + 1) * width]) for at in range(int(table.valid[row]))]
                for tier in _tiers(chain, row):
                    place = group.spec.name, number, int(table.namespace[row]), tier
                    found.setdefault(place, Counter()).update(keys)
    return found


def _tiers(chain: Chain, row: int) -> list[str]:
    host = [_states(chain, row, c, HOST) if chain.has_host(c) else None for c in range(chain.table.classes)]
    final = [states == {PageState.READY} for states in host]
    device = []
    for c in range(chain.table.classes):
        states = _states(chain, row, c, DEVICE)
        device.append(states == {PageState.READY} or (states == {PageState.FILLING} and not final[c]))
    tiers = [chain.pool(0, DEVICE).tier] if all(device) else []
    if any(final) and all(there or here for there, here in zip(final, device, strict=True)):
        tiers.append("host")
    return tiers


def _states(chain: Chain, row: int, page_class: int, tier: int) -> set[int]:
    pages = chain.table.page_list(page_class, tier, row)
    space = chain.pool(page_class, tier).spaces[chain.spec.classes[page_class].name]
    return set(space.state[pages].tolist())
