"""Real agent sessions, scaled down to a size that a laptop can replay.

A recorded session lists, for each request, the ids of the 64-token blocks of its prompt; equal ids
mean equal content. It holds no text. Here every block that is kept becomes one segment of token ids
made from (session, block id), and the same blocks are kept in every prompt of a session, so two
scaled prompts share exactly the segments whose blocks the recorded prompts shared and kept.

`plan_demo` picks sessions and turns whose prompts sum to a stated bound: even if every prefix had
been evicted, no more tokens than that could be prefilled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import numpy as np
import numpy.typing as npt

from kvmanager.errors import InvalidArgument

Int64Array = npt.NDArray[np.int64]

DATA_FILE: Final = "data/sessions.json"


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One recorded request. `runs` are (first id, count) of its whole prompt blocks, in order."""

    prompt_tokens: int
    output_tokens: int
    stop_reason: str
    runs: tuple[tuple[int, int], ...]

    @property
    def blocks(self) -> Int64Array:
        """Block ids of the prompt, int64 [prompt_tokens // block_tokens]."""
        return np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in self.runs])


@dataclass(frozen=True, slots=True)
class Session:
    """One recorded session; an id means the same block only inside it."""

    session_id: str
    block_tokens: int
    turns: tuple[RecordedTurn, ...]


@dataclass(frozen=True, slots=True)
class ScaledTurn:
    """One request to replay.

    `prompt` is int64 [tokens]: whole segments first, then a tail shorter than a segment.
    `shared_tokens` of it equal the leading whole segments of the session's previous prompt here;
    `diverges` says that the previous prompt went on differently from there.
    """

    session_id: str
    turn: int
    prompt: Int64Array
    segment_tokens: int
    output_tokens: int
    stop_reason: str
    shared_tokens: int
    diverges: bool

    @property
    def whole_segments(self) -> int:
        """Segments that have a key."""
        return len(self.prompt) // self.segment_tokens


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """Turns in replay order; `lanes[i]` names the session of lane i. Token counts are totals."""

    lanes: tuple[str, ...]
    turns: tuple[ScaledTurn, ...]

    @property
    def prompt_tokens(self) -> int:
        """All prompts: the most that can be prefilled, if no prefix is ever found."""
        return sum(len(turn.prompt) for turn in self.turns)

    @property
    def new_tokens(self) -> int:
        """What is prefilled if every shared prefix is found."""
        return sum(len(turn.prompt) - turn.shared_tokens for turn in self.turns)

    @property
    def output_tokens(self) -> int:
        """Tokens to decode."""
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def forks(self) -> int:
        """Turns whose prompt leaves the previous one of its session."""
        return sum(turn.diverges for turn in self.turns)


def load_sessions() -> tuple[Session, ...]:
    """The bundled sessions, in file order. See `data/NOTICE` for their source and licence."""
    table = json.loads(files("kvmanager.demo").joinpath(DATA_FILE).read_text(encoding="utf-8"))
    return tuple(
        Session(
            session_id=entry["id"],
            block_tokens=entry["block_size"],
            turns=tuple(
                RecordedTurn(
                    prompt_tokens=request["in"],
                    output_tokens=request["out"],
                    stop_reason=request["stop"],
                    runs=tuple((first, count) for first, count in request["hash_runs"]),
                )
                for request in entry["requests"]
            ),
        )
        for entry in table["sessions"]
    )


def scale_session(
    session: Session,
    *,
    keep_every: int,
    segment_tokens: int,
    turns: slice,
    vocab: int,
    output_cap_tokens: int,
) -> tuple[ScaledTurn, ...]:
    """The chosen turns, each with every `keep_every`-th block id as one segment, and a short tail.

    Whether a block is kept depends on its id alone, never on its place. Raises InvalidArgument where
    a count is not positive, no turn is chosen or a prompt keeps no block.
    """
    counts = {
        "keep_every": keep_every,
        "segment_tokens": segment_tokens,
        "vocab": vocab,
        "output_cap_tokens": output_cap_tokens,
    }
    for name, count in counts.items():
        if count < 1:
            raise InvalidArgument(f"{name} = {count}: must be at least 1")
    chosen = range(*turns.indices(len(session.turns)))
    if not chosen:
        raise InvalidArgument(f"{turns} chooses none of the {len(session.turns)} turns of {session.session_id}")
    scaled: list[ScaledTurn] = []
    previous: Int64Array = np.empty(0, dtype=np.int64)
    for number in chosen:
        recorded = session.turns[number]
        blocks = _kept_blocks(recorded, keep_every)
        if not len(blocks):
            raise InvalidArgument(f"keep_every = {keep_every} leaves nothing of turn {number} of {session.session_id}")
        shared = common_prefix(previous, blocks)
        segments = [_tokens(f"{session.session_id}/{block}", segment_tokens, vocab) for block in blocks]
        segments.append(_tail(session, number, segment_tokens, vocab))
        scaled.append(
            ScaledTurn(
                session_id=session.session_id,
                turn=number,
                prompt=np.concatenate(segments),
                segment_tokens=segment_tokens,
                output_tokens=min(max(recorded.output_tokens, 1), output_cap_tokens),
                stop_reason=recorded.stop_reason,
                shared_tokens=shared * segment_tokens,
                diverges=shared < len(previous),
            )
        )
        previous = blocks
    return tuple(scaled)


def common_prefix(first: Int64Array, second: Int64Array) -> int:
    """Leading entries in which two arrays agree."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


def _kept_blocks(recorded: RecordedTurn, keep_every: int) -> Int64Array:
    blocks = recorded.blocks
    kept: Int64Array = blocks[blocks % keep_every == 0]
    return kept


def _tokens(name: str, count: int, vocab: int) -> Int64Array:
    """`count` token ids below `vocab` that depend on `name` alone (not on a library's generator)."""
    digest = hashlib.shake_256(name.encode()).digest(4 * count)
    return np.frombuffer(digest, dtype="<u4").astype(np.int64) % vocab


def _tail(session: Session, number: int, segment_tokens: int, vocab: int) -> Int64Array:
    """Tokens after the last whole segment, in the proportion of the recorded last block that was filled.

    At least one token, so that no prompt ends on a segment's edge (none at all with 1-token segments).
    """
    filled = session.turns[number].prompt_tokens % session.block_tokens
    most = segment_tokens - 1
    count = min(most, max(1, filled * segment_tokens // session.block_tokens))
    return _tokens(f"{session.session_id}/tail/{number}", count, vocab)


def plan_demo(
    sessions: Sequence[Session],
    *,
    vocab: int,
    segment_tokens: int = 16,
    lanes: int = 4,
    turns_per_lane: int = 3,
    output_cap_tokens: int = 12,
    least_prompt_tokens: int = 400,
    most_prompt_tokens: int = 1_500,
    prefill_limit_tokens: int = 12_000,
    decode_limit_tokens: int = 150,
    seed: int = 0,
) -> DemoPlan:
    """Sessions on `lanes` lanes, their turns interleaved round-robin, within both limits.

    The first half of the lanes takes sessions with a fork in their window. Deterministic in
    `sessions` and `seed`. Raises InvalidArgument where the sessions or limits do not allow it.
    """
    if lanes * turns_per_lane * output_cap_tokens > decode_limit_tokens:
        raise InvalidArgument(
            f"{lanes} lanes x {turns_per_lane} turns x {output_cap_tokens} tokens exceed "
            f"decode_limit_tokens = {decode_limit_tokens}"
        )
    order = list(sessions)
    random.Random(seed).shuffle(order)
    mean_tokens = prefill_limit_tokens // (lanes * turns_per_lane)
    chosen: list[tuple[ScaledTurn, ...]] = []
    for lane in range(lanes):
        used = {turns[0].session_id for turns in chosen}
        window = None
        for session in order:
            if session.session_id in used:
                continue
            window = _window(
                session,
                segment_tokens=segment_tokens,
                turns=turns_per_lane,
                vocab=vocab,
                output_cap_tokens=output_cap_tokens,
                least_tokens=least_prompt_tokens,
                most_tokens=min(most_prompt_tokens, mean_tokens * 3 // 2),
                total_tokens=mean_tokens * turns_per_lane,
                fork=lane < (lanes + 1) // 2,
            )
            if window:
                chosen.append(window)
                break
        if not window:
            raise InvalidArgument(f"none of {len(order)} sessions fits lane {lane}: raise a limit or lower the turns")
    plan = DemoPlan(
        lanes=tuple(turns[0].session_id for turns in chosen),
        turns=tuple(turns[number] for number in range(turns_per_lane) for turns in chosen),
    )
    assert plan.prompt_tokens <= prefill_limit_tokens, plan.prompt_tokens
    assert plan.output_tokens <= decode_limit_tokens, plan.output_tokens
    return plan


def _window(
    session: Session,
    *,
    segment_tokens: int,
    turns: int,
    vocab: int,
    output_cap_tokens: int,
    least_tokens: int,
    most_tokens: int,
    total_tokens: int,
    fork: bool,
) -> tuple[ScaledTurn, ...] | None:
    """The first run of turns of a session that fits, with the finest `keep_every` that fits; None if none does.

    Every later turn adds at least two segments, answers reach the cap, and a fork keeps something
    but less than nine tenths of the previous prompt (no fork at all where `fork` is false).
    """
    for start in range(len(session.turns) - turns + 1):
        window = session.turns[start : start + turns]
        if any(turn.output_tokens < output_cap_tokens for turn in window):
            continue
        blocks_in_all = sum(len(turn.blocks) for turn in window)
        finest = max(1, blocks_in_all * segment_tokens // total_tokens)
        for keep_every in range(finest, finest + 4):
            kept = [_kept_blocks(turn, keep_every) for turn in window]
            # one segment for the tail
            tokens = [(len(blocks) + 1) * segment_tokens for blocks in kept]
            if min(tokens) - segment_tokens < least_tokens or max(tokens) > most_tokens or sum(tokens) > total_tokens:
                continue
            shared = [common_prefix(a, b) for a, b in itertools.pairwise(kept)]
            if any(len(after) - keep < 2 or keep == 0 for after, keep in zip(kept[1:], shared, strict=True)):
                continue
            forks = [keep < 0.9 * len(before) for before, keep in zip(kept, shared, strict=False)]
            if any(forks) != fork:
                continue
            return scale_session(
                session,
                keep_every=keep_every,
                segment_tokens=segment_tokens,
                turns=slice(start, start + turns),
                vocab=vocab,
                output_cap_tokens=output_cap_tokens,
            )
    return None
