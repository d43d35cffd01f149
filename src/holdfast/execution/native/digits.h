/* Activations as 16-bit whole numbers, and the products that are built from them. Knows no file's blocks but through the
 * way into it: woven quants (weave.h), as they are stored or laid out for many rows.
 *
 * A block of 32 activations becomes 16-bit whole numbers times one scale: each is off by at most 1/65,000 of the block's
 * largest. Their products with quants are summed exactly, so nothing is widened to float but one sum a block:
 *
 *   sum(x q) = scale_x * sum(whole q)
 *
 * Arm multiplies bytes, sixteen at a time: a whole number is two signed 8-bit digits there, and its sum
 * 256 * sum(high q) + sum(low q) (arm_digits.h). x86 multiplies the 16-bit numbers themselves, in pairs (x86_digits.h).
 * Both have the same sums and the same float operations after them, so the same results, bit for bit.
 *
 * Eight bits would be as coarse as llama.cpp's activations: docs/measurements/performance.md has
 * both, and what they cost. */
#ifndef HOLDFAST_DIGITS_H
#define HOLDFAST_DIGITS_H

#include "matmul.h"
#include "scaled.h"
#include "weave.h"

/* Of a whole number: two balanced digits hold it, and 32 times 255 times it stays below 2^31. */
#define LARGEST 32600.0f

/* Rows of x, a part of memory for each block of 32 columns of theirs. */
typedef struct {
    const uint8_t *blocks;
    long first;
    int rows;
} panel;

/* What a woven layout needs to be multiplied: a row of this for each. */
typedef struct digit_kind digit_kind;

/* Of a layout before it was woven; on Arm those of the denser kinds are in kquant_dots.c. */
const digit_kind *digit_kind_of(enum layout plain);
const digit_kind *kquant_digits_of(enum layout plain);
const digit_kind *planes_digits_of(const scaled_matrix *planes);

/* Lays out the codes of a bundle as bytes, with their scales, so that every panel passes over the same. */
typedef void (*strip_function)(const uint8_t *bundle, long bundle_bytes, const scaled_matrix *planes, long blocks,
                               uint8_t *strip);

/* Each of the two brings for digits.c: PANEL_ROWS, panel_rows, panel_block_bytes, split_block, put_prepared, in_floats, digit_kind,
 * bundle_function, bundle_sums (of a row of x with the outputs of a bundle). */
#if defined(ARM_DIGITS)
#include "arm_digits.h"
#elif defined(X86_DIGITS)
#include "x86_digits.h"
#endif

#endif
