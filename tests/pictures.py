"""`python -m tests.pictures`: draws docs/top.svg and docs/map.svg from a real node under load.

rich records what the commands print to a terminal of 80 columns, and writes it as a picture; what is in it is checked
first, as `tests/integration/test_screens_tmux.py` checks the screens themselves.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console, RenderableType

from kvmanager.clients.admin import AdminClient
from kvmanager.command.mapscreen import map_screen
from kvmanager.command.top import Sample, Top

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 80
BETWEEN_LOOKS_S = 2.0
sys.path.insert(0, str(ROOT / "tests" / "integration"))


def picture(shown: RenderableType, title: str) -> tuple[str, str]:
    """(the text as a terminal has it, the same as SVG)."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(shown)
    text = console.export_text(clear=False)
    # An id of its own, or it would be made of the content, and differ each time for no reason.
    return text, console.export_svg(title=title, unique_id=title.replace(" ", "-").replace("/", "-"))


def pictures(client: AdminClient, group: str) -> dict[str, tuple[str, str]]:
    """By file name: what `top` and `map` show of a node now."""
    top = Top(Sample.take(client))
    time.sleep(BETWEEN_LOOKS_S)
    top.add(Sample.take(client))
    pool = f"{group}/hbm"
    return {
        "top.svg": picture(top.screen(), "kvmanager top"),
        "map.svg": picture(map_screen(client.map(pool), 0, 0), f"kvmanager map {pool}"),
    }


def main() -> None:
    """Writes both."""
    from nodes_support import GROUP, node
    from screens_support import Load, many_pages_toml

    with (
        tempfile.TemporaryDirectory(prefix="kvmpictures") as directory,
        node(Path(directory), "prefill", many_pages_toml) as served,
        Load(served.runtime_dir) as load,
    ):
        load.wait(24)
        for name, (text, svg) in pictures(served.admin, GROUP).items():
            (ROOT / "docs" / name).write_text(svg, encoding="utf-8")
            print(text)


if __name__ == "__main__":
    main()
