"""vLLM's own KV blocks in GPU memory of the daemon (`kvmanager.clients.engine_memory`): a torch pool over it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from kvmanager.clients.engine_memory import EngineMemory
from kvmanager.clients.vllm.gpu_pool import RegionPool
from kvmanager.clients.vllm.settings import Settings
from kvmanager.errors import CapacityError, ConfigError, KVError, NotReady
from kvmanager.layout import KVFormat
from kvmanager.units import MIB

RETRY_S: Final = 0.1
_SMALL, _MIDDLE, _STEP = MIB, 10 * MIB, 2 * MIB
_log = logging.getLogger("vllm.kvmanager.memory")


class Pool(Protocol):
    """What hands out the memory."""

    def context(self) -> AbstractContextManager[Any]:
        """Tensors made within lie in it."""
        ...


def segment_bytes(size_bytes: int) -> int:
    """What torch asks an allocator for when a tensor of this size is made: it takes memory in larger steps."""
    if size_bytes <= _SMALL:
        return _STEP
    if size_bytes < _MIDDLE:
        return 2 * _MIDDLE
    return -(-size_bytes // _STEP) * _STEP


def take_memory(take: Callable[[], EngineMemory], wait_s: float) -> EngineMemory:
    """Waits for one that died just now, and for a daemon that is away. Raises the last refusal after `wait_s`."""
    give_up = time.monotonic() + wait_s
    while True:
        try:
            return take()
        except (CapacityError, NotReady) as refusal:
            if time.monotonic() > give_up:
                raise
            _log.info("waits for its memory: %s", refusal)
        time.sleep(RETRY_S)


def engine_pool(
    settings: Settings, kv_format: KVFormat, block_tokens: int, workers: int, needed_bytes: int,
    make_pool: Callable[[int, int], Pool] = RegionPool,
) -> tuple[EngineMemory, Pool]:  # fmt: skip
    """The memory that the settings name, and a torch pool over it for one allocation of `needed_bytes`.

    Both are to be kept. Raises ConfigError where it can't be, and what `EngineMemory` raises.
    """
    if workers != 1:
        raise ConfigError(f"memory_group: {workers} workers; one is served")
    name = f"{settings.engine}-memory"
    memory = take_memory(
        lambda: EngineMemory(settings.runtime_dir, settings.memory_group, name, kv_format, block_tokens),
        settings.memory_wait_s,
    )
    try:
        pool = pool_over(memory, needed_bytes, make_pool)
    except KVError:
        memory.close()
        raise
    _log.info("the engine's %d blocks of KV lie in group %s of the node", memory.blocks, settings.memory_group)
    return memory, pool


def pool_over(
    memory: EngineMemory, needed_bytes: int, make_pool: Callable[[int, int], Pool] = RegionPool
) -> Pool:
    """A torch pool over it for one allocation of `needed_bytes`. Raises ConfigError where it can't be."""
    if memory.device == "cpu":
        raise ConfigError("the node's device is the CPU: torch has memory pools for GPUs only")
    needed = segment_bytes(needed_bytes)
    if needed > memory.size_bytes:
        raise ConfigError(
            f"the engine's KV cache takes {needed} bytes, its group has {memory.size_bytes}: lower the engine's "
            "kv_cache_memory_bytes, or raise the group's hbm_bytes_per_rank"
        )
    return make_pool(memory.address, memory.size_bytes)
