"""The note that a keeper leaves for operators while it holds a node's memory and no daemon can go on with it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

_NAME: Final = "refused.txt"
REMEDY: Final = (
    "the keeper holds the memory and waits: put the version and configuration back that served before and run "
    "`kvmanager upgrade` (or send the keeper SIGUSR2), or stop the node, start it with `kvmanager serve --cold` and "
    "lose the cache"
)
_log = logging.getLogger("kvmanager.keeper")


def leave(runtime_dir: Path, why: str) -> str:
    """Writes the note, and logs it; its text."""
    text = f"refused adoption: {why}; {REMEDY}"
    draft = runtime_dir / f"{_NAME}.new"
    draft.write_text(f"{text}\n", encoding="utf-8")
    os.replace(draft, runtime_dir / _NAME)
    _log.error("%s", text)
    return text


def clear(runtime_dir: Path) -> None:
    """Takes it away: a daemon is tried again, or the node ends."""
    (runtime_dir / _NAME).unlink(missing_ok=True)


def read(runtime_dir: Path) -> str | None:
    """The note; None while there is none."""
    try:
        return (runtime_dir / _NAME).read_text(encoding="utf-8").strip()
    except OSError:
        return None
