"""`python -m tests.fuzz.batch DIR SEED FIRST COUNT SECONDS`: blows from a process whose end frees its places.

Prints one JSON object: answers and their counts. Ends with 1, and the story, where the daemon did what it must not.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

from kvmanager.clients.attach import attach, grpc_channel
from kvmanager.clients.engine import EngineClient
from kvmanager.clients.worker import connect_worker
from kvmanager.demo.nodes import NAMESPACE
from kvmanager.errors import KVError
from tests.fuzz.attackers import Attackers, Broke
from tests.integration import nodes_support as nodes

KNOWN = ("prefill", "prefill/hbm", "engine", "kv", "page", "request", "engine/1", "prefill/hbm:0", "sha256")


class _Engine:
    """An engine whose session and whose channel the fuzzer uses; registered anew by each batch, for it may be stale."""

    def __init__(self, runtime_dir: Path) -> None:
        self._attachment = attach(runtime_dir, "engine", "engine")
        self.channel = grpc_channel(self._attachment)
        self.client = EngineClient(
            self.channel,
            attachment=self._attachment,
            engine="engine",
            group=nodes.GROUP,
            namespace=NAMESPACE,
            layout_fingerprints=[nodes.LAYOUT.fingerprint],
            ranks=nodes.RANKS,
        )
        epoch = self.client.epoch
        self._ranks = [connect_worker(runtime_dir, "engine", epoch, rank) for rank in range(nodes.RANKS)]

    @property
    def token(self) -> str:
        return self._attachment.token

    def close(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(KVError):  # its attach was ended by a blow
                rank.detach()
            rank.close()
        with contextlib.suppress(KVError):
            self.client.close()
        self.channel.close()
        self._attachment.close()


def main() -> int:
    """The process."""
    runtime_dir, seed = Path(sys.argv[1]), int(sys.argv[2])
    first, count, end_s = int(sys.argv[3]), int(sys.argv[4]), time.monotonic() + float(sys.argv[5])
    engine = _Engine(runtime_dir)
    attackers = Attackers(runtime_dir, lambda: engine.client, lambda: engine.channel, lambda: engine.token, KNOWN)
    calls = (attackers.any_call, attackers.step, attackers.session_at_the_calls)
    doors = (
        attackers.bytes_at_the_door, attackers.bytes_at_grpc,
        attackers.bytes_at_the_calls, attackers.bytes_at_the_mover,
    )  # fmt: skip
    answers: Counter[str] = Counter()
    for number in range(first, first + count):
        if time.monotonic() > end_s:
            break
        dice = random.Random(f"{seed}/{number}")
        try:
            answers[dice.choice((*calls, *calls, *doors))(dice)] += 1
        except Broke as broke:
            print(f"seed {seed}, blow {number}: {broke}", file=sys.stderr)
            return 1
    attackers.close()
    engine.close()
    print(json.dumps(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
