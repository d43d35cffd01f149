// out [rows, outputs] = (or +=) x [rows, columns] . matrix [outputs, columns]^T + bias, of four-bit codes in the order of
// fragments.py, for many rows: Hopper's wgmma with the matrix as its left side, decoded in registers, and x as its right
// side in shared memory. Elements are numbers of x's kind, bit for bit as int4_expand writes them, and sums run over all
// columns.
//
//   codes    [16 matrix rows][128 columns]: 2 x 32 lanes x 16 bytes, words w; lane 4g+t
//            matrix rows 2g, 2g+1; columns 64i + 16w + 2t + 0, 1, 8, 9
//   scales   [16 matrix rows][group][16]; zeros alike
//
// A tile has TILE outputs and ROWS rows. Three threads copy, STAGES units of 128 columns ahead: one alone is too slow for
// few rows. WARPGROUPS warpgroups multiply, with SLABS x 64 matrix rows each; where gated one, or two together, have those
// of a gate and of what it gates. A warpgroup decodes the next columns while tensor cores multiply these.
//
// Blocks run as long as there is work: first a share of the tiles that are split (`split_tiles`, cut by columns), then
// every gridDim.x-th of the others.
//
// Macros: ROWS (64 to 256 by 32), WARPGROUPS, SLABS (1, 2), STAGES, BLOCKS (on a processor); GROUPS, SCALE_BYTES,
// SCALE_HALF, ZEROS, HALF, GATE (with SLABS 2 or WARPGROUPS 2) and SHARED_BYTES as in int4_product.cu.

#define CONSUMERS (WARPGROUPS * 128)
#define THREADS (CONSUMERS + 128)
#define COPYING 3
// Of a thread that copies and of one that multiplies: of what a block begins with.
#define REGISTERS (65536 / BLOCKS / THREADS / 8 * 8)
#define FEW_REGISTERS 40
#define MANY_REGISTERS ((REGISTERS * THREADS - FEW_REGISTERS * 128) / CONSUMERS / 8 * 8)
#define PARTS (ROWS / 8)
#define PIECES (WARPGROUPS * SLABS * 4)
#define HALF_PIECES (PIECES / 2)
#define TILE (PIECES * 16)
#define STEPS_AT_ONCE (2 / SLABS)

// Bytes of one stage. Copies begin at whole lines.
#define X_BYTES (ROWS * 256)
#define CODES_BYTES (PIECES * 1024)
#define SCALES_PIECE (GROUPS * 16 * SCALE_BYTES)
#define SCALES_BYTES (PIECES * SCALES_PIECE)
#define ZEROS_PIECE (GROUPS * 16)
#define ZEROS_BYTES (ZEROS * PIECES * ZEROS_PIECE)
#define AT_CODES X_BYTES
#define AT_SCALES (AT_CODES + CODES_BYTES)
#define AT_ZEROS (AT_SCALES + SCALES_BYTES)
#define STAGE_BYTES ((AT_ZEROS + ZEROS_BYTES + 1023) / 1024 * 1024)
#define SUMS_FLOATS (TILE * ROWS)
static_assert(STAGES * STAGE_BYTES == SHARED_BYTES, "int4_wide.py counts other bytes of shared memory");

// Row blocks whose tiles of the same outputs follow each other: what runs at once shares most in the second level cache so.
#define NEIGHBOURS (1024 / ROWS)

// A gate and what it gates are two warpgroups'.
#define EXCHANGED (GATE >= 0 && SLABS == 1)

// How scales that are not of x's kind are applied. A float16 is two bfloat16, exactly. Of others two numbers would lose
// bits, or as float16 be too small or too large: these are multiplied as float32.
#define OWN_SCALES (SCALE_BYTES == 2 && SCALE_HALF == HALF)
#define SPLIT_SCALES (SCALE_BYTES == 2 && SCALE_HALF && !HALF)

// ---- work ----

struct Job {
    int tile, first, last;
};

// Of this block, one after the other.
struct Jobs {
    int steps, tiles, unit, end, tile;

    __device__ __forceinline__ bool next(Job &job) {
        if (unit < end) {
            job.tile = unit / steps, job.first = unit % steps;
            job.last = job.first + end - unit < steps ? job.first + end - unit : steps;
            unit += job.last - job.first;
            return true;
        }
        if (tile >= tiles) return false;
        job.tile = tile, job.first = 0, job.last = steps;
        tile += gridDim.x;
        return true;
    }
};

struct Place {
    int outputs, rows;

    __device__ __forceinline__ Place(int tile, int output_tiles, int row_blocks) {
        const int group = tile / (NEIGHBOURS * output_tiles), rest = tile % (NEIGHBOURS * output_tiles);
        const int left = row_blocks - group * NEIGHBOURS, in_group = left < NEIGHBOURS ? left : NEIGHBOURS;
        outputs = rest / in_group, rows = group * NEIGHBOURS + rest % in_group;
    }
};

// ---- decoding ----

// What turns codes of a group, of two matrix rows, into numbers.
struct Factors {
    u32 minus[2];
#if OWN_SCALES || SPLIT_SCALES
    u32 scale[2], rest[2];
#else
    float scale[2];
#endif
};

__device__ __forceinline__ void set_scale(Factors &factors, int row, float scale) {
#if OWN_SCALES || SPLIT_SCALES
    factors.scale[row] = pair_of(scale, scale);
    const float rest = scale - low_of(factors.scale[row]);
    factors.rest[row] = pair_of(rest, rest);
#else
    factors.scale[row] = scale;
#endif
}

__device__ __forceinline__ Factors factors_at(u32 scales, u32 zeros) {
    Factors found;
#if SCALE_BYTES == 4
    float first, second;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(first), "=f"(second) : "r"(scales));
    set_scale(found, 0, first), set_scale(found, 1, second);
#else
    u32 pair;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(scales));
#if OWN_SCALES
    found.scale[0] = (pair & 0xFFFFu) * 0x00010001u, found.scale[1] = (pair >> 16) * 0x00010001u;
#elif SCALE_HALF
    set_scale(found, 0, float_of_half((u16)pair)), set_scale(found, 1, float_of_half((u16)(pair >> 16)));
#else
    set_scale(found, 0, __uint_as_float(pair << 16)), set_scale(found, 1, __uint_as_float(pair & 0xFFFF0000u));
#endif
#endif
#if ZEROS
    u16 both;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(both) : "r"(zeros));
    found.minus[0] = MINUS_RAISED | (both & 0xFFu) * 0x00010001u;
    found.minus[1] = MINUS_RAISED | (both >> 8) * 0x00010001u;
#else
    found.minus[0] = found.minus[1] = MINUS_RAISED | 0x00080008u;
#endif
    return found;
}

// A code less its zero is exact; times its scale it is rounded once. Of a split scale the second number has three bits, so
// that its product is exact.
__device__ __forceinline__ void decode(u32 (&left)[4], u32 word, const Factors &factors) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 code = less(raised_codes(word >> (4 * i)), factors.minus[i & 1]);
        const auto scale = factors.scale[i & 1];
#if OWN_SCALES
        left[i] = times(code, scale);
#elif SPLIT_SCALES
        left[i] = fma_pair(code, scale, times(code, factors.rest[i & 1]));
#else
        left[i] = pair_of(low_of(code) * scale, high_of(code) * scale);
#endif
    }
}

__device__ __forceinline__ void multiply_unit(
    u32 stage, float (&sums)[SLABS][PARTS][4], bool fresh, u32 empty_before, int warpgroup, int warp, int lane
) {
    const int piece = warpgroup * 4 + warp, g = lane >> 2;
    const u64 lines = lines_at(stage);
    uint4 words[SLABS][2];
    Factors factors[SLABS];
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
        const u32 codes = stage + AT_CODES + (slab * HALF_PIECES + piece) * 1024 + lane * 16;
        words[slab][0] = shared16(codes), words[slab][1] = shared16(codes + 512);
    }
#pragma unroll
    for (int step = 0; step < 8; step += STEPS_AT_ONCE) {
        u32 left[STEPS_AT_ONCE][SLABS][4];
#pragma unroll
        for (int i = 0; i < STEPS_AT_ONCE; i++) {
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++) {
                if ((step + i) * GROUPS % 8 == 0) {
                    const int group = (step + i) * GROUPS / 8;
                    const int at = slab * HALF_PIECES + piece;
                    factors[slab] = factors_at(
                        stage + AT_SCALES + at * SCALES_PIECE + (group * 16 + 2 * g) * SCALE_BYTES,
                        stage + AT_ZEROS + at * ZEROS_PIECE + group * 16 + 2 * g
                    );
                }
                const uint4 &of = words[slab][(step + i) / 4];
                const int word = (step + i) % 4;
                decode(left[i][slab], word == 0 ? of.x : word == 1 ? of.y : word == 2 ? of.z : of.w, factors[slab]);
            }
        }
        open_products();
#pragma unroll
        for (int i = 0; i < STEPS_AT_ONCE; i++) {
            const u64 right = lines + ((step + i) / 4 * (ROWS * 128) + (step + i) % 4 * 32) / 16;
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++)
                products(sums[slab], left[i][slab], right, step + i == 0 && fresh);
        }
        close_products();
        await_products<1>();
        // All products with the unit before are done, and this warp has read its codes: each says so for itself.
        if (step == 0 && empty_before && lane == 0) arrive(empty_before);
    }
}

#if EXCHANGED
// The first warpgroup has sums of gates, the second those of what they gate: each gives the other its half of the rows, and
// finishes the other half. `memory` is a stage that nobody reads any more, and has when nobody reads it again.
__device__ __forceinline__ void put_exchanged(
    u32 *memory, const float (&sums)[PARTS][4], u16 *out, const u16 *bias, int output, int outputs, int first_row, int rows,
    int out_stride, int warpgroup
) {
    const int thread = threadIdx.x & 127;
    const u32 bias_pair = bias && output < outputs ? *(const u32 *)(bias + warpgroup * outputs + output) : 0;
    meet<CONSUMERS>();
#pragma unroll
    for (int n = 0; n < PARTS; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            memory[((warpgroup * PARTS + n) * 2 + i) * 128 + thread] =
                pair_of(sums[n][i] + low_of(bias_pair), sums[n][i + 2] + high_of(bias_pair));
    }
    meet<CONSUMERS>();
#pragma unroll
    for (int part = 0; part < PARTS / 2; part++) {
        const int n = warpgroup * (PARTS / 2) + part;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = first_row + n * 8 + i;
            const u32 gate = memory[(n * 2 + i) * 128 + thread], up = memory[((PARTS + n) * 2 + i) * 128 + thread];
            const float gates[2] = {low_of(gate), high_of(gate)}, ups[2] = {low_of(up), high_of(up)};
            if (row < rows && output < outputs)
                *(u32 *)(out + (size_t)row * out_stride + output) = gated_pair(gates, ups, GATE);
        }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    meet<CONSUMERS>();
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) int4_wide(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap codes_map,
    const __grid_constant__ TensorMap scales_map, const __grid_constant__ TensorMap zeros_map, u16 *out, const u16 *bias,
    float *workspace, int *counters, int rows, int outputs, int columns, int group, int out_stride, int split_tiles,
    int units_of_block, int add
) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
    __shared__ int flag;
    // `outputs` are those that are written; where gated the matrix has twice as many rows.
    const int steps = columns / 128;
    const int output_tiles = (outputs / 16 + (GATE >= 0 ? HALF_PIECES : PIECES) - 1) / (GATE >= 0 ? HALF_PIECES : PIECES);
    const int row_blocks = (rows + ROWS - 1) / ROWS;
    const Cut cut{steps, units_of_block};
    const int units = split_tiles * steps, begin = blockIdx.x * units_of_block;
    const int end = begin + units_of_block < units ? begin + units_of_block : units;
    Jobs jobs{steps, output_tiles * row_blocks, begin, end, split_tiles + (int)blockIdx.x};
    const u32 stages = shared_address(memory), full_at = shared_address(full), empty_at = shared_address(empty);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) set_barrier(full_at + i * 8, COPYING), set_barrier(empty_at + i * 8, WARPGROUPS * 4);
        show_barriers();
    }
    __syncthreads();

    if (threadIdx.x >= CONSUMERS) {
        keep_registers<FEW_REGISTERS>();
        const int what = (threadIdx.x - CONSUMERS) / 32, blocks_of_group = group > 128 ? group / 128 : 1;
        if ((threadIdx.x & 31) || what >= COPYING) return;
        const TensorMap &map = what == 0 ? x_map : what == 1 ? codes_map : scales_map;
        prefetch_map(map);
        if (ZEROS && what == 2) prefetch_map(zeros_map);
        // Codes do not depend on the kernel before this one: they are on their way while it ends.
        if (what == 0) await_kernel_before();
        int stage = 0, parity = 1;
        Job job;
        while (jobs.next(job)) {
            const Place place(job.tile, output_tiles, row_blocks);
            const int slab = place.outputs * (GATE >= 0 ? HALF_PIECES : PIECES), row = place.rows * ROWS;
#pragma unroll 1
            for (int step = job.first; step < job.last; step++) {
                const u32 at = stages + stage * STAGE_BYTES, full_here = full_at + stage * 8;
                // All are empty at first.
                await_phase(empty_at + stage * 8, parity);
                if (what == 0) {
                    await_bytes(full_here, X_BYTES);
                    copy_box(at, x_map, step * 128, row, full_here);
                    copy_box(at + ROWS * 128, x_map, step * 128 + 64, row, full_here);
                } else if (what == 1) {
                    await_bytes(full_here, CODES_BYTES);
                    copy_box(at + AT_CODES, codes_map, step * 256, slab, 0, full_here);
                } else {
                    const int column = (blocks_of_group == 1 ? step * GROUPS : step / blocks_of_group) * 16;
                    await_bytes(full_here, SCALES_BYTES + ZEROS_BYTES);
                    copy_box(at + AT_SCALES, scales_map, column, slab, 0, full_here);
                    if (ZEROS) copy_box(at + AT_ZEROS, zeros_map, column, slab, 0, full_here);
                }
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }

    take_registers<MANY_REGISTERS>();
    await_kernel_before();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, warpgroup = threadIdx.x >> 7;
    const int g = lane >> 2, t = lane & 3;
    float sums[SLABS][PARTS][4];
    int stage = 0, parity = 0;
    Job job;
    while (jobs.next(job)) {
        u32 empty_before = 0;
#pragma unroll 1
        for (int step = job.first; step < job.last; step++) {
            await_phase(full_at + stage * 8, parity);
            multiply_unit(stages + stage * STAGE_BYTES, sums, step == job.first, empty_before, warpgroup, warp, lane);
            empty_before = empty_at + stage * 8;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        await_products<0>();
        // Warpgroups that exchange sums do so in the last stage.
        if (!EXCHANGED && lane == 0) arrive(empty_before);

        if (job.first || job.last < steps) {
            float4 *shares = (float4 *)workspace + threadIdx.x;
            float4 *mine = shares + (size_t)cut.share(blockIdx.x, job.tile) * (SUMS_FLOATS / 4);
#pragma unroll
            for (int index = 0; index < SLABS * PARTS; index++) {
                float (&s)[4] = sums[index / PARTS][index % PARTS];
                mine[index * CONSUMERS] = float4{s[0], s[1], s[2], s[3]};
            }
            const int from = cut.first_block(job.tile), to = cut.last_block(job.tile);
            if (!last_to_arrive<CONSUMERS>(counters + job.tile, to - from + 1, &flag)) {
                if (EXCHANGED && lane == 0) arrive(empty_before);
                continue;
            }
            // In order, so that results do not depend on who is last.
#pragma unroll
            for (int index = 0; index < SLABS * PARTS; index++)
#pragma unroll
                for (int i = 0; i < 4; i++) sums[index / PARTS][index % PARTS][i] = 0.f;
#pragma unroll 1
            for (int block = from; block <= to; block++) {
                const float4 *place = shares + (size_t)cut.share(block, job.tile) * (SUMS_FLOATS / 4);
#pragma unroll
                for (int index = 0; index < SLABS * PARTS; index++) {
                    float (&s)[4] = sums[index / PARTS][index % PARTS];
                    const float4 more = sums_at(place + index * CONSUMERS);
                    s[0] += more.x, s[1] += more.y, s[2] += more.z, s[3] += more.w;
                }
            }
        }
        const Place place(job.tile, output_tiles, row_blocks);
#if EXCHANGED
        put_exchanged(
            (u32 *)(memory + (empty_before - empty_at) / 8 * STAGE_BYTES), sums[0], out, bias,
            (place.outputs * HALF_PIECES + warp) * 16 + 2 * g, outputs, place.rows * ROWS + 2 * t, rows, out_stride,
            warpgroup
        );
        if (lane == 0) arrive(empty_before);
#else
#pragma unroll
        for (int slab = 0; slab < (GATE >= 0 ? 1 : SLABS); slab++) {
            const int piece = slab * HALF_PIECES + warpgroup * 4 + warp;
            const int output = (place.outputs * (GATE >= 0 ? HALF_PIECES : PIECES) + piece) * 16 + 2 * g;
            if (output >= outputs) continue;
            u16 *const target = out + output;
            const u32 bias_pair = bias ? *(const u32 *)(bias + output) : 0;
            const u32 bias_up = GATE >= 0 && bias ? *(const u32 *)(bias + outputs + output) : 0;
            // All are asked for before any is waited for.
            u32 before[PARTS][2];
#pragma unroll
            for (int n = 0; n < PARTS; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int row = place.rows * ROWS + n * 8 + 2 * t + i;
                    before[n][i] = add && row < rows ? *(const u32 *)(target + (size_t)row * out_stride) : 0;
                }
            }
#pragma unroll
            for (int n = 0; n < PARTS; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int row = place.rows * ROWS + n * 8 + 2 * t + i;
                    const float first = sums[slab][n][i] + low_of(bias_pair);
                    const float second = sums[slab][n][i + 2] + high_of(bias_pair);
                    u32 pair;
                    if (GATE >= 0) {
                        const float gates[2] = {first, second};
                        const float (&s)[4] = sums[SLABS - 1][n];
                        const float ups[2] = {s[i] + low_of(bias_up), s[i + 2] + high_of(bias_up)};
                        pair = gated_pair(gates, ups, GATE);
                    } else {
                        pair = pair_of(first + low_of(before[n][i]), second + high_of(before[n][i]));
                    }
                    if (row < rows) *(u32 *)(target + (size_t)row * out_stride) = pair;
                }
            }
        }
#endif
    }
}
