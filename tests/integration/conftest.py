"""Lets the test modules here import their support module: pytest's importlib mode adds no path."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""Nodes inherit it; where the tests themselves run under nohup, they would never read their files again."""
