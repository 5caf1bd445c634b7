"""`python -m tests.fuzz --seconds 60 [--seed N]`: attacks a real node, and prints the seed that repeats it."""

from __future__ import annotations

import argparse
import secrets
import tempfile
from pathlib import Path

from tests.fuzz.run import fuzz


def main() -> None:
    """Exits with a story when the node does what it must not."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzzes the wire of a real node.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument("--blows", type=int, default=0, help="instead of a time")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvmfuzz") as directory:
        outcome = fuzz(Path(directory), seed, options.seconds, options.blows)
    for answer, count in sorted(outcome.answers.items()):
        print(f"{count:8,} {answer}")
    print(f"{outcome.blows:,} blows in {outcome.seconds:.0f} s: no crash, no hang, nothing held, fsck finds nothing")


if __name__ == "__main__":
    main()
