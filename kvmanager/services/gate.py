"""What stands before new work and before every call that names a boot."""

from __future__ import annotations

import threading

from kvmanager.errors import Draining, StaleBoot
from kvmanager.protos import kvmanager_pb2 as pb

Named = pb.StepRequest | pb.LookupRequest | pb.AcquireRequest | pb.DoneRequest | pb.StoreRequest
"""Messages that name a boot and an epoch."""


class Gate:
    """Whether new work is let in: not while the node ends, nor while an operator has it drained."""

    def __init__(self, cordon: str = "") -> None:
        """`cordon`: why an operator lets nothing in; empty: he does."""
        self._closed = threading.Event()
        self.cordon = cordon

    def close(self) -> None:
        """Lets nothing new in, for good."""
        self._closed.set()

    def check(self) -> None:
        """Raises Draining when closed."""
        if self._closed.is_set():
            raise Draining("the node drains; open new work elsewhere")
        if self.cordon:
            raise Draining(f"the node drains ({self.cordon}); open new work elsewhere")


def check_boot(message: Named, boot_id: int) -> None:
    """Raises StaleBoot for a message to another daemon than the one of this boot."""
    if message.boot_id != boot_id:
        raise StaleBoot(f"boot id {message.boot_id} is not this daemon's ({boot_id}); attach and register again")
