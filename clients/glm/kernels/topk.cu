// Exact top-k of float rows: the k greatest, equal ones from the lowest position on, in ascending order of position.
//
// Three launches. `histogram` counts the upper BITS of each row's keys. `collect` finds the bin that holds the k-th
// greatest and keeps, segment by segment and in order, the positions of all keys in this bin and above. `choose`, one
// block a row, finds the exact key among the few that are left and writes the result.

#define BITS 13
#define BINS (1 << BITS)
#define LOW (32 - BITS)
#define FULL 0xffffffffu

// Order of unsigned keys = order of floats, -0 below +0 apart: it is made +0 first. -inf is 0x007fffff.
__device__ __forceinline__ unsigned key_of(float score) {
    const unsigned bits = __float_as_uint(score + 0.0f);
    return bits ^ ((unsigned)((int)bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ bool counts(unsigned key) { return key != 0x007fffffu; }

// The greatest bin such that the bins from it on hold at least k: {bin, keys above the bin}. All threads of the
// block call it; `total` < k gives bin 0. `width` bins, a multiple of the block.
__device__ void find_bin(const unsigned *bins, int width, int k, unsigned *sums, int *result) {
    const int threads = blockDim.x, each = width / threads, first = threadIdx.x * each;
    unsigned own = 0;
    for (int i = 0; i < each; ++i) own += bins[first + i];
    sums[threadIdx.x] = own;
    if (threadIdx.x == 0) { result[0] = 0; result[1] = 0; }
    __syncthreads();
    // sums[t] becomes the count of all threads from t on.
    for (int step = 1; step < threads; step *= 2) {
        const unsigned other = threadIdx.x + step < threads ? sums[threadIdx.x + step] : 0;
        __syncthreads();
        sums[threadIdx.x] += other;
        __syncthreads();
    }
    const unsigned from = sums[threadIdx.x], after = from - own;
    if (from >= (unsigned)k && after < (unsigned)k) {
        unsigned above = after;
        int bin = first + each - 1;
        while (above + bins[bin] < (unsigned)k) above += bins[bin--];
        result[0] = bin;
        result[1] = (int)above;
    } else if (threadIdx.x == 0 && from < (unsigned)k) {
        result[1] = (int)(from - bins[0]);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(512) histogram(
    const float *scores, long long stride, const int *lengths, int k, int chunks, int chunk, unsigned *bins) {
    __shared__ unsigned own[BINS];
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
    unsigned *global = bins + (long long)row * BINS;
    for (int i = threadIdx.x; i < BINS; i += blockDim.x)
        if (own[i]) atomicAdd(&global[i], own[i]);
}

extern "C" __global__ void __launch_bounds__(256) collect(
    const float *scores, long long stride, const int *lengths, int k, int segment, int segments, const unsigned *bins,
    int *kept, int *kept_counts) {
    __shared__ unsigned sums[256];
    __shared__ int found[2];
    const int blocks = (segments + 7) / 8, row = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const int length = lengths[row], lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (length <= k) return;
    if (block * 8 * segment >= length) {
        if (threadIdx.x < 8 && block * 8 + threadIdx.x < segments)
            kept_counts[(long long)row * segments + block * 8 + threadIdx.x] = 0;
        return;
    }
    find_bin(bins + (long long)row * BINS, BINS, k, sums, found);
    const unsigned least = (unsigned)found[0] << LOW;
    const int mine = block * 8 + warp;
    if (mine >= segments) return;
    const int first = mine * segment, last = min(first + segment, length);
    const float *line = scores + row * stride;
    int *target = kept + row * stride + first;
    int count = 0;
    for (int at = first + 4 * lane; at - 4 * lane < last; at += 128) {
        unsigned flags = 0;
        if (at < last) {
            const float4 four = *(const float4 *)(line + at);
            const float values[4] = {four.x, four.y, four.z, four.w};
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned key = key_of(values[i]);
                if (at + i < last && counts(key) && key >= least) flags |= 1u << i;
            }
        }
        if (!__any_sync(FULL, flags)) continue;
        const int own = __popc(flags);
        int upto = own;
        #pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(FULL, upto, step);
            if (lane >= step) upto += other;
        }
        int place = count + upto - own;
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            if (flags >> i & 1) target[place++] = at + i;
        count += __shfl_sync(FULL, upto, 31);
    }
    if (lane == 0) kept_counts[(long long)row * segments + mine] = count;
}

#define CHOOSERS 1024
#define MAX_SEGMENTS 2048

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

// Sum over the threads before this one; `total` gets the sum of all. Uses warps[33].
__device__ int exclusive(int own, int *warps, int *total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int upto = own;
    #pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(FULL, upto, step);
        if (lane >= step) upto += other;
    }
    if (lane == 31) warps[warp] = upto;
    __syncthreads();
    if (warp == 0) {
        int sum = warps[lane];
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

extern "C" __global__ void __launch_bounds__(CHOOSERS) choose(
    const float *scores, long long stride, const int *lengths, int k, int segment, int segments, const unsigned *bins,
    const int *kept, const int *kept_counts, int *selection) {
    __shared__ int before[MAX_SEGMENTS + 1];
    __shared__ unsigned small[CHOOSERS], sums[CHOOSERS];
    __shared__ int warps[33], found[2];
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

    // The exact key of rank k: first its upper bits, as `collect` found them, then 10, then the last 9.
    find_bin(bins + (long long)row * BINS, BINS, k, sums, found);
    unsigned prefix = found[0];
    int need = k - found[1], known = BITS;
    for (int level = 0; level < 2; ++level) {
        const int width = level == 0 ? 10 : LOW - 10, shift = 32 - known - width;
        small[me] = 0;
        __syncthreads();
        for (int i = me; i < size; i += CHOOSERS) {
            const unsigned key = key_of(line[list.at(i)]);
            if (key >> (32 - known) == prefix) atomicAdd(&small[key >> shift & ((1u << width) - 1)], 1u);
        }
        __syncthreads();
        find_bin(small, CHOOSERS, need, sums, found);
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
        const int position = i < size ? list.at(i) : 0;
        const unsigned key = i < size ? key_of(line[position]) : 0u;
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
