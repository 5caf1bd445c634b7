"""Pages between two tenants' real processes: what one is given holds no byte that the other wrote there before."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from nodes_support import (
    PAGE_BYTES,
    PAGES,
    SPAN,
    device_pages,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    tokens_of,
)
from other_user import OTHER_UID, needs_two_users, run_as_other_user

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.protos import kvmanager_pb2 as pb

pytestmark = needs_two_users
OURS, THEIRS = 0xA1, 0xB2
THEM = """
import sys
from pathlib import Path
from test_node_scrub import THEIRS, close, grown_pages, look
from nodes_support import SPAN, device_pages, open_of, prefill_engine, tokens_of

engine = prefill_engine(Path(sys.argv[1]), "theirs")
opened = engine.open(open_of(1, tokens_of(2, 6 * SPAN), growth=4 * SPAN))
print("opened", *sorted(look(engine, device_pages(opened), THEIRS)))
print("grown", *sorted(look(engine, grown_pages(engine, 1, 6 * SPAN, 10 * SPAN), THEIRS)))
close(engine, 1, 10 * SPAN)
engine.close()
"""


def look(engine: AttachedEngine, pages: np.ndarray, mark: int) -> set[int]:
    """The bytes that lie in the pages on all ranks; they are filled then."""
    seen: set[int] = set()
    for worker in engine.workers.ranks:
        memory = worker.classes["kv"].device
        for page in pages.tolist():
            there = memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
            seen |= set(np.unique(there).tolist())
            there[:] = mark
    return seen


def grown_pages(engine: AttachedEngine, request_id: int, committed: int, capacity: int) -> np.ndarray:
    """Pages that a running request gets beside those that it had."""
    growth = engine.step([RequestStep(request_id, capacity, committed)]).growth[request_id]
    return device_pages(pb.OpenReply(spans=growth.spans))


def close(engine: AttachedEngine, request_id: int, tokens: int) -> None:
    engine.step([RequestStep(request_id, tokens, tokens)])
    engine.step(closes=[pb.CloseRequest(request_id=request_id, reason=pb.FINISHED)])


@pytest.mark.parametrize("scrub", [True, False])
def test_what_another_tenant_wrote_is_gone(tmp_path: Path, scrub: bool) -> None:
    """All of the pool is ours first; their process looks at what it opens with and at what it grows into.

    Without scrubbing it does see our bytes: so the test can fail.
    """
    tenants = f'[[tenant]]\nname = "us"\nuids = [{os.getuid()}]\n[[tenant]]\nname = "them"\nuids = [{OTHER_UID}]\n'

    def config(runtime_dir: Path, *, name: str) -> str:
        text = prefill_toml(runtime_dir, name=name, more=tenants)
        text = text.replace("[node]\n", f"[node]\ntrust_uids = [{os.getuid()}, {OTHER_UID}]\n")
        return text + f"scrub = {str(scrub).lower()}\n"

    with node(tmp_path, "prefill", config) as running:
        engine = prefill_engine(running.runtime_dir, "ours")
        opened = engine.open(open_of(1, tokens_of(1, PAGES * SPAN), growth=0))
        assert look(engine, device_pages(opened), OURS) == {0}, "memory that nobody wrote"
        close(engine, 1, PAGES * SPAN)
        said = run_as_other_user(THEM, running.runtime_dir)
        if scrub:
            assert said == {"opened": {0}, "grown": {0}}
            assert running.counters()["scrubbed_page"] >= 6
        else:
            assert OURS in said["opened"] | said["grown"], "they were given pages of ours"
            assert running.counters()["scrubbed_page"] == 0
        # The other way round: their cached pages go, and come to us clean.
        opened = engine.open(open_of(2, tokens_of(3, PAGES * SPAN), growth=0))
        seen = look(engine, device_pages(opened), OURS)
        assert (THEIRS in seen) == (not scrub), seen
        assert len(device_pages(opened)) == PAGES
        close(engine, 2, PAGES * SPAN)
        engine.close()
        running.wait_at_rest()
        assert [check.broken for check in running.admin.fsck().checks if check.broken] == []
