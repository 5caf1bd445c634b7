"""The comparisons of the tests find what they are for: each of some well-known bugs, planted on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import pytest
import test_glm_oracle
import test_glm_oracle_layers
import test_glm_oracle_mtp
import torch
from planted_bugs import BUGS, Bug
from test_glm_oracle_layers import CASES, Replay

from kvmanager.clients.glm.attention import ShortPrompts
from kvmanager.clients.glm.codec import Codec, Fp8Codec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.ranks import RankGroup, run_threads
from kvmanager.clients.glm.store import ContiguousStore
from kvmanager.clients.glm.weights import Profile, make_weights
from kvmanager.core.spec import Residency
from kvmanager.errors import InvariantViolation
from kvmanager.geometry import ShardGeometry
from tests.glm_ranks import (
    PROMPT,
    ROWS,
    assert_rows,
    decode_shards,
    expected_answer,
    plain_model,
    plain_rows,
    poisoned_workspace,
    prefill_shards,
    shard_of,
    the_prompt,
)
from tests.unit import test_decode_modes, test_glm_codec, test_glm_dcp, test_glm_model, test_glm_modes

torch.set_num_threads(1)
pytestmark = pytest.mark.long

WIDE = dataclasses.replace(TINY, rms_eps=1e-3, latent_eps=1e-2)


@cache
def replay_of(case: str) -> Replay:
    return test_glm_oracle_layers.make_replay(*CASES[case])


def fresh(case: str) -> Replay:
    """The oracle's trace, and a model made now."""
    codec: Codec = replay_of(case).model.codec
    model = Glm(TINY, make_weights(TINY, 1, Profile.CALM), torch.float64, codec)
    return dataclasses.replace(replay_of(case), model=model)


@cache
def rows_of_one_rank() -> ContiguousStore:
    return plain_rows(plain_model(), the_prompt())


def logits_with_wide_eps() -> None:
    run = test_glm_oracle.compare(WIDE, Profile.CALM, seed=1, prompt_seed=1, outputs=2)
    torch.testing.assert_close(run.model.logits(run.hidden).float(), run.oracle.logits, atol=1e-4, rtol=0)


def over_shards() -> None:
    """Eight ranks, of which some hold nothing of the prompt at first."""
    geometry = ShardGeometry(8, ROWS, 16)

    def work(ranks: RankGroup) -> list[int]:
        shard = shard_of(ranks.rank, geometry)
        first = prefill_shards(model_now(), ranks, shard, poisoned_workspace(geometry))
        assert_rows(shard, rows_of_one_rank(), shard.own_positions(PROMPT))
        return decode_shards(ranks, shard, first)

    assert run_threads(8, work) == [list(expected_answer())] * 8


def model_now() -> Glm:
    return Glm(TINY, test_glm_modes.weights(), torch.float64, Fp8Codec())


COMPARISONS: dict[str, Callable[[], None]] = {
    "oracle rows": lambda: test_glm_oracle_layers.test_rows_of_each_layer(fresh("calm")),
    "oracle fp8 rows": lambda: test_glm_oracle_layers.test_rows_of_each_layer(fresh("calm fp8")),
    "oracle selection": lambda: test_glm_oracle_layers.test_selection_of_each_leader(fresh("calm")),
    "oracle attention": lambda: test_glm_oracle_layers.test_attention_of_each_layer(fresh("calm")),
    "oracle experts": lambda: test_glm_oracle_layers.test_experts_of_each_layer(fresh("calm")),
    "oracle logits, wide eps": logits_with_wide_eps,
    "oracle drafts": test_glm_oracle_mtp.test_drafts_match_the_oracles_decoder_layer,
    "codec": lambda: test_glm_codec.test_scale_at_exact_powers_of_two(448.0, 1.0),
    "top-k": test_glm_model.test_top_k_gives_ties_to_the_lowest_position,
    "ties": lambda: test_glm_modes.test_dcp_selects_alike_where_scores_are_equal(plain_model()),
    "merge": test_glm_modes.test_parts_merge_whatever_their_size,
    "shards": over_shards,
    "whole copies": lambda: test_glm_modes.test_pcp_ranks_with_whole_copies(
        plain_model(), the_prompt(), list(expected_answer()), 2
    ),
    "heads": lambda: test_glm_modes.test_tensor_parallel_ranks_with_replicated_latents(
        the_prompt(), list(expected_answer()), ShortPrompts.MQA
    ),
    "placement": lambda: test_glm_dcp.test_rows_lie_where_the_placement_says(
        plain_model(), test_glm_dcp.LAYOUTS["native"], 4
    ),
    "short prompts": lambda: test_glm_modes.test_short_prompts_through_heads_or_latents(plain_model(), TINY.index_topk),
    "hisparse": lambda: test_decode_modes.test_hisparse_modes_give_the_tokens_of_the_reference(Residency.HYBRID),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def right_answers() -> None:
    """What is compared with is made before any bug is planted; and every comparison passes without one."""
    rows_of_one_rank()
    for compare in COMPARISONS.values():
        compare()


@pytest.mark.parametrize("planted", BUGS, ids=lambda planted: planted.name)
def test_a_planted_bug_is_found(planted: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.plant(monkeypatch)
    with pytest.raises((AssertionError, InvariantViolation)) as found:
        COMPARISONS[planted.found_by]()
    print(f"{planted.name}: {str(found.value)[:200]}")


def test_every_comparison_has_something_to_find() -> None:
    assert {planted.found_by for planted in BUGS} == set(COMPARISONS)
