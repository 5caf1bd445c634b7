"""An engine of torch alone whose KV cache lies in memory of the daemon: `python pool_process.py FD SIZE`.

Says where its tensors lie, then obeys: "write SEED", "check SEED", "used".
"""

from __future__ import annotations

import os
import sys

import torch

from kvmanager.allocators.cuda_driver import DeviceContext
from kvmanager.allocators.device_memory import DeviceMapping
from kvmanager.clients.vllm.gpu_pool import RegionPool

LAYERS, BLOCKS, BLOCK_BYTES = 4, 24, 1 << 20


def say(*words: object) -> None:
    print(*words, flush=True)


def pattern(seed: int, layer: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + layer)
    return torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), generator=generator, dtype=torch.uint8)


def main() -> None:
    fd, size = int(sys.argv[1]), int(sys.argv[2])
    torch.cuda.init()
    context = DeviceContext("cuda:0")
    memory = DeviceMapping(fd, "cuda:0", size)
    os.close(fd)
    pool = RegionPool(memory.address, size)
    with pool.context():
        layers = [torch.empty(BLOCKS, BLOCK_BYTES, dtype=torch.uint8, device="cuda:0") for _ in range(LAYERS)]
    outside = torch.empty(1 << 20, dtype=torch.uint8, device="cuda:0")
    assert not memory.address <= outside.data_ptr() < memory.address + size, "a tensor made outside lies in the region"
    say(*[layer.data_ptr() - memory.address for layer in layers])
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "write":
            for number, layer in enumerate(layers):
                layer.copy_(pattern(int(rest[0]), number))
            torch.cuda.synchronize()
            say("written")
        elif word == "check":
            same = all(torch.equal(layer.cpu(), pattern(int(rest[0]), number)) for number, layer in enumerate(layers))
            say("right" if same else "WRONG")
        elif word == "used":
            say(pool.used_bytes)
        elif word == "full":
            try:
                with pool.context():
                    torch.empty(size, dtype=torch.uint8, device="cuda:0")
                say("given")
            except torch.cuda.OutOfMemoryError:
                say("refused")
    del context


if __name__ == "__main__":
    main()
