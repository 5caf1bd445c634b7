// Resolves top-k positions of one share group to device rows: one block a request.
//
// What it computes is defined by ReferenceResolver (resolver_reference.py), to the last hot row; this file only
// does it in parallel. Compiled for one shape: ENTRIES (rows a request x top-k), HOT_ROWS, PAGE_ROWS; THREADS and
// SLOTS (a power of two, at least twice ENTRIES) follow from it.
//
// Order matters in three places, and each is fixed by a prefix sum rather than by which thread comes first:
// misses are numbered by their first entry, evictable hot rows by their place in the LRU list, and the new list
// keeps the old order within each of its three parts.

typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct SpanRow { int first; short segments; short interleave; };
struct PageRow { i64 uid; int device; int host; };
struct Place { i64 key; int device; int host; int slot; };

struct Geometry {
    int most_pages;
    int device_pages;
    int host_pages;
    int row_bytes;     // of the share group: all its layers
    i64 page_bytes;
    i64 group_offset;  // of the share group inside a page
};

#define WARPS (THREADS / 32)
#define ENTRY_TURNS ((ENTRIES + THREADS - 1) / THREADS)
#define HOT_TURNS ((HOT_ROWS + THREADS - 1) / THREADS)
#define ENTRY_CHUNKS (ENTRY_TURNS * WARPS)
#define HOT_CHUNKS (HOT_TURNS * WARPS)
#define HOT_SLABS ((HOT_ROWS + PAGE_ROWS - 1) / PAGE_ROWS)
#define HOT_BATCH 5
#define FREE_SLOT 0xffffffffu
#define NO_SLOT 0xffffffffu
#define NO_ROW 0xffffu

enum { PADDING, PAGE_HERE, PAGE_AWAY, UNREADABLE };

static __device__ __forceinline__ bool within(int page, int pages) { return page >= 0 && page < pages; }

// Where a position lies by the request's tables; false when they name no such place.
static __device__ __forceinline__ bool locate(
    int position, const SpanRow* __restrict__ spans, const PageRow* __restrict__ pages, int page_count, int most_pages,
    Place& place) {
    int segment = position / PAGE_ROWS;
    if (segment >= most_pages) return false;
    int2 raw = *reinterpret_cast<const int2*>(spans + segment);
    int first = raw.x;
    int segments = static_cast<short>(raw.y & 0xffff), interleave = static_cast<short>(raw.y >> 16);
    if (first < 0 || first > segment || segments < 1 || interleave < 1) return false;
    int offset = position - first * PAGE_ROWS;
    int turn = offset / interleave;
    int ordinal = first + turn % segments;
    place.slot = (turn / segments) * interleave + offset % interleave;
    if (ordinal >= page_count || place.slot >= PAGE_ROWS) return false;
    int4 row = *reinterpret_cast<const int4*>(pages + ordinal);
    i64 uid = static_cast<i64>(static_cast<u64>(static_cast<u32>(row.x)) | (static_cast<u64>(static_cast<u32>(row.y)) << 32));
    place.key = static_cast<i64>(static_cast<u64>(uid) * PAGE_ROWS + place.slot);
    place.device = row.z;
    place.host = row.w;
    return uid >= 0 && place.key >= 0;
}

static __device__ __forceinline__ u32 home_slot(i64 key) {
    return static_cast<u32>((static_cast<u64>(key) * 0x9E3779B97F4A7C15ull) >> 32) & (SLOTS - 1);
}

static __device__ __forceinline__ i64 address(int page, int slot, const Geometry& g) {
    return page * g.page_bytes + g.group_offset + static_cast<i64>(slot) * g.row_bytes;
}

// Exclusive prefix sums of `counts`, by one warp; returns their sum.
static __device__ __forceinline__ int scan(const u32* masks, int* before, int chunks, int lane) {
    int sum = 0;
    for (int first = 0; first < chunks; first += 32) {
        int chunk = first + lane;
        int own = chunk < chunks ? __popc(masks[chunk]) : 0;
        int running = own;
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(0xffffffffu, running, step);
            if (lane >= step) running += other;
        }
        if (chunk < chunks) before[chunk] = sum + running - own;
        sum += __shfl_sync(0xffffffffu, running, 31);
    }
    return sum;
}

struct Shared {
    i64 keys[ENTRIES];              // of away entries; -1 for the others
    u32 slots[SLOTS];               // open addressing by key: the key's first entry
    u32 entry_masks[ENTRY_CHUNKS];  // entries that are misses
    u32 hot_masks[HOT_CHUNKS];      // evictable rows, in LRU order
    int entry_before[ENTRY_CHUNKS];
    int hot_before[HOT_CHUNKS];
    int hot_pages[HOT_SLABS];
    u32 counts[4];
    int misses, evictable;
    u16 row_of[ENTRIES];            // hot row of the key whose first entry this is
    u16 victims[ENTRIES];
    u16 lru[HOT_ROWS];
};

extern "C" __global__ void shared_bytes(int* out) { *out = static_cast<int>(sizeof(Shared)); }

extern "C" __global__ void __launch_bounds__(THREADS, 1) resolve(
    const int* __restrict__ topk, const SpanRow* __restrict__ spans, const PageRow* __restrict__ pages,
    const int* __restrict__ page_count, const int* __restrict__ hot_pages, i64* hot_keys, u16* lru,
    i64* __restrict__ rows, i64* __restrict__ miss_source, i64* __restrict__ miss_target,
    int* __restrict__ miss_count, u64* counters, int most_pages, int device_pages, int host_pages, int row_bytes,
    i64 page_bytes, i64 group_offset) {
    const Geometry g = {most_pages, device_pages, host_pages, row_bytes, page_bytes, group_offset};
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const int request = blockIdx.x, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int count = min(page_count[request], g.most_pages);
    topk += static_cast<i64>(request) * ENTRIES;
    spans += static_cast<i64>(request) * g.most_pages;
    pages += static_cast<i64>(request) * g.most_pages;
    hot_pages += static_cast<i64>(request) * HOT_SLABS;
    hot_keys += static_cast<i64>(request) * HOT_ROWS;
    lru += static_cast<i64>(request) * HOT_ROWS;
    rows += static_cast<i64>(request) * ENTRIES;
    miss_source += static_cast<i64>(request) * ENTRIES;
    miss_target += static_cast<i64>(request) * ENTRIES;

    // 1. Translate. Resident rows are done here; the rest leave their key in shared memory.
    int residents = 0, unreadable = 0, away = 0;
    u32 away_turns = 0;  // one bit a turn: this thread's entry is away
    #pragma unroll 4
    for (int turn = 0; turn < ENTRY_TURNS; ++turn) {
        int entry = turn * THREADS + thread;
        if (entry >= ENTRIES) continue;
        int position = topk[entry];
        Place place;
        place.key = -1;
        i64 row = -1, key = -1;
        if (position >= 0) {
            if (!locate(position, spans, pages, count, g.most_pages, place)) {
                ++unreadable;
            } else if (within(place.device, g.device_pages)) {
                ++residents;
                row = address(place.device, place.slot, g);
            } else {
                key = place.key;
                ++away;
                away_turns |= 1u << turn;
            }
        }
        rows[entry] = row;
        s.keys[entry] = key;
    }
    if (thread < 4) s.counts[thread] = 0;
    int hot_slabs_missing = 0;
    for (int slab = thread; slab < HOT_SLABS; slab += THREADS) {
        int page = hot_pages[slab];
        s.hot_pages[slab] = page;
        hot_slabs_missing |= !within(page, g.device_pages);
    }
    const int block_away = __syncthreads_or(away);
    const int no_buffer = __syncthreads_or(hot_slabs_missing);
    if (no_buffer) unreadable += away;

    if (block_away && !no_buffer) {
        // 2. The union: one slot a key, naming its first entry.
        for (int slot = thread; slot < SLOTS; slot += THREADS) s.slots[slot] = FREE_SLOT;
        for (int entry = thread; entry < ENTRIES; entry += THREADS) s.row_of[entry] = NO_ROW;
        for (int place = thread; place < HOT_ROWS; place += THREADS) s.lru[place] = lru[place];
        __syncthreads();
        u32 slot_of[ENTRY_TURNS];
        #pragma unroll
        for (int turn = 0; turn < ENTRY_TURNS; ++turn) {
            slot_of[turn] = NO_SLOT;
            if (!(away_turns >> turn & 1)) continue;
            u32 entry = turn * THREADS + thread;
            i64 key = s.keys[entry];
            u32 slot = home_slot(key);
            while (true) {
                u32 found = atomicCAS(&s.slots[slot], FREE_SLOT, entry);
                if (found == FREE_SLOT) break;
                if (s.keys[found] == key) {
                    atomicMin(&s.slots[slot], entry);
                    break;
                }
                slot = (slot + 1) & (SLOTS - 1);
            }
            slot_of[turn] = slot;
        }
        __syncthreads();

        // 3. Hot rows in LRU order: wanted, or evictable. Keys of several turns are on their way at once.
        u32 wanted_turns = 0;
        #pragma unroll
        for (int first = 0; first < HOT_TURNS; first += HOT_BATCH) {
            i64 held[HOT_BATCH];
            #pragma unroll
            for (int turn = first; turn < first + HOT_BATCH; ++turn) {
                int place = turn * THREADS + thread;
                held[turn - first] = turn < HOT_TURNS && place < HOT_ROWS ? hot_keys[s.lru[place]] : -1;
            }
            #pragma unroll
            for (int turn = first; turn < first + HOT_BATCH && turn < HOT_TURNS; ++turn) {
                int place = turn * THREADS + thread;
                bool evictable = place < HOT_ROWS;
                i64 key = held[turn - first];
                if (key >= 0) {
                    u32 slot = home_slot(key);
                    while (true) {
                        u32 found = s.slots[slot];
                        if (found == FREE_SLOT) break;
                        if (s.keys[found] == key) {
                            s.row_of[found] = s.lru[place];
                            evictable = false;
                            wanted_turns |= 1u << turn;
                            break;
                        }
                        slot = (slot + 1) & (SLOTS - 1);
                    }
                }
                u32 mask = __ballot_sync(0xffffffffu, evictable);
                if (lane == 0) s.hot_masks[turn * WARPS + warp] = mask;
            }
        }
        __syncthreads();

        // 4. Misses: first entries without a hot row, whose page the host has.
        #pragma unroll
        for (int turn = 0; turn < ENTRY_TURNS; ++turn) {
            int entry = turn * THREADS + thread;
            bool missed = false;
            if (slot_of[turn] != NO_SLOT && s.slots[slot_of[turn]] == static_cast<u32>(entry) &&
                s.row_of[entry] == NO_ROW) {
                Place place;
                missed = locate(topk[entry], spans, pages, count, g.most_pages, place) && within(place.host, g.host_pages);
            }
            u32 mask = __ballot_sync(0xffffffffu, missed);
            if (lane == 0) s.entry_masks[turn * WARPS + warp] = mask;
        }
        __syncthreads();
        if (warp == 0) {
            int sum = scan(s.entry_masks, s.entry_before, ENTRY_CHUNKS, lane);
            if (lane == 0) s.misses = sum;
        }
        if (warp == WARPS - 1) {
            int sum = scan(s.hot_masks, s.hot_before, HOT_CHUNKS, lane);
            if (lane == 0) s.evictable = sum;
        }
        __syncthreads();

        // 5. The oldest evictable rows are the victims; the new list is: stale rows, victims, hits.
        const int misses = s.misses, stale = s.evictable - misses;
        const u32 below = (1u << lane) - 1;
        #pragma unroll
        for (int turn = 0; turn < HOT_TURNS; ++turn) {
            int place = turn * THREADS + thread, chunk = turn * WARPS + warp;
            if (place >= HOT_ROWS) continue;
            u16 row = s.lru[place];
            int older = s.hot_before[chunk] + __popc(s.hot_masks[chunk] & below);
            int next;
            if (wanted_turns >> turn & 1) {
                next = s.evictable + place - older;
            } else if (older < misses) {
                s.victims[older] = row;
                next = stale + older;
            } else {
                next = older - misses;
            }
            lru[next] = row;
        }
        __syncthreads();

        // 6. Misses take their rows; the swap-in list names the group rows to copy.
        #pragma unroll
        for (int turn = 0; turn < ENTRY_TURNS; ++turn) {
            int entry = turn * THREADS + thread, chunk = turn * WARPS + warp;
            u32 mask = s.entry_masks[chunk];
            if (!(mask >> lane & 1)) continue;
            int number = s.entry_before[chunk] + __popc(mask & below);
            Place place;
            locate(topk[entry], spans, pages, count, g.most_pages, place);
            int row = s.victims[number];
            s.row_of[entry] = static_cast<u16>(row);
            hot_keys[row] = place.key;
            miss_source[number] = address(place.host, place.slot, g);
            miss_target[number] = address(s.hot_pages[row / PAGE_ROWS], row % PAGE_ROWS, g);
        }
        __syncthreads();

        // 7. Every entry takes the row of its key.
        #pragma unroll
        for (int turn = 0; turn < ENTRY_TURNS; ++turn) {
            if (slot_of[turn] == NO_SLOT) continue;
            int entry = turn * THREADS + thread;
            u32 row = s.row_of[s.slots[slot_of[turn]]];
            if (row == NO_ROW) {
                ++unreadable;
            } else {
                rows[entry] = address(s.hot_pages[row / PAGE_ROWS], row % PAGE_ROWS, g);
            }
        }
        if (thread == 0) {
            s.counts[1] = HOT_ROWS - s.evictable;
            s.counts[2] = misses;
            miss_count[request] = misses;
        }
    } else if (thread == 0) {
        miss_count[request] = 0;
    }

    residents = __reduce_add_sync(0xffffffffu, residents);
    unreadable = __reduce_add_sync(0xffffffffu, unreadable);
    if (lane == 0 && residents) atomicAdd(&s.counts[0], residents);
    if (lane == 0 && unreadable) atomicAdd(&s.counts[3], unreadable);
    __syncthreads();
    if (thread < 4 && s.counts[thread]) atomicAdd(counters + request * 4 + thread, static_cast<u64>(s.counts[thread]));
}
