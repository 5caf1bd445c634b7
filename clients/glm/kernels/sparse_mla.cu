// Sparse multi-head latent attention for Hopper (sm_90a): one block a part of a query's rows, all 64 heads.
//
// One warpgroup gathers tiles of 64 rows, dequantised to bfloat16 in shared memory. Two warpgroups attend: each sums up
// its own 256 of the 512 output columns; the first one computes the weights, and leaves them to the second where the
// tile's rope part was. (Scores read both factors from shared memory, and fill its bandwidth.) A tile is nine blocks of
// 64 rows x 64 values, 128 bytes a row, 16-byte chunks swapped by the row (the matrix unit's 128-byte swizzle); block 8
// is the rope part.

#define ROWS 64
#define BLOCK_BYTES 8192
#define TILE_BYTES (9 * BLOCK_BYTES)
#define STAGES 2
#define BIAS_AT (TILE_BYTES * (1 + STAGES))
#define FADES_AT (BIAS_AT + STAGES * ROWS * 4)
#define BARRIERS_AT (FADES_AT + STAGES * 128 * 8)
// BARRIERS_AT + STAGES * 16 bytes of shared memory are used, from a multiple of 1,024 on.
#define ATTENDERS 256
#define THREADS 384
#define HOT (1ll << 62)
#define FULL_WARP 0xffffffffu
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define LN2 0.6931471805599453f

typedef unsigned long long u64;
typedef unsigned int u32;

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)

__device__ __forceinline__ u32 shared_address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again%=;\n}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// What ordinary stores wrote is seen by the matrix unit.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ uint4 load16(u64 address) {
    uint4 value = {0, 0, 0, 0};
    if (address)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(address));
    return value;
}

__device__ __forceinline__ void store16(u32 address, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// Four e4m3 codes times a power of two, exactly: sign and the seven other bits go to their places in bfloat16, which
// leaves the exponent 120 too small; a product with 2^120 mends that, for subnormal codes too.
__device__ __forceinline__ void dequantise(u32 codes, u32 factors, u32 &low, u32 &high) {
    u32 a = __byte_perm(codes, 0, 0x1404), b = __byte_perm(codes, 0, 0x3424);
    a = (a & 0x80008000u) | ((a >> 4) & 0x07f007f0u);
    b = (b & 0x80008000u) | ((b >> 4) & 0x07f007f0u);
    asm("{\n.reg .b32 c;\nmul.rn.bf16x2 c, %1, %2;\nmul.rn.bf16x2 %0, c, %3;\n}"
        : "=r"(low) : "r"(a), "r"(0x7b807b80u), "r"(factors));
    asm("{\n.reg .b32 c;\nmul.rn.bf16x2 c, %1, %2;\nmul.rn.bf16x2 %0, c, %3;\n}"
        : "=r"(high) : "r"(b), "r"(0x7b807b80u), "r"(factors));
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float power(float exponent) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(exponent));
    return value;
}

// A matrix in shared memory for the matrix unit: 128-byte swizzle; the two distances in bytes.
__device__ __forceinline__ u64 matrix(u32 address, u32 leading, u32 stride) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | 1ull << 62;
}

// 64 x 64 += 64 x 16 times the transpose of 64 x 16, both in shared memory.
__device__ __forceinline__ void multiply_scores(float (&d)[32], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred more;\nsetp.ne.b32 more, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, more, 1, 1, 0, 0;\n}\n"
        : F16(d, 0), F16(d, 16) : "l"(a), "l"(b), "r"(accumulate));
}

// 64 x 256 += 64 x 16 in registers times 16 x 256 in shared memory.
__device__ __forceinline__ void multiply_values(float (&d)[128], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
        : F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48), F16(d, 64), F16(d, 80), F16(d, 96), F16(d, 112)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

__device__ __forceinline__ void multiply_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

template <int N> __device__ __forceinline__ void multiply_end(float (&d)[N]) {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    #pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");  // none is read before the wait
}

struct Part {
    int first, last, tiles;
};

__device__ __forceinline__ Part part_of(int count, int split, int splits) {
    const int share = ((count + ROWS - 1) / ROWS + splits - 1) / splits * ROWS;
    const int first = split * share, last = min(count, first + share);
    return {first, last, last > first ? (last - first + ROWS - 1) / ROWS : 0};
}

// Eight rows on their way to one warp: a lane holds 16 codes of each row, one of their 32 scales, and two pieces of
// 16 bytes of their rope parts.
struct Rows {
    uint4 codes[8], ropes[2];
    u32 scale;
};

// `address`: lane i of the first 16 holds that of row i, 0 where there is none.
__device__ __forceinline__ void fetch(Rows &rows, u64 address, int half) {
    const int lane = threadIdx.x & 31;
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u64 row = __shfl_sync(FULL_WARP, address, half * 8 + i);
        rows.codes[i] = load16(row ? row + lane * 16 : 0);
    }
    const u64 scaled = __shfl_sync(FULL_WARP, address, half * 8 + (lane >> 2));
    rows.scale = 0;
    if (scaled) asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(rows.scale) : "l"(scaled + 512 + (lane & 3) * 4));
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u64 row = __shfl_sync(FULL_WARP, address, half * 8 + i * 4 + (lane >> 3));
        rows.ropes[i] = load16(row ? row + 528 + (lane & 7) * 16 : 0);
    }
}

// Into rows `first` to `first` + 7 of a tile; `first` is a multiple of 8.
__device__ __forceinline__ void put_rows(const Rows &rows, u32 tile, int first) {
    const int lane = threadIdx.x & 31, odd = lane >> 2 & 1;
    // Odd blocks write their second chunk first: so eight lanes meet all banks.
    const u32 column = tile + (lane >> 2) * BLOCK_BYTES + first * 128 + ((lane & 3) * 2 + odd) * 16;
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
        // A power of two is its upper half.
        const u32 factor = __byte_perm(__shfl_sync(FULL_WARP, rows.scale, i * 4 + (lane >> 3)), 0, 0x3232);
        const uint4 codes = rows.codes[i];
        u32 out[8];
        dequantise(odd ? codes.z : codes.x, factor, out[0], out[1]);
        dequantise(odd ? codes.w : codes.y, factor, out[2], out[3]);
        dequantise(odd ? codes.x : codes.z, factor, out[4], out[5]);
        dequantise(odd ? codes.y : codes.w, factor, out[6], out[7]);
        const u32 target = column ^ i * 16;
        store16(target + i * 128, out[0], out[1], out[2], out[3]);
        store16((target ^ 16) + i * 128, out[4], out[5], out[6], out[7]);
    }
    const u32 rope = tile + 8 * BLOCK_BYTES + first * 128 + (lane >> 3) * 128 + (((lane & 7) ^ (lane >> 3)) * 16);
    store16(rope, rows.ropes[0].x, rows.ropes[0].y, rows.ropes[0].z, rows.ropes[0].w);
    store16((rope ^ 64) + 512, rows.ropes[1].x, rows.ropes[1].y, rows.ropes[1].z, rows.ropes[1].w);
}

// One warpgroup. Each warp fills 16 rows of every tile, eight at a time; the next eight are on their way meanwhile.
__device__ __forceinline__ void gather(
    const long long *references, u64 resident, long long hot_delta, Part part, u32 shared) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    const int mine = part.first + warp * 16 + (lane & 15);
    auto refer = [&](int t) -> long long {
        const int n = mine + t * ROWS;
        return n < part.last ? references[n] : -1ll;
    };
    auto place = [&](long long reference) -> u64 {
        if (reference < 0) return 0;
        return resident + (reference & HOT ? (reference ^ HOT) + hot_delta : reference);
    };
    Rows even, odd;
    u64 address = place(refer(0));
    fetch(even, address, 0);
    u64 ahead = place(refer(1));
    long long later = refer(2);
    for (int t = 0; t < part.tiles; ++t) {
        const int stage = t & 1;
        const u32 tile = shared + TILE_BYTES * (1 + stage), full = shared + BARRIERS_AT + stage * 16;
        fetch(odd, address, 1);
        const u64 after = place(later);
        #pragma unroll
        for (int i = 0; i < 3; ++i)  // six lines of 128 bytes a row, three by each half of the warp
            if (after) asm volatile("prefetch.global.L2 [%0];" ::"l"(after + ((lane >> 4) * 3 + i) * 128));
        later = refer(t + 3);
        wait(full + 8, (t >> 1 & 1) ^ 1);
        put_rows(even, tile, warp * 16);
        if (lane < 16)
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared + BIAS_AT + (stage * ROWS + warp * 16 + lane) * 4),
                         "f"(address ? 0.0f : NEGATIVE_INFINITY) : "memory");
        fetch(even, ahead, 0);
        put_rows(odd, tile, warp * 16 + 8);
        publish();
        arrive(full);
        address = ahead;
        ahead = after;
    }
}

__device__ __forceinline__ void load_query(const uint4 *q, u32 shared) {
    for (int i = threadIdx.x; i < 64 * 72; i += ATTENDERS) {
        const int head = i / 72, chunk = i % 72;
        const uint4 value = q[i];
        store16(shared + (chunk >> 3) * BLOCK_BYTES + head * 128 + (((chunk & 7) ^ (head & 7)) << 4),
                value.x, value.y, value.z, value.w);
    }
    publish();
    asm volatile("bar.sync 1, %0;" ::"n"(ATTENDERS) : "memory");
}

__device__ __forceinline__ void put(float *target, float a, float b) { *(float2 *)target = make_float2(a, b); }
__device__ __forceinline__ void put(unsigned short *target, float a, float b) { *(u32 *)target = pack(a, b); }

// Of the two heads of a thread: the greatest score so far, and the sum of weights relative to it.
struct Sums {
    float top0, top1, total0, total1;
};

__device__ __forceinline__ void multiply_query(float (&s)[32], u32 shared, u32 tile) {
    const u64 query = matrix(shared, 16, 1024), keys = matrix(tile, 16, 1024);
    multiply_begin();
    #pragma unroll
    for (int k = 0; k < 36; ++k) {
        const int at = ((k >> 2) * BLOCK_BYTES + (k & 3) * 32) >> 4;
        multiply_scores(s, query + at, keys + at, k > 0);
    }
    multiply_end(s);
}

// From scores to weights `p`. Gives the factors by which what was summed up before is to be weighed anew.
__device__ __forceinline__ float2 weigh(float (&s)[32], u32 (&p)[16], Sums &sums, u32 bias, float scale) {
    float high0 = sums.top0, high1 = sums.top1;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
        float b0, b1;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(b0), "=f"(b1) : "r"(bias + j * 32) : "memory");
        s[4 * j] = fmaf(s[4 * j], scale, b0);
        s[4 * j + 1] = fmaf(s[4 * j + 1], scale, b1);
        s[4 * j + 2] = fmaf(s[4 * j + 2], scale, b0);
        s[4 * j + 3] = fmaf(s[4 * j + 3], scale, b1);
        high0 = fmaxf(high0, fmaxf(s[4 * j], s[4 * j + 1]));
        high1 = fmaxf(high1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
    }
    #pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        high0 = fmaxf(high0, __shfl_xor_sync(FULL_WARP, high0, step));
        high1 = fmaxf(high1, __shfl_xor_sync(FULL_WARP, high1, step));
    }
    // Where no row counts yet, any finite reference point will do: -inf minus -inf would be NaN.
    const float point0 = high0 == NEGATIVE_INFINITY ? 0 : high0, point1 = high1 == NEGATIVE_INFINITY ? 0 : high1;
    const float fade0 = power(sums.top0 - point0), fade1 = power(sums.top1 - point1);
    sums.top0 = high0;
    sums.top1 = high1;
    sums.total0 *= fade0;
    sums.total1 *= fade1;
    #pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float a = power(s[4 * j] - point0), b = power(s[4 * j + 1] - point0);
        const float c = power(s[4 * j + 2] - point1), d = power(s[4 * j + 3] - point1);
        sums.total0 += a + b;
        sums.total1 += c + d;
        p[2 * j] = pack(a, b);
        p[2 * j + 1] = pack(c, d);
    }
    return make_float2(fade0, fade1);
}

// acc = acc * fades + p times a tile's rows; `at` is where the columns begin.
__device__ __forceinline__ void add_values(float (&acc)[128], float2 fades, const u32 (&p)[16], u32 at) {
    #pragma unroll
    for (int i = 0; i < 128; i += 4) {
        acc[i] *= fades.x;
        acc[i + 1] *= fades.x;
        acc[i + 2] *= fades.y;
        acc[i + 3] *= fades.y;
    }
    const u64 values = matrix(at, BLOCK_BYTES, 1024);
    multiply_begin();
    #pragma unroll
    for (int k = 0; k < 4; ++k)
        multiply_values(acc, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], values + (k * 2048 >> 4));
    multiply_end(acc);
}

template <typename Out>
__device__ __forceinline__ void write(const float (&acc)[128], float2 norms, int number, Out *out) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    Out *target = out + (warp * 16 + (lane >> 2)) * 512 + number * 256 + (lane & 3) * 2;
    #pragma unroll
    for (int j = 0; j < 32; ++j) {
        put(target + j * 8, acc[4 * j] * norms.x, acc[4 * j + 1] * norms.x);
        put(target + 8 * 512 + j * 8, acc[4 * j + 2] * norms.y, acc[4 * j + 3] * norms.y);
    }
}

// What the first warpgroup hands to the second, thread to thread: barrier 2 + stage says that it lies there.
__device__ __forceinline__ void hand_over(u32 fades_at, float2 fades, int barrier) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(fades_at), "f"(fades.x), "f"(fades.y) : "memory");
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(ATTENDERS) : "memory");
}

__device__ __forceinline__ float2 take_over(u32 fades_at, int barrier) {
    float2 fades;
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(ATTENDERS) : "memory");
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(fades.x), "=f"(fades.y) : "r"(fades_at) : "memory");
    return fades;
}

struct Places {
    u32 tile, bias, fades, weights, full;
    __device__ Places(u32 shared, int t) {
        const int stage = t & 1, thread = threadIdx.x & 127;
        tile = shared + TILE_BYTES * (1 + stage);
        bias = shared + BIAS_AT + stage * ROWS * 4 + (threadIdx.x & 3) * 8;
        fades = shared + FADES_AT + stage * 128 * 8 + thread * 8;
        weights = tile + 8 * BLOCK_BYTES + thread * 16;
        full = shared + BARRIERS_AT + stage * 16;
    }
};

// The first warpgroup: weights, and columns 0 to 255.
template <typename Out>
__device__ __forceinline__ void weigh_and_add(Part part, u32 shared, float scale, Out *out, float *lse) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    Sums sums = {NEGATIVE_INFINITY, NEGATIVE_INFINITY, 0, 0};
    float acc[128];
    #pragma unroll
    for (int i = 0; i < 128; ++i) acc[i] = 0;
    for (int t = 0; t < part.tiles; ++t) {
        const Places at(shared, t);
        float s[32];
        u32 p[16];
        wait(at.full, t >> 1 & 1);
        multiply_query(s, shared, at.tile);
        // No warp writes over the rope part while another one's product still reads it.
        asm volatile("bar.sync 5, 128;" ::: "memory");
        const float2 fades = weigh(s, p, sums, at.bias, scale);
        #pragma unroll
        for (int i = 0; i < 4; ++i) store16(at.weights + i * 2048, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
        hand_over(at.fades, fades, 2 + (t & 1));
        add_values(acc, fades, p, at.tile);
        if (lane == 0) arrive(at.full + 8);
    }
    #pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        sums.total0 += __shfl_xor_sync(FULL_WARP, sums.total0, step);
        sums.total1 += __shfl_xor_sync(FULL_WARP, sums.total1, step);
    }
    const float2 norms = {sums.total0 > 0 ? 1 / sums.total0 : 0, sums.total1 > 0 ? 1 / sums.total1 : 0};
    hand_over(shared + (threadIdx.x & 127) * 8, norms, 4);  // the query is needed no more
    write(acc, norms, 0, out);
    if ((lane & 3) == 0) {
        const int head = warp * 16 + (lane >> 2);
        lse[head] = sums.total0 > 0 ? (sums.top0 + log2f(sums.total0)) * LN2 : NEGATIVE_INFINITY;
        lse[head + 8] = sums.total1 > 0 ? (sums.top1 + log2f(sums.total1)) * LN2 : NEGATIVE_INFINITY;
    }
}

// The second warpgroup: columns 256 to 511.
template <typename Out> __device__ __forceinline__ void add_only(Part part, u32 shared, Out *out) {
    float acc[128];
    #pragma unroll
    for (int i = 0; i < 128; ++i) acc[i] = 0;
    for (int t = 0; t < part.tiles; ++t) {
        const Places at(shared, t);
        u32 p[16];
        wait(at.full, t >> 1 & 1);
        const float2 fades = take_over(at.fades, 2 + (t & 1));
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(p[4 * i]), "=r"(p[4 * i + 1]), "=r"(p[4 * i + 2]), "=r"(p[4 * i + 3])
                         : "r"(at.weights + i * 2048) : "memory");
        add_values(acc, fades, p, at.tile + 4 * BLOCK_BYTES);
        if ((threadIdx.x & 31) == 0) arrive(at.full + 8);
    }
    write(acc, take_over(shared + (threadIdx.x & 127) * 8, 4), 1, out);
}

template <typename Out>
__device__ __forceinline__ void attend(
    const uint4 *q, const long long *references, const int *counts, const void *resident, Out *out, float *lse,
    long long hot_delta, long long row_offset, long long reference_stride, float scale, int splits) {
    extern __shared__ unsigned char memory[];
    const u32 shared = (shared_address(memory) + 1023) & ~1023u;
    const long long query = blockIdx.x / splits, place = blockIdx.x;
    const Part part = part_of(counts[query], blockIdx.x % splits, splits);
    if (threadIdx.x < STAGES) {
        barrier_init(shared + BARRIERS_AT + threadIdx.x * 16, 128);
        barrier_init(shared + BARRIERS_AT + threadIdx.x * 16 + 8, ATTENDERS / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int group = threadIdx.x >> 7;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
        gather(references + query * reference_stride, (u64)resident + row_offset, hot_delta, part, shared);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
        load_query(q + query * (64 * 72), shared);
        if (group == 0) weigh_and_add(part, shared, scale, out + place * 32768, lse + place * 64);
        else add_only(part, shared, out + place * 32768);
    }
}

#define KERNEL(name, Out)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(                                                   \
        const uint4 *q, const long long *references, const int *counts, const void *resident, Out *out, float *lse,  \
        long long hot_delta, long long row_offset, long long reference_stride, float scale, int splits) {            \
        attend(q, references, counts, resident, out, lse, hot_delta, row_offset, reference_stride, scale, splits);   \
    }

KERNEL(attend_float32, float)
KERNEL(attend_bfloat16, unsigned short)
