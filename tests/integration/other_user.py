"""A second user on a node: a process that root starts as uid 1001, and that may open the node's private directory.

As one could with the sockets mounted into its container.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OTHER_UID = 1001
needs_two_users = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root with setpriv can be two users"
)


def command_as(uid: int, code: str, *arguments: object) -> list[str]:
    """A Python program of that user."""
    capable = ["--clear-groups", "--inh-caps", "+dac_override", "--ambient-caps", "+dac_override"]
    return ["setpriv", "--reuid", str(uid), *capable, sys.executable, "-u", "-c", code, *map(str, arguments)]


def environment() -> dict[str, str]:
    """In which such a program finds this directory's modules."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run_as_other_user(code: str, *arguments: object) -> dict[str, set[int]]:
    """What the program says, by the first word of each line: the numbers behind it."""
    done = subprocess.run(
        command_as(OTHER_UID, code, *arguments),
        env=environment(), capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {line[0]: set(map(int, line[1:])) for line in lines if line}
