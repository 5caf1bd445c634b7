"""Prefill and decode in two real engines on two nodes; the decoding one has blocks twice as large."""

from __future__ import annotations

from pathlib import Path

import pytest
from nodes_support import node
from vllm_support import BLOCK, Engine, cache_toml, checkpoint, prompt, reference, skip_without_vllm, wait_for

pytestmark = pytest.mark.vllm
TOKENS = 16
PROMPT = prompt(1, 815)
"""Whole blocks on neither side."""


def loaded(engine: Engine) -> int:
    """Tokens that came from outside; outputs of such requests name what the prefilling engine had cached."""
    return int(engine.ask("metrics")["vllm:external_prefix_cache_hits"])


def test_the_decoding_engine_goes_on_where_the_prefilling_one_stopped(tmp_path: Path) -> None:
    skip_without_vllm()
    model = checkpoint("llama", tmp_path / "llama")
    expected = reference(model, [PROMPT, prompt(2, 500)], TOKENS)
    with (
        node(tmp_path, "prefill", cache_toml, more="[lease]\nticket_ttl_ms = 20000\ngrace_ms = 100\n") as source,
        node(tmp_path, "decode", cache_toml, rows=2 * BLOCK, pages=256) as target,
        Engine(model, source.runtime_dir, tmp_path / "p.log") as prefill,
        Engine(model, target.runtime_dir, tmp_path / "d.log", block_size=2 * BLOCK) as decode,
    ):
        for engine in (prefill, decode):
            engine.generate(prompt(99, 40), tokens=4)  # the ranks are attached from here on
        first = prefill.generate(PROMPT, tokens=1, transfer={"do_remote_decode": True})
        assert first["tokens"] == [expected[0][:1]]
        told = first["transfer"][0]
        assert told["do_remote_prefill"], prefill.log.read_text()[-2000:]
        got = decode.generate(PROMPT, tokens=TOKENS, transfer=told)
        assert got["tokens"] == [expected[0]]
        assert loaded(decode) == len(PROMPT), "all of it, the last block's part, too"
        assert target.counters()["handoff"] == 1
        wait_for(lambda: not source.admin.leases().leases, "the ticket was not given back")

        # A ticket that has expired costs a prefill; one of another prompt is not used.
        late = prefill.generate(prompt(2, 500), tokens=1, transfer={"do_remote_decode": True})["transfer"][0]
        assert decode.generate(PROMPT, tokens=TOKENS, transfer=late)["tokens"] == [expected[0]]
        wait_for(lambda: not source.admin.leases().leases, "the ticket did not expire", seconds=60)
        before = loaded(decode)
        got = decode.generate(prompt(2, 500), tokens=TOKENS, transfer=late)
        assert got["tokens"] == [expected[1]]
        assert loaded(decode) == before

        # A decode that is aborted while it waits or loads leaves nothing behind.
        told = prefill.generate(prompt(3, 700), tokens=1, transfer={"do_remote_decode": True})["transfer"][0]
        for steps in (1, 3):
            after = decode.ask("abort", prompts=[prompt(3, 700), PROMPT], steps=steps, transfer=told)
            assert after["tokens"] == [expected[0]]
        decode.generate(prompt(97, 8), tokens=4)
        target.wait_at_rest()
        assert decode.ask("reset")["reset"], "some block of an aborted request was never given back"
        wait_for(lambda: not source.admin.leases().leases, "the ticket was not given back", seconds=60)
