"""Two engines with vLLM's connector, but not vLLM, on two nodes: one prefills, the other goes on or computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from connector_engine import ConnectorEngine
from nodes_support import Node, kill_and_wait, node, wait_for
from test_node_cache_handoff import HEADS, LAYERS, ROW, ROWS, TOKENS, namespace, toml

from kvmanager.errors import InvalidArgument

PREFILL = {"do_remote_decode": True}


def prompt(seed: int, count: int = TOKENS) -> list[int]:
    return [(seed * 7919 + place * 31) % 997 for place in range(count)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    lease = "ticket_ttl_ms = 3000\ngrace_ms = 100"
    with node(tmp_path_factory.mktemp("source"), "source", toml, lease=lease) as running:
        yield running


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("target"), "target", toml) as running:
        yield running


def engine(at: Node, side: str) -> ConnectorEngine:
    return ConnectorEngine(
        at.runtime_dir, f"vllm-{side}", namespace(ROWS[side]), rows=ROWS[side], shape=(LAYERS, HEADS, ROW // 4)
    )


@pytest.fixture
def prefill(source: Node) -> Iterator[ConnectorEngine]:
    held = engine(source, "source")
    yield held
    held.rest()
    held.close()
    source.wait_at_rest()


@pytest.fixture
def decode(target: Node) -> Iterator[ConnectorEngine]:
    held = engine(target, "target")
    yield held
    held.rest()
    held.close()
    target.wait_at_rest()


def test_blocks_that_were_stored_before_are_handed_over_with_their_sums(
    source: Node, prefill: ConnectorEngine, decode: ConnectorEngine
) -> None:
    """The first blocks of the prompt lie in the cache already, stored by leases with checksums."""
    tokens = prompt(77)
    summed = source.counters()["summed_page"]
    prefill.serve("before", tokens[: 5 * ROWS["source"]])
    prefill.rest()
    wait_for(lambda: source.counters()["summed_page"] >= summed + 5)
    told = prefill.serve("p", tokens, PREFILL).ended
    got = decode.serve("d", tokens, told)
    assert (got.loaded, got.computed) == (TOKENS, 0)
    assert decode.right(got)


def test_the_decoding_engine_computes_nothing(
    source: Node, target: Node, prefill: ConnectorEngine, decode: ConnectorEngine
) -> None:
    before = target.counters()["handoff"]
    first = prefill.serve("a", prompt(1), PREFILL)
    assert first.ended
    assert first.ended["do_remote_prefill"]
    got = decode.serve("a", prompt(1), first.ended)
    assert (got.loaded, got.computed) == (TOKENS, 0), "the last block's part, too"
    assert decode.right(got)
    wait_for(lambda: not source.admin.leases().leases)
    again = decode.serve("b", prompt(1))
    assert again.loaded == TOKENS // ROWS["target"] * ROWS["target"], "it is in the target's cache now"
    assert decode.right(again)
    assert target.counters()["handoff"] == before + 1
    assert prefill.serve("c", prompt(1)).loaded >= TOKENS // ROWS["source"] * ROWS["source"] - ROWS["source"]


def test_in_chunks_while_the_other_engine_waits_for_them(
    source: Node, prefill: ConnectorEngine, decode: ConnectorEngine
) -> None:
    first = prefill.add("a", prompt(2), PREFILL)
    prefill.until(lambda: bool(source.admin.leases().leases), most=0)
    prefill.until(lambda: first.ended is not None, most=50)
    second = decode.add("a", prompt(2), first.ended)
    decode.until(lambda: second.ended is not None)
    assert second.loaded == TOKENS
    assert decode.right(second)


def test_an_aborted_prefill_hands_nothing_over(source: Node, prefill: ConnectorEngine) -> None:
    held = prefill.add("a", prompt(3), PREFILL)
    prefill.until(lambda: held.computed > 0, most=50)
    prefill.abort("a")
    assert held.ended == {}
    prefill.rest()
    wait_for(lambda: not source.admin.leases().leases)


def test_an_abort_while_it_is_pulled(source: Node, prefill: ConnectorEngine, decode: ConnectorEngine) -> None:
    first = prefill.serve("a", prompt(4), PREFILL)
    for steps in (1, 2, 5):
        decode.add(f"b{steps}", prompt(4), first.ended)
        for _ in range(steps):
            decode.step()
        if decode.running[f"b{steps}"].ended is None:
            decode.abort(f"b{steps}")
        decode.rest()
    wait_for(lambda: not source.admin.leases().leases)


def test_an_expired_ticket_costs_a_prefill(source: Node, prefill: ConnectorEngine, decode: ConnectorEngine) -> None:
    first = prefill.serve("a", prompt(5), PREFILL)
    prefill.rest()
    wait_for(lambda: not source.admin.leases().leases)
    got = decode.serve("a", prompt(5), first.ended)
    assert (got.loaded, got.computed) == (0, TOKENS)
    assert decode.right(got)


def test_a_ticket_of_another_prompt_is_not_used(prefill: ConnectorEngine, decode: ConnectorEngine) -> None:
    first = prefill.serve("a", prompt(6), PREFILL)
    assert first.ended
    ticket = first.ended["kvmanager_ticket"]
    for name, tokens, told in (("a", prompt(7), ticket), ("b", prompt(6), {**ticket, "unknown": 1})):
        got = decode.serve(name, tokens, {**first.ended, "kvmanager_ticket": told})
        assert (got.loaded, got.computed) == (0, TOKENS)
        assert decode.right(got)
    for told, why in (({"ticket": 1}, "on 0 tokens"), ({"committed_tokens": "x"}, "no ticket"), ([1], "no ticket")):
        with pytest.raises(InvalidArgument, match=why):
            decode.add("c", prompt(6), {**first.ended, "kvmanager_ticket": told})


def test_the_source_is_gone(decode: ConnectorEngine, tmp_path_factory: pytest.TempPathFactory) -> None:
    with node(tmp_path_factory.mktemp("short"), "source", toml) as short:
        held = engine(short, "source")
        first = held.serve("a", prompt(8), PREFILL)
        held.rest()
        held.close()
    got = decode.serve("a", prompt(8), first.ended)
    assert (got.loaded, got.computed) == (0, TOKENS)
    assert decode.right(got)


def test_a_daemon_dies_while_it_pulls(source: Node, target: Node, prefill: ConnectorEngine) -> None:
    """Whatever had landed by then: the decoding engine goes on, with the right bytes."""
    decode = engine(target, "target")
    decode.serve("warm", prompt(90, 20))
    first = prefill.serve("a", prompt(9), PREFILL)
    held = decode.add("a", prompt(9), first.ended)
    decode.step(0)
    kill_and_wait(target.pid_of("daemon"))
    decode.until(lambda: held.ended is not None)
    assert decode.right(held)
    target.reopen()
    other = prefill.serve("b", prompt(10), PREFILL)
    decode.until(lambda: decode.link.up)
    got = decode.serve("b", prompt(10), other.ended)
    assert got.loaded == TOKENS
    assert decode.right(got)
    decode.rest()
    decode.close()
    target.wait_at_rest()
    wait_for(lambda: not source.admin.leases().leases)
