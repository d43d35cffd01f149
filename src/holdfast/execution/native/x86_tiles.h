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
ALWAYS_INLINE void multiply_tiles(const uint8_t *x, int wide) {
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
}

ALWAYS_INLINE void store_products(int wide, tile_products *out) {
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

/* 16 rows or fewer that were multiplied and whose products are still to be added. */
typedef struct {
    vec scales[BUNDLES_AT_ONCE], added[BUNDLES_AT_ONCE];
    const row_head *heads;
    vec *totals;
    int rows; /* 0: nothing waits */
} waiting_rows;

/* What one panel is multiplied in. The products of 16 rows are added while the tiles of the next 16 are multiplied, those of
 * the next 32 columns among them: a product takes longer to come out of its tile than to be added. */
typedef struct {
    tile_products products[2];
    _Alignas(64) uint8_t laid[BUNDLES_AT_ONCE][LAID_BYTES];
    waiting_rows waiting;
    int turn; /* which products are written next */
} tile_bench;

ALWAYS_INLINE void open_tiles(tile_bench *here) {
    here->waiting.rows = 0;
    here->turn = 0;
    shape_tiles();
}

/* The products of some rows to their totals, in the order of add_group. */
ALWAYS_INLINE void add_products(const tile_products *from, const waiting_rows *to, int wide, int minimum, int rows,
                                long stride) {
    for (int r = 0; r < rows; r++) {
        UNROLL for (int b = 0; b < wide; b++) {
            vec *place = to->totals + b * stride + r;
            vec total = added_product(from, b, r, to->scales[b], to->heads + r, *place);
            if (minimum) total += to->added[b] * to->heads[r].sum;
            *place = total;
        }
    }
}

ALWAYS_INLINE void add_waiting(tile_bench *here, int wide, int minimum, long stride) {
    const tile_products *from = here->products + (here->turn ^ 1);
    if (here->waiting.rows == TILE_HEIGHT) /* so that the usual loop has a constant length */
        add_products(from, &here->waiting, wide, minimum, TILE_HEIGHT, stride);
    else
        add_products(from, &here->waiting, wide, minimum, here->waiting.rows, stride);
}

/* 32 columns with one scale, of `wide` bundles, with all rows of a panel. */
ALWAYS_INLINE void add_by_tiles(tile_bench *here, const weights_part *parts, int wide, enum layout plain, int minimum,
                                const uint8_t *x, const row_head *heads, int rows, vec *totals, long stride) {
    UNROLL for (int b = 0; b < wide; b++) lay_out(parts + b, plain, here->laid[b]);
    finish_stores();
    _tile_loadd(6, here->laid[0], VECTOR_BYTES);
    if (wide == 2) _tile_loadd(7, here->laid[1], VECTOR_BYTES);
    for (int first = 0; first < rows; first += TILE_HEIGHT) {
        multiply_tiles(x + 2 * BLOCK_ELEMENTS * first, wide);
#if TILE_ORDER == 2
        add_waiting(here, wide, minimum, stride);
        finish_stores();
        store_products(wide, here->products + here->turn);
        finish_stores();
#else
        store_products(wide, here->products + here->turn);
        add_waiting(here, wide, minimum, stride);
#endif
        here->turn ^= 1;
        here->waiting.heads = heads + first;
        here->waiting.totals = totals + first;
        here->waiting.rows = rows - first < TILE_HEIGHT ? rows - first : TILE_HEIGHT;
        if (first > 0) continue;
        UNROLL for (int b = 0; b < wide; b++) {
            here->waiting.scales[b] = parts[b].scales[0];
            if (minimum) here->waiting.added[b] = parts[b].added[0];
        }
    }
}

ALWAYS_INLINE void close_tiles(tile_bench *here, int wide, int minimum, long stride) {
    add_waiting(here, wide, minimum, stride);
    _tile_release();
}

#endif

#endif
