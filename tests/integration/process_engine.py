"""An engine whose ranks are processes, each attached to the node by itself; the scheduler is here."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mode_engine import LAYOUT, MODES, ModeEngine
from nodes_support import WAIT_S

from kvmanager.clients.attach import attach, grpc_channel
from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import EngineClient
from kvmanager.clients.glm.attention import ShortPrompts
from kvmanager.clients.glm.decode import VerifiedStep
from kvmanager.demo.nodes import NAMESPACE
from kvmanager.errors import NotReady, PeerUnreachable
from kvmanager.protos import kvmanager_pb2 as pb

ROOT = Path(__file__).parents[2]


class RankProcesses:
    """The ranks, told what to do all at once."""

    def __init__(self, runtime_dir: Path, engine: str, epoch: int, size: int, meeting: Path, backend: str) -> None:
        path = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        each: list[dict[str, str]] = [{} for _ in range(size)]
        if backend == "nccl":
            environment["NCCL_DEBUG"] = "WARN"
            if torch.cuda.device_count() < size:
                # Ranks on one GPU are refused as long as they say that they are of one machine.
                environment |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
                each = [{"NCCL_HOSTID": f"rank-{rank}"} for rank in range(size)]
        command = [sys.executable, str(Path(__file__).parent / "rank_process.py"), str(runtime_dir), engine, str(epoch)]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(size), str(meeting), backend], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, env={**environment, **each[rank]},
            )
            for rank in range(size)
        ]  # fmt: skip
        self.began = self._answers()
        """What each said when it had joined the others."""

    def ask(self, do: str, **order: Any) -> list[dict[str, Any]]:
        """What each rank answers. Raises PeerUnreachable where one lost another."""
        for process in self.processes:
            assert process.stdin is not None
            if process.poll() is None:
                process.stdin.write(json.dumps({"do": do, **order}) + "\n")
                process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            answers.append(json.loads(line) if line else {"error": "ended", "message": "it ended"})
        errors = [answer for answer in answers if "error" in answer]
        if errors:
            raise PeerUnreachable(f"{errors}")
        return answers

    def run_plans(self, plans: Iterable[pb.Plan]) -> None:
        """Each rank copies what lies in its regions."""
        packed = [base64.b64encode(plan.SerializeToString()).decode() for plan in plans]
        if packed:
            self.ask("plans", plans=packed)

    def fence(self) -> pb.Fence:
        """Every rank raises its own timeline; the fence names them all."""
        parts = [pb.Fence.FromString(base64.b64decode(answer["fence"])) for answer in self.ask("fence")]
        return pb.Fence(
            attach_ids=b"".join(part.attach_ids for part in parts), values=b"".join(part.values for part in parts)
        )

    def close(self) -> None:
        """They detach by themselves, those that live."""
        for process in self.processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait(WAIT_S)
            process.stdout.close()


class _Engine(AttachedEngine):
    """As its base class, but that the ranks are elsewhere."""

    def __init__(self, runtime_dir: Path, name: str, group: str, ranks: int, meeting: Path, backend: str) -> None:
        self._attachment = attach(runtime_dir, "engine", name)
        self._channel = grpc_channel(self._attachment)
        self.client = EngineClient(
            self._channel, attachment=self._attachment, engine=name, group=group, namespace=NAMESPACE,
            layout_fingerprints=[LAYOUT.fingerprint], ranks=ranks, renew=self._renew,
        )  # fmt: skip
        processes = RankProcesses(runtime_dir, name, self.client.epoch, ranks, meeting, backend)
        self.workers = processes  # type: ignore[assignment]

    def _renew(self) -> int:
        late = [answer["why"] for answer in self.workers.ask("renew") if not answer["boot_id"]]
        if late:
            raise NotReady(f"{late}")
        return self._attachment.renew()

    def close(self) -> None:
        self.workers.close()
        self.client.close()
        self._channel.close()
        self._attachment.release_lifeline()
        self._attachment.close()


class ProcessEngine(ModeEngine):
    """PCP x DCP and DCP decode over rank processes."""

    def __init__(self, runtime_dir: Path, name: str, meeting: Path, backend: str = "gloo") -> None:
        self.mode, self.short = MODES["PCPxDCP"], ShortPrompts.MQA
        self.engine = _Engine(runtime_dir, name, self.mode.group, self.mode.ranks, meeting, backend)
        self._requests = 0

    @property
    def ranks(self) -> RankProcesses:
        return self.engine.workers

    def prefill_on_ranks(self, chunk: tuple[list[int], int, list[int]]) -> list[torch.Tensor]:
        tokens, start, following = chunk
        answers = self.ranks.ask("prefill", tokens=tokens, start=start, following=following)
        return [torch.tensor(answer["hidden"], dtype=torch.float64) for answer in answers]

    def decode_on_ranks(self, fed: list[int], rows: int) -> list[VerifiedStep]:
        return [
            VerifiedStep(answer["accepted"], torch.tensor(answer["hidden"], dtype=torch.float64), answer["drafts"])
            for answer in self.ranks.ask("decode", fed=fed, rows=rows)
        ]

    def set_pages(self, pages: np.ndarray) -> None:
        self.ranks.ask("pages", pages=pages.tolist())
