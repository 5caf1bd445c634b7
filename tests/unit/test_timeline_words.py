"""Timeline words: one a rank, zero when given, and given again only when nobody lives who could write it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvmanager.allocators.backing import open_memfd
from kvmanager.configuration.groups import TIMELINE_REGION, NodeMemory
from kvmanager.daemon import memory
from kvmanager.daemon.memory import NodeRegions
from kvmanager.errors import LimitExceeded
from kvmanager.wire import RegionInfo, RegionKind

WORDS = 4
PLAN = NodeMemory((RegionInfo(TIMELINE_REGION, RegionKind.TIMELINE, WORDS * 8, 8, 0, "timelines", "cpu"),), ())


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeRegions]:
    monkeypatch.setattr(memory, "TIMELINE_WORDS", WORDS)
    made = NodeRegions(PLAN, None)
    yield made
    made.close()


def attach(regions: NodeRegions, attach_id: int) -> int:
    word = regions.new_word()
    regions.bind(attach_id, word, ())
    return word


def test_ranks_come_and_go_without_end(regions: NodeRegions) -> None:
    for attach_id in range(20 * WORDS):
        word = attach(regions, attach_id)
        assert regions.read() == {attach_id: 0}
        regions._words[0][word] = attach_id + 1
        assert regions.unbind(attach_id) == attach_id + 1
        regions.free_words([attach_id])


def test_a_word_whose_process_lives_is_never_given_again(regions: NodeRegions) -> None:
    words = {attach(regions, attach_id) for attach_id in range(WORDS)}
    assert len(words) == WORDS
    regions.unbind(0)  # it left in order, and lives
    with pytest.raises(LimitExceeded, match="all 4 timeline words belong to ranks"):
        regions.new_word()
    regions.free_words([0, 0, 99])
    assert attach(regions, 5) in words
    with pytest.raises(LimitExceeded):
        regions.new_word()


def test_one_that_nobody_was_told_of_is_free_at_once(regions: NodeRegions) -> None:
    for _ in range(5 * WORDS):
        regions.return_word(regions.new_word())


@pytest.mark.parametrize("others_live", [False, True])
def test_after_a_restart_of_the_daemon(monkeypatch: pytest.MonkeyPatch, others_live: bool) -> None:
    """Three were given out, one of them belongs to a rank that is attached."""
    monkeypatch.setattr(memory, "TIMELINE_WORDS", WORDS)
    fd = open_memfd("timelines", WORDS * 8)
    regions = NodeRegions(PLAN, None, {TIMELINE_REGION: fd}, words_used=3)
    regions._words[0][:3] = np.arange(1, 4, dtype=np.uint64)
    regions.bind(7, 1, ())
    if not others_live:
        regions.free_unbound()
    free = [3] if others_live else [0, 2, 3]
    assert sorted(regions.new_word() for _ in free) == free
    with pytest.raises(LimitExceeded):
        regions.new_word()
    assert regions.read() == {7: 2}
    regions.close()
