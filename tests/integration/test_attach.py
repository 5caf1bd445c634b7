"""The attach socket with real processes: who gets in, who is gone, and descriptors."""

from __future__ import annotations

import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from attach_door import BOOT_ID, WAIT_S, Door

from kvmanager.clients.attach import attach, grpc_channel
from kvmanager.daemon.attach import ClientIdentity
from kvmanager.daemon.peerprocess import open_pidfd, read_peer
from kvmanager.errors import (
    ConfigError,
    Draining,
    InvalidArgument,
    NotReady,
    PeerUnreachable,
    Suspect,
    Unauthorized,
    UnknownRequest,
)
from kvmanager.framing import MAX_FDS, MAX_JSON_BYTES, receive_json
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.runtime_dir import bind_socket

NOBODY = 65534


def frame(body: bytes, fds: int = 0) -> bytes:
    return struct.pack("<II", len(body), fds) + body


@pytest.fixture
def short_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvm") as name:
        yield Path(name) / "node"


@pytest.fixture
def door(short_dir: Path) -> Iterator[Door]:
    made = Door(short_dir, [os.getuid()])
    yield made
    made.server.close()
    assert not made.server.path.exists()


def test_identity_comes_from_the_kernel(door: Door) -> None:
    attachment = door.attach("engine", "prefill")
    identity = door.attached()
    assert (identity.uid, identity.pid) == (os.getuid(), os.getpid())
    assert (identity.role, identity.name) == ("engine", "prefill")
    assert identity.token == attachment.token
    assert len(bytes.fromhex(attachment.token)) == 32
    assert attachment.boot_id == BOOT_ID
    assert attachment.grpc_path == door.runtime_dir / "grpc.sock"
    assert door.server.identity_of(attachment.token) is identity
    with pytest.raises(Unauthorized, match="attach on"):
        door.server.identity_of("0" * 64)
    other = door.attach()
    assert other.token != attachment.token
    other.close()
    attachment.close()


def test_directory_and_socket_are_private(door: Door) -> None:
    assert stat.S_IMODE(door.runtime_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(door.server.path.stat().st_mode) == 0o600


def test_a_live_client_that_leaves_is_suspect_not_gone(door: Door) -> None:
    attachment = door.attach()
    token = door.attached().token
    attachment.close()
    attachment.close()
    assert door.next() == ("leave", token)
    assert door.next() == ("disconnect", token)
    with pytest.raises(Suspect, match="attach again"):
        door.server.identity_of(token)
    door.attach().close()
    assert door.attached().token != token
    assert [door.next()[0] for _ in range(2)] == ["leave", "disconnect"]
    assert door.reports.empty(), "the process lives, so no exit may be reported"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_wrong_uid_is_told_who_and_what_to_do(door: Door) -> None:
    for path, mode in ((door.runtime_dir.parent, 0o711), (door.runtime_dir, 0o711), (door.server.path, 0o666)):
        path.chmod(mode)
    script = (
        "import os, socket, sys\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "channel = socket.socket(socket.AF_UNIX)\n"
        "channel.connect(sys.argv[1])\n"
        "data = b''\n"
        "while chunk := channel.recv(4096): data += chunk\n"
        "sys.stdout.write(data[8:].decode())\n"
    )
    command = [sys.executable, "-c", script, str(door.server.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S)
    for part in ("UNAUTHORIZED", f"uid {NOBODY}", "trust_uids", f"one of uid {os.getuid()}"):
        assert part in done.stdout
    assert door.reports.empty()


def test_client_raises_the_typed_error_for_an_untrusted_uid(short_dir: Path) -> None:
    door = Door(short_dir, [NOBODY])
    try:
        with pytest.raises(Unauthorized, match=rf"uid {os.getuid()} .*trust_uids"):
            door.attach()
        assert door.reports.empty()
    finally:
        door.server.close()


def test_no_node(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match=r"no node answers on .*attach\.sock"):
        attach(tmp_path, "operator", "cli")


@pytest.mark.parametrize(
    ("data", "reason", "part"),
    [
        (frame(b"garbage"), "INVALID_ARGUMENT", "not JSON"),
        (frame(b"\xff\xfe\xfd\xfc"), "INVALID_ARGUMENT", "not JSON"),
        (frame(b"[" * 60_000), "INVALID_ARGUMENT", "not JSON"),
        (frame(b"[]"), "INVALID_ARGUMENT", "list"),
        (struct.pack("<II", MAX_JSON_BYTES + 1, 0), "LIMIT_EXCEEDED", str(MAX_JSON_BYTES + 1)),
        (b"GET / HTTP/1.1\r\n\r\n", "LIMIT_EXCEEDED", "at most"),
        (frame(b"{}"), "INVALID_ARGUMENT", "role None"),
        (frame(b'{"role":"captain","name":"x"}'), "INVALID_ARGUMENT", "'captain'"),
        (frame(b'{"role":["engine"],"name":"x"}'), "INVALID_ARGUMENT", "'engine'"),
        (frame(b'{"role":"engine","name":3}'), "INVALID_ARGUMENT", "name"),
        (frame(b'{"role":"engine","name":""}'), "INVALID_ARGUMENT", "name"),
        (frame(b'{"role":"engine","name":"x"}', fds=3), "INVALID_ARGUMENT", "announced 3 fds, 0 came"),
        (frame(b'{"role":"engine","name":"x"}', fds=MAX_FDS + 1), "LIMIT_EXCEEDED", f"at most {MAX_JSON_BYTES}"),
    ],
)
def test_malformed_input_is_a_typed_error(door: Door, data: bytes, reason: str, part: str) -> None:
    with door.raw() as channel:
        channel.sendall(data)
        payload, _ = receive_json(channel)
        assert payload["error"]["reason"] == reason
        assert part in payload["error"]["message"]
        with pytest.raises(PeerUnreachable):
            receive_json(channel)
    door.attach().close()
    assert door.attached().role == "engine"


def test_frames_arrive_in_pieces(door: Door) -> None:
    with door.raw() as channel:
        for byte in frame(b'{"role":"peer","name":"slow"}'):
            channel.send(bytes([byte]))
        payload, _ = receive_json(channel)
        assert len(payload["token"]) == 64
    assert door.attached().name == "slow"


@pytest.mark.parametrize("announced", [1, 0])
def test_descriptors_from_a_client_are_refused_and_closed(door: Door, announced: int) -> None:
    door.attach().close()  # whatever the server opens once is open from here on
    token = door.attached().token
    assert door.next() == ("leave", token)
    assert door.next() == ("disconnect", token)
    source, target = os.pipe()
    with door.raw() as channel:
        socket.send_fds(channel, [frame(b'{"role":"engine","name":"x"}', fds=announced)], [target])
        payload, _ = receive_json(channel)
        assert payload["error"]["reason"] == "INVALID_ARGUMENT"
    os.close(target)
    assert os.read(source, 1) == b"", "the server still holds the pipe's other end"
    os.close(source)


def test_a_client_that_leaves_before_its_name_is_forgotten(door: Door) -> None:
    door.raw().close()
    door.attach().close()
    assert door.attached().role == "engine"


def test_descriptors_of_an_attach(door: Door) -> None:
    files = []
    for number in range(3):
        fd = os.memfd_create(f"region{number}")
        os.write(fd, f"region {number}".encode())
        files.append(fd)
    door.fds[7] = files
    door.fds[8] = []
    attachment = door.attach("worker", "rank 0")
    try:
        received = attachment.fetch_fds(7)
        assert [os.pread(fd, 20, 0).decode() for fd in received] == ["region 0", "region 1", "region 2"]
        assert not set(received) & set(files)
        os.pwrite(received[1], b"R", 0)
        assert os.pread(files[1], 20, 0) == b"Region 1"
        assert all(not os.get_inheritable(fd) for fd in received)
        assert attachment.fetch_fds(8) == []
        with pytest.raises(UnknownRequest, match="no attach 9"):
            attachment.fetch_fds(9)
        again = attachment.fetch_fds(7)
        for fd in (*received, *again):
            os.close(fd)
    finally:
        for fd in files:
            os.close(fd)
        attachment.close()


def test_a_refusal_of_the_daemon_reaches_the_client(door: Door) -> None:
    def refuse(identity: ClientIdentity) -> None:
        raise Draining(f"{identity.name}: no new clients")

    door.on_attach = refuse
    with pytest.raises(Draining, match="prefill: no new clients"):
        door.attach()
    assert door.reports.empty()


def test_our_own_mistake_stops_the_server_loudly(door: Door) -> None:
    def broken(identity: ClientIdentity) -> None:
        raise AssertionError(identity.name)

    door.on_attach = broken
    channel = door.raw()
    channel.sendall(frame(b'{"role":"peer","name":"n"}'))
    what, error = door.next()
    channel.close()
    assert what == "failure"
    assert isinstance(error, AssertionError)


def test_unknown_questions_end_the_connection(door: Door) -> None:
    attachment = door.attach()
    token = door.attached().token
    with pytest.raises(InvalidArgument, match="fds_for"):
        attachment.fetch_fds("seven")  # type: ignore[arg-type]
    assert door.next() == ("disconnect", token)
    with pytest.raises(NotReady, match="attach again"):
        attachment.fetch_fds(1)
    attachment.close()


def test_a_second_node_in_the_same_directory_is_refused(door: Door) -> None:
    with pytest.raises(ConfigError, match=r"serves .* already"):
        Door(door.runtime_dir, [os.getuid()])


def test_a_leftover_socket_is_replaced(short_dir: Path) -> None:
    short_dir.mkdir(mode=0o700)
    leftover = socket.socket(socket.AF_UNIX)
    leftover.bind(str(short_dir / "attach.sock"))
    leftover.close()
    door = Door(short_dir, [os.getuid()])
    door.attach().close()
    door.server.close()


def test_where_the_socket_is_somebody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "attach.sock"
    seen: list[bool] = []
    for name in ("bind", "listen"):

        def watched(self: socket.socket, argument: object, name: str = name) -> None:
            seen.append(path.exists())
            getattr(super(socket.socket, self), name)(argument)
            seen.append(path.exists())

        monkeypatch.setattr(socket.socket, name, watched, raising=False)
    with bind_socket(path):
        assert seen == [False] * 4
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert [entry.name for entry in tmp_path.iterdir()] == ["attach.sock"]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_socket_that_appears_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "attach.sock"

    def faster(self: socket.socket, backlog: int) -> None:
        path.touch()
        super(socket.socket, self).listen(backlog)

    monkeypatch.setattr(socket.socket, "listen", faster, raising=False)
    with pytest.raises(ConfigError, match="can't listen"):
        bind_socket(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["attach.sock"]


def test_an_open_directory_is_refused(short_dir: Path) -> None:
    short_dir.mkdir()
    short_dir.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0755; run: chmod 0700"):
        Door(short_dir, [os.getuid()])


def test_pidfd_by_number_checks_the_owner() -> None:
    """What kernels before 6.5 need."""
    fd = open_pidfd(os.getpid(), os.getuid())
    os.close(fd)
    with pytest.raises(ProcessLookupError, match="another process"):
        open_pidfd(os.getpid(), os.getuid() + 1)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(WAIT_S)
    with pytest.raises(ProcessLookupError, match="gone"):
        open_pidfd(child.pid, os.getuid())


def test_peer_of_a_socket_pair() -> None:
    ends = socket.socketpair()
    peer = read_peer(ends[0])
    assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
    os.close(peer.pidfd)
    for end in ends:
        end.close()


class _Echo(pb_grpc.AdminServicer):
    """Answers with the token it saw."""

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        del request
        return pb.StatusReply(node=dict(context.invocation_metadata())["kvmanager-token"])


def test_calls_carry_the_token(door: Door) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    pb_grpc.add_AdminServicer_to_server(_Echo(), server)
    server.add_insecure_port(f"unix:{door.runtime_dir / 'grpc.sock'}")
    server.start()
    attachment = door.attach("operator", "test")
    try:
        with grpc_channel(attachment) as channel:
            assert pb_grpc.AdminStub(channel).Status(pb.StatusRequest(), timeout=WAIT_S).node == attachment.token
    finally:
        attachment.close()
        server.stop(None).wait()
