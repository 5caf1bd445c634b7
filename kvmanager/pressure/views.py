"""What an observer looks through: the operator's views of one node."""

from __future__ import annotations

from pathlib import Path

from kvmanager.pressure.nodes import Node
from kvmanager.protos import kvmanager_pb2 as pb


class Views:
    """The operator's views of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def status(self) -> pb.StatusReply:
        """The node at a glance."""
        return self._node.admin.status()

    def pools(self) -> pb.PoolsReply:
        """Bytes by pool and state."""
        return self._node.admin.pools()

    def capacities(self) -> dict[str, int]:
        """Slabs of each pool: pages of the largest class, one rank's."""
        page = max(layout.page_bytes for layout in self._node.target.layouts.values())
        return {pool.pool: int(pool.capacity_bytes // pool.ranks // page) for pool in self.pools().pools}

    @property
    def place(self) -> Path:
        """Which daemon this is."""
        return self._node.operator.runtime_dir

    def leftovers(self, quiet: bool) -> list[str]:
        """What engines of ours still hold; on a node that was quiet before, what anybody does."""
        status, admin, left = self.status(), self._node.admin, []
        left += [
            f"engine {e.engine} epoch {e.epoch} is {e.state}"
            for e in status.engines
            if e.state != "gone" and (quiet or e.engine.startswith("pressure-"))
        ]
        left += [
            f"request {r.engine}/{r.request_id} is {r.state}"
            for r in admin.requests().requests
            if quiet or r.engine.startswith("pressure-")
        ]
        if not quiet:
            return left
        left += [f"mover {m.device} carries {m.outstanding} plans" for m in status.movers if m.outstanding]
        left += [f"lease {lease.lease_id} of request {lease.request_id}" for lease in admin.leases().leases]
        for pool in self.pools().pools:
            if pool.free_bytes + pool.ready_bytes != pool.capacity_bytes or pool.pinned_bytes or pool.promised_bytes:
                left.append(f"pool {pool.pool} holds: {' '.join(str(pool).split())}")
        return left
