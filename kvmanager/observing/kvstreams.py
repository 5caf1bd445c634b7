"""All KV event streams of a node: who hears of which namespace."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvmanager.configuration.config import NodeConfig
from kvmanager.configuration.eventsconfig import EventsSection
from kvmanager.core.kvevents import KvEvent
from kvmanager.core.node import Node
from kvmanager.observing.health import JobVitals
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.services.messages import KEY_HASHES, namespace_digest

if TYPE_CHECKING:
    from kvmanager.observing.kvstream import KvStream

_WIDTHS = (16, 32)


class KvStreams:
    """Made from `[[events]]`; without any it does nothing, and the core is asked for nothing."""

    def __init__(
        self, config: NodeConfig, node: Node, boot_id: int, on_failure: Callable[[BaseException], None]
    ) -> None:
        """Before the core begins. Raises ConfigError when a stream can't listen."""
        self._node = node
        self._on_failure = on_failure
        self._of: dict[str, list[tuple[frozenset[bytes], KvStream]]] = {}
        self._streams: list[KvStream] = []
        if not config.events:
            return
        from kvmanager.observing.kvstream import KvStream  # ZeroMQ is needed only where somebody listens

        for section in config.events:
            rows = config.group(section.group).page_rows
            stream = KvStream(section, rows, boot_id)
            self._streams.append(stream)
            self._of.setdefault(section.group, []).append((frozenset(_digests(config, section)), stream))

    def start(self) -> None:
        """Tells each stream what is there, and from now on what changes. Before the core begins."""
        if self._of:
            for event in self._node.announce(frozenset(self._of)):
                self.tell(event)
        for stream in self._streams:
            stream.start(self._on_failure)

    def tell(self, event: KvEvent) -> None:
        """In the core."""
        known = self._node.state.namespaces
        for digests, stream in self._of.get(event.group, ()):
            if any(known.get(digest) == event.namespace for digest in digests):
                stream.tell(event, self._node.state.groups[event.group].key_bytes)

    def vitals(self) -> dict[str, JobVitals]:
        """Of each stream, by its name."""
        return {stream.name: stream.vitals() for stream in self._streams}

    def close(self) -> None:
        """Publishes what is left and ends."""
        for stream in self._streams:
            stream.close()
        self._streams.clear()


def _digests(config: NodeConfig, section: EventsSection) -> Iterator[bytes]:
    """Every namespace that the stream is about, as engines may register it: the group fixes one width of its keys."""
    group = config.group(section.group)
    tenant = section.tenant or config.tenant_of(os.getuid())
    for key_hash, width, token_ids in itertools.product(KEY_HASHES, _WIDTHS, (False, True)):
        namespace = pb.Namespace(
            model=section.model,
            weights_revision=section.weights_revision,
            kv_format=group.format,
            key_hash=key_hash,
            key_bytes=width,
            key_tokens=group.page_rows,
            hash_seed="" if key_hash == "sha256" else section.hash_seed,
            token_ids=token_ids,
        )
        yield namespace_digest(tenant, namespace)
