"""A rank's workspace in memory of the daemon: a group of kind "engine", held as a whole by one request.

So it stands on a pool line of its own in the node's account, is refused while another engine may still write to it, and
comes back when the rank's process is dead. Each step takes it as one lease, inside this process: no call a step or a
layer. A sharded group with `workspace_bytes_per_rank` has one such group a rank; its own requests are refused when they
are opened where a step over them would not fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from kvmanager.clients.engine_memory import EngineMemory
from kvmanager.clients.glm.workspace import TOKEN_BYTES, Workspace
from kvmanager.geometry import ShardGeometry
from kvmanager.layout import plain_format, workspace_group

WORKSPACE_FORMAT: Final = plain_format("uint8", 1, 1, TOKEN_BYTES)
"""A token's bytes of one full copy of one layer; what `layout.workspace_format` says of the models' formats."""


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


@contextlib.contextmanager
def lent_workspaces(
    runtime_dir: Path, group: str, engine: str, geometry: ShardGeometry
) -> Iterator[Sequence[Workspace]]:
    """Of all ranks of `group`, for an engine that has them in this process, until the end of the block.

    Raises as `LentWorkspace` does, and then holds none.
    """
    with contextlib.ExitStack() as held:
        spaces = []
        for rank in range(geometry.ranks):
            lent = LentWorkspace(runtime_dir, workspace_group(group, rank), engine, rank, geometry.page_rows)
            held.callback(lent.close)
            spaces.append(lent.space)
        yield spaces
