"""The systemd unit that is delivered: systemd takes it, and what it says is what the keeper does."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from keeper_support import WAIT_S
from nodes_support import prefill_toml, wait_for
from test_keeper_systemd import PlayedSystemd

from kvmanager.configuration.reading import parse_config
from kvmanager.daemon.attach import CONNECTIONS_MAX
from kvmanager.exitcodes import EXIT_CONFIG
from kvmanager.keeper import systemd

UNIT = files("kvmanager").joinpath("deployments/kvmanager@.service").read_text(encoding="utf-8")
FDS_A_CLIENT = 2
"""Deposits of one attached process: its pidfd and its lifeline."""
INSTANCE = "node0"


def said(key: str) -> str:
    """The value of a key that stands in the unit once."""
    (value,) = [line.partition("=")[2] for line in UNIT.splitlines() if line.startswith(f"{key}=")]
    return value


def test_the_unit_says_what_the_keeper_does() -> None:
    assert (said("Type"), said("NotifyAccess"), said("KillMode")) == ("notify", "main", "process")
    assert said("RestartPreventExitStatus") == str(EXIT_CONFIG)
    assert said("ExecReload") == "/bin/kill -HUP $MAINPID"
    assert said("RuntimeDirectoryMode") == "0700"
    assert int(said("FileDescriptorStoreMax")) >= CONNECTIONS_MAX * FDS_A_CLIENT + 300
    for promise in ("Type=notify", f"FileDescriptorStoreMax={said('FileDescriptorStoreMax')}", "KillMode=process"):
        assert promise in str(systemd.__doc__)
    example = files("kvmanager").joinpath("deployments/prefill-tp8.toml").read_text(encoding="utf-8")
    name = parse_config(example).node.name
    where = "/run" / Path(said("RuntimeDirectory").replace("%i", name))
    assert parse_config(example).node.runtime_dir == where


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "kvmanager@.service"
    unit.write_text(UNIT.replace("/opt/kvmanager/bin/kvmanager", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.long
def test_a_node_run_as_the_unit_says(tmp_path: Path) -> None:
    """READY once it serves, the watchdog fed, every descriptor stored, a reload, an orderly stop."""
    config = tmp_path / f"{INSTANCE}.toml"
    runtime_dir = tmp_path / INSTANCE
    config.write_text(prefill_toml(runtime_dir, name=INSTANCE))
    command = shlex.split(said("ExecStart").replace("/etc/kvmanager/%i.toml", str(config)))
    assert command[0].endswith("/kvmanager")
    played = PlayedSystemd(str(tmp_path / "notify"))
    environment = {
        "NOTIFY_SOCKET": played.address, "WATCHDOG_USEC": str(int(said("WatchdogSec")) * 1_000_000),
        "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvmanager.command.cli", *command[1:]], env=environment, stdout=output, stderr=output
        )
    try:
        played.hear_until("READY", "1")
        assert {"WATCHDOG": "1"} in played.heard
        played.hear_the_rest()
        assert len(played.store) > 3
        assert len(played.store) <= int(said("FileDescriptorStoreMax"))
        assert any(name.startswith("journal;") for name in played.store), sorted(played.store)
        config.write_text(config.read_text() + "[health]\ncore_ms = 7777\n")
        subprocess.run(["/bin/sh", "-c", said("ExecReload")], env={"MAINPID": str(process.pid)}, check=True)
        wait_for(lambda: "reloaded: [health] core_ms: 5000 -> 7777" in log.read_text(), log.read_text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=WAIT_S) == 0, log.read_text()
        played.hear_until("STOPPING", "1")
        played.hear_the_rest()
        assert played.store == {}, "an orderly stop leaves no memory behind"
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=WAIT_S)
        played.close()
