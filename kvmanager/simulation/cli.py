"""`kvmanager simulate`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table

from kvmanager.command.clibase import AsJson, one_line_errors, print_json
from kvmanager.errors import InvalidArgument
from kvmanager.replay.cli import recorded_sessions
from kvmanager.simulation.costs import committed_costs
from kvmanager.simulation.deployment import DEPLOYMENTS, Settings
from kvmanager.simulation.experiments import Million, gains, million
from kvmanager.simulation.experiments import simulate as run
from kvmanager.simulation.report import Comparison, SimulationReport, compare, partners
from kvmanager.units import parse_bytes


def simulate(
    deployment: Annotated[str, typer.Option(help=f"{', '.join(DEPLOYMENTS)}, or all.")] = "pcp8dcp8-hisparse",
    concurrency: Annotated[int, typer.Option(min=1, help="Sessions at one time.")] = 32,
    seconds: Annotated[float, typer.Option(min=1, help="Virtual time that counts, after the warm-up.")] = 600.0,
    context: Annotated[int, typer.Option(min=128, help="Longest prompt with its answer; a session ends there.")] = (
        142_000
    ),
    min_peak: Annotated[int, typer.Option(min=0, help="Only sessions that recorded a prompt of so many tokens.")] = 0,
    file: Annotated[Path | None, typer.Option(help="JSON lines, .xz, or generate:COUNT; default: bundled.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order of sessions and where they start.")] = 42,
    decode_hbm: Annotated[str, typer.Option(help="HBM of a decode rank for pages; default: as published.")] = "",
    alone: Annotated[bool, typer.Option("--alone", help="Don't run what it is compared with.")] = False,
    with_gains: Annotated[bool, typer.Option("--gains", help="Also what it could gain: seven runs instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a published deployment in virtual time on the real core, and set it beside what was published."""
    with one_line_errors(), Console(stderr=True).status("simulating") as status:
        names = list(DEPLOYMENTS) if deployment == "all" else [deployment]
        if not alone and deployment != "all":
            names += partners(deployment, concurrency)
        hbm_bytes = size_asked(decode_hbm, "--decode-hbm") if decode_hbm else 0
        settings = {
            name: Settings(name, concurrency, seconds, seed, decode_hbm_bytes=hbm_bytes) for name in names
        }  # fmt: skip
        sessions, costs = recorded_sessions(file, min_peak), committed_costs()
        reports, millions = {}, {}
        for name, setting in settings.items():
            status.update(f"simulating {name}")
            reports[name] = run(setting, sessions, context, costs)
            millions[name] = million(name, costs)
        gained: dict[str, SimulationReport] = {}
        if with_gains:
            status.update(f"simulating what {names[0]} could gain")
            gained = gains(settings[names[0]], sessions, context, costs)
    compared = compare(concurrency, reports)
    if as_json:
        print_json(_plain(reports, millions, compared, gained))
    else:
        Console(highlight=False).print(render(reports, millions, compared, gained))


def _plain(
    reports: dict[str, SimulationReport],
    millions: dict[str, Million],
    compared: list[Comparison],
    gained: dict[str, SimulationReport],
) -> dict[str, Any]:
    return {
        "runs": {name: report.as_dict() for name, report in reports.items()},
        "one_million_tokens": {name: asdict(found) for name, found in millions.items()},
        "published": [{**asdict(line), "sign": line.sign, "met": line.met} for line in compared],
        "misses": _misses(millions, compared),
        "gains": {name: report.as_dict() for name, report in gained.items()},
    }


def _misses(millions: dict[str, Million], compared: list[Comparison]) -> list[str]:
    found = [f"{line.name}: {line.ratio:.2f}, required {line.required}" for line in compared if not line.met]
    found += [f"{line.name}: {line.ratio:.2f}, published {line.published}" for line in compared if not line.sign]
    return found + [f"1M tokens on {name}: {m.served}" for name, m in millions.items() if m.served != m.expected]


def size_asked(text: str, option: str) -> int:
    """Bytes. Raises InvalidArgument."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InvalidArgument(f"{option}: {error}") from error


_SHOWN = (
    "requests", "refused", "ttft_p50_s", "ttft_p90_s", "tokens_per_s_per_user_p50", "tokens_per_s_per_user_p10",
    "logical_tokens_per_s_per_gpu", "hit_rate", "prefilled_tokens", "prefill_busy", "decode_busy", "most_decoding",
    "waited_prefill", "waited_decode", "evictions", "onboarded", "spills",
)  # fmt: skip


def _side_by_side(title: str, reports: dict[str, SimulationReport]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("of the counted requests")
    for name in reports:
        table.add_column(name, justify="right")
    for field in _SHOWN:
        values = [report.as_dict()[field] for report in reports.values()]
        shown = [f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" for value in values]
        table.add_row(field.replace("_", " "), *shown)
    return table


def render(
    reports: dict[str, SimulationReport],
    millions: dict[str, Million],
    compared: list[Comparison],
    gained: dict[str, SimulationReport],
) -> RenderableType:
    """The result for people."""
    parts: list[RenderableType] = [_side_by_side("simulated", reports)]
    for name, found in millions.items():
        said = f"served, first token after {found.ttft_s:.1f} s" if found.served else f"not served: {found.refusal}"
        parts.append(f"1,048,576 tokens on {name}: {said}")
    table = Table(title="beside what was published", title_justify="left")
    for column in ("ratio", "published", "required", "here", "sign", ""):
        table.add_column(column)
    for line in compared:
        ranges = [f"{low:g} to {high:g}" for low, high in (line.published, line.required)]
        sign, met = "same" if line.sign else "OTHER", "" if line.met else "MISSED"
        table.add_row(line.name, *ranges, f"{line.ratio:.2f}", sign, met)
    parts.append(table if compared else "nothing was published to compare this with at so many sessions")
    if gained:
        parts.append(_side_by_side("gains", gained))
    return Group(*parts)
