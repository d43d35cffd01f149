/* Woven blocks of the denser kinds read into vectors: codes as signed bytes, scales as floats. Everything is inlined with
 * a constant kind. Needs Arm's vectors; the order of the bytes is kquant_weave.h's. */
#ifndef HOLDFAST_KQUANT_LANES_H
#define HOLDFAST_KQUANT_LANES_H

#include "kquant_weave.h"
#include "vector.h"

/* What a kind is, as constants where it is inlined. */
ALWAYS_INLINE int blocks_of_32(enum layout plain) { return plain == Q5_0 || plain == Q5_1 || plain == IQ4_NL; }
ALWAYS_INLINE int short_groups(enum layout plain) { return plain == Q2_K || plain == Q3_K || plain == Q6_K; }
ALWAYS_INLINE int with_minimum(enum layout plain) {
    return plain == Q5_1 || plain == Q2_K || plain == Q4_K || plain == Q5_K;
}
ALWAYS_INLINE int code_bytes(enum layout plain) {
    switch (plain) {
    case Q5_0:
    case Q5_1:
    case Q5_K: return 80;
    case Q6_K: return 96;
    case Q3_K: return 48;
    case Q2_K: return 32;
    default: return 64;
    }
}
ALWAYS_INLINE int head_bytes(enum layout plain) {
    switch (plain) {
    case Q5_0:
    case IQ4_NL: return 8;
    case Q5_1: return 16;
    case Q2_K: return 80;
    case Q3_K: return 56;
    case Q6_K: return 72;
    case IQ4_XS: return 32;
    default: return 64;
    }
}

/* The signed bytes of 32 columns. Six bits come out four times as large, their lower bits being zero. */
ALWAYS_INLINE void load_codes(const uint8_t *part, enum layout plain, int8x16_t *q) {
    const int bits = plain == Q6_K ? 6 : (plain == Q5_0 || plain == Q5_1 || plain == Q5_K ? 5
                                          : (plain == Q3_K ? 3 : (plain == Q2_K ? 2 : 4)));
    const uint8x16_t low = vdupq_n_u8(15), two = vdupq_n_u8(3), upper = vdupq_n_u8(0xF0);
    if (bits < 4) {
        const uint8x16_t singles = bits == 3 ? vld1q_u8(part + 32) : low;
        UNROLL for (int v = 0; v < 8; v++) {
            uint8x16_t crumbs = vshlq_u8(vld1q_u8(part + v / 4 * 16), vdupq_n_s8((int8_t)(-2 * (v % 4))));
            /* The upper six bits are the sign. */
            if (bits == 3) q[v] = vreinterpretq_s8_u8(vsliq_n_u8(crumbs, vtstq_u8(singles, vdupq_n_u8(1 << v)), 2));
            else q[v] = vreinterpretq_s8_u8(vandq_u8(crumbs, two));
        }
        return;
    }
    const int8x16_t table = vld1q_s8(IQ4_VALUES);
    const uint8x16_t singles = bits == 5 ? vld1q_u8(part + 64) : low;
    UNROLL for (int i = 0; i < 4; i++) {
        uint8x16_t both = vld1q_u8(part + 16 * i);
        if (bits == 5) {
            /* The upper half of a byte is the sign. */
            q[i] = vreinterpretq_s8_u8(vsliq_n_u8(both, vtstq_u8(singles, vdupq_n_u8(1 << i)), 4));
            q[i + 4] = vreinterpretq_s8_u8(vsriq_n_u8(vtstq_u8(singles, vdupq_n_u8(16 << i)), both, 4));
        } else if (bits == 6) {
            uint8x16_t first = vshlq_u8(vld1q_u8(part + 64), vdupq_n_s8((int8_t)(6 - 2 * i)));
            uint8x16_t second = vshlq_u8(vld1q_u8(part + 80), vdupq_n_s8((int8_t)(6 - 2 * i)));
            q[i] = vreinterpretq_s8_u8(vsriq_n_u8(first, vshlq_n_u8(both, 4), 2));
            q[i + 4] = vreinterpretq_s8_u8(vsriq_n_u8(second, vandq_u8(both, upper), 2));
        } else if (plain == Q4_K) {
            q[i] = vreinterpretq_s8_u8(vandq_u8(both, low));
            q[i + 4] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        } else {
            q[i] = vqtbl1q_s8(table, vandq_u8(both, low));
            q[i + 4] = vqtbl1q_s8(table, vshrq_n_u8(both, 4));
        }
    }
}

ALWAYS_INLINE float32x4_t four_scales(const uint8_t *stored) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(stored)));
}

/* Sixteen signed bytes, four of each group, times four units. */
ALWAYS_INLINE void put_units(int8x16_t bytes, float32x4_t unit, float *out) {
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    vst1q_f32(out, vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), unit));
    vst1q_f32(out + 4, vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))), unit));
    vst1q_f32(out + 8, vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), unit));
    vst1q_f32(out + 12, vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(high))), unit));
}

ALWAYS_INLINE void six_bits(const uint8_t *stored, int8x16_t *numbers) {
    uint8x16_t part[3], mask = vdupq_n_u8(63);
    UNROLL for (int i = 0; i < 3; i++) {
        part[i] = vld1q_u8(stored + 16 * i);
        numbers[i] = vreinterpretq_s8_u8(vandq_u8(part[i], mask));
    }
    uint8x16_t rest = vshrq_n_u8(part[0], 6);
    rest = vorrq_u8(rest, vandq_u8(vshrq_n_u8(part[1], 4), vdupq_n_u8(12)));
    numbers[3] = vreinterpretq_s8_u8(vorrq_u8(rest, vandq_u8(vshrq_n_u8(part[2], 2), vdupq_n_u8(48))));
}

/* Small scales of IQ4_XS, eight groups of four. */
ALWAYS_INLINE void iq4_bits(const uint8_t *stored, int8x16_t *numbers) {
    uint8x16_t both = vld1q_u8(stored), low = vdupq_n_u8(15), two = vdupq_n_u8(0x30);
    uint8x8_t quarters = vld1_u8(stored + 16);
    uint8x16_t first = vcombine_u8(vshl_n_u8(quarters, 4), vshl_n_u8(quarters, 2));
    uint8x16_t second = vcombine_u8(quarters, vshr_n_u8(quarters, 2));
    int8x16_t raised = vdupq_n_s8(32);
    numbers[0] = vsubq_s8(vreinterpretq_s8_u8(vorrq_u8(vandq_u8(both, low), vandq_u8(first, two))), raised);
    numbers[1] = vsubq_s8(vreinterpretq_s8_u8(vorrq_u8(vshrq_n_u8(both, 4), vandq_u8(second, two))), raised);
}

/* Scales and what is added of every group of a block, [group][output]; `stored` is where the block begins. */
ALWAYS_INLINE void load_scales(const uint8_t *stored, enum layout plain, float *scales, float *added) {
    float32x4_t unit = four_scales(stored);
    int8x16_t small[4];
    if (plain == Q5_0 || plain == IQ4_NL) {
        vst1q_f32(scales, unit);
    } else if (plain == Q5_1) {
        vst1q_f32(scales, unit);
        vst1q_f32(added, vfmaq_n_f32(four_scales(stored + 8), unit, 16.0f));
    } else if (plain == Q4_K || plain == Q5_K) {
        float32x4_t low = vnegq_f32(four_scales(stored + 8));
        six_bits(stored + 16, small);
        UNROLL for (int i = 0; i < 2; i++) put_units(small[i], unit, scales + 16 * i);
        UNROLL for (int i = 0; i < 2; i++) put_units(small[i + 2], low, added + 16 * i);
        if (plain == Q5_K) {
            UNROLL for (int i = 0; i < 32; i += 4)
                vst1q_f32(added + i, vfmaq_n_f32(vld1q_f32(added + i), vld1q_f32(scales + i), 16.0f));
        }
    } else if (plain == Q2_K) {
        float32x4_t low = vnegq_f32(four_scales(stored + 8));
        UNROLL for (int i = 0; i < 4; i++) {
            uint8x16_t both = vld1q_u8(stored + 16 + 16 * i);
            put_units(vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), unit, scales + 16 * i);
            put_units(vreinterpretq_s8_u8(vshrq_n_u8(both, 4)), low, added + 16 * i);
        }
    } else if (plain == Q3_K) {
        six_bits(stored + 8, small);
        UNROLL for (int i = 0; i < 4; i++) put_units(vsubq_s8(small[i], vdupq_n_s8(32)), unit, scales + 16 * i);
    } else if (plain == Q6_K) {
        unit = vmulq_n_f32(unit, 0.25f);
        UNROLL for (int i = 0; i < 4; i++) put_units(vld1q_s8((const int8_t *)stored + 8 + 16 * i), unit, scales + 16 * i);
    } else {
        iq4_bits(stored + 8, small);
        UNROLL for (int i = 0; i < 2; i++) put_units(small[i], unit, scales + 16 * i);
    }
}

#endif
