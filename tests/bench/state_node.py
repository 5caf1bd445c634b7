"""A real node (keeper, daemon, mover) that holds millions of cached tokens and has no bytes behind them.

    python -m tests.bench.state_node CONFIG RUNTIME_DIR

Its regions are memfds of full size that are neither faulted in nor written, so it runs on any machine; everything
else is as in a node that serves. A daemon that goes on with memory faults nothing in anyway.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvmanager.clients.admin import AdminClient
from kvmanager.errors import KVError
from kvmanager.keeper.children import KeeperLimits
from kvmanager.keeper.keeper import Keeper

START_S = 60.0


@contextmanager
def state_node(directory: Path, runtime_dir: Path, toml: str) -> Iterator[Path]:
    """Runs one until the end of the block; the path of its log. Raises AssertionError when it does not serve."""
    config, log_path = directory / "state.toml", directory / "state.log"
    config.write_text(toml, encoding="utf-8")
    command = [sys.executable, "-m", "tests.bench.state_node", str(config), str(runtime_dir)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while not _serves(runtime_dir):
            alive = process.poll() is None and time.monotonic() < deadline
            assert alive, log_path.read_text(encoding="utf-8")[-2000:]
            time.sleep(0.05)
        yield log_path
    finally:
        process.terminate()
        process.wait(START_S)


def _serves(runtime_dir: Path) -> bool:
    try:
        with AdminClient(runtime_dir) as client:
            return client.status().state == "serving"
    except KVError:
        return False


def _keeper(config: str, runtime_dir: Path) -> int:
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    python = (sys.executable, "-m")
    daemon = (*python, "tests.bench.state_daemon", "--config", config)
    mover = (*python, "kvmanager.mover", "--runtime-dir", str(runtime_dir), "--device", "cpu")
    spare = (*python, "kvmanager.keeper.spare", "tests.bench.state_daemon", "--config", config)
    return Keeper(runtime_dir, daemon, {"mover-cpu": mover}, KeeperLimits(), spare_command=spare).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s keeper: %(message)s")
    sys.exit(_keeper(sys.argv[1], Path(sys.argv[2])))
