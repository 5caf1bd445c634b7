"""The daemon of `state_node`: it takes no memory for its regions and does not ask whether there is any."""

from __future__ import annotations

import sys

from kvmanager.configuration.config import NodeConfig
from kvmanager.daemon import daemon
from kvmanager.daemon.faultin import FaultIn


def main(arguments: list[str]) -> int:
    """As `kvmanager.daemon`."""
    FaultIn.run = lambda _self, _stopped: True  # type: ignore[method-assign]
    NodeConfig.check_memory = lambda *_: None  # type: ignore[method-assign]
    return daemon.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
