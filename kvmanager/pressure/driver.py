"""What a client under test must be able to do, and the driver that uses the product's own client."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.errors import ConfigError, InvalidArgument
from kvmanager.layout import KVLayout, format_named, indexer_layout, latent_layout, native_layout
from kvmanager.pressure.content import U64Array, write_rows
from kvmanager.pressure.places import NO_PAGE, Int64Array, Places
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import error_to_proto

EXPORT_S: Final = 60.0


@dataclass(frozen=True)
class Target:
    """The group of a node that clients attach to; all of it is known from the node's own configuration."""

    runtime_dir: Path
    group: str
    kind: str
    format: str
    ranks: int
    page_rows: int
    revision: str
    """Of the weights, in the namespace: keeps one run's keys apart from those of all others."""

    @property
    def shards(self) -> int:
        """Ranks that a request's tokens are dealt out over."""
        return self.ranks if self.kind == "sharded" else 1

    @property
    def span_tokens(self) -> int:
        """Tokens of a span that the group itself makes."""
        return self.page_rows * self.shards

    @property
    def namespace(self) -> pb.Namespace:
        """What the keys of a run mean."""
        return pb.Namespace(
            model="pressure", weights_revision=self.revision, kv_format=self.format, key_hash="sha256", key_bytes=16,
            key_tokens=self.page_rows,
        )  # fmt: skip

    @cached_property
    def layouts(self) -> dict[str, KVLayout]:
        """Layout of each page class, in the group's order. Raises InvalidArgument for a cache group."""
        format_ = format_named(self.format)
        if self.kind == "hisparse":
            return {
                "latent": latent_layout(format_, self.page_rows), "indexer": indexer_layout(format_, self.page_rows)
            }  # fmt: skip
        if self.kind not in ("sharded", "replicated"):
            raise InvalidArgument(f"group {self.group} is of kind {self.kind}, which no suite drives")
        return {"kv": native_layout(format_, self.page_rows)}


class Driver(Protocol):
    """One engine of the client under test: registered, and every rank attached, when it has been made.

    A driver says what the daemon said: it returns the daemon's own messages, raises its typed errors (KVError), and
    gives no request back, retries nothing and waits for nothing that it was not told to.
    """

    def step(
        self, opens: Sequence[pb.OpenRequest], rows: Sequence[RequestStep], closes: Sequence[pb.CloseRequest]
    ) -> pb.StepReply:
        """One message, fenced behind all that was written before. The reply: `opened`, `growth`, `residency`, `errors`.

        Copies that an opened request names for the worker have been run when this returns.
        """

    def ready(self, request_id: int) -> pb.OpenReply | None:
        """The notice about a request that was WAITING, None while there is none. Raises the request's error."""

    def write(self, request_id: int, start: int, digests: U64Array) -> None:
        """Writes the rows of positions from `start` on, one a digest, as `content.write_rows` does."""

    def read_pages(self, rank: int, page_class: str, tier: str, pages: Int64Array) -> npt.NDArray[np.uint8]:
        """The bytes of pages as a rank maps them, uint8[n, page_bytes]; `tier`: "device" or "host"."""

    def export(self, request_id: int) -> pb.Ticket:
        """A ticket on what the request has committed."""

    def leave(self) -> None:
        """Detaches all ranks and ends the session."""


MakeDriver = Callable[[Target, str], Driver]
"""(where, the engine's name) -> a driver."""


def driver_named(name: str) -> MakeDriver:
    """`package.module:attribute`. Raises ConfigError."""
    module, _, attribute = name.partition(":")
    try:
        made: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"no driver {name!r} ({error}); write package.module:attribute") from error
    return made  # type: ignore[no-any-return]


class OwnDriver:
    """The product's own client, all ranks in this process."""

    def __init__(self, target: Target, name: str) -> None:
        self._target = target
        self._places: dict[int, Places] = {}
        self._engine = AttachedEngine(
            target.runtime_dir, name, group=target.group, namespace=target.namespace,
            layouts=list(target.layouts.values()), ranks=target.ranks,
        )  # fmt: skip

    def step(
        self, opens: Sequence[pb.OpenRequest], rows: Sequence[RequestStep], closes: Sequence[pb.CloseRequest]
    ) -> pb.StepReply:
        """See `Driver`."""
        fence = self._engine.workers.fence()
        result = self._engine.client.step(fence=fence, opens=opens, requests=rows, closes=closes)
        for opened in result.opened.values():
            self._take(opened)
        for request_id, growth in result.growth.items():
            if request_id in self._places and not growth.HasField("error"):
                self._places[request_id].grow(growth)
        moved = [rows_ for per_request in result.residency.values() for rows_ in per_request]
        for residency in moved:
            if residency.request_id in self._places:
                self._places[residency.request_id].move(residency)
        for closed in closes:
            self._places.pop(closed.request_id, None)
        errors = [
            pb.RequestError(request_id=request_id, error=error_to_proto(error))
            for request_id, error in result.errors.items()
        ]
        return pb.StepReply(
            opened=result.opened.values(), growth=result.growth.values(), residency=moved, errors=errors
        )

    def _take(self, opened: pb.OpenReply) -> None:
        if opened.state != pb.OpenReply.RUNNABLE:
            return
        places = Places(self._target.shards, self._target.page_rows)
        places.append(opened.spans)
        self._places[opened.request_id] = places
        self._engine.workers.run_plans(opened.worker_plans)

    def ready(self, request_id: int) -> pb.OpenReply | None:
        """See `Driver`."""
        opened = self._engine.client.take_ready(request_id)
        if opened is not None:
            self._take(opened)
        return opened

    def write(self, request_id: int, start: int, digests: U64Array) -> None:
        """See `Driver`."""
        places, sharded = self._places[request_id], self._target.kind == "sharded"
        for number, rank in enumerate(self._engine.workers.ranks):
            span = np.arange(start, start + len(digests))
            positions, ordinals, slots = places.find(span, number if sharded else 0)
            for page_class, memory in rank.classes.items():
                device, _ = places.pages(page_class, ordinals)
                assert (device != NO_PAGE).all(), f"no device page to write to: {positions[device == NO_PAGE][:5]}"
                write_rows(memory.device, memory.layout, device, slots, digests[positions - start])

    def read_pages(self, rank: int, page_class: str, tier: str, pages: Int64Array) -> npt.NDArray[np.uint8]:
        """See `Driver`."""
        held = self._engine.workers.ranks[rank].classes[page_class]
        memory: Any = getattr(held, tier)
        width = held.layout.page_bytes
        places = (pages[:, None] * width + np.arange(width)).ravel()
        rows = memory[places] if isinstance(memory, np.ndarray) else memory[places].cpu().numpy()
        found: npt.NDArray[np.uint8] = rows.reshape(len(pages), width)
        return found

    def export(self, request_id: int) -> pb.Ticket:
        """See `Driver`."""
        return self._engine.client.export(request_id, EXPORT_S)

    def leave(self) -> None:
        """See `Driver`."""
        self._engine.close()
