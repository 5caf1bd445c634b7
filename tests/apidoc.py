"""docs/api.md, from kvmanager.proto and its comments: `python -m tests.apidoc` prints it, `make docs` writes it."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

ROOT: Final = Path(__file__).resolve().parents[1]
PROTO: Final = ROOT / "protos" / "kvmanager.proto"
HEAD: Final = """\
# The wire

Made from `protos/kvmanager.proto` by `make docs`; a change belongs there. Everything is in package `{package}`. A node
serves it on the unix socket that `attach.sock` in its runtime directory names to a client, together with gRPC health
and reflection.
"""
# Numbers of fields in FileDescriptorProto, DescriptorProto and so on, as paths of source locations use them.
MESSAGE, ENUM, SERVICE, SYNTAX = 4, 5, 6, 12
FIELD, NESTED, NESTED_ENUM, ONEOF, VALUE, METHOD = 2, 3, 4, 8, 2, 2
Place = tuple[int, ...]


class Proto:
    """The file's descriptor, and its comments by place."""

    def __init__(self) -> None:
        """Runs protoc."""
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "descriptors"
            outputs = ["--include_source_info", f"--descriptor_set_out={target}"]
            command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO.parent), *outputs, str(PROTO)]
            subprocess.run(command, check=True, capture_output=True)
            self.file: FileDescriptorProto = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file[0]
        places = {tuple(location.path): location for location in self.file.source_code_info.location}
        self._comments = {
            path: " ".join((place.leading_comments + place.trailing_comments).split()) for path, place in places.items()
        }
        syntax = places[SYNTAX,]
        head = syntax.leading_comments or "".join(syntax.leading_detached_comments)
        self.conventions = [line.removeprefix(" ").rstrip() for line in head.strip("\n").splitlines()]

    def said(self, *path: int) -> str:
        """The comment there, on one line, as a cell of a table."""
        return self._comments.get(path, "").replace("|", "\\|").replace("<", "&lt;")


def page() -> str:
    """The whole document."""
    proto = Proto()
    lines = [HEAD.format(package=proto.file.package), *_conventions(proto.conventions)]
    for number, service in enumerate(proto.file.service):
        lines += _service(proto, service, number)
    lines += ["## Messages", ""]
    for number, message in enumerate(proto.file.message_type):
        lines += _message(proto, message, message.name, (MESSAGE, number))
    lines += ["## Enumerations", ""]
    for number, enum in enumerate(proto.file.enum_type):
        lines += _enum(proto, enum, enum.name, (ENUM, number))
    return "\n".join(lines).rstrip("\n") + "\n"


def _conventions(lines: list[str]) -> list[str]:
    """The comment at the head of the file: its bullets are a list already."""
    found = [re.sub(r"^\* ", "- ", line) for line in lines if line]
    return ["## Conventions", "", *found[found.index("Conventions") + 1 :], ""]


def _service(proto: Proto, service: ServiceDescriptorProto, number: int) -> list[str]:
    lines = [f"## {service.name}", "", proto.said(SERVICE, number), ""]
    lines += ["| call | takes | gives | |", "|---|---|---|---|"]
    for at, method in enumerate(service.method):
        takes = ("stream of " if method.client_streaming else "") + _link(method.input_type)
        gives = ("stream of " if method.server_streaming else "") + _link(method.output_type)
        lines.append(f"| `{method.name}` | {takes} | {gives} | {proto.said(SERVICE, number, METHOD, at)} |")
    return [*lines, ""]


def _message(proto: Proto, message: DescriptorProto, name: str, path: Place) -> list[str]:
    lines = [f"### {name}", "", proto.said(*path), ""]
    nested = {each.name: each for each in message.nested_type}
    if message.field:
        lines += ["| field | type | no. | |", "|---|---|---|---|"]
    for at, field in enumerate(message.field):
        one_of = f" (one of `{message.oneof_decl[field.oneof_index].name}`)" if _is_choice(field) else ""
        text = proto.said(*path, FIELD, at)
        lines.append(f"| `{field.name}` | {_type(field, nested)} | {field.number} | {text}{one_of} |")
    lines += [""] if message.field else []
    for at, choice in enumerate(message.oneof_decl):
        if not choice.name.startswith("_"):
            lines += [f"`{choice.name}`: {proto.said(*path, ONEOF, at)}", ""]
    for at, enum in enumerate(message.enum_type):
        lines += _enum(proto, enum, f"{name}.{enum.name}", (*path, NESTED_ENUM, at))
    for at, inner in enumerate(message.nested_type):
        if not inner.options.map_entry:
            lines += _message(proto, inner, f"{name}.{inner.name}", (*path, NESTED, at))
    return lines


def _enum(proto: Proto, enum: EnumDescriptorProto, name: str, path: Place) -> list[str]:
    lines = [f"### {name}", "", proto.said(*path), "", "| value | no. | |", "|---|---|---|"]
    lines += [f"| `{v.name}` | {v.number} | {proto.said(*path, VALUE, at)} |" for at, v in enumerate(enum.value)]
    return [*lines, ""]


def _is_choice(field: FieldDescriptorProto) -> bool:
    return field.HasField("oneof_index") and not field.proto3_optional


def _type(field: FieldDescriptorProto, nested: dict[str, DescriptorProto]) -> str:
    entry = nested.get(field.type_name.rpartition(".")[2])
    if entry is not None and entry.options.map_entry:
        key, value = (_plain_type(each) for each in entry.field)
        return f"map of {key} to {value}"
    repeated = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
    optional = "optional " if field.proto3_optional else ""
    return f"{repeated}{optional}{_plain_type(field)}"


def _plain_type(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(type_name: str) -> str:
    """`.kvmanager.v1.A.B` as a link to its heading."""
    name = ".".join(part for part in type_name.split(".") if part[:1].isupper())
    return f"[{name}](#{name.replace('.', '').lower()})"


def anchors(text: str) -> Iterator[str]:
    """Of every heading, as readers of Markdown make them."""
    for title in re.findall(r"^#+ (.+)$", text, flags=re.M):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    sys.stdout.write(page())
