"""The timeline word of a rank whose work runs on a GPU: raised by its stream, read by anybody who maps the page."""

from __future__ import annotations

from kvmanager.allocators.cuda_driver import call, driver
from kvmanager.errors import InvalidArgument
from kvmanager.transport.executor import ByteArray
from kvmanager.transport.pinned import PinnedMemory

WORD_BYTES = 8


class GpuTimeline:
    """The timeline region, registered with the driver. A context must be current in the calling thread."""

    def __init__(self, memory: ByteArray) -> None:
        """`memory`: the whole region, which begins on an OS page. Raises DeviceError."""
        self._words = len(memory) // WORD_BYTES
        self._pinned = PinnedMemory(memory)
        self._address = self._pinned.device_address()

    def raise_in_stream(self, word: int, value: int, stream: int) -> None:
        """Queues `words[word] = value` behind all work queued in `stream` (a CUstream's number).

        Everything that the stream wrote before is visible to whoever sees the value. Issue it after a CUDA graph,
        never capture it in one. Raises InvalidArgument for a word outside the region, DeviceError.
        """
        if not 0 <= word < self._words:
            raise InvalidArgument(f"timeline word {word}: the region has {self._words}")
        module = driver()
        address = module.CUdeviceptr(self._address + word * WORD_BYTES)
        # Flags 0: the driver orders all earlier writes of the stream before this one.
        call("cuStreamWriteValue64", module.CUstream(stream), address, value, 0)

    def close(self) -> None:
        """Ends the registration; the stream must have passed its last write. Raises DeviceError."""
        self._pinned.close()
