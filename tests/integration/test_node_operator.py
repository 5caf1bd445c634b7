"""Every verb of an operator against a real node: what it does, what it refuses, and what it leaves in the log."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes_support import (
    GROUP,
    PAGES,
    SPAN,
    Node,
    keys_of,
    kill_and_wait,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    run_request,
    tokens_of,
    wait_for,
)
from typer.testing import CliRunner

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.command.cli import app
from kvmanager.errors import Draining, KVError
from kvmanager.protos import kvmanager_pb2 as pb

KVMANAGER = [sys.executable, "-m", "kvmanager.command.cli"]
HEX = re.compile(r"[0-9a-f]+")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("operator"), "prefill", prefill_toml) as running:
        yield running


@pytest.fixture(scope="module")
def engine(served: Node) -> Iterator[AttachedEngine]:
    attached = prefill_engine(served.runtime_dir)
    yield attached
    with contextlib.suppress(KVError):  # its daemon was killed meanwhile
        attached.close()


def call(served: Node, *words: str, code: int = 0) -> str:
    """What a command prints; on an error, what it says on stderr."""
    done = CliRunner().invoke(app, [*words, "--runtime-dir", str(served.runtime_dir)])
    assert done.exit_code == code, (words, done.output, done.exception)
    return done.stderr if code else done.stdout


def ask(served: Node, *words: str) -> dict:
    return json.loads(call(served, *words, "--json"))


def story(served: Node, kind: str, named: str) -> str:
    return " | ".join(line["text"] for line in ask(served, "explain", kind, named)["lines"])


def closing(request_id: int) -> pb.CloseRequest:
    return pb.CloseRequest(request_id=request_id, reason=pb.ABORTED)


def last_key(tokens: object) -> str:
    return keys_of(tokens)[-16:].hex()  # type: ignore[arg-type]


def audited(served: Node) -> list[str]:
    return [line for line in served.log().splitlines() if "kvmanager.audit" in line]


def test_a_miss_is_explained_by_what_happened_to_the_prefix(served: Node, engine: AttachedEngine) -> None:
    tokens = tokens_of(1, 4 * SPAN)
    run_request(engine, 1, tokens, 1)
    assert "never seen" in story(served, "request", "engine/1")
    served.wait_at_rest()
    done = ask(served, "evict", GROUP, "--key", keys_of(tokens)[:16].hex()[:12])
    assert done == {"forgotten_spans": 4, "held_spans": 0}
    run_request(engine, 2, tokens, 1)
    told = story(served, "miss", "engine/2")
    assert "an operator had it evicted" in told
    assert "at token 0" in told
    ask(served, "reset", GROUP)
    run_request(engine, 3, tokens, 1)
    assert "an operator had the group reset" in story(served, "miss", "engine/3")


def test_a_policys_victim_and_a_prefix_that_is_being_written(served: Node, engine: AttachedEngine) -> None:
    first = tokens_of(20, 6 * SPAN)
    run_request(engine, 20, first, 20)
    for number in range(21, 31):
        run_request(engine, number, tokens_of(number, 6 * SPAN), number)
    run_request(engine, 31, first, 20)
    told = story(served, "miss", "engine/31")
    assert "by policy return-rate" in told
    assert re.search(rf"for room in {GROUP}/(hbm|host)", told), told
    # One computes it, another asks for it meanwhile.
    shared = tokens_of(40, 2 * SPAN)
    engine.step(opens=[open_of(40, shared)])
    engine.step(opens=[open_of(41, shared)])
    assert "engine/40 was writing it" in story(served, "miss", "engine/41")
    engine.step(closes=[closing(40), closing(41)])
    served.wait_at_rest()


def test_a_refusal_names_need_free_and_holder(served: Node, engine: AttachedEngine) -> None:
    engine.step(opens=[open_of(50, tokens_of(50, 8 * SPAN))])
    engine.step(opens=[open_of(51, tokens_of(51, 8 * SPAN))])
    told = story(served, "refusal", "engine/51")
    assert f"pool {GROUP}/hbm: needed" in told
    assert "held by engine/50" in told
    assert "running for" in story(served, "request", "engine/50")
    engine.step(closes=[closing(50)])
    served.wait_at_rest()


def test_a_pinned_prefix_is_kept_across_a_restart_until_it_is_unpinned(served: Node, engine: AttachedEngine) -> None:
    tokens = tokens_of(60, 4 * SPAN)
    run_request(engine, 60, tokens, 60)
    served.wait_at_rest()
    pinned = ask(served, "pin", GROUP, last_key(tokens)[:16], "--name", "system prompt")
    assert (pinned["spans"], pinned["tokens"]) == (4, 4 * SPAN)
    assert ask(served, "pins")["pins"][0]["pin_id"] == "system prompt"
    assert ask(served, "evict", GROUP, "--pool", f"{GROUP}/hbm", "--free", "100")["forgotten_spans"] >= 0
    ask(served, "evict", GROUP, "--tenant", f"uid {os.getuid()}")
    assert [p["tokens"] for p in ask(served, "prefixes")["prefixes"]] == [4 * SPAN]
    pages = [story(served, "page", f"{GROUP}/host:{page}") for page in range(2 * PAGES)]
    kept = [told for told in pages if "kept by an operator's pin 'system prompt'" in told]
    assert len(kept) == 4, pages
    assert sum("nobody's" in told for told in pages) == 2 * PAGES - 4
    assert ask(served, "unpin", "system prompt")["spans"] == 4
    assert ask(served, "evict", GROUP, "--tenant", f"uid {os.getuid()}")["forgotten_spans"] == 4
    who = f"uid {os.getuid()} pid "
    lines = [line for line in audited(served) if "system prompt" in line]
    assert len(lines) == 2
    assert all(who in line and line.endswith("done") for line in lines)


def test_fsck_checks_a_copy_while_the_node_serves(served: Node, engine: AttachedEngine) -> None:
    run_request(engine, 70, tokens_of(70, 4 * SPAN), 70)
    served.wait_at_rest()
    done = ask(served, "fsck", "--checksums", "100")
    assert all(check["broken"] == "" for check in done["checks"])
    for word in ("ledger", "index", "pins, leases", "uids"):
        assert any(word in check["name"] for check in done["checks"]), word
    assert done["spans"] >= 4
    assert done["compared_spans"] >= 4
    assert done["bad_copies"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("explain", "page", f"{GROUP}/hbm:99999"), "has pages 0 to"),
        (("explain", "page", "nowhere:1"), "pools are"),
        (("explain", "page", f"{GROUP}/hbm:kv:x"), "names no page"),
        (("explain", "request", "engine"), "no request 'engine' is known"),
        (("explain", "request", ""), "no request is named"),
        (("explain", "request", "engine/99999"), "no request 'engine/99999' is known"),
        (("explain", "refusal", "engine/99999"), "no refusal"),
        (("explain", "miss", "nobody/1"), "no opening"),
        (("explain", "dream", "engine/1"), "can't explain a 'dream'"),
        (("pin", GROUP, "0123456789abcdef"), "0 cached keys"),
        (("pin", GROUP, "xyz"), "not a key in hex"),
        (("pin", "nowhere", "0123456789abcdef"), "no group 'nowhere'"),
        (("unpin", "nothing"), "no pin 'nothing'"),
        (("evict", GROUP, "--tenant", "nobody"), "no tenant 'nobody'"),
        (("evict", GROUP, "--pool", "nothing"), "no pool 'nothing'"),
        (("loglevel", "LOUD"), "no level 'LOUD'"),
        (("loglevel", "DEBUG", "--part", "grpc"), "'grpc'"),
        (("drain", "--why", " "), "say why"),
    ],
)
def test_what_can_not_be_is_refused_in_a_line(served: Node, words: tuple[str, ...], said: str) -> None:
    text = call(served, *words, code=1)
    assert said in text
    assert text.startswith("error: ")
    assert text.count("\n") == 1


def test_wrong_usage_is_told_apart(served: Node) -> None:
    call(served, "evict", GROUP, code=2)
    call(served, "evict", GROUP, "--tenant", "a", "--pool", "b", code=2)


def test_log_level_and_configuration(served: Node) -> None:
    assert ask(served, "loglevel", "debug") == {"before": "INFO"}
    assert ask(served, "loglevel", "INFO", "--part", "kvmanager.loop") == {"before": "DEBUG"}
    assert ask(served, "loglevel", "info") == {"before": "DEBUG"}
    shown = ask(served, "config", "show")
    assert shown["node"]["name"] == "prefill"
    assert shown["history"]["max_bytes"] == 64 << 20
    assert "[history]" in call(served, "config", "show")


def test_transfers_and_top(served: Node) -> None:
    assert ask(served, "transfers") == {"transfers": [], "paths": []}
    line = json.loads(call(served, "top", "--count", "1", "--every", "0.2", "--json"))
    assert line["ledger_ok"]
    assert set(line["pools"]) == {f"{GROUP}/hbm", f"{GROUP}/host"}
    assert line["per_second"]["request"] == 0.0


@pytest.mark.parametrize(
    "words", [("status",), ("pools",), ("map", f"{GROUP}/hbm"), ("prefixes",), ("pins",), ("transfers",), ("fsck",),
              ("explain", "request", "engine/31"), ("explain", "refusal", "engine/51"), ("top", "--count", "1")],
    ids=lambda words: words[0],
)  # fmt: skip
def test_screens_fit_80_columns_of_a_terminal(served: Node, words: tuple[str, ...]) -> None:
    """In a pty of 80 columns, so that rich does what it does for people."""
    inner = " ".join(f"'{word}'" for word in [*KVMANAGER, *words, "--runtime-dir", str(served.runtime_dir)])
    command = ["script", "-qec", f"stty cols 80 rows 40; exec {inner}", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.stdout)
    lines = re.split(r"[\r\n]+", plain)
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    cut = [line for line in lines if "…" in line]
    assert not cut, cut


def test_a_drained_node_lets_nothing_in_even_after_a_crash(served: Node, engine: AttachedEngine) -> None:
    assert ask(served, "drain", "--why", "new power supply") == {"state": "draining", "before": ""}
    opened = engine.step(opens=[open_of(90, tokens_of(90, SPAN))])
    assert "new power supply" in str(opened)
    assert served.admin.status().state == "draining"
    kill_and_wait(served.pid_of("daemon"))
    wait_for(lambda: "draining" in subprocess.run(
        [*KVMANAGER, "status", "--runtime-dir", str(served.runtime_dir)], capture_output=True, text=True, check=False
    ).stdout)  # fmt: skip
    with pytest.raises(Draining, match="new power supply"):
        prefill_engine(served.runtime_dir, "another")
    assert ask(served, "undrain") == {"state": "serving", "before": "new power supply"}
    served.reopen()
    # What was forgotten before the crash is still known.
    assert "an operator had it evicted" in story(served, "miss", "engine/2")


def test_the_history_is_read_without_a_node(served: Node) -> None:
    where = str(Path(served.runtime_dir) / "history")
    command = [*KVMANAGER, "explain", "refusal", "engine/51", "--history", where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "held by engine/50" in " ".join(done.stdout.split())
