"""Two users on a running node: a tenant's token opens nothing that is another tenant's, whatever the client says.

The second user is a process that root started as uid 1001 and that may still open the node's private directory, as one
with the socket mounted into its container could.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes_support import (
    GROUP,
    SPAN,
    Node,
    device_pages,
    fill,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    run_request,
    tokens_of,
)

from kvmanager.clients.engine import RequestStep
from kvmanager.protos import kvmanager_pb2 as pb

OTHER_UID = 1001
ME = f"""
[[tenant]]
name = "us"
uids = [{os.getuid()}]
[[tenant]]
name = "them"
uids = [{OTHER_UID}]
[[tenant]]
name = "vault"
uids = [{OTHER_UID + 1}]
trust = "vault"
"""

THEM = """
import sys
from pathlib import Path

import grpc

from kvmanager.clients.attach import attach, grpc_channel
from kvmanager.errors import KVError
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.wire import error_from_rpc
from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.demo.nodes import NAMESPACE
from nodes_support import LAYOUT, RANKS, SPAN, prefill_engine, run_request, tokens_of

runtime_dir, epoch, ticket_id = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def told(what, call):
    try:
        print(what, call())
    except grpc.RpcError as error:
        print(what, type(error_from_rpc(error)).__name__)
    except KVError as error:
        print(what, type(error).__name__)


kept = []


def stub(role, of):
    kept.append(attach(runtime_dir, role, "them"))
    return of(grpc_channel(kept[-1]))


for role in ("operator", "peer"):
    told(f"role-{role}", lambda: attach(runtime_dir, role, "them"))
worker = stub("worker", pb_grpc.WorkerStub)
told("their-rank", lambda: worker.Attach(pb.AttachRequest(engine="engine", epoch=epoch, rank=0)))
told("their-name", lambda: prefill_engine(runtime_dir, "engine"))
engine = prefill_engine(runtime_dir, "theirs")
told("closed", lambda: AttachedEngine(
    runtime_dir, "c", group="closed", namespace=NAMESPACE, layouts=[LAYOUT], ranks=RANKS
))
told("same-prompt", lambda: run_request(engine, 1, tokens_of(1, 2 * SPAN), 99))
told("again", lambda: run_request(engine, 2, tokens_of(1, 2 * SPAN), 99) > 0)
told("export", lambda: engine.client.export(1))
beat = pb.HeartbeatRequest(ticket_ids=[ticket_id])
told("ticket", lambda: list(engine.client._peer_stub.Heartbeat(beat).unknown_ids) == [ticket_id])
ticket = pb.Ticket(ticket_id=ticket_id, node_address=str(runtime_dir), committed_tokens=2 * SPAN)
told("accept", lambda: engine.client._peer_stub.Accept(pb.AcceptRequest(ticket=ticket, tenant="us")))
reader = stub("reader", pb_grpc.AdminStub)
told("requests", lambda: [r.engine for r in reader.Requests(pb.RequestsRequest()).requests])
told("prefixes", lambda: reader.Prefixes(pb.PrefixesRequest()).tokens == 2 * SPAN)
told("leases", lambda: len(reader.Leases(pb.LeasesRequest()).leases))
told("engines", lambda: [e.engine for e in reader.Status(pb.StatusRequest()).engines])
told("map", lambda: reader.Map(pb.MapRequest(pool="prefill/hbm")))
told("reset", lambda: reader.Reset(pb.ResetRequest(group="prefill")))
looks = stub("reader", pb_grpc.OperatorStub)
told("explain", lambda: looks.Explain(pb.ExplainRequest(kind="request", id="engine/7")))
told("transfers", lambda: looks.Transfers(pb.TransfersRequest()))
told("config", lambda: looks.Config(pb.ConfigRequest()))
engine.close()
"""
EXPECTED = {
    "role-operator": "Unauthorized",
    "role-peer": "Unauthorized",
    "their-rank": "Unauthorized",
    "their-name": "Unauthorized",
    "closed": "Unauthorized",
    "same-prompt": "0",
    "again": "True",
    "export": "UnknownRequest",
    "ticket": "True",
    "accept": "Unauthorized",
    "requests": "[]",
    "prefixes": "True",
    "leases": "0",
    "engines": "['theirs']",
    "map": "Unauthorized",
    "reset": "Unauthorized",
    "explain": "Unauthorized",
    "transfers": "Unauthorized",
    "config": "Unauthorized",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root with setpriv can be two users")
    trusted = f"trust_uids = [{os.getuid()}, {OTHER_UID}]"

    def config(runtime_dir: Path, *, name: str) -> str:
        text = prefill_toml(runtime_dir, name=name, pages=64, more=ME, lease="ticket_ttl_ms = 120000")
        group = text[text.index("[[group]]") :].replace(f'name = "{GROUP}"', 'name = "closed"\ntrust = "vault"')
        return text.replace("[node]\n", f"[node]\n{trusted}\n") + group

    with node(tmp_path_factory.mktemp("walls"), "prefill", config) as running:
        yield running


def test_another_tenant_gets_nothing_of_ours(served: Node) -> None:
    engine = prefill_engine(served.runtime_dir)
    run_request(engine, 1, tokens_of(1, 2 * SPAN), 1)
    tokens = tokens_of(2, 2 * SPAN)
    opened = engine.open(open_of(7, tokens))
    fill(engine, device_pages(opened), 2)
    engine.step([RequestStep(7, len(tokens), len(tokens))])
    ticket = engine.client.export(7)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        ["setpriv", "--reuid", str(OTHER_UID), "--clear-groups", "--inh-caps", "+dac_override", "--ambient-caps",
         "+dac_override", sys.executable, "-c", THEM, str(served.runtime_dir), str(engine.client.epoch),
         ticket.ticket_id],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert dict(line.split(" ", 1) for line in done.stdout.splitlines()) == EXPECTED, done.stderr
    # What is ours is as it was.
    assert [lease.lease_id for lease in served.admin.leases().leases] == [ticket.ticket_id]
    engine.step(closes=[pb.CloseRequest(request_id=7, reason=pb.FINISHED)])
    assert run_request(engine, 8, tokens_of(1, 2 * SPAN), 1) > 0
    engine.close()
    assert "uid 1001" in "".join(line for line in served.log().splitlines() if "kvmanager.audit" in line)
    served.admin.reset("prefill")
    lines = [line for line in served.log().splitlines() if "kvmanager.audit" in line]
    assert any("reset prefill: done" in line for line in lines), lines
