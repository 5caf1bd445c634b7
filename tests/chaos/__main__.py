"""`python -m tests.chaos`: real nodes and engines, killed again and again; a JSON summary last."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from pathlib import Path

from tests.chaos.run import run_kills
from tests.chaos.schedule import matrix, random_kills


def main() -> int:
    """Exit code 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="random kills")
    parser.add_argument("--seed", type=int, default=None, help="of kills, prompts and work; default: a new one")
    parser.add_argument("--matrix", action="store_true", help="every point on every side first")
    parser.add_argument("--point", help="only this point")
    parser.add_argument("--directory", type=Path, help="where sockets and logs lie, kept afterwards")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    if options.directory is not None:
        options.directory.mkdir(parents=True, exist_ok=True)
    kills = itertools.islice(random_kills(seed), options.kills)
    if options.matrix:
        kills = itertools.chain(matrix(seed), kills)
    if options.point:
        kills = (kill for kill in [*matrix(seed)] if kill.point == options.point)
    report = run_kills(kills, seed, lambda line: print(line, flush=True), options.directory)
    for title in ("leaks", "failures", "missed"):
        for line in getattr(report, title):
            print(f"{title}: {line}")
    print(json.dumps(report.summary()))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
