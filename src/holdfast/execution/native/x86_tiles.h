/* Many rows of x with woven weights by AMX's tiles of signed bytes (x86_dots.c, x86_planes.c). Everything is inlined with
 * a constant kind.
 *
 *   x, 16 rows of a panel:  [row][32 high digits | 32 low digits]      whole number = 256 high + low
 *   weights, 32 columns:    [4 columns][output][4]                     as they are woven, less what stands for 0
 *
 * A tile of weights stands against tiles of high digits and of low ones; the two products of a group of columns make the
 * very sums that pairs make (x86_sums.h), and the same float operations follow: the same results, bit for bit.
 *
 *   tiles 0, 1: products of high and low digits, of the first bundle; 2, 3: of the second
 *   tiles 4, 5: digits of x; tiles 6, 7: weights */
#ifndef HOLDFAST_X86_TILES_H
#define HOLDFAST_X86_TILES_H

#include "x86_sums.h"

#if defined(X86_TILES)

#define LAID_BYTES (BUNDLE * BLOCK_ELEMENTS)

typedef int8_t signed_bytes __attribute__((vector_size(VECTOR_BYTES)));

/* What tiles leave: [digit, then bundle][row][output]. */
typedef struct {
    _Alignas(64) ivec of[4][TILE_HEIGHT];
} tile_products;

/* As ldtilecfg reads it. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* gcc does not know that tiles read memory. */
ALWAYS_INLINE void finish_stores(void) { __asm__ volatile("" : : : "memory"); }

ALWAYS_INLINE void shape_tiles(void) {
    tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.rows[tile] = tile < 6 ? TILE_HEIGHT : BLOCK_ELEMENTS / 4;
        shapes.row_bytes[tile] = tile == 4 || tile == 5 ? BLOCK_ELEMENTS : VECTOR_BYTES;
    }
    finish_stores();
    __asm__ volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
}

/* 32 columns of a bundle as signed bytes. */
ALWAYS_INLINE void lay_out(const weights_part *part, enum layout plain, uint8_t *laid) {
    signed_bytes zero = (signed_bytes){0} + (int8_t)offset_of(plain); /* 128 wraps, and so does what it is taken from */
    if (with_zeros(plain)) zero = (signed_bytes)(part->zeros * 0x01010101);
    UNROLL for (int v = 0; v < 8; v++)
        ((signed_bytes *)laid)[v] = (signed_bytes)load_codes(part->codes, plain, v) - zero;
}

/* Products of 16 rows of x, which begin at `x`, with what lies in tiles 6 and 7. */
ALWAYS_INLINE void multiply_tiles(const uint8_t *x, int wide, tile_products *out) {
    const long step = 2 * BLOCK_ELEMENTS;
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, x, step);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, x + BLOCK_ELEMENTS, step);
    _tile_dpbssd(1, 5, 6);
    if (wide == 2) {
        _tile_zero(2);
        _tile_zero(3);
        _tile_dpbssd(2, 4, 7);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, out->of[0], sizeof(ivec));
    _tile_stored(1, out->of[1], sizeof(ivec));
    if (wide == 2) {
        _tile_stored(2, out->of[2], sizeof(ivec));
        _tile_stored(3, out->of[3], sizeof(ivec));
    }
}

ALWAYS_INLINE vec added_product(const tile_products *from, int pair, int row, vec scales, const row_head *head, vec total) {
    const ivec sum = (from->of[2 * pair][row] << 8) + from->of[2 * pair + 1][row];
    const vec worth = scales * head->scale;
    return total + __builtin_convertvector(sum, vec) * worth;
}

/* The products of some rows to their totals, in the order of add_group. */
ALWAYS_INLINE void add_products(const tile_products *from, const weights_part *parts, int wide, int minimum,
                                const row_head *heads, int rows, vec *totals, long stride) {
    for (int r = 0; r < rows; r++) {
        UNROLL for (int b = 0; b < wide; b++) {
            vec total = added_product(from, b, r, parts[b].scales[0], heads + r, totals[b * stride + r]);
            if (minimum) total += parts[b].added[0] * heads[r].sum;
            totals[b * stride + r] = total;
        }
    }
}

/* 32 columns with one scale, of `wide` bundles, with all rows of a panel. While the tiles of 16 rows are multiplied, the
 * products of the 16 before are added. */
ALWAYS_INLINE void add_by_tiles(const weights_part *parts, int wide, enum layout plain, int minimum, const uint8_t *x,
                                const row_head *heads, int rows, vec *totals, long stride) {
    tile_products products[2];
    _Alignas(64) uint8_t laid[BUNDLES_AT_ONCE][LAID_BYTES];
    UNROLL for (int b = 0; b < wide; b++) lay_out(parts + b, plain, laid[b]);
    finish_stores();
    _tile_loadd(6, laid[0], VECTOR_BYTES);
    if (wide == 2) _tile_loadd(7, laid[1], VECTOR_BYTES);
    multiply_tiles(x, wide, products);
    for (int first = 0, turn = 0; first < rows; first += TILE_HEIGHT, turn ^= 1) {
        const int count = rows - first < TILE_HEIGHT ? rows - first : TILE_HEIGHT;
        if (first + TILE_HEIGHT < rows)
            multiply_tiles(x + 2 * BLOCK_ELEMENTS * (first + TILE_HEIGHT), wide, products + (turn ^ 1));
        if (count == TILE_HEIGHT) /* so that the usual loop has a constant length */
            add_products(products + turn, parts, wide, minimum, heads + first, TILE_HEIGHT, totals + first, stride);
        else
            add_products(products + turn, parts, wide, minimum, heads + first, count, totals + first, stride);
    }
}

#endif

#endif
