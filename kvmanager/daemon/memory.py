"""The node's memory at run time: the regions' descriptors and the timeline words."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmanager.allocators.backing import check_sealed, map_fd, open_memfd
from kvmanager.allocators.device_memory import check_no_memfd, create_device_memory
from kvmanager.configuration.groups import TIMELINE_WORDS, NodeMemory
from kvmanager.errors import LimitExceeded, UnknownLease
from kvmanager.wire import RegionInfo


def make_region(region: RegionInfo) -> int:
    """New memory for a region, as a descriptor that the caller owns. Makes no CUDA context.

    Raises ConfigError when it does not fit, DeviceError when the GPU's driver refuses.
    """
    name = f"kvmanager:{region.pool}:{region.rank}"
    if region.on_gpu:
        return create_device_memory(name, region.device, region.size_bytes)
    return open_memfd(name, region.size_bytes)


def region_name(region_id: int) -> str:
    """The name of a region's deposit."""
    return f"region-{region_id}"


class Depositor(Protocol):
    """Keeps a duplicate of a descriptor (the keeper)."""

    def deposit(self, name: str, size_bytes: int, fd: int) -> None:
        """Takes it."""
        ...


class NodeRegions:
    """Makes every region of a plan and leaves a second descriptor with the keeper; or takes what is there."""

    def __init__(
        self, plan: NodeMemory, keeper: Depositor | None, found: Mapping[int, int] | None = None, words_used: int = 0
    ) -> None:
        """`found`: descriptors of all regions by id, where an earlier daemon made them; they are ours from now on.

        `words_used`: timeline words below were given out. Raises ConfigError when memory can't be reserved,
        InvalidArgument when a found region has another size or is not of its kind, DeviceError; what was made until
        then is closed.
        """
        self.plan = plan
        self._found = found is not None
        self._fds: dict[int, int] = dict(found or {})
        try:
            for region in plan.regions:
                if found is not None:
                    if region.on_gpu:
                        check_no_memfd(found[region.region_id])
                    else:
                        check_sealed(found[region.region_id], region.size_bytes)
                    continue
                fd = make_region(region)
                self._fds[region.region_id] = fd
                if keeper is not None:
                    keeper.deposit(region_name(region.region_id), region.size_bytes, fd)
        except BaseException:
            self.close()
            raise
        self._domains = list(plan.timelines)
        self._words = [
            map_fd(self._fds[region_id], plan.region(region_id).size_bytes).view(np.uint64)
            for region_id in plan.timelines.values()
        ]
        self._attached: dict[int, tuple[int, tuple[int, ...]]] = {}  # attach id -> (word, regions it may map)
        self._ended: dict[int, int] = {}  # attach id -> its word, which its process may still write
        self._free_words: list[int] = []
        # Word w is word w // n of the w % n-th of n trust domains.
        self._next_word = [-(-words_used // len(self._words))] * len(self._words)
        self._lock = threading.Lock()

    @property
    def made(self) -> list[tuple[int, int]]:
        """(fd, bytes) of the host memory that is new, and still to be faulted in."""
        regions = () if self._found else self.plan.regions
        return [(self._fds[region.region_id], region.size_bytes) for region in regions if not region.on_gpu]

    def fd(self, region_id: int) -> int:
        """The region's descriptor; it stays ours."""
        return self._fds[region_id]

    def region(self, region_id: int) -> RegionInfo:
        """The region's description."""
        return self.plan.region(region_id)

    def _word(self, word: int) -> tuple[npt.NDArray[np.uint64], int]:
        """The array that it lies in, and where."""
        return self._words[word % len(self._words)], self.place_of(word)

    def place_of(self, word: int) -> int:
        """The word's index in its region."""
        return word // len(self._words)

    def new_word(self, trust: str = "") -> int:
        """A timeline word, zero, that no living process ever had: nobody else can raise it. Raises LimitExceeded."""
        domain, domains = self._domains.index(trust), len(self._domains)
        with self._lock:
            free = [word for word in self._free_words if word % domains == domain]
            if free:
                word = free[-1]
                self._free_words.remove(word)
            elif self._next_word[domain] < TIMELINE_WORDS:
                word = self._next_word[domain] * domains + domain
                self._next_word[domain] += 1
            else:
                raise LimitExceeded(
                    f"all {TIMELINE_WORDS} timeline words belong to ranks whose processes live; end some of them"
                )
            words, place = self._word(word)
            words[place] = 0
            return word

    def return_word(self, word: int) -> None:
        """Nobody was told of it."""
        with self._lock:
            self._free_words.append(word)

    def free_words(self, attach_ids: Iterable[int]) -> None:
        """The processes of these attaches, all unbound, are dead with all who inherited from them."""
        with self._lock:
            self._free_words += [self._ended.pop(attach_id) for attach_id in attach_ids if attach_id in self._ended]

    def free_unbound(self) -> None:
        """After a daemon's death: no process lives that had a word but those that are bound now."""
        with self._lock:
            domains = len(self._domains)
            given = {place * domains + at for at, end in enumerate(self._next_word) for place in range(end)}
            self._free_words = sorted(given - {word for word, _ in self._attached.values()})

    def bind(self, attach_id: int, word: int, granted: tuple[int, ...]) -> None:
        """From now on `read` reports this attach's word, and it may have the descriptors of `granted`."""
        with self._lock:
            self._attached[attach_id] = (word, granted)

    def unbind(self, attach_id: int) -> int:
        """Ends that; the last value of its word. Raises UnknownLease when there is no such attach."""
        with self._lock:
            attached = self._attached.pop(attach_id, None)
            if attached is None:
                raise UnknownLease(f"attach {attach_id} is unknown or has ended")
            self._ended[attach_id] = attached[0]
            words, place = self._word(attached[0])
            return int(words[place])

    def granted_fds(self, attach_id: int) -> list[int]:
        """The descriptors of an attach, in order; they stay ours. Raises UnknownLease."""
        with self._lock:
            attached = self._attached.get(attach_id)
        if attached is None:
            raise UnknownLease(f"attach {attach_id} is unknown or has ended")
        return [self._fds[region_id] for region_id in attached[1]]

    def read(self) -> dict[int, int]:
        """Attach id -> value of its timeline word."""
        with self._lock:
            found = {attach_id: self._word(word) for attach_id, (word, _) in self._attached.items()}
            return {attach_id: int(words[place]) for attach_id, (words, place) in found.items()}

    def close(self) -> None:
        """Closes our descriptors; the keeper's and the clients' keep the memory."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
