"""Three minutes of `make soak`, and the parts of it that can be seen to fail."""

from __future__ import annotations

import os
from itertools import islice, pairwise

import numpy as np
import pytest

from tests.soak.run import GROWTH_KIB, Memory, own_memory_kib, soak
from tests.soak.text import replayed


def test_replayed_texts_share_what_the_recorded_sessions_shared():
    texts = list(islice(replayed(3), 600))
    assert texts == list(islice(replayed(3), 600))
    by_play: dict[int, list] = {}
    for text in texts:
        by_play.setdefault(text.play, []).append(text)
    assert len(by_play) >= 64
    shared = 0
    for of_play in by_play.values():
        for one, other in pairwise(of_play):
            same = 0
            while same < min(one.prompt_tokens, other.prompt_tokens) and one.nodes[same] == other.nodes[same]:
                same += 1
            assert np.array_equal(one.digests[:same], other.digests[:same])
            shared += same
    assert shared > 0.5 * sum(text.prompt_tokens for text in texts)


def test_memory_that_grows_is_told():
    memory = Memory()
    for look in range(20):
        memory.note("flat", 90_000 + look % 3 * 1000)
        memory.note("grows", 90_000 + look * (GROWTH_KIB // 12))
    (told,) = memory.grown()
    assert "grows" in told
    assert own_memory_kib(os.getpid()) > 1000


@pytest.mark.long
def test_three_minutes() -> None:
    report, memory = soak(3, seed=6)
    assert report.passed, "\n".join([*report.leaks, *report.failures])
    print(report.summary(), memory.before_and_after())
    assert report.kills >= 5
    assert report.committed_pages_checked > 20 * report.kills
    assert memory.looks
