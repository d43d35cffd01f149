/* Activations as whole numbers of two 8-bit digits, and the products that are built from them. Knows no file's blocks
 * but through the way into it: quants in fours, as they are stored or as strips (strips.c, kquant_dots.c).
 *
 * A block of 32 activations becomes 16-bit whole numbers times one scale: each is off by at most 1/65,000 of the block's
 * largest. A whole number is two signed 8-bit digits, and the machine's 8-bit dot product multiplies digits with quants
 * sixteen at a time, exactly. So nothing is widened to float but one sum a block:
 *
 *   sum(x q) = scale_x * (256 * sum(high q) + sum(low q))
 *
 * One digit would be as coarse as llama.cpp's activations: docs/measurements/performance.md has
 * both, and what they cost. */
#ifndef HOLDFAST_DIGITS_H
#define HOLDFAST_DIGITS_H

#include "fours.h"
#include "matmul.h"
#include "vector.h"

#if defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)

#define DIGITS 2
#define PANEL_ROWS 8 /* of x, at most */
#define PANELS_AT_ONCE 32
#define MOST_PANELS (PANELS_AT_ONCE + 3)

/* Rows of x. Of one block: [digit][half of the columns][row][16], then the scale of each row, then the sum of its 32
 * numbers. The scale is that of a sum with quants as the machine's kernels hold them: sixteen times a 4-bit one. */
typedef struct {
    const uint8_t *blocks;
    long first;
    int rows; /* 8, 4, 2 or 1 */
} panel;

ALWAYS_INLINE long digit_bytes(int rows) { return DIGITS * BLOCK_ELEMENTS * rows; }
ALWAYS_INLINE long padded(int rows) { return rows < 4 ? 4 : rows; }
ALWAYS_INLINE long panel_block_bytes(int rows) { return digit_bytes(rows) + 2 * padded(rows) * (long)sizeof(float); }

/* Sums of a panel's rows with the four outputs whose quants begin at `four`. */
typedef void (*four_function)(const uint8_t *four, const uint8_t *x, long blocks, float32x4_t *totals);

/* What a layout in fours needs to be multiplied: a row of this for each. */
typedef struct {
    four_function few[PANEL_ROWS + 1]; /* by rows: from where the weights lie */
    const four_function *many;         /* by rows: from a strip */
    void (*make_strip)(const uint8_t *four, long blocks, uint8_t *strip); /* of four outputs */
    long strip_block_bytes;
    float quant_worth; /* of 1 in the kernels' quants */
} digit_kind;

/* Of a layout before it was woven; those of the denser kinds are in kquant_dots.c. */
const digit_kind *digit_kind_of(enum layout plain);
const digit_kind *kquant_digits_of(enum layout plain);

/* Strips of blocks with one scale: 4 scales and 4 minimums as floats, then 8 vectors of quants. */
#define STRIP_HEADS 32
#define STRIP_BLOCK_BYTES (STRIP_HEADS + FOUR * BLOCK_ELEMENTS)
extern const four_function STRIP_WITH_MINIMUM[PANEL_ROWS + 1], STRIP_WITHOUT[PANEL_ROWS + 1];

/* The lane must be a constant where it is inlined, and so it is when every loop around is unrolled. */
ALWAYS_INLINE int32x4_t dot_lane(int32x4_t sum, int8x16_t q, int8x16_t x, int lane) {
    switch (lane) {
    case 0: return vdotq_laneq_s32(sum, q, x, 0);
    case 1: return vdotq_laneq_s32(sum, q, x, 1);
    case 2: return vdotq_laneq_s32(sum, q, x, 2);
    default: return vdotq_laneq_s32(sum, q, x, 3);
    }
}

ALWAYS_INLINE float32x4_t times_lane(float32x4_t a, float32x4_t b, int lane) {
    switch (lane) {
    case 0: return vmulq_laneq_f32(a, b, 0);
    case 1: return vmulq_laneq_f32(a, b, 1);
    case 2: return vmulq_laneq_f32(a, b, 2);
    default: return vmulq_laneq_f32(a, b, 3);
    }
}

ALWAYS_INLINE float32x4_t add_lane(float32x4_t sum, float32x4_t a, float32x4_t b, int lane) {
    switch (lane) {
    case 0: return vfmaq_laneq_f32(sum, a, b, 0);
    case 1: return vfmaq_laneq_f32(sum, a, b, 1);
    case 2: return vfmaq_laneq_f32(sum, a, b, 2);
    default: return vfmaq_laneq_f32(sum, a, b, 3);
    }
}

/* gcc would copy a register of zeros instead, which costs as much as a dot product; this costs nothing. */
ALWAYS_INLINE int32x4_t no_sum(void) {
    int32x4_t zero;
    __asm__ volatile("movi %0.2d, #0" : "=w"(zero));
    return zero;
}

/* Adds the dot products of one digit to the sums of every row. The rows go side by side: a sum waits for its last. */
ALWAYS_INLINE void add_digit(const int8_t *digit, const int8x16_t *q, int rows, int32x4_t *sum) {
    UNROLL for (int half = 0; half < 2; half++) {
        int8x16_t x[PANEL_ROWS];
        UNROLL for (int r = 0; r < rows; r++) x[r] = vld1q_s8(digit + 16 * (half * rows + r));
        UNROLL for (int lane = 0; lane < 4; lane++) {
            UNROLL for (int r = 0; r < rows; r++) sum[r] = dot_lane(sum[r], q[4 * half + lane], x[r], lane);
        }
    }
}

/* Whole sums of a block for four outputs and every row. The digits of so few rows that one sum after another would leave
 * the machine waiting are summed apart. */
ALWAYS_INLINE void block_sums(const int8_t *x, const int8x16_t *q, int rows, int32x4_t *sum) {
    const int8_t *low = x + BLOCK_ELEMENTS * rows;
    UNROLL for (int r = 0; r < rows; r++) sum[r] = no_sum();
    if (rows > 2) {
        add_digit(x, q, rows, sum);
        UNROLL for (int r = 0; r < rows; r++) sum[r] = vshlq_n_s32(sum[r], 8);
        add_digit(low, q, rows, sum);
        return;
    }
    int32x4_t apart[2];
    UNROLL for (int r = 0; r < rows; r++) apart[r] = no_sum();
    UNROLL for (int half = 0; half < 2; half++) {
        UNROLL for (int i = 0; i < 4 * rows; i++) {
            const int lane = i / rows, r = i % rows;
            sum[r] = dot_lane(sum[r], q[4 * half + lane], vld1q_s8(x + 16 * (half * rows + r)), lane);
            apart[r] = dot_lane(apart[r], q[4 * half + lane], vld1q_s8(low + 16 * (half * rows + r)), lane);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) sum[r] = vaddq_s32(vshlq_n_s32(sum[r], 8), apart[r]);
}

/* A block's sums in floats, added to the totals: the same operations in the same order wherever they are done. */
ALWAYS_INLINE void add_block(const uint8_t *x, const int32x4_t *sum, float32x4_t scale, float32x4_t minimum, int rows,
                             int with_minimum, float32x4_t *total) {
    const float *scales = (const float *)(x + digit_bytes(rows)), *sums = scales + padded(rows);
    UNROLL for (int r = 0; r < rows; r++) {
        float32x4_t worth = times_lane(scale, vld1q_f32(scales + r / 4 * 4), r % 4);
        total[r] = vfmaq_f32(total[r], vcvtq_f32_s32(sum[r]), worth);
        if (with_minimum) total[r] = add_lane(total[r], minimum, vld1q_f32(sums + r / 4 * 4), r % 4);
    }
}

#endif
#endif
