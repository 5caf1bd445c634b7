"""Device memory of the daemon for what an engine lays out itself: it outlives the engine, and one has it at a time.

The process holds a group of kind "engine" by one request over all of it. It never gives it back: the daemon takes it
when the process is dead, so that no kernel that is still running can write to memory of the next engine.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.errors import KVError, StaleBoot, StaleEpoch
from kvmanager.layout import KVFormat, plain_layout
from kvmanager.protos import kvmanager_pb2 as pb

LOOK_S: Final = 0.25
"""How often it looks whether the daemon was replaced."""
KEY_BYTES: Final = 16
_log = logging.getLogger("kvmanager.clients.engine_memory")


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
