"""Faulting memory in: all of it, by threads, with progress, and until it is told to stop."""

from __future__ import annotations

import os
import threading

import pytest

from kvmanager.allocators.backing import open_memfd
from kvmanager.daemon import faultin
from kvmanager.daemon.faultin import FaultIn
from kvmanager.errors import ConfigError
from kvmanager.units import MIB

SIZES = (5 * MIB, 64 * MIB + 4096, 12_345)


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(faultin, "PIECE_BYTES", 4 * MIB)
    made = [(open_memfd("m", size), size) for size in SIZES]
    yield made
    for fd, _ in made:
        os.close(fd)


def taken(memory):
    return sum(512 * os.fstat(fd).st_blocks for fd, _ in memory)


def test_all_memory_is_taken_and_counted(memory):
    work = FaultIn(memory)
    assert (work.done_bytes, work.total_bytes) == (0, sum(SIZES))
    assert work.run(lambda: False)
    assert work.done_bytes == work.total_bytes
    assert taken(memory) >= sum(SIZES)


def test_it_stops_when_told(memory):
    work = FaultIn(memory)
    asked = threading.Semaphore(5)
    assert not work.run(lambda: not asked.acquire(blocking=False))
    assert 0 < work.done_bytes < work.total_bytes
    assert taken(memory) < sum(SIZES)


def test_pieces_of_all_files_are_interleaved(memory, monkeypatch):
    order = []
    monkeypatch.setattr(faultin, "populate", lambda fd, offset, _: order.append((fd, offset)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    FaultIn(memory).run(lambda: False)
    assert {fd for fd, _ in order[:3]} == {fd for fd, _ in memory}
    assert len(order) == len(set(order)) == 2 + 17 + 1


def test_memory_that_runs_out_ends_it_with_the_reason(memory, monkeypatch):
    done = []

    def populate(fd, offset, size):
        if len(done) == 3:
            raise ConfigError("the host's memory ran out")
        done.append((fd, offset, size))

    monkeypatch.setattr(faultin, "populate", populate)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    work = FaultIn(memory)
    with pytest.raises(ConfigError, match="ran out"):
        work.run(lambda: False)
    assert len(done) == 3, "nothing more is taken"
