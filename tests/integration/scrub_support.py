"""Two tenants' real processes in one group: what each finds in the pages that it is given."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from nodes_support import (
    PAGE_BYTES,
    PAGES,
    SPAN,
    Node,
    device_pages,
    get,
    open_of,
    prefill_engine,
    prefill_toml,
    tokens_of,
)
from other_user import OTHER_UID, run_as_other_user

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.protos import kvmanager_pb2 as pb

OURS, THEIRS = 0xA1, 0xB2
THEM = """
import sys
from pathlib import Path
from scrub_support import THEIRS, close, grown_pages, in_a_stream, look
from nodes_support import SPAN, device_pages, open_of, prefill_engine, tokens_of

engine = prefill_engine(Path(sys.argv[1]), "theirs")
with in_a_stream(engine):
    opened = engine.open(open_of(1, tokens_of(2, 6 * SPAN), growth=4 * SPAN))
    print("opened", *sorted(look(engine, device_pages(opened), THEIRS)))
    print("grown", *sorted(look(engine, grown_pages(engine, 1, 6 * SPAN, 10 * SPAN), THEIRS)))
    close(engine, 1, 10 * SPAN)
engine.close()
"""


def scrub_config(*, scrub: bool, device: str = "cpu") -> Callable[..., str]:
    """A prefill group that this user's tenant and the other user's share."""
    tenants = f'[[tenant]]\nname = "us"\nuids = [{os.getuid()}]\n[[tenant]]\nname = "them"\nuids = [{OTHER_UID}]\n'

    def config(runtime_dir: Path, *, name: str) -> str:
        text = prefill_toml(runtime_dir, name=name, more=tenants, device=device)
        text = text.replace("[node]\n", f"[node]\ntrust_uids = [{os.getuid()}, {OTHER_UID}]\n")
        return text + f"scrub = {str(scrub).lower()}\n"

    return config


def look(engine: AttachedEngine, pages: np.ndarray, mark: int) -> set[int]:
    """The bytes that lie in the pages on all ranks; they are filled then. On a GPU in torch's current stream."""
    seen: set[int] = set()
    for worker in engine.workers.ranks:
        memory = worker.classes["kv"].device
        for page in pages.tolist():
            seen |= set(np.unique(get(memory, page)).tolist())
            memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = mark
    return seen


def grown_pages(engine: AttachedEngine, request_id: int, committed: int, capacity: int) -> np.ndarray:
    """Pages that a running request gets beside those that it had."""
    growth = engine.step([RequestStep(request_id, capacity, committed)]).growth[request_id]
    return device_pages(pb.OpenReply(spans=growth.spans))


def close(engine: AttachedEngine, request_id: int, tokens: int) -> None:
    engine.step([RequestStep(request_id, tokens, tokens)])
    engine.step(closes=[pb.CloseRequest(request_id=request_id, reason=pb.FINISHED)])


def in_a_stream(engine: AttachedEngine) -> contextlib.AbstractContextManager[Any]:
    """On a GPU a stream that waits for no other one: what runs outside of it is not in order with what is inside."""
    if engine.workers.ranks[0].memory.gpu is None:
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.Stream())


def one_after_the_other(running: Node) -> tuple[dict[str, set[int]], set[int]]:
    """All of the pool is ours, then theirs, then ours: the bytes that they saw (opening, growing), and that we saw."""
    engine = prefill_engine(running.runtime_dir, "ours")
    with in_a_stream(engine):
        opened = engine.open(open_of(1, tokens_of(1, PAGES * SPAN), growth=0))
        assert look(engine, device_pages(opened), OURS) == {0}, "memory that nobody wrote"
        close(engine, 1, PAGES * SPAN)
        theirs = run_as_other_user(THEM, running.runtime_dir)
        # The other way round: their cached pages go, and come to us clean.
        opened = engine.open(open_of(2, tokens_of(3, PAGES * SPAN), growth=0))
        pages = device_pages(opened)
        assert len(pages) == PAGES
        ours = look(engine, pages, OURS)
        close(engine, 2, PAGES * SPAN)
    engine.close()
    running.wait_at_rest()
    assert [check.broken for check in running.admin.fsck().checks if check.broken] == []
    return theirs, ours
