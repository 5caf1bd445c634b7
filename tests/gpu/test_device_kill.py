"""A process killed in mid-kernel or mid-copy changes no byte once its pidfd is readable."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from gpu_regions import GpuBytes
from gpu_support import Process, memory_is_given_back, processes

from kvmanager.allocators.backing import create_memfd, map_fd
from kvmanager.allocators.cuda_driver import DeviceContext
from kvmanager.allocators.device_memory import DeviceMapping, create_device_memory
from kvmanager.units import MIB

pytestmark = pytest.mark.gpu
SIZE = 64 * MIB
ROUNDS = 3


@pytest.fixture
def device_fd() -> Iterator[int]:
    fd = create_device_memory("test", "cuda:0", SIZE)
    yield fd
    os.close(fd)


def changes(read: Callable[[], np.ndarray], seconds: float = 5.0) -> bool:
    """Whether a byte changes within that time."""
    first, give_up = read().copy(), time.monotonic() + seconds
    while time.monotonic() < give_up:
        if not np.array_equal(read(), first):
            return True
    return False


def kill_and_compare(process: Process, read: Callable[[], np.ndarray]) -> None:
    assert changes(read), "it writes until it is killed"
    process.kill()
    process.wait_dead()
    assert not changes(read, 1.0)


@pytest.mark.parametrize("attempt", range(ROUNDS))
def test_no_byte_of_hbm_changes_after_the_exit_of_a_process_killed_in_mid_kernel(device_fd: int, attempt: int) -> None:
    print(f"attempt {attempt}")
    DeviceContext("cuda:0")
    mapping = DeviceMapping(device_fd, "cuda:0", SIZE)
    with processes() as start:
        process = start("mapper", device_fd, SIZE, fds=[device_fd])
        assert process.hear() == "mapped"
        assert process.ask("spin") == "spinning"
        kill_and_compare(process, GpuBytes(mapping).read)
    mapping.close()


@pytest.mark.parametrize("attempt", range(ROUNDS))
def test_no_byte_of_host_memory_changes_after_the_exit_of_a_process_killed_in_mid_copy(
    device_fd: int, attempt: int
) -> None:
    print(f"attempt {attempt}")
    host_fd = create_memfd("host", SIZE)
    host = map_fd(host_fd, SIZE)
    with processes() as start:
        process = start("mapper", device_fd, SIZE, fds=[device_fd, host_fd])
        assert process.hear() == "mapped"
        process.tell(f"copies {host_fd} {SIZE}")
        assert process.hear() == "copying"
        kill_and_compare(process, lambda: host)
    os.close(host_fd)


def test_a_killed_writer_of_a_timeline_word_raises_it_no_more_and_others_go_on() -> None:
    fd = create_memfd("timelines", mmap.PAGESIZE)
    words = map_fd(fd, mmap.PAGESIZE).view(np.uint64)
    with processes() as start:
        first = start("timeline", fd, 0, fds=[fd])
        assert first.hear() == "raises"
        seen = [0]
        give_up = time.monotonic() + 30
        while seen[-1] < 5_000:
            assert time.monotonic() < give_up
            seen.append(int(words[0]))
        assert seen == sorted(seen), "a reader that loads no CUDA never sees it go back"
        first.kill()
        first.wait_dead()
        last = int(words[0])
        second = start("timeline", fd, 1, fds=[fd])
        assert second.hear() == "raises"
        while int(words[1]) < 1_000:
            assert time.monotonic() < give_up + 30
        assert int(words[0]) == last, "a fresh attach has a fresh word"
        # Whoever waits for the dead rank's word on a GPU is released by a store, as the daemon may do.
        words[0] = last + 1
        assert int(words[0]) == last + 1
    os.close(fd)


def test_memory_of_killed_processes_is_free_again() -> None:
    with memory_is_given_back(), processes() as start:
        fd = create_device_memory("test", "cuda:0", 512 * MIB)
        process = start("mapper", fd, 512 * MIB, fds=[fd])
        os.close(fd)
        assert process.hear() == "mapped"
        assert process.ask("spin") == "spinning"
