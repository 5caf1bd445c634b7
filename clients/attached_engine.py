"""An engine whose ranks all live in this process: the session, the ranks, and a fence with each message."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from kvmanager.clients.attach import attach, grpc_channel
from kvmanager.clients.engine import EngineClient, RequestStep, StepResult, refusal_pause_s
from kvmanager.clients.worker import WorkerGroup, WorkerRank, connect_worker
from kvmanager.errors import KVError
from kvmanager.layout import KVLayout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import error_from_proto

ADMIT_TIMEOUT_S: Final = 60.0
"""How long a request may be refused for want of room, and how long its bytes may take to arrive."""


class AttachedEngine:
    """Registered, attached and ready for requests. One thread uses it; close it from that thread."""

    def __init__(
        self,
        runtime_dir: Path,
        name: str,
        *,
        group: str,
        namespace: pb.Namespace,
        layouts: Sequence[KVLayout],
        ranks: int,
    ) -> None:
        """Registers with the node in `runtime_dir` and attaches `ranks` ranks.

        `layouts`: one a page class, in the group's order. Raises the daemon's typed errors, NotReady when
        no node is there.
        """
        with ExitStack() as undo:
            attachment = attach(runtime_dir, "engine", name)
            attached: list[WorkerRank] = []

            def renew() -> int:
                for rank in attached:
                    rank.renew()
                return attachment.renew()

            self.renew = renew
            """Attaches all anew after the daemon was replaced; its boot id. Raises what `Attachment.renew` raises."""
            undo.callback(attachment.close)
            channel = grpc_channel(attachment)
            undo.callback(channel.close)
            self.client = EngineClient(
                channel,
                attachment=attachment,
                engine=name,
                group=group,
                namespace=namespace,
                layout_fingerprints=[layout.fingerprint for layout in layouts],
                ranks=ranks,
                renew=renew,
            )
            for rank in range(ranks):
                attached.append(connect_worker(runtime_dir, name, self.client.epoch, rank))
                undo.callback(attached[-1].close)
            self.workers = WorkerGroup(attached)
            self._undo = undo.pop_all()

    def step(
        self,
        requests: Sequence[RequestStep] = (),
        closes: Sequence[pb.CloseRequest] = (),
        opens: Sequence[pb.OpenRequest] = (),
        turn_ends: Sequence[pb.TurnEnd] = (),
    ) -> StepResult:
        """One message after the work that it tells of. Raises the message's error, or the first of its requests'."""
        result = self.client.step(
            fence=self.workers.fence(), requests=requests, opens=opens, closes=closes, turn_ends=turn_ends
        )
        self.workers.run_plans(result.worker_plans)
        for error in result.errors.values():
            raise error
        return result

    def open(self, request: pb.OpenRequest, timeout_s: float = ADMIT_TIMEOUT_S) -> pb.OpenReply:
        """Opens the only request of an engine and waits until it is runnable.

        A refusal that may pass (the daemon says when to ask again) is tried again until `timeout_s`.
        Raises the refusal otherwise, or the error that ended the wait for its bytes.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            opened = self.step(opens=[request]).opened[request.request_id]
            if opened.state == pb.OpenReply.RUNNABLE:
                return opened
            try:
                if opened.state == pb.OpenReply.WAITING:
                    return self.client.wait_ready(request.request_id, max(deadline - time.monotonic(), 0.0))
                raise error_from_proto(opened.error)
            except KVError as refusal:
                pause = refusal_pause_s(refusal)
                if pause is None or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)

    def close(self) -> None:
        """Detaches the ranks, ends the session and the connections. Raises the first error of a detach."""
        with self._undo:
            try:
                self.workers.detach()
            finally:
                self.client.close()
