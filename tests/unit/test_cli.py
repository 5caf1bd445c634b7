"""The command: help, exit codes, one-line errors, tables and JSON against a fake daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import click.testing
import grpc
import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from kvmanager import __version__
from kvmanager.clients.admin import AdminClient, to_plain
from kvmanager.command import mapscreen, screens
from kvmanager.command.cli import app
from kvmanager.daemon.attach import AttachServer
from kvmanager.errors import DaemonError, Draining, InvalidArgument, KVError, NotReady, Unauthorized
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.runtime_dir import GRPC_SOCKET
from kvmanager.wire import abort_with, pack_u32
from tests.minimal_config import minimal_toml

VERBS = ("serve", "status", "pools", "map", "requests", "prefixes", "leases", "demo", "replay", "plan", "simulate")
BIG = (1 << 63) + 5
STATUS = pb.StatusReply(
    boot_id=BIG,
    version="9.9",
    node="node0",
    state="serving",
    uptime_ns=12_300_000_000,
    engines=[pb.EngineStatus(engine="prefill", group="g", epoch=3, state="attached", ranks_attached=8, requests=2)],
    movers=[pb.MoverStatus(device="cpu", pid=77, incarnation=5, outstanding=1)],
    counters={"offload": 1234, "eviction": 3},
    ledger_ok=True,
)
POOLS = pb.PoolsReply(
    pools=[
        pb.PoolStatus(
            pool="prefill",
            tier="device",
            ranks=8,
            capacity_bytes=1000 << 20,
            free_bytes=500 << 20,
            ready_bytes=(499 << 20) + 1,
            filling_bytes=(1 << 20) - 1,
            pinned_bytes=3 << 20,
            pages_by_class={"kv": 1200},
        )
    ]
)
MAP = pb.MapReply(
    pool="decode",
    states=bytes([0, 1, 2, 3, 3, 3, 4, 5] + [0] * 92),
    classes=bytes([255, 0, 0, 0, 0, 1, 1, 1] + [255] * 92),
    class_names=["latent", "indexer", "leftover"],
    pins=pack_u32([0, 0, 0, 2, 0, 0, 0, 0] + [0] * 92),
)
REQUESTS = pb.RequestsReply(
    requests=[
        pb.RequestStatus(
            engine="decode-0", request_id=41, state="running", session_id="trace_0043", prompt_tokens=1_048_576,
            cached_tokens=1_048_064, committed_tokens=1_048_575, fenced_tokens=1_048_570, spans=16384,
            host_only_spans=1,
        )
    ]
)  # fmt: skip
PREFIXES = pb.PrefixesReply(
    prefixes=[
        pb.PrefixStatus(
            group="prefill", chain="main", key="ab" * 16, tokens=928, device_tokens=512, host_tokens=928, pins=2,
            idle_ns=1_500_000_000,
        )
    ],
    spans=8,
    tokens=928,
)  # fmt: skip
LEASES = pb.LeasesReply(
    leases=[
        pb.LeaseStatus(
            lease_id="cd" * 16, kind="ticket", holder="decode-0", request_id=41, tokens=900, expires_in_ns=29 * 10**9
        )
    ]
)


class FakeAdmin(pb_grpc.AdminServicer):
    """Canned replies, to callers that attached; records what it was asked."""

    def __init__(self, token_ok: Callable[[str], bool]) -> None:
        self._token_ok = token_ok
        self.asked: list[object] = []
        self.error: KVError | None = None

    def _answer(self, request: object, context: grpc.ServicerContext, reply: object) -> object:
        self.asked.append(request)
        if not self._token_ok(str(dict(context.invocation_metadata()).get("kvmanager-token"))):
            abort_with(context, Unauthorized("no token"))
        if self.error is not None:
            abort_with(context, self.error)
        return reply

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> object:
        return self._answer(request, context, STATUS)

    def Pools(self, request: pb.PoolsRequest, context: grpc.ServicerContext) -> object:
        return self._answer(request, context, POOLS)

    def Map(self, request: pb.MapRequest, context: grpc.ServicerContext) -> object:
        if request.pool != "decode":
            abort_with(context, InvalidArgument(f"no pool {request.pool!r}; pools are decode"))
        return self._answer(request, context, MAP)

    def Requests(self, request: pb.RequestsRequest, context: grpc.ServicerContext) -> object:
        return self._answer(request, context, REQUESTS)

    def Prefixes(self, request: pb.PrefixesRequest, context: grpc.ServicerContext) -> object:
        return self._answer(request, context, PREFIXES)

    def Leases(self, request: pb.LeasesRequest, context: grpc.ServicerContext) -> object:
        return self._answer(request, context, LEASES)


def ignore(_: object) -> None:
    """A callback that this test has no use for."""


def open_door(directory: Path) -> AttachServer:
    """An attach server in front of whatever listens on grpc.sock."""
    door = AttachServer(
        directory,
        trust_uids=[os.getuid()],
        boot_id=1,
        grpc_path=directory / GRPC_SOCKET,
        on_attach=ignore,
        on_leave=ignore,
            on_disconnect=ignore,
        on_exit=ignore,
        fds_for=lambda *_: [],
        on_failure=ignore,
    )
    door.start()
    return door


@dataclass
class Node:
    """A fake node."""

    directory: Path
    admin: FakeAdmin
    server: grpc.Server


@pytest.fixture(scope="module")
def running() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="kvm") as name:
        directory = Path(name)
        attach_server = open_door(directory)
        admin = FakeAdmin(lambda token: attach_server.identity_of(token).role == "operator")
        server = grpc.server(futures.ThreadPoolExecutor(2))
        pb_grpc.add_AdminServicer_to_server(admin, server)
        server.add_insecure_port(f"unix:{directory / GRPC_SOCKET}")
        server.start()
        yield Node(directory, admin, server)
        server.stop(None).wait()
        attach_server.close()


@pytest.fixture
def node(running: Node) -> Iterator[Node]:
    yield running
    running.admin.error = None
    running.admin.asked.clear()


def run(*arguments: str) -> click.testing.Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80", "NO_COLOR": "1"})


@pytest.mark.parametrize("verb", VERBS)
def test_help(verb: str) -> None:
    result = run(verb, "--help")
    assert result.exit_code == 0
    assert "--json" in result.output


def test_version_and_overview() -> None:
    assert run("--version").output == f"kvmanager {__version__}\n"
    overview = run("--help").output
    assert all(verb in overview for verb in VERBS)
    for code in ("0 ok", "1 failed", "2 wrong usage", "3 the node", "78 the"):
        assert code in " ".join(overview.split())


@pytest.mark.parametrize(
    ("verb", "parts"),
    [
        ("status", ["node node0: serving for 12.3 s", "ledger adds up", "attached", "offload", "1,234", "not started"]),
        ("pools", ["prefill", "1000.00 MiB", "50%", "49%", "<1%", "3.00 MiB", "1,200 kv"]),
        ("requests", ["trace_0043", "41", "1048576", "1048570"]),
        ("prefixes", ["abababababab", "928", "512", "1.5 s", "8 spans"]),
        ("leases", ["cdcdcdcdcdcdcdcd", "ticket", "decode-0", "29.0 s"]),
    ],
)
def test_tables_fit_80_columns(node: Node, verb: str, parts: list[str]) -> None:
    result = run(verb, "--runtime-dir", str(node.directory))
    assert result.exit_code == 0, result.output
    for part in parts:
        assert part in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert "…" not in result.output


@pytest.mark.parametrize(
    ("verb", "reply"),
    [("status", STATUS), ("pools", POOLS), ("requests", REQUESTS), ("prefixes", PREFIXES), ("leases", LEASES)],
)
def test_json_is_the_whole_reply(node: Node, verb: str, reply: object) -> None:
    result = run(verb, "--json", "--runtime-dir", str(node.directory))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == to_plain(reply)  # type: ignore[arg-type]


def test_json_numbers_stay_numbers() -> None:
    plain = to_plain(STATUS)
    assert plain["boot_id"] == BIG
    assert plain["counters"] == {"eviction": 3, "offload": 1234}
    assert plain["movers"][0]["agent_started"] is False
    assert to_plain(pb.MapReply(states=b"\x00\x05"))["states"] == [0, 5]
    json.dumps(plain)


def test_map_draws_one_character_a_unit(node: Node) -> None:
    result = run("map", "decode", "--runtime-dir", str(node.directory))
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "pool decode: 100 units"
    drawing = [line.split() for line in lines[1:3]]
    assert drawing == [["0", ".r+Llid!" + "." * 56], ["64", "." * 36]]
    legend = {tuple(line.split(maxsplit=2)) for line in lines[4:]}
    assert ("L", "1", "ready, latent, pinned") in legend
    assert ("i", "1", "ready, indexer") in legend
    assert (".", "93", "free") in legend
    assert sum(int(count) for _, count, _ in legend) == 100
    assert max(map(len, lines)) <= 80


def test_map_json(node: Node) -> None:
    result = run("map", "decode", "--json", "--runtime-dir", str(node.directory))
    value = json.loads(result.stdout)
    assert value["class_names"] == ["latent", "indexer", "leftover"]
    assert len(value["units"]) == 100
    assert value["units"][3] == {"state": "ready", "class": "latent", "pins": 2}
    assert value["units"][0] == {"state": "free", "class": None, "pins": 0}


def test_class_letters_differ() -> None:
    letters = screens.class_letters(["kv", "keys", "draft", "rows", "kk"])
    assert len(set(letters)) == 5
    assert not set(letters) & set("rd.+!")


@pytest.mark.parametrize(
    "reply",
    [
        pb.MapReply(pool="p", states=b"\x00", classes=b"\xff\xff", pins=pack_u32([0])),
        pb.MapReply(pool="p", states=b"\x06", classes=b"\xff", pins=pack_u32([0])),
        pb.MapReply(pool="p", states=b"\x00", classes=b"\x01", class_names=["kv"], pins=pack_u32([0])),
    ],
)
def test_a_map_that_makes_no_sense_is_an_error(reply: pb.MapReply) -> None:
    with pytest.raises(DaemonError, match="the map of p"):
        mapscreen.map_screen(reply)


@pytest.mark.parametrize(
    ("screen", "part"),
    [
        (screens.status_screen(pb.StatusReply()), "DOES NOT ADD UP"),
        (screens.status_screen(pb.StatusReply()), "no engine"),
        (screens.pools_screen(pb.PoolsReply()), "no pool"),
        (mapscreen.map_screen(pb.MapReply(pool="p")), "0 units"),
        (screens.requests_screen(pb.RequestsReply()), "no request"),
        (screens.prefixes_screen(pb.PrefixesReply()), "no prefix"),
        (screens.leases_screen(pb.LeasesReply()), "no lease"),
    ],
)
def test_empty_nodes_say_so(screen: RenderableType, part: str) -> None:
    console = Console(width=80, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(screen)
    console.file.close()
    assert part in console.export_text()


def test_limit_reaches_the_daemon(node: Node) -> None:
    assert run("prefixes", "--limit", "7", "--runtime-dir", str(node.directory)).exit_code == 0
    assert node.admin.asked == [pb.PrefixesRequest(limit=7)]


def test_the_config_finds_the_node(node: Node, tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text(minimal_toml(node.directory))
    assert run("status", "--config", str(config)).exit_code == 0


def one_line(result: click.testing.Result) -> str:
    """The only line on stderr, and nothing on stdout."""
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize("verb", [("status",), ("pools",), ("map", "p"), ("requests",), ("prefixes",), ("leases",)])
def test_unreachable_node(verb: tuple[str, ...], tmp_path: Path) -> None:
    result = run(*verb, "--json", "--runtime-dir", str(tmp_path))
    assert result.exit_code == 3
    assert "no node answers" in one_line(result)


@pytest.mark.parametrize(
    ("error", "code"),
    [(Draining("the node drains"), 1), (InvalidArgument("bad"), 1), (NotReady("starting"), 3)],
)
def test_errors_of_the_daemon_are_one_line(node: Node, error: KVError, code: int) -> None:
    node.admin.error = error
    result = run("status", "--runtime-dir", str(node.directory))
    assert result.exit_code == code
    assert one_line(result) == f"error: {error}"


def test_unknown_pool(node: Node) -> None:
    result = run("map", "nope", "--runtime-dir", str(node.directory))
    assert result.exit_code == 1
    assert "no pool 'nope'; pools are decode" in one_line(result)


def test_a_door_without_a_daemon_behind_it() -> None:
    """attach.sock answers, gRPC does not: the daemon is starting or stopping."""
    with tempfile.TemporaryDirectory(prefix="kvm") as name:
        directory = Path(name)
        door = open_door(directory)
        try:
            with AdminClient(directory) as client, pytest.raises(NotReady, match="does not answer"):
                client.status()
        finally:
            door.close()


BOTH = ("status", "--runtime-dir", "a", "--config", "b")


@pytest.mark.parametrize("arguments", [("status",), BOTH, ("map",), ("unknown",)])
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("verb", ["serve", "status"])
def test_bad_config(verb: str, tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text("[node]\nnam = 1\n")
    result = run(verb, "--config", str(config))
    assert result.exit_code == 78
    assert "unknown key 'nam' in [node]; did you mean 'name'?" in one_line(result)


def test_config_check_shows_what_a_file_gives(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text(minimal_toml(tmp_path))
    plain = json.loads(run("config", "check", str(config), "--tokens", "400", "--json").stdout)
    # A page of the tiny format with 16 rows: 7 layers, 4 of them with an indexer row.
    page = 16 * (7 * 656 + 4 * 132)
    assert plain["pools"][0]["pages"] == (1 << 20) // page
    assert plain["beside"][0]["workspace_bytes"] == 2 * 400 * 788
    assert plain["fits"] == [
        {"group": "g", "tokens": 400, "fits": False, "whole_lacks_slabs": 0, "held": {},
         "refusal": plain["fits"][0]["refusal"]}
    ]
    assert plain["fits"][0]["refusal"]["needed"] == 13
    shown = run("config", "check", str(config), "--tokens", "100")
    assert shown.exit_code == 0
    for part in ("g/hbm", "workspace", "a request of 100 tokens takes 4 of g/hbm"):
        assert part in shown.output
    assert run("config", "check", str(tmp_path / "none.toml")).exit_code == 78


def test_config_check_looks_at_this_machine(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text(minimal_toml(tmp_path))
    here = json.loads(run("config", "check", str(config), "--here", "--json").stdout)["machine"]
    assert here["fits"]
    page = 16 * (7 * 656 + 4 * 132)
    timelines, staging = 4096 * 8, 64 << 20
    assert here["host_bytes"] == timelines + staging + 2 * ((1 << 20) // page * page)
    assert here["host_available_bytes"] > 0
    assert (here["device"], here["device_bytes"], here["running_pid"]) == ("cpu", 0, 0)
    config.write_text(minimal_toml(tmp_path).replace("1MiB", "9999GiB"))
    assert run("config", "check", str(config)).exit_code == 0
    told = run("config", "check", str(config), "--here")
    assert told.exit_code == 78
    assert "does not fit: pool larger than memory" in told.output
    config.write_text(minimal_toml(tmp_path).replace("[node]", "[node]\ndevice = 'cuda:7'"))
    assert json.loads(run("config", "check", str(config), "--json").stdout)["machine"]["device_bytes"] > staging


def test_serve_becomes_the_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "node.toml"
    config.write_text(minimal_toml(tmp_path))
    seen: list[list[str]] = []
    mover = "--mover=--ucx-devices=lo"  # loopback, where no other device is configured
    monkeypatch.setattr(os, "execv", lambda path, command: seen.append([path, *command]))
    result = run("serve", "--json", "--config", str(config))
    assert json.loads(result.stdout)["runtime_dir"] == str(tmp_path)
    where = ["--config", str(config), "--runtime-dir", str(tmp_path), "--device", "cpu", "--drain-ms", "10000"]
    assert seen.pop() == [sys.executable, sys.executable, "-m", "kvmanager.keeper", *where, "--spare", mover]
    config.write_text(minimal_toml(tmp_path).replace("[node]\n", "[node]\nspare = false\n"))
    run("serve", "--cold", "--config", str(config))
    assert seen.pop() == [sys.executable, sys.executable, "-m", "kvmanager.keeper", *where, "--cold", mover]


def fake_demo(monkeypatch: pytest.MonkeyPatch, passed: bool) -> list[dict[str, object]]:
    """Puts a stand-in where the demo is imported from; returns the options it will be given."""
    calls: list[dict[str, object]] = []

    def options(**given: object) -> dict[str, object]:
        return given

    def run_demo(given: dict[str, object]) -> object:
        calls.append(given)
        facts = {"tokens_equal": passed, "ledger_ok": True, "counters": {"offload": 4}, "seconds": 1.5}
        return types.SimpleNamespace(passed=passed, to_json=lambda: facts, render=lambda: "the report")

    module = types.ModuleType("kvmanager.demo.run")
    module.DemoOptions = options  # type: ignore[attr-defined]
    module.run_demo = run_demo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvmanager.demo.run", module)
    return calls


def test_demo_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_demo(monkeypatch, passed=True)
    result = run("demo", "--inject-fault", "--seed", "7", "--runtime-dir", "/tmp/kept")
    assert result.exit_code == 0
    assert result.stdout == "the report\n"
    assert calls == [{"seed": 7, "inject_fault": True, "runtime_dir": Path("/tmp/kept")}]


def test_a_failed_demo_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_demo(monkeypatch, passed=False)
    result = run("demo", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["tokens_equal"] is False


def recorded(directory: Path) -> Path:
    """Two sessions of three requests each."""
    timing = {"type": "s", "think_time": 1, "api_time": 2, "stop": "tool_use"}
    steps = [{**timing, "hash_runs": [[1, 8 * n]]} for n in (1, 2, 3)]
    path = directory / "sessions.jsonl"
    path.write_text(2 * (json.dumps({"block_size": 64, "requests": steps}) + "\n"))
    return path


def test_replay_of_a_file(tmp_path: Path) -> None:
    asked = ("replay", str(recorded(tmp_path)), "--lanes", "2", "--requests", "12", "--pool-tokens", "100000")
    result = run(*asked, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["prefix_hit_rate"] == pytest.approx(report["ceiling"])
    assert 0 < report["ceiling"] < 1
    assert report["prefilled_tokens"] == round(report["prompt_tokens"] * (1 - report["ceiling"]))
    assert "prefix hit rate" in run(*asked).stdout


def test_replay_of_what_is_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text("{}\n")
    result = run("replay", str(path))
    assert result.exit_code == 1
    assert "line 1" in result.stderr
    assert run("replay", str(recorded(tmp_path)), "--policy", "lfu").exit_code == 1


def test_the_module_is_the_command() -> None:
    """`python -m kvmanager.command.cli` as a program: exit code and one line, no traceback."""
    command = [sys.executable, "-m", "kvmanager.command.cli", "status", "--runtime-dir", "/nonexistent"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
