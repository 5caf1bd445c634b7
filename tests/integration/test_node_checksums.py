"""A byte of the offload memory flips under real processes: it is found, taken out, counted, and never served."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from nodes_support import (
    GROUP,
    PAGE_BYTES,
    RANKS,
    SPAN,
    Node,
    decode_engine,
    decode_toml,
    device_pages,
    fill,
    kill_and_wait,
    node,
    open_of,
    page_bytes_of,
    prefill_engine,
    prefill_toml,
    run_request,
    tokens_of,
    wait_for,
)

from kvmanager.clients.engine import RequestStep
from kvmanager.errors import ChecksumMismatch


def flip_on_the_host(served: Node, seed: int, rank: int, place: int, at: int) -> None:
    """Finds a page by its content in the mover's host memory, through /proc, and flips a bit of it."""
    fds = Path(f"/proc/{served.pid_of('mover')}/fd")
    wanted = page_bytes_of(seed, rank, place).tobytes()
    for link in fds.iterdir():
        if not os.readlink(link).startswith("/memfd:") or "host" not in os.readlink(link):
            continue
        with open(link, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            for page in range(len(memory) // PAGE_BYTES):
                if memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] == wanted:
                    memory[page * PAGE_BYTES + at] ^= 0x10
                    return
    raise AssertionError(f"no host page holds what session {seed} wrote: {[os.readlink(f) for f in fds.iterdir()]}")


def offload(served: Node, seeds: list[int]) -> None:
    """Sessions of five spans each; the first ones end up on the host alone."""
    engine = prefill_engine(served.runtime_dir)
    for number, seed in enumerate(seeds):
        run_request(engine, number, tokens_of(seed, 5 * SPAN), seed)
        served.wait_at_rest()
    engine.close()


def test_a_flipped_byte_is_a_miss_not_wrong_bytes(tmp_path: Path) -> None:
    with node(tmp_path, "prefill", prefill_toml, pages=12) as served:
        offload(served, [1, 2, 3])
        flip_on_the_host(served, 1, RANKS - 1, 2, 77)
        engine = prefill_engine(served.runtime_dir)
        tokens = tokens_of(1, 5 * SPAN)
        with pytest.raises(ChecksumMismatch, match=f"latent section, rank {RANKS - 1}"):
            engine.open(open_of(1, tokens, growth=0))
        # Asked again, what lies before it is found with the right bytes, the rest is computed.
        assert run_request(engine, 2, tokens, 1) == 2 * SPAN
        counters = served.counters()
        assert counters["bad_copy"] == 1
        assert counters["checked_page"] > 0
        assert served.pools()[f"{GROUP}/host"][5] == RANKS * PAGE_BYTES, "in quarantine, on all ranks"
        assert served.admin.status().ledger_ok
        engine.close()


def test_a_warm_restart_finds_it_before_anybody_asks(tmp_path: Path) -> None:
    with node(tmp_path, "prefill", prefill_toml, pages=12) as served:
        offload(served, [1, 2, 3])
        flip_on_the_host(served, 1, 0, 2, PAGE_BYTES - 1)
        kill_and_wait(served.pid_of("daemon"))
        served.reopen()
        wait_for(lambda: served.counters()["bad_copy"] == 1, lambda: str(served.counters()))
        assert served.counters()["restart_check"] > 0
        engine = prefill_engine(served.runtime_dir)
        assert run_request(engine, 1, tokens_of(1, 5 * SPAN), 1) == 2 * SPAN
        engine.close()


def test_a_hand_off_of_bytes_that_changed_is_refused_and_the_next_is_served(tmp_path: Path) -> None:
    """The source knows sums of what it offloaded; the target compares them in staging, before anything is placed."""
    with (
        node(tmp_path, "prefill", prefill_toml, pages=64) as source,
        node(tmp_path, "decode", decode_toml) as target,
    ):
        prefill, decode = prefill_engine(source.runtime_dir), decode_engine(target.runtime_dir)
        tokens = tokens_of(1, 3 * SPAN)
        pages = device_pages(prefill.open(open_of(1, tokens, growth=0)))
        fill(prefill, pages, 1)
        prefill.step([RequestStep(1, len(tokens), len(tokens))])
        wait_for(lambda: source.counters()["summed_page"] == 3 * RANKS, lambda: str(source.counters()))
        memory = prefill.workers.ranks[1].classes["kv"].device
        at = int(pages[1]) * PAGE_BYTES + 1234
        memory[at] ^= 1
        ticket = prefill.client.export(1)
        with pytest.raises(ChecksumMismatch, match="page 3 of 6"):
            decode.open(open_of(1, tokens, ticket=ticket))
        assert target.counters()["bad_pull"] == 1
        assert target.counters()["handoff"] == 0
        target.wait_at_rest()
        memory[at] ^= 1
        wait_for(lambda: not source.admin.leases().leases)
        served = decode.open(open_of(2, tokens, ticket=prefill.client.export(1)))
        assert served.cached_tokens == 3 * SPAN
        assert target.counters()["bad_pull"] == 1
        decode.close()
        prefill.close()
