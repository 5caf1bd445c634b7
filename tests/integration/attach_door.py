"""An attach server on its own, and clients of it as processes."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvmanager.clients.attach import Attachment, attach
from kvmanager.daemon.attach import AttachServer, ClientIdentity
from kvmanager.errors import UnknownRequest

WAIT_S = 60.0
BOOT_ID = 0xFEDC_BA98_7654_3210
CLIENT = """
import sys, time
from pathlib import Path
from kvmanager.clients.attach import attach
attachment = attach(Path(sys.argv[1]), "worker", "rank 3")
print(attachment.token, flush=True)
{then}
"""


class Door:
    """A server and what it reported, in order."""

    def __init__(self, runtime_dir: Path, trust_uids: Sequence[int]) -> None:
        self.runtime_dir = runtime_dir
        self.reports: queue.Queue[tuple[str, object]] = queue.Queue()
        self.fds: dict[int, list[int]] = {}
        self.on_attach: Callable[[ClientIdentity], None] = lambda identity: self.reports.put(("attach", identity))
        self.server = AttachServer(
            runtime_dir,
            trust_uids=trust_uids,
            boot_id=BOOT_ID,
            grpc_path=runtime_dir / "grpc.sock",
            on_attach=lambda identity: self.on_attach(identity),
            on_leave=lambda token: self.reports.put(("leave", token)),
            on_disconnect=lambda token: self.reports.put(("disconnect", token)),
            on_exit=lambda token: self.reports.put(("exit", token)),
            fds_for=self._fds_for,
            on_failure=lambda error: self.reports.put(("failure", error)),
        )
        self.server.start()

    def _fds_for(self, token: str, attach_id: int) -> list[int]:
        assert self.server.identity_of(token).token == token
        if attach_id not in self.fds:
            raise UnknownRequest(f"no attach {attach_id}")
        return self.fds[attach_id]

    def next(self) -> tuple[str, object]:
        return self.reports.get(timeout=WAIT_S)

    def attached(self) -> ClientIdentity:
        what, identity = self.next()
        assert what == "attach", (what, identity)
        assert isinstance(identity, ClientIdentity)
        return identity

    def attach(self, role: str = "engine", name: str = "prefill") -> Attachment:
        return attach(self.runtime_dir, role, name)

    def raw(self) -> socket.socket:
        channel = socket.socket(socket.AF_UNIX)
        channel.settimeout(WAIT_S)
        channel.connect(str(self.server.path))
        return channel


def spawn(door: Door, then: str) -> subprocess.Popen[str]:
    script = CLIENT.format(then=then)
    return subprocess.Popen([sys.executable, "-c", script, str(door.runtime_dir)], stdout=subprocess.PIPE, text=True)
