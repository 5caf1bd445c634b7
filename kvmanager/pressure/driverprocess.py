"""A driver in a process of its own, which can be stopped and killed; asked and answered by one JSON object a line.

    python -m kvmanager.pressure.driverprocess DRIVER

It says {"ok": true} once it has attached. Then: {"do": "step", "message": HEX of a StepRequest} -> HEX of a StepReply;
{"do": "ready", "request_id": N} -> HEX of an OpenReply or null; {"do": "write", "request_id": N, "start": N, "digests":
HEX, u64 little-endian} -> null; {"do": "read", "rank": N, "page_class": NAME, "tier": NAME, "pages": [N, ...]} -> HEX
of their bytes; {"do": "export", "request_id": N} -> HEX of a Ticket; {"do": "leave"} -> null. Answers
are {"ok": ...} or {"error": HEX of an Error}. So a client in any language can be driven: `--driver-command`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmanager.clients.engine import RequestStep
from kvmanager.errors import DaemonError, KVError
from kvmanager.pressure.content import U64Array
from kvmanager.pressure.driver import Driver, Target, driver_named
from kvmanager.pressure.places import Int64Array
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import error_from_proto, error_to_proto, pack_u32, pack_u64, unpack_u32, unpack_u64


class DriverProcess:
    """A `Driver` whose process this is the parent of."""

    def __init__(self, command: Sequence[str], target: Target, name: str) -> None:
        """Starts it and waits until it has attached. Raises the daemon's typed error."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        told = {**dataclasses.asdict(target), "runtime_dir": str(target.runtime_dir), "name": name}
        self._ask(told)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise DaemonError(f"the driver's process ended with {code} while asked {question.get('do')}")
        answer = json.loads(line)
        if "error" in answer:
            raise error_from_proto(pb.Error.FromString(bytes.fromhex(answer["error"])))
        return answer["ok"]

    def step(
        self, opens: Sequence[pb.OpenRequest], rows: Sequence[RequestStep], closes: Sequence[pb.CloseRequest]
    ) -> pb.StepReply:
        """See `Driver`."""
        message = pb.StepRequest(open=opens, close=closes, requests=_vector(rows))
        return pb.StepReply.FromString(bytes.fromhex(self._ask({"do": "step", "message": _hex(message)})))

    def ready(self, request_id: int) -> pb.OpenReply | None:
        """See `Driver`."""
        said = self._ask({"do": "ready", "request_id": request_id})
        return None if said is None else pb.OpenReply.FromString(bytes.fromhex(said))

    def write(self, request_id: int, start: int, digests: U64Array) -> None:
        """See `Driver`."""
        data = digests.astype("<u8").tobytes().hex()
        self._ask({"do": "write", "request_id": request_id, "start": start, "digests": data})

    def read_pages(self, rank: int, page_class: str, tier: str, pages: Int64Array) -> npt.NDArray[np.uint8]:
        """See `Driver`."""
        told = {"do": "read", "rank": rank, "page_class": page_class, "tier": tier, "pages": pages.tolist()}
        data = bytes.fromhex(self._ask(told))
        return np.frombuffer(data, np.uint8).reshape(len(pages), -1)

    def export(self, request_id: int) -> pb.Ticket:
        """See `Driver`."""
        return pb.Ticket.FromString(bytes.fromhex(self._ask({"do": "export", "request_id": request_id})))

    def leave(self) -> None:
        """See `Driver`; the process ends."""
        try:
            self._ask({"do": "leave"})
        finally:
            self._reap()

    def stop(self) -> None:
        """SIGSTOP: it reads nothing and answers no ping."""
        self._process.send_signal(signal.SIGSTOP)

    def go(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; the process is dead when this returns."""
        self._process.kill()
        self._reap()

    def _reap(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def own_command(driver: str) -> list[str]:
    """The command of a Python driver's process."""
    return [sys.executable, "-m", "kvmanager.pressure.driverprocess", driver]


def _hex(message: Any) -> str:
    data: bytes = message.SerializeToString()
    return data.hex()


def _vector(rows: Sequence[RequestStep]) -> pb.RequestVector:
    return pb.RequestVector(
        request_ids=pack_u64([row.request_id for row in rows]),
        capacity_tokens=pack_u64([row.capacity_tokens for row in rows]),
        committed_tokens=pack_u64([row.committed_tokens for row in rows]),
        rejected_tokens=pack_u32([row.rejected_tokens for row in rows]),
        new_key_counts=pack_u32([len(row.new_keys) // 16 for row in rows]),
        new_keys=b"".join(row.new_keys for row in rows),
    )


def _rows(vector: pb.RequestVector) -> list[RequestStep]:
    ids, capacity, committed = (
        unpack_u64(data, "rows").tolist()
        for data in (vector.request_ids, vector.capacity_tokens, vector.committed_tokens)
    )
    rejected, counts = (
        unpack_u32(data, "rows").tolist() for data in (vector.rejected_tokens, vector.new_key_counts)
    )
    rows, at = [], 0
    for number, count in enumerate(counts):
        keys = vector.new_keys[at : at + 16 * count]
        rows.append(RequestStep(ids[number], capacity[number], committed[number], rejected[number], keys))
        at += 16 * count
    return rows


def _answer(driver: Driver, asked: dict[str, Any]) -> Any:
    match asked["do"]:
        case "step":
            message = pb.StepRequest.FromString(bytes.fromhex(asked["message"]))
            return _hex(driver.step(message.open, _rows(message.requests), message.close))
        case "ready":
            opened = driver.ready(asked["request_id"])
            return None if opened is None else _hex(opened)
        case "write":
            digests = np.frombuffer(bytes.fromhex(asked["digests"]), "<u8")
            driver.write(asked["request_id"], asked["start"], digests)
        case "read":
            pages = np.array(asked["pages"], np.int64)
            return driver.read_pages(asked["rank"], asked["page_class"], asked["tier"], pages).tobytes().hex()
        case "export":
            return _hex(driver.export(asked["request_id"]))
        case "leave":
            driver.leave()
    return None


def main() -> None:
    """Serves one driver until it is told to leave; one that loses its parent ends at once, as a killed one does."""
    told = json.loads(sys.stdin.readline())
    name = told.pop("name")
    say = {"ok": True}
    try:
        driver = driver_named(sys.argv[1])(Target(**{**told, "runtime_dir": Path(told["runtime_dir"])}), name)
    except KVError as error:
        print(json.dumps({"error": _hex(error_to_proto(error))}), flush=True)
        os._exit(1)
    print(json.dumps(say), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer: dict[str, Any] = {"ok": _answer(driver, asked)}
        except KVError as error:
            answer = {"error": _hex(error_to_proto(error))}
        print(json.dumps(answer), flush=True)
        if asked["do"] == "leave":
            return
    os._exit(0)


if __name__ == "__main__":
    main()
