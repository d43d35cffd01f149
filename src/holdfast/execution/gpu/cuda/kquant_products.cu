// Products of a few rows of inputs with GGUF's K-quants, decoded in the registers that tensor cores read.
//
//     out [rows, outputs] = (or +=) x [rows, columns] * matrix^T (+ bias)
//
// The matrix lies in tiles of 16 outputs x 256 columns (gguf_fragments.py): what a lane loads, 16 bytes at a time, are
// the codes of the fragments that it feeds to mma.m16n8k16 as operand A; inputs are operand B, eight rows at a time.
// Codes go into the last bits of 128.0 (bf16) or 1024.0 (f16). What that raises them by is taken off by the first sum:
// a product of the inputs with a constant. Sums of a group's codes are exact but for float32's additions, and scaled in
// float32; no element is rounded.
//
//     ring of STAGES in shared memory: | x, 256 columns of all rows | codes and scales of each warp's tiles |
//
// Codes and scales are read back by the lane that copied them. A block has WARPS * M tiles of outputs, splits of the
// columns leave their sums in `workspace`, and the last to arrive at a tile adds them up in order.
//
// Macros: BITS (4, 5, 6), BF16 (else f16), N8 (eights of rows), M (tiles of a warp), WARPS, STAGES, BLOCKS (of a
// processor).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int THREADS = WARPS * 32;
constexpr int X_LINE = 512 + 32;  // bytes of 256 inputs of a row; four rows are then in different banks
constexpr int X_BYTES = 8 * N8 * X_LINE;
constexpr int CODE_BYTES = 2048;
constexpr int HIGH_BYTES = (BITS - 4) * 512;
constexpr int SCALE_BYTES = 256;
constexpr int UNIT_BYTES = BITS == 6 ? 128 : 0;  // float16 scales of Q6_K: of rows g and g + 8, for every lane
constexpr int TILE_BYTES = CODE_BYTES + HIGH_BYTES + SCALE_BYTES + UNIT_BYTES;
constexpr int STAGE_BYTES = X_BYTES + WARPS * M * TILE_BYTES;

#if BF16
constexpr u32 RAISED = 0x43004300u;                             // 128
constexpr u32 LOWERED = BITS == 6 ? 0xc320c320u : 0xc300c300u;  // -160, -128
constexpr float PER_MINIMUM = 1.0f / 128;
#else
constexpr u32 RAISED = 0x64006400u;                             // 1024
constexpr u32 LOWERED = BITS == 6 ? 0xe420e420u : 0xe400e400u;  // -1056, -1024
constexpr float PER_MINIMUM = 1.0f / 1024;
#endif

extern __shared__ __align__(128) unsigned char memory[];

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void copy_16_or_zeros(u32 to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0));
}

__device__ __forceinline__ void copy_8(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void copy_4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ uint4 load_16(u32 from) {
    uint4 found;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "r"(from));
    return found;
}

__device__ __forceinline__ uint2 load_8(u32 from) {
    uint2 found;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(found.x), "=r"(found.y) : "r"(from));
    return found;
}

__device__ __forceinline__ u32 load_4(u32 from) {
    u32 found;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(found) : "r"(from));
    return found;
}

__device__ __forceinline__ float4 multiply(const u32 (&a)[4], uint2 b, float4 c) {
    float4 d;
#if BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d.x), "=f"(d.y), "=f"(d.z), "=f"(d.w)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "f"(c.x), "f"(c.y), "f"(c.z), "f"(c.w));
    return d;
}

// (word & mask) | raised, in one instruction.
__device__ __forceinline__ u32 pick(u32 word, u32 mask, u32 raised) {
    u32 found;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(found) : "r"(word), "r"(mask), "r"(raised));
    return found;
}

__device__ __forceinline__ float half_value(u32 bits) {
    float value;
    asm("{.reg .b16 half; cvt.u16.u32 half, %1; cvt.f32.f16 %0, half;}" : "=f"(value) : "r"(bits));
    return value;
}

__device__ __forceinline__ float input_value(u16 bits) {
#if BF16
    return __uint_as_float((u32)bits << 16);
#else
    return half_value(bits);
#endif
}

__device__ __forceinline__ u16 rounded(float value) {
    u16 bits;
#if BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
#endif
    return bits;
}

// Two bits of the word `high` (BITS == 6) or one (5), for the pair of codes in the halves of a register.
template <int PLACE>
__device__ __forceinline__ u32 with_high(u32 codes, u32 high) {
    constexpr int shift = (BITS == 6 ? 2 * PLACE : PLACE) - 4;
    u32 moved = shift >= 0 ? high >> (shift >= 0 ? shift : 0) : high << (shift >= 0 ? 0 : -shift);
    return pick(moved, BITS == 6 ? 0x00300030u : 0x00100010u, codes);
}

// Operand A of both steps of 16 columns of a piece, from the words of outputs g and g + 8.
template <int FIRST>
__device__ __forceinline__ void decode(u32 (&a)[2][4], u32 upper, u32 lower, u32 high) {
#pragma unroll
    for (int step = 0; step < 2; step++) {
        a[step][0] = pick(upper >> (4 * step), 0x000f000fu, RAISED);
        a[step][1] = pick(lower >> (4 * step), 0x000f000fu, RAISED);
        a[step][2] = pick(upper >> (4 * step + 8), 0x000f000fu, RAISED);
        a[step][3] = pick(lower >> (4 * step + 8), 0x000f000fu, RAISED);
    }
    if constexpr (BITS > 4) {
        a[0][0] = with_high<FIRST + 0>(a[0][0], high);
        a[0][2] = with_high<FIRST + 1>(a[0][2], high);
        a[1][0] = with_high<FIRST + 2>(a[1][0], high);
        a[1][2] = with_high<FIRST + 3>(a[1][2], high);
        a[0][1] = with_high<FIRST + 4>(a[0][1], high);
        a[0][3] = with_high<FIRST + 5>(a[0][3], high);
        a[1][1] = with_high<FIRST + 6>(a[1][1], high);
        a[1][3] = with_high<FIRST + 7>(a[1][3], high);
    }
}

__device__ __forceinline__ float spread(float value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}

// Scales of the four groups of a tile's 256 columns that this lane keeps for its neighbours: of outputs g, then g + 8.
struct Scales {
    float units[BITS == 6 ? 8 : 4];  // Q6_K: groups 4c..4c+3 of 16; else groups 2c, 2c+1 of 32
    float minimums[BITS == 6 ? 1 : 4];
};

__device__ __forceinline__ Scales read_scales(u32 from, int lane) {
    Scales scales;
    u32 at = from + CODE_BYTES + HIGH_BYTES;
    uint2 words = load_8(at + lane * 8);
    if constexpr (BITS == 6) {
        u32 both = load_4(at + SCALE_BYTES + lane * 4);
        float first = half_value(both & 0xffffu), second = half_value(both >> 16);
#pragma unroll
        for (int place = 0; place < 4; place++) {
            scales.units[place] = first * (float)(signed char)(words.x >> (8 * place));
            scales.units[4 + place] = second * (float)(signed char)(words.y >> (8 * place));
        }
    } else {
        // A quarter of the float16 scales and minimums is in each of four lanes: scale and minimum of g, of g + 8.
        u32 half = (words.x >> 24) | ((words.y >> 24) << 8);
        float mine = half_value(half);
        int base = lane & 28;
        float unit[2] = {spread(mine, base), spread(mine, base + 2)};
        float minimum[2] = {spread(mine, base + 1) * PER_MINIMUM, spread(mine, base + 3) * PER_MINIMUM};
#pragma unroll
        for (int place = 0; place < 4; place++) {
            // 2^23 + code in the bits of a float; the difference of the products is exact.
            float code = __uint_as_float(pick(words.x >> (6 * place), 63u, 0x4b000000u));
            float low = __uint_as_float(pick(words.y >> (6 * place), 63u, 0x4b000000u));
            scales.units[place] = __fmaf_rn(unit[place / 2], code, unit[place / 2] * -8388608.0f);
            scales.minimums[place] = __fmaf_rn(minimum[place / 2], low, minimum[place / 2] * -8388608.0f);
        }
    }
    return scales;
}

__device__ __forceinline__ void add_scaled(float4& sums, float upper, float lower, float4 part) {
    sums.x = __fmaf_rn(upper, part.x, sums.x);
    sums.y = __fmaf_rn(upper, part.y, sums.y);
    sums.z = __fmaf_rn(lower, part.z, sums.z);
    sums.w = __fmaf_rn(lower, part.w, sums.w);
}

// Pieces 2 * PAIR and 2 * PAIR + 1 of the stage.
template <int PAIR>
__device__ __forceinline__ void multiply_pair(
    float4 (&sums)[M][N8], const Scales (&scales)[M], u32 tiles, u32 inputs, int lane) {
    const u32 lowered[4] = {LOWERED, LOWERED, LOWERED, LOWERED};
    uint4 codes[M];
    uint2 high[M];
#pragma unroll
    for (int m = 0; m < M; m++) {
        u32 from = tiles + m * TILE_BYTES;
        codes[m] = load_16(from + PAIR * 512 + lane * 16);
        high[m] = make_uint2(0, 0);
        if constexpr (BITS == 6) high[m] = load_8(from + CODE_BYTES + (PAIR / 2) * 512 + lane * 16 + (PAIR % 2) * 8);
        if constexpr (BITS == 5) high[m].x = high[m].y = load_4(from + CODE_BYTES + lane * 16 + PAIR * 4);
    }
    int source = (lane & 28) | PAIR;
#pragma unroll
    for (int second = 0; second < 2; second++) {
        u32 a[M][2][4];
        float units[M][2][2], minimums[M][2];
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (second == 0) decode<0>(a[m], codes[m].x, codes[m].y, high[m].x);
            else decode<BITS == 5 ? 8 : 0>(a[m], codes[m].z, codes[m].w, high[m].y);
#pragma unroll
            for (int row = 0; row < 2; row++) {
                if constexpr (BITS == 6) {
                    units[m][row][0] = spread(scales[m].units[4 * row + 2 * second], source);
                    units[m][row][1] = spread(scales[m].units[4 * row + 2 * second + 1], source);
                } else {
                    units[m][row][0] = spread(scales[m].units[2 * row + second], source);
                    minimums[m][row] = spread(scales[m].minimums[2 * row + second], source);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < N8; n++) {
            u32 from = inputs + n * 8 * X_LINE + (2 * PAIR + second) * 64;
            uint2 first_half = load_8(from), second_half = load_8(from + 32);
            float4 none = make_float4(0, 0, 0, 0);
            float4 raised = multiply(lowered, first_half, none);
            if constexpr (BITS == 6) {
                float4 raised_after = multiply(lowered, second_half, none);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    add_scaled(sums[m][n], units[m][0][0], units[m][1][0], multiply(a[m][0], first_half, raised));
                    add_scaled(sums[m][n], units[m][0][1], units[m][1][1], multiply(a[m][1], second_half, raised_after));
                }
            } else {
                raised = multiply(lowered, second_half, raised);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    float4 part = multiply(a[m][1], second_half, multiply(a[m][0], first_half, raised));
                    add_scaled(sums[m][n], units[m][0][0], units[m][1][0], part);
                    add_scaled(sums[m][n], minimums[m][0], minimums[m][1], raised);
                }
            }
        }
    }
}

__device__ __forceinline__ bool last_to_arrive(int* counter, int splits) {
    __shared__ int arrived;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        arrived = atomicAdd(counter, 1);
        if (arrived == splits - 1) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return arrived == splits - 1;
}

// grid (tiles of outputs, splits, eights of N8 rows)
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) kquant_product(
    const u16* __restrict__ x, const unsigned char* __restrict__ codes, const unsigned char* __restrict__ high,
    const unsigned char* __restrict__ scales, const unsigned char* __restrict__ units, u16* out,
    const u16* __restrict__ bias, float4* workspace, int* counters, int rows, int outputs, int blocks,
    int blocks_of_split, int x_stride, int out_stride, int accumulate) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tiles = outputs / 16, first_row = blockIdx.z * 8 * N8;
    const int first = blockIdx.y * blocks_of_split, steps = min(blocks_of_split, blocks - first);
    const u32 base = shared_address(memory);
    x += (long long)first_row * x_stride + first * 256;
    const int rows_here = rows - first_row;

    const int first_tile = (blockIdx.x * WARPS + warp) * M;
    u32 at[M];
#pragma unroll
    for (int m = 0; m < M; m++)
        // Beyond the last tile the last is read again and nothing is written.
        at[m] = (u32)min(first_tile + m, tiles - 1) * blocks + first;
    x += lane * 8;
    codes += lane * 16, high += lane * 16, scales += lane * 8, units += lane / 4 * 4;

    auto load = [&](int step, int slot) {
        if (step < steps) {
            u32 stage = base + slot * STAGE_BYTES;
#pragma unroll
            for (int m = 0; m < M; m++) {
                u32 to = stage + X_BYTES + (warp * M + m) * TILE_BYTES + lane * 16;
                const unsigned char* from = codes + (u64)(at[m] + step) * CODE_BYTES;
#pragma unroll
                for (int part = 0; part < CODE_BYTES / 512; part++) copy_16(to + part * 512, from + part * 512);
                from = high + (u64)(at[m] + step) * HIGH_BYTES;
#pragma unroll
                for (int part = 0; part < HIGH_BYTES / 512; part++)
                    copy_16(to + CODE_BYTES + part * 512, from + part * 512);
                copy_8(to + CODE_BYTES + HIGH_BYTES - lane * 8, scales + (u64)(at[m] + step) * SCALE_BYTES);
                if constexpr (UNIT_BYTES > 0)
                    copy_4(to + CODE_BYTES + HIGH_BYTES + SCALE_BYTES - lane * 12, units + (u64)(at[m] + step) * 32);
            }
            // A warp copies whole rows of inputs.
#pragma unroll
            for (int row = warp; row < 8 * N8; row += WARPS) {
                const u16* from = x + (long long)(row < rows_here ? row : 0) * x_stride + step * 256;
                copy_16_or_zeros(stage + row * X_LINE + lane * 16, from, row < rows_here);
            }
        }
        asm volatile("cp.async.commit_group;");
    };

    float4 sums[M][N8];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N8; n++) sums[m][n] = make_float4(0, 0, 0, 0);

#pragma unroll 1
    for (int step = 0; step < STAGES - 1; step++) load(step, step);
    int slot = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        __syncthreads();
        // Into the slot that all have read in the last step.
        load(step + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
        u32 stage = base + slot * STAGE_BYTES;
        slot = slot == STAGES - 1 ? 0 : slot + 1;
        u32 mine = stage + X_BYTES + warp * M * TILE_BYTES;
        u32 inputs = stage + lane / 4 * X_LINE + lane % 4 * 8;
        Scales found[M];
#pragma unroll
        for (int m = 0; m < M; m++) found[m] = read_scales(mine + m * TILE_BYTES, lane);
        multiply_pair<0>(sums, found, mine, inputs, lane);
        multiply_pair<1>(sums, found, mine, inputs, lane);
        multiply_pair<2>(sums, found, mine, inputs, lane);
        multiply_pair<3>(sums, found, mine, inputs, lane);
    }

    if (gridDim.y > 1) {
        int group = blockIdx.z * gridDim.x + blockIdx.x;
        float4* share = workspace + (long long)group * gridDim.y * (M * N8 * THREADS) + threadIdx.x;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N8; n++)
                __stcg(share + (blockIdx.y * M * N8 + m * N8 + n) * THREADS, sums[m][n]);
        if (!last_to_arrive(counters + group, gridDim.y)) return;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N8; n++) sums[m][n] = make_float4(0, 0, 0, 0);
#pragma unroll 1
        for (int split = 0; split < gridDim.y; split++)
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < N8; n++) {
                    float4 part = __ldcg(share + (split * M * N8 + m * N8 + n) * THREADS);
                    sums[m][n].x += part.x;
                    sums[m][n].y += part.y;
                    sums[m][n].z += part.z;
                    sums[m][n].w += part.w;
                }
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
        if (first_tile + m >= tiles) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int output = (first_tile + m) * 16 + half * 8 + lane / 4;
            float added = bias == nullptr ? 0.0f : input_value(bias[output]);
#pragma unroll
            for (int n = 0; n < N8; n++) {
                float pair[2] = {half ? sums[m][n].z : sums[m][n].x, half ? sums[m][n].w : sums[m][n].y};
#pragma unroll
                for (int which = 0; which < 2; which++) {
                    int row = n * 8 + lane % 4 * 2 + which;
                    if (row >= rows_here) continue;
                    u16* to = out + (long long)(first_row + row) * out_stride + output;
                    float value = pair[which] + added;
                    if (accumulate) value += input_value(*to);
                    *to = rounded(value);
                }
            }
        }
    }
}
