"""What every command needs: finding the node, asking it, printing the answer, and one exit code an error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from google.protobuf.message import Message
from rich.console import Console, RenderableType

from kvmanager.clients.admin import AdminClient, to_plain
from kvmanager.configuration.reading import read_config
from kvmanager.errors import ConfigError, KVError, NotReady
from kvmanager.exitcodes import EXIT_CONFIG, EXIT_FAILED
from kvmanager.keeper import refusal

EXIT_UNREACHABLE: Final = 3
EXIT_BROKEN: Final = 4
"""Of `fsck`: something does not fit together."""

R = TypeVar("R", bound=Message)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
RuntimeDir = Annotated[Path | None, typer.Option(help="The node's runtime directory.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="The node's configuration, to find it.")]

@contextmanager
def one_line_errors() -> Iterator[None]:
    """Typed errors become one line on stderr and the documented exit code."""
    try:
        yield
    except KVError as error:
        print(f"error: {error}", file=sys.stderr)
        codes = {ConfigError: EXIT_CONFIG, NotReady: EXIT_UNREACHABLE}
        raise typer.Exit(codes.get(type(error), EXIT_FAILED)) from error


def find_node(runtime_dir: Path | None, config: Path | None) -> Path:
    """The runtime directory of the node that is meant. Raises typer.BadParameter, ConfigError."""
    if (runtime_dir is None) == (config is None):
        raise typer.BadParameter("say which node: either --runtime-dir DIR or --config FILE")
    if runtime_dir is not None:
        return runtime_dir
    assert config is not None, "one of the two is set"
    return read_config(config).node.runtime_dir


def admin_of(where: Path) -> AdminClient:
    """An operator's client. Raises NotReady, with the keeper's word on why no daemon serves where it has left one."""
    try:
        return AdminClient(where)
    except NotReady as error:
        note = refusal.read(where)
        raise error if note is None else NotReady(note) from error


def print_json(value: Any) -> None:
    """One JSON value on stdout."""
    print(json.dumps(value, indent=2))


def show(
    runtime_dir: Path | None,
    config: Path | None,
    as_json: bool,
    ask: Callable[[AdminClient], R],
    screen: Callable[[R], RenderableType],
    plain: Callable[[R], dict[str, Any]] = to_plain,
) -> None:
    """Asks the node one question and prints the answer."""
    with one_line_errors():
        with admin_of(find_node(runtime_dir, config)) as client:
            reply = ask(client)
        if as_json:
            print_json(plain(reply))
        else:
            Console(highlight=False).print(screen(reply))
