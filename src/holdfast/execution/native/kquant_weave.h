/* Four rows of the denser kinds woven together, so that one vector holds four columns of each of them.
 *
 * A block of four rows, in the bytes that the four blocks had apart:
 *   4 scales | 4 minimums where there are any | small scales of all groups, four rows side by side (see below) |
 *   then for every 32 columns, vector v being columns 4v..4v+3 of row 0, of row 1, of row 2, of row 3:
 *     4 and more bits: 64 bytes, the lower four bits of vector i in the low halves, of vector i + 4 in the high ones
 *     6, 3, 2:         32 bytes, two bits of vector v in bits 2 (v % 4) of byte vector v / 4: the upper two, or the lower
 *     5, 3:            16 bytes, one bit of vector v in bit v
 * Codes with an offset are stored so that they are signed numbers when they are put together: six bits as code ^ 32,
 * the one bit of 5 and 3 reversed.
 *
 * Small scales: bytes [group][row] for Q6_K and Q2_K. Six-bit ones (Q4_K and Q5_K: scales of all groups, then minimums)
 * are 64 numbers in 48 bytes: the last sixteen lie in the upper bits of the others. IQ4_XS: 32 numbers, 16 bytes of
 * lower halves and 8 of upper quarters. */
#ifndef HOLDFAST_KQUANT_WEAVE_H
#define HOLDFAST_KQUANT_WEAVE_H

#include "kquants.h"

/* Weaves a matrix where it lies and returns its layout from now on: the same when this machine has no use for it; -1
 * when there is no memory for scratch. Rows beyond the last four stay as they were. */
int weave_kquants(uint8_t *weights, long rows, long columns, enum layout layout);

/* Blocks first..first+count-1 of four rows as floats, each row `stride` floats after the last. `four` is where the four
 * rows begin. */
void expand_woven(const uint8_t *four, enum layout layout, long first, long count, float *out, long stride);

#endif
