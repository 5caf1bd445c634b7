"""An engine whose client is older than the node's daemon: told so once, it computes everything itself."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest
from nodes_support import Node, node
from vllm_support import Engine, attach, cache_toml, checkpoint, prompt, reference, skip_without_vllm, wait_for

from kvmanager import __version__
from kvmanager.wire import WIRE_VERSION

pytestmark = pytest.mark.vllm
TOKENS = prompt(7, 300)
SAID = "refused, the engine runs without the cache: "
METRICS = """
[metrics]
listen = "127.0.0.1:0"
[tls]
plain_loopback = true
"""


def refusals(served: Node) -> int:
    """Registrations that the daemon did not take, as its metrics count them."""
    port = re.findall(r"metrics and probes on 127\.0\.0\.1:(\d+)", served.log())[-1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    counts = re.findall(r'rpc_duration_seconds_count\{code="(\w+)",method="Register"\} (\S+)', text)
    return sum(int(float(count)) for code, count in counts if code != "OK")


def test_an_engine_with_an_older_client_goes_on_without_the_cache(tmp_path: Path) -> None:
    skip_without_vllm()
    model = checkpoint("llama", tmp_path / "llama")
    expected = reference(model, [TOKENS], 16)[0]
    with (
        node(tmp_path, "cache", cache_toml, more=METRICS) as served,
        Engine(model, served.runtime_dir, tmp_path / "log", wire_version=WIRE_VERSION - 1) as engine,
    ):
        for times in (1, 2, 3):  # it asks again and again
            wait_for(lambda times=times: refusals(served) >= times, "the daemon was not asked")
            answer = engine.generate(TOKENS)
            assert answer["tokens"] == [expected]
            assert answer["cached"] == [0]
            assert answer["reasons"] == ["length"]
            assert engine.ask("reset")["reset"], "some block was kept for a save"
        assert engine.ask("metrics")["vllm:external_prefix_cache_hits"] == 0
        assert served.counters()["stored_tokens"] == 0
        assert not served.admin.status().engines
        said = engine.log.read_text() + "".join(engine.logged)
        assert said.count(SAID) == 1
        line = said[said.index(SAID) :].partition("\n")[0]
        assert f"(wire version {WIRE_VERSION - 1}), older than this daemon, {__version__}" in line
        assert "install the same version on both sides" in line
        assert "the node's configuration needs" not in said, "no configuration helps"
        assert "the cache is off" not in said
        assert not re.findall(r'File "[^"]*kvmanager/clients/.*', said), "a traceback of the connector's"

        # Once both are the same, it is let in, with no more ado.
        engine.ask("speak", version=WIRE_VERSION)
        attach(engine, served)
        assert engine.generate(TOKENS)["tokens"] == [expected]

        def stored() -> bool:
            engine.generate(prompt(98, 8), tokens=4)
            return served.counters()["stored_tokens"] >= 288

        wait_for(stored, "nothing was stored")
        engine.ask("reset")
        answer = engine.generate(TOKENS)
        assert answer["tokens"] == [expected]
        assert answer["cached"][0] >= 288
