"""On a GPU: the row codec beside a plain copy of the same bytes, in one run."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Callable, Iterator

import torch

from kvmanager.clients.glm.codec import Fp8Codec
from tests.bench.figure import Figure

ROWS = 1 << 19
ROUNDS = 20


def _median_s(work: Callable[[], object]) -> float:
    """Median seconds of `work` on the GPU, by events, after three calls that are not counted."""
    for _ in range(3):
        work()
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[ROUNDS // 2]


def machine() -> dict[str, str]:
    """GPU, driver, software and date of this run."""
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": properties.name,
        "driver": subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip(),
        "memory_bytes": str(properties.total_memory),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }


def figures() -> Iterator[Figure]:
    """Encoding and decoding of latent rows, by bytes read and written."""
    codec = Fp8Codec()
    latents = torch.randn((ROWS, 512), device="cuda", dtype=torch.bfloat16)
    rope = torch.randn((ROWS, 64), device="cuda", dtype=torch.bfloat16)
    rows = codec.encode_latent(latents, rope)
    moved = ROWS * (576 * 2 + 656)
    source = torch.empty(moved // 2, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_s = _median_s(lambda: target.copy_(source))
    for name, work in (
        ("encode", lambda: codec.encode_latent(latents, rope)),
        ("decode", lambda: codec.decode_latent(rows, torch.bfloat16)),
    ):
        seconds = _median_s(work)
        yield Figure(
            f"gpu: {name} latent rows (torch)", moved / seconds / 1e9, "GB/s", "a plain copy moving as many bytes",
            copy_s / seconds,
        )
