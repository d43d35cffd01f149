// out [rows, outputs] = (or +=) x [rows, columns] . matrix [outputs, columns]^T + bias, of GGUF's K-quants in the order of
// gguf_fragments.py, decoded in the registers that tensor cores read them from. Up to 8 * PARTS rows of x a block, more by
// grid.y.
//
// The matrix lies in tiles of 16 rows x 256 columns; a warp has M of them side by side, WARPS a tile of outputs. A unit of
// work is 256 columns of a tile of outputs, and units are on their way to shared memory STAGES - 1 ahead:
//
//   stage    [x, 8 * PARTS rows of 256][warp][m]: codes 2048 | high 512 a bit | scales 256 | units 128 (Q6_K)
//
// What a lane reads of a tile it has copied itself. Codes are multiplied in the lowest bits of RAISED: sums of a group begin
// at -(RAISED + offset) times the sum of its inputs, which are worked out once for all warps. They are then scaled, in
// float32; nothing of the matrix is rounded. Minimums are whole numbers times those sums of inputs, by one more product
// with both halves of them (16 bits).
//
// ONE: a single row of x lies whole in shared memory, normed on the way where there is a norm; all eight columns of a product
// are that row, and warps need not wait for each other.
//
// Macros: BITS 4, 5, 6 of Q4_K, Q5_K, Q6_K; PARTS, M, WARPS, STAGES, BLOCKS (on a processor), HALF, GATED, ONE, SHARED_BYTES
// (of a block).

#define THREADS (WARPS * 32)
#define TILE (WARPS * M * 16)
#define ROWS (PARTS * 8)

// Of one row of x; four rows are then in different banks.
#define X_LINE (ONE ? 0 : 512 + 32)
#define X_BYTES (ROWS * X_LINE)
#define HIGH_BYTES ((BITS - 4) * 512)
#define HIGH_AT 2048
#define SCALES_AT (HIGH_AT + HIGH_BYTES)
#define UNITS_AT (SCALES_AT + 256)
#define TILE_BYTES (UNITS_AT + (BITS == 6 ? 128 : 0))
#define STAGE_BYTES (X_BYTES + WARPS * M * TILE_BYTES)
// Groups of a unit: sums of inputs that theirs begin with, as lanes t want them, then both halves of those for minimums.
#define GROUPS (BITS == 6 ? 16 : 8)
#define START_BYTES (ONE ? 16 : PARTS * 64)
#define LOWER_AT (ONE ? 16 : 128)
#define SUMS_BYTES (BITS == 6 ? 0 : ONE ? 32 : PARTS * 256)
#define SUMS_FLOATS (TILE * ROWS)
// ONE: with 256 columns.
static_assert(
    STAGES * STAGE_BYTES + GROUPS * START_BYTES + SUMS_BYTES + (ONE ? 512 : 0) == SHARED_BYTES,
    "kquant.py counts other bytes of shared memory"
);

#if HALF
// -1024 and -1056; minimums are multiplied with a sixteenth of the inputs' sums, which stays within float16.
#define TAKEN_OFF (BITS == 6 ? 0xE420E420u : 0xE400E400u)
#define SHRUNK (1.f / 16384)
#define PER_MINIMUM 16.f
#else
// -128 and -160
#define TAKEN_OFF (BITS == 6 ? 0xC320C320u : 0xC300C300u)
#define SHRUNK 1.f
#define PER_MINIMUM (1.f / 128)
#endif

// What a sum begins with is needed more than once: unlike `mma` this leaves it.
__device__ __forceinline__ float4 mma_from(float4 start, const u32 (&left)[4], uint2 right) {
    float4 sums;
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(sums.x), "=f"(sums.y), "=f"(sums.z), "=f"(sums.w)
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right.x), "r"(right.y),
          "f"(start.x), "f"(start.y), "f"(start.z), "f"(start.w));
    return sums;
}

__device__ __forceinline__ void add_scaled(float4 &sums, float upper, float lower, float4 part) {
    sums.x += upper * part.x, sums.y += upper * part.y, sums.z += lower * part.z, sums.w += lower * part.w;
}

__device__ __forceinline__ void copy8(u32 target, const void *source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void copy4(u32 target, const void *source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ uint2 shared8(u32 place) {
    uint2 found;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(found.x), "=r"(found.y) : "r"(place));
    return found;
}

__device__ __forceinline__ u32 shared4(u32 place) {
    u32 found;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(found) : "r"(place));
    return found;
}

__device__ __forceinline__ float4 shared_floats(u32 place) {
    float4 found;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
        : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w) : "r"(place));
    return found;
}

__device__ __forceinline__ void put_shared(u32 place, float4 value) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};"
        :: "r"(place), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w) : "memory");
}

__device__ __forceinline__ void put_shared(u32 place, u16 value) {
    asm volatile("st.shared.u16 [%0], %1;" :: "r"(place), "h"(value) : "memory");
}

struct Matrix {
    const u8 *codes, *high, *scales, *units;
    int tiles, gate_tiles, blocks;

    // Of a gate and of what it gates, where gated.
    __device__ int tile(int group, int warp, int m) const {
        int found = GATED ? group * WARPS + warp + m * gate_tiles : (group * WARPS + warp) * M + m;
        return found < tiles ? found : tiles - 1;
    }
};

__device__ __forceinline__ void load_codes(const Matrix &matrix, u32 stage, int group, int block) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int m = 0; m < M; m++) {
        const u64 at = (u64)matrix.tile(group, warp, m) * matrix.blocks + block;
        const u32 target = stage + X_BYTES + (warp * M + m) * TILE_BYTES;
        const u8 *codes = matrix.codes + at * 2048 + lane * 16, *high = matrix.high + at * HIGH_BYTES + lane * 16;
#pragma unroll
        for (int part = 0; part < 4; part++) copy16(target + part * 512 + lane * 16, codes + part * 512);
#pragma unroll
        for (int part = 0; part < BITS - 4; part++) copy16(target + HIGH_AT + part * 512 + lane * 16, high + part * 512);
        copy8(target + SCALES_AT + lane * 8, matrix.scales + at * 256 + lane * 8);
        if (BITS == 6) copy4(target + UNITS_AT + lane * 4, matrix.units + at * 32 + (lane >> 2) * 4);
    }
}

// A warp copies whole rows.
__device__ __forceinline__ void load_inputs(const u16 *x, int rows, int x_stride, u32 stage, int block) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int row = warp; row < ROWS * !ONE; row += WARPS) {
        const bool live = row < rows;
        copy16(stage + row * X_LINE + lane * 16, x + (live ? (u64)row * x_stride : 0) + block * 256 + lane * 8, live);
    }
}

// Sums of the inputs of a piece of 32 columns, for all warps.
__device__ __forceinline__ void sum_inputs(u32 x, int piece, u32 starts, u32 input_sums, const u32 (&taken_off)[4]) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < PARTS; n++) {
        const u32 place = x + (n * 8 + g) * X_LINE + piece * 64 + t * 8;
        const u32 to = starts + (BITS == 6 ? 2 * piece : piece) * START_BYTES + (ONE ? 0 : n * 64 + t * 16);
        float4 sums = mma_from(float4{0.f, 0.f, 0.f, 0.f}, taken_off, shared8(place)), after = sums;
        if (BITS == 6) after = mma_from(float4{0.f, 0.f, 0.f, 0.f}, taken_off, shared8(place + 32));
        else sums = mma_from(sums, taken_off, shared8(place + 32));
        if (ONE ? lane : g) continue;
        put_shared(to, sums);
        if (BITS == 6) put_shared(to + START_BYTES, after);
        if (BITS < 6) {
            // Both halves of each sum, the upper ones [row][piece] and then the lower ones.
            const float first = sums.x * SHRUNK, second = sums.y * SHRUNK;
            const u32 upper = pair_of(first, second), lower = pair_of(first - low_of(upper), second - high_of(upper));
            const u32 halves = input_sums + (ONE ? 0 : n * 256 + t * 32) + piece * 2;
            put_shared(halves, (u16)upper), put_shared(halves + LOWER_AT, (u16)lower);
            if (!ONE) put_shared(halves + 16, (u16)(upper >> 16)), put_shared(halves + LOWER_AT + 16, (u16)(lower >> 16));
        }
    }
}

#if ONE
// The row of x, times what its norm says, to shared memory: 256 columns of each of `count` units from `first` on.
__device__ __forceinline__ void take_row(
    u32 row, const u16 *x, const u16 *norm, float epsilon, int columns, int first, int count, int steps
) {
    __shared__ float parts[WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float scale = 1.f;
    if (norm) {
        float squares = 0.f;
        for (int column = threadIdx.x * 8; column < columns; column += THREADS * 8) {
            const uint4 found = *(const uint4 *)(x + column);
            const u32 pairs[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
            for (int i = 0; i < 4; i++) squares += low_of(pairs[i]) * low_of(pairs[i]) + high_of(pairs[i]) * high_of(pairs[i]);
        }
#pragma unroll
        for (int apart = 16; apart; apart /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, apart);
        if (lane == 0) parts[warp] = squares;
        __syncthreads();
        squares = 0.f;
#pragma unroll
        for (int other = 0; other < WARPS; other++) squares += parts[other];
        scale = rsqrtf(squares / columns + epsilon);
    }
    for (int index = warp; index < count; index += WARPS) {
        const int block = (first + index) % steps, column = block * 256 + lane * 8;
        uint4 found = *(const uint4 *)(x + column);
        if (norm) {
            const uint4 weight = *(const uint4 *)(norm + column);
            found.x = normed_pair(found.x, scale, weight.x), found.y = normed_pair(found.y, scale, weight.y);
            found.z = normed_pair(found.z, scale, weight.z), found.w = normed_pair(found.w, scale, weight.w);
        }
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
            :: "r"(row + column * 2), "r"(found.x), "r"(found.y), "r"(found.z), "r"(found.w) : "memory");
    }
    __syncthreads();
}
#endif

// (word & mask) | onto
__device__ __forceinline__ u32 pick(u32 word, u32 mask, u32 onto) {
    u32 found;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(found) : "r"(word), "r"(mask), "r"(onto));
    return found;
}

// The bits above the fourth of a register's two codes, 16 apart in `high`.
template <int PLACE> __device__ __forceinline__ u32 with_high(u32 codes, u32 high) {
    constexpr int right = (BITS == 6 ? 2 * PLACE : PLACE) - 4;
    const u32 moved = right >= 0 ? high >> (right >= 0 ? right : 0) : high << (right >= 0 ? 0 : -right);
    return pick(moved, BITS == 6 ? 0x00300030u : 0x00100010u, codes);
}

// Both steps of 16 columns of a piece, from the words of two rows; PLACE: of the first bits in `high`.
template <int PLACE> __device__ __forceinline__ void decode(u32 (&left)[2][4], u32 first, u32 second, u32 high) {
#pragma unroll
    for (int step = 0; step < 2; step++) {
        left[step][0] = raised_codes(first >> (4 * step));
        left[step][1] = raised_codes(second >> (4 * step));
        left[step][2] = raised_codes(first >> (4 * step + 8));
        left[step][3] = raised_codes(second >> (4 * step + 8));
    }
    if constexpr (BITS > 4) {
        left[0][0] = with_high<PLACE + 0>(left[0][0], high);
        left[0][2] = with_high<PLACE + 1>(left[0][2], high);
        left[1][0] = with_high<PLACE + 2>(left[1][0], high);
        left[1][2] = with_high<PLACE + 3>(left[1][2], high);
        left[0][1] = with_high<PLACE + 4>(left[0][1], high);
        left[0][3] = with_high<PLACE + 5>(left[0][3], high);
        left[1][1] = with_high<PLACE + 6>(left[1][1], high);
        left[1][3] = with_high<PLACE + 7>(left[1][3], high);
    }
}

__device__ __forceinline__ float from_lane(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

// Scales that this lane keeps for its row's four lanes: of Q6_K groups 4t..4t+3 of both rows, else 2t, 2t+1.
struct Scales {
    float of[BITS == 6 ? 8 : 4];
};

// Q4_K, Q5_K: also what the minimums of the tile add.
__device__ __forceinline__ Scales read_scales(u32 tile, u32 input_sums, float4 (&sums)[PARTS]) {
    const int lane = threadIdx.x & 31;
    const uint2 words = shared8(tile + SCALES_AT + lane * 8);
    Scales scales;
    if constexpr (BITS == 6) {
        const u32 both = shared4(tile + UNITS_AT + lane * 4);
        const float first = float_of_half((u16)both), second = float_of_half((u16)(both >> 16));
#pragma unroll
        for (int place = 0; place < 4; place++) {
            scales.of[place] = first * (float)(signed char)(words.x >> (8 * place));
            scales.of[4 + place] = second * (float)(signed char)(words.y >> (8 * place));
        }
    } else {
        // Each of the four lanes has one of: scale and minimum of the first row, of the second.
        const float mine = float_of_half((u16)(words.x >> 24 | words.y >> 24 << 8));
        const int base = lane & 28;
        const float units[2] = {from_lane(mine, base), from_lane(mine, base + 2)};
#pragma unroll
        for (int place = 0; place < 4; place++) {
            // 2^23 + code in the bits of a float; the difference of the products is exact.
            const float code = __uint_as_float(pick(words.x >> (6 * place), 63u, 0x4b000000u));
            scales.of[place] = __fmaf_rn(units[place / 2], code, units[place / 2] * -8388608.f);
        }
        const float first = from_lane(mine, base + 1) * PER_MINIMUM, second = from_lane(mine, base + 3) * PER_MINIMUM;
        u32 left[4];
        left[0] = left[2] = less(pick(words.y << 10, 0x003f0000u, pick(words.y, 63u, RAISED)), MINUS_RAISED);
        left[1] = left[3] = less(pick(words.y >> 2, 0x003f0000u, pick(words.y >> 12, 63u, RAISED)), MINUS_RAISED);
#pragma unroll
        for (int n = 0; n < PARTS; n++) {
            const u32 place = input_sums + n * 256 + (ONE ? lane & 3 : lane) * 4;
            const uint2 right = {shared4(place), shared4(place + LOWER_AT)};
            add_scaled(sums[n], first, second, mma_from(float4{0.f, 0.f, 0.f, 0.f}, left, right));
        }
    }
    return scales;
}

// Pieces 2 * PAIR and 2 * PAIR + 1.
template <int PAIR> __device__ __forceinline__ void multiply_pieces(
    float4 (&sums)[M][PARTS], const Scales (&scales)[M], u32 tiles, u32 x, u32 starts
) {
    const int lane = threadIdx.x & 31, from = (lane & 28) | PAIR;
    uint4 codes[M];
    uint2 high[M];
#pragma unroll
    for (int m = 0; m < M; m++) {
        const u32 tile = tiles + m * TILE_BYTES + lane * 16;
        codes[m] = shared16(tile + PAIR * 512);
        high[m] = uint2{0, 0};
        if (BITS == 6) high[m] = shared8(tile + HIGH_AT + PAIR / 2 * 512 + PAIR % 2 * 8);
        if (BITS == 5) high[m].x = high[m].y = shared4(tile + HIGH_AT + PAIR * 4);
    }
#pragma unroll
    for (int second = 0; second < 2; second++) {
        u32 left[M][2][4];
        float scale[M][2][2];
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (second == 0) decode<0>(left[m], codes[m].x, codes[m].y, high[m].x);
            else decode<BITS == 5 ? 8 : 0>(left[m], codes[m].z, codes[m].w, high[m].y);
#pragma unroll
            for (int row = 0; row < 2; row++)
#pragma unroll
                for (int step = 0; step < (BITS == 6 ? 2 : 1); step++)
                    scale[m][row][step] = from_lane(
                        scales[m].of[BITS == 6 ? 4 * row + 2 * second + step : 2 * row + second], from
                    );
        }
#pragma unroll
        for (int n = 0; n < PARTS; n++) {
            const u32 place = x + n * 8 * X_LINE + (2 * PAIR + second) * 64;
            const uint2 right[2] = {shared8(place), shared8(place + 32)};
            if (BITS == 6) {
#pragma unroll
                for (int step = 0; step < 2; step++) {
                    const float4 start = shared_floats(starts + (4 * PAIR + 2 * second + step) * START_BYTES + n * 64);
#pragma unroll
                    for (int m = 0; m < M; m++)
                        add_scaled(sums[m][n], scale[m][0][step], scale[m][1][step], mma_from(start, left[m][step], right[step]));
                }
            } else {
                const float4 start = shared_floats(starts + (2 * PAIR + second) * START_BYTES + n * 64);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    const float4 part = mma_from(mma_from(start, left[m][0], right[0]), left[m][1], right[1]);
                    add_scaled(sums[m][n], scale[m][0][0], scale[m][1][0], part);
                }
            }
        }
    }
}

// Rounded where the separate product and gate would round.
__device__ __forceinline__ float gated(float gate, float up, int activation) {
    return rounded(activated(rounded(gate), activation)) * rounded(up);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) kquant_product(
    const u16 *x, const u8 *codes, const u8 *high, const u8 *scales, const u8 *units, u16 *out, const u16 *bias,
    const u16 *norm, float *workspace, int *counters, int rows, int outputs, int columns, int x_stride, int out_stride,
    int units_of_block, int add, int activation, float epsilon
) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ int flag;
    // `outputs` are those that are written; where gated the matrix has twice as many rows.
    const int gate_tiles = GATED ? outputs / 16 : 0, steps = columns / 256;
    const Matrix matrix{codes, high, scales, units, outputs / 16 + gate_tiles, gate_tiles, steps};
    const int groups = (matrix.tiles + WARPS * M - 1) / (WARPS * M);
    const Cut cut{steps, units_of_block};
    const int begin = blockIdx.x * units_of_block, end = min(begin + units_of_block, groups * steps);
    const int first_row = blockIdx.y * ROWS, rows_here = rows - first_row;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const u32 stages = shared_address(memory), starts = stages + STAGES * STAGE_BYTES;
    const u32 input_sums = starts + (ONE ? steps : 1) * GROUPS * START_BYTES;
    const u32 row = input_sums + (ONE ? steps : 1) * SUMS_BYTES;
    float4 *const shares = (float4 *)workspace + (u64)blockIdx.y * 2 * gridDim.x * (SUMS_FLOATS / 4) + threadIdx.x;
    x += (u64)first_row * x_stride;
    u32 taken_off[4];
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("mov.b32 %0, %1;" : "=r"(taken_off[i]) : "n"(TAKEN_OFF));

    int group = begin / steps, step = begin % steps, ahead_group = group, ahead_step = step, ahead = begin;
    float4 sums[M][PARTS] = {};
    auto load_ahead = [&](int slot, bool inputs) {
        if (ahead < end) {
            load_codes(matrix, stages + slot * STAGE_BYTES, ahead_group, ahead_step);
            if (inputs) load_inputs(x, rows_here, x_stride, stages + slot * STAGE_BYTES, ahead_step);
            if (++ahead_step == steps) ahead_step = 0, ahead_group++;
            ahead++;
        }
    };
    // The matrix is there before the kernel before has ended, inputs are not.
#pragma unroll 1
    for (int slot = 0; slot < STAGES - 1; slot++) load_ahead(slot, false);
    await_kernel_before();
#pragma unroll 1
    for (int slot = 0; slot < STAGES - 1; slot++) {
        if (begin + slot < end) load_inputs(x, rows_here, x_stride, stages + slot * STAGE_BYTES, (step + slot) % steps);
        close_copies();
    }
    int slot = 0, started = step;
#if ONE
    const int wanted = min(steps, end - begin);
    take_row(row, x, norm, epsilon, columns, step, wanted, steps);
    for (int index = warp; index < wanted * 8; index += WARPS) {
        const int block = (step + index / 8) % steps;
        sum_inputs(row + block * 512, index % 8, starts + block * GROUPS * START_BYTES, input_sums + block * SUMS_BYTES, taken_off);
    }
    __syncthreads();
#endif
#pragma unroll 1
    for (int unit = begin; unit < end; unit++) {
        await_copies<STAGES - 2>();
        const u32 stage = stages + slot * STAGE_BYTES;
        if (!ONE) {
            __syncthreads();
#pragma unroll
            for (int piece = warp; piece < 8; piece += WARPS) sum_inputs(stage, piece, starts, input_sums, taken_off);
        }
        // Into the slot that was read last: by all, or of one row by this lane, which alone reads what it copied.
        load_ahead(slot ? slot - 1 : STAGES - 1, true);
        close_copies();
        slot = slot == STAGES - 1 ? 0 : slot + 1;
        if (!ONE) __syncthreads();
        const u32 mine = stage + X_BYTES + warp * M * TILE_BYTES;
        const u32 inputs = ONE ? row + step * 512 + t * 8 : stage + g * X_LINE + t * 8;
        const u32 beginnings = ONE ? starts + step * GROUPS * START_BYTES : starts + t * 16;
        const u32 halves = input_sums + (ONE ? step : 0) * SUMS_BYTES;
        Scales found[M];
#pragma unroll
        for (int m = 0; m < M; m++) found[m] = read_scales(mine + m * TILE_BYTES, halves, sums[m]);
        multiply_pieces<0>(sums, found, mine, inputs, beginnings);
        multiply_pieces<1>(sums, found, mine, inputs, beginnings);
        multiply_pieces<2>(sums, found, mine, inputs, beginnings);
        multiply_pieces<3>(sums, found, mine, inputs, beginnings);
        if (++step < steps && unit + 1 < end) continue;

        // The end of a tile, or of this block's share of one.
        const int here = group++;
        const bool whole = started == 0 && step == steps;
        step = started = 0;
        bool writes = true;
        if (!whole) {
            float4 *share = shares + (u64)cut.share(blockIdx.x, here) * (SUMS_FLOATS / 4);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < PARTS; n++) share[(m * PARTS + n) * THREADS] = sums[m][n];
            const int from = cut.first_block(here), to = cut.last_block(here);
            writes = last_to_arrive(counters + blockIdx.y * groups + here, to - from + 1, &flag);
            if (writes) {
                // In order, so that results do not depend on who is last.
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int n = 0; n < PARTS; n++) sums[m][n] = float4{0.f, 0.f, 0.f, 0.f};
#pragma unroll (M * PARTS < 8 ? 8 / (M * PARTS) : 1)
                for (int block = from; block <= to; block++) {
                    const float4 *part = shares + (u64)cut.share(block, here) * (SUMS_FLOATS / 4);
#pragma unroll
                    for (int m = 0; m < M; m++)
#pragma unroll
                        for (int n = 0; n < PARTS; n++) {
                            const float4 more = sums_at(part + (m * PARTS + n) * THREADS);
                            float4 &s = sums[m][n];
                            s.x += more.x, s.y += more.y, s.z += more.z, s.w += more.w;
                        }
                }
            }
        }
        if (writes) {
#pragma unroll
            for (int m = 0; m < M; m++) {
                const int tile = GATED ? here * WARPS + warp : (here * WARPS + warp) * M + m;
                if (tile >= outputs / 16 || (GATED && m)) continue;
                const int output = tile * 16 + 2 * g;
#pragma unroll
                for (int n = 0; n < PARTS; n++) {
                    const int row = n * 8 + 2 * t;
                    u16 *place = out + (u64)(first_row + row) * out_stride + output;
                    float4 s = sums[m][n];
                    if (GATED) {
                        float4 up = sums[M - 1][n];
                        if (bias) {
                            const u32 gates = *(const u32 *)(bias + output), ups = *(const u32 *)(bias + outputs + output);
                            s.x += low_of(gates), s.y += low_of(gates), s.z += high_of(gates), s.w += high_of(gates);
                            up.x += low_of(ups), up.y += low_of(ups), up.z += high_of(ups), up.w += high_of(ups);
                        }
                        s.x = gated(s.x, up.x, activation), s.y = gated(s.y, up.y, activation);
                        s.z = gated(s.z, up.z, activation), s.w = gated(s.w, up.w, activation);
                    }
                    const u16 *added = GATED ? nullptr : bias;
                    if (row < rows_here) put(place, added, output, s.x, s.z, add);
                    if (row + 1 < rows_here) put(place + out_stride, added, output, s.y, s.w, add);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < PARTS; n++) sums[m][n] = float4{0.f, 0.f, 0.f, 0.f};
    }
    await_copies<0>();
}
