"""Runs the benchmarks: `python -m tests.bench [--json FILE] [--gpu] [SUITE ...]`; all suites without a name."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.bench import (
    checksum_figures,
    copy_figures,
    core_figures,
    death_figures,
    gather_figures,
    handoff_figures,
    history_figures,
    hit_rates,
    host_export_figures,
    operations_figures,
    plan_figures,
    pull_figures,
    replay_figures,
    request_figures,
    restart_figures,
    survival_figures,
    vllm_figures,
    wire_figures,
)
from tests.bench.figure import Figure

SUITES: dict[str, Callable[[], Iterator[Figure]]] = {
    "core": core_figures.figures,
    "requests": request_figures.figures,
    "replay": replay_figures.figures,
    "copies": copy_figures.figures,
    "plans": plan_figures.figures,
    "handoff": handoff_figures.figures,
    "pulls": pull_figures.figures,
    "host-exports": host_export_figures.figures,
    "gather": gather_figures.figures,
    "checksums": checksum_figures.figures,
    "history": history_figures.figures,
    "hit-rates": hit_rates.figures,
    "wire": wire_figures.figures,
    "operations": operations_figures.figures,
    "deaths": death_figures.figures,
    "survival": survival_figures.figures,
    "vllm": vllm_figures.figures,
    "restart": restart_figures.figures,
}


def main() -> int:
    """Prints a line a figure and writes them all to a JSON file."""
    parser = argparse.ArgumentParser(prog="tests.bench", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"))
    parser.add_argument("--gpu", action="store_true", help="the figures that need a GPU instead")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="only these, instead of all")
    options = parser.parse_args()
    figures: list[dict[str, object]] = []
    result: object = figures
    suites = SUITES
    if options.gpu:
        machine, suites = _on_gpu()
        result = {"machine": machine, "figures": figures}
    chosen = _chosen(suites, options.suites)
    try:
        _measure(chosen, figures)
    finally:  # what was measured before an error is kept
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def _chosen(
    suites: dict[str, Callable[[], Iterator[Figure]]], names: Iterable[str]
) -> list[Callable[[], Iterator[Figure]]]:
    names = list(names) or list(suites)
    if unknown := sorted(set(names) - set(suites)):
        sys.exit(f"no suite {', '.join(unknown)}; there are {', '.join(suites)}")
    return [suites[name] for name in names]


def _measure(suites: Iterable[Callable[[], Iterator[Figure]]], figures: list[dict[str, object]]) -> None:
    """Appends each figure as it comes."""
    for suite in suites:
        for figure in suite():
            print(figure.line(), flush=True)
            figures.append(figure.as_dict())


def _on_gpu() -> tuple[dict[str, str], dict[str, Callable[[], Iterator[Figure]]]]:
    """The machine and the suites. Imported late: the other figures need no torch."""
    from tests.bench import (
        gpu_checksums,
        gpu_copies,
        gpu_figures,
        gpu_gather,
        gpu_handoff,
        gpu_hisparse,
        gpu_kernels,
        gpu_loop,
    )

    suites = {
        "copies": gpu_copies.figures,
        "pinning": gpu_copies.pinning,
        "loop": gpu_loop.figures,
        "checksums": gpu_checksums.figures,
        "codec": gpu_figures.figures,
        "hisparse": gpu_hisparse.figures,
        "kernels": gpu_kernels.figures,
    }
    if gpu_gather.possible():
        suites["gather"] = gpu_gather.figures
    if gpu_handoff.possible():
        suites["handoff"] = gpu_handoff.figures
    return gpu_figures.machine(), suites


if __name__ == "__main__":
    sys.exit(main())
