"""`kvmanager replay`: the table or the JSON object of one replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvmanager.core.spec import Inclusion
from kvmanager.errors import InvalidArgument
from kvmanager.replay.arrivals import OpenLoop, format_of, load_arrivals
from kvmanager.replay.generator import generate
from kvmanager.replay.lanes import RULES, Lanes, Source, told
from kvmanager.replay.live import LiveReport, LiveTarget, replay_live
from kvmanager.replay.run import ReplayReport, replay
from kvmanager.replay.stream import Request, Session, load_sessions, peak_tokens
from kvmanager.replay.tierreport import TierReport
from kvmanager.replay.tiers import replay_tiers

__all__ = [
    "Asked", "LiveTarget", "recorded_sessions", "render", "replay_file", "replay_file_in_tiers", "replay_file_live",
]  # fmt: skip

Report = ReplayReport | TierReport
BUNDLED = "data/claude-code-710.jsonl.xz"
SAMPLES = {
    "bundled:mooncake": "data/mooncake-conversation-1000.jsonl.xz",
    "bundled:azure-code": "data/azure-code-2000.csv.xz",
}
"""Parts of published traces that come with the product; see data/NOTICE."""
GENERATED, GENERATED_SEED = "generate:", 710


@dataclass(frozen=True)
class Asked:
    """Whose requests are replayed, and how. path: None for the bundled sessions.

    requests: how many. min_peak: only sessions with a prompt of so many tokens. hints: whether requests tell their
    session. rules: of `lanes.RULES`. holds: see `Course`.
    """

    path: Path | None = None
    lanes: int = 64
    requests: int = 8_000
    seed: int = 42
    min_peak: int = 0
    hints: bool = True
    rules: str = "tables"
    holds: float = 0.0


def source_of(asked: Asked) -> Source:
    """Who asks when. Raises InvalidArgument."""
    path = asked.path
    if path is not None and str(path) in SAMPLES:
        with as_file(files("kvmanager.replay") / SAMPLES[str(path)]) as bundled:
            return source_of(replace(asked, path=bundled))
    read = None if path is None or str(path).startswith(GENERATED) else format_of(path)
    if path is not None and read is not None:
        return OpenLoop(load_arrivals(path, read))
    if asked.rules not in RULES:
        raise InvalidArgument(f"no rules {asked.rules!r}; there are {', '.join(RULES)}")
    lanes = Lanes(recorded_sessions(path, asked.min_peak), asked.lanes, asked.seed, RULES[asked.rules])
    return lanes if asked.hints else Untold(lanes)


class Untold:
    """The same requests, and nobody tells which session they belong to."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def next_s(self) -> float:
        """See `Source`."""
        return self._source.next_s

    def take(self) -> Request:
        """See `Source`."""
        return replace(self._source.take(), hints=False)

    def ended(self, request: Request, end_s: float) -> None:
        """See `Source`."""
        self._source.ended(request, end_s)

    def idle(self, now_s: float) -> None:
        """See `Source`."""
        self._source.idle(now_s)


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


@contextmanager
def _progress(requests: int) -> Iterator[Callable[[int], None]]:
    """Tells on stderr how far a replay is."""
    with Console(stderr=True).status("replaying") as status:
        yield lambda done: status.update(f"{done:,} of {requests:,} requests")


def replay_file(asked: Asked, *, pool_tokens: int, policy: str, ranks: int) -> ReplayReport:
    """One pool. Raises InvalidArgument."""
    with _progress(asked.requests) as progress:
        requests = told(source_of(asked), asked.requests)
        return replay(requests, asked.requests, pool_tokens, ranks, policy, progress)


def replay_file_in_tiers(
    asked: Asked, *, pool_tokens: int, host_tokens: int, inclusion: str, policy: str, ranks: int
) -> TierReport:
    """The same with a host pool behind the device pool, none at `host_tokens` 0; requests may hold their pages."""
    if inclusion not in tuple(Inclusion):
        raise InvalidArgument(f"no inclusion {inclusion!r}; there are {', '.join(Inclusion)}")
    with _progress(asked.requests) as progress:
        return replay_tiers(
            source_of(asked), asked.requests, pool_tokens, host_tokens, ranks, policy, Inclusion(inclusion),
            progress=progress, holds=asked.holds,
        )  # fmt: skip


def replay_file_live(asked: Asked, where: LiveTarget) -> LiveReport:
    """The same on a running node. Raises InvalidArgument, NotReady."""
    with _progress(asked.requests) as progress:
        return replay_live(source_of(asked), asked.requests, asked.holds, where, progress)


def _tiers_table(report: TierReport) -> Table:
    title = f"{report.policy}, {report.device_tokens:,} tokens of HBM and {report.host_tokens:,} on the host"
    table = Table(title=title, title_justify="left")
    table.add_column("of the counted requests")
    table.add_column("value", justify="right")
    for name, value in report.as_dict().items():
        if isinstance(value, dict):
            for key, inner in value.items():
                table.add_row(f"{name.replace('_', ' ')}, {key}", _shown(name, inner))
        elif name not in ("policy", "device_tokens", "host_tokens"):
            table.add_row(name.replace("_", " "), _shown(name, value))
    return table


def _shown(name: str, value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}" if name.endswith("rate") else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


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
