"""A router's side of vLLM's KV events, written from their description alone: an index by medium, and how it is kept.

Frames: topic, 8 bytes of sequence number (big-endian), msgpack `[time, events, rank]`. A gap is filled from the replay
socket: `["", 8 bytes]` in, `["", topic, sequence, batch]` each out, until a sequence of -1.
"""

from __future__ import annotations

import time
from typing import Any

import msgpack
import zmq

from kvmanager.protos import kvmanager_pb2 as pb

PATIENCE_S = 60.0


class Router:
    """Hears one stream. `blocks`: medium -> hashes. `parents`: hash -> hash before it, None at the root.

    token_ids: hash -> the block's, as far as they are told.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str) -> None:
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RECONNECT_IVL, 20)
        self._live.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._live.connect(endpoint)
        self._replay_endpoint, self._topic = replay_endpoint, topic.encode()
        self.blocks: dict[str, set[Any]] = {}
        self.parents: dict[Any, Any] = {}
        self.token_ids: dict[Any, list[int]] = {}
        self.sizes: set[int] = set()
        self.last = -1
        self.gaps = self.cleared = self.removed = self.lost = 0
        self.catch_up()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def hear(self, wait_ms: int = 50, lose: int = 0) -> int:
        """Takes what has come, until nothing comes for so long; the first `lose` messages are dropped."""
        heard = 0
        while self._live.poll(wait_ms):
            _, sequence, batch = self._live.recv_multipart()
            if lose:
                lose -= 1
                self.lost += 1
                continue
            number = int.from_bytes(sequence, "big")
            if number > self.last + 1:
                self.gaps += 1
                self.catch_up()
            self._take(number, batch)
            heard += 1
        return heard

    def catch_up(self) -> None:
        """Asks for what was missed."""
        asking = self._context.socket(zmq.DEALER)
        asking.connect(self._replay_endpoint)
        asking.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        give_up = time.monotonic() + PATIENCE_S
        while asking.poll(int(1000 * max(give_up - time.monotonic(), 0))):
            _, told, sequence, batch = asking.recv_multipart()
            if int.from_bytes(sequence, "big", signed=True) == -1:
                break
            assert told == self._topic
            self._take(int.from_bytes(sequence, "big"), batch)
        else:
            raise AssertionError("the replay did not end")
        asking.close(linger=0)

    def _take(self, number: int, batch: bytes) -> None:
        if number <= self.last:
            return  # at least once
        _, events, _ = msgpack.unpackb(batch, raw=False)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.cleared += 1
                self.blocks.clear()
                self.parents.clear()
                self.token_ids.clear()
            elif event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    self.blocks[event["medium"]].remove(block)
                    self.removed += 1
            else:
                assert event["type"] == "BlockStored"
                self.sizes.add(event["block_size"])
                parent, size, ids = event["parent_block_hash"], event["block_size"], event["token_ids"]
                assert len(ids) in (0, size * len(event["block_hashes"])), "those of all blocks, or none"
                assert parent is None or any(parent in blocks for blocks in self.blocks.values())
                known = self.blocks.setdefault(event["medium"], set())
                for place, block in enumerate(event["block_hashes"]):
                    assert block not in known
                    self.token_ids[block] = ids[place * size : (place + 1) * size]
                    known.add(block)
                    self.parents[block] = parent
                    parent = block
        self.last = number

    def differs(self, cached: pb.PrefixesReply, rows: int, media: tuple[str, str] = ("GPU", "CPU")) -> str:
        """What a node says it has cached against what is known here, tier by tier; empty when they agree.

        media: of the group's device and host tier; "" for one that it does not have.
        """
        known = set().union(*self.blocks.values())
        if cached.tokens != rows * len(known):
            return f"{cached.tokens} tokens cached, {len(known)} blocks known"
        leaves = {bytes.fromhex(leaf.key) for leaf in cached.prefixes}
        if leaves != known - {self.parents[block] for block in known}:
            return f"{len(leaves)} leaves cached, others than of the {len(known)} blocks known"
        for leaf in cached.prefixes:
            path = self.path(bytes.fromhex(leaf.key))
            for tokens, medium in zip((leaf.device_tokens, leaf.host_tokens), media, strict=True):
                there = [block in self.blocks.get(medium, ()) for block in path]
                if tokens != rows * sum(there):
                    return f"{leaf} but {medium} has {there}"
        return ""

    def path(self, block: Any) -> list[Any]:
        """From a block to the root."""
        blocks = [block]
        while (parent := self.parents[blocks[-1]]) is not None:
            blocks.append(parent)
        return blocks
