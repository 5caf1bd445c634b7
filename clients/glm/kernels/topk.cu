// Exact top-k of float rows: the k greatest, equal ones from the lowest position on, in ascending order of position.
//
// Three launches. `histogram` counts the upper BITS of each row's keys; the last block of a row finds the bin that holds
// the k-th greatest. `collect` keeps, segment by segment and in order, the positions of all keys in this bin and above.
// `choose`, one block a row, finds the exact key among the few that are left and writes the result.

#define BITS 13
#define BINS (1 << BITS)
// Of a row of bins: the bins, how many blocks have counted, the bin found, and the keys above it.
#define ROW_BINS (BINS + 4)
#define DONE BINS
#define FOUND (BINS + 1)
#define COUNTERS 512
#define AT_ONCE 8
#define LOW (32 - BITS)
#define FULL 0xffffffffu

// Order of unsigned keys = order of floats, -0 below +0 apart: it is made +0 first. -inf is 0x007fffff.
__device__ __forceinline__ unsigned key_of(float score) {
    const unsigned bits = __float_as_uint(score + 0.0f);
    return bits ^ ((unsigned)((int)bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ bool counts(unsigned key) { return key != 0x007fffffu; }

// Sum over the threads before this one; `total` gets the sum of all. Uses warps[32].
__device__ int exclusive(int own, int *warps, int *total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, count = blockDim.x >> 5;
    int upto = own;
    #pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(FULL, upto, step);
        if (lane >= step) upto += other;
    }
    if (lane == 31) warps[warp] = upto;
    __syncthreads();
    if (warp == 0) {
        int sum = lane < count ? warps[lane] : 0;
        #pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(FULL, sum, step);
            if (lane >= step) sum += other;
        }
        warps[lane] = sum;
    }
    __syncthreads();
    const int before = upto - own + (warp ? warps[warp - 1] : 0);
    *total = warps[31];
    __syncthreads();
    return before;
}

// The greatest bin such that the bins from it on hold at least k: {bin, keys above the bin}. All threads of the block
// call it, each with the counts of EACH bins in a row; a total < k gives bin 0.
template <int EACH>
__device__ void find_bin(const unsigned (&mine)[EACH], int k, int *warps, int *result) {
    unsigned own = 0;
    int total;
    #pragma unroll
    for (int i = 0; i < EACH; ++i) own += mine[i];
    const unsigned before = exclusive(own, warps, &total), from = total - before, after = from - own;
    if (from >= (unsigned)k && after < (unsigned)k) {
        unsigned above = after;
        int bin = EACH - 1;
        #pragma unroll
        for (int i = EACH - 1; i > 0; --i)
            if (bin == i && above + mine[i] < (unsigned)k) { above += mine[i]; bin = i - 1; }
        result[0] = threadIdx.x * EACH + bin;
        result[1] = (int)above;
    } else if (threadIdx.x == 0 && from < (unsigned)k) {
        result[0] = 0;
        result[1] = (int)(from - mine[0]);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(COUNTERS) histogram(
    const float *scores, long long stride, const int *lengths, int k, int chunks, int chunk, unsigned *bins) {
    __shared__ unsigned own[BINS];
    __shared__ int warps[32], found[2], last_one;
    const int row = blockIdx.x / chunks, length = lengths[row], first = blockIdx.x % chunks * chunk;
    const int last = min(first + chunk, length);
    if (length <= k || first >= last) return;
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) own[i] = 0;
    __syncthreads();
    const float *line = scores + row * stride;
    int bin = -1;
    unsigned seen = 0;  // keys of the same bin in a row: many equal scores must not queue for one counter
    for (int at = first + 4 * threadIdx.x; at < last; at += 4 * blockDim.x) {
        const float4 four = *(const float4 *)(line + at);
        const float values[4] = {four.x, four.y, four.z, four.w};
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned key = key_of(values[i]);
            if (at + i >= last || !counts(key)) continue;
            const int next = key >> LOW;
            if (next != bin) {
                if (seen) atomicAdd(&own[bin], seen);
                bin = next;
                seen = 0;
            }
            ++seen;
        }
    }
    if (seen) atomicAdd(&own[bin], seen);
    __syncthreads();
    unsigned *global = bins + (long long)row * ROW_BINS;
    for (int i = threadIdx.x; i < BINS; i += blockDim.x)
        if (own[i]) atomicAdd(&global[i], own[i]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last_one = atomicAdd(&global[DONE], 1u) == (unsigned)((length + chunk - 1) / chunk - 1);
    __syncthreads();
    if (!last_one) return;
    __threadfence();
    unsigned mine[BINS / COUNTERS];
    #pragma unroll
    for (int i = 0; i < BINS / COUNTERS; i += 4) {
        const uint4 four = __ldcg((const uint4 *)(global + threadIdx.x * (BINS / COUNTERS) + i));
        mine[i] = four.x;
        mine[i + 1] = four.y;
        mine[i + 2] = four.z;
        mine[i + 3] = four.w;
    }
    find_bin(mine, k, warps, found);
    if (threadIdx.x < 2) global[FOUND + threadIdx.x] = (unsigned)found[threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(256) collect(
    const float *scores, long long stride, const int *lengths, int k, int segment, int segments, const unsigned *bins,
    int *kept, int *kept_counts) {
    const int blocks = (segments + 7) / 8, row = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const int length = lengths[row], lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (length <= k) return;
    if (block * 8 * segment >= length) {
        if (threadIdx.x < 8 && block * 8 + threadIdx.x < segments)
            kept_counts[(long long)row * segments + block * 8 + threadIdx.x] = 0;
        return;
    }
    const unsigned least = bins[(long long)row * ROW_BINS + FOUND] << LOW;
    const int mine = block * 8 + warp;
    if (mine >= segments) return;
    const int first = mine * segment, last = min(first + segment, length);
    const float *line = scores + row * stride;
    int *target = kept + row * stride + first;
    int count = 0;
    for (int base = first; base < last; base += 128 * AT_ONCE) {
        float4 fours[AT_ONCE];
        #pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int at = base + 128 * n + 4 * lane;
            if (at < last) fours[n] = *(const float4 *)(line + at);
        }
        #pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int at = base + 128 * n + 4 * lane;
            const float values[4] = {fours[n].x, fours[n].y, fours[n].z, fours[n].w};
            unsigned flags = 0;
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned key = key_of(values[i]);
                if (at + i < last && counts(key) && key >= least) flags |= 1u << i;
            }
            if (!__any_sync(FULL, flags)) continue;
            int place = count;
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned all = __ballot_sync(FULL, flags >> i & 1);
                place += __popc(all & ((1u << lane) - 1));
                count += __popc(all);
            }
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                if (flags >> i & 1) target[place++] = at + i;
        }
    }
    if (lane == 0) kept_counts[(long long)row * segments + mine] = count;
}

#define CHOOSERS 1024
#define MAX_SEGMENTS 2048
#define CACHED 4096

struct Kept {
    const int *positions;  // of the row
    const int *before;     // kept ones before each segment, and in all
    const float *line;
    int segments, segment;
    // The i-th kept position.
    __device__ int at(int i) const {
        int low = 0, high = segments;  // before[low] <= i < before[high]
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (before[middle] <= i) low = middle; else high = middle;
        }
        return positions[(long long)low * segment + i - before[low]];
    }
};

extern "C" __global__ void __launch_bounds__(CHOOSERS) choose(
    const float *scores, long long stride, const int *lengths, int k, int segment, int segments, const unsigned *bins,
    const int *kept, const int *kept_counts, int *selection) {
    __shared__ int before[MAX_SEGMENTS + 1];
    __shared__ unsigned small[CHOOSERS], keys[CACHED];
    __shared__ int positions[CACHED], warps[32], found[2];
    const int row = blockIdx.x, length = lengths[row], me = threadIdx.x;
    const float *line = scores + row * stride;
    int *result = selection + (long long)row * k;
    int total = 0;
    if (length <= k) {  // all that count
        int written = 0;
        for (int base = 0; base < length; base += CHOOSERS) {
            const int position = base + me;
            const bool take = position < length && counts(key_of(line[position]));
            const int place = written + exclusive(take, warps, &total);
            if (take) result[place] = position;
            written += total;
        }
        for (int i = written + me; i < k; i += CHOOSERS) result[i] = -1;
        return;
    }
    for (int i = 2 * me, own = 0; i < MAX_SEGMENTS; i += 2 * CHOOSERS) {
        const int *counted = kept_counts + (long long)row * segments;
        const int a = i < segments ? counted[i] : 0, b = i + 1 < segments ? counted[i + 1] : 0;
        own = exclusive(a + b, warps, &total);
        before[i] = own;
        before[i + 1] = own + a;
    }
    if (me == 0) before[MAX_SEGMENTS] = total;
    __syncthreads();
    const Kept list = {kept + row * stride, before, line, MAX_SEGMENTS, segment};
    const int size = total;
    const bool cached = size <= CACHED;
    if (cached) {
        for (int n = me >> 5; n < segments; n += CHOOSERS / 32) {
            const int from = before[n], count = before[n + 1] - from;
            for (int i = me & 31; i < count; i += 32) {
                const int position = list.positions[(long long)n * segment + i];
                positions[from + i] = position;
                keys[from + i] = key_of(line[position]);
            }
        }
        __syncthreads();
    }
    auto position_of = [&](int i) { return cached ? positions[i] : list.at(i); };
    auto key_at = [&](int i) { return cached ? keys[i] : key_of(line[list.at(i)]); };

    // The exact key of rank k: first its upper bits, as `histogram` found them, then 10, then the last 9.
    unsigned prefix = bins[(long long)row * ROW_BINS + FOUND];
    int need = k - (int)bins[(long long)row * ROW_BINS + FOUND + 1], known = BITS;
    for (int level = 0; level < 2; ++level) {
        const int width = level == 0 ? 10 : LOW - 10, shift = 32 - known - width;
        small[me] = 0;
        __syncthreads();
        for (int i = me; i < size; i += CHOOSERS) {
            const unsigned key = key_at(i);
            if (key >> (32 - known) == prefix) atomicAdd(&small[key >> shift & ((1u << width) - 1)], 1u);
        }
        __syncthreads();
        const unsigned mine[1] = {small[me]};
        find_bin(mine, need, warps, found);
        prefix = prefix << width | (unsigned)found[0];
        need -= found[1];
        known += width;
        __syncthreads();
    }
    // `need` keys equal to `prefix` are chosen, the first ones, and all greater ones. If fewer than k keys count at
    // all, `prefix` is at most the least of them and `need` at least as many as equal it.
    int written = 0, equal = 0;
    for (int base = 0; base < size; base += CHOOSERS) {
        const int i = base + me;
        const int position = i < size ? position_of(i) : 0;
        const unsigned key = i < size ? (cached ? keys[i] : key_of(line[position])) : 0u;
        const bool same = i < size && key == prefix;
        const int rank = equal + exclusive(same, warps, &total);
        equal += total;
        const bool take = i < size && (key > prefix || (same && rank < need));
        const int place = written + exclusive(take, warps, &total);
        if (take) result[place] = position;
        written += total;
    }
    for (int i = written + me; i < k; i += CHOOSERS) result[i] = -1;
}
