"""Whether the daemon that is installed now could go on from this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kvmanager.journal.journal import Fingerprints, JournalMismatch

SUCCESSOR_S = 30.0
"""How long the installed daemon may take to say what it is, before it may replace this one."""


def check_successor(config_path: Path, prints: Fingerprints) -> None:
    """Raises JournalMismatch when what is installed and configured now could not go on from here."""
    command = [sys.executable, "-m", "kvmanager.daemon", "--config", str(config_path), "--fingerprints"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SUCCESSOR_S, check=False)
    if done.returncode:
        raise JournalMismatch(f"the installed daemon does not start: {done.stderr.strip()[-500:]}")
    Fingerprints(**json.loads(done.stdout)).check(prints, log_empty=True)
