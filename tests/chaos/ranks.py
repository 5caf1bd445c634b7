"""Worker ranks that write and compare patterns: in this process, or each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvmanager.clients.worker import WorkerGroup, WorkerRank, connect_worker
from kvmanager.errors import KVError
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import pack_u64
from tests.chaos.content import write_rows, wrong_bytes


class LocalRank:
    """One attached rank in this process."""

    def __init__(self) -> None:
        self._rank: WorkerRank | None = None

    def attach(self, runtime_dir: str, engine: str, epoch: int, rank: int) -> int:
        """Attaches; the attach id."""
        self._rank = connect_worker(Path(runtime_dir), engine, epoch, rank)
        return self._rank.attach_id

    @property
    def _attached(self) -> WorkerRank:
        assert self._rank is not None, "not attached"
        return self._rank

    def write(self, page_class: str, pages: np.ndarray, slots: np.ndarray, digests: np.ndarray) -> None:
        """Writes rows of device pages."""
        memory = self._attached.classes[page_class]
        write_rows(memory.device, memory.layout, pages, slots, digests)

    def wrong(self, page_class: str, tier: str, pages: np.ndarray, slots: np.ndarray, digests: np.ndarray) -> int:
        """Bytes of those rows that are not what they should be; `tier`: "device" or "host"."""
        memory = self._attached.classes[page_class]
        return wrong_bytes(getattr(memory, tier), memory.layout, pages, slots, digests)

    def run_plans(self, plans: Sequence[bytes]) -> None:
        """The part of each plan that lies in this rank's memory."""
        ours = self._attached.regions
        for plan in map(pb.Plan.FromString, plans):
            copies = [c for c in plan.copies if c.source_region in ours and c.target_region in ours]
            del plan.copies[:]
            plan.copies.extend(copies)
            if copies:
                WorkerGroup([self._attached]).run_plans([plan])

    def raise_timeline(self, value: int) -> None:
        """All work before it is done."""
        self._attached.raise_timeline(value)

    def renew(self) -> int:
        """After a restart of the daemon."""
        return self._attached.renew()

    def leave(self) -> None:
        """Detaches."""
        try:
            self._attached.detach()
        finally:
            self._attached.close()


class RankProcess:
    """A rank in a child process; every method of `LocalRank` through a pipe. Make it before gRPC is used."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._pipe), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._pipe.send((name, arguments))
            answer = self._pipe.recv()  # EOFError when the process died
            if isinstance(answer, KVError):
                raise answer
            return answer

        return call


def _serve(pipe: Connection, other_end: Connection) -> None:
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = LocalRank()
    while True:
        try:
            name, arguments = pipe.recv()
            try:
                answer = getattr(rank, name)(*arguments)
            except KVError as error:
                answer = error
            pipe.send(answer)
        except (EOFError, OSError):
            os._exit(0)


class Ranks:
    """The ranks of one engine, wherever they run, in the place of a `WorkerGroup`."""

    def __init__(self, ranks: Sequence[Any], attach_ids: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._attach_ids = attach_ids
        self._value = 0

    def fence(self) -> pb.Fence:
        """Raises every rank's word and names the values."""
        self._value += 1
        for rank in self.ranks:
            rank.raise_timeline(self._value)
        return pb.Fence(attach_ids=pack_u64(self._attach_ids), values=pack_u64([self._value] * len(self.ranks)))

    def run_plans(self, plans: Iterable[pb.Plan]) -> None:
        """Copy-on-write, each rank its own part."""
        data = [plan.SerializeToString() for plan in plans]
        if data:
            for rank in self.ranks:
                rank.run_plans(data)

    def detach(self) -> None:
        """Detaches every rank; raises the first error."""
        errors = []
        for rank in self.ranks:
            try:
                rank.leave()
            except KVError as error:
                errors.append(error)
        if errors:
            raise errors[0]
