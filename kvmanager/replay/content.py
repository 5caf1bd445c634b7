"""Bytes of a replayed prompt: written where a request computes, compared where it finds.

A row's bytes follow from the play, the block's place in its prefix tree, and the row's place in the block, so that
another prefix never passes for the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvmanager.clients.worker import WorkerRank
from kvmanager.pressure.content import U64Array, write_rows, wrong_bytes
from kvmanager.pressure.driver import Target
from kvmanager.pressure.places import Places
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.replay.stream import BLOCK_TOKENS, Request

CHECKED_ROWS: Final = 64
"""Of what a request finds, spread evenly over it; the last row is one of them."""


def digests_of(request: Request) -> U64Array:
    """Words that name all tokens up to each position, uint64[n]: the prompt's, and the one that is always computed."""
    nodes = np.append(request.nodes, 0).astype(np.uint64)
    words = (nodes + np.uint64(request.play) * np.uint64(1 << 32)) * np.uint64(0x9E3779B97F4A7C15)
    rows = words[:, None] + np.arange(BLOCK_TOKENS, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    mixed: U64Array = (rows ^ (rows >> np.uint64(29))).ravel()
    return mixed[: request.tokens + 1]


class Content:
    """Writes and compares the rows of one group. checked_rows, wrong_bytes: so far, over all ranks."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.checked_rows = 0
        self.wrong_bytes = 0

    def request(self, ranks: Sequence[WorkerRank], request: Request, opened: pb.OpenReply) -> None:
        """Compares some of what was found, then writes all that was not."""
        places = Places(self._target.shards, self._target.page_rows)
        places.append(opened.spans)
        digests = digests_of(request)
        cached = int(opened.cached_tokens)
        checked = np.unique(np.linspace(0, cached - 1, CHECKED_ROWS).astype(np.int64)) if cached else ()
        missing = np.arange(cached, len(digests))
        for rank in ranks:
            shard = rank.rank if self._target.kind == "sharded" else 0
            memory = rank.classes["kv"]
            found, ordinals, slots = places.find(np.asarray(checked, np.int64), shard)
            pages, _ = places.pages("kv", ordinals)
            self.checked_rows += len(found)
            self.wrong_bytes += wrong_bytes(memory.device, memory.layout, pages, slots, digests[found])
            written, ordinals, slots = places.find(missing, shard)
            pages, _ = places.pages("kv", ordinals)
            write_rows(memory.device, memory.layout, pages, slots, digests[written])
