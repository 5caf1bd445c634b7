"""SIGHUP to a real node: safe keys take effect, all else is refused by name, and nothing is lost on the way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

from nodes_support import (
    SPAN,
    Node,
    kill_and_wait,
    node,
    prefill_engine,
    prefill_toml,
    run_request,
    tokens_of,
    wait_for,
)
from typer.testing import CliRunner

from kvmanager.command.cli import app
from kvmanager.keeper import lockfile
from kvmanager.runtime_dir import KEEPER_LOCK

SAFE = "[health]\ncore_ms = 7777\n[fence]\naction = \"kill\"\n"


def write(served: Node, more: str, replaced: tuple[str, str] = ("", "")) -> None:
    served.process.config_path.write_text(prefill_toml(served.runtime_dir, more=more).replace(*replaced))


def reload_and_read(served: Node, said: str) -> str:
    """Sends SIGHUP; the lines of the log that are new once `said` is among them."""
    before = len(served.log())
    keeper = lockfile.holder(served.runtime_dir / KEEPER_LOCK)
    assert keeper
    os.kill(keeper, signal.SIGHUP)
    wait_for(lambda: said in served.log()[before:], served.process.log_tail)
    return served.log()[before:]


def shown(served: Node) -> dict:
    done = CliRunner().invoke(app, ["config", "show", "--runtime-dir", str(served.runtime_dir), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_running_node_reads_its_file_again(tmp_path: Path) -> None:
    with node(tmp_path, "prefill", prefill_toml) as served:
        with contextlib.closing(prefill_engine(served.runtime_dir)) as engine:
            tokens = tokens_of(1, 4 * SPAN)
            run_request(engine, 1, tokens, 1)
            served.wait_at_rest()
            boot = served.admin.status().boot_id

            write(served, SAFE, ("[mover]\n", "[mover]\nto_host_gb_per_s = 0.5\n"))
            said = reload_and_read(served, "reloaded: [health] core_ms: 5000 -> 7777")
            assert "reloaded: [mover] to_host_gb_per_s: 0.0 -> 0.5" in said
            assert 'reloaded: [fence] action: "hold" -> "kill"' in said
            values = shown(served)
            assert (values["health"]["core_ms"], values["fence"]["action"]) == (7777, "kill")
            assert values["mover"]["to_host_gb_per_s"] == 0.5

            # One key that takes a restart keeps all others from taking effect, too.
            write(served, "[health]\ncore_ms = 1234\n[eviction]\npolicy = \"lru\"\n")
            said = reload_and_read(served, "not reloaded")
            assert '[eviction] policy: "return-rate" -> "lru"' in said
            served.process.config_path.write_text("[node\n")
            assert "not valid TOML" in reload_and_read(served, "not reloaded")
            assert shown(served) == values

            # The engine never noticed, the cache is there, copies still reach the mover.
            assert run_request(engine, 2, tokens, 1) > 0
            served.wait_at_rest()
            assert served.admin.status().boot_id == boot

        # What the file says counts for the next daemon as well.
        write(served, SAFE)
        reload_and_read(served, "reloaded: [mover] to_host_gb_per_s: 0.5 -> 0.0")
        kill_and_wait(served.pid_of("daemon"))
        served.reopen()
        wait_for(lambda: shown(served)["health"]["core_ms"] == 7777)
        assert served.admin.status().boot_id > boot
