/* Four rows of quantized weights woven together, so that one vector holds the same columns of all four.
 *
 * A block of 32 columns of four rows, in the bytes that the four blocks had apart:
 *   4 scales | 4 minimums (Q4_1) | quants: columns 0-3 of row 0, of row 1, of row 2, of row 3, then columns 4-7, ...
 * 4-bit quants keep GGUF's pairing (column i in the low half of a byte, column i + 16 in the high half) and are stored
 * as q - 8 in two's complement. Rows beyond the last four stay as they were. */
#ifndef HOLDFAST_FOURS_H
#define HOLDFAST_FOURS_H

#include "blocks.h"

#define FOUR 4

/* Four rows lie together, here or as kquant_weave.h has them. */
static inline int in_fours(enum layout layout) { return layout != plain_layout(layout); }

/* Weaves a matrix where it lies and returns its layout from now on: the same when this machine has no use for fours, or
 * the layout is not quantized; -1 when there is no memory for scratch. */
int weave_fours(uint8_t *weights, long rows, long columns, enum layout layout);

/* Blocks first..first+count-1 of four rows as they were before, each row `stride` bytes after the last. `four` is where
 * the four rows begin. */
void unweave_four(const uint8_t *four, enum layout layout, long first, long count, uint8_t *out, long stride);

#endif
