// out [rows, outputs] = (or +=) x [rows, columns] . matrix [outputs, columns]^T + bias, of four-bit codes in the order of
// fragments.py, each decoded in the registers that tensor cores read it from. Up to ROWS rows of x a block, more by grid.y.
//
//   codes    [16 matrix rows][64 columns][lane]: 16 bytes, words w; lane 4g+t
//            matrix rows 2g, 2g+1; columns 16w + 2t + 0, 1, 8, 9
//   scales   [16 matrix rows][group][16]; zeros alike
//
// A warp has 2 x 16 matrix rows, WM warps a tile, and WK times as many share its columns: a unit of work is 128 * WK columns
// of a tile. Units are on their way to shared memory STAGES - 1 ahead. Products of a group are summed as integers times x;
// its scale is applied to the sums.
//
// x lies in lines of 64 columns, as wgmma reads it (Hopper, WGMMA) and ldmatrix can.
//
// Macros: ROWS 8..64, WGMMA (with 32 or 64 rows and WM a multiple of 4), WM, WK, STAGES, BLOCKS (on a processor), GROUPS (in
// 128 columns: 1, 2, 4), SCALE_BYTES (4 float32, 2 float16 or bfloat16 by SCALE_HALF), SCALE_HALF, ZEROS, HALF, GATE (an
// activation, or -1: none), SHARED_BYTES (of a block).

#define WARPS (WM * WK)
#define THREADS (WARPS * 32)
#define PARTS (ROWS / 8)
#define TILE (WM * 32)

// Bytes of one stage.
#define CODES_BYTES (WARPS * 2048)
#define X_BYTES (WK * ROWS * 256)
#define SCALES_PIECE (GROUPS * 16 * SCALE_BYTES)
#define SCALES_BYTES (WARPS * 2 * SCALES_PIECE)
#define ZEROS_PIECE (GROUPS * 16)
#define ZEROS_BYTES (ZEROS * WARPS * 2 * ZEROS_PIECE)
#define STAGE_BYTES ((CODES_BYTES + X_BYTES + SCALES_BYTES + ZEROS_BYTES + 1023) / 1024 * 1024)
#define SUMS_FLOATS (TILE * ROWS)
static_assert(
    STAGES * STAGE_BYTES + (WK - 1) * SUMS_FLOATS * 4 == SHARED_BYTES, "int4.py counts other bytes of shared memory"
);

// What this thread copies of units, one after the other.
struct Loader {
    const uint4 *codes, *codes_at[2];
    const u8 *scales, *scales_at[2];
    const u8 *zeros, *zeros_at[2];
    const u16 *x;
    int x_stride, live_rows, slabs, gate_slabs, blocks, blocks_of_group, groups, steps, tile, step;

    // Sixteen matrix rows of a warp: of a gate and of what it gates, where gated.
    __device__ __forceinline__ void enter_tile() {
        const int lane = threadIdx.x & 31, across = (threadIdx.x >> 5) % WM;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int slab = GATE >= 0 ? tile * WM + across + half * gate_slabs : (tile * WM + across) * 2 + half;
            slab = slab < slabs ? slab : slabs - 1;
            codes_at[half] = codes + (size_t)slab * blocks * 64 + lane;
            scales_at[half] = scales + (size_t)slab * groups * (16 * SCALE_BYTES) + lane * 16;
            zeros_at[half] = zeros + (size_t)slab * groups * 16 + (31 - lane) * 16;
        }
    }

    __device__ __forceinline__ void load_codes(u32 stage) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, block = step * WK + warp / WM;
        if (WK == 1 || block < blocks) {
            const int group = blocks_of_group == 1 ? block * GROUPS : block / blocks_of_group;
            const u32 to_codes = stage + warp * 2048 + lane * 16;
            const u32 to_scales = stage + CODES_BYTES + X_BYTES + warp * 2 * SCALES_PIECE + lane * 16;
            const u32 to_zeros = stage + CODES_BYTES + X_BYTES + SCALES_BYTES + warp * 2 * ZEROS_PIECE + (31 - lane) * 16;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                copy16(to_codes + half * 1024, codes_at[half] + block * 64);
                copy16(to_codes + half * 1024 + 512, codes_at[half] + block * 64 + 32);
                if (lane < SCALES_PIECE / 16)
                    copy16(to_scales + half * SCALES_PIECE, scales_at[half] + group * (16 * SCALE_BYTES));
                if (ZEROS && 31 - lane < GROUPS) copy16(to_zeros + half * ZEROS_PIECE, zeros_at[half] + group * 16);
            }
        }
    }

    __device__ __forceinline__ void load_x(u32 stage, int step) {
#pragma unroll
        for (int round = 0; round < (WK * ROWS * 16 + THREADS - 1) / THREADS; round++) {
            const int index = threadIdx.x + round * THREADS, piece = index & 15, row = (index >> 4) % ROWS;
            const int part = index / (16 * ROWS), at = step * WK + part;
            if (WK * ROWS * 16 % THREADS && part >= WK) break;
            // Eight rows are read at once: each has its pieces in another order.
            copy16(
                stage + CODES_BYTES + ((part * 2 + piece / 8) * ROWS + row) * 128 + ((piece ^ row) & 7) * 16,
                x + (size_t)(row * x_stride) + at * 128 + piece * 8, row < live_rows && at < blocks
            );
        }
    }

    __device__ __forceinline__ void advance() {
        if (++step == steps) {
            step = 0, tile++;
            enter_tile();
        }
    }
};

__device__ __forceinline__ float scale_at(u32 place, int row) {
#if SCALE_BYTES == 4
    float found;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(found) : "r"(place + row * 4));
    return found;
#else
    u16 found;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(found) : "r"(place + row * 2));
#if SCALE_HALF
    return float_of_half(found);
#else
    return __uint_as_float((u32)found << 16);
#endif
#endif
}

__device__ __forceinline__ u32 minus_zero(u32 place, int row) {
#if ZEROS
    u32 found;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(found) : "r"(place + row));
    return MINUS_RAISED | found * 0x00010001u;
#else
    return MINUS_RAISED | 0x00080008u;
#endif
}

__device__ __forceinline__ void decode(u32 (&left)[4], u32 word, const u32 (&minus)[2]) {
#pragma unroll
    for (int i = 0; i < 4; i++) left[i] = less(raised_codes(word >> (4 * i)), minus[i & 1]);
}

__device__ __forceinline__ void multiply_unit(u32 stage, float (&sums)[2][PARTS][4]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, along = warp / WM, g = lane >> 2;
    const u32 codes = stage + warp * 2048 + lane * 16;
    const u32 x = stage + CODES_BYTES + along * ROWS * 256;
    const u32 scales = stage + CODES_BYTES + X_BYTES + warp * 2 * SCALES_PIECE;
    const u32 zeros = stage + CODES_BYTES + X_BYTES + SCALES_BYTES + warp * 2 * ZEROS_PIECE;
    float part[2][PARTS][4];
    uint4 words[2];
    u32 minus[2][2];
#pragma unroll
    for (int piece = 0; piece < 4; piece++) {
        const int group = piece * GROUPS / 4;
        const bool begins = piece * GROUPS % 4 == 0, ends = (piece + 1) * GROUPS % 4 == 0;
        if (begins) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                minus[half][0] = minus_zero(zeros + half * ZEROS_PIECE + group * 16, 2 * g);
                minus[half][1] = minus_zero(zeros + half * ZEROS_PIECE + group * 16, 2 * g + 1);
            }
        }
        if (piece % 2 == 0) {
            words[0] = shared16(codes + piece * 256);
            words[1] = shared16(codes + 1024 + piece * 256);
        }
        u32 left[2][2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            decode(left[0][half], piece % 2 ? words[half].z : words[half].x, minus[half]);
            decode(left[1][half], piece % 2 ? words[half].w : words[half].y, minus[half]);
        }
#ifdef WGMMA
        open_products();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u64 right = lines_at(x + piece / 2 * (ROWS * 128) + (piece % 2 * 2 + i) * 32);
#pragma unroll
            for (int half = 0; half < 2; half++) products(part[half], left[i][half], right, begins && i == 0);
        }
        close_products();
        if (ends) await_products();
#else
        if (begins) {
#pragma unroll
            for (int index = 0; index < 2 * PARTS; index++)
#pragma unroll
                for (int i = 0; i < 4; i++) part[index / PARTS][index % PARTS][i] = 0.f;
        }
#pragma unroll
        for (int n = 0; n < PARTS; n++) {
            const uint4 right = matrices_at(
                x + (piece / 2 * ROWS + n * 8 + (lane & 7)) * 128 + ((piece % 2 * 4 + (lane >> 3)) ^ (lane & 7)) * 16
            );
#pragma unroll
            for (int half = 0; half < 2; half++) mma(part[half][n], left[0][half], right.x, right.y);
#pragma unroll
            for (int half = 0; half < 2; half++) mma(part[half][n], left[1][half], right.z, right.w);
        }
#endif
        if (ends) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 place = scales + half * SCALES_PIECE + group * (16 * SCALE_BYTES);
                const float first = scale_at(place, 2 * g), second = scale_at(place, 2 * g + 1);
#pragma unroll
                for (int n = 0; n < PARTS; n++) {
                    sums[half][n][0] += first * part[half][n][0];
                    sums[half][n][1] += first * part[half][n][1];
                    sums[half][n][2] += second * part[half][n][2];
                    sums[half][n][3] += second * part[half][n][3];
                }
            }
        }
    }
}

__device__ __forceinline__ void put_gated(
    u16 *out, const u16 *bias, int output, int outputs, float (&gates)[2], float (&ups)[2]
) {
    if (bias) {
        const u32 gate = *(const u32 *)(bias + output), up = *(const u32 *)(bias + outputs + output);
        gates[0] += low_of(gate), gates[1] += high_of(gate), ups[0] += low_of(up), ups[1] += high_of(up);
    }
    *(u32 *)out = gated_pair(gates, ups, GATE);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) int4_product(
    const u16 *x, const uint4 *codes, const u8 *scales, const u8 *zeros, u16 *out, const u16 *bias, float *workspace,
    int *counters, int rows, int outputs, int columns, int group, int x_stride, int out_stride, int units_of_block,
    int add
) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ int flag;
    // `outputs` are those that are written; where gated the matrix has twice as many rows.
    const int blocks = columns / 128, gate_slabs = GATE >= 0 ? outputs / 16 : 0, slabs = outputs / 16 + gate_slabs;
    const int steps = (blocks + WK - 1) / WK, tiles = (slabs + 2 * WM - 1) / (2 * WM);
    const Cut cut{steps, units_of_block};
    const int total = tiles * steps, begin = blockIdx.x * units_of_block;
    const int end = begin + units_of_block < total ? begin + units_of_block : total;
    const int first_row = blockIdx.y * ROWS;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, across = warp % WM, along = warp / WM;
    const int g = lane >> 2, t = lane & 3;
    const u32 stages = shared_address(memory);
    float4 *const exchange = (float4 *)(memory + STAGES * STAGE_BYTES);
    float4 *const shares = (float4 *)workspace + (size_t)blockIdx.y * 2 * gridDim.x * (SUMS_FLOATS / 4);

    Loader loader{
        codes, {}, scales, {}, zeros, {}, x + (size_t)first_row * x_stride, x_stride, rows - first_row, slabs, gate_slabs,
        blocks, group > 128 ? group / 128 : 1, columns / group, steps, begin / steps, begin % steps,
    };
    int tile = loader.tile, step = loader.step, ahead = begin;
    float sums[2][PARTS][4] = {};
    loader.enter_tile();
    // Codes do not depend on the kernel before this one: they are on their way while it ends.
#pragma unroll 1
    for (int index = 0; index < STAGES - 1; index++) {
        if (ahead++ < end) {
            loader.load_codes(stages + index * STAGE_BYTES);
            loader.advance();
        }
    }
    await_kernel_before();
#pragma unroll 1
    for (int index = 0; index < STAGES - 1; index++) {
        if (begin + index < end) loader.load_x(stages + index * STAGE_BYTES, (step + index) % steps);
        close_copies();
    }
    int stage = 0, ahead_stage = STAGES - 1, started = step;
#pragma unroll 1
    for (int unit = begin; unit < end; unit++) {
        await_copies<STAGES - 2>();
#ifdef WGMMA
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
        __syncthreads();
        if (ahead++ < end) {
            loader.load_codes(stages + ahead_stage * STAGE_BYTES);
            loader.load_x(stages + ahead_stage * STAGE_BYTES, loader.step);
            loader.advance();
        }
        close_copies();
        if (step * WK + along < blocks) multiply_unit(stages + stage * STAGE_BYTES, sums);
        if (++stage == STAGES) stage = 0;
        if (++ahead_stage == STAGES) ahead_stage = 0;
        if (++step < steps && unit + 1 < end) continue;

        // The end of a tile, or of this block's share of one.
        const int here = tile++;
        const bool whole = started == 0 && step == steps;
        step = started = 0;
        if (WK > 1) {
            if (along > 0) {
                float4 *place = exchange + (along - 1) * (SUMS_FLOATS / 4) + across * 32 + lane;
#pragma unroll
                for (int index = 0; index < 2 * PARTS; index++) {
                    float (&s)[4] = sums[index / PARTS][index % PARTS];
                    place[index * WM * 32] = float4{s[0], s[1], s[2], s[3]};
                }
            }
            __syncthreads();
            if (along == 0) {
#pragma unroll
                for (int other = 0; other < WK - 1; other++) {
                    const float4 *place = exchange + other * (SUMS_FLOATS / 4) + across * 32 + lane;
#pragma unroll
                    for (int index = 0; index < 2 * PARTS; index++) {
                        float (&s)[4] = sums[index / PARTS][index % PARTS];
                        const float4 more = place[index * WM * 32];
                        s[0] += more.x, s[1] += more.y, s[2] += more.z, s[3] += more.w;
                    }
                }
            }
        }
        bool writes = along == 0;
        if (!whole) {
            if (along == 0) {
                float4 *place = shares + (size_t)cut.share(blockIdx.x, here) * (SUMS_FLOATS / 4) + across * 32 + lane;
#pragma unroll
                for (int index = 0; index < 2 * PARTS; index++) {
                    float (&s)[4] = sums[index / PARTS][index % PARTS];
                    place[index * WM * 32] = float4{s[0], s[1], s[2], s[3]};
                }
            }
            const int from = cut.first_block(here), to = cut.last_block(here);
            const bool last = last_to_arrive(counters + blockIdx.y * tiles + here, to - from + 1, &flag);
            writes = writes && last;
            if (writes) {
                // In order, so that results do not depend on who is last.
#pragma unroll
                for (int index = 0; index < 2 * PARTS; index++)
#pragma unroll
                    for (int i = 0; i < 4; i++) sums[index / PARTS][index % PARTS][i] = 0.f;
#pragma unroll 2
                for (int block = from; block <= to; block++) {
                    const float4 *place = shares + (size_t)cut.share(block, here) * (SUMS_FLOATS / 4) + across * 32 + lane;
#pragma unroll
                    for (int index = 0; index < 2 * PARTS; index++) {
                        float (&s)[4] = sums[index / PARTS][index % PARTS];
                        const float4 more = sums_at(place + index * WM * 32);
                        s[0] += more.x, s[1] += more.y, s[2] += more.z, s[3] += more.w;
                    }
                }
            }
        }
        if (writes) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int slab = GATE >= 0 ? here * WM + across : (here * WM + across) * 2 + half;
                if (slab >= outputs / 16 || (GATE >= 0 && half)) continue;
                const int output = slab * 16 + 2 * g;
#pragma unroll
                for (int n = 0; n < PARTS; n++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int row = first_row + n * 8 + 2 * t + i;
                        if (row >= rows) continue;
                        u16 *place = out + (size_t)row * out_stride + output;
                        if (GATE >= 0) {
                            float gates[2] = {sums[0][n][i], sums[0][n][i + 2]};
                            float ups[2] = {sums[1][n][i], sums[1][n][i + 2]};
                            put_gated(place, bias, output, outputs, gates, ups);
                        } else {
                            put(place, bias, output, sums[half][n][i], sums[half][n][i + 2], add);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int index = 0; index < 2 * PARTS; index++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[index / PARTS][index % PARTS][i] = 0.f;
    }
    await_copies<0>();
}
