// Collectives of ranks that see one another's GPU memory: sums, parts that come together at the first rank, and what it
// tells the others. Fit for CUDA graphs: which exchange this is, is counted on the GPU itself.
//
// Each rank has one piece of memory that all others map:
//
//     words    [2 phases][BLOCKS][RANKS_PADDED]: the number of the last exchange that a rank has come to, written by it
//              into the memory of whoever waits
//     slots    [2][slot bytes]: what a rank shows the others, in turns. Whoever writes to one again has seen all others
//              come to the exchange after the one that read it
//
// A block waits for the blocks of its own number alone, and touches the same places on every rank. Macros: RANKS, BLOCKS,
// WIDE. Waiting ends: a rank that does not come within state[LIMIT] ms, or a host that gives up, makes this and all
// later exchanges end at once, and what they leave means nothing.

#define RANKS_PADDED 16
#define WORDS_BYTES (2 * BLOCKS * RANKS_PADDED * 4)

// state, on the GPU
#define COUNT 0
#define LEFT 1
#define FAILED 2
#define LIMIT 3
// told, in the host's memory
#define GIVE_UP 0
#define MISSED 1

#define LOOKS 64
#define PATIENT_NS 200000ull

struct Numbers {
    float of[8];
};

__device__ __forceinline__ void post(u32 *word, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ u32 look(const u32 *word) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ u64 now_ns() {
    u64 value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

// Past the cache of this multiprocessor: what another GPU has written is not there.
__device__ __forceinline__ uint4 fetch(const uint4 *place) {
    uint4 value;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(place)
                 : "memory");
    return value;
}

__device__ __forceinline__ u32 *words(u64 memory, int phase) {
    return (u32 *)memory + (phase * BLOCKS + blockIdx.x) * RANKS_PADDED;
}

__device__ __forceinline__ u8 *slot(u64 memory, u32 exchange, int slot_bytes) {
    return (u8 *)memory + WORDS_BYTES + (size_t)(exchange & 1) * slot_bytes;
}

__device__ void await(const u32 *word, u32 exchange, int peer, volatile u32 *state, volatile u32 *told) {
    const u64 began = now_ns();
    u32 looks = 0;
    while ((int)(look(word) - exchange) < 0) {
        if (++looks % LOOKS) continue;
        if (state[FAILED]) return;
        const u64 waited = now_ns() - began;
        if (waited < PATIENT_NS) continue;
        const bool late = state[LIMIT] && waited > state[LIMIT] * 1000000ull;
        if (late) told[MISSED] = 1 + peer;
        if (late || told[GIVE_UP]) {
            state[FAILED] = 1;
            __threadfence_system();
            return;
        }
    }
}

// All ranks have come to this phase of the exchange, and what they wrote before can be read. A rank that has stopped
// waiting does not say that it has come any more: what it would show is not what it should be.
__device__ __forceinline__ void meet_ranks(const u64 *memories, int rank, int phase, u32 exchange, u32 *state, u32 *told) {
    __syncthreads();
    const int peer = threadIdx.x;
    if (peer < RANKS && peer != rank && !((volatile u32 *)state)[FAILED]) {
        post(words(memories[peer], phase) + rank, exchange);
        await(words(memories[rank], phase) + peer, exchange, peer, state, told);
    }
    __syncthreads();
}

__device__ __forceinline__ u32 begin(const u32 *state) { return *(volatile const u32 *)(state + COUNT) + 1; }

// The last block counts the exchange: all others have read the count by then.
__device__ __forceinline__ void end(u32 exchange, u32 *state) {
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(state + LEFT, 1u) == gridDim.x - 1) {
        state[LEFT] = 0;
        state[COUNT] = exchange;
    }
}

// ---- numbers: KIND_OF 0 float32, 1 float16, 2 bfloat16; sixteen bytes of them at a time ----

template <int KIND_OF>
__device__ __forceinline__ float number(u32 bits) {
    if (KIND_OF == 0) return __uint_as_float(bits);
    return KIND_OF == 1 ? float_of_half((u16)bits) : __uint_as_float(bits << 16);
}

template <int KIND_OF>
__device__ __forceinline__ u32 pair_bits(float low, float high) {
    u32 pair;
    if (KIND_OF == 1)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

template <int KIND_OF>
__device__ __forceinline__ void add_to(Numbers &sum, uint4 bits) {
    const u32 parts[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (KIND_OF == 0) {
            sum.of[i] += __uint_as_float(parts[i]);
        } else {
            sum.of[2 * i] += number<KIND_OF>(parts[i] & 0xFFFF);
            sum.of[2 * i + 1] += number<KIND_OF>(parts[i] >> 16);
        }
    }
}

template <int KIND_OF>
__device__ __forceinline__ uint4 rounded_bits(const Numbers &sum) {
    u32 parts[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        parts[i] = KIND_OF == 0 ? __float_as_uint(sum.of[i]) : pair_bits<KIND_OF>(sum.of[2 * i], sum.of[2 * i + 1]);
    return make_uint4(parts[0], parts[1], parts[2], parts[3]);
}

// Numbers of a caller: `count` of them from `start` on, which need not end with a whole vector, nor begin at one.
template <int KIND_OF>
struct Caller {
    static constexpr int EACH = KIND_OF == 0 ? 4 : 8, BYTES = 16 / EACH;
    u8 *start;
    int count;
    bool aligned;

    __device__ __forceinline__ Caller(void *place, int many)
        : start((u8 *)place), count(many), aligned(((u64)place & 15) == 0) {}

    __device__ __forceinline__ uint4 read(int vector) const {
        if (aligned && (vector + 1) * EACH <= count) return ((const uint4 *)start)[vector];
        u32 parts[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = vector * EACH + i;
            if (at >= count) break;
            if (KIND_OF == 0)
                parts[i & 3] = ((const u32 *)start)[at];
            else
                parts[(i / 2) & 3] |= (u32)((const u16 *)start)[at] << (16 * (i & 1));
        }
        return make_uint4(parts[0], parts[1], parts[2], parts[3]);
    }

    __device__ __forceinline__ void write(int vector, uint4 bits) const {
        if (aligned && (vector + 1) * EACH <= count) {
            ((uint4 *)start)[vector] = bits;
            return;
        }
        const u32 parts[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = vector * EACH + i;
            if (at >= count) break;
            if (KIND_OF == 0)
                ((u32 *)start)[at] = parts[i & 3];
            else
                ((u16 *)start)[at] = (u16)(parts[(i / 2) & 3] >> (16 * (i & 1)));
        }
    }
};

// x of all ranks added up in the order of ranks, in float32: into x, or, rounded, onto `onto` where that is given.
template <int KIND_OF>
__device__ __forceinline__ void put_sum(const Caller<KIND_OF> &x, const Caller<KIND_OF> &onto, int vector, uint4 sum) {
    if (!onto.start) {
        x.write(vector, sum);
        return;
    }
    Numbers total = {};
    add_to<KIND_OF>(total, onto.read(vector));
    add_to<KIND_OF>(total, sum);
    onto.write(vector, rounded_bits<KIND_OF>(total));
}

// Every rank reads all of every other's.
template <int KIND_OF>
__device__ __forceinline__ void sum_in_one(
    const u64 *memories, u32 *state, u32 *told, void *place, void *added_to, int count, int rank, int slot_bytes
) {
    const Caller<KIND_OF> x(place, count), onto(added_to, count);
    const u32 exchange = begin(state);
    const int vectors = (count + x.EACH - 1) / x.EACH, step = gridDim.x * WIDE;
    uint4 *own = (uint4 *)slot(memories[rank], exchange, slot_bytes);
    for (int i = blockIdx.x * WIDE + threadIdx.x; i < vectors; i += step) own[i] = x.read(i);
    meet_ranks(memories, rank, 0, exchange, state, told);
    for (int i = blockIdx.x * WIDE + threadIdx.x; i < vectors; i += step) {
        uint4 shown[RANKS];
#pragma unroll
        for (int peer = 0; peer < RANKS; peer++)
            shown[peer] = fetch((const uint4 *)slot(memories[peer], exchange, slot_bytes) + i);
        Numbers sum = {};
#pragma unroll
        for (int peer = 0; peer < RANKS; peer++) add_to<KIND_OF>(sum, shown[peer]);
        put_sum<KIND_OF>(x, onto, i, rounded_bits<KIND_OF>(sum));
    }
    end(exchange, state);
}

// Every rank adds up its own share, in its own slot, of which nobody else reads that share before; then reads the others'.
template <int KIND_OF>
__device__ __forceinline__ void sum_in_two(
    const u64 *memories, u32 *state, u32 *told, void *place, void *added_to, int count, int rank, int slot_bytes
) {
    const Caller<KIND_OF> x(place, count), onto(added_to, count);
    const u32 exchange = begin(state);
    const int vectors = (count + x.EACH - 1) / x.EACH, step = gridDim.x * WIDE;
    const int share = (vectors + RANKS - 1) / RANKS, first = blockIdx.x * WIDE + threadIdx.x;
    uint4 *own = (uint4 *)slot(memories[rank], exchange, slot_bytes);
    for (int part = 0; part < RANKS; part++)
        for (int i = first; i < share && part * share + i < vectors; i += step)
            own[part * share + i] = x.read(part * share + i);
    meet_ranks(memories, rank, 0, exchange, state, told);
    for (int i = first; i < share && rank * share + i < vectors; i += step) {
        const int at = rank * share + i;
        Numbers sum = {};
#pragma unroll
        for (int peer = 0; peer < RANKS; peer++)
            add_to<KIND_OF>(sum, fetch((const uint4 *)slot(memories[peer], exchange, slot_bytes) + at));
        own[at] = rounded_bits<KIND_OF>(sum);
    }
    meet_ranks(memories, rank, 1, exchange, state, told);
    for (int part = 0; part < RANKS; part++)
        for (int i = first; i < share && part * share + i < vectors; i += step) {
            const int at = part * share + i;
            put_sum<KIND_OF>(x, onto, at, fetch((const uint4 *)slot(memories[part], exchange, slot_bytes) + at));
        }
    end(exchange, state);
}

#define SUM(NAME, KIND_OF, HOW)                                                                                          \
    extern "C" __global__ void __launch_bounds__(WIDE) NAME(                                                          \
        const u64 *memories, u32 *state, u32 *told, void *x, void *onto, int count, int rank, int slot_bytes             \
    ) {                                                                                                                  \
        HOW<KIND_OF>(memories, state, told, x, onto, count, rank, slot_bytes);                                           \
    }

SUM(one_shot_float32, 0, sum_in_one)
SUM(one_shot_float16, 1, sum_in_one)
SUM(one_shot_bfloat16, 2, sum_in_one)
SUM(two_shot_float32, 0, sum_in_two)
SUM(two_shot_float16, 1, sum_in_two)
SUM(two_shot_bfloat16, 2, sum_in_two)

// ---- bytes, UNIT at a time ----

template <typename Unit>
__device__ __forceinline__ Unit fetch_unit(const Unit *place) {
    return *(volatile const Unit *)place;
}
template <>
__device__ __forceinline__ uint4 fetch_unit<uint4>(const uint4 *place) {
    return fetch(place);
}

// Each rank's part [rows, widths[rank]], side by side in `out` [rows, all of them] of the first rank. In units.
template <typename Unit>
__device__ __forceinline__ void bring_together(
    const u64 *memories, u32 *state, u32 *told, const Unit *part, Unit *out, const int *widths, int rows, int rank,
    int slot_bytes
) {
    const u32 exchange = begin(state);
    const int step = gridDim.x * WIDE, first = blockIdx.x * WIDE + threadIdx.x;
    if (rank) {
        Unit *own = (Unit *)slot(memories[rank], exchange, slot_bytes);
        for (int i = first; i < rows * widths[rank]; i += step) own[i] = part[i];
    }
    meet_ranks(memories, rank, 0, exchange, state, told);
    if (rank == 0) {
        int all = 0, before = 0;
        for (int peer = 0; peer < RANKS; peer++) all += widths[peer];
        for (int peer = 0; peer < RANKS; peer++) {
            const int width = widths[peer];
            const Unit *shown = (const Unit *)slot(memories[peer], exchange, slot_bytes);
            for (int i = first; i < rows * width; i += step)
                out[(size_t)(i / width) * all + before + i % width] = peer ? fetch_unit(shown + i) : part[i];
            before += width;
        }
    }
    end(exchange, state);
}

// x of the first rank becomes that of all.
template <typename Unit>
__device__ __forceinline__ void spread(
    const u64 *memories, u32 *state, u32 *told, Unit *x, int count, int rank, int slot_bytes
) {
    const u32 exchange = begin(state);
    const int step = gridDim.x * WIDE, first = blockIdx.x * WIDE + threadIdx.x;
    Unit *shown = (Unit *)slot(memories[0], exchange, slot_bytes);
    if (rank == 0)
        for (int i = first; i < count; i += step) shown[i] = x[i];
    meet_ranks(memories, rank, 0, exchange, state, told);
    if (rank)
        for (int i = first; i < count; i += step) x[i] = fetch_unit(shown + i);
    end(exchange, state);
}

#define MOVE(BYTES, UNIT)                                                                                                \
    extern "C" __global__ void __launch_bounds__(WIDE) gather_##BYTES(                                                \
        const u64 *memories, u32 *state, u32 *told, const UNIT *part, UNIT *out, const int *widths, int rows, int rank,  \
        int slot_bytes                                                                                                   \
    ) {                                                                                                                  \
        bring_together<UNIT>(memories, state, told, part, out, widths, rows, rank, slot_bytes);                          \
    }                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(WIDE) broadcast_##BYTES(                                             \
        const u64 *memories, u32 *state, u32 *told, UNIT *x, int count, int rank, int slot_bytes                         \
    ) {                                                                                                                  \
        spread<UNIT>(memories, state, told, x, count, rank, slot_bytes);                                                 \
    }

MOVE(1, u8)
MOVE(2, u16)
MOVE(4, u32)
MOVE(8, u64)
MOVE(16, uint4)

// ---- lines: what a rank of one stage hands on to one of the next, which takes it when it comes to it ----
//
// Beside its memory for the above, a rank has words and two slots of its own for what it hands on:
//
//     words    SENT: the last that the rank before it has handed on, written by that one; TAKEN: the last of its own that
//              the rank behind it has taken, written by that one
//     slots    filled in turns: nobody waits for whoever takes, but for the one before the last
//
// places: the words of this rank, the words of the other, and the two slots of whoever hands on. Between machines all of
// them lie in pinned memory of the host: a thread there is the other, and FILLED tells it how many bytes of each slot are.

#define SENT 0
#define TAKEN 32
#define FILLED 64

// The last block to leave counts the turn and tells the other, whose `word` it is. All blocks have read the count by then.
__device__ __forceinline__ void end_turn(u32 turn, u32 *state, u32 *word) {
    __syncthreads();
    if (threadIdx.x) return;
    __threadfence_system();
    if (atomicAdd(state + LEFT, 1u) != gridDim.x - 1) return;
    __threadfence_system();
    state[LEFT] = 0;
    state[COUNT] = turn;
    if (!((volatile u32 *)state)[FAILED]) post(word, turn);
}

template <int KIND_OF>
__device__ __forceinline__ void put_on_line(
    const u64 *places, u32 *state, u32 *told, void *place, int count, int peer
) {
    const Caller<KIND_OF> x(place, count);
    const u32 turn = begin(state);
    const int vectors = (count + x.EACH - 1) / x.EACH, step = gridDim.x * WIDE;
    if (threadIdx.x == 0) await((const u32 *)places[0] + TAKEN, turn - 2, peer, state, told);
    __syncthreads();
    uint4 *slot = (uint4 *)places[2 + (turn & 1)];
    for (int i = blockIdx.x * WIDE + threadIdx.x; i < vectors; i += step) slot[i] = x.read(i);
    if (blockIdx.x == 0 && threadIdx.x == 0) ((u32 *)places[1])[FILLED + (turn & 1)] = count * x.BYTES;
    end_turn(turn, state, (u32 *)places[1] + SENT);
}

template <int KIND_OF>
__device__ __forceinline__ void take_off_line(
    const u64 *places, u32 *state, u32 *told, void *place, int count, int peer
) {
    const Caller<KIND_OF> x(place, count);
    const u32 turn = begin(state);
    const int vectors = (count + x.EACH - 1) / x.EACH, step = gridDim.x * WIDE;
    if (threadIdx.x == 0) await((const u32 *)places[0] + SENT, turn, peer, state, told);
    __syncthreads();
    const uint4 *slot = (const uint4 *)places[2 + (turn & 1)];
    for (int i = blockIdx.x * WIDE + threadIdx.x; i < vectors; i += step) x.write(i, fetch(slot + i));
    end_turn(turn, state, (u32 *)places[1] + TAKEN);
}

#define LINE(NAME, KIND_OF, HOW)                                                                                         \
    extern "C" __global__ void __launch_bounds__(WIDE) NAME(                                                          \
        const u64 *places, u32 *state, u32 *told, void *x, int count, int peer                                           \
    ) {                                                                                                                  \
        HOW<KIND_OF>(places, state, told, x, count, peer);                                                               \
    }

LINE(put_4, 0, put_on_line)
LINE(put_2, 1, put_on_line)
LINE(take_4, 0, take_off_line)
LINE(take_2, 1, take_off_line)
