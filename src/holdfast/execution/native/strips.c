/* The quants of each woven layout and how they are multiplied with panels of x: from where they lie when rows are few;
 * from a strip when they are many, which is the same quants as bytes, laid out once and passed over by every panel. */
#include "digits.h"

#if defined(ARM_DIGITS)

ALWAYS_INLINE float32x4_t four_halves(const uint8_t *stored) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(stored)));
}

/* Eight vectors, each 4 columns of 4 outputs. 4-bit quants become sixteen times what they are: one operation each, and
 * the scale of x makes up for it. */
ALWAYS_INLINE void load_quants(const uint8_t *stored, int eight_bits, int8x16_t *q) {
    const int8_t *from = (const int8_t *)stored;
    if (eight_bits) {
        UNROLL for (int i = 0; i < 8; i++) q[i] = vld1q_s8(from + 16 * i);
    } else {
        UNROLL for (int i = 0; i < 4; i++) {
            int8x16_t both = vld1q_s8(from + 16 * i);
            q[i] = vshlq_n_s8(both, 4);
            q[i + 4] = vandq_s8(both, vdupq_n_s8(-16));
        }
    }
}

/* Where a block's quants begin, and how long it is. */
ALWAYS_INLINE long heads_of(enum layout plain) { return plain == Q4_1 ? 16 : 8; }
ALWAYS_INLINE long bytes_of(enum layout plain) { return BUNDLE * (plain == Q8_0 ? 34 : (plain == Q4_1 ? 20 : 18)); }

/* Stored quants begin at -8, so what stands for 0 moves with them. */
ALWAYS_INLINE float32x4_t minimum_of(const uint8_t *four, enum layout plain, float32x4_t scale) {
    return plain == Q4_1 ? vfmaq_n_f32(four_halves(four + 8), scale, 8.0f) : vdupq_n_f32(0);
}

ALWAYS_INLINE void multiply_stored(const uint8_t *four, const uint8_t *x, long blocks, float32x4_t *totals, int rows,
                                   enum layout plain) {
    float32x4_t total[PANEL_ROWS];
    UNROLL for (int r = 0; r < rows; r++) total[r] = vdupq_n_f32(0);
    for (long block = 0; block < blocks; block++, four += bytes_of(plain), x += panel_block_bytes(rows)) {
        int8x16_t q[8];
        int32x4_t sum[PANEL_ROWS];
        /* Prefetching past the end harms nobody. */
        __builtin_prefetch(four + 16 * bytes_of(plain));
        __builtin_prefetch(four + 16 * bytes_of(plain) + 64);
        load_quants(four + heads_of(plain), plain == Q8_0, q);
        block_sums((const int8_t *)x, q, rows, sum);
        float32x4_t scale = four_halves(four);
        add_block(x, sum, scale, minimum_of(four, plain, scale), rows, plain == Q4_1, total);
    }
    UNROLL for (int r = 0; r < rows; r++) totals[r] = total[r];
}

ALWAYS_INLINE void multiply_strip(const uint8_t *four, const uint8_t *x, long blocks, float32x4_t *totals, int rows,
                                  int with_minimum) {
    float32x4_t total[PANEL_ROWS];
    UNROLL for (int r = 0; r < rows; r++) total[r] = vdupq_n_f32(0);
    for (long block = 0; block < blocks; block++, four += STRIP_BLOCK_BYTES, x += panel_block_bytes(rows)) {
        const float *heads = (const float *)four;
        int8x16_t q[8];
        int32x4_t sum[PANEL_ROWS];
        load_quants(four + STRIP_HEADS, 1, q);
        block_sums((const int8_t *)x, q, rows, sum);
        add_block(x, sum, vld1q_f32(heads), vld1q_f32(heads + BUNDLE), rows, with_minimum, total);
    }
    UNROLL for (int r = 0; r < rows; r++) totals[r] = total[r];
}

ALWAYS_INLINE void strip_of(const uint8_t *four, long blocks, uint8_t *strip, enum layout plain) {
    for (long block = 0; block < blocks; block++, four += bytes_of(plain), strip += STRIP_BLOCK_BYTES) {
        int8x16_t q[8];
        float32x4_t scale = four_halves(four);
        load_quants(four + heads_of(plain), plain == Q8_0, q);
        vst1q_f32((float *)strip, scale);
        vst1q_f32((float *)strip + BUNDLE, minimum_of(four, plain, scale));
        UNROLL for (int i = 0; i < 8; i++) vst1q_s8((int8_t *)strip + STRIP_HEADS + 16 * i, q[i]);
    }
}

/* A function for each layout and number of rows, so that each keeps what it needs in registers. */
#define KERNEL(name, multiply, rows, kind)                                                                     \
    static void name##_##rows(const uint8_t *four, long bytes, int wide, const scaled_matrix *planes,        \
                              const uint8_t *x, long blocks, int count,                                         \
                              float32x4_t *totals) {                                                           \
        (void)bytes, (void)wide, (void)planes, (void)count;                                                                   \
        multiply(four, x, blocks, totals, rows, kind);                                                         \
    }
#define KERNELS(name, multiply, kind)                                                              \
    KERNEL(name, multiply, 1, kind) KERNEL(name, multiply, 2, kind) KERNEL(name, multiply, 4, kind) \
    KERNEL(name, multiply, 8, kind)
KERNELS(stored_q4_1, multiply_stored, Q4_1)
KERNELS(stored_q4_0, multiply_stored, Q4_0)
KERNELS(stored_q8_0, multiply_stored, Q8_0)
KERNELS(strip_with_minimum, multiply_strip, 1)
KERNELS(strip_without, multiply_strip, 0)

#define MAKER(name, plain)                                                                                       \
    static void name(const uint8_t *four, long bytes, const scaled_matrix *planes, long blocks, uint8_t *strip) { \
        (void)bytes, (void)planes;                                                                               \
        strip_of(four, blocks, strip, plain);                                                                    \
    }
MAKER(strip_q4_1, Q4_1)
MAKER(strip_q4_0, Q4_0)
MAKER(strip_q8_0, Q8_0)

#define BY_ROWS(name) {[1] = name##_1, [2] = name##_2, [4] = name##_4, [8] = name##_8}
const bundle_function STRIP_WITH_MINIMUM[PANEL_ROWS + 1] = BY_ROWS(strip_with_minimum);
const bundle_function STRIP_WITHOUT[PANEL_ROWS + 1] = BY_ROWS(strip_without);

static const digit_kind KINDS[LAYOUTS] = {
    [Q4_1] = {BY_ROWS(stored_q4_1), STRIP_WITH_MINIMUM, strip_q4_1, STRIP_BLOCK_BYTES, 1.0f / 16},
    [Q4_0] = {BY_ROWS(stored_q4_0), STRIP_WITHOUT, strip_q4_0, STRIP_BLOCK_BYTES, 1.0f / 16},
    [Q8_0] = {BY_ROWS(stored_q8_0), STRIP_WITHOUT, strip_q8_0, STRIP_BLOCK_BYTES, 1.0f},
};

const digit_kind *digit_kind_of(enum layout plain) {
    return is_kquant(plain) ? kquant_digits_of(plain) : KINDS + plain;
}

#endif
