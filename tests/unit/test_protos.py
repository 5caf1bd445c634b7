"""The wire contract: generated code is fresh, and everything in it says what it is and in which unit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvmanager.protos import kvmanager_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "protos" / "kvmanager.proto"
GENERATED = ("kvmanager_pb2.py", "kvmanager_pb2.pyi", "kvmanager_pb2_grpc.py")
NUMBERS = {
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_INT64,
}
PACKED = re.compile(r"(u8|u32|u64|i64)\[[a-z ]+\]: ")
"""What the comment of a `bytes` field starts with, unless it holds keys or means nothing to us."""
KEYS = re.compile(r"key\[[a-z_ ]+\]")
UNITS = re.compile(
    r"\b(bytes?|nanoseconds|tokens?|positions?|counts?|ids?|index(es)?|number|value|generation|keys|replies|notices"
    r"|flag|no unit)\b"
)
"""Words of which the comment of a number has at least one."""
UNIT_OF_ENDING = {
    "bytes": r"\bbytes\b",
    "ns": r"\bnanoseconds\b",
    "tokens": r"\btokens?\b",
    "id": r"\bid\b",
    "ids": r"\bids?\b",
    "pages": r"\b(index(es)?|entries)\b",
    "offset": r"\bbytes\b",
    "offsets": r"\bbytes\b",
    "stride": r"\bbytes\b",
    "strides": r"\bbytes\b",
    "address": r"\b(bytes|runtime directory)\b",
    "addresses": r"\bbytes\b",
    "counts": r"\bcount\b",
    "ordinals": r"\bindex\b",
    "fingerprint": r"\b(hex|name)\b",
}
"""The last word of a field's name -> what its comment must say."""
# Numbers of fields in FileDescriptorProto, DescriptorProto and so on, as paths of source locations use them.
MESSAGE, ENUM, SERVICE = 4, 5, 6
FIELD, NESTED, NESTED_ENUM, ONEOF, VALUE, METHOD = 2, 3, 4, 8, 2, 2


def _described(folder: Path) -> dict[str, str]:
    """Dotted name of everything in the file -> its comment on one line, "" where it has none."""
    target = folder / "descriptors"
    outputs = ["--include_source_info", f"--descriptor_set_out={target}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO.parent), *outputs, str(PROTO)]
    subprocess.run(command, check=True, capture_output=True)
    file = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file[0]
    comments = {
        tuple(location.path): " ".join((location.leading_comments + location.trailing_comments).split())
        for location in file.source_code_info.location
    }
    return {name: comments.get(path, "") for name, path in _names(file)}


def _names(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(dotted name, source path) of everything that a person writes into the file."""
    for number, message in enumerate(file.message_type):
        yield from _names_in_message(message, message.name, (MESSAGE, number))
    for number, enum in enumerate(file.enum_type):
        yield from _names_in_enum(enum, enum.name, (ENUM, number))
    for number, service in enumerate(file.service):
        yield service.name, (SERVICE, number)
        for at, method in enumerate(service.method):
            yield f"{service.name}.{method.name}", (SERVICE, number, METHOD, at)


def _names_in_message(
    message: descriptor_pb2.DescriptorProto, name: str, path: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name, path
    for number, field in enumerate(message.field):
        yield f"{name}.{field.name}", (*path, FIELD, number)
    for number, oneof in enumerate(message.oneof_decl):
        yield f"{name}.{oneof.name}", (*path, ONEOF, number)
    for number, enum in enumerate(message.enum_type):
        yield from _names_in_enum(enum, f"{name}.{enum.name}", (*path, NESTED_ENUM, number))
    for number, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _names_in_message(nested, f"{name}.{nested.name}", (*path, NESTED, number))


def _names_in_enum(
    enum: descriptor_pb2.EnumDescriptorProto, name: str, path: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name, path
    for number, value in enumerate(enum.value):
        yield f"{name}.{value.name}", (*path, VALUE, number)


def _messages() -> list[Descriptor]:
    return [message for _, message in sorted(pb.DESCRIPTOR.message_types_by_name.items())]


@pytest.fixture(scope="module")
def comments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _described(tmp_path_factory.mktemp("protos"))


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    """`make protos` would change nothing."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO.parent), *outputs, str(PROTO)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    grpc_file = tmp_path / "kvmanager_pb2_grpc.py"
    text = grpc_file.read_text(encoding="utf-8")
    fixed = re.sub(r"^import kvmanager_pb2 as", "from kvmanager.protos import kvmanager_pb2 as", text, flags=re.M)
    grpc_file.write_text(fixed, encoding="utf-8")
    for name in GENERATED:
        assert (tmp_path / name).read_text() == (PROTO.parent / name).read_text(), f"{name} is stale: run `make protos`"


def test_everything_has_a_comment(comments: dict[str, str]) -> None:
    """Messages, fields, oneofs, enums and their values, services and calls."""
    assert [name for name, comment in comments.items() if not comment] == []
    for message in _messages():  # the comments are of this very contract
        assert {f"{message.name}.{field.name}" for field in message.fields} <= comments.keys()


@pytest.mark.parametrize("message", _messages(), ids=lambda message: message.name)
def test_fields_say_their_unit(message: Descriptor, comments: dict[str, str]) -> None:
    wrong = []
    for field in message.fields:
        comment = comments[f"{message.name}.{field.name}"]
        if field.type == FieldDescriptor.TYPE_BYTES:
            start = KEYS if field.name == "keys" or field.name.endswith("_keys") else PACKED
            if not (start.match(comment) or comment.startswith("opaque: ")):
                wrong.append(f"{field.name}: bytes with no element type: {comment!r}")
        elif field.type in NUMBERS and not UNITS.search(comment):
            wrong.append(f"{field.name}: a number with no unit: {comment!r}")
        said = UNIT_OF_ENDING.get(field.name.rpartition("_")[2])
        if said and field.message_type is None and not re.search(said, comment):
            wrong.append(f"{field.name}: {comment!r} does not say {said}")
    assert wrong == []


def test_sizes_and_durations_have_their_unit_last() -> None:
    """Names that clients rely on: the unit is part of them."""
    named = {
        "size_bytes": pb.Region, "page_bytes": pb.Region, "key_bytes": pb.Namespace, "message_bytes": pb.Limits,
        "row_bytes": pb.Component, "moved_bytes": pb.Completion, "capacity_bytes": pb.PoolStatus,
        "retry_after_ns": pb.Error, "lease_ttl_ns": pb.Ticket, "deadline_ns": pb.Pull, "uptime_ns": pb.StatusReply,
        "expires_in_ns": pb.LeaseStatus, "busy_ns": pb.Completion, "prompt_tokens": pb.OpenRequest,
        "growth_tokens": pb.OpenRequest, "cached_tokens": pb.OpenReply, "committed_tokens": pb.Ticket,
        "key_tokens": pb.Namespace,
    }  # fmt: skip
    for name, message in named.items():
        assert message.DESCRIPTOR.fields_by_name[name].type in NUMBERS, f"{message.DESCRIPTOR.name}.{name}"


def test_durations_end_in_ns(comments: dict[str, str]) -> None:
    found = [name for name, comment in comments.items() if "nanoseconds" in comment and not name.endswith("_ns")]
    assert found == []


def test_lines_fit_the_page() -> None:
    long = [line for line in PROTO.read_text(encoding="utf-8").splitlines() if len(line) > 120]
    assert long == []


def test_nothing_repeats_per_page() -> None:
    """Numbers travel packed in `bytes`; a repeated number would be one varint a page."""
    found = [
        f"{message.name}.{field.name}"
        for message in _messages()
        for field in message.fields
        if field.is_repeated and field.type in NUMBERS
    ]
    assert found == []
