/* A bundle of rows of the denser kinds woven together (weave.h), so that one vector holds four columns of each of them.
 *
 * A block of a bundle, in the bytes that its blocks had apart; a vector has 4 BUNDLE bytes:
 *   scales | minimums where there are any | small scales of all groups, the rows side by side (see below) |
 *   then for every 32 columns, vector v being columns 4v..4v+3 of row 0, of row 1, ...:
 *     4 and more bits: 4 vectors, the lower four bits of vector i in the low halves, of vector i + 4 in the high ones
 *     6, 3, 2:         2 vectors, two bits of vector v in bits 2 (v % 4) of vector v / 4: the upper two, or the lower
 *     5, 3:            1 vector, one bit of vector v in bit v
 * On Arm codes with an offset are stored so that they are signed numbers when they are put together: six bits as
 * code ^ 32, the one bit of 5 and 3 reversed. x86 takes them as they are, unsigned.
 *
 * Small scales: bytes [group][row] for Q6_K and Q2_K. Six-bit ones (Q4_K and Q5_K: scales of all groups, then minimums)
 * are 16 BUNDLE numbers in 12 BUNDLE bytes: the last quarter lies in the upper bits of the others. IQ4_XS: 8 BUNDLE
 * numbers, a vector of lower halves and half a vector of upper quarters. */
#ifndef HOLDFAST_KQUANT_WEAVE_H
#define HOLDFAST_KQUANT_WEAVE_H

#include "kquants.h"
#include "weave.h"

/* Weaves a matrix where it lies and returns its layout from now on: the same when this machine has no use for it; -1
 * when there is no memory for scratch. Rows beyond the last bundle stay as they were. */
int weave_kquants(uint8_t *weights, long rows, long columns, enum layout layout);

/* Blocks first..first+count-1 of row `row` of a bundle as floats. `bundle` is where the bundle begins. */
void expand_woven(const uint8_t *bundle, enum layout layout, int row, long first, long count, float *out);

#endif
