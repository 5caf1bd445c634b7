"""Lets the tests import their support modules."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("vllm", "integration"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
