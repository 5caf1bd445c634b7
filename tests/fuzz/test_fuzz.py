"""A slice of the fuzzing that `make fuzz` does for longer, with a seed of its own each time."""

from __future__ import annotations

import secrets
from pathlib import Path

from tests.fuzz.run import fuzz

SECONDS = 14.0


def test_noise_breaks_nothing(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}: python -m tests.fuzz --seed {seed}")
    outcome = fuzz(tmp_path, seed, SECONDS)
    assert outcome.blows > 20, outcome
    assert any(answer.endswith(" OK") for answer in outcome.answers), outcome.answers
    for reached in ("mover bytes: closed", "completion", "region_added"):
        assert any(reached in answer for answer in outcome.answers), (reached, outcome.answers)
