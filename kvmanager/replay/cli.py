"""`kvmanager replay`: the table or the JSON object of one replay."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvmanager.replay.run import ReplayReport, replay
from kvmanager.replay.stream import load_sessions, stream

BUNDLED = "data/claude-code-710.jsonl.xz"


def replay_file(
    path: Path | None, *, lanes: int, pool_tokens: int, requests: int, seed: int, policy: str, ranks: int, min_peak: int
) -> ReplayReport:
    """Replays a file of sessions, or the bundled one; tells its progress on stderr. Raises InvalidArgument."""
    if path is None:
        with as_file(files("kvmanager.replay") / BUNDLED) as bundled:
            sessions = load_sessions(bundled, min_peak)
    else:
        sessions = load_sessions(path, min_peak)
    with Console(stderr=True).status("replaying") as status:
        return replay(
            stream(sessions, lanes, requests, seed),
            requests,
            pool_tokens,
            ranks,
            policy,
            lambda done: status.update(f"{done:,} of {requests:,} requests"),
        )


def render(report: ReplayReport) -> Table:
    """The report for people."""
    table = Table(title=f"{report.policy}, a pool of {report.pool_tokens:,} tokens", title_justify="left")
    table.add_column("of the counted requests")
    table.add_column("value", justify="right")
    table.add_row("prompt tokens", f"{report.prompt_tokens:,}")
    table.add_row("prefix hit rate", f"{report.prefix_hit_rate:.4f}")
    table.add_row("with an infinite cache", f"{report.ceiling:.4f}")
    table.add_row("tokens prefilled", f"{report.prefilled_tokens:,}")
    table.add_row("spans evicted", f"{report.evictions:,}")
    table.add_row("spans reused in part", f"{report.partial_span_reuse:,}")
    return table
