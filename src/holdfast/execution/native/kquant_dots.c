/* How woven weights of the denser kinds are multiplied by digits: the sums of four outputs, from where the weights lie or
 * from strips, where a panel's rows meet codes that are signed bytes already. Who calls them is digits.c. */
#include "digits.h"

#if defined(ARM_DIGITS)

#include "kquant_lanes.h"

#define AHEAD 1536 /* bytes of weights that are asked for early */
/* Strips of groups of 16: scales of the first 16 columns, of the others, what is added to both likewise, then codes. */
#define SHORT_HEADS (16 * (int)sizeof(float))
#define SHORT_STRIP_BYTES (SHORT_HEADS + 8 * 16)

/* Whole sums of 16 columns for four outputs and every row; the digits of few rows apart, as block_sums has them. */
ALWAYS_INLINE void half_sums(const int8_t *x, const int8x16_t *q, int rows, int half, int32x4_t *sum) {
    int32x4_t low[2];
    UNROLL for (int r = 0; r < rows; r++) sum[r] = no_sum();
    UNROLL for (int r = 0; r < rows && rows <= 2; r++) low[r] = no_sum();
    UNROLL for (int digit = 0; digit < DIGITS; digit++) {
        int32x4_t *to = rows <= 2 && digit > 0 ? low : sum;
        if (rows > 2 && digit > 0) {
            UNROLL for (int r = 0; r < rows; r++) sum[r] = vshlq_n_s32(sum[r], 8);
        }
        UNROLL for (int lane = 0; lane < 4; lane++) {
            UNROLL for (int r = 0; r < rows; r++)
                to[r] = dot_lane(to[r], q[4 * half + lane], vld1q_s8(x + 16 * ((2 * digit + half) * rows + r)), lane);
        }
    }
    UNROLL for (int r = 0; r < rows && rows <= 2; r++) sum[r] = vaddq_s32(vshlq_n_s32(sum[r], 8), low[r]);
}

/* Minimums of groups of 16: of a row's numbers only the sum of all 32 is at hand. */
ALWAYS_INLINE void add_short_minimums(const uint8_t *x, const float *added, int rows, float32x4_t *total) {
    const float *scales = (const float *)(x + digit_bytes(rows)), *sums = scales + padded(rows);
    UNROLL for (int r = 0; r < rows; r++) {
        const int8_t *high = (const int8_t *)x + 16 * (rows + r), *low = (const int8_t *)x + 16 * (3 * rows + r);
        float second = (float)(256 * vaddlvq_s8(vld1q_s8(high)) + vaddlvq_s8(vld1q_s8(low))) * scales[r];
        total[r] = vfmaq_n_f32(total[r], vld1q_f32(added), sums[r] - second);
        total[r] = vfmaq_n_f32(total[r], vld1q_f32(added + 4), second);
    }
}

/* 32 columns with one scale, or two. */
ALWAYS_INLINE void add_part(const int8x16_t *q, const float *scales, const float *added, const uint8_t *x, int rows,
                            int two_groups, int minimum, float32x4_t *total) {
    int32x4_t sum[PANEL_ROWS];
    if (!two_groups) {
        block_sums((const int8_t *)x, q, rows, sum);
        add_block(x, sum, vld1q_f32(scales), minimum ? vld1q_f32(added) : vdupq_n_f32(0), rows, minimum, total);
        return;
    }
    UNROLL for (int half = 0; half < 2; half++) {
        half_sums((const int8_t *)x, q, rows, half, sum);
        add_block(x, sum, vld1q_f32(scales + 4 * half), vdupq_n_f32(0), rows, 0, total);
    }
    if (minimum) add_short_minimums(x, added, rows, total);
}

/* From where the weights lie. `blocks` counts 32 columns, as everywhere in digits.c. */
ALWAYS_INLINE void multiply_woven(const uint8_t *four, const uint8_t *x, long blocks, float32x4_t *totals, int rows,
                                  enum layout plain) {
    const int parts = blocks_of_32(plain) ? 1 : 8, groups = short_groups(plain) ? 2 : 1;
    float scales[4 * KQUANT_GROUPS], added[4 * KQUANT_GROUPS];
    float32x4_t total[PANEL_ROWS];
    UNROLL for (int r = 0; r < rows; r++) total[r] = vdupq_n_f32(0);
    for (long block = 0; block < blocks; block += parts) {
        load_scales(four, plain, scales, added);
        four += head_bytes(plain);
        for (int part = 0; part < parts; part++, four += code_bytes(plain), x += panel_block_bytes(rows)) {
            int8x16_t q[8];
            /* Prefetching past the end harms nobody. */
            __builtin_prefetch(four + AHEAD);
            __builtin_prefetch(four + AHEAD + 64);
            load_codes(four, plain, q);
            add_part(q, scales + 4 * part * groups, added + 4 * part * groups, x, rows, groups == 2,
                     with_minimum(plain), total);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) totals[r] = total[r];
}

/* From a strip of groups of 16; those of 32 are as strips.c has them. */
ALWAYS_INLINE void multiply_short_strip(const uint8_t *four, const uint8_t *x, long blocks, float32x4_t *totals, int rows,
                                        int minimum) {
    float32x4_t total[PANEL_ROWS];
    UNROLL for (int r = 0; r < rows; r++) total[r] = vdupq_n_f32(0);
    for (long block = 0; block < blocks; block++, four += SHORT_STRIP_BYTES, x += panel_block_bytes(rows)) {
        const float *heads = (const float *)four;
        int8x16_t q[8];
        UNROLL for (int i = 0; i < 8; i++) q[i] = vld1q_s8((const int8_t *)four + SHORT_HEADS + 16 * i);
        add_part(q, heads, heads + 8, x, rows, 1, minimum, total);
    }
    UNROLL for (int r = 0; r < rows; r++) totals[r] = total[r];
}

ALWAYS_INLINE void strip_of_woven(const uint8_t *four, long blocks, uint8_t *strip, enum layout plain) {
    const int parts = blocks_of_32(plain) ? 1 : 8, groups = short_groups(plain) ? 2 : 1;
    float scales[4 * KQUANT_GROUPS], added[4 * KQUANT_GROUPS] = {0};
    for (long block = 0; block < blocks; block += parts) {
        load_scales(four, plain, scales, added);
        four += head_bytes(plain);
        for (int part = 0; part < parts; part++, four += code_bytes(plain)) {
            float *heads = (float *)strip;
            int8x16_t q[8];
            memcpy(heads, scales + 4 * part * groups, 16 * (size_t)groups);
            memcpy(heads + 4 * groups, added + 4 * part * groups, 16 * (size_t)groups);
            strip += groups == 2 ? SHORT_HEADS : STRIP_HEADS;
            load_codes(four, plain, q);
            UNROLL for (int i = 0; i < 8; i++) vst1q_s8((int8_t *)strip + 16 * i, q[i]);
            strip += 8 * 16;
        }
    }
}

/* A function for each kind and number of rows, so that each keeps what it needs in registers. */
#define KERNEL(name, multiply, rows, kind)                                                               \
    static void name##_##rows(const uint8_t *four, long bytes, int wide, const scaled_matrix *planes,        \
                              const uint8_t *x, long blocks, int count,                                         \
                              float32x4_t *totals) {                                                           \
        (void)bytes, (void)wide, (void)planes, (void)count;                                                                   \
        multiply(four, x, blocks, totals, rows, kind);                                                   \
    }
#define KERNELS(name, multiply, kind)                                                               \
    KERNEL(name, multiply, 1, kind) KERNEL(name, multiply, 2, kind) KERNEL(name, multiply, 4, kind) \
    KERNEL(name, multiply, 8, kind)
#define KIND(plain)                                                                                   \
    KERNELS(woven_##plain, multiply_woven, plain)                                                     \
    static void strip_##plain(const uint8_t *four, long bytes, const scaled_matrix *planes,           \
                              long blocks, uint8_t *strip) {                                          \
        (void)bytes, (void)planes;                                                                    \
        strip_of_woven(four, blocks, strip, plain);                                                   \
    }
KIND(Q5_0) KIND(Q5_1) KIND(IQ4_NL) KIND(Q2_K) KIND(Q3_K) KIND(Q4_K) KIND(Q5_K) KIND(Q6_K) KIND(IQ4_XS)
KERNELS(short_strip_with_minimum, multiply_short_strip, 1)
KERNELS(short_strip_without, multiply_short_strip, 0)

#define BY_ROWS(name) {[1] = name##_1, [2] = name##_2, [4] = name##_4, [8] = name##_8}
#define ENTRY(plain, strip, bytes) [plain] = {BY_ROWS(woven_##plain), strip, strip_##plain, bytes, 1.0f}
static const bundle_function SHORT_WITH_MINIMUM[PANEL_ROWS + 1] = BY_ROWS(short_strip_with_minimum);
static const bundle_function SHORT_WITHOUT[PANEL_ROWS + 1] = BY_ROWS(short_strip_without);

static const digit_kind KINDS[LAYOUTS] = {
    ENTRY(Q5_0, STRIP_WITHOUT, STRIP_BLOCK_BYTES),
    ENTRY(Q5_1, STRIP_WITH_MINIMUM, STRIP_BLOCK_BYTES),
    ENTRY(IQ4_NL, STRIP_WITHOUT, STRIP_BLOCK_BYTES),
    ENTRY(Q2_K, SHORT_WITH_MINIMUM, SHORT_STRIP_BYTES),
    ENTRY(Q3_K, SHORT_WITHOUT, SHORT_STRIP_BYTES),
    ENTRY(Q4_K, STRIP_WITH_MINIMUM, STRIP_BLOCK_BYTES),
    ENTRY(Q5_K, STRIP_WITH_MINIMUM, STRIP_BLOCK_BYTES),
    ENTRY(Q6_K, SHORT_WITHOUT, SHORT_STRIP_BYTES),
    ENTRY(IQ4_XS, STRIP_WITHOUT, STRIP_BLOCK_BYTES),
};

const digit_kind *kquant_digits_of(enum layout plain) { return KINDS + plain; }

#endif
