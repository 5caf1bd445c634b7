"""Runs inside Mooncake's environment, against its running master: `mooncake_peer.py CASE MASTER [PAGES]`; JSON out.

One client in this process lends the memory and asks, over TCP. Mooncake has no prefix lookup: existence of all keys of
a prompt in one call (`batch_is_exist`) stands for it, one key for 64 tokens.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from cases import CAPACITY_PAGES, KILLED_OBJECTS, LOAD_S, LOAD_TOKENS, LOOKUPS, NOOPS, PAGE_BYTES, PAGES
from clock import count_for, summary, times_us
from mooncake.store import MooncakeDistributedStore

TOKENS_A_KEY = 64


def store(segment_bytes: int) -> MooncakeDistributedStore:
    made = MooncakeDistributedStore()
    done = made.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", sys.argv[2])
    assert done == 0, done
    return made


def keys(name: str, tokens: int) -> list[str]:
    return [f"{name}/{number:08d}/0123456789abcdef" for number in range(tokens // TOKENS_A_KEY)]


def case_lookup() -> dict[str, object]:
    held = store(256 << 20)
    report: dict[str, object] = {"noop": summary(times_us([lambda: held.is_exist("nothing")] * NOOPS))}
    for tokens, calls in LOOKUPS:
        known, unknown = keys(f"k{tokens}", tokens), keys(f"u{tokens}", tokens)
        for key in known:
            assert held.put(key, b"x" * 64) == 0
        assert set(held.batch_is_exist(known)) == {1}
        report[f"lookup hit {tokens}"] = summary(times_us([lambda known=known: held.batch_is_exist(known)] * calls))
        report[f"lookup miss {tokens}"] = summary(times_us([lambda u=unknown: held.batch_is_exist(u)] * calls))
    held.close()
    return report


def case_pages() -> dict[str, object]:
    held = store(256 << 20)
    data = os.urandom(PAGE_BYTES)
    puts = [lambda n=n: held.put(f"p{n}", data) for n in range(PAGES)]
    gets = [lambda n=n: held.get(f"p{n}") for n in range(PAGES)]
    report = {"store page": summary(times_us(puts)), "retrieve page": summary(times_us(gets))}
    assert held.get("p0") == data
    held.close()
    return report


def case_evict(pages: int = CAPACITY_PAGES) -> dict[str, object]:
    held = store(-(-pages * PAGE_BYTES >> 20) << 20)
    data, failed, times = os.urandom(PAGE_BYTES), 0, []
    for number in range(2 * pages):
        done = []
        times += times_us([lambda n=number, done=done: done.append(held.put(f"e{n}", data))])
        failed += done[0] != 0
    found = sum(held.is_exist(f"e{n}") == 1 for n in range(2 * pages - pages // 4, 2 * pages))
    held.close()
    return {"evict store": summary(times), "evict failed stores": failed, "evict newest quarter found": found}


def case_kill() -> dict[str, object]:
    """The master gets SIGKILL and is started again as it was; this client, which has the bytes, lives on."""
    held = store(128 << 20)
    for number in range(KILLED_OBJECTS):
        assert held.put(f"r{number}", b"y" * 4096) == 0
    before = sum(held.is_exist(f"r{n}") == 1 for n in range(KILLED_OBJECTS))
    os.kill(int(os.environ["MASTER_PID"]), signal.SIGKILL)
    start = time.perf_counter()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    again = subprocess.Popen(json.loads(os.environ["MASTER_COMMAND"]), **quiet)
    try:
        while held.put("probe", b"z") != 0 and time.perf_counter() - start < 60:
            time.sleep(0.05)
        back_s = time.perf_counter() - start
        after = sum(held.is_exist(f"r{n}") == 1 for n in range(KILLED_OBJECTS))
    finally:
        again.kill()
        again.wait()
    return {"kill before": before, "kill after": after, "kill s": back_s}


def case_load() -> dict[str, object]:
    held = store(16 << 20)
    asked = keys("load", LOAD_TOKENS)
    for key in asked:
        held.put(key, b"x")
    rate = count_for(LOAD_S, lambda: held.batch_is_exist(asked))
    held.close()
    return {"lookups a second": rate}


if __name__ == "__main__":
    print(json.dumps(globals()[f"case_{sys.argv[1]}"]()), flush=True)
    os._exit(0)
