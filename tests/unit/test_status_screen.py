"""What `kvmanager status` says of parts that stand still."""

from __future__ import annotations

import io

from rich.console import Console

from kvmanager.command.screens import status_screen
from kvmanager.protos import kvmanager_pb2 as pb


def test_what_stands_still_is_told_with_the_nodes_state() -> None:
    stalls = [
        pb.Stall(part="mover", why="has not answered a ping for 9.0 s"),
        pb.Stall(part="history", why="has work and did none for 31.0 s", ready=True),
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(status_screen(pb.StatusReply(state="serving", stalls=stalls)))
    text = console.export_text()
    assert "mover has not answered a ping for 9.0 s; the node is NOT READY" in text
    assert "history has work and did none for 31.0 s; the node is ready all the same" in text
