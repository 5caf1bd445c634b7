"""`python -m tests.chaos.guest`: an engine with memory of its own, which reads and fills a cache group by leases.

It is told what to do like `tests.chaos.engine`. Its calls are repeated until they are heard, as an engine's would be: a
daemon that was replaced knows the leases of the one before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from kvmanager.clients.leases import CacheEngine, Lease
from kvmanager.errors import CapacityError, KVError, NotReady, StaleBoot, Suspect, UnknownLease
from kvmanager.layout import plain_format, plain_layout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.checksums import section_sum
from tests.chaos.content import Text, texts_of, write_rows, wrong_bytes
from tests.chaos.engine import WrongBytes, main
from tests.integration.nodes_support import ROWS, SPAN

RANKS: Final = 2
FORMAT: Final = plain_format("float32", 2, 2, 32)
LAYOUT: Final = plain_layout(FORMAT, ROWS)
PAGES: Final = 400
"""More than all prompts together: nothing need be forgotten."""
NAMESPACE: Final = pb.Namespace(
    model="chaos", weights_revision="0", kv_format=FORMAT.name, key_hash="sha256", key_bytes=16, key_tokens=ROWS
)
HEARD_S: Final = 60.0
PAUSE_S: Final = 0.05
GROUP_TABLE: Final = f"""
[[group]]
name = "leased"
kind = "cache"
format = "{FORMAT.name}"
ranks = {RANKS}
page_rows = {ROWS}
host_bytes_per_rank = {PAGES * LAYOUT.page_bytes}
"""
T = TypeVar("T")


class ChaosGuest:
    """One lease at a time."""

    def __init__(self, runtime_dir: Path, name: str, side: str, seed: int) -> None:
        del side
        self._texts = texts_of(seed, SPAN)
        self._cache = CacheEngine(
            runtime_dir, name, group="leased", namespace=NAMESPACE, layout=LAYOUT, ranks=RANKS
        )
        self.pids = [os.getpid()]
        self.checked_pages = 0
        self._leases = 0
        self._open: dict[int, bool] = {}  # lease -> whether it is to fill pages

    def lease(self, text: int, end: str) -> dict[str, Any]:
        """Reads what is known of a prompt and fills the rest. `end`: "all", "half" of it is published, or "none"."""
        whole = self._texts[text]
        found = self._read(whole)
        segments = len(whole.tokens) // ROWS
        if found == segments * ROWS:
            return {"cached": found}
        keys, lease_id = whole.keys(NAMESPACE, segments * ROWS), self._new(fills=True)
        try:
            lease = self._heard(lambda: self._cache.reserve(lease_id, keys))
        except CapacityError:  # pages of one that died are not free yet
            del self._open[lease_id]
            return {"cached": found}
        first, pages = lease.tokens // ROWS, lease.pages
        filled = {"all": len(pages), "half": len(pages) // 2, "none": 0}[end]
        self._write(whole, first, pages[:filled])
        for page in pages[filled:]:  # never published: whoever finds it finds wrong bytes
            for rank in range(RANKS):
                self._cache.page(rank, page)[:] = 77
        sums = {page: self._sum(page) for page in pages[:filled]}
        if not filled:
            self._end(lease_id, lambda: self._cache.abort(lease_id))
        else:
            tokens = (first + filled) * ROWS
            self._end(lease_id, lambda: self._cache.commit(lease_id, tokens, sums))
        return {"cached": found}

    def verify(self) -> dict[str, Any]:
        """Reads every prompt and compares all that is known of it; tokens found of each."""
        return {"found": [self._read(text) for text in self._texts]}

    def give_up(self) -> dict[str, Any]:
        """Ends what an error left open."""
        for lease_id, fills in list(self._open.items()):
            self._end(lease_id, lambda: self._cache.abort(lease_id) if fills else self._cache.done(lease_id))  # noqa: B023
        return {}

    def leave(self) -> dict[str, Any]:
        """Detaches and says so."""
        self._cache.close()
        return {}

    # -------------------------------------------------------------------------------- leases

    def _read(self, text: Text) -> int:
        keys, lease_id = text.keys(NAMESPACE, len(text.tokens)), self._new(fills=False)
        lease = self._heard(lambda: self._cache.acquire(lease_id, keys))
        if lease.tokens:
            try:
                self._check(text, lease)
            finally:
                self._end(lease_id, lambda: self._cache.done(lease_id))
        self._open.pop(lease_id, None)
        return lease.tokens

    def _check(self, text: Text, lease: Lease) -> None:
        """Raises WrongBytes."""
        pages, slots = np.repeat(lease.pages, ROWS), np.tile(np.arange(ROWS), len(lease.pages))
        digests = text.digests[: lease.tokens]
        self.checked_pages += len(lease.pages)
        for rank, worker in enumerate(self._cache.workers.ranks):
            wrong = wrong_bytes(worker.classes["kv"].device, LAYOUT, pages, slots, digests)
            if wrong:
                raise WrongBytes(wrong, f"leased rows, rank {rank}, {lease.tokens} tokens found")
        for page, told in lease.sums.items():
            if told != self._sum(page):
                raise WrongBytes(1, f"the sums of page {page}")

    def _write(self, text: Text, first: int, pages: list[int]) -> None:
        digests = text.digests[first * ROWS : (first + len(pages)) * ROWS]
        for worker in self._cache.workers.ranks:
            places = np.repeat(pages, ROWS).astype(np.int64), np.tile(np.arange(ROWS), len(pages))
            write_rows(worker.classes["kv"].device, LAYOUT, *places, digests)

    def _sum(self, page: int) -> bytes:
        return b"".join(section_sum(self._cache.page(rank, page)).tobytes() for rank in range(RANKS))

    # ---------------------------------------------------------------------------------- calls

    def _new(self, *, fills: bool) -> int:
        self._leases += 1
        self._open[self._leases] = fills
        return self._leases

    def _end(self, lease_id: int, call: Callable[[], None]) -> None:
        with suppress(UnknownLease):  # it was heard before its answer was lost
            self._heard(call)
        self._open.pop(lease_id, None)

    def _heard(self, call: Callable[[], T]) -> T:
        """Makes a call until it is answered. Raises StaleBoot from a daemon that does not know this process."""
        give_up = time.monotonic() + HEARD_S
        while True:
            try:
                return call()
            except (NotReady, StaleBoot, Suspect):
                if time.monotonic() > give_up:
                    raise
            self._renew(give_up)

    def _renew(self, give_up: float) -> None:
        while True:
            time.sleep(PAUSE_S)
            try:
                self._cache.renew()
                return
            except StaleBoot:
                raise
            except KVError:
                if time.monotonic() > give_up:
                    raise


if __name__ == "__main__":
    main(ChaosGuest)
