/* Many rows of x with woven weights by AMX's tiles of signed bytes: what x86_dots.c and x86_planes.c lay out, and
 * x86_tiles.c multiplies.
 *
 *   x, 16 rows of a panel:  [row][32 high digits | 32 low digits]      whole number = 256 high + low
 *   weights, 32 columns:    [4 columns][output][4]                     as they are woven, less what stands for 0
 *
 * A tile of weights stands against tiles of high digits and of low ones; the two products of a group of columns make the
 * very sums that pairs make (x86_sums.h), and the same float operations follow: the same results, bit for bit. */
#ifndef HOLDFAST_X86_TILES_H
#define HOLDFAST_X86_TILES_H

#include "x86_sums.h"

#if defined(X86_TILES)

#define LAID_BYTES (BUNDLE * BLOCK_ELEMENTS)
#define LAID_BLOCKS 48 /* at a time: 30 KB, which all rows of a panel pass over in the first-level cache */

/* Some columns of a bundle. */
typedef struct {
    _Alignas(64) uint8_t codes[LAID_BLOCKS][LAID_BYTES];
    vec scales[LAID_BLOCKS], added[LAID_BLOCKS];
    long blocks;
} laid_weights;

/* 32 columns of a bundle as signed bytes, with their scale. */
ALWAYS_INLINE void lay_out(laid_weights *laid, const weights_part *part, enum layout plain, int minimum) {
    signed_bytes zero = (signed_bytes){0} + (int8_t)offset_of(plain); /* 128 wraps, and so does what it is taken from */
    if (with_zeros(plain)) zero = (signed_bytes)(part->zeros * 0x01010101);
    UNROLL for (int v = 0; v < 8; v++)
        ((signed_bytes *)laid->codes[laid->blocks])[v] = (signed_bytes)load_codes(part->codes, plain, v) - zero;
    laid->scales[laid->blocks] = part->scales[0];
    if (minimum) laid->added[laid->blocks] = part->added[0];
    laid->blocks++;
}

/* Adds what is laid out, times the blocks of a panel that begin at `x`, to the totals of its rows; then nothing is laid
 * out. `minimum`: whether something is added beside scaled codes. `begins`: totals are written over, not added to. */
void multiply_laid(laid_weights *laid, int minimum, int begins, const uint8_t *x, int rows, vec *totals);

#endif

#endif
