// Just enough CUDA to run a kernel's blocks on the CPU: every thread is a fiber, and the fibers of a block take turns
// in random order, giving way at barriers, warp operations and now and then at atomics. Slow, but it shows wrong
// indexes, missing barriers (a barrier that not all reach hangs and aborts) and results that depend on an order.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

using std::min;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes)

struct Dim { int x; };
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static Dim blockIdx, threadIdx, blockDim, gridDim;
alignas(128) unsigned char memory[1 << 18];  // a block's dynamic shared memory

namespace cpu {

constexpr int STACK_BYTES = 1 << 16;
constexpr long MOST_TURNS = 1000000;

// Values of a group of threads, handed out when all have arrived.
struct Meeting {
    int arrived = 0;
    unsigned generation = 0;
    unsigned values[32] = {}, shown[2][32] = {};
};

static std::vector<ucontext_t> fibers;
static std::vector<std::vector<char>> stacks;
static std::vector<char> finished;
static std::vector<Meeting> warps;
static Meeting block;
static ucontext_t scheduler;
static std::function<void()> body;
static unsigned dice = 1;

static unsigned roll() { return (dice = dice * 1664525u + 1013904223u) >> 8; }

static void give_way() {
    int thread = threadIdx.x;
    swapcontext(&fibers[thread], &scheduler);
    threadIdx.x = thread;
}

static void begin() {
    body();
    finished[threadIdx.x] = 1;
    swapcontext(&fibers[threadIdx.x], &scheduler);
}

static unsigned* meet(Meeting& at, int size, int place, unsigned value, bool add_up) {
    unsigned generation = at.generation;
    at.values[place] = add_up ? at.values[place] | value : value;
    if (++at.arrived == size) {
        memcpy(at.shown[generation & 1], at.values, sizeof at.values);
        memset(at.values, 0, sizeof at.values);
        at.arrived = 0;
        ++at.generation;
    }
    while (at.generation == generation) give_way();
    return at.shown[generation & 1];
}

static unsigned* in_warp(unsigned value) { return meet(warps[threadIdx.x / 32], 32, threadIdx.x % 32, value, false); }

static void run(int blocks, int threads, unsigned seed, std::function<void()> kernel) {
    body = kernel;
    dice = seed;
    blockDim.x = threads;
    gridDim.x = blocks;
    stacks.resize(threads, std::vector<char>(STACK_BYTES));
    std::vector<int> order(threads);
    std::iota(order.begin(), order.end(), 0);
    for (int number = 0; number < blocks; ++number) {
        blockIdx.x = number;
        memset(memory, 0xA5, sizeof memory);
        warps.assign(threads / 32, Meeting());
        block = Meeting();
        finished.assign(threads, 0);
        fibers.assign(threads, ucontext_t());
        for (int thread = 0; thread < threads; ++thread) {
            getcontext(&fibers[thread]);
            fibers[thread].uc_stack.ss_sp = stacks[thread].data();
            fibers[thread].uc_stack.ss_size = STACK_BYTES;
            makecontext(&fibers[thread], begin, 0);
        }
        long turns = 0;
        for (int left = threads; left > 0;) {
            if (++turns > MOST_TURNS) {
                fprintf(stderr, "a barrier that not all threads of block %d reach\n", number);
                abort();
            }
            for (int place = threads - 1; place > 0; --place) std::swap(order[place], order[roll() % (place + 1)]);
            for (int thread : order) {
                if (finished[thread]) continue;
                threadIdx.x = thread;
                swapcontext(&scheduler, &fibers[thread]);
                left -= finished[thread];
            }
        }
    }
}

}  // namespace cpu

static int __syncthreads_or(int value) { return cpu::meet(cpu::block, blockDim.x, 0, value != 0, true)[0]; }
static void __syncthreads() { __syncthreads_or(0); }
static int __popc(unsigned value) { return __builtin_popcount(value); }
static unsigned __ballot_sync(unsigned, bool vote) {
    unsigned* votes = cpu::in_warp(vote);
    unsigned mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= votes[lane] << lane;
    return mask;
}
static int __shfl_up_sync(unsigned, int value, int step) {
    unsigned* values = cpu::in_warp(value);
    int lane = threadIdx.x % 32;
    return lane >= step ? static_cast<int>(values[lane - step]) : value;
}
static int __shfl_sync(unsigned, int value, int lane) { return static_cast<int>(cpu::in_warp(value)[lane]); }
static unsigned long long __shfl_down_sync(unsigned, unsigned long long value, int step) {
    int lane = threadIdx.x % 32, from = lane + step < 32 ? lane + step : lane;
    unsigned long long low = cpu::in_warp(static_cast<unsigned>(value))[from];
    unsigned long long high = cpu::in_warp(static_cast<unsigned>(value >> 32))[from];
    return high << 32 | low;
}
static int __reduce_add_sync(unsigned, int value) {
    unsigned* values = cpu::in_warp(value);
    return static_cast<int>(std::accumulate(values, values + 32, 0u));
}
static void maybe_give_way() {
    if (cpu::roll() % 8 == 0) cpu::give_way();
}
static unsigned atomicCAS(unsigned* at, unsigned expected, unsigned value) {
    maybe_give_way();
    unsigned found = *at;
    if (found == expected) *at = value;
    return found;
}
static unsigned atomicMin(unsigned* at, unsigned value) {
    maybe_give_way();
    unsigned found = *at;
    *at = min(found, value);
    return found;
}
template <class T, class V>
static T atomicAdd(T* at, V value) {
    T found = *at;
    *at += value;
    return found;
}
