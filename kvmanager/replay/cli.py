"""`kvmanager replay`: the table or the JSON object of one replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvmanager.core.spec import Inclusion
from kvmanager.errors import InvalidArgument
from kvmanager.replay.generator import generate
from kvmanager.replay.run import ReplayReport, replay
from kvmanager.replay.stream import Request, Session, load_sessions, peak_tokens, stream
from kvmanager.replay.tiers import TierReport, replay_tiers

Report = ReplayReport | TierReport
BUNDLED = "data/claude-code-710.jsonl.xz"
GENERATED, GENERATED_SEED = "generate:", 710


def recorded_stream(
    path: Path | None, *, lanes: int, requests: int, seed: int, min_peak: int, hints: bool
) -> Iterator[Request]:
    """The requests of a replay; without `hints` nobody tells which session they belong to. Raises InvalidArgument."""
    for request in stream(recorded_sessions(path, min_peak), lanes, requests, seed):
        yield request if hints else replace(request, hints=False)


def recorded_sessions(path: Path | None, min_peak: int) -> list[Session]:
    """Sessions of a file, the bundled ones, or as many made up as `generate:COUNT` says. Raises InvalidArgument."""
    if path is not None and str(path).startswith(GENERATED):
        count = str(path).removeprefix(GENERATED)
        if not count.isascii() or not count.isdigit():
            raise InvalidArgument(f"{path}: write {GENERATED}COUNT, for example {GENERATED}500")
        return [session for session in generate(int(count), GENERATED_SEED) if peak_tokens(session) >= min_peak]
    if path is not None:
        return load_sessions(path, min_peak)
    with as_file(files("kvmanager.replay") / BUNDLED) as bundled:
        return load_sessions(bundled, min_peak)


def replay_file(
    path: Path | None,
    *,
    lanes: int,
    pool_tokens: int,
    requests: int,
    seed: int,
    policy: str,
    ranks: int,
    min_peak: int,
    hints: bool,
) -> ReplayReport:
    """Replays a file of sessions, or the bundled one; tells its progress on stderr. Raises InvalidArgument."""
    told = recorded_stream(path, lanes=lanes, requests=requests, seed=seed, min_peak=min_peak, hints=hints)
    with Console(stderr=True).status("replaying") as status:
        return replay(
            told,
            requests,
            pool_tokens,
            ranks,
            policy,
            lambda done: status.update(f"{done:,} of {requests:,} requests"),
        )


def replay_file_in_tiers(
    path: Path | None,
    *,
    lanes: int,
    pool_tokens: int,
    host_tokens: int,
    inclusion: str,
    requests: int,
    seed: int,
    policy: str,
    ranks: int,
    min_peak: int,
    hints: bool,
) -> TierReport:
    """The same with a host pool behind the device pool of `pool_tokens`."""
    if inclusion not in tuple(Inclusion):
        raise InvalidArgument(f"no inclusion {inclusion!r}; there are {', '.join(Inclusion)}")
    told = recorded_stream(path, lanes=lanes, requests=requests, seed=seed, min_peak=min_peak, hints=hints)
    with Console(stderr=True).status("replaying") as status:
        return replay_tiers(
            told,
            requests,
            pool_tokens,
            host_tokens,
            ranks,
            policy,
            Inclusion(inclusion),
            progress=lambda done: status.update(f"{done:,} of {requests:,} requests"),
        )


def _tiers_table(report: TierReport) -> Table:
    title = f"{report.policy}, {report.device_tokens:,} tokens of HBM and {report.host_tokens:,} on the host"
    table = Table(title=title, title_justify="left")
    table.add_column("of the counted requests")
    table.add_column("value", justify="right")
    for name, value in report.as_dict().items():
        if name not in ("policy", "device_tokens", "host_tokens"):
            shown = value if isinstance(value, str) else f"{value:,.4f}" if name.endswith("rate") else f"{value:,.0f}"
            table.add_row(name.replace("_", " "), str(shown))
    return table


def render(report: Report) -> Table:
    """The report for people."""
    return _tiers_table(report) if isinstance(report, TierReport) else _pool_table(report)


def _pool_table(report: ReplayReport) -> Table:
    table = Table(title=f"{report.policy}, a pool of {report.pool_tokens:,} tokens", title_justify="left")
    table.add_column("of the counted requests")
    table.add_column("value", justify="right")
    table.add_row("prompt tokens", f"{report.prompt_tokens:,}")
    table.add_row("prefix hit rate", f"{report.prefix_hit_rate:.4f}")
    table.add_row("with an infinite cache", f"{report.ceiling:.4f}")
    table.add_row("tokens prefilled", f"{report.prefilled_tokens:,}")
    table.add_row("spans evicted", f"{report.evictions:,}")
    table.add_row("spans reused in part", f"{report.partial_span_reuse:,}")
    table.add_row("their tokens, not prefilled again", f"{report.partial_span_tokens:,}")
    return table
