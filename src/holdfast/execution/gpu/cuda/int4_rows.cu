// Matrix rows of four-bit codes in the order of fragments.py as numbers: for products with many rows, and for embeddings.
// Elements are computed in float32 and rounded once. Macros as in int4_product.cu: GROUPS (in 128 columns), SCALE_BYTES,
// SCALE_HALF, ZEROS, HALF.

#define CHUNKS 4

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

// Eight columns of row 2g + row, of both words of a half.
__device__ __forceinline__ uint4 eight(u32 first, u32 second, int row, u32 minus, float scale) {
    return uint4{
        element_pair(first, row, 0, minus, scale), element_pair(first, row, 1, minus, scale),
        element_pair(second, row, 0, minus, scale), element_pair(second, row, 1, minus, scale),
    };
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

// Slabs of 16 rows: grid.x, from `first_slab` on; CHUNKS pieces of 64 columns a warp.
extern "C" __global__ void __launch_bounds__(256) int4_expand(
    const uint4 *codes, const u8 *scales, const u8 *zeros, const int *order, u16 *out, int first_slab, int columns,
    int group, int out_stride
) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, chunks = columns / 64;
    const int from = (blockIdx.y * 8 + (threadIdx.x >> 5)) * CHUNKS;
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
            const int column = (from + i) * 64 + half * 32 + t * 8;
            const size_t place = (slab * (columns / group) + column / group) * 16 + 2 * g;
#pragma unroll
            for (int row = 0; row < 2; row++) {
                const u32 first = half ? words[i].z : words[i].x, second = half ? words[i].w : words[i].y;
                const float scale = scale_of(scales, place + row);
                const uint4 values = eight(first, second, row, minus_zero_of(zeros, place + row), scale);
                put_eight(out + (size_t)(blockIdx.x * 16 + 2 * g + row) * out_stride, column, values, order);
            }
        }
    }
}

// The row of a slot's token; zeros where there is no such row. A thread has 16 columns.
extern "C" __global__ void __launch_bounds__(256) int4_embed(
    const int *tokens, const int *slots, const int *positions, const uint4 *codes, const u8 *scales, const u8 *zeros,
    const int *order, u16 *out, int tokens_stride, int rows, int columns, int group, int out_stride
) {
    const int index = blockIdx.y * 256 + threadIdx.x, chunk = index >> 2, t = index & 3;
    if (chunk >= columns / 64) return;
    const int slot = slots[blockIdx.x], position = positions[blockIdx.x];
    const int row = slot < 0 || position < 0 ? -1 : tokens[(size_t)slot * tokens_stride + position];
    const bool known = row >= 0 && row < rows;
    const size_t slab = known ? row / 16 : 0;
    const int g = known ? row % 16 / 2 : 0;
    const uint4 words = codes[(slab * (columns / 64) + chunk) * 32 + g * 4 + t];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int column = chunk * 64 + half * 32 + t * 8;
        const size_t place = (slab * (columns / group) + column / group) * 16 + (known ? row % 16 : 0);
        const u32 first = half ? words.z : words.x, second = half ? words.w : words.y;
        const u32 minus = minus_zero_of(zeros, place);
        const float scale = scale_of(scales, place);
        const uint4 values = row & 1 ? eight(first, second, 1, minus, scale) : eight(first, second, 0, minus, scale);
        put_eight(out + (size_t)blockIdx.x * out_stride, column, known ? values : uint4{0, 0, 0, 0}, order);
    }
}
