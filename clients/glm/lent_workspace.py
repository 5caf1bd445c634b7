"""A rank's workspace in memory of the daemon: a group of kind "engine", held as a whole by one request.

So it stands on a pool line of its own in the node's account, is refused while another engine may still write to it, and
comes back when the rank's process is dead. Each step takes it as one lease, inside this process: no call a step or a
layer. One group a rank, in whole pages:

    [[group]]
    name = "workspace-0"
    kind = "engine"
    format = "kv/uint8/1x1x788"
    ranks = 1
    page_rows = 64
    hbm_bytes_per_rank = "2 GiB"
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch

from kvmanager.clients.engine_memory import EngineMemory
from kvmanager.clients.glm.workspace import TOKEN_BYTES, Workspace
from kvmanager.layout import plain_format

WORKSPACE_FORMAT: Final = plain_format("uint8", 1, 1, TOKEN_BYTES)
"""A token's bytes of one full copy of one layer."""


class LentWorkspace:
    """All memory of `group`, until it is closed or the process ends."""

    def __init__(self, runtime_dir: Path, group: str, engine: str, rank: int, page_rows: int) -> None:
        """Raises PoolExhausted while another engine has it, NotReady, LayoutMismatch, ConfigError."""
        name = f"{engine}-workspace-{rank}"
        self._memory = EngineMemory(runtime_dir, group, name, WORKSPACE_FORMAT, page_rows)
        memory = self._memory.memory
        tensor = torch.from_numpy(memory) if isinstance(memory, np.ndarray) else memory
        self.space = Workspace(tensor, pool=f"{group}/hbm")
        """What steps take; it refuses one that needs more."""

    def close(self) -> None:
        """Gives it back; no step may be under way."""
        assert not self.space.held
        self._memory.close()
