// out [outputs] = (or +=) x [columns] . matrix [outputs, columns]^T + bias of a single row x, at the speed of memory.
//
//   FP8      codes are float8_e4m3fn, row by row as checkpoints have them; x is rounded like them (rounding.py says how) and
//            both are multiplied as float16, which holds either exactly
//   else     four-bit codes in the order of fragments.py; x as it is. Codes become numbers by their place in one alone: as
//            the lowest bits of a float16 they are its subnormal numbers, of which tensor cores lose nothing, in bfloat16 they
//            lie in RAISED. What that adds, and zero points, are taken off by the sums of x over groups
//
// A slab is 16 matrix rows, a unit 128 columns of it. A block takes every gridDim.x-th slab; its warps share the columns, each
// the same ones of every slab, so that none waits for another before the end. DEPTH units of a warp are on their way to its
// registers, the first of them while the kernel before this one still runs: that one writes x, and perhaps out.
//
// x lies in shared memory, normed on the way where NORM. Of all eight columns of a tensor core's product it is the same one.
//
// Macros: FP8, COLUMNS, WARPS (at most COLUMNS / 128), BLOCKS (on a processor), DEPTH, NORM, GATE (an activation, or -1:
// none), HALF, SUMS_AT (in shared memory). FP8: BLOCKED (scales for 128 x 128, and of x for 128), FIXED (x has the scale that
// `fixed` says), BOUND_BITS (of a float: no input counts for more when a scale is chosen; 0: no bound), POWERS (scales of x
// are powers of two, the next above). Else GROUPS (in 128 columns: 1, 2, 4), UNITS_OF_GROUP (1 unless larger), SCALE_BYTES (4 float32, 2 float16
// or bfloat16 by SCALE_HALF), SCALE_HALF, ZEROS.

#define THREADS (WARPS * 32)
#define UNITS (COLUMNS / 128)
#define GATED (GATE >= 0)
// Slabs of a block for each 16 outputs, or 8 where a gate and what it gates lie in one.
#define SLABS_OF_STEP (GATED && !FP8 ? 2 : 1)
#define STEP_OUTPUTS (GATED && FP8 ? 8 : 16)
#define PIECES ((COLUMNS / 8 + THREADS - 1) / THREADS)
#define X_BYTES (COLUMNS * 2)
#define SCALES_BYTES (FP8 && !BLOCKED ? 0 : UNITS * GROUPS * 4)

#if FP8
#define GROUPS 1
#else
#define BLOCKED 0
#define FIXED 0
#define BOUND_BITS 0
#define POWERS 0
#endif
static_assert(X_BYTES + SCALES_BYTES == SUMS_AT, "row_product.py counts other bytes of shared memory");

__device__ __forceinline__ uint4 weights16(const void *place) {
    uint4 found;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "l"(place));
    return found;
}

__device__ __forceinline__ u32 weights4(const void *place) {
    u32 found;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(found) : "l"(place));
    return found;
}

__device__ __forceinline__ u32 weights2(const void *place) {
    u16 found;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(found) : "l"(place));
    return found;
}

// What other blocks wrote: past the first level cache.
__device__ __forceinline__ uint4 written16(const void *place) {
    uint4 found;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "l"(place) : "memory");
    return found;
}

__device__ __forceinline__ float written(const u16 *place) {
    u16 found;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(found) : "l"(place) : "memory");
    return float_of(found);
}

__device__ __forceinline__ void put4(u32 place, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(place), "r"(value) : "memory");
}

__device__ __forceinline__ void put16(u32 place, const u32 (&value)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
        :: "r"(place), "r"(value[0]), "r"(value[1]), "r"(value[2]), "r"(value[3]) : "memory");
}

// ---- the matrix ----

#if FP8

// Rows g and g + 8 of a slab, columns 16t .. 16t + 15 of each 64; in which order a product's columns come is nobody's
// business as long as x has the same.
struct Unit {
    uint4 codes[2][2];
    float scales[2];
};

struct Loader {
    const u8 *at[2];
    const float *scales_at[2];
    const u8 *codes;
    const float *scales;
    int outputs, slab, first, last, unit;

    __device__ __forceinline__ int row(int half) const {
        const int g = (threadIdx.x & 31) >> 2;
        return GATED ? slab * 8 + g + half * outputs : slab * 16 + g + half * 8;
    }

    __device__ __forceinline__ void enter() {
        unit = first;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            at[half] = codes + (size_t)row(half) * COLUMNS + (threadIdx.x & 3) * 16 + first * 128;
            if (BLOCKED) scales_at[half] = scales + row(half) / 128 * UNITS + first;
        }
    }

    __device__ __forceinline__ void load(Unit &to) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            to.codes[half][0] = weights16(at[half]);
            to.codes[half][1] = weights16(at[half] + 64);
            at[half] += 128;
            if (BLOCKED) to.scales[half] = __uint_as_float(weights4(scales_at[half]++));
        }
        if (++unit == last) slab += gridDim.x, enter();
    }
};

__device__ __forceinline__ void numbers_of(u32 word, u32 &low, u32 &high) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(low), "=r"(high) : "r"(word));
}

__device__ __forceinline__ void multiply_word(float (&sums)[4], u32 upper, u32 lower, u32 right0, u32 right1) {
    u32 left[4];
    numbers_of(upper, left[0], left[2]);
    numbers_of(lower, left[1], left[3]);
    mma(sums, left, right0, right1);
}

__device__ __forceinline__ void multiply_unit(const Unit &unit, u32 x, const float *x_scales, float (&sums)[4]) {
    float part[4] = {0.f, 0.f, 0.f, 0.f};
    float (&to)[4] = BLOCKED ? part : sums;
#pragma unroll
    for (int chunk = 0; chunk < 2; chunk++) {
        const uint4 first = shared16(x + chunk * 128 + (threadIdx.x & 3) * 32);
        const uint4 second = shared16(x + chunk * 128 + (threadIdx.x & 3) * 32 + 16);
        const uint4 &upper = unit.codes[0][chunk], &lower = unit.codes[1][chunk];
        multiply_word(to, upper.x, lower.x, first.x, first.y);
        multiply_word(to, upper.y, lower.y, first.z, first.w);
        multiply_word(to, upper.z, lower.z, second.x, second.y);
        multiply_word(to, upper.w, lower.w, second.z, second.w);
    }
    if (BLOCKED) sums[0] += part[0] * (unit.scales[0] * *x_scales), sums[2] += part[2] * (unit.scales[1] * *x_scales);
}

#else

struct Unit {
    uint4 codes[2];
    u32 scales[GROUPS][SCALE_BYTES / 2];
    u32 zeros[GROUPS];
};

struct Loader {
    const uint4 *at;
    const u8 *scales_at, *zeros_at;
    const uint4 *codes;
    const u8 *scales, *zeros;
    int gate_slabs, slab, first, last, unit;
    bool gated;

    __device__ __forceinline__ void enter() {
        const int lane = threadIdx.x & 31, here = slab + (gated ? gate_slabs : 0);
        unit = first;
        at = codes + ((size_t)here * UNITS + first) * 64 + lane;
        const size_t group = (size_t)here * (UNITS * GROUPS / UNITS_OF_GROUP);
        scales_at = scales + (group * 16 + (lane >> 2) * 2) * SCALE_BYTES;
        zeros_at = zeros + group * 16 + (lane >> 2) * 2;
    }

    __device__ __forceinline__ void load(Unit &to) {
        to.codes[0] = weights16(at);
        to.codes[1] = weights16(at + 32);
        at += 64;
        const int group = unit * GROUPS / UNITS_OF_GROUP;
#pragma unroll
        for (int index = 0; index < GROUPS; index++) {
            const u8 *place = scales_at + (group + index) * (16 * SCALE_BYTES);
#pragma unroll
            for (int word = 0; word < SCALE_BYTES / 2; word++) to.scales[index][word] = weights4(place + word * 4);
            if (ZEROS) to.zeros[index] = weights2(zeros_at + (group + index) * 16);
        }
        if (++unit == last) {
            if (GATED) gated = !gated;
            if (!GATED || !gated) slab += gridDim.x;
            enter();
        }
    }
};

__device__ __forceinline__ float scale_of(const u32 (&words)[SCALE_BYTES / 2], int row) {
#if SCALE_BYTES == 4
    return __uint_as_float(words[row]);
#elif SCALE_HALF
    return float_of_half((u16)(words[0] >> (16 * row)));
#else
    return __uint_as_float(row ? words[0] & 0xFFFF0000u : words[0] << 16);
#endif
}

#if HALF
#define ADDED 0
#define FIRST_TIMES 16777216.f
#define SECOND_TIMES 1048576.f
#else
#define ADDED 128
#define FIRST_TIMES 1.f
#define SECOND_TIMES 1.f
#endif

// Codes of registers 0 to 3, those of the second row 16 times as large in float16: a shift is saved.
__device__ __forceinline__ void decode(u32 (&left)[4], u32 word) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        left[i] = HALF ? (i < 2 ? word : word >> 8) & (i % 2 ? 0x00F000F0u : 0x000F000Fu) : raised_codes(word >> (4 * i));
}

__device__ __forceinline__ float zero_of(u32 zeros, int row) {
    return ZEROS ? (float)((zeros >> (8 * row) & 0xFF) + ADDED) : 8.f + ADDED;
}

__device__ __forceinline__ void multiply_unit(const Unit &unit, u32 x, const float *x_sums, float (&sums)[4]) {
    float part[4];
#pragma unroll
    for (int piece = 0; piece < 4; piece++) {
        const int group = piece * GROUPS / 4;
        if (piece * GROUPS % 4 == 0) part[0] = part[1] = part[2] = part[3] = 0.f;
        const uint4 &words = unit.codes[piece / 2];
        const uint4 right = shared16(x + piece / 2 * 128 + (threadIdx.x & 3) * 32 + piece % 2 * 16);
        u32 left[4];
        decode(left, piece % 2 ? words.z : words.x);
        mma(part, left, right.x, right.y);
        decode(left, piece % 2 ? words.w : words.y);
        mma(part, left, right.z, right.w);
        if ((piece + 1) * GROUPS % 4 == 0) {
            const float x_sum = x_sums[group];
            sums[0] += scale_of(unit.scales[group], 0) * (part[0] * FIRST_TIMES - zero_of(unit.zeros[group], 0) * x_sum);
            sums[2] += scale_of(unit.scales[group], 1) * (part[2] * SECOND_TIMES - zero_of(unit.zeros[group], 1) * x_sum);
        }
    }
}

#endif

// ---- x ----

__device__ __forceinline__ float sum_of_block(float value, float *parts) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) value += __shfl_xor_sync(0xffffffffu, value, apart);
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = value;
    __syncthreads();
    value = 0.f;
#pragma unroll
    for (int other = 0; other < WARPS; other++) value += parts[other];
    return value;
}

__device__ __forceinline__ float most_of_block(float value, float *parts) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, apart));
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = value;
    __syncthreads();
    value = parts[0];
#pragma unroll
    for (int other = 1; other < WARPS; other++) value = fmaxf(value, parts[other]);
    return value;
}

// |value|, and inf where it is no number, which the maximum would drop.
__device__ __forceinline__ float magnitude(float value) {
    return value == value ? fabsf(value) : __uint_as_float(0x7F800000u);
}

#if FP8
// Both over the scale as float32 divides, to e4m3 and to float16.
// What the largest input of a row or a group is divided by; of one that is not finite, infinity.
__device__ __forceinline__ float dynamic_scale(float largest) {
    const float bound = __uint_as_float(BOUND_BITS);
    if (BOUND_BITS && largest < __uint_as_float(0x7f800000u)) largest = fminf(largest, bound);
    const float scale = fmaxf(__fdiv_rn(largest, 448.f), 1e-12f);
    return POWERS ? __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0x7f800000u) : scale;
}

__device__ __forceinline__ u32 rounded_pair(u32 pair, float scale, float inverse) {
    const float low = low_of(pair), high = high_of(pair);
    const float near_low = low * inverse, near_high = high * inverse;
    u32 found;
    asm("{.reg .b16 codes; cvt.rn.satfinite.e4m3x2.f32 codes, %1, %2; cvt.rn.f16x2.e4m3x2 %0, codes;}"
        : "=r"(found)
        : "f"(__fmaf_rn(__fmaf_rn(-near_high, scale, high), inverse, near_high)),
          "f"(__fmaf_rn(__fmaf_rn(-near_low, scale, low), inverse, near_low)));
    return found;
}
#endif

// x as it is multiplied, to shared memory, and what groups of its columns have. Returns its scale, where it has one for all.
__device__ __forceinline__ float take_row(
    u32 row, float *of_groups, const u16 *x, const u16 *norm, float epsilon, const float *fixed
) {
    __shared__ float parts[2][WARPS];
    u32 pairs[PIECES][4];
    uint4 weights[PIECES];
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        const int column = (threadIdx.x + piece * THREADS) * 8;
        uint4 found = {0, 0, 0, 0};
        weights[piece] = found;
        if (COLUMNS % (8 * THREADS) == 0 || column < COLUMNS) {
            found = written16(x + column);
            if (NORM) weights[piece] = weights16(norm + column);
        }
        pairs[piece][0] = found.x, pairs[piece][1] = found.y, pairs[piece][2] = found.z, pairs[piece][3] = found.w;
    }
    if (NORM) {
        float squares = 0.f;
#pragma unroll
        for (int index = 0; index < 4 * PIECES; index++) {
            const u32 pair = pairs[index / 4][index % 4];
            squares += low_of(pair) * low_of(pair) + high_of(pair) * high_of(pair);
        }
        const float factor = rsqrtf(sum_of_block(squares, parts[0]) / COLUMNS + epsilon);
#pragma unroll
        for (int index = 0; index < 4 * PIECES; index++) {
            u32 &pair = pairs[index / 4][index % 4];
            const uint4 &four = weights[index / 4];
            const u32 weight = index % 4 == 0 ? four.x : index % 4 == 1 ? four.y : index % 4 == 2 ? four.z : four.w;
            pair = normed_pair(pair, factor, weight);
        }
    }
    float scale = 1.f;
#if FP8
    float most[PIECES], of_row = 0.f;
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        most[piece] = 0.f;
#pragma unroll
        for (int i = 0; i < 4; i++)
            most[piece] = fmaxf(most[piece], fmaxf(magnitude(low_of(pairs[piece][i])), magnitude(high_of(pairs[piece][i]))));
        if (BLOCKED) {
#pragma unroll
            for (int apart = 8; apart; apart /= 2)
                most[piece] = fmaxf(most[piece], __shfl_xor_sync(0xffffffffu, most[piece], apart));
        }
        of_row = fmaxf(of_row, most[piece]);
    }
    if (!BLOCKED) of_row = most_of_block(of_row, parts[1]);
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        const int column = (threadIdx.x + piece * THREADS) * 8;
        const float largest = BLOCKED ? most[piece] : of_row;
        // inf - inf: a row that is not finite stays so.
        scale = FIXED ? *fixed + (largest - largest) : dynamic_scale(largest);
        const float inverse = __fdiv_rn(1.f, scale);
        if (COLUMNS % (8 * THREADS) && column >= COLUMNS) break;
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[piece][i] = rounded_pair(pairs[piece][i], scale, inverse);
        put16(row + column * 2, pairs[piece]);
        if (BLOCKED && threadIdx.x % 16 == 0) of_groups[column / 128] = scale;
    }
#else
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        const int column = (threadIdx.x + piece * THREADS) * 8;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 4; i++) sum += low_of(pairs[piece][i]) + high_of(pairs[piece][i]);
#pragma unroll
        for (int apart = 8 / GROUPS; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
        if (COLUMNS % (8 * THREADS) && column >= COLUMNS) break;
        if (threadIdx.x % (16 / GROUPS) == 0) of_groups[column * GROUPS / 128] = sum;
        // As lanes t read it: of each 64 columns, 16w + 2t + (0, 1, 8, 9) of all w in a row.
        const u32 place = row + column / 64 * 128 + column / 16 % 4 * 8 + column / 8 % 2 * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) put4(place + i * 32, pairs[piece][i]);
    }
#endif
    __syncthreads();
    return scale;
}

// ---- out ----

// What an output needs beside its sums: asked for before them.
struct Target {
    float scales[2], biases[2], before;
};

__device__ __forceinline__ u16 bits_of(float value) { return (u16)pair_of(value, 0.f); }

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) row_product(
    const u16 *x, const void *codes, const void *scales, const u8 *zeros, u16 *out, const u16 *bias, const u16 *norm,
    const float *fixed, int outputs, float epsilon, int add
) {
    // x | its scales, or its sums, of groups | sums [slab][warp][16]
    extern __shared__ __align__(16) u8 memory[];
    float *const of_groups = (float *)(memory + X_BYTES), *const kept = (float *)(memory + X_BYTES + SCALES_BYTES);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int steps = (outputs / STEP_OUTPUTS - blockIdx.x + gridDim.x - 1) / gridDim.x;
    const int first = UNITS * warp / WARPS, last = UNITS * (warp + 1) / WARPS;
    const int total = steps * SLABS_OF_STEP * (last - first);
    let_kernel_after();
#if FP8
    Loader loader{{}, {}, (const u8 *)codes, (const float *)scales, outputs, (int)blockIdx.x, first, last};
#else
    Loader loader{
        nullptr, nullptr, nullptr, (const uint4 *)codes, (const u8 *)scales, zeros, outputs / 16, (int)blockIdx.x,
        first, last,
    };
#endif
    loader.enter();
    Unit ring[DEPTH];
#pragma unroll
    for (int index = 0; index < DEPTH; index++)
        if (index < total) loader.load(ring[index]);
    if (NORM) {
        for (int column = threadIdx.x * 64; column < COLUMNS; column += THREADS * 64)
            asm volatile("prefetch.global.L2 [%0];" :: "l"(norm + column));
    }
    auto output_of = [&](int index) {
        return (index / STEP_OUTPUTS * gridDim.x + blockIdx.x) * STEP_OUTPUTS + index % STEP_OUTPUTS;
    };
    auto target_of = [&](int index) {
        const int output = output_of(index);
        Target target{};
#pragma unroll
        for (int half = 0; half <= GATED; half++) {
            target.scales[half] = FP8 && !BLOCKED ? __uint_as_float(weights4((const float *)scales + output + half * outputs)) : 1.f;
            target.biases[half] = bias ? float_of(weights2(bias + output + half * outputs)) : 0.f;
        }
        return target;
    };
    const int count = steps * STEP_OUTPUTS;
    Target own{};
    if (threadIdx.x < count) own = target_of(threadIdx.x);

    await_kernel();
    if (add && threadIdx.x < count) own.before = written(out + output_of(threadIdx.x));
    const u32 row = shared_address(memory);
    const float x_scale = take_row(row, of_groups, x, norm, epsilon, fixed);

    float sums[4] = {0.f, 0.f, 0.f, 0.f};
    int unit = first, slab = 0;
#pragma unroll 1
    for (int begin = 0; begin < total; begin += DEPTH) {
#pragma unroll
        for (int index = 0; index < DEPTH; index++) {
            if (begin + index >= total) break;
            multiply_unit(ring[index], row + unit * 256, of_groups + unit * GROUPS, sums);
            if (begin + index + DEPTH < total) loader.load(ring[index]);
            if (++unit == last) {
                if ((lane & 3) == 0) {
                    float *place = kept + (slab * WARPS + warp) * 16 + (FP8 ? lane >> 2 : (lane >> 2) * 2);
                    place[0] = sums[0], place[FP8 ? 8 : 1] = sums[2];
                }
                sums[0] = sums[1] = sums[2] = sums[3] = 0.f;
                unit = first, slab++;
            }
        }
    }
    __syncthreads();
    auto sum_of = [&](int slab, int row) {
        float sum = 0.f;
#pragma unroll
        for (int other = 0; other < WARPS; other++) sum += kept[(slab * WARPS + other) * 16 + row];
        return sum;
    };
    for (int index = threadIdx.x; index < count; index += THREADS) {
        if (index != threadIdx.x) {
            own = target_of(index);
            if (add) own.before = written(out + output_of(index));
        }
        const int step = index / STEP_OUTPUTS, place = index % STEP_OUTPUTS;
        float value = sum_of(step * SLABS_OF_STEP, place);
        if (FP8 && !BLOCKED) value = value * own.scales[0] * x_scale;
        value += own.biases[0];
        if (GATED) {
            float up = FP8 ? sum_of(step, place + 8) : sum_of(step * 2 + 1, place);
            if (FP8 && !BLOCKED) up = up * own.scales[1] * x_scale;
            // Rounded where the separate product and gate would round.
            value = rounded(activated(rounded(value), GATE)) * rounded(up + own.biases[1]);
        } else if (add) {
            value += own.before;
        }
        out[output_of(index)] = bits_of(value);
    }
}
