"""Where a decode engine keeps its requests' rows: which store goes with which memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvmanager.clients.glm.hisparse import HiSparseStore, RowCounters
from kvmanager.clients.glm.resolved_store import ResolvedStores
from kvmanager.clients.glm.sparse_rank import ReferenceRank, SparseRank, sparse_shape
from kvmanager.clients.glm.sparse_tables import GroupPlace, SparseShape, group_place
from kvmanager.clients.glm.store import KVStore
from kvmanager.clients.rankmemory import Memory
from kvmanager.clients.worker import ClassMemory
from kvmanager.errors import InvalidArgument
from kvmanager.geometry import Int64Array, TokenOrder


class DecodeStore(KVStore, Protocol):
    """Rows of one request, and the tables that the daemon's replies write."""

    counters: RowCounters

    @property
    def capacity_tokens(self) -> int:
        """Positions that have a slot."""

    def append_spans(
        self,
        order: TokenOrder,
        first_token: int,
        uids: Int64Array,
        latent_pages: Int64Array,
        host_pages: Int64Array,
        indexer_pages: Int64Array,
    ) -> None:
        """Adds whole spans of M pages; arrays int64[spans * M], -1 where a tier has none."""

    def truncate_spans(self, kept: int) -> None:
        """Keeps the request's first `kept` spans."""

    def set_residency(self, ordinals: Int64Array, device_pages: Int64Array, host_pages: Int64Array) -> None:
        """New tiers of pages by ordinal."""

    def set_hot_pages(self, pages: Int64Array) -> None:
        """Slabs of the hot buffer."""

    def close(self) -> None:
        """The request has left; nothing is read through it any more."""


class DecodeStores(Protocol):
    """Makes them."""

    def open(self) -> DecodeStore:
        """An empty one."""


@dataclass(frozen=True)
class DecodeMemory:
    """A decode rank's memory, and the sizes of what it decodes.

    `requests`: at one time; `rows`: tokens that one verifies in a step; `topk`: positions a token.
    """

    latent: ClassMemory
    indexer: ClassMemory
    share_groups: tuple[tuple[int, ...], ...]
    requests: int
    rows: int
    topk: int
    hot_rows: int

    @property
    def host(self) -> Memory:
        """The host region. Raises InvalidArgument where there is none: a decode rank reads it."""
        if self.latent.host is None:
            raise InvalidArgument("latent pages came without a host region; a decode rank reads it")
        return self.latent.host

    @property
    def shape(self) -> SparseShape:
        """Of its resolver."""
        layout = self.latent.layout
        return sparse_shape(
            layout, len(self.latent.device), len(self.host), requests=self.requests, rows=self.rows, topk=self.topk,
            hot_rows=self.hot_rows,
        )  # fmt: skip

    @property
    def groups(self) -> list[GroupPlace]:
        """Where the rows of each share group lie in a page."""
        return [group_place(self.latent.layout, group) for group in self.share_groups]


StoresOf = Callable[[DecodeMemory], DecodeStores]


def stores_of(memory: DecodeMemory) -> DecodeStores:
    """Those that fit the memory: on a GPU node the resolver's kernels, else a map of hot rows a request."""
    return _MappedStores(memory) if isinstance(memory.latent.device, np.ndarray) else gpu_stores(memory)


def reference_stores(memory: DecodeMemory) -> DecodeStores:
    """The reference resolver over memory that the CPU maps."""
    rank = ReferenceRank(memory.shape, memory.groups, memory.latent.device, memory.host)
    return _resolved(memory, rank, torch.from_numpy(memory.latent.device))


def gpu_stores(memory: DecodeMemory) -> DecodeStores:
    """The resolver and swap-in kernels over HBM and the pinned host region. Raises DeviceError."""
    # Here, because they need a GPU's packages.
    from kvmanager.clients.glm.gpu_sparse_rank import GpuSparseRank
    from kvmanager.transport.pinned import device_address

    device = memory.latent.device
    rank = GpuSparseRank(memory.shape, memory.groups, device, device_address(memory.host))
    return _resolved(memory, rank, device)


def _resolved(memory: DecodeMemory, rank: SparseRank, device: torch.Tensor) -> ResolvedStores:
    return ResolvedStores(rank, device, memory.latent.layout, memory.indexer.layout, memory.share_groups)


class _MappedStores:
    """A `HiSparseStore` each."""

    def __init__(self, memory: DecodeMemory) -> None:
        self._memory, self._host = memory, memory.host

    def open(self) -> DecodeStore:
        """An empty one."""
        memory = self._memory
        return HiSparseStore(
            memory.latent.device, self._host, memory.latent.layout, memory.indexer.layout, memory.share_groups,
            memory.hot_rows,
        )  # fmt: skip
