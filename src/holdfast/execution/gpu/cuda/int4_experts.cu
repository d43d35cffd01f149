// out [pairs, outputs] = x . matrix of each pair's expert [outputs, columns]^T, of four-bit codes in the order of
// footprint.scaled_layouts, each decoded in the registers that tensor cores read it from; lines of pairs are those of
// triton_kernels/experts/launch.py. With a gate it is activation(gate) . up.
//
//   codes    [row][32 columns]: 16 bytes; byte b: column b in its low half, column 16 + b in its high half
//   scales   [row][group]; zeros alike
//
// A block has up to ROWS pairs of one expert and 32 matrix rows a warp: lane 4g+t has columns 32t..32t+31 of every 128, of
// rows 2g and 2g+1 of both sixteens. Which columns a tensor core adds to which is free as long as x's are the same ones:
// four of a lane side by side are what it takes of x at once. Products of 128 columns are summed as integers times x; their
// scale is applied to the sums. Codes and x are on their way to shared memory STAGES - 1 stages ahead, of UNITS times 128
// columns each.
//
// Macros: ROWS (8, 16, 32), WARPS, STAGES, UNITS, BLOCKS (on a processor), EXPERTS, SCALE_BYTES (4 float32, 2 float16 or
// bfloat16 by SCALE_HALF), SCALE_HALF, ZEROS, HALF, GATES (0 none; 1 an expert's matrix has gates above ups; 2 it has ups, and
// out the gates), ACTIVATION.

#define THREADS (WARPS * 32)
#define PARTS (ROWS / 8)
#define OUTPUTS (WARPS * (GATES == 1 ? 16 : 32))
#define CODES_BYTES (WARPS * 2048)
#define UNIT_BYTES (CODES_BYTES + ROWS * 256)
#define STAGE_BYTES (UNITS * UNIT_BYTES)
static_assert(STAGES * STAGE_BYTES == SHARED_BYTES, "int4_experts.py counts other bytes of shared memory");
#define COPIES ((ROWS * 16 + THREADS - 1) / THREADS)
#define CHAINS (PARTS > 2 ? 1 : 2)
#define COUNTS ((EXPERTS + 31) / 32)

struct Line {
    int expert, first, length;
};

// Of a tile: which expert, and which of its pairs; beyond the last tile nothing. All lanes find the same.
__device__ __forceinline__ Line line_of(int tile, const int *counts) {
    const int lane = threadIdx.x & 31;
    int lengths[COUNTS];
#pragma unroll
    for (int i = 0; i < COUNTS; i++) lengths[i] = i * 32 + lane < EXPERTS ? counts[i * 32 + lane] : 0;
    Line found{0, 0, 0};
    bool done = false;
#pragma unroll
    for (int i = 0; i < COUNTS; i++) {
        const int tiles = (lengths[i] + ROWS - 1) / ROWS;
        int ends = tiles;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(0xFFFFFFFFu, ends, step);
            if (lane >= step) ends += before;
        }
        const u32 beyond = __ballot_sync(0xFFFFFFFFu, ends > tile);
        const int who = beyond ? __ffs(beyond) - 1 : 31;
        const int begin = __shfl_sync(0xFFFFFFFFu, ends - tiles, who), length = __shfl_sync(0xFFFFFFFFu, lengths[i], who);
        if (beyond && !done) found = Line{i * 32 + who, (tile - begin) * ROWS, length}, done = true;
        if (!done) tile -= __shfl_sync(0xFFFFFFFFu, ends, 31);
    }
    return found;
}

// Pieces of 16 bytes of a row of x: eight that are read at once lie in different banks.
__device__ __forceinline__ int place_of(int row, int piece) {
    return row * 256 + (piece ^ (piece >> 3) ^ (row & 1) * 2) * 16;
}

__device__ __forceinline__ float scale_of(u32 bits) {
#if SCALE_BYTES == 4
    return __uint_as_float(bits);
#elif SCALE_HALF
    return float_of_half((u16)bits);
#else
    return __uint_as_float(bits << 16);
#endif
}

// What this lane holds of a group, for itself and for the three beside it: the scale and zero of one row of the four.
struct Factors {
    u32 scale, zero;
};

__device__ __forceinline__ Factors factors_at(const u8 *scales, const u8 *zeros, size_t index) {
    Factors found{0, 8};
#if SCALE_BYTES == 4
    found.scale = *(const u32 *)(scales + index * 4);
#else
    found.scale = *(const u16 *)(scales + index * 2);
#endif
    if (ZEROS) found.zero = zeros[index];
    return found;
}

// What takes RAISED and a zero point off: of codes in the low half of a byte, and of those in the high half.
struct Minus {
    u32 low, high;
};

__device__ __forceinline__ Minus minus_of(u32 zero) {
#if HALF
    return Minus{MINUS_RAISED | zero * 0x00010001u, 0xD400D400u | zero * 0x00100010u};
#else
    return Minus{MINUS_RAISED | zero * 0x00010001u, MINUS_RAISED | zero * 0x00010001u};
#endif
}

// float16 has room for a code where it lies: 1024 + 16 * code, a sixteenth of which is 64 + code. bfloat16 has not.
__device__ __forceinline__ u32 high_codes(u32 word, const Minus &minus) {
#if HALF
    u32 pair;
    asm("lop3.b32 %0, %1, 0x00f000f0, %2, 0xea;" : "=r"(pair) : "r"(word), "n"(RAISED));
    return fma_pair(pair, 0x2C002C00u, minus.high);
#else
    return less(raised_codes(word >> 4), minus.high);
#endif
}

// Of a word's eight codes, columns 4q..4q+3 and 16 + those: two registers of left sides for each.
__device__ __forceinline__ void decode(u32 (&low)[4], u32 (&high)[4], int row, u32 word, const Minus &minus) {
    const u32 pairs = __byte_perm(word, 0, 0x3120), others = pairs >> 8;
    low[row] = less(raised_codes(pairs), minus.low), low[row + 2] = less(raised_codes(others), minus.low);
    high[row] = high_codes(pairs, minus), high[row + 2] = high_codes(others, minus);
}

__device__ __forceinline__ u32 word_of(const uint4 &words, int index) {
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

__device__ __forceinline__ void multiply_unit(u32 stage, const Factors &mine, int parts, float (&sums)[2][PARTS][4]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    // A product waits for the one before it that adds to the same sums: few rows have two sums each.
    float found[CHAINS][2][PARTS][4] = {};
    uint4 words[2][2];
    Minus minus[2][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            words[half][row] = shared16(stage + warp * 2048 + half * 1024 + row * 512 + lane * 16);
            minus[half][row] = minus_of(ZEROS ? __shfl_sync(0xFFFFFFFFu, mine.zero, (lane & ~3) + half * 2 + row) : 8u);
        }
    }
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        uint4 first[PARTS], second[PARTS];
#pragma unroll
        for (int n = 0; n < PARTS; n++) {
            if (n >= parts) break;
            first[n] = shared16(stage + CODES_BYTES + place_of(n * 8 + g, t * 4 + piece));
            second[n] = shared16(stage + CODES_BYTES + place_of(n * 8 + g, t * 4 + 2 + piece));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 low[2][4], high[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int row = 0; row < 2; row++)
                    decode(low[half], high[half], row, word_of(words[half][row], piece * 2 + i), minus[half][row]);
            }
#pragma unroll
            for (int n = 0; n < PARTS; n++) {
                if (n >= parts) break;
#pragma unroll
                for (int half = 0; half < 2; half++)
                    mma(found[0][half][n], low[half], i ? first[n].z : first[n].x, i ? first[n].w : first[n].y);
#pragma unroll
                for (int half = 0; half < 2; half++)
                    mma(found[CHAINS - 1][half][n], high[half], i ? second[n].z : second[n].x, i ? second[n].w : second[n].y);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const float scale = scale_of(__shfl_sync(0xFFFFFFFFu, mine.scale, (lane & ~3) + half * 2 + row));
#pragma unroll
            for (int n = 0; n < PARTS; n++) {
#pragma unroll
                for (int i = row * 2; i < row * 2 + 2; i++) {
                    const float other = CHAINS > 1 ? found[CHAINS - 1][half][n][i] : 0.f;
                    sums[half][n][i] += scale * (found[0][half][n][i] + other);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) int4_experts(
    const u16 *x, const u8 *codes, const u8 *scales, const u8 *zeros, u16 *out, const int *counts, const int *pairs,
    int outputs, int columns, int group, int x_stride, int out_stride, int pairs_stride, int shared_by
) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ int line_pairs[ROWS];
    const int across = (outputs + OUTPUTS - 1) / OUTPUTS, groups = columns / group;
    const int units = columns / 128, steps = units / UNITS;
    const int units_of_group = group / 128, output = blockIdx.x % across * OUTPUTS;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const u32 stages = shared_address(memory);
    await_kernel_before();
    const Line line = line_of(blockIdx.x / across, counts);
    if (line.first >= line.length) return;
    const int live = line.length - line.first < ROWS ? line.length - line.first : ROWS, parts = (live + 7) / 8;

    // Sixteens beyond the last are its copies, and not written.
    int slab[2];
    size_t row[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        slab[half] = output + (GATES == 1 ? warp * 16 : (warp * 2 + half) * 16);
        const int within = slab[half] < outputs ? slab[half] : outputs - 16;
        row[half] = (size_t)line.expert * (GATES == 1 ? 2 : 1) * outputs + (GATES == 1 ? half * outputs : 0) + within + 2 * g;
    }
    const u8 *const codes_at[2] = {codes + row[0] * (columns / 2) + t * 16, codes + row[1] * (columns / 2) + t * 16};
    const u32 to_codes = stages + warp * 2048 + lane * 16;
    auto load_codes = [&](int stage, int step) {
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const int unit = step * UNITS + i;
            const u32 to = to_codes + stage * STAGE_BYTES + i * UNIT_BYTES;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                copy16(to + half * 1024, codes_at[half] + unit * 64);
                copy16(to + half * 1024 + 512, codes_at[half] + columns / 2 + unit * 64);
            }
        }
    };
    const size_t factors_from = ((t & 2 ? row[1] : row[0]) + (t & 1)) * groups;
    auto group_of = [&](int unit) { return units_of_group == 1 ? unit : unit / units_of_group; };
    auto load_factors = [&](int unit) {
        return factors_at(scales, zeros, factors_from + group_of(unit < units ? unit : units - 1));
    };
#pragma unroll
    for (int index = 0; index < STAGES - 1; index++) {
        if (index < steps) load_codes(index, index);
    }
    Factors now = load_factors(0), next = load_factors(1);

    // Rows that nobody has are not copied: what lies there changes nothing that is written.
    const int *const mine = pairs + (size_t)line.expert * pairs_stride + line.first;
    if (threadIdx.x < live) line_pairs[threadIdx.x] = mine[threadIdx.x];
    const u16 *x_at[COPIES];
    u32 to_x[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const int index = threadIdx.x + i * THREADS, copied = index >> 4;
        x_at[i] = copied < live ? x + (size_t)(mine[copied] / shared_by) * x_stride + (index & 15) * 8 : nullptr;
        to_x[i] = stages + CODES_BYTES + place_of(copied, index & 15);
    }
    auto load_x = [&](int stage, int step) {
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
#pragma unroll
            for (int copy = 0; copy < COPIES; copy++) {
                if (x_at[copy])
                    copy16(to_x[copy] + stage * STAGE_BYTES + i * UNIT_BYTES, x_at[copy] + (step * UNITS + i) * 128);
            }
        }
    };
#pragma unroll
    for (int index = 0; index < STAGES - 1; index++) {
        if (index < steps) load_x(index, index);
        close_copies();
    }

    float sums[2][PARTS][4] = {};
    int stage = 0, ahead = STAGES - 1;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        await_copies<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) {
            load_codes(ahead, step + STAGES - 1);
            load_x(ahead, step + STAGES - 1);
        }
        close_copies();
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const Factors after = load_factors(step * UNITS + i + 2);
            multiply_unit(stages + stage * STAGE_BYTES + i * UNIT_BYTES, now, parts, sums);
            now = next, next = after;
        }
        if (++stage == STAGES) stage = 0;
        if (++ahead == STAGES) ahead = 0;
    }

#pragma unroll
    for (int half = 0; half < (GATES == 1 ? 1 : 2); half++) {
        if (slab[half] >= outputs) continue;
#pragma unroll
        for (int n = 0; n < PARTS; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int which = n * 8 + 2 * t + i;
                if (which >= live) continue;
                u16 *const place = out + (size_t)line_pairs[which] * out_stride + slab[half] + 2 * g;
                const float (&s)[4] = sums[half][n];
                const float numbers[2] = {s[i], s[i + 2]};
#if GATES == 1
                const float ups[2] = {sums[1][n][i], sums[1][n][i + 2]};
                *(u32 *)place = gated_pair(numbers, ups, ACTIVATION);
#elif GATES == 2
                const u32 gate = *(const u32 *)place;
                const float gates[2] = {low_of(gate), high_of(gate)};
                *(u32 *)place = gated_pair(gates, numbers, ACTIVATION);
#else
                *(u32 *)place = pair_of(numbers[0], numbers[1]);
#endif
            }
        }
    }
}
