"""What vLLM spends on the pages of one request: its `BlockPool` and its own prefix lookup, CPU seconds as JSON.

Run by the Python of an environment that has vLLM (`tests.bench.vllm_reference` makes one), not by ours:

    python tests/bench/vllm_block_pool.py PAGES POOL_PAGES
"""

import json
import statistics
import sys
import time

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

BLOCK_TOKENS = 64
ROUNDS = 7
SPEC = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float16)


class Request:
    """The one attribute of a vLLM request that caching reads."""

    def __init__(self, number, pages):
        self.block_hashes = [(number << 64 | page).to_bytes(32, "little") for page in range(pages)]


class Clock:
    """CPU seconds by name, one entry a round: other processes must not count."""

    def __init__(self):
        self.seconds = {}

    def run(self, name, work, *arguments):
        start = time.thread_time()
        result = work(*arguments)
        self.seconds.setdefault(name, []).append(time.thread_time() - start)
        return result

    def medians(self):
        return {name: statistics.median(times) for name, times in self.seconds.items()}


def look_up(pool, request):
    length = len(request.block_hashes) * BLOCK_TOKENS
    found, _ = FullAttentionManager.find_longest_cache_hit(
        request.block_hashes, length, [0], pool, SPEC, False, BLOCK_TOKENS
    )
    return found[0]


def give_back(pool, blocks):
    pool.free_blocks(reversed(blocks))


def cold(clock, name, pool, request):
    """A request of which nothing is known: lookup, blocks, publication, return."""
    pages = len(request.block_hashes)
    assert not clock.run(f"{name}_lookup", look_up, pool, request)
    blocks = clock.run(f"{name}_take", pool.get_new_blocks, pages)
    clock.run(f"{name}_publish", pool.cache_full_blocks, request, blocks, 0, pages, BLOCK_TOKENS, 0)
    clock.run(f"{name}_give", give_back, pool, blocks)


def measure(pages, pool_pages):
    """Medians of the parts of a cold request, a full hit, and a cold one that evicts; and of bare blocks."""
    clock = Clock()
    for number in range(ROUNDS):
        pool = BlockPool(pool_pages, True, BLOCK_TOKENS)
        request = Request(number, pages)
        cold(clock, "cold", pool, request)
        found = clock.run("hit_lookup", look_up, pool, request)
        assert len(found) == pages
        clock.run("hit_touch", pool.touch, found)
        clock.run("hit_give", give_back, pool, found)
        for other in range(1, min(pool_pages // pages, 64) + 1):
            cold(Clock(), "", pool, Request(1000 * (number + 1) + other, pages))
        cold(clock, "evicting", pool, Request(1000 * (number + 1), pages))
        plain = BlockPool(pool_pages, True, BLOCK_TOKENS)
        blocks = clock.run("plain_take", plain.get_new_blocks, pages)
        clock.run("plain_give", give_back, plain, blocks)
    return clock.medians() | {"warm_pair": warm_pair_s(pages, pool_pages)}


def warm_pair_s(pages, pool_pages):
    """Least seconds to take blocks and give them back, over many rounds of many pairs."""
    pool = BlockPool(pool_pages, True, BLOCK_TOKENS)
    pairs = max(1, 500 // pages)
    rounds = []
    for _ in range(200 if pages == 1 else 20):
        start = time.thread_time()
        for _ in range(pairs):
            give_back(pool, pool.get_new_blocks(pages))
        rounds.append((time.thread_time() - start) / pairs)
    return min(rounds)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
