"""Processes for the GPU tests: `python gpu_process.py ROLE ...`; each obeys lines on stdin and answers on stdout.

    maker SIZE             makes GPU memory without a context, deposits it with the keeper on --keeper-fd
    keeper                 holds deposits of one client after another; loads no CUDA
    mapper FD SIZE         maps the memory: "write SEED", "check SEED", "spin" (a kernel that never stops writing),
                           "copies FD SIZE" (endless copies of changing bytes down into a memfd)
    timeline FD WORD       raises a word of a memfd from a stream, for ever
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import sys
import time

import numpy as np

SPIN = r"""
extern "C" __global__ void spin(unsigned long long *words, unsigned long long n) {
    unsigned long long first = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    unsigned long long step = gridDim.x * (unsigned long long)blockDim.x;
    for (unsigned long long turn = 1;; ++turn)
        for (unsigned long long i = first; i < n; i += step)
            *(volatile unsigned long long *)(words + i) = turn;
}
"""
CHUNK = 8 << 20


def say(*words: object) -> None:
    print(*words, flush=True)


def maker(keeper_fd: int, size: int) -> None:
    from kvmanager.allocators.cuda_driver import call
    from kvmanager.allocators.device_memory import create_device_memory
    from kvmanager.daemon.keeperlink import KeeperLink

    fd = create_device_memory("test", "cuda:0", size)
    KeeperLink(keeper_fd).deposit("memory", size, fd)
    assert int(call("cuCtxGetCurrent")) == 0, "the maker has a context"
    say("made")
    sys.stdin.read()


class NoStore:
    """No systemd beyond the keeper."""

    def keep(self, deposit: object) -> None: ...

    def let_go(self, deposit: object) -> None: ...


def keeper() -> None:
    """Clients' sockets come as descriptor numbers on stdin, inherited; one at a time."""
    from kvmanager.keeper.deposits import DepositBox

    box = DepositBox(NoStore(), lambda _: None)
    channels: list[socket.socket] = [socket.socket(fileno=int(fd)) for fd in sys.argv[2:]]
    say("keeps")
    while True:
        ready, _, _ = select.select([sys.stdin, *channels], [], [])
        if sys.stdin in ready:
            if not sys.stdin.readline():
                return
            with open("/proc/self/maps", encoding="ascii") as maps:
                say("cuda" if "libcuda" in maps.read() else "plain")
        for channel in [c for c in channels if c in ready]:
            box.new_daemon()
            if not box.serve(channel):
                channels.remove(channel)


class Mapper:
    def __init__(self, fd: int, size: int) -> None:
        from kvmanager.allocators.cuda_driver import DeviceContext, call
        from kvmanager.allocators.device_memory import DeviceMapping

        self._call = call
        self._context = DeviceContext("cuda:0")
        self._memory = DeviceMapping(fd, "cuda:0", size)
        self._size = size
        os.close(fd)

    def write(self, seed: int) -> None:
        for at, data in pattern(seed, self._size):
            self._call("cuMemcpyHtoD", self._memory.address + at, data.ctypes.data, len(data))

    def check(self, seed: int) -> bool:
        found = np.empty(CHUNK, np.uint8)
        for at, data in pattern(seed, self._size):
            self._call("cuMemcpyDtoH", found.ctypes.data, self._memory.address + at, len(data))
            if not np.array_equal(found[: len(data)], data):
                return False
        return True

    def read(self) -> np.ndarray:
        data = np.empty(self._size, np.uint8)
        self._call("cuMemcpyDtoH", data.ctypes.data, self._memory.address, self._size)
        return data

    def spin(self) -> None:
        import cupy

        kernel = cupy.RawKernel(SPIN, "spin")
        kernel((64,), (256,), (np.uint64(self._memory.address), np.uint64(self._size // 8)))

    def copies(self, fd: int, size: int) -> None:
        """Queues a set of the device bytes to a new value and a copy down, over and over, some ahead."""
        from kvmanager.allocators.cuda_driver import driver
        from kvmanager.transport.pinned import PinnedMemory

        host = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        self._pinned = PinnedMemory(host)
        module = driver()
        stream = self._call("cuStreamCreate", module.CUstream_flags.CU_STREAM_NON_BLOCKING)
        events = []
        for turn in range(1 << 30):
            self._call("cuMemsetD8Async", self._memory.address, turn % 251, size, stream)
            self._call("cuMemcpyDtoHAsync", host.ctypes.data, self._memory.address, size, stream)
            event = self._call("cuEventCreate", 0)
            self._call("cuEventRecord", event, stream)
            events.append(event)
            if turn == 8:
                say("copying")
            if len(events) > 64:
                self._call("cuEventSynchronize", events.pop(0))


def pattern(seed: int, size: int):
    """Pieces (offset, bytes) of the content that a seed stands for."""
    for at in range(0, size, CHUNK):
        length = min(CHUNK, size - at)
        yield at, np.random.default_rng([seed, at]).integers(0, 256, length, dtype=np.uint8)


def mapper(fd: int, size: int) -> None:
    memory = Mapper(fd, size)
    say("mapped")
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "write":
            memory.write(int(numbers[0]))
            say("written")
        elif word == "check":
            say("right" if memory.check(int(numbers[0])) else "WRONG")
        elif word == "spin":
            memory.spin()
            say("spinning")
        elif word == "copies":
            memory.copies(*map(int, numbers))


def timeline(fd: int, word: int) -> None:
    from kvmanager.allocators.cuda_driver import DeviceContext, call, driver
    from kvmanager.transport.gpu_timeline import GpuTimeline

    DeviceContext("cuda:0")
    words = np.frombuffer(mmap.mmap(fd, 4096), np.uint8)
    line = GpuTimeline(words)
    stream = int(call("cuStreamCreate", driver().CUstream_flags.CU_STREAM_NON_BLOCKING))
    say("raises")
    for value in range(1, 1 << 40):
        line.raise_in_stream(word, value, stream)
        if value % 64 == 0:
            time.sleep(0.0005)


if __name__ == "__main__":
    role, arguments = sys.argv[1], [int(word) for word in sys.argv[2:]]
    if role == "keeper":
        keeper()
    else:
        {"maker": maker, "mapper": mapper, "timeline": timeline}[role](*arguments)
