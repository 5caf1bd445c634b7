"""GPU memory of the daemon for an engine's own KV blocks: it outlives the engine, and nobody else gets it before.

The process holds a group of kind "engine" by one request over all of it. It never gives it back: the daemon takes it
when the process is dead, so that no kernel that is still running can write to memory of the next engine.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Final, Protocol

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.vllm.gpu_pool import RegionPool
from kvmanager.clients.vllm.settings import Settings
from kvmanager.errors import CapacityError, ConfigError, KVError, NotReady, StaleBoot, StaleEpoch
from kvmanager.layout import KVFormat, plain_layout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.units import MIB

LOOK_S: Final = 0.25
"""How often it looks whether the daemon was replaced."""
RETRY_S: Final = 0.1
KEY_BYTES: Final = 16
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


class EngineMemory:
    """All memory of one group of kind "engine", mapped here. Keep it as long as anything lies in it."""

    def __init__(self, runtime_dir: Path, group: str, name: str, kv_format: KVFormat, block_tokens: int) -> None:
        """Takes it at once. Raises PoolExhausted while another engine has it, NotReady, LayoutMismatch, ConfigError."""
        layout = plain_layout(kv_format, block_tokens)
        namespace = pb.Namespace(
            model=f"memory of {name}", kv_format=kv_format.name, key_hash="sha256", key_bytes=KEY_BYTES,
            key_tokens=block_tokens,
        )  # fmt: skip
        with ExitStack() as undo:
            self._engine = AttachedEngine(
                runtime_dir, name, group=group, namespace=namespace, layouts=[layout], ranks=1
            )
            undo.callback(self._engine.close)
            (rank,) = self._engine.workers.ranks
            (region,) = [r for r in rank.descriptors.values() if r.kind == pb.DEVICE]
            self.memory: Any = rank.classes["kv"].device
            """uint8[size_bytes]: a torch tensor of GPU memory; a numpy array where the node's device is the CPU."""
            self.device: str = region.device
            self.blocks: int = region.size_bytes // layout.page_bytes
            self._open(self.blocks, block_tokens)
            undo.pop_all()
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._run, name="kvmanager-memory", daemon=True)
        self._watch.start()

    def _open(self, blocks: int, block_tokens: int) -> None:
        """Its keys are nobody's: nothing is ever committed under them."""
        keys = bytes(blocks * KEY_BYTES)
        wanted = pb.OpenRequest(request_id=1, prompt_tokens=blocks * block_tokens, prompt_keys=keys)
        self._engine.open(wanted, timeout_s=0.0)

    @property
    def size_bytes(self) -> int:
        """Of the memory."""
        return len(self.memory)

    @property
    def address(self) -> int:
        """Where it is mapped."""
        if self.device == "cpu":
            return int(self.memory.ctypes.data)
        return int(self.memory.data_ptr())

    def _run(self) -> None:
        """Goes on with a daemon that was replaced, or this process would be suspect for good."""
        client = self._engine.client
        while not self._closing.wait(LOOK_S):
            try:
                boot_id = self._engine.renew()
                if boot_id != client.boot_id:
                    client.boot_id = boot_id
                    client.step()
            except (StaleBoot, StaleEpoch) as error:
                # What is mapped stays ours until we end, but nobody will find it afterwards.
                _log.error("the daemon started cold, this engine's memory is not the node's any more: %s", error)
                return
            except KVError as error:
                _log.debug("the daemon is away: %s", error)

    def close(self) -> None:
        """Gives it back; nothing of this process may use it any more. A process that ends need not."""
        self._closing.set()
        self._watch.join()
        with contextlib.suppress(KVError):
            self._engine.step(closes=[pb.CloseRequest(request_id=1, reason=pb.ABORTED)])
        self.memory = None
        self._engine.close()


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
