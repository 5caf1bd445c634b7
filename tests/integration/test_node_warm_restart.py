"""A daemon that dies by SIGKILL, and another one that goes on with the same memory, engines, pages and replies."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from nodes_support import (
    PAGE_BYTES,
    SPAN,
    Node,
    check_filled,
    decode_engine,
    decode_toml,
    device_pages,
    fill,
    keys_of,
    kill_and_wait,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    run_request,
    says,
    script,
    tokens_of,
    wait_for,
)

from kvmanager.clients.engine import RequestStep
from kvmanager.errors import KVError, StaleBoot
from kvmanager.journal import journal
from kvmanager.protos import kvmanager_pb2 as pb

CLOSE = [pb.CloseRequest(request_id=1, reason=pb.FINISHED)]


@pytest.fixture
def served(tmp_path):
    with node(tmp_path, "prefill", prefill_toml, pages=64) as running:
        yield running


def kill_daemon(served: Node) -> None:
    kill_and_wait(served.pid_of("daemon"))


def test_engines_go_on_with_the_same_pages_and_the_cache_stays(tmp_path) -> None:
    with (
        node(tmp_path, "prefill", prefill_toml, pages=64) as prefill,
        node(tmp_path, "decode", decode_toml) as decode,
    ):
        tokens = tokens_of(1, 4 * SPAN)
        engine = prefill_engine(prefill.runtime_dir)
        pages = device_pages(engine.open(open_of(1, tokens)))
        fill(engine, pages, 1)
        engine.step([RequestStep(1, len(tokens), 2 * SPAN)])
        decoder = decode_engine(decode.runtime_dir)
        latents = device_pages(decoder.open(open_of(1, tokens_of(2, 60))), "latent")
        decoder.step([RequestStep(1, 60, 60, new_keys=b"")])
        boots = (engine.client.boot_id, decoder.client.boot_id)
        epochs = (engine.client.epoch, decoder.client.epoch)
        attaches = [rank.attach_id for rank in engine.workers.ranks]
        counters = prefill.counters()
        for served in (prefill, decode):
            kill_daemon(served)
        grown = engine.step([RequestStep(1, 6 * SPAN, 4 * SPAN)]).growth[1]
        assert not grown.HasField("error")
        assert grown.spans[0].first_span == 4, "the pages it had, it has"
        decoder.step([RequestStep(1, 64, 60)])
        assert engine.client.boot_id > boots[0]
        assert decoder.client.boot_id > boots[1]
        assert epochs == (engine.client.epoch, decoder.client.epoch)
        assert [rank.attach_id for rank in engine.workers.ranks] == attaches
        check_filled(engine, pages, 1)
        engine.step(closes=CLOSE)
        decoder.step(closes=CLOSE)
        assert run_request(engine, 2, tokens, 1) == 4 * SPAN - SPAN // 2, "all but the last segment, as ever"
        assert len(latents) == 4
        prefill.reopen()
        decode.reopen()
        after = prefill.counters()
        assert after["step"] > counters["step"]
        assert after["prefix_hit_tokens"] > 0
        engine.close()
        decoder.close()
        prefill.wait_at_rest()
        decode.wait_at_rest()
        assert "cold start" not in prefill.log() + decode.log()


def test_a_message_without_an_answer_gets_the_same_pages_again(served: Node) -> None:
    """The daemon dies with the reply in hand; the client library sends again by itself, and a resend by hand agrees."""
    engine = prefill_engine(served.runtime_dir)
    tokens = tokens_of(3, 3 * SPAN)
    message = pb.StepRequest(
        number=1, boot_id=engine.client.boot_id, epoch=engine.client.epoch, fence=engine.workers.fence(),
        open=[open_of(1, tokens)],
    )  # fmt: skip
    stub = engine.client._engine_stub

    def session() -> pb.StepReply:
        call = stub.Session(iter([message]))
        reply = next(call)
        call.cancel()
        return reply

    first = session()
    kill_daemon(served)
    message.boot_id = wait_for_renewal(engine)
    again = session()
    assert again.opened == first.opened
    assert again.number == first.number == 1
    engine.client._number = 1
    engine.step([RequestStep(1, len(tokens), len(tokens))])
    engine.step(closes=CLOSE)
    engine.close()


def wait_for_renewal(engine) -> int:
    """Attaches anew as the client library does; the new boot id, once gRPC is there as well."""
    boots: list[int] = []

    def renewed() -> bool:
        try:
            boots.append(engine.client._renew())
            engine.client._engine_stub.Lookup(
                pb.LookupRequest(boot_id=boots[-1], epoch=engine.client.epoch, keys=b"", prompt_tokens=0)
            )
        except Exception as error:
            return "SUSPECT" in str(error) or "suspect" in str(error)
        return True

    wait_for(renewed)
    return boots[-1]


def test_a_daemon_killed_again_and_again_under_load_loses_nothing(served: Node) -> None:
    engine = prefill_engine(served.runtime_dir)
    stop = threading.Event()
    killed = []

    def kill() -> None:
        while not stop.wait(0.5) and len(killed) < 4:  # the keeper restarts a child five times a minute
            pid = served.pid_of("daemon")
            with contextlib.suppress(ProcessLookupError):
                if pid not in killed:
                    kill_and_wait(pid)
                    killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    cached: dict[int, int] = {}
    try:
        for number in range(100_000):
            seed = number % 5
            cached[seed] = run_request(engine, number, tokens_of(seed, 5 * SPAN), seed)
            if len(killed) == 4:
                break
    finally:
        stop.set()
        killer.join()
    assert len(killed) == 4
    for number in range(200_000, 200_005):
        seed = number % 5
        assert run_request(engine, number, tokens_of(seed, 5 * SPAN), seed) >= 4 * SPAN, "what was committed is hit"
    engine.close()
    served.reopen()
    served.wait_at_rest()


def test_a_mover_that_dies_with_the_daemon_costs_copies_only(served: Node) -> None:
    engine = prefill_engine(served.runtime_dir)
    for seed in range(3):
        run_request(engine, seed, tokens_of(seed, 5 * SPAN), seed)
    mover = served.pid_of("mover")
    os.kill(served.pid_of("daemon"), signal.SIGKILL)
    kill_and_wait(mover)
    for seed in range(3):
        assert run_request(engine, 10 + seed, tokens_of(seed, 5 * SPAN), seed) >= 4 * SPAN
    served.reopen()
    assert served.admin.status().movers[0].pid != mover
    engine.close()
    served.wait_at_rest()


DIES = """
import sys
from pathlib import Path
from nodes_support import *
engine = prefill_engine(Path(sys.argv[1]))
tokens = tokens_of(4, 4 * SPAN)
pages = device_pages(engine.open(open_of(1, tokens)))
fill(engine, pages, 4)
engine.step([RequestStep(1, len(tokens), 2 * SPAN)])
print("holds", flush=True)
sys.stdin.readline()
"""


def test_an_engine_that_dies_while_no_daemon_is_there_is_noticed(served: Node) -> None:
    """Both orders: dead before the new daemon looks, and alive at first, found by the deposited pidfd."""
    with script(DIES, str(served.runtime_dir)) as process:
        says(process, "holds")
        daemon = served.pid_of("daemon")
        os.kill(served.process._process.pid, signal.SIGSTOP)  # no keeper, no new daemon yet
        try:
            kill_and_wait(daemon)
            process.kill()
            process.wait()
        finally:
            os.kill(served.process._process.pid, signal.SIGCONT)
        wait_for(lambda: served.log().count("started the daemon") == 2)
        served.reopen()
        served.wait_at_rest()
        assert list(served.admin.status().engines) == []
    with script(DIES, str(served.runtime_dir)) as process:
        says(process, "holds")
        kill_daemon(served)
        wait_for(lambda: served.log().count("started the daemon") == 3)
        served.reopen()
        assert [engine.state for engine in served.admin.status().engines] == ["suspect"], "it may still write"
        assert any(any(states) for states in served.held().values())
        process.kill()
        served.wait_at_rest()
        assert list(served.admin.status().engines) == []
    engine = prefill_engine(served.runtime_dir)
    assert run_request(engine, 1, tokens_of(4, 4 * SPAN), 4) == 2 * SPAN
    engine.close()


def journal_fd(served: Node) -> int:
    """The journal of a running node, as its keeper holds it."""
    folder = Path(f"/proc/{served.process._process.pid}/fd")
    for link in folder.iterdir():
        if "kvmanager:journal" in os.readlink(link):
            return os.open(link, os.O_RDWR)
    raise AssertionError("the keeper holds no journal")


def test_a_torn_journal_gives_back_all_that_was_whole(served: Node) -> None:
    engine = prefill_engine(served.runtime_dir)
    run_request(engine, 1, tokens_of(1, 5 * SPAN), 1)
    os.kill(served.process._process.pid, signal.SIGSTOP)
    fd = journal_fd(served)
    kill_daemon(served)
    # Half a record behind the last whole one: what a kill in the middle of an append leaves.
    with open(fd, "r+b", buffering=0) as file:
        half = journal.HALF_BYTES
        for base in (4096, 4096 + half):
            file.seek(base)
            head = file.read(journal._HEAD.size)
            if head[:8] != journal._MAGIC:
                continue
            at = base + journal._HEAD.size + journal._HEAD.unpack(head)[5]
            while True:
                file.seek(at)
                length, _ = journal._RECORD.unpack(file.read(journal._RECORD.size))
                if length == 0:
                    break
                at += journal._RECORD.size + length
            file.seek(at)
            file.write(journal._RECORD.pack(300, 12345) + b"torn" * 20)
    os.kill(served.process._process.pid, signal.SIGCONT)
    assert run_request(engine, 2, tokens_of(1, 5 * SPAN), 1) >= 4 * SPAN
    engine.close()
    served.reopen()
    served.wait_at_rest()


WRONG = {
    "smaller": lambda text: re.sub(r"host_bytes_per_rank = \d+", f"host_bytes_per_rank = {20 * PAGE_BYTES}", text),
    "broken": lambda text: text + "\n[nonsense\n",
}


@pytest.mark.parametrize(("what", "why"), [("smaller", "another configuration"), ("broken", "not valid TOML")])
def test_memory_is_held_while_no_daemon_can_go_on_with_it(tmp_path, what: str, why: str) -> None:
    with node(tmp_path, "prefill", prefill_toml, pages=64) as served:
        engine = prefill_engine(served.runtime_dir)
        tokens = tokens_of(1, 4 * SPAN)
        run_request(engine, 1, tokens, 1)
        config = next(tmp_path.rglob("*.toml"))
        right = config.read_text()
        config.write_text(WRONG[what](right))
        boot_id = engine.client.boot_id
        kill_daemon(served)
        wait_for(lambda: (served.runtime_dir / "refused.txt").exists(), served.log)
        status = command("status", served)
        assert status.returncode == 3
        for said in ("refused adoption", why, "kvmanager serve --cold", "kvmanager upgrade"):
            assert said in status.stderr, said
        keeper_log = served.log().count("started the daemon")
        assert served.process._process.poll() is None, "the node lives"
        config.write_text(right)
        upgraded = command("upgrade", served)
        assert upgraded.returncode == 0, upgraded.stderr
        assert served.log().count("started the daemon") == keeper_log + 1
        assert not (served.runtime_dir / "refused.txt").exists()
        assert run_request(engine, 2, tokens, 1) == 4 * SPAN - SPAN // 2, "nothing was lost"
        assert engine.client.boot_id > boot_id
        assert "cold start" not in served.log()
        engine.close()


def test_a_node_that_waits_for_its_operator_stops_when_told(tmp_path) -> None:
    with node(tmp_path, "prefill", prefill_toml, pages=64) as served:
        config = next(tmp_path.rglob("*.toml"))
        config.write_text(WRONG["smaller"](config.read_text()))
        kill_daemon(served)
        wait_for(lambda: (served.runtime_dir / "refused.txt").exists(), served.log)
        served.process._process.send_signal(signal.SIGTERM)
        assert served.process._process.wait(20) == 0
        assert not (served.runtime_dir / "refused.txt").exists()


def command(word: str, served: Node) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "kvmanager.command.cli", word, "--runtime-dir", str(served.runtime_dir)]
    return subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)


def test_a_client_of_a_cold_daemon_is_told_to_register_again(tmp_path) -> None:
    with node(tmp_path, "prefill", prefill_toml) as first:
        engine = prefill_engine(first.runtime_dir)
        engine.step()
    with node(tmp_path, "prefill", prefill_toml) as second:
        with pytest.raises(StaleBoot, match="register again"):
            engine.step()
        with contextlib.suppress(KVError):
            engine.close()
        again = prefill_engine(second.runtime_dir)
        assert run_request(again, 1, tokens_of(1, 2 * SPAN), 1) == 0
        again.close()


def test_the_word_of_a_rank_is_its_own_for_good(served: Node) -> None:
    """Words go on where they were: a rank that attaches after a restart gets none that another ever had."""
    engine = prefill_engine(served.runtime_dir)
    words = {rank._word for rank in engine.workers.ranks}
    kill_daemon(served)
    engine.step()
    engine.close()
    other = prefill_engine(served.runtime_dir, "other")
    assert not words & {rank._word for rank in other.workers.ranks}
    other.close()


def test_keys_say_which_prefix_is_cached_after_a_restart(served: Node) -> None:
    engine = prefill_engine(served.runtime_dir)
    run_request(engine, 1, tokens_of(9, 4 * SPAN), 9)
    kill_daemon(served)
    engine.step()
    reply = engine.client._engine_stub.Lookup(
        pb.LookupRequest(
            boot_id=engine.client.boot_id, epoch=engine.client.epoch, keys=keys_of(tokens_of(9, 4 * SPAN)),
            prompt_tokens=4 * SPAN,
        )
    )  # fmt: skip
    assert reply.cached_tokens == 4 * SPAN
    engine.close()


def test_cold_is_a_word_of_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvmanager.command.cli", "serve", "--help"], capture_output=True, text=True, check=True
    )
    assert "--cold" in done.stdout


def test_an_upgrade_under_load_keeps_engines_attached(served: Node) -> None:
    """They pause and go on, with the same pages; the journal is one snapshot, which a newer core may read."""
    engine = prefill_engine(served.runtime_dir)
    boot_id, epoch = engine.client.boot_id, engine.client.epoch
    command = [sys.executable, "-m", "kvmanager.command.cli", "upgrade", "--runtime-dir", str(served.runtime_dir)]
    upgrade = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
    number = 0
    while upgrade.poll() is None or number < 5:
        run_request(engine, number, tokens_of(number % 5, 5 * SPAN), number % 5)
        number += 1
    report = upgrade.communicate()[0]
    assert upgrade.returncode == 0, report
    assert json.loads(report)["boot_id"] > boot_id
    assert run_request(engine, number, tokens_of(0, 5 * SPAN), 0) >= 4 * SPAN
    assert engine.client.boot_id == json.loads(report)["boot_id"]
    assert engine.client.epoch == epoch
    assert "0 events, replayed" in served.log()
    assert "restart in" not in served.log(), "no death is counted"
    engine.close()
    served.reopen()
    served.wait_at_rest()


def test_an_upgrade_to_another_configuration_is_refused_and_changes_nothing(tmp_path) -> None:
    with node(tmp_path, "prefill", prefill_toml, pages=64) as served:
        engine = prefill_engine(served.runtime_dir)
        engine.step()
        config = next(tmp_path.rglob("*.toml"))
        smaller = re.sub(r"host_bytes_per_rank = \d+", f"host_bytes_per_rank = {20 * PAGE_BYTES}", config.read_text())
        config.write_text(smaller)
        boot_id = engine.client.boot_id
        with pytest.raises(KVError, match="another configuration"):
            served.admin.upgrade()
        engine.step()
        assert engine.client.boot_id == boot_id
        engine.close()
