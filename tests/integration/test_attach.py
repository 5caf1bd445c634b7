"""The attach socket with real processes: who gets in, who is gone, and descriptors."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from kvmanager.attach import AttachServer, ClientIdentity, open_pidfd, read_peer
from kvmanager.clients.attach import Attachment, attach, grpc_channel
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

WAIT_S = 20.0
BOOT_ID = 0xFEDC_BA98_7654_3210
CLIENT = """
import sys, time
from pathlib import Path
from kvmanager.clients.attach import attach
attachment = attach(Path(sys.argv[1]), "worker", "rank 3")
print(attachment.token, flush=True)
{then}
"""
NOBODY = 65534


def frame(body: bytes, fds: int = 0) -> bytes:
    return struct.pack("<II", len(body), fds) + body


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


def spawn(door: Door, then: str) -> subprocess.Popen[str]:
    script = CLIENT.format(then=then)
    return subprocess.Popen([sys.executable, "-c", script, str(door.runtime_dir)], stdout=subprocess.PIPE, text=True)


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


def test_kill_is_disconnect_then_exit(door: Door) -> None:
    with spawn(door, "time.sleep(600)") as client:
        identity = door.attached()
        assert identity.pid == client.pid
        client.send_signal(signal.SIGKILL)
    assert door.next() == ("disconnect", identity.token)
    assert door.next() == ("exit", identity.token)
    with pytest.raises(Unauthorized):
        door.server.identity_of(identity.token)


@contextlib.contextmanager
def orphan(door: Door, in_child: str = "") -> Iterator[tuple[ClientIdentity, int]]:
    """A client that forked and is dead, and a pidfd of the child, which runs `in_child` first."""
    fork = f"""
import os, socket
pid = os.fork()
if pid == 0:
    {in_child or 'pass'}
    time.sleep(600)
print(pid, flush=True)
os._exit(0)
"""
    with spawn(door, fork) as client:
        identity = door.attached()
        assert client.stdout is not None
        assert client.stdout.readline().strip() == identity.token
        child = os.pidfd_open(int(client.stdout.readline()))
        try:
            client.wait(WAIT_S)
            yield identity, child
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)


def test_a_child_that_inherited_the_lifeline_counts(door: Door) -> None:
    """The attached process is dead, its pidfd readable; a child of it may still write to what it mapped."""
    with orphan(door) as (identity, child):
        assert door.next() == ("disconnect", identity.token)
        with pytest.raises(queue.Empty):
            door.reports.get(timeout=0.3)
        life = door.server.life_of(identity.token)
        assert life is not None
        assert (life.pid, life.inherited) == (identity.pid, True)
        assert not door.server.kill(identity.token), "there is no pidfd of the child"
        signal.pidfd_send_signal(child, signal.SIGKILL)
        assert door.next() == ("exit", identity.token)
        assert door.server.life_of(identity.token) is None


@pytest.mark.parametrize("where", ["attachment._channel.shutdown(socket.SHUT_RDWR)", "os.close(attachment.lifeline)"])
def test_what_a_child_says_on_the_socket_counts_for_nothing(door: Door, where: str) -> None:
    """Only a closed lifeline is an end; a socket that any holder shut down is none."""
    with orphan(door, where) as (identity, _):
        assert door.next() == ("disconnect", identity.token)
        if "lifeline" in where:
            assert door.next() == ("exit", identity.token)
        else:
            with pytest.raises(queue.Empty):
                door.reports.get(timeout=0.3)


def test_a_process_that_closed_or_wrote_to_its_lifeline_counts_by_its_pidfd(door: Door) -> None:
    then = "import os\nos.write(attachment.lifeline, b'x' * 9000)\nos.close(attachment.lifeline)\ntime.sleep(600)"
    with spawn(door, then) as client:
        identity = door.attached()
        with pytest.raises(queue.Empty):
            door.reports.get(timeout=0.3)
        client.kill()
        assert door.next() == ("disconnect", identity.token)
        assert door.next() == ("exit", identity.token)


def test_a_child_that_executed_a_program_inherited_nothing(door: Door) -> None:
    """Close-on-exec: its new memory maps nothing, and the lifeline is closed in it."""
    then = "import os, subprocess\np = subprocess.Popen(['sleep', '600'])\nprint(p.pid, flush=True)\nos._exit(0)"
    with spawn(door, then) as client:
        identity = door.attached()
        assert client.stdout is not None
        assert client.stdout.readline().strip() == identity.token
        child = os.pidfd_open(int(client.stdout.readline()))
        try:
            assert door.next() == ("disconnect", identity.token)
            assert door.next() == ("exit", identity.token)
        finally:
            signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)


def test_kill_ends_the_attached_process_and_no_other(door: Door) -> None:
    with spawn(door, "time.sleep(600)") as client:
        identity = door.attached()
        life = door.server.life_of(identity.token)
        assert life is not None
        assert (life.pid, life.inherited) == (client.pid, False)
        assert door.server.kill(identity.token)
        assert client.wait(WAIT_S) == -signal.SIGKILL
    assert door.next() == ("disconnect", identity.token)
    assert door.next() == ("exit", identity.token)
    assert not door.server.kill(identity.token)
    assert not door.server.kill("0" * 64)


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
