/* Rows of x as two digits on Arm, and the steps its kernels have in common (strips.c, kquant_dots.c). Included by digits.h
 * alone. */
#define DIGITS 2
#define PANEL_ROWS 8 /* of x, at most */
#define PANELS_AT_ONCE 32
#define LEAST_PANELS 2 /* a strip is worth making from here on */

/* Of one block of a panel of 8, 4, 2 or 1 rows: [digit][half of the columns][row][16], then the scale of each row, then
 * the sum of its 32 numbers. The scale is that of a sum with quants as the machine's kernels hold them: sixteen times a
 * 4-bit one. */
ALWAYS_INLINE long digit_bytes(int rows) { return DIGITS * BLOCK_ELEMENTS * rows; }
ALWAYS_INLINE long padded(int rows) { return rows < 4 ? 4 : rows; }
ALWAYS_INLINE long panel_block_bytes(int rows) { return digit_bytes(rows) + 2 * padded(rows) * (long)sizeof(float); }

/* Rows of the next panel when so many are left. */
ALWAYS_INLINE int panel_rows(const digit_kind *kind, long left) {
    return (void)kind, left >= 8 ? 8 : (left >= 4 ? 4 : (left >= 2 ? 2 : 1));
}

typedef float32x4_t bundle_sums;

/* Sums of a panel's rows with the four outputs whose quants begin at `four`; the rest is said by the function itself. */
typedef void (*bundle_function)(const uint8_t *four, long bundle_bytes, int wide, const scaled_matrix *planes,
                                const uint8_t *x, long blocks, int rows, bundle_sums *totals);
#define BUNDLES_AT_ONCE 1
ALWAYS_INLINE int bundles_at_once(int rows) { return (void)rows, 1; }

struct digit_kind {
    bundle_function few[PANEL_ROWS + 1]; /* by rows: from where the weights lie */
    const bundle_function *many;         /* by rows: from a strip */
    strip_function make_strip;
    long strip_block_bytes;
    float quant_worth; /* of 1 in the kernels' quants */
};

ALWAYS_INLINE bundle_function function_of(const digit_kind *kind, int from_strip, int rows) {
    return (from_strip ? kind->many : kind->few)[rows];
}

ALWAYS_INLINE long input_block_bytes(const digit_kind *kind, int rows) { return (void)kind, panel_block_bytes(rows); }

ALWAYS_INLINE int in_floats(const digit_kind *kind) { return (void)kind, 0; }

/* Strips of blocks with one scale: 4 scales and 4 minimums as floats, then 8 vectors of quants. */
#define STRIP_HEADS 32
#define STRIP_BLOCK_BYTES (STRIP_HEADS + BUNDLE * BLOCK_ELEMENTS)
extern const bundle_function STRIP_WITH_MINIMUM[PANEL_ROWS + 1], STRIP_WITHOUT[PANEL_ROWS + 1];

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

/* Whole numbers of a block and what they are worth, to their places. */
ALWAYS_INLINE void put_block(const int32x4_t *whole, float scale, uint8_t *out, int row, int rows,
                             const digit_kind *kind) {
    int32x4_t total = vdupq_n_s32(0), digit[DIGITS][8];
    UNROLL for (int i = 0; i < 8; i++) {
        total = vaddq_s32(total, whole[i]);
        /* Balanced digits: the nearest first one, so both are signed bytes. */
        digit[0][i] = vrshrq_n_s32(whole[i], 8);
        digit[1][i] = vsubq_s32(whole[i], vshlq_n_s32(digit[0][i], 8));
    }
    int8_t *to = (int8_t *)out + 16 * row;
    UNROLL for (int d = 0; d < DIGITS; d++) {
        UNROLL for (int half = 0; half < 2; half++) {
            const int32x4_t *from = digit[d] + 4 * half;
            int16x8_t low = vcombine_s16(vmovn_s32(from[0]), vmovn_s32(from[1]));
            int16x8_t high = vcombine_s16(vmovn_s32(from[2]), vmovn_s32(from[3]));
            vst1q_s8(to + 16 * (2 * d + half) * rows, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
        }
    }
    float *scales = (float *)(out + digit_bytes(rows)), *sums = scales + padded(rows);
    scales[row] = scale * kind->quant_worth;
    sums[row] = (float)vaddvq_s32(total) * scale;
}

ALWAYS_INLINE void split_block(const float *x, uint8_t *out, int row, int rows, const digit_kind *kind) {
    float32x4_t part[8], largest = vdupq_n_f32(0);
    UNROLL for (int i = 0; i < 8; i++) {
        part[i] = vld1q_f32(x + 4 * i);
        largest = vmaxq_f32(largest, vabsq_f32(part[i]));
    }
    float peak = vmaxvq_f32(largest);
    /* Below this the inverse would overflow; such a block is nothing beside any other. NaN falls through. */
    float inverse = peak < 1e-30f ? 0.0f : LARGEST / peak, scale = peak < 1e-30f ? 0.0f : peak / LARGEST;
    int32x4_t whole[8];
    UNROLL for (int i = 0; i < 8; i++) whole[i] = vcvtnq_s32_f32(vmulq_n_f32(part[i], inverse));
    put_block(whole, scale, out, row, rows, kind);
}

/* A block of inputs that planes were asked how they want them: codes, or numbers in another order. */
ALWAYS_INLINE void put_prepared(const scaled_matrix *planes, const float *x, float scale, uint8_t *out, int row, int rows,
                                const digit_kind *kind) {
    if (planes->input_type == PLAIN_INPUTS) {
        split_block(x, out, row, rows, kind);
        return;
    }
    int32x4_t whole[8];
    UNROLL for (int i = 0; i < 8; i++) whole[i] = vcvtnq_s32_f32(vld1q_f32(x + 4 * i));
    put_block(whole, scale, out, row, rows, kind);
}
