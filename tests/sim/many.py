"""Many histories at once, in processes of their own."""

from __future__ import annotations

import gc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.sim.shrink import Broken, simulate
from tests.sim.simulate import SimReport
from tests.sim.worlds import kind_of


def one(job: tuple[int, int]) -> SimReport | tuple[int, str]:
    """A history's report, or its seed and the story of what went wrong."""
    try:
        return simulate(*job)
    except Broken as error:
        return job[0], str(error)


def _collect_seldom() -> None:
    """A history keeps nearly all that it makes, so looking for garbage costs much and finds little."""
    gc.freeze()
    gc.set_threshold(100_000)


def run_all(seeds: range, events: int, jobs: int) -> tuple[list[SimReport], dict[int, str]]:
    """Histories of all seeds; (reports, stories of failures by seed)."""
    reports: list[SimReport] = []
    failed: dict[int, str] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_collect_seldom) as pool:
        for found in pool.map(one, [(seed, events) for seed in seeds]):
            if isinstance(found, SimReport):
                reports.append(found)
                continue
            seed, story = found
            failed[seed] = story
            print(f"seed {seed} ({kind_of(seed)}) FAILED\n{story}\n", flush=True)
    return reports, failed


def hold(seeds: range, events: int) -> None:
    """Raises unless histories of all seeds hold, one after the other."""
    print(f"seeds {seeds.start}..{seeds.stop - 1}")
    reports, failed = run_all(seeds, events, 1)
    assert not failed, "\n".join(failed.values())
    assert len(reports) == len(seeds)
    assert all(report.events >= events for report in reports)
