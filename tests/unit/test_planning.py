"""The planner against the layout's published numbers, the core at work, and the configuration that it writes.

What is expected is computed here from bytes alone; a plan's numbers come from the core, so the two check each other.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvmanager.command.cli import app
from kvmanager.configuration.groups import core_limits, plan_memory
from kvmanager.configuration.reading import read_config
from kvmanager.configuration.sizing import size_of
from kvmanager.core.events import Attached, AttachRank, Opened, Registered, RegisterEngine
from kvmanager.core.leaseevents import ReserveSpans
from kvmanager.errors import InvalidArgument, PoolExhausted
from kvmanager.planning.capacity import keys_of, most_at_once
from kvmanager.planning.models import Model, load_model
from kvmanager.planning.modes import DECODE, PREFILL, Machine, Mode, config_of
from kvmanager.planning.plan import ModePlan, Plan, make_plan
from kvmanager.simulation.rates import link_rates
from kvmanager.simulation.virtual import VirtualNode

GIB = 1 << 30
PAGE, SLAB = 3_502_592, 3_345_408
PUBLISHED = Machine(8, 15 * GIB, 512 * GIB)
LENGTHS = (142_000, 256_000, 1_048_576)
GLM = load_model("glm-5.3")
ONE_GPU = (Mode.DP, Mode.TP, Mode.PCP, Mode.OFFLOAD_ONLY)


def up(a: int, b: int) -> int:
    return -(-a // b)


@cache
def planned(machine: Machine, lengths: tuple[int, ...] = LENGTHS, model: Model = GLM, *, decode: bool = False) -> Plan:
    return make_plan(model, machine, lengths, lengths[-1], decode, 64, link_rates())


def by_mode(plan: Plan) -> dict[Mode, ModePlan]:
    return {line.mode: line for line in plan.modes}


def test_the_published_node() -> None:
    modes = by_mode(planned(PUBLISHED))
    for mode in ONE_GPU:
        assert (modes[mode].longest_tokens, modes[mode].hbm_pages_per_rank) == (294_272, 4_598)
        assert not modes[mode].holds(1_048_576)
    assert modes[Mode.PCP_DCP].longest_tokens == 1_048_576
    assert {mode: line.workspace_bytes for mode, line in modes.items() if line.workspace_bytes} == {
        Mode.PCP_DCP: 2 * 788 * 1_048_576
    }
    assert modes[Mode.HISPARSE].holds(1_048_576)
    assert modes[Mode.HISPARSE].hbm_pages_per_rank == 4_814
    counts = {mode: [length.at_once for length in line.lengths] for mode, line in modes.items()}
    assert counts[Mode.PCP_DCP] == [4_598 // up(tokens, 512) for tokens in LENGTHS] == [16, 9, 2]
    assert counts[Mode.DP] == counts[Mode.OFFLOAD_ONLY] == [16, 8, 0]
    assert counts[Mode.TP] == counts[Mode.PCP] == [2, 1, 0]
    assert counts[Mode.HISPARSE] == [80, 40, 8]
    cached = {mode: [length.cached for length in line.lengths] for mode, line in modes.items()}
    assert cached[Mode.PCP_DCP] == [19_619 // up(tokens, 512) for tokens in LENGTHS]
    assert cached[Mode.TP] == [8 * 19_619 // up(tokens, 64) for tokens in LENGTHS], "one copy a node, not one a rank"
    assert cached[Mode.HISPARSE] == [8 * (19_459 // up(tokens, 64)) for tokens in LENGTHS]


def test_times_are_bytes_over_the_committed_rates() -> None:
    rates = link_rates()
    modes = by_mode(planned(PUBLISHED))
    for line in modes.values():
        for length in line.lengths:
            assert length.bytes == 54_728 * length.tokens
            assert length.handoff_s["nic"] == pytest.approx(length.bytes / rates.nic_bytes_per_s)
            shards = 8 if line.mode is Mode.PCP_DCP else 1
            assert length.onboard_s == pytest.approx(length.bytes / shards / rates.host_to_device_bytes_per_s)


@pytest.mark.parametrize("seed", range(6))
def test_whole_pages_decide_and_more_memory_never_holds_less(seed: int) -> None:
    dice = random.Random(seed)
    gpus = dice.choice((1, 2, 4, 8))
    tokens = dice.randrange(1, 40_000)
    before: dict[Mode, ModePlan] = {}
    for hbm in sorted(dice.randrange(700 << 20, 3 * GIB) for _ in range(2)):
        machine = Machine(gpus, hbm, dice.randrange(1, 4) * gpus * GIB)
        modes = by_mode(planned(machine, (tokens,)))
        pages = hbm // PAGE
        for mode in (*PREFILL, Mode.OFFLOAD_ONLY):
            line = modes[mode]
            span, groups = (64 * gpus, 1) if mode is Mode.PCP_DCP else (64, 1 if mode in (Mode.TP, Mode.PCP) else gpus)
            assert line.longest_tokens == min(pages * span, GLM.max_tokens), (seed, mode)
            assert line.lengths[0].at_once == groups * (pages // up(tokens, span)), (seed, mode)
        for mode, line in modes.items():
            if mode in before and mode is not Mode.HISPARSE:
                assert line.longest_tokens >= before[mode].longest_tokens, (seed, mode)
                assert line.lengths[0].at_once >= before[mode].lengths[0].at_once, (seed, mode)
        before = modes


@pytest.mark.parametrize("seed", range(6))
def test_a_decode_rank_holds_what_its_slabs_allow(seed: int) -> None:
    """Every latent page has a home; indexer pages, hot buffers and tails are in HBM. A few slabs may be left over."""
    dice = random.Random(seed)
    hbm, host, tokens = dice.randrange(4, 10) * GIB, dice.randrange(2, 20) * GIB, dice.randrange(512, 60_000)
    spec = plan_memory(config_of(Mode.HISPARSE, GLM, Machine(8, hbm, 8 * host), 64, Path("/tmp/n"))).groups[0]
    count = most_at_once(spec, tokens, core_limits(config_of(Mode.HISPARSE, GLM, PUBLISHED, 64, Path("/tmp/n"))))
    latents = 8 * up(tokens, 512)
    floor = 160 + up(latents, 18) + min(latents, 16)  # hot buffer, indexer pages, tail
    hbm_slabs, host_slabs = hbm // SLAB, host // SLAB

    def might(n: int, slack: int) -> bool:
        if n * (floor - min(latents, 16) + min(latents, 8) - 1) > hbm_slabs + slack:
            return False
        return n * (latents + 160 + latents // 18) <= hbm_slabs + host_slabs + slack

    assert count >= 1, seed
    assert might(count, 0), (seed, count)
    # One more, each with a span that is split between the tiers, would not have had room.
    assert not might(count + 1, -(count + 1) * 26), (seed, count)


@pytest.mark.parametrize("mode", [*PREFILL, *DECODE])
def test_the_written_file_is_a_node_s_configuration(mode: Mode, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    asked = ["plan", "--mode", mode.value, "--write", str(file), "--runtime-dir", str(tmp_path / "run"), "--json"]
    result = CliRunner().invoke(app, [*asked, "--context", "20000", "--hbm-free", "2GiB", "--host", "16GiB"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["written"] == str(file)
    assert told["recommended"] == "pcp-dcp", "613 // 40 requests against 8 * (613 // 313)"
    line = next(entry for entry in told["modes"] if entry["mode"] == mode.value)
    config = read_config(file)
    assert sum(not group.workspace_for for group in config.groups) == line["groups"]
    held = sum(group.planned_bytes for group in config.groups if group.workspace_for)
    assert held == 8 * line["workspace_bytes"], "one a GPU"
    assert (held > 0) == (mode is Mode.PCP_DCP)
    sizing = size_of(config, line["longest_tokens"])
    assert all(fit.refusal is None for fit in sizing.fits)
    assert [dict(vars(pool)) for pool in sizing.pools][: len(line["pools"])] == line["pools"]
    checked = CliRunner().invoke(app, ["config", "check", str(file), "--tokens", "20000", "--json"])
    assert checked.exit_code == 0, checked.output


def test_what_is_recommended() -> None:
    assert planned(PUBLISHED).recommended is Mode.PCP_DCP
    assert planned(PUBLISHED, decode=True).recommended is Mode.HISPARSE
    assert planned(PUBLISHED, (142_000,), decode=True).recommended is Mode.HISPARSE
    none = planned(Machine(8, GIB, 8 * GIB))
    assert none.recommended is None
    assert none.reason.endswith(f"the longest that fits is {306 * 512}")


PLAIN = 'name = "{0}"\nmax_tokens = 131072\n[{1}]\nlayers = {2}\n{3}\ndtype = "bfloat16"\n'
LLAMA = PLAIN.format("llama", "gqa", 80, "heads = 8\nhead_bytes = 512")
MLA = PLAIN.format("mla", "mla", 61, "row_bytes = 1152")


@pytest.mark.parametrize(("text", "token_bytes", "on_one"), [(LLAMA, 327_680, 40_960), (MLA, 70_272, 70_272)])
def test_other_models(text: str, token_bytes: int, on_one: int, tmp_path: Path) -> None:
    """What the host of a tensor-parallel node holds is what its engines can really store there."""
    file = tmp_path / "model.toml"
    file.write_text(text)
    model = load_model(str(file))
    assert model.kv_format.token_bytes == token_bytes
    machine = Machine(8, 4 * GIB, 16 * GIB)
    plan = planned(machine, (20_000,), model)
    line = by_mode(plan)[Mode.TP]
    pages = 4 * GIB // (64 * on_one)
    assert (line.hbm_pages_per_rank, line.longest_tokens) == (pages, min(64 * pages, 131_072))
    assert line.lengths[0].at_once == pages // up(20_000, 64)
    assert by_mode(plan)[Mode.HISPARSE].why_not
    spec = plan_memory(config_of(Mode.TP, model, machine, 64, Path("/tmp/n"))).groups[0]
    node = VirtualNode([spec], core_limits(config_of(Mode.TP, model, machine, 64, Path("/tmp/n"))))
    prints = (spec.chains[0].classes[0].layout.fingerprint,)
    registered = node.apply(RegisterEngine("e", spec.name, b"", 16, 64, prints, 8), 0)
    assert isinstance(registered, Registered)
    for rank in range(8):
        assert isinstance(node.apply(AttachRank("e", registered.epoch, rank, rank), 0), Attached)
    stored, segments = 0, up(20_000, 64)
    while True:
        try:
            reply = node.apply(
                ReserveSpans("e", registered.epoch, stored + 1, keys_of(stored + 1, segments), 10**9), stored
            )
        except PoolExhausted:
            break
        assert isinstance(reply, Opened)
        if sum(len(run.first_tokens) for run in reply.spans) < segments:
            break
        stored += 1
    assert stored == line.lengths[0].cached > 0


@pytest.mark.parametrize(
    "text",
    [
        "", 'name = "x"', "name = ", LLAMA.replace("heads = 8", "heads = 0"), LLAMA.replace("heads = 8", 'heads = "8"'),
        LLAMA + "more = 1\n", LLAMA.replace("[gqa]", "[mha]"), 'name = "x"\nmax_tokens = 1\nformat = "nope"\n',
        'name = "x"\nmax_tokens = 1\nformat = "kv/f16/1x1x8"\n', "gqa = 1\n" + LLAMA.split("[")[0],
    ],
)  # fmt: skip
def test_a_wrong_model_file_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgument):
        load_model(str(file))


@pytest.mark.parametrize(
    "asked",
    [
        ["--model", "nope"], ["--model", "nope.toml"], ["--hbm-free", "15GB"], ["--role", "both"], ["--mode", "ep"],
        ["--context", "2000000"], ["--hbm-free", "1GiB", "--write", "/nowhere/file"],
    ],
)  # fmt: skip
def test_a_wrong_question_is_one_line(asked: list[str]) -> None:
    result = CliRunner().invoke(app, ["plan", *asked])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_the_table_names_every_mode() -> None:
    asked = ["plan", "--context", "20000", "--hbm-free", "2GiB", "--host", "16GiB"]
    result = CliRunner().invoke(app, asked, env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    assert all(mode.value in result.stdout for mode in Mode)


def test_at_80_columns_no_figure_is_cut() -> None:
    plain = json.loads(CliRunner().invoke(app, ["plan", "--json"]).stdout)
    shown = CliRunner().invoke(app, ["plan"], env={"COLUMNS": "80"}).stdout
    assert "\u2026" not in shown
    words = shown.split()
    for mode in plain["modes"]:
        assert mode["mode"] in words
        assert f"{mode['longest_tokens']:,}" in words
        for length in mode["lengths"]:
            assert {f"{length['tokens']:,}", str(length["at_once"]), f"{length['onboard_s']:.3f}"} <= set(words)
    assert max(map(len, shown.splitlines())) <= 80
