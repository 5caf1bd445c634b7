// Swap-in: copies the group rows of resolved misses from pinned host memory into hot rows, over PCIe.
//
// Each request's list holds `count` pairs (source offset in host memory, target offset in device memory). A row is
// `pieces` runs of `piece_bytes`, `source_step` apart at the source and `target_step` at the target: one piece
// where the layers of a group lie side by side, one a layer in a pool whose outermost dimension is the layer.
// All addresses and lengths are multiples of 16 bytes. Work is dealt round-robin over blocks first, so that few
// rows already occupy all multiprocessors.

typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Rows {
    const i64* source;
    const i64* target;
    const int* count;
    int requests;
    int entries;  // room of one request's list
    int pieces;
    int piece_bytes;
    i64 source_step;
    i64 target_step;
};

#define MOST_REQUESTS 1024

// Kernels take the fields one by one: the launcher passes plain numbers.
#define ROWS_PARAMETERS                                                                                          \
    const i64 *source, const i64 *target, const int *count, int requests, int entries, int pieces, int piece_bytes, \
        i64 source_step, i64 target_step
#define ROWS_ARGUMENT \
    {source, target, count, requests, entries, pieces, piece_bytes, source_step, target_step}

// Inclusive sums of the counts; returns all rows. Every thread of the block calls it.
static __device__ int sum_counts(const Rows& rows, int* ends) {
    if (threadIdx.x < 32) {
        int sum = 0;
        for (int first = 0; first < rows.requests; first += 32) {
            int request = first + threadIdx.x;
            int running = request < rows.requests ? rows.count[request] : 0;
            for (int step = 1; step < 32; step *= 2) {
                int other = __shfl_up_sync(0xffffffffu, running, step);
                if (threadIdx.x >= step) running += other;
            }
            if (request < rows.requests) ends[request] = sum + running;
            sum += __shfl_sync(0xffffffffu, running, 31);
        }
    }
    __syncthreads();
    return ends[rows.requests - 1];
}

// The list entry of row `number`, counted over all requests.
static __device__ __forceinline__ i64 list_place(const Rows& rows, const int* ends, int number) {
    int low = 0, high = rows.requests - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (ends[middle] > number) high = middle; else low = middle + 1;
    }
    return static_cast<i64>(low) * rows.entries + (number - (low ? ends[low - 1] : 0));
}

static __device__ __forceinline__ uint4 load(const void* address) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(address));
    return value;
}

// A warp a piece. LOADS x 16 bytes a lane are in flight. With `line` 128 every load of a warp covers whole lines of
// the source, so that no line is asked for twice; with 16 loads begin where the piece does.
template <int LOADS>
static __device__ __forceinline__ void by_warp(const char* host, char* device, const Rows& rows, int line) {
    __shared__ int ends[MOST_REQUESTS];
    const int total = sum_counts(rows, ends) * rows.pieces;
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int units = rows.piece_bytes / 16;
    for (i64 work = static_cast<i64>(threadIdx.x >> 5) * gridDim.x + blockIdx.x; work < total;
         work += static_cast<i64>(warps) * gridDim.x) {
        int piece = static_cast<int>(work % rows.pieces);
        i64 place = list_place(rows, ends, static_cast<int>(work / rows.pieces));
        const char* from = host + rows.source[place] + piece * rows.source_step;
        char* to = device + rows.target[place] + piece * rows.target_step;
        int early = static_cast<int>((reinterpret_cast<u64>(from) & (line - 1)) / 16);
        for (int first = lane - early; first < units; first += 32 * LOADS) {
            uint4 values[LOADS];
            #pragma unroll
            for (int turn = 0; turn < LOADS; ++turn) {
                int unit = first + turn * 32;
                if (unit >= 0 && unit < units) values[turn] = load(from + unit * 16ll);
            }
            #pragma unroll
            for (int turn = 0; turn < LOADS; ++turn) {
                int unit = first + turn * 32;
                if (unit >= 0 && unit < units) *reinterpret_cast<uint4*>(to + unit * 16ll) = values[turn];
            }
        }
    }
}

extern "C" __global__ void gather_warp(const char* host, char* device, ROWS_PARAMETERS, int line) {
    const Rows rows = ROWS_ARGUMENT;
    if (rows.piece_bytes > 32 * 16 * 2) {
        by_warp<6>(host, device, rows, line);
    } else {
        by_warp<2>(host, device, rows, line);
    }
}

// A warp a row, over all its pieces: what a layer-outermost pool gains from one launch for all layers of a group.
extern "C" __global__ void gather_row(const char* host, char* device, ROWS_PARAMETERS, int ignored) {
    const Rows rows = ROWS_ARGUMENT;
    __shared__ int ends[MOST_REQUESTS];
    const int total = sum_counts(rows, ends);
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int units = rows.piece_bytes / 16, all = units * rows.pieces;
    for (i64 work = static_cast<i64>(threadIdx.x >> 5) * gridDim.x + blockIdx.x; work < total;
         work += static_cast<i64>(warps) * gridDim.x) {
        i64 place = list_place(rows, ends, static_cast<int>(work));
        const char* from = host + rows.source[place];
        char* to = device + rows.target[place];
        for (int first = lane; first < all; first += 32 * 6) {
            uint4 values[6];
            #pragma unroll
            for (int turn = 0; turn < 6; ++turn) {
                int unit = first + turn * 32;
                if (unit < all) values[turn] = load(from + (unit / units) * rows.source_step + (unit % units) * 16ll);
            }
            #pragma unroll
            for (int turn = 0; turn < 6; ++turn) {
                int unit = first + turn * 32;
                if (unit < all) {
                    *reinterpret_cast<uint4*>(to + (unit / units) * rows.target_step + (unit % units) * 16ll) = values[turn];
                }
            }
        }
    }
}

#if __CUDA_ARCH__ >= 900

static __device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The bulk-copy engine: each of the first `lanes` threads of a warp moves whole pieces through its own buffer in
// shared memory, host -> shared -> device, and no register holds a byte of them.
extern "C" __global__ void gather_bulk(const char* host, char* device, ROWS_PARAMETERS, int lanes) {
    const Rows rows = ROWS_ARGUMENT;
    extern __shared__ __align__(128) unsigned char buffers[];
    __shared__ int ends[MOST_REQUESTS];
    __shared__ __align__(8) u64 barriers[1024];
    const int total = sum_counts(rows, ends) * rows.pieces;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    if (lane >= lanes) return;
    const u32 bytes = rows.piece_bytes;
    const u32 buffer = shared_address(buffers) + (warp * lanes + lane) * ((bytes + 127) / 128 * 128);
    const u32 barrier = shared_address(&barriers[threadIdx.x]);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    u32 parity = 0;
    for (i64 work = static_cast<i64>(lane * warps + warp) * gridDim.x + blockIdx.x; work < total;
         work += static_cast<i64>(lanes) * warps * gridDim.x) {
        int piece = static_cast<int>(work % rows.pieces);
        i64 place = list_place(rows, ends, static_cast<int>(work / rows.pieces));
        const char* from = host + rows.source[place] + piece * rows.source_step;
        char* to = device + rows.target[place] + piece * rows.target_step;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(buffer), "l"(from), "r"(bytes), "r"(barrier) : "memory");
        u32 done = 0;
        while (!done) {
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
        }
        parity ^= 1;
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :: "l"(to), "r"(buffer), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif
