/* BUNDLE rows of quantized weights woven together, so that one vector holds the same columns of all of them.
 *
 * A block of 32 columns of a bundle, in the bytes that its blocks had apart:
 *   BUNDLE scales | BUNDLE minimums (Q4_1) | quants: columns 0-3 of row 0, of row 1, ..., then columns 4-7, ...
 * 4-bit quants keep GGUF's pairing (column i in the low half of a byte, column i + 16 in the high half). Arm multiplies
 * signed quants: 4-bit ones are stored as q - 8 in two's complement. x86 multiplies unsigned ones: 8-bit ones are
 * stored as q + 128. Rows beyond the last bundle stay as they were. */
#ifndef HOLDFAST_WEAVE_H
#define HOLDFAST_WEAVE_H

#include "blocks.h"
#include "vector.h"

#define BUNDLE LANES

/* Where products are computed in whole numbers (digits.h): elsewhere nothing is woven. */
#if defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)
#define ARM_DIGITS
#elif defined(__AVX2__)
#define X86_DIGITS
#if defined(__AMX_INT8__) && LANES == 16
#define X86_TILES /* for many rows */
#endif
#endif

/* A bundle's rows lie together, here or as kquant_weave.h has them. */
static inline int is_woven(enum layout layout) { return layout != plain_layout(layout); }

/* Weaves a matrix where it lies and returns its layout from now on: the same when this machine has no use for it, or
 * the layout is not quantized; -1 when there is no memory for scratch. */
int weave_rows(uint8_t *weights, long rows, long columns, enum layout layout);

/* Blocks first..first+count-1 of row `row` of a bundle as they were before. `bundle` is where the bundle begins. */
void unweave_row(const uint8_t *bundle, enum layout layout, int row, long first, long count, uint8_t *out);

#endif
