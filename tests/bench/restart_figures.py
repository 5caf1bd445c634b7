"""How a node comes back after SIGKILL of its daemon: with 10M tokens of state, and beside LMCache's server.

Wall time from the kill to the first answer. A spare daemon is ready each time, so nothing is imported in it; the
keeper's back-off is: 0, 0.1 and 0.2 s for three deaths in a row.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.layout import GLM53_TINY, native_layout
from kvmanager.protos import kvmanager_pb2 as pb
from tests.bench import lmcache_reference
from tests.bench.core_figures import KEY_BYTES, PAGE_ROWS, RANKS, STATE_TOKENS, session_keys
from tests.bench.figure import Figure
from tests.bench.state_node import START_S, state_node

REQUEST_TOKENS = 1 << 19
KILLS = 3
IMPORT_S = "import time; w, c = time.perf_counter(), time.process_time(); import kvmanager.daemon.daemon; " \
    "print(time.perf_counter() - w, time.process_time() - c)"  # fmt: skip
NAMESPACE = pb.Namespace(
    model="bench", weights_revision="r", kv_format=GLM53_TINY.name, key_tokens=PAGE_ROWS, key_bytes=KEY_BYTES,
    key_hash="sha256",
)  # fmt: skip


def figures() -> Iterator[Figure]:
    """A node with 10M cached tokens; then as many pages as LMCache's bench has objects, and theirs."""
    imported = [tuple(map(float, _python(IMPORT_S).split())) for _ in range(KILLS)]
    import_s, import_cpu_s = (statistics.median(column) for column in zip(*imported, strict=True))
    against = "importing the daemon in a new process"
    yield Figure("restart: that import, CPU time", import_cpu_s * 1e3, "ms", "its wall time", import_cpu_s / import_s)
    for tokens, name in ((STATE_TOKENS, "10M tokens"), (lmcache_reference.OBJECTS * PAGE_ROWS, "80 pages")):
        times, adopts, before, kept, spare_mib, daemon_mib = _restarts(tokens)
        restart_s, adopt_s = statistics.median(times), statistics.median(adopts)
        label = f"restart: SIGKILL to the next match, {name}"
        yield Figure(label, restart_s * 1e3, "ms", against, restart_s / import_s)
        yield Figure(f"restart: ... of it reading the journal, {name}", adopt_s * 1e3, "ms", "the whole",
                     adopt_s / restart_s)  # fmt: skip
        yield Figure(f"restart: ... the first of three, {name}", times[0] * 1e3, "ms", against, times[0] / import_s)
        yield Figure(f"restart: ... committed tokens kept, {name}", kept, "tokens", "those before", kept / before)
        yield Figure(f"restart: own memory of the spare, {name}", spare_mib, "MiB", "the daemon's",
                     spare_mib / daemon_mib)  # fmt: skip
    try:
        theirs = lmcache_reference.restart()
    except lmcache_reference.Unavailable as error:
        print(f"restart: LMCache was not measured: {error}", flush=True)
        return
    yield Figure("restart: SIGKILL to healthy, LMCache 80 objects", theirs.healthy_s * 1e3, "ms",
                 "our node, 80 pages, to its next match", theirs.healthy_s / restart_s)  # fmt: skip
    yield Figure("restart: ... objects kept, LMCache", theirs.after, "objects", "those before",
                 theirs.after / theirs.before)  # fmt: skip


def _restarts(tokens: int) -> tuple[list[float], list[float], int, int, float, float]:
    """After each kill: seconds to the next match, those of them for the journal. Then tokens before, and kept.

    At last the anonymous memory in MiB of a spare that waits and of the daemon.
    """
    per_request = min(tokens, REQUEST_TOKENS)
    sizes = [per_request] * round(tokens / per_request)
    times = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        with state_node(directory, directory / "node", _toml(directory / "node", tokens)) as log_path:
            engine = AttachedEngine(
                directory / "node", "bench", group="prefill", namespace=NAMESPACE,
                layouts=[native_layout(GLM53_TINY, PAGE_ROWS)], ranks=RANKS,
            )  # fmt: skip
            for number, size in enumerate(sizes):
                keys = session_keys(number, size)
                engine.open(pb.OpenRequest(request_id=number + 1, prompt_tokens=size, prompt_keys=keys))
                engine.step([RequestStep(number + 1, size, size)])
                engine.step(closes=[pb.CloseRequest(request_id=number + 1, reason=pb.FINISHED)])
            engine.step()
            for _ in range(KILLS):
                _await_spare(log_path)
                pid = int(log_path.read_text(encoding="utf-8").rpartition("started the daemon, pid ")[2].split()[0])
                start = perf_counter()
                os.kill(pid, signal.SIGKILL)
                engine.step()
                _found(engine, 0, sizes[0])
                times.append(perf_counter() - start)
            kept = sum(_found(engine, number, size) for number, size in enumerate(sizes))
            _await_spare(log_path)
            memory = [_anonymous_mib(log_path, says) for says in ("a spare daemon is ready", "started the daemon")]
            log = log_path.read_text(encoding="utf-8")
            engine.close()
    adopts = [float(text) for text in re.findall(r"warm start in ([\d.]+) s", log)]
    return times, adopts, sum(sizes), kept, memory[0], memory[1]


def _anonymous_mib(log_path: Path, says: str) -> float:
    """Of the process whose pid the log last gave after these words."""
    pid = log_path.read_text(encoding="utf-8").rpartition(f"{says}, pid ")[2].split()[0]
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def _await_spare(log_path: Path) -> None:
    """Until the keeper has one for the daemon that serves now."""
    deadline = time.monotonic() + START_S
    while True:
        log = log_path.read_text(encoding="utf-8")
        if log.rfind("a spare daemon is ready") > log.rfind("started the daemon"):
            return
        assert time.monotonic() < deadline, log[-2000:]
        time.sleep(0.05)


def _found(engine: AttachedEngine, number: int, size: int) -> int:
    keys = session_keys(number, size)
    request = pb.LookupRequest(
        boot_id=engine.client.boot_id, epoch=engine.client.epoch, keys=keys, prompt_tokens=size
    )
    return int(engine.client._engine_stub.Lookup(request).cached_tokens)


def _toml(runtime_dir: Path, tokens: int) -> str:
    pages = tokens // PAGE_ROWS // RANKS + 64
    return f"""
[node]
name = "state"
runtime_dir = "{runtime_dir}"
[[group]]
name = "prefill"
kind = "sharded"
format = "{GLM53_TINY.name}"
ranks = {RANKS}
page_rows = {PAGE_ROWS}
interleave = 1
hbm_bytes_per_rank = {pages * GLM53_TINY.page_bytes(PAGE_ROWS)}
host_bytes_per_rank = 0
"""


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
