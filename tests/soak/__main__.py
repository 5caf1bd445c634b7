"""`python -m tests.soak`: two nodes, replayed sessions, random kills; a JSON summary last."""

from __future__ import annotations

import argparse
import json
import random
import sys

from tests.soak.run import soak


def main() -> int:
    """Exit code 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="of replay and kills; default: a new one")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    report, memory = soak(options.minutes, seed, lambda line: print(line, flush=True))
    for title in ("leaks", "failures", "missed"):
        for line in getattr(report, title):
            print(f"{title}: {line}")
    print(json.dumps({**report.summary(), "own_memory_kib_before_and_after": memory.before_and_after()}))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
