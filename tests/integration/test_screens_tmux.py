"""`top` and `map` in a real terminal of 80 columns, on a node with tens of thousands of pages under load."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from nodes_support import GROUP, node
from screens_support import COLUMNS, LINES, PAGES, Load, command, many_pages_toml, terminal

ROOT = Path(__file__).resolve().parents[2]


def drawn(text: str) -> str:
    """As it stands in the document."""
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_top_and_map_are_readable_in_a_real_terminal(tmp_path: Path) -> None:
    """With KVMANAGER_WRITE_SCREENS=1 the screens go into docs/screens.md."""
    with (
        node(tmp_path, "prefill", many_pages_toml) as served,
        Load(served.runtime_dir) as load,
        terminal(tmp_path) as shown,
    ):
        where = ("--runtime-dir", str(served.runtime_dir))
        load.wait(24)
        shown.type(command("top", "--every", "1", *where))
        top = shown.wait("ledger adds up", f"{GROUP}/hbm", "attached", r"^request +(?!0\.0)[\d,.]+ ")
        shown.key("C-c")
        shown.type(command("map", f"{GROUP}/hbm", *where))
        # To the prompt behind the legend: a screen that is still being drawn has a part of it.
        whole = shown.wait(rf"pool {GROUP}/hbm: {PAGES:,} units[\s\S]*ready, kv[\s\S]*^\$$")
        shown.type(command("map", f"{GROUP}/hbm", "--first", "0", "--count", "1000", *where))
        part = shown.wait(r"0 to 999 of them[\s\S]*ready, kv[\s\S]*^\$$")
    for text in (top, whole, part):
        lines = text.splitlines()
        assert len(lines) <= LINES
        assert max(map(len, lines)) <= COLUMNS
        assert "…" not in text
        assert "Traceback" not in text
    assert counted(whole) == PAGES, whole
    assert counted(part) == 1000, part
    if os.environ.get("KVMANAGER_WRITE_SCREENS"):
        write(drawn(top), drawn(whole), drawn(part))


def counted(text: str) -> int:
    """Pages that the legend tells of."""
    found = re.findall(r"^  \S +([\d,]+)  (?:ready|free|filling|reserved|dr|qu)", text, flags=re.M)
    return sum(int(number.replace(",", "")) for number in found)


def write(top: str, whole: str, part: str) -> None:
    shell = r"^\$.*\n?"
    what = f"a node of {PAGES:,} pages a rank under load"
    test = "`tests/integration/test_screens_tmux.py`"
    parts = ["# Screens\n", f"Captured from a terminal of 80 columns by {test}: {what}.\n"]
    for title, text in (("top", top), (f"map {GROUP}/hbm", whole), (f"map {GROUP}/hbm --first 0 --count 1000", part)):
        shown = re.sub(shell, "", text, flags=re.M)
        parts.append(f"## kvmanager {title}\n\n```text\n{shown.rstrip()}\n```\n")
    (ROOT / "docs" / "screens.md").write_text("\n".join(parts), encoding="utf-8")
