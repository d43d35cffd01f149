// Matrix rows of four-bit codes in the order of fragments.py as numbers: for products with many rows, and for embeddings.
// Elements are computed in float32 and rounded once. Macros: WARPS (of a block), CHUNKS (pieces of 64 columns that a warp
// expands); as in int4_product.cu GROUPS, SCALE_BYTES, SCALE_HALF, ZEROS, HALF.

#define THREADS (WARPS * 32)

__device__ __forceinline__ float scale_of(const u8 *scales, size_t place) {
#if SCALE_BYTES == 4
    return ((const float *)scales)[place];
#elif SCALE_HALF
    return float_of_half(((const u16 *)scales)[place]);
#else
    return __uint_as_float((u32)((const u16 *)scales)[place] << 16);
#endif
}

__device__ __forceinline__ u32 minus_zero_of(const u8 *zeros, size_t place) {
#if ZEROS
    return MINUS_RAISED | zeros[place] * 0x00010001u;
#else
    return MINUS_RAISED | 0x00080008u;
#endif
}

// Two columns of one matrix row.
__device__ __forceinline__ u32 element_pair(u32 word, int row, int pair, u32 minus, float scale) {
    const u32 exact = less(raised_codes(word >> (4 * (row + 2 * pair))), minus);
    return pair_of(low_of(exact) * scale, high_of(exact) * scale);
}

__device__ __forceinline__ u32 word_of(uint4 words, int index) {
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

__device__ __forceinline__ void put_eight(u16 *row, int column, uint4 values, const int *order) {
    if (!order) {
        *(uint4 *)(row + column) = values;
        return;
    }
    const u32 pairs[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 8; i++) row[order[column + i]] = (u16)(pairs[i / 2] >> (16 * (i & 1)));
}

// Slabs of 16 rows: grid.x, from `first_slab` on; CHUNKS pieces of 64 columns a warp, each through shared memory, so that
// whole lines are written.
extern "C" __global__ void __launch_bounds__(THREADS) int4_expand(
    const uint4 *codes, const u8 *scales, const u8 *zeros, const int *order, u16 *out, int first_slab, int columns,
    int group, int out_stride
) {
    __shared__ u32 lines[WARPS][16 * 32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, chunks = columns / 64;
    const int from = (blockIdx.y * WARPS + warp) * CHUNKS;
    const size_t slab = first_slab + blockIdx.x;
    uint4 words[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        if (from + i < chunks) words[i] = __ldcs(codes + (slab * chunks + from + i) * 32 + lane);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        if (from + i >= chunks) break;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const size_t place = (slab * (columns / group) + ((from + i) * 64 + half * 32) / group) * 16 + 2 * g;
#pragma unroll
            for (int row = 0; row < 2; row++) {
                const float scale = scale_of(scales, place + row);
                const u32 minus = minus_zero_of(zeros, place + row);
#pragma unroll
                for (int piece = 0; piece < 4; piece++) {
                    const u32 word = word_of(words[i], half * 2 + piece / 2);
                    lines[warp][(2 * g + row) * 32 + ((half * 4 + piece) ^ g) * 4 + t] =
                        element_pair(word, row, piece & 1, minus, scale);
                }
            }
        }
        __syncwarp();
#pragma unroll
        for (int round = 0; round < 4; round++) {
            const int row = round * 4 + lane / 8, piece = lane & 7;
            const uint4 values = *(const uint4 *)&lines[warp][row * 32 + (piece ^ (row >> 1)) * 4];
            put_eight(out + (size_t)(blockIdx.x * 16 + row) * out_stride, (from + i) * 64 + piece * 8, values, order);
        }
        __syncwarp();
    }
}

// The row of a slot's token; zeros where there is no such row. A thread has 16 columns.
extern "C" __global__ void __launch_bounds__(THREADS) int4_embed(
    const int *tokens, const int *slots, const int *positions, const uint4 *codes, const u8 *scales, const u8 *zeros,
    const int *order, u16 *out, int tokens_stride, int rows, int columns, int group, int out_stride
) {
    const int index = blockIdx.y * THREADS + threadIdx.x, chunk = index >> 2, t = index & 3;
    if (chunk >= columns / 64) return;
    const int slot = slots[blockIdx.x], position = positions[blockIdx.x];
    const int row = slot < 0 || position < 0 ? -1 : tokens[(size_t)slot * tokens_stride + position];
    const bool known = row >= 0 && row < rows;
    const size_t slab = known ? row / 16 : 0;
    const int g = known ? row % 16 / 2 : 0;
    const uint4 words = codes[(slab * (columns / 64) + chunk) * 32 + g * 4 + t];
#pragma unroll
    for (int piece = 0; piece < 8; piece++) {
        const int column = chunk * 64 + piece * 8 + 2 * t;
        const size_t place = (slab * (columns / group) + column / group) * 16 + (known ? row % 16 : 0);
        const u32 pair = element_pair(
            word_of(words, piece / 2), row & 1, piece & 1, minus_zero_of(zeros, place), scale_of(scales, place)
        );
        u16 *target = out + (size_t)blockIdx.x * out_stride;
#pragma unroll
        for (int i = 0; i < 2; i++)
            target[order ? order[column + i] : column + i] = known ? (u16)(pair >> (16 * i)) : (u16)0;
    }
}
