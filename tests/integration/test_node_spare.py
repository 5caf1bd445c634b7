"""A real node with a spare daemon: who takes a dead daemon's place, and who takes an upgraded one's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes_support import (
    ROWS,
    SPAN,
    Node,
    kill_and_wait,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    run_request,
    tokens_of,
    wait_for,
)

from kvmanager.protos import kvmanager_pb2 as pb

READY = re.compile(r"a spare daemon is ready, pid (\d+)")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, "node", prefill_toml, spare=True) as running:
        yield running


def await_spare(served: Node, number: int) -> int:
    """The pid of the node's n-th spare, once it is ready."""
    wait_for(lambda: len(READY.findall(served.log())) >= number, served.log)
    return int(READY.findall(served.log())[number - 1])


def test_an_engine_goes_on_with_the_spare(served: Node) -> None:
    """Twice, so that the second spare was started by a daemon that had been one; nothing of the first is left over."""
    engine = prefill_engine(served.runtime_dir)
    run_request(engine, 1, tokens_of(1, 4 * SPAN), 1)
    engine.open(open_of(2, tokens_of(2, SPAN)))
    for number in (1, 2):
        spare = await_spare(served, number)
        kill_and_wait(served.pid_of("daemon"))
        engine.step()
        assert served.pid_of("daemon") == spare
        assert run_request(engine, 2 + number, tokens_of(1, 4 * SPAN), 1) == 4 * SPAN - ROWS
    assert served.log().count("warm start") == 2
    engine.step(closes=[pb.CloseRequest(request_id=2, reason=pb.FINISHED)])
    engine.close()
    served.reopen()
    served.wait_at_rest()
    status = Path(f"/proc/{await_spare(served, 3)}/status").read_text()
    print("the spare:", re.findall(r"(?:VmRSS|RssAnon):\s+\d+ kB", status))


def test_an_upgrade_never_takes_the_spare(served: Node) -> None:
    engine = prefill_engine(served.runtime_dir)
    run_request(engine, 1, tokens_of(1, 2 * SPAN), 1)
    spare = await_spare(served, 1)
    served.admin.upgrade()
    wait_for(lambda: served.log().count("started the daemon") == 2)
    engine.step()
    assert served.pid_of("daemon") != spare
    assert not Path(f"/proc/{spare}").exists(), "ended and reaped"
    assert await_spare(served, 2) != spare
    engine.close()
