"""What scripts rely on: every verb has --json, its fields keep their names and types, and shells complete it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from typer.testing import CliRunner

from kvmanager.command.cli import app
from kvmanager.protos import kvmanager_pb2 as pb

SHAPES = json.loads(Path(__file__).with_name("cli_shapes.json").read_text(encoding="utf-8"))
"""Verb -> the shape of its reply when it was last changed. Fields may be added there, never taken away or retyped."""
REPLIES: dict[str, type[Any]] = {
    "status": pb.StatusReply, "pools": pb.PoolsReply, "requests": pb.RequestsReply, "prefixes": pb.PrefixesReply,
    "leases": pb.LeasesReply, "reset": pb.ResetReply, "transfers": pb.TransfersReply, "explain": pb.ExplainReply,
    "fsck": pb.FsckReply, "drain": pb.CordonReply, "undrain": pb.CordonReply, "evict": pb.EvictReply,
    "pin": pb.PinStatus, "unpin": pb.PinStatus, "pins": pb.PinsReply, "loglevel": pb.LogLevelReply,
}  # fmt: skip
"""Verbs that print a message of the wire, all of it."""
OTHERS = {"serve", "upgrade", "map", "demo", "replay", "top", "plan", "simulate", "config check", "config show"}
"""Verbs whose object is their own; their tests name its keys."""
TEXT = {FieldDescriptor.TYPE_STRING: "text", FieldDescriptor.TYPE_BOOL: "bool", FieldDescriptor.TYPE_BYTES: "u8[]"}


def verbs(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    if hasattr(command, "commands"):
        for word, each in command.commands.items():
            yield from verbs(each, f"{name} {word}".strip())
    else:
        yield name, command


ALL = dict(verbs(typer.main.get_command(app)))


def shape(message: Descriptor) -> dict[str, Any]:
    """Field -> what JSON has there, as `clients.admin.to_plain` writes it."""
    found: dict[str, Any] = {}
    for field in message.fields:
        inner: Any = TEXT.get(field.type, "number")
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            inner = {"*": "number"}
        elif field.message_type is not None:
            inner = shape(field.message_type)
            inner = [inner] if field.is_repeated else inner
        elif field.is_repeated:
            inner = [inner]
        found[field.name] = inner
    return found


def kept(before: Any, now: Any, where: str = "") -> list[str]:
    """Paths of what was there and is gone or of another type."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [path for name, each in before.items() for path in kept(each, now.get(name), f"{where}.{name}")]
    if isinstance(before, list) and isinstance(now, list):
        return kept(before[0], now[0], f"{where}[]")
    return [] if before == now else [where]


@pytest.mark.parametrize("verb", ALL)
def test_every_verb_prints_json(verb: str) -> None:
    options = {option for parameter in ALL[verb].params for option in parameter.opts}
    assert "--json" in options, verb


@pytest.mark.parametrize("verb", REPLIES)
def test_the_shape_of_a_reply_only_grows(verb: str) -> None:
    assert kept(SHAPES[verb], shape(REPLIES[verb].DESCRIPTOR)) == []


def test_every_verb_has_a_known_shape() -> None:
    assert set(SHAPES) == set(REPLIES)
    named = {verb for verb in ALL if verb.partition(" ")[0] != "pressure"}
    assert named == set(REPLIES) | OTHERS


def test_a_lost_field_and_another_type_are_found() -> None:
    now = shape(pb.PoolsReply.DESCRIPTOR)
    del now["pools"][0]["free_bytes"]
    now["regions"] = "text"
    assert kept(SHAPES["pools"], now) == [".pools[].free_bytes", ".regions"]


def completed(line: str) -> set[str]:
    """What bash is offered at the end of a line."""
    words = line.split(" ")
    environment = {
        "_KVMANAGER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1),
    }  # fmt: skip
    done = CliRunner().invoke(app, [], prog_name="kvmanager", env=environment)
    assert done.exit_code == 0, (done.output, done.exception)
    return set(done.output.split())


def test_shells_complete_verbs_and_options() -> None:
    assert completed("kvmanager ex") == {"explain"}
    assert {"drain", "demo"} <= completed("kvmanager d")
    assert completed("kvmanager config ") == {"check", "show"}
    assert "--pool" in completed("kvmanager evict g --p")
    assert "--json" in completed("kvmanager status --")


def test_the_completion_script_is_one(tmp_path: Path) -> None:
    environment = {"_KVMANAGER_COMPLETE": "source_bash"}
    done = CliRunner().invoke(app, [], prog_name="kvmanager", env=environment)
    assert done.exit_code == 0, done.output
    assert "complete" in done.output
    script = tmp_path / "completion"
    script.write_text(done.output)
    subprocess.run(["bash", "-n", str(script)], check=True)
