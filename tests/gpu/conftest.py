"""Lets the tests import their support modules, and those of the integration tests."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("gpu", "integration"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
