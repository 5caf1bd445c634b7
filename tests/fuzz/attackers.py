"""Those who send it: on the node's sockets, as raw bytes to gRPC, and as clients of every role."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvmanager.clients.attach import Attachment, attach, grpc_channel
from kvmanager.clients.engine import EngineClient
from kvmanager.daemon.moverlink import mover_socket
from kvmanager.errors import KVError
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import ATTACH_SOCKET, CALLS_SOCKET, GRPC_SOCKET
from kvmanager.services.access import ROLES
from kvmanager.wire import pack_u32, pack_u64, unpack_u32
from tests.fuzz import noise

PATIENCE_S: Final = 60.0
"""A call that is not answered by then hangs."""
NEVER: Final = frozenset({"Admin/Upgrade"})
"""Ends the daemon on purpose."""
GRPC_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
_ALLOWED: Final = {
    # Every status that says no; UNKNOWN, INTERNAL and a passed deadline say that something broke.
    grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED, grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNIMPLEMENTED,
}  # fmt: skip


class Broke(AssertionError):
    """The daemon did what it must never do."""


class Attackers:
    """Everybody who attacks one node. Each method is one blow, drawn from `dice`."""

    def __init__(
        self,
        runtime_dir: Path,
        engine: Callable[[], EngineClient],
        engine_channel: Callable[[], grpc.Channel],
        engine_token: Callable[[], str],
        known: tuple[str, ...],
    ) -> None:
        """`engine()`: one that is registered, with its channel and token; `known`: names that the node has."""
        self._dir = runtime_dir
        self._engine = engine
        self._engine_channel = engine_channel
        self._engine_token = engine_token
        self._known = known
        self._attached: dict[str, tuple[Attachment, grpc.Channel]] = {}

    def close(self) -> None:
        """Everybody leaves."""
        for attachment, channel in self._attached.values():
            channel.close()
            attachment.close()

    # ------------------------------------------------------------------------------- bytes

    def bytes_at_the_door(self, dice: random.Random) -> str:
        """Frames on the attach socket, perhaps with descriptors."""
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(PATIENCE_S)
            channel.connect(os.fspath(self._dir / ATTACH_SOCKET))
            for _ in range(dice.randrange(1, 5)):
                data, count = noise.frame(dice)
                fds = [os.memfd_create("fuzz") for _ in range(count)]
                try:
                    with contextlib.suppress(OSError):  # it has closed by now
                        socket.send_fds(channel, [data], fds) if fds else channel.sendall(data)
                finally:
                    for fd in fds:
                        os.close(fd)
            if dice.random() < 0.5:
                channel.shutdown(socket.SHUT_WR)
                _until_closed(channel)
        return "attach"

    def bytes_at_grpc(self, dice: random.Random) -> str:
        """What is no HTTP/2, or is and goes wrong."""
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(PATIENCE_S)
            channel.connect(os.fspath(self._dir / GRPC_SOCKET))
            data = dice.randbytes(dice.randrange(1, 400))
            with contextlib.suppress(OSError):
                channel.sendall(data if dice.random() < 0.3 else GRPC_HELLO + noise.damaged(dice, data))
                channel.shutdown(socket.SHUT_WR)
                _until_closed(channel)
        return "http2"

    def bytes_at_the_calls(self, dice: random.Random) -> str:
        """Frames on the socket for lease calls, mostly of somebody who has come in: calls, and what is none."""
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(os.fspath(self._dir / CALLS_SOCKET))
            channel.settimeout(PATIENCE_S)
            inside = dice.random() < 0.8
            with contextlib.suppress(OSError):  # it has closed by now
                if inside:
                    channel.sendall(_frame(json.dumps({"token": self._engine_token()}).encode()))
                for _ in range(dice.randrange(1, 6)):
                    channel.sendall(self._call(dice) if dice.random() < 0.8 else noise.frame(dice)[0])
                channel.shutdown(socket.SHUT_WR)
                _until_closed(channel)
        return "calls" if inside else "calls, outside"

    def _call(self, dice: random.Random) -> bytes:
        call = pb.CacheCall()
        noise.fill(dice, call, self._known)
        kind = call.WhichOneof("what")
        if kind is not None:
            self._make_true(dice, getattr(call, kind))
        call.timeout_ns %= 50_000_000
        data = call.SerializeToString()
        return _frame(noise.damaged(dice, data) if dice.random() < 0.2 else data)

    def bytes_at_the_mover(self, dice: random.Random) -> str:
        """What no daemon sends: no frame, no command, or one of a boot that never was."""
        with socket.socket(socket.AF_UNIX) as channel:
            channel.settimeout(PATIENCE_S)
            channel.connect(os.fspath(mover_socket(self._dir, "cpu")))
            data = dice.randbytes(dice.randrange(1, 400))
            if dice.random() < 0.7:
                message = pb.MoverCommand()
                noise.fill(dice, message, self._known)
                message.boot_id = 0
                payload = message.SerializeToString() if dice.random() < 0.7 else data
                data = _frame(payload)
            with contextlib.suppress(OSError):
                channel.sendall(data)
                channel.shutdown(socket.SHUT_WR)
                _until_closed(channel)
        return "mover's door"

    # ------------------------------------------------------------------------------- calls

    def any_call(self, dice: random.Random) -> str:
        """A call of some role: its message filled at random, damaged, or bytes."""
        method = dice.choice([name for name in ROLES if name not in NEVER])
        role = dice.choice(ROLES[method]) if dice.random() < 0.9 else dice.choice(("engine", "worker", "peer"))
        service, _, name = method.partition("/")
        described = pb.DESCRIPTOR.services_by_name[service].methods_by_name[name]
        message = GetMessageClass(described.input_type)()
        noise.fill(dice, message, self._known)
        self._make_true(dice, message)
        _tame(message)
        data = message.SerializeToString()
        if dice.random() < 0.25:
            data = noise.damaged(dice, data)
        path = f"/kvmanager.v1.{method}"
        channel = self._channel(role)
        if name == "Session":
            return self._send(method, lambda: list(channel.stream_stream(path)(iter([data]), timeout=PATIENCE_S)))
        return self._send(method, lambda: channel.unary_unary(path)(data, timeout=PATIENCE_S))

    def step(self, dice: random.Random) -> str:
        """A step of a registered engine, right in its number and wrong in all else."""
        client, message = self._engine(), self._a_step(dice)
        said = self._send("step", lambda: next(client._engine_stub.Session(iter([message]), timeout=PATIENCE_S)))
        if said == "step OK":
            client._number += 1
        return said

    def session_at_the_calls(self, dice: random.Random) -> str:
        """The same on the socket for calls, perhaps damaged, with anything in front of it or behind."""
        client, step = self._engine(), self._a_step(dice).SerializeToString()
        frames = [_frame(noise.damaged(dice, step) if dice.random() < 0.2 else step)]
        for _ in range(dice.randrange(3)):
            other = _frame(b"") if dice.random() < 0.5 else noise.frame(dice)[0]
            frames.insert(dice.randrange(2) and len(frames), other)
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(os.fspath(self._dir / CALLS_SOCKET))
            channel.settimeout(PATIENCE_S)
            with contextlib.suppress(OSError):  # it has closed by now
                greeting = {"token": self._engine_token(), "for": "session"}
                channel.sendall(_frame(json.dumps(greeting).encode()) + b"".join(frames))
                channel.shutdown(socket.SHUT_WR)
            said = _until_closed(channel)
        numbers = [pb.StepReply.FromString(payload).number for payload in _payloads(said)[1:]]
        client._number += client._number + 1 in numbers
        return "session frames" if any(numbers) else "session frames, refused"

    def _a_step(self, dice: random.Random) -> pb.StepRequest:
        client = self._engine()
        message = pb.StepRequest()
        noise.fill(dice, message, self._known)
        message.number, message.boot_id, message.epoch = client._number + 1, client.boot_id, client.epoch
        if dice.random() < 0.7:
            message.ClearField("fence")
        if dice.random() < 0.8:
            _be_rows(dice, message.requests)
        for close in message.close:
            close.request_id = dice.randrange(1, 40)
            close.reason = close.reason if dice.random() < 0.2 else dice.choice((pb.FINISHED, pb.ABORTED, pb.RETRACTED))
        for entry in message.open:
            entry.ClearField("ticket") if dice.random() < 0.8 else self._make_true(dice, entry.ticket)
            if dice.random() < 0.8:
                _be_a_prompt(dice, entry)
        return message

    def _make_true(self, dice: random.Random, message: Message) -> None:
        """Numbers that the daemon would stop at first are the right ones, mostly."""
        fields = message.DESCRIPTOR.fields_by_name
        client = self._engine()
        for field, value in (("boot_id", client.boot_id), ("epoch", client.epoch)):
            if field in fields and dice.random() < 0.9:
                setattr(message, field, value)
        if "node_address" in fields:
            message.node_address = os.fspath(self._dir)  # type: ignore[attr-defined]

    def _channel(self, role: str) -> grpc.Channel:
        if role == "engine":
            return self._engine_channel()
        if role not in self._attached:
            attachment = attach(self._dir, role, f"fuzz {role}")
            self._attached[role] = (attachment, grpc_channel(attachment))
        return self._attached[role][1]

    @staticmethod
    def _send(what: str, call: Callable[[], Any]) -> str:
        try:
            call()
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call) or error.code() not in _ALLOWED:
                raise Broke(f"{what}: {error}") from error
            return f"{what} {error.code().name}"
        except KVError as error:
            return f"{what} {type(error).__name__}"
        return f"{what} OK"


def _frame(payload: bytes) -> bytes:
    return struct.pack("<II", len(payload), 0) + payload


def _payloads(data: bytes) -> list[bytes]:
    """Of frames without descriptors. Raises Broke where one is cut off."""
    payloads = []
    while data:
        size, fds = struct.unpack_from("<II", data)
        if fds or len(data) < 8 + size:
            raise Broke(f"half a frame of {size} bytes and {fds} descriptors")
        payloads.append(data[8 : 8 + size])
        data = data[8 + size :]
    return payloads


def _be_rows(dice: random.Random, rows: pb.RequestVector) -> None:
    """Arrays that fit together, of requests that may be there and counts that may be."""
    count = dice.randrange(4)
    rows.request_ids = pack_u64(dice.sample(range(1, 40), count))
    for name in ("capacity_tokens", "committed_tokens"):
        tokens = [dice.choice((0, 1, 40, 200, 300, dice.choice(noise.EDGES))) for _ in range(count)]
        setattr(rows, name, pack_u64(tokens))
    rows.rejected_tokens = pack_u32([dice.choice((0, 0, 0, 3, 4_000_000_000)) for _ in range(count)])
    rows.new_key_counts = pack_u32([dice.choice((0, 0, 1, 2)) for _ in range(count)])
    rows.new_keys = dice.randbytes(16 * sum(unpack_u32(rows.new_key_counts, "counts").tolist()))


def _be_a_prompt(dice: random.Random, entry: pb.OpenRequest) -> None:
    """One that fits: then what comes after admission is reached."""
    entry.request_id = dice.randrange(1, 40)
    entry.prompt_tokens = dice.randrange(1, 200)
    entry.growth_tokens = dice.randrange(64)
    entry.prompt_keys = b"".join(
        (dice.randrange(4) * 1000 + at).to_bytes(16, "big") for at in range(entry.prompt_tokens // 16)
    )


def _tame(message: Message) -> None:
    """The node goes on serving: nobody drains it, nor silences its log, which is looked at in the end."""
    if isinstance(message, pb.CordonRequest):
        message.why = ""
    if isinstance(message, pb.LogLevelRequest):
        message.level = "INFO" if message.level in ("WARNING", "ERROR") else message.level
    if isinstance(message, pb.FsckRequest):
        message.checksum_spans %= 8


def _until_closed(channel: socket.socket) -> bytes:
    """Reads what comes; a server that neither answers nor closes is found by the time-out."""
    came = b""
    try:
        while data := channel.recv(65536):
            came += data
    except TimeoutError as error:
        raise Broke(f"a half-closed connection was left open for {PATIENCE_S} s") from error
    except ConnectionError:
        pass
    return came
