"""Two ranks on two GPUs over NCCL: gathers into the workspace beside other work, and DCP decode merged over both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = 2
WAIT_S = 150.0


def run_ranks(meeting: Path, backend: str, **environment: str) -> None:
    """Both ranks end well, and say so."""
    script = str(Path(__file__).parent / "gpu_rank_process.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(meeting), str(rank), str(RANKS), backend],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=WAIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    for rank, words in enumerate(said):
        print(words)
        assert f"rank {rank}: done" in words


@pytest.mark.gpu
def test_ranks_over_nccl(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < RANKS:
        pytest.skip("two GPUs are needed")
    run_ranks(tmp_path / "meeting", "nccl")
