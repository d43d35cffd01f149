/* How woven planes (scaled.h) are multiplied on Arm with panels of x: codes that are signed bytes once their zero is taken
 * off (INT4, INT8, MXFP4), by the dot products of GGUF's blocks. Others are not woven there. */
#include "digits.h"

#if defined(ARM_DIGITS)

#include "plane_scales.h"

#define AHEAD 1536 /* bytes of weights that are asked for early */

ALWAYS_INLINE int code_bytes(enum layout plain) { return BUNDLE * (plain == INT8_PLANES ? 32 : 16); }

ALWAYS_INLINE float32x4_t group_scales(const bundle_scales *from, long group) {
    uint8_t copies[4 * BUNDLE];
    const uint8_t *stored = stored_scales(from, group, copies);
    switch (from->type) {
    case HALF_SCALES: return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(stored)));
    case BFLOAT_SCALES: return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(stored)), 16));
    case POWER_SCALES: {
        /* 2 ^ (stored - 127), halved: codes are twice what they stand for. */
        const uint32x4_t power = {stored[0], stored[1], stored[2], stored[3]};
        const uint32x4_t bits = (power << 23) | ((uint32x4_t)(power == 0) & 0x00400000u);
        return vmulq_n_f32(vreinterpretq_f32_u32(bits), 0.5f);
    }
    default: return vld1q_f32((const float *)stored);
    }
}

/* What stands for 0 in the four columns of every output. */
ALWAYS_INLINE int8x16_t group_zeros(const bundle_scales *from, long group, enum layout plain) {
    if (plain != INT4_ZERO_PLANES) return vdupq_n_s8(8);
    const uint8_t *stored = from->zeros + group * BUNDLE;
    const uint32x4_t zeros = {stored[0], stored[1], stored[2], stored[3]};
    return vreinterpretq_s8_u32(zeros * 0x01010101u);
}

/* The signed bytes of 32 columns. */
ALWAYS_INLINE void load_codes(const uint8_t *stored, enum layout plain, int8x16_t zeros, int8x16_t *q) {
    if (plain == INT8_PLANES) {
        UNROLL for (int i = 0; i < 8; i++) q[i] = vld1q_s8((const int8_t *)stored + 16 * i);
        return;
    }
    const int8x16_t table = vld1q_s8(MXFP4_DOUBLED);
    UNROLL for (int i = 0; i < 4; i++) {
        const uint8x16_t both = vld1q_u8(stored + 16 * i), low = vandq_u8(both, vdupq_n_u8(15)), high = vshrq_n_u8(both, 4);
        q[i] = plain == MXFP4_PLANES ? vqtbl1q_s8(table, low) : vsubq_s8(vreinterpretq_s8_u8(low), zeros);
        q[i + 4] = plain == MXFP4_PLANES ? vqtbl1q_s8(table, high) : vsubq_s8(vreinterpretq_s8_u8(high), zeros);
    }
}

/* From where the codes lie. */
ALWAYS_INLINE void multiply_planes(const uint8_t *four, long bundle_bytes, const scaled_matrix *planes, const uint8_t *x,
                                   long blocks, float32x4_t *totals, int rows, enum layout plain) {
    const bundle_scales scales = scales_of(planes, four, bundle_bytes);
    float32x4_t total[PANEL_ROWS];
    UNROLL for (int r = 0; r < rows; r++) total[r] = vdupq_n_f32(0);
    for (long block = 0, group = 0; block < blocks; group++) {
        const float32x4_t scale = group_scales(&scales, group);
        const int8x16_t zeros = group_zeros(&scales, group, plain);
        const long last = block + scales.group_blocks;
        for (; block < last; block++, four += code_bytes(plain), x += panel_block_bytes(rows)) {
            int8x16_t q[8];
            int32x4_t sum[PANEL_ROWS];
            /* Prefetching past the end harms nobody. */
            UNROLL for (int line = 0; line < code_bytes(plain); line += 64) __builtin_prefetch(four + AHEAD + line);
            load_codes(four, plain, zeros, q);
            block_sums((const int8_t *)x, q, rows, sum);
            add_block(x, sum, scale, vdupq_n_f32(0), rows, 0, total);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) totals[r] = total[r];
}

/* As strips.c has them. */
ALWAYS_INLINE void strip_of_planes(const uint8_t *four, long bundle_bytes, const scaled_matrix *planes, long blocks,
                                   uint8_t *strip, enum layout plain) {
    const bundle_scales scales = scales_of(planes, four, bundle_bytes);
    for (long block = 0; block < blocks; block++, four += code_bytes(plain), strip += STRIP_BLOCK_BYTES) {
        const long group = block / scales.group_blocks;
        int8x16_t q[8];
        load_codes(four, plain, group_zeros(&scales, group, plain), q);
        vst1q_f32((float *)strip, group_scales(&scales, group));
        vst1q_f32((float *)strip + BUNDLE, vdupq_n_f32(0));
        UNROLL for (int i = 0; i < 8; i++) vst1q_s8((int8_t *)strip + STRIP_HEADS + 16 * i, q[i]);
    }
}

/* A function for each kind and number of rows, so that each keeps what it needs in registers. */
#define KERNEL(plain, rows)                                                                                      \
    static void plain##_##rows(const uint8_t *four, long bundle_bytes, int wide, const scaled_matrix *planes,    \
                               const uint8_t *x, long blocks, int count, float32x4_t *totals) {                  \
        (void)wide, (void)count;                                                                                 \
        multiply_planes(four, bundle_bytes, planes, x, blocks, totals, rows, plain);                             \
    }
#define KIND(plain)                                                                                              \
    KERNEL(plain, 1) KERNEL(plain, 2) KERNEL(plain, 4) KERNEL(plain, 8)                                          \
    static void strip_##plain(const uint8_t *four, long bundle_bytes, const scaled_matrix *planes, long blocks,  \
                              uint8_t *strip) {                                                                  \
        strip_of_planes(four, bundle_bytes, planes, blocks, strip, plain);                                       \
    }                                                                                                            \
    static const digit_kind plain##_KIND = {                                                                     \
        .few = {[1] = plain##_1, [2] = plain##_2, [4] = plain##_4, [8] = plain##_8},                             \
        .many = STRIP_WITHOUT,                                                                                   \
        .make_strip = strip_##plain,                                                                             \
        .strip_block_bytes = STRIP_BLOCK_BYTES,                                                                  \
        .quant_worth = 1.0f,                                                                                     \
    };
KIND(INT4_PLANES) KIND(INT4_ZERO_PLANES) KIND(INT8_PLANES) KIND(MXFP4_PLANES)

const digit_kind *planes_digits_of(const scaled_matrix *planes) {
    switch ((enum code_type)planes->code_type) {
    case INT4_CODES: return planes->zeros != 0 ? &INT4_ZERO_PLANES_KIND : &INT4_PLANES_KIND;
    case INT8_CODES: return &INT8_PLANES_KIND;
    default: return &MXFP4_PLANES_KIND;
    }
}

#endif
