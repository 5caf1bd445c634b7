"""The wire contract: generated code is fresh, and every field says its unit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
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
SAYS_ITS_UNIT = re.compile(
    r"_(bytes|ns|tokens|rows|id|ids|number|bits)$"
    r"|^(boot_id|epoch|number|rank|ranks|layer|incarnation|mover_incarnation|peer_incarnation|pid)$"
    r"|^(spans|tokens|pins|requests|ranks_attached|host_only_spans|outstanding|offset|source_region|target_region)$"
)
"""Names that need no comment: the file's header gives the unit of bytes, durations, positions and counts."""


def _comments() -> dict[str, str]:
    """`Message.field` (innermost message) -> its trailing comment, "" if it has none."""
    table: dict[str, str] = {}
    scope: list[str] = []
    for line in PROTO.read_text(encoding="utf-8").splitlines():
        code, _, comment = line.partition("//")
        opened = re.match(r"\s*(message|enum|oneof|service)\s+(\w+)\s*\{", code)
        if opened:
            scope.append(opened.group(2) if opened.group(1) != "oneof" else scope[-1])
        elif field := re.match(r"\s*(?:repeated\s+)?[\w.<>, ]+\s+(\w+)\s*=\s*\d+\s*;", code):
            table[f"{scope[-1]}.{field.group(1)}"] = comment.strip()
        if code.count("}") and scope:
            del scope[len(scope) - max(0, code.count("}") - (code.count("{") - bool(opened))) :]
    return table


def _messages() -> list[Descriptor]:
    return [message for name, message in sorted(pb.DESCRIPTOR.message_types_by_name.items()) if name]


COMMENTS = _comments()


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


@pytest.mark.parametrize("message", _messages(), ids=lambda message: message.name)
def test_fields_say_their_unit(message: Descriptor) -> None:
    missing = []
    for field in message.fields:
        comment = COMMENTS[f"{message.name}.{field.name}"]
        packed = re.match(r"(u8|u32|u64|i64)\[\w*\]", comment)
        if field.type == FieldDescriptor.TYPE_BYTES:
            keys = field.name == "keys" or field.name.endswith("_keys")
            opaque = field.name == "agent_metadata"
            if not (packed or keys or opaque):
                missing.append(f"{field.name}: bytes with no element type")
        elif field.type in NUMBERS and not comment and not SAYS_ITS_UNIT.search(field.name):
            missing.append(f"{field.name}: number with no unit")
    assert missing == []


def test_nothing_repeats_per_page() -> None:
    """Numbers travel packed in `bytes`; a repeated number would be one varint a page."""
    found = [
        f"{message.name}.{field.name}"
        for message in _messages()
        for field in message.fields
        if field.is_repeated and field.type in NUMBERS
    ]
    assert found == []
