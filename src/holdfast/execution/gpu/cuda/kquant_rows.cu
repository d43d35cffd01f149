// Rows of K-quants in the order of gguf_fragments.py as numbers: those of tiles for cuBLAS, and those of tokens. float32 until
// the end, bit for bit what gguf_blocks.py makes of them.
//
// Macros: BITS 4, 5, 6 of Q4_K, Q5_K, Q6_K; HALF; WARPS (of a block).

#define THREADS (WARPS * 32)
#define HIGH_BYTES ((BITS - 4) * 512)

struct Tile {
    const u8 *codes, *high, *scales, *units;

    __device__ Tile(const u8 *codes, const u8 *high, const u8 *scales, const u8 *units, u64 at)
        : codes(codes + at * 2048), high(high + at * HIGH_BYTES), scales(scales + at * 256), units(units + at * 32) {}
};

// Of row 2 * g + row of a tile what lane 4 * g + t has of a piece: columns 4t..4t+3 of both halves of 16.
__device__ __forceinline__ void put_piece(const Tile &tile, int g, int t, int row, int piece, u16 *out) {
    const int lane = 4 * g + t, second = piece & 1, from = 4 * g + piece / 2;
    const u32 word = __ldg((const u32 *)tile.codes + piece / 2 * 128 + lane * 4 + second * 2 + row);
    float scale[2], minimum = 0.f;
    u32 high = 0;
    if (BITS == 6) {
        high = __ldg((const u32 *)tile.high + piece / 4 * 128 + lane * 4 + piece % 4) >> (8 * row);
        const float unit = float_of_half(__ldg((const u16 *)tile.units + 2 * g + row));
        const signed char *small = (const signed char *)tile.scales + from * 8 + 4 * row + 2 * second;
        scale[0] = unit * __ldg(small), scale[1] = unit * __ldg(small + 1);
    } else {
        if (BITS == 5) high = __ldg((const u32 *)tile.high + lane * 4 + piece / 2) >> (8 * second + 4 * row);
        // The row's scale is in the last bytes of the first two words, its minimum in those of the others.
        const uint2 *words = (const uint2 *)tile.scales;
        const uint2 ours = __ldg(words + 4 * g + 2 * row), lows = __ldg(words + 4 * g + 2 * row + 1);
        const uint2 small = __ldg(words + from);
        const int shift = 6 * (2 * row + second);
        const float unit = float_of_half((u16)(ours.x >> 24 | ours.y >> 24 << 8));
        scale[0] = scale[1] = unit * (float)(small.x >> shift & 63);
        minimum = float_of_half((u16)(lows.x >> 24 | lows.y >> 24 << 8)) * (float)(small.y >> shift & 63);
    }
#pragma unroll
    for (int step = 0; step < 2; step++) {
        u32 pairs[2];
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            u32 codes = word >> (4 * step + 8 * pair) & 0x000f000f;
            if (BITS == 6) codes |= (high >> (4 * step + 2 * pair) & 0x00030003) << 4;
            if (BITS == 5) codes |= (high >> (2 * step + pair) & 0x00010001) << 4;
            const int offset = BITS == 6 ? 32 : 0;
            pairs[pair] = pair_of(
                __fadd_rn(__fmul_rn((float)((int)(codes & 0xffff) - offset), scale[step]), -minimum),
                __fadd_rn(__fmul_rn((float)((int)(codes >> 16) - offset), scale[step]), -minimum)
            );
        }
        *(uint2 *)(out + 16 * step) = uint2{pairs[0], pairs[1]};
    }
}

// Rows first..first + rows - 1 to `out`: a warp has a tile. grid (tiles, blocks / WARPS)
extern "C" __global__ void __launch_bounds__(THREADS) kquant_expand(
    const u8 *codes, const u8 *high, const u8 *scales, const u8 *units, u16 *out, int first, int rows, int blocks,
    int out_stride
) {
    const int lane = threadIdx.x & 31, block = blockIdx.y * WARPS + (threadIdx.x >> 5), g = lane >> 2, t = lane & 3;
    if (block >= blocks) return;
    const int index = first / 16 + blockIdx.x;
    const Tile tile(codes, high, scales, units, (u64)index * blocks + block);
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const int to = index * 16 + 2 * g + row - first;
        if (to < 0 || to >= rows) continue;
#pragma unroll
        for (int piece = 0; piece < 8; piece++)
            put_piece(tile, g, t, row, piece, out + (u64)to * out_stride + block * 256 + piece * 32 + 4 * t);
    }
}

// A row of `out` is that of a slot's token, zeros where there is none: a warp has 256 columns. grid (rows, blocks / WARPS)
extern "C" __global__ void __launch_bounds__(THREADS) kquant_embed(
    const int *ids, const int *slots, const int *positions, const u8 *codes, const u8 *high, const u8 *scales,
    const u8 *units, u16 *out, int ids_stride, int vocabulary, int blocks, int out_stride
) {
    const int lane = threadIdx.x & 31, block = blockIdx.y * WARPS + (threadIdx.x >> 5), piece = lane >> 2, t = lane & 3;
    if (block >= blocks) return;
    const int slot = slots[blockIdx.x], position = positions[blockIdx.x];
    const int token = slot >= 0 && position >= 0 ? ids[(u64)slot * ids_stride + position] : -1;
    u16 *to = out + (u64)blockIdx.x * out_stride + block * 256 + piece * 32 + 4 * t;
    if (token < 0 || token >= vocabulary) {
        *(uint2 *)to = *(uint2 *)(to + 16) = uint2{0, 0};
        return;
    }
    const Tile tile(codes, high, scales, units, (u64)(token / 16) * blocks + block);
    put_piece(tile, token % 16 / 2, t, token % 2, piece, to);
}
