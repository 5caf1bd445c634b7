"""Every call of the contract has roles, and nobody gets past them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from kvmanager.configuration.reading import parse_config
from kvmanager.configuration.securityconfig import AccessSection
from kvmanager.daemon.attach import ROLES, ClientIdentity
from kvmanager.errors import ConfigError, Unauthorized
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.services.access import ROLES as ROLES_OF
from kvmanager.services.access import Gatekeeper
from kvmanager.services.callers import Callers
from kvmanager.services.refusedlog import LINES
from kvmanager.wire import TOKEN_METADATA_KEY, error_from_rpc
from tests.minimal_config import minimal_toml

METHODS = {
    f"{service.name}/{method.name}": method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def test_every_call_has_its_roles() -> None:
    assert ROLES_OF.keys() == METHODS.keys()
    for method, roles in ROLES_OF.items():
        assert roles, method
        assert set(roles) <= set(ROLES), method


class Identities:
    """A token is the name of a role."""

    def identity_of(self, token: str) -> ClientIdentity:
        if token not in ROLES:
            raise Unauthorized("no client holds this session token")
        return ClientIdentity(token, 1000, 1, 1, token, "n")


class Everything(grpc.GenericRpcHandler):
    """Answers every call there is: whoever gets here got past the gate."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if details.method.endswith("/Session"):
            return grpc.stream_stream_rpc_method_handler(lambda requests, _: (b"" for _ in requests))
        return grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"")


@contextmanager
def gate(directory: Path) -> Iterator[grpc.Channel]:
    """A server behind a gatekeeper of its own."""
    server = grpc.server(ThreadPoolExecutor(4), interceptors=[Gatekeeper(Callers(Identities()))])
    server.add_generic_rpc_handlers((Everything(),))
    address = f"unix:{directory / 's'}"
    server.add_insecure_port(address)
    server.start()
    with grpc.insecure_channel(address) as made:
        yield made
    server.stop(None).wait()


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[grpc.Channel]:
    with gate(tmp_path_factory.mktemp("gate")) as made:
        yield made


def let_in(channel: grpc.Channel, path: str, metadata: tuple[tuple[str, str], ...]) -> bool:
    """Raises what is not UNAUTHORIZED."""
    try:
        if path.endswith("/Session"):
            list(channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=10))
        else:
            channel.unary_unary(path)(b"", metadata=metadata, timeout=10)
    except grpc.RpcError as error:
        typed = error_from_rpc(error)
        if isinstance(typed, Unauthorized):
            return False
        raise typed from error
    return True


@pytest.mark.parametrize("method", METHODS)
def test_the_gate_lets_in_only_its_roles(channel: grpc.Channel, method: str) -> None:
    path = f"/kvmanager.v1.{method}"
    for role in ROLES:
        assert let_in(channel, path, ((TOKEN_METADATA_KEY, role),)) == (role in ROLES_OF[method]), role
    assert not let_in(channel, path, ())
    assert not let_in(channel, path, ((TOKEN_METADATA_KEY, "made-up"),))


def test_what_is_not_in_the_contract_is_nobodys(channel: grpc.Channel) -> None:
    for path in ("/kvmanager.v1.Admin/Secret", "/kvmanager.v2.Admin/Status", "/x/y", "/kvmanager.v1.Admin/status"):
        assert not let_in(channel, path, ((TOKEN_METADATA_KEY, "operator"),)), path
    assert let_in(channel, "/grpc.health.v1.Health/Check", ())
    assert not let_in(channel, "/grpc.health.v1.HealthX/Check", ())


def test_who_tries_what_is_the_operators_is_in_the_audit_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who tries it for ever gets a few lines."""
    with gate(tmp_path) as channel, caplog.at_level(logging.WARNING, "kvmanager.audit"):
        for _ in range(LINES + 3):
            assert not let_in(channel, "/kvmanager.v1.Admin/Reset", ((TOKEN_METADATA_KEY, "engine"),))
    lines = [record.getMessage() for record in caplog.records if record.name == "kvmanager.audit"]
    assert lines == ["uid 1000 pid 1 (n) as engine: Admin/Reset refused"] * LINES


def test_which_user_may_attach_as_what() -> None:
    access = AccessSection(operators=(1,), readers=(2,), peers=(3,))
    allowed = {1: {"operator"}, 2: set(), 3: {"peer"}, 4: set()}
    for uid, more in allowed.items():
        for role in ROLES:
            if role in {"engine", "worker", "reader"} | more:
                access.check_role(uid, role)
            else:
                with pytest.raises(Unauthorized, match=rf"uid {uid} may not attach as '{role}'"):
                    access.check_role(uid, role)
    assert [uid for uid in allowed if access.sees_all(uid)] == [1, 2]


def test_access_in_the_configuration() -> None:
    mine = (os.getuid(),)
    assert parse_config(minimal_toml()).access == AccessSection(operators=mine, readers=(), peers=mine)
    config = parse_config(f"{minimal_toml()}\n[access]\noperators = [7]\nreaders = [8, 9]\npeers = []\n")
    assert config.access == AccessSection(operators=(7,), readers=(8, 9), peers=())
    for line in ("operators = []", "readers = 8", 'peers = ["root"]', "operators = [-1]"):
        with pytest.raises(ConfigError, match=r"\[access\] "):
            parse_config(f"{minimal_toml()}\n[access]\n{line}\n")


def test_a_reader_sees_its_tenant_or_everything() -> None:
    callers = Callers(Identities(), lambda uid: f"t{uid}", lambda uid: uid == 1)

    class Context:
        def __init__(self, role: str) -> None:
            self._role = role

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return ((TOKEN_METADATA_KEY, self._role),)

    assert callers.viewer(Context("operator")) is None  # type: ignore[arg-type]
    assert callers.viewer(Context("reader")) == "t1000"  # type: ignore[arg-type]
    callers.sees_all(Context("operator"))  # type: ignore[arg-type]
    with pytest.raises(Unauthorized, match="tenant 't1000'"):
        callers.sees_all(Context("reader"))  # type: ignore[arg-type]
    for role in ("engine", "worker", "peer"):
        with pytest.raises(Unauthorized):
            callers.viewer(Context(role))  # type: ignore[arg-type]


