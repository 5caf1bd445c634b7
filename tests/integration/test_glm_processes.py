"""Ranks as processes of their own over torch.distributed: the same code as on threads, the same tokens and rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.glm_ranks import CUTS, MAIN_LAYERS, expected_answer

ROOT = Path(__file__).parents[2]
SURE_S = 120.0
"""Timeout of the ranks' gathers where nobody stops: longer than any rank is late on a busy machine."""

RunGroup = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def run_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunGroup]:
    """Runs a group of rank processes, see `glm_rank_process`; what each rank said."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.glm_rank_process"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def run(size: int, interleave: int = 1, **more: Any) -> list[dict[str, Any]]:
        meeting = tmp_path_factory.mktemp("ranks") / "meeting"
        group = {"meeting": str(meeting), "size": size, "interleave": interleave, "timeout_s": SURE_S}
        stdin.write(json.dumps({**group, "dying": {}, "absent": [], **more}) + "\n")
        stdin.flush()
        said: list[dict[str, Any]] = json.loads(stdout.readline())
        print(said)
        return said

    yield run
    stdin.close()
    assert process.wait() == 0
    stdout.close()


@pytest.mark.parametrize(
    ("size", "interleave"),
    [(3, 1), pytest.param(2, 16, marks=pytest.mark.long), pytest.param(8, 4, marks=pytest.mark.long)],
)
def test_processes_prefill_and_decode_as_one_rank_does(run_group: RunGroup, size: int, interleave: int) -> None:
    """PCP x DCP over the gathered copy, then DCP decode; each rank compares its rows with the plain run's."""
    for said in run_group(size, interleave):
        assert said.get("tokens") == list(expected_answer())
        assert (said["leases"], said["held"]) == (len(CUTS) - 1, False)


IN_PREFILL = len(MAIN_LAYERS) + 3
"""The reads of the first chunk, and some layers of the second."""
IN_DECODE = len(MAIN_LAYERS) * (len(CUTS) - 1) + 3


@pytest.mark.parametrize("read", [IN_PREFILL, IN_DECODE], ids=["prefill", "decode"])
def test_a_rank_that_is_killed_in_a_step_ends_the_others_with_a_typed_error(run_group: RunGroup, read: int) -> None:
    first, killed, *others = run_group(4, dying={"1": [signal.SIGKILL, read]})
    for said in (first, *others):
        assert said["error"] == "PeerUnreachable"
        assert "a rank of the engine is gone" in said["message"]
        assert "Timed out" not in said["message"], "also a rank that had to do with the dead one through others only"
        assert not said["held"], "the workspace is given back"
        assert (said["leases"] == len(CUTS) - 1) == (read == IN_DECODE)
    assert (killed["signal"], killed["lives"]) == (signal.SIGKILL, False)


def test_a_rank_that_stops_is_waited_for_a_stated_time(run_group: RunGroup) -> None:
    first, stopped, last = run_group(3, dying={"1": [signal.SIGSTOP, IN_PREFILL]}, timeout_s=4.0)
    assert stopped["lives"]
    assert [said["error"] for said in (first, last)] == ["PeerUnreachable"] * 2


def test_a_rank_that_never_comes(run_group: RunGroup) -> None:
    said, _ = run_group(2, absent=[1], timeout_s=1.0)
    assert said["error"] == "PeerUnreachable"
    assert "not all ranks came" in said["message"]
