"""The demo's sessions: shared prefixes survive scaling exactly, and a plan keeps its limits."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

from kvmanager.demo.sessions import (
    DATA_FILE,
    RecordedTurn,
    Session,
    common_prefix,
    load_sessions,
    plan_demo,
    scale_session,
)
from kvmanager.errors import InvalidArgument

VOCAB = 512
SESSIONS = load_sessions()
PINNED_HEAD = [437, 201, 201, 112, 419, 386, 123, 261]
PINNED_DIGEST = "e22e1237e9532488"


def test_bundle_is_small_whole_and_licensed() -> None:
    folder = files("kvmanager.demo").joinpath("data")
    assert len(files("kvmanager.demo").joinpath(DATA_FILE).read_bytes()) < 200_000
    notice = folder.joinpath("NOTICE").read_text(encoding="utf-8")
    assert "Apache License 2.0" in notice
    assert "94f6046dfd9c0c8bc0cdb24a5aa6579bac8669bf" in notice
    assert 12 <= len(SESSIONS) <= 20
    for session in SESSIONS:
        for turn in session.turns:
            assert len(turn.blocks) == turn.prompt_tokens // session.block_tokens


def test_runs_expand_in_order() -> None:
    assert RecordedTurn(0, 1, "end_turn", ((1, 3), (9, 2))).blocks.tolist() == [1, 2, 3, 9, 10]


@pytest.mark.parametrize("keep_every", [1, 5, 12])
@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.session_id)
def test_shared_prefixes_stay_shared(session: Session, keep_every: int) -> None:
    """Any two prompts share exactly the kept blocks of what the recorded prompts share, token for token."""
    segment_tokens, first = 4, slice(0, 12)
    scaled = scale_session(
        session, keep_every=keep_every, segment_tokens=segment_tokens, turns=first, vocab=VOCAB, output_cap_tokens=9
    )
    recorded = session.turns[first]
    for a in range(len(scaled)):
        for b in range(a + 1, len(scaled)):
            blocks_a, blocks_b = recorded[a].blocks, recorded[b].blocks
            prefix = blocks_a[: common_prefix(blocks_a, blocks_b)]
            expected = int((prefix % keep_every == 0).sum())
            segments = [
                turn.prompt[: turn.whole_segments * segment_tokens].reshape(-1, segment_tokens)
                for turn in (scaled[a], scaled[b])
            ]
            least = min(len(part) for part in segments)
            different = np.flatnonzero((segments[0][:least] != segments[1][:least]).any(axis=1))
            shared = int(different[0]) if len(different) else least
            assert shared == expected, (a, b)
            if b == a + 1:
                assert scaled[b].shared_tokens == shared * segment_tokens
                assert scaled[b].diverges == (shared < len(segments[0]))


def test_a_block_is_kept_or_dropped_in_every_prompt() -> None:
    """The rule looks at the id, not at the place: a fork does not shift which blocks are kept."""
    turns = (RecordedTurn(640, 5, "tool_use", ((1, 10),)), RecordedTurn(640, 5, "end_turn", ((1, 3), (21, 7))))
    session = Session("s", 64, turns)
    first, second = scale_session(
        session, keep_every=3, segment_tokens=8, turns=slice(None), vocab=VOCAB, output_cap_tokens=9
    )
    assert first.whole_segments == 3
    assert second.whole_segments == 4
    assert second.shared_tokens == 8
    assert second.diverges


def test_prompts_end_inside_a_segment_and_tails_differ() -> None:
    session = SESSIONS[0]
    scaled = scale_session(
        session, keep_every=8, segment_tokens=16, turns=slice(0, 8), vocab=VOCAB, output_cap_tokens=9
    )
    for turn in scaled:
        assert turn.prompt.dtype == np.int64
        assert len(turn.prompt) % 16 > 0
        assert 0 <= turn.prompt.min() <= turn.prompt.max() < VOCAB
        assert 1 <= turn.output_tokens <= 9
    tails = {tuple(turn.prompt[turn.whole_segments * 16 :]) for turn in scaled}
    assert len(tails) == len(scaled)


def test_tokens_do_not_change_between_versions() -> None:
    """Pinned: a later library or Python must make the same prompts."""
    turn = scale_session(
        SESSIONS[0], keep_every=8, segment_tokens=16, turns=slice(0, 1), vocab=VOCAB, output_cap_tokens=9
    )[0]
    assert turn.prompt[:8].tolist() == PINNED_HEAD
    assert hashlib.sha256(turn.prompt.astype("<i8").tobytes()).hexdigest()[:16] == PINNED_DIGEST


def test_sessions_never_share() -> None:
    heads = {
        tuple(
            scale_session(
                session, keep_every=8, segment_tokens=16, turns=slice(0, 1), vocab=VOCAB, output_cap_tokens=9
            )[0].prompt[:16]
        )
        for session in SESSIONS
    }
    assert len(heads) == len(SESSIONS)


@pytest.mark.parametrize("seed", range(6))
def test_plan_keeps_its_limits(seed: int) -> None:
    plan = plan_demo(SESSIONS, vocab=VOCAB, seed=seed)
    assert len(plan.lanes) == len(set(plan.lanes)) == 4
    assert 12 <= len(plan.turns) <= 16
    assert plan.prompt_tokens <= 12_000
    assert plan.output_tokens <= 150
    assert all(400 <= len(turn.prompt) <= 1_500 for turn in plan.turns)
    assert all(10 <= turn.output_tokens <= 12 for turn in plan.turns)
    assert plan.forks >= 1
    assert [turn.session_id for turn in plan.turns[:8]] == [*plan.lanes, *plan.lanes]
    followers = [turn for turn in plan.turns if turn.shared_tokens]
    assert len(followers) == len(plan.turns) - 4
    assert sum(turn.shared_tokens % 128 != 0 for turn in followers) >= 5
    assert plan.new_tokens == plan.prompt_tokens - sum(turn.shared_tokens for turn in plan.turns)


def test_plan_is_deterministic() -> None:
    first, second = (plan_demo(SESSIONS, vocab=VOCAB, seed=3) for _ in range(2))
    assert first.lanes == second.lanes
    for a, b in zip(first.turns, second.turns, strict=True):
        assert np.array_equal(a.prompt, b.prompt)
        assert replace(a, prompt=b.prompt) == b
    assert plan_demo(SESSIONS, vocab=VOCAB, seed=4).lanes != first.lanes


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="decode_limit_tokens = 20"):
        plan_demo(SESSIONS, vocab=VOCAB, decode_limit_tokens=20)
    with pytest.raises(InvalidArgument, match="none of 16 sessions fits lane 0"):
        plan_demo(SESSIONS, vocab=VOCAB, prefill_limit_tokens=1_000)


@pytest.mark.parametrize("name", ["keep_every", "segment_tokens", "vocab", "output_cap_tokens"])
def test_counts_must_be_positive(name: str) -> None:
    counts = {"keep_every": 8, "segment_tokens": 16, "vocab": VOCAB, "output_cap_tokens": 9, name: 0}
    with pytest.raises(InvalidArgument, match=f"{name} = 0"):
        scale_session(SESSIONS[0], turns=slice(0, 2), **counts)


def test_empty_choices_are_refused() -> None:
    counts = {"segment_tokens": 16, "vocab": VOCAB, "output_cap_tokens": 9}
    with pytest.raises(InvalidArgument, match="chooses none"):
        scale_session(SESSIONS[0], keep_every=8, turns=slice(90, 95), **counts)
    with pytest.raises(InvalidArgument, match="leaves nothing of turn 0"):
        scale_session(SESSIONS[0], keep_every=1_000_000, turns=slice(0, 1), **counts)
