"""HBM outlives every process that made or used it, and dies with the last descriptor.

The daemon, mover and worker here are stand-ins that use the product's allocators; the keeper runs the product's
deposits. A daemon that takes the memory up again is the journal's matter.
"""

from __future__ import annotations

import itertools
import os
import socket

import pytest
from gpu_support import memory_is_given_back, processes, used_mib

from kvmanager.framing import receive_json, send_json
from kvmanager.units import MIB

pytestmark = pytest.mark.gpu
SIZE = 256 * MIB + 12_345
ROLES = ("daemon", "mover", "worker")
COMBINATIONS = [c for n in (1, 2, 3) for c in itertools.combinations(ROLES, n)]


@pytest.mark.parametrize("killed", COMBINATIONS, ids="+".join)
def test_bytes_are_intact_whoever_is_killed(killed: tuple[str, ...]) -> None:
    with memory_is_given_back() as before, processes() as start:
        maker_end, keeper_end = socket.socketpair()
        our_end, other_end = socket.socketpair()
        fds = (keeper_end.fileno(), other_end.fileno())
        keeper = start("keeper", *fds, fds=fds)
        assert keeper.hear() == "keeps"
        parts = {"daemon": start("maker", maker_end.fileno(), SIZE, fds=[maker_end.fileno()])}
        for end in (maker_end, keeper_end, other_end):
            end.close()
        assert parts["daemon"].hear() == "made"

        def mapper():
            fd = reclaimed(our_end)
            process = start("mapper", fd, SIZE, fds=[fd])
            os.close(fd)
            assert process.hear() == "mapped"
            return process

        parts["mover"], parts["worker"] = mapper(), mapper()
        assert parts["worker"].ask("write 7") == "written"
        assert parts["mover"].ask("check 7") == "right"
        assert parts["mover"].ask("check 8") == "WRONG", "the check can fail"
        assert parts["mover"].ask("write 9") == "written"
        for role in killed:
            parts[role].kill()
        for role in killed:
            parts[role].wait_dead()
        for role in ("mover", "worker"):
            if role not in killed:
                assert parts[role].ask("check 9") == "right"
        if killed == ROLES:
            assert keeper.ask("cuda?") == "plain", "only a process without CUDA holds the memory now"
            assert used_mib() >= before + SIZE // MIB
        assert mapper().ask("check 9") == "right"
        our_end.close()


def reclaimed(keeper: socket.socket) -> int:
    """The one descriptor that the keeper holds. By hand: the daemon's own link would hold a duplicate too."""
    send_json(keeper, {"op": "reclaim"})
    assert receive_json(keeper)[0] == {"op": "reclaim", "count": 1}
    held, (fd,) = receive_json(keeper)
    assert held["size"] == SIZE
    return fd
