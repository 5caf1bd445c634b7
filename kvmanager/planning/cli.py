"""`kvmanager plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table

from kvmanager.command.clibase import AsJson, one_line_errors, print_json
from kvmanager.errors import InvalidArgument
from kvmanager.planning.models import load_model
from kvmanager.planning.modes import Machine, Mode, config_text
from kvmanager.planning.plan import ModePlan, Plan, make_plan
from kvmanager.simulation.cli import size_asked
from kvmanager.simulation.rates import link_rates
from kvmanager.units import format_bytes

CAPTION = "pages: of a rank. onboard, NIC, NVLink: seconds to load one from the host, to hand it over by a link."
LENGTHS = (142_000, 256_000, 1_048_576)


def plan(
    model: Annotated[str, typer.Option(help="glm-5.3, or the TOML file of a model.")] = "glm-5.3",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the node.")] = 8,
    hbm_free: Annotated[str, typer.Option(help="HBM a GPU for KV pages, without workspace and rings.")] = "15GiB",
    host: Annotated[str, typer.Option(help="Host memory of the node for KV.")] = "512GiB",
    context: Annotated[int, typer.Option(min=0, help="Longest request that must fit; 0: the model's longest.")] = 0,
    role: Annotated[str, typer.Option(help="prefill or decode: what the recommendation is for.")] = "prefill",
    mode: Annotated[str, typer.Option(help="Write this mode's file instead of the recommended one.")] = "",
    page_rows: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 64,
    write: Annotated[Path | None, typer.Option(help="Write the configuration here.")] = None,
    runtime_dir: Annotated[Path, typer.Option(help="Of the node that the file is for.")] = Path("/run/kvmanager/node"),
    as_json: AsJson = False,
) -> None:
    """Say which parallel modes hold which contexts on a node, and write a configuration for it."""
    with one_line_errors():
        shape = load_model(model)
        machine = Machine(gpus, size_asked(hbm_free, "--hbm-free"), size_asked(host, "--host"))
        if role not in ("prefill", "decode"):
            raise InvalidArgument(f"no role {role!r}; there are prefill and decode")
        if mode and mode not in tuple(Mode):
            raise InvalidArgument(f"no mode {mode!r}; there are {', '.join(Mode)}")
        lengths = tuple(tokens for tokens in LENGTHS if tokens <= shape.max_tokens) or (shape.max_tokens,)
        wanted = context or shape.max_tokens
        made = make_plan(shape, machine, lengths, wanted, role == "decode", page_rows, link_rates())
        chosen = Mode(mode) if mode else made.recommended
        if write is not None:
            if chosen is None:
                raise InvalidArgument(f"nothing is written: {made.reason}")
            write.write_text(config_text(chosen, shape, machine, page_rows, runtime_dir), encoding="utf-8")
    if as_json:
        print_json({**made.as_dict(), "written": None if write is None else str(write)})
    else:
        Console(highlight=False).print(render(made))


def render(made: Plan) -> RenderableType:
    """The plan for people."""
    machine = made.machine
    title = (
        f"{made.model}, {made.token_bytes:,} B a token: {machine.gpus} GPUs with {format_bytes(machine.hbm_bytes)} "
        f"each for pages, {format_bytes(machine.host_bytes)} of host memory"
    )
    table = Table(title=title, caption=CAPTION, box=SIMPLE_HEAD, padding=0)
    table.title_justify = table.caption_justify = "left"
    for name in ("mode", "longest", "pages", "tokens", "at once", "cached", "onboard", "NIC", "NVLink"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for plan_ in made.modes:
        for row in _rows(plan_):
            table.add_row(*row)
    beside = [
        f"{plan_.mode}: {format_bytes(plan_.workspace_bytes)} of workspace on each GPU beside the pages"
        for plan_ in made.modes
        if plan_.workspace_bytes
    ]
    why_not = [f"{plan_.mode}: {plan_.why_not}" for plan_ in made.modes if plan_.why_not]
    advice = f"recommended: {made.recommended or 'none'} ({made.reason})"
    return Group(table, *beside, *why_not, advice)


def _rows(plan_: ModePlan) -> list[tuple[str, ...]]:
    rows = []
    for number, length in enumerate(plan_.lengths):
        head = (plan_.mode.value, f"{plan_.longest_tokens:,}", f"{plan_.hbm_pages_per_rank:,}")
        times = (length.onboard_s, *length.handoff_s.values())
        shown = tuple(f"{seconds:.3f}" for seconds in times)
        counts = (f"{length.tokens:,}", str(length.at_once), str(length.cached))
        rows.append((*(head if number == 0 else ("", "", "")), *counts, *shown))
    return rows
