"""NIXL's agent listens on the data network alone, or does not start; and what peers send is never unpickled."""

from __future__ import annotations

import ast
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvmanager.configuration.reading import parse_config
from kvmanager.errors import ConfigError
from kvmanager.transport.listeners import check_listeners, interface_addresses, listening
from tests.minimal_config import minimal_toml

ROOT = Path(__file__).resolve().parents[2]
AGENT = """
import sys, threading
from kvmanager.errors import KVError
from kvmanager.transport.executor import RegionMap
from kvmanager.transport.listeners import listening
from kvmanager.transport.nixl import NixlReader, UcxSettings
import kvmanager.transport.nixl as nixl

if sys.argv[1] == "lying":  # UCX is told more than the configuration says
    load = nixl.load_nixl
    nixl.load_nixl = lambda settings: load(UcxSettings(net_devices="all"))
asked = []
load_honest = nixl.load_nixl
def recording(settings):
    api = load_honest(settings)
    make = api.nixl_agent_config
    api.nixl_agent_config = lambda **said: asked.append(said["enable_listen_thread"]) or make(**said)
    return api
nixl.load_nixl = recording
try:
    reader = NixlReader("a", 1, RegionMap(), UcxSettings(net_devices="lo"))
except KVError as error:
    print("refused", error)
    sys.exit()
print(sorted(host for host, _ in listening()))
print("listener thread", asked)
try:
    reader.add_peer("b", bytes.fromhex(sys.argv[2]))
except KVError as error:
    print(type(error).__name__)
"""


def agent(kind: str, metadata: bytes = b"x") -> list[str]:
    """What a process with an agent says; UCX's settings are a process's."""
    done = subprocess.run(
        [sys.executable, "-c", AGENT, kind, metadata.hex()], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    words = ("refused", "[", "listener", "Transfer", "Peer")
    return [line for line in done.stdout.splitlines() if line.startswith(words)]


class Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self._path,)  # type: ignore[return-value]


def test_an_agent_listens_on_loopback_alone_and_unpickles_nothing(tmp_path: Path) -> None:
    said = agent("honest", pickle.dumps(Bomb(tmp_path / "went-off")))
    assert said == ["['127.0.0.1']", "listener thread [False]", "TransferFailed"]
    assert not (tmp_path / "went-off").exists()


def test_an_agent_that_listens_elsewhere_is_refused() -> None:
    if len([address for _, name in socket.if_nameindex() for address in interface_addresses([name])]) < 3:
        pytest.skip("this machine has no network but loopback")
    (said,) = agent("lying")
    assert said.startswith("refused NIXL listens on ")
    assert "data_interface in [mover] is lo" in said


def test_what_a_process_listens_on_is_found() -> None:
    assert {"127.0.0.1"} <= interface_addresses(["lo"])
    with socket.socket() as here, socket.socket() as everywhere:
        here.bind(("127.0.0.1", 0))
        here.listen()
        assert ("127.0.0.1", here.getsockname()[1]) in listening()
        check_listeners(["lo"])
        everywhere.bind(("", 0))
        everywhere.listen()
        with pytest.raises(ConfigError, match=rf"listens on 0\.0\.0\.0:{everywhere.getsockname()[1]}, and"):
            check_listeners(["lo"])
    with pytest.raises(ConfigError, match=r"no 'nosuch0'; it has .*lo"):
        check_listeners(["nosuch0"])


def test_data_interface_in_the_configuration() -> None:
    def read(value: str) -> str:
        text = minimal_toml().replace("[[group]]", f'[mover]\ndata_interface = {value}\n[[group]]', 1)
        return parse_config(text).mover.data_interface

    assert read('"mlx5_0:1,eth1"') == "mlx5_0:1,eth1"
    for wrong in ('"all"', '"lo,any"', '""', '"lo,"', '"a b"', "3", '"a;b"'):
        with pytest.raises(ConfigError, match=r"\[mover\] data_interface"):
            read(wrong)


def test_nothing_unpickles_but_the_journal() -> None:
    """Its pickle knows the core's classes alone, and its bytes come from memory that only the node's processes hold."""
    found = []
    for folder in ("kvmanager", "transport", "clients", "allocators"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.is_symlink() or (folder == "kvmanager" and path.relative_to(ROOT).parts[1] in
                                     ("transport", "clients", "allocators", "protos")):  # fmt: skip
                continue
            if "demo" in path.parts:  # a child process of its own, nobody else's bytes
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [node.attr] if isinstance(node, ast.Attribute) else []
                bad = {"pickle", "shelve", "dill", "cloudpickle", "multiprocessing", "deserialize_descs",
                       "get_serialized_descs"}  # fmt: skip
                found += [f"{path.relative_to(ROOT)}: {name}" for name in names if name.split(".")[0] in bad]
    assert found == ["kvmanager/journal/journalcodec.py: pickle"]
