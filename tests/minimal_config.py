"""The least configuration that a node takes, for tests that add a line or look at what it gives."""

from __future__ import annotations

from pathlib import Path


def minimal_toml(runtime_dir: Path | str = "/tmp/n") -> str:
    """A node with one sharded group in 1 MiB of HBM a rank, and no host memory."""
    return f"""
[node]
name = "n"
runtime_dir = "{runtime_dir}"
[[group]]
name = "g"
kind = "sharded"
format = "glm-5.3-tiny-fp8_ds_mla"
ranks = 2
page_rows = 16
hbm_bytes_per_rank = "1MiB"
host_bytes_per_rank = 0
"""
