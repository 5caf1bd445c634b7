"""`python -m tests.sim`: many seeded histories; a line for each that fails, a summary, and JSON last."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter

from tests.sim.many import run_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="histories to run")
    parser.add_argument("--events", type=int, default=2000, help="core events in each, at least")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    print(f"seeds {seeds.start}..{seeds.stop - 1}, {options.events} events each, {options.jobs} processes", flush=True)
    started = time.monotonic()
    reports, failed = run_all(seeds, options.events, options.jobs)
    seconds = time.monotonic() - started
    happened = sum((r.happened for r in reports), Counter())
    counters = sum((r.counters for r in reports), Counter())
    events = sum(r.events for r in reports)
    for name, count in sorted({**counters, **happened}.items()):
        print(f"  {name:20} {count}")
    print(f"{len(reports)} histories held, {len(failed)} failed, {events} events in {seconds:.0f} s")
    summary = {
        "first": seeds.start, "seeds": len(seeds), "events": events, "seconds": round(seconds, 1),
        "failed_seeds": sorted(failed), "counters": dict(counters), "happened": dict(happened),
    }  # fmt: skip
    print(json.dumps(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
