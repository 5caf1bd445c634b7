"""Certificates: files that are no use are a clear error, and who has none, or a wrong one, gets a typed refusal."""

from __future__ import annotations

import http.client
import json
import logging
import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from kvmanager.command.cli import app
from kvmanager.configuration.reading import parse_config
from kvmanager.configuration.securityconfig import PeerSection, TlsSection
from kvmanager.daemon.peers import Peers
from kvmanager.errors import ConfigError, KVError, PeerUnreachable, Unauthorized
from kvmanager.observing.httpprobes import HttpProbes
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.services.callers import Whose, typed
from kvmanager.services.certificates import Certificates, http_tls
from kvmanager.services.peer_service import PeerService
from kvmanager.services.peerdoor import PeerDoor
from kvmanager.wire import error_from_rpc
from tests.authority import Authority, Signed, needs_openssl
from tests.minimal_config import minimal_toml

TLS = '[tls]\ncertificate_file = "/a"\nkey_file = "/b"\nca_file = "/c"\n'
EVENTS = '[[events]]\ngroup = "g"\nmodel = "m"\nweights_revision = "r"\nendpoint = "{}"\nreplay_endpoint = "{}"\n'


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('[peer]\nlisten = "127.0.0.1:1"', r"\[peer\] listen: 127.0.0.1:1 without certificates; set certificate_file"),
        ('[tls]\nplain_loopback = true\n[peer]\nlisten = "127.0.0.1:1"', r"\[peer\] listen: .* without certificates"),
        ('[tls]\ncertificate_file = "/a"', r"\[tls\] key_file, ca_file: missing"),
        ('[tls]\ncertificate_file = "a"', r"\[tls\] certificate_file: 'a' is not an absolute path"),
        (f'{TLS}[peer]\nlisten = "0.0.0.0:1"', r"\[peer\] address: missing"),
        (f'{TLS}[peer]\nlisten = "[::]:1"', r"\[peer\] address: missing"),
        (f'{TLS}[peer]\nlisten = "unix:/a"', r"\[peer\] listen: .*runtime directory"),
        (f'{TLS}[peer]\nlisten = "name:1"', r"\[peer\] listen: .*numeric address"),
        (f'{TLS}[peer]\nlisten = "127.0.0.1:1"\naddress = "a/b:1"', r"\[peer\] address: .*HOST:PORT"),
        (f'{TLS}[peer]\naddress = "a:1"', r"\[peer\] address, nodes: nobody comes in"),
        ('[metrics]\nlisten = "10.0.0.1:1"', r"\[metrics\] listen: 10.0.0.1:1 without certificates"),
        ('[metrics]\nlisten = "127.0.0.1:1"', r"\[metrics\] listen: .*plain_loopback = true"),
        ('[tls]\nplain_loopback = true\n[metrics]\nlisten = "0.0.0.0:1"', r"\[metrics\] .*without certificates"),
        (EVENTS.format("tcp://127.0.0.1:1", "ipc:///a"), r"\[\[events\]\] endpoint: .* has no TLS"),
        (EVENTS.format("ipc:///a", "tcp://0.0.0.0:1"), r"\[\[events\]\] endpoint: .* has no TLS"),
        (f'[tls]\nplain_loopback = true\n{EVENTS.format("ipc:///a", "tcp://*:1")}', r"\[\[events\]\] .* has no TLS"),
        (f'[tls]\nplain_loopback = true\n{EVENTS.format("ipc:///a", "tcp://localhost:1")}', r"has no TLS"),
        (f'{TLS}{EVENTS.format("ipc:///a", "tcp://10.0.0.1:1")}', r"has no TLS"),
    ],
)
def test_tcp_without_certificates_is_refused(toml: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(f"{minimal_toml()}\n{toml}")


@pytest.mark.parametrize(
    "toml",
    [
        f'{TLS}[peer]\nlisten = "0.0.0.0:1"\naddress = "node.example:1"\nnodes = ["a"]',
        f'{TLS}[metrics]\nlisten = "0.0.0.0:1"',
        '[tls]\nplain_loopback = true\n[metrics]\nlisten = "[::1]:1"',
        '[metrics]\nlisten = "unix:/a/b"',
        EVENTS.format("ipc:///a", "ipc:///b"),
        f'[tls]\nplain_loopback = true\n{EVENTS.format("tcp://127.0.0.1:1", "tcp://[::1]:2")}',
    ],
)
def test_what_is_safe_is_taken(toml: str) -> None:
    parse_config(f"{minimal_toml()}\n{toml}")


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command: no certificates here")
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    """Signed by another CA."""
    return Authority(tmp_path_factory.mktemp("other"), "other").sign("stranger")


def section(signed: Signed, **changes: Path) -> TlsSection:
    files = {key: getattr(signed, key) for key in ("certificate_file", "key_file", "ca_file")}
    return TlsSection(**{**files, **changes})


@needs_openssl
def test_files_that_are_no_use(ca: Authority, stranger: Signed, tmp_path: Path) -> None:
    good = ca.sign("good")
    Certificates(section(good))
    with pytest.raises(ConfigError, match=r"can't read .*/nowhere: No such file"):
        Certificates(section(good, key_file=tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="can't be used with"):
        Certificates(section(good, key_file=stranger.key_file))
    with pytest.raises(ConfigError, match=r"can't be used with .*: .*(issuer|self.signed)"):
        Certificates(section(good, ca_file=stranger.ca_file))
    with pytest.raises(ConfigError, match=r"can't be used with .*expired"):
        Certificates(section(ca.sign("expired", days=-1)))
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="can't be used with"):
        Certificates(section(good, ca_file=tmp_path / "text"))
    shared = tmp_path / "shared.key"
    shared.write_bytes(good.key_file.read_bytes())
    shared.chmod(0o644)
    with pytest.raises(ConfigError, match=r"everybody may use .* chmod 0600"):
        Certificates(section(good, key_file=shared))


@needs_openssl
def test_config_check_looks_at_the_certificate(ca: Authority, stranger: Signed, tmp_path: Path) -> None:
    """Readable, not expired, the key's own, for the host that others call: each problem says which key it is."""

    def checked(tls: str, peer: str = "") -> tuple[int, dict[str, Any], str]:
        path = tmp_path / "node.toml"
        path.write_text(f"{minimal_toml()}\n{tls}\n{peer}\n")
        done = CliRunner().invoke(app, ["config", "check", str(path), "--here", "--json"])
        machine = json.loads(done.stdout)["machine"]
        shown = CliRunner().invoke(app, ["config", "check", str(path)], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        return done.exit_code, machine, shown.stdout

    def problem(signed: Signed, peer: str = "") -> str:
        code, machine, shown = checked(signed.toml(), peer)
        assert (code, machine["fits"], len(machine["problems"])) == (78, False, 1), machine
        assert f"does not fit: {machine['problems'][0][:40]}" in shown
        return str(machine["problems"][0])

    good = ca.sign("node0", "DNS:node0.example,IP:127.0.0.1")
    listen = '[peer]\nlisten = "127.0.0.1:7000"\n'
    for peer in ("", listen, f'{listen}address = "node0.example:7000"', f'{listen}nodes = ["node0", "node1"]'):
        code, machine, shown = checked(good.toml(), peer)
        assert (code, machine["problems"], machine["certificate_hosts"]) == (0, [], ["node0.example", "127.0.0.1"])
        assert re.search(r"certificate for node0.example, 127.0.0.1, valid until \w+ +\d+ .* \d{4}", shown), shown
    assert checked("")[1]["certificate_until"] == ""

    text = problem(good, f'{listen}address = "node9.example:7000"')
    assert re.search(r"\[peer\] address: .*node0.crt is for node0.example, 127.0.0.1, not for node9.example", text)
    text = problem(good, '[peer]\nlisten = "127.0.0.2:7000"')
    assert re.search(r"\[peer\] listen: .* not for 127.0.0.2", text)
    nameless = ca.sign("nameless", "IP:127.0.0.1", subject="/O=no name")
    assert re.search(r"\[tls\] certificate_file: .*neither a common name nor a DNS name", problem(nameless, listen))
    assert "expired" in problem(ca.sign("old", days=-1))
    assert "can't be used with" in problem(Signed(good.certificate_file, stranger.key_file, good.ca_file))
    missing = Signed(tmp_path / "nowhere.crt", good.key_file, good.ca_file)
    assert re.search(r"can't read .*nowhere.crt", problem(missing))


class Heartbeats(PeerService):
    """Says who calls, and refuses as the real one does."""

    def __init__(self, callers: Whose | None = None) -> None:
        self._who = callers

    def seen_by(self, callers: Whose) -> Heartbeats:
        return Heartbeats(callers)

    @typed
    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatReply:  # noqa: ARG002
        assert self._who is not None
        who = self._who.who(context, "peer", "engine")
        return pb.HeartbeatReply(unknown_ids=[who.name, who.role])


@pytest.fixture
def door(ca: Authority) -> Iterator[PeerDoor]:
    made = PeerDoor(PeerSection(listen="127.0.0.1:0", nodes=("friend", "renewed")), Certificates(section(ca.sign("a"))))
    made.serve(Heartbeats())
    made.start()
    yield made
    made.close()


def heartbeat(address: str, certificates: Certificates | None) -> list[str]:
    peers = Peers("us", certificates)
    try:
        return list(peers.call(address, "Heartbeat", pb.HeartbeatRequest(), 10.0).unknown_ids)
    finally:
        peers.close()


@needs_openssl
def test_who_may_call(door: PeerDoor, ca: Authority, stranger: Signed, tmp_path: Path) -> None:
    address = door.address
    friend = ca.sign("friend")
    assert heartbeat(address, Certificates(section(friend))) == ["friend", "peer"]
    assert heartbeat(address.replace("127.0.0.1", "localhost"), Certificates(section(friend))) == ["friend", "peer"]

    def refused(certificates: Certificates | None, words: str, to: str = address) -> None:
        with pytest.raises(Unauthorized, match=words):
            heartbeat(to, certificates)

    refused(None, "this node has none")
    refused(Certificates(section(ca.sign("unlisted"))), "'unlisted' is not among nodes")
    refused(Certificates(section(ca.sign("nobody", subject="/O=no name"))), "'localhost' is not among nodes")
    # Its own CA beside ours: it trusts the node, and the node does not trust it.
    both = tmp_path / "both.crt"
    both.write_bytes(stranger.ca_file.read_bytes() + ca.ca_file.read_bytes())
    refused(Certificates(section(stranger, ca_file=both)), "closed the connection when it saw our certificate")
    # It does not trust the node.
    refused(Certificates(section(stranger)), "has a certificate that is no good here: .*issuer")
    with pytest.raises(PeerUnreachable):
        heartbeat("127.0.0.1:1", Certificates(section(friend)))
    with pytest.raises(PeerUnreachable, match="nor a runtime directory"):
        heartbeat("somewhere", Certificates(section(friend)))


@needs_openssl
def test_a_node_must_be_the_host_that_was_called(ca: Authority) -> None:
    made = PeerDoor(PeerSection(listen="127.0.0.1:0"), Certificates(section(ca.sign("b", "DNS:b.example"))))
    made.serve(Heartbeats())
    made.start()
    try:
        with pytest.raises(Unauthorized, match=r"no good here: .*127\.0\.0\.1"):
            heartbeat(made.address, Certificates(section(ca.sign("friend"))))
    finally:
        made.close()


@needs_openssl
def test_without_a_certificate_or_in_plain_text_nothing_is_said(door: PeerDoor, ca: Authority) -> None:
    """As a client that is not ours would try; the service is not reached."""
    for credentials in (grpc.ssl_channel_credentials(ca.ca_file.read_bytes()), None):
        channel = (
            grpc.secure_channel(door.address, credentials) if credentials else grpc.insecure_channel(door.address)
        )
        with channel, pytest.raises(grpc.RpcError) as failed:
            pb_grpc.PeerStub(channel).Heartbeat(pb.HeartbeatRequest(), timeout=10)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert isinstance(error_from_rpc(failed.value), KVError)


@needs_openssl
def test_only_the_peer_service_is_there(door: PeerDoor, ca: Authority) -> None:
    with grpc.secure_channel(door.address, Certificates(section(ca.sign("friend"))).channel_credentials()) as channel:
        for call, request in (
            (pb_grpc.AdminStub(channel).Status, pb.StatusRequest()),
            (pb_grpc.OperatorStub(channel).Pins, pb.PinsRequest()),
            (pb_grpc.EngineStub(channel).Register, pb.RegisterRequest()),
        ):
            with pytest.raises(grpc.RpcError) as failed:
                call(request, timeout=10)
            assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED


@needs_openssl
def test_certificates_are_renewed_without_a_restart(
    ca: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {}
    for key in ("certificate_file", "key_file", "ca_file"):
        files[key] = tmp_path / key

    def put(signed: Signed) -> None:
        for key, path in files.items():
            fresh = path.with_suffix(".new")
            fresh.write_bytes(getattr(signed, key).read_bytes())
            fresh.chmod(0o600)
            fresh.rename(path)

    put(ca.sign("first", "DNS:first.example,IP:127.0.0.1"))
    made = PeerDoor(PeerSection(listen="127.0.0.1:0"), Certificates(TlsSection(**files)))
    made.serve(Heartbeats())
    made.start()
    friend = Certificates(section(ca.sign("friend")))

    def shown() -> str:
        host, _, port = made.address.rpartition(":")
        context = friend.client_context()
        context.set_alpn_protocols(["h2"])
        with socket.create_connection((host, int(port)), 10) as plain, context.wrap_socket(
            plain, server_hostname=host
        ) as secure:
            found = secure.getpeercert()
            assert found is not None
            return dict(pair for part in found["subject"] for pair in part)["commonName"]

    try:
        assert shown() == "first"
        put(ca.sign("second", "IP:127.0.0.1"))
        assert shown() == "second"
        with caplog.at_level(logging.ERROR, "kvmanager.certificates"):
            files["key_file"].write_text("not a key")
            assert shown() == "second"
            assert heartbeat(made.address, friend) == ["friend", "peer"]
        assert "those before stay in use" in caplog.text
        put(ca.sign("third", "IP:127.0.0.1"))
        assert shown() == "third"
    finally:
        made.close()


@needs_openssl
def test_metrics_over_mutual_tls(ca: Authority, stranger: Signed) -> None:
    certificates = Certificates(section(ca.sign("a")))
    assert http_tls(certificates, "unix:/a") is None
    where = "127.0.0.1:0"
    probes = HttpProbes(where, CollectorRegistry(), lambda: True, dict, dict, http_tls(certificates, where))
    probes.start()
    host, port = probes.address[:2]

    def get(context: ssl.SSLContext | None) -> int:
        kind = http.client.HTTPConnection if context is None else http.client.HTTPSConnection
        connection = kind(host, port, timeout=10, **({} if context is None else {"context": context}))
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status
        finally:
            connection.close()

    nobody = ssl.create_default_context(cafile=ca.ca_file)
    foreign = ssl.create_default_context(cafile=ca.ca_file)
    foreign.load_cert_chain(stranger.certificate_file, stranger.key_file)
    try:
        assert get(Certificates(section(ca.sign("prometheus"))).client_context()) == 200
        for context in (nobody, foreign, None):
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
                get(context)
        assert get(Certificates(section(ca.sign("prometheus"))).client_context()) == 200
    finally:
        probes.close()
