"""Every memory mode on the memory of a real daemon: the tokens of the run on one rank (float64, fp8 rows, drafts)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from mode_engine import MODES, OUTPUT, RANKS, ROWS, Mode, ModeEngine, expected, prompt_of
from nodes_support import PAGE_BYTES, SLAB_BYTES, Node, kill_and_wait, node

from kvmanager.clients.decode_engine import DecodeEngine, DecodeWork
from kvmanager.clients.glm.attention import ShortPrompts
from kvmanager.clients.glm.config import TINY
from kvmanager.core.spec import Residency
from kvmanager.demo.nodes import NAMESPACE
from kvmanager.protos import kvmanager_pb2 as pb
from tests.glm_ranks import plain_model

PAGES = 24
HOT_ROWS = 4 * TINY.index_topk
GROUPS = {"one": ("sharded", 1), "copies": ("replicated", RANKS), "shards": ("sharded", RANKS)}


def modes_toml(runtime_dir: Path, *, name: str) -> str:
    """A group for each kind of prefill and decode rank that has all its pages in HBM."""
    head = f'[node]\nname = "{name}"\nruntime_dir = "{runtime_dir}"\nspare = false\n'
    head += '[mover]\nstaging_bytes = "4 MiB"\nchunk_bytes = "1 MiB"\n'
    return head + "".join(
        f"""
[[group]]
name = "{group}"
kind = "{kind}"
format = "{TINY.format.name}"
ranks = {ranks}
page_rows = {ROWS}
hbm_bytes_per_rank = {PAGES * PAGE_BYTES}
host_bytes_per_rank = {3 * PAGES * PAGE_BYTES}
"""
        for group, (kind, ranks) in GROUPS.items()
    )


def sparse_toml(runtime_dir: Path, *, name: str, slabs: int = 22) -> str:
    """HiSparse ranks, one for each residency; token order as it comes, or permuted."""
    head = f'[node]\nname = "{name}"\nruntime_dir = "{runtime_dir}"\nspare = false\n'
    head += '[mover]\nstaging_bytes = "4 MiB"\nchunk_bytes = "1 MiB"\n'
    return head + "".join(
        f"""
[[group]]
name = "{residency}"
kind = "hisparse"
format = "{TINY.format.name}"
ranks = 1
page_rows = {ROWS}
hbm_bytes_per_rank = {slabs * SLAB_BYTES}
host_bytes_per_rank = {60 * SLAB_BYTES}
token_order = "{'sequential' if residency is Residency.ALWAYS_HOST else 'keep'}"
source_ranks = {RANKS}
source_interleave = 1
hot_rows = {HOT_ROWS}
residency = "{residency}"
"""
        for residency in Residency
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("prefill"), "prefill", modes_toml) as running:
        yield running


@pytest.fixture
def engine_of(served: Node) -> Iterator[Callable[..., ModeEngine]]:
    """Engines on the node; closed at the end, after which nothing is held there."""
    engines: list[ModeEngine] = []

    def make(mode: Mode, short: ShortPrompts = ShortPrompts.MQA) -> ModeEngine:
        engines.append(ModeEngine(served.runtime_dir, f"engine-{len(engines)}", mode, short))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    served.wait_at_rest()


CASES = [(name, short) for name in MODES for short in ShortPrompts]
QUICK = [("DP", "mqa"), ("TP", "mqa"), ("PCP", "mha"), ("PCPxDCP", "mqa")]


@pytest.mark.parametrize(
    ("name", "short"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.long) for case in CASES],
    ids=[f"{name}-{short}" for name, short in CASES],
)
def test_a_mode_gives_the_tokens_of_one_rank(
    served: Node, engine_of: Callable[..., ModeEngine], name: str, short: ShortPrompts
) -> None:
    """Computed anew, hit in part, from the host after HBM was used up, and after another daemon took over midway."""
    seed = 10 + CASES.index((name, short))
    prompt, engine = prompt_of(seed), engine_of(MODES[name], short)
    first = engine.answer(prompt)
    assert first.cached == 0
    first.check(seed)

    again = engine.answer(prompt)
    assert again.cached >= 64, "its own pages"
    again.check(seed)

    onboards = served.counters()["onboard"]
    engine.displace(seed, 8)
    third = engine.prefill(prompt)
    assert served.counters()["onboard"] > onboards
    assert third.cached >= 64
    boot_id = engine.engine.client.boot_id
    if short is ShortPrompts.MQA:
        kill_and_wait(served.pid_of("daemon"))
    while len(third.answer) < OUTPUT:
        engine.decode(third)
    third.check(seed)
    engine.close_request(third)
    if short is ShortPrompts.MQA:
        assert engine.engine.client.boot_id > boot_id
        served.reopen()
        fourth = engine.answer(prompt)
        assert fourth.cached >= 64, "the next daemon knows what the last one kept"
        fourth.check(seed)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("decode"), "decode", sparse_toml) as running:
        yield running


@pytest.mark.parametrize(
    "residency",
    [pytest.param(kind, marks=pytest.mark.long if kind is Residency.ALWAYS_HOST else ()) for kind in Residency],
)
def test_a_decode_rank_gives_the_same_tokens_after_the_hand_off(
    target: Node, engine_of: Callable[..., ModeEngine], residency: Residency
) -> None:
    """Two requests on one rank, in memory too small for both; its daemon dies in the middle."""
    source = engine_of(MODES["PCPxDCP"])
    seeds = [40 + 2 * list(Residency).index(residency) + number for number in range(2)]
    before = target.counters()
    decoder = DecodeEngine(
        target.runtime_dir, f"decoder-{residency}", group=residency, namespace=NAMESPACE, page_rows=ROWS,
        hot_rows=HOT_ROWS, model=plain_model(),
    )  # fmt: skip
    try:
        asked = {}
        for seed in seeds:
            request = source.prefill(prompt_of(seed))
            ticket = source.engine.client.export(request.request_id)
            source.close_request(request)
            work = DecodeWork(
                np.asarray(prompt_of(seed)), request.answer[0], ticket, OUTPUT, pb.SessionHint(session_id=str(seed)), ""
            )
            asked[decoder.submit(work)] = seed
        answers, swapped, steps = {}, 0, 0
        while not decoder.idle:
            for decoded in decoder.step().finished:
                answers[asked[decoded.request_id]] = list(decoded.tokens)
                swapped += decoded.swap_in_rows
            steps += bool(decoder.running)
            if steps == 2:
                boot_id = decoder._engine.client.boot_id
                kill_and_wait(target.pid_of("daemon"))
        assert decoder._engine.client.boot_id > boot_id
    finally:
        decoder.close()
    assert answers == {seed: expected(seed) for seed in seeds}
    target.reopen()
    target.wait_at_rest()
    counters = target.counters()
    assert counters["handoff"] - before["handoff"] == 2
    assert (swapped > 0) == (residency is not Residency.OFFLOAD_ONLY)
