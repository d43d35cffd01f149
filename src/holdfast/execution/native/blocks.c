/* Turns stored blocks into floats. A scale has 11 significant bits and a quant at most 8, so their product is exact
 * and a fused multiply-add rounds as a multiplication and an addition would. */
#include "blocks.h"

#include "kquants.h"
#include "plain_numbers.h"

#if !defined(__aarch64__)
typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef int8_t signed16 __attribute__((vector_size(16)));
#endif
typedef float float16 __attribute__((vector_size(64)));

static const int BYTES_OF_32[LAYOUTS] = {
    [F32] = 128,       [F16] = 64,        [BF16] = 64,       [Q8_0] = 34,  [Q4_0] = 18,
    [Q4_1] = 20,       [Q8_0_WOVEN] = 34, [Q4_0_WOVEN] = 18, [Q4_1_WOVEN] = 20,
};

int block_bytes(enum layout layout) { return is_kquant(layout) ? kquant_of(layout)->bytes : BYTES_OF_32[layout]; }

int block_elements(enum layout layout) { return is_kquant(layout) ? kquant_of(layout)->elements : BLOCK_ELEMENTS; }

ALWAYS_INLINE void store16(float *out, float16 value) { memcpy(out, &value, sizeof value); }

#if defined(__aarch64__)

/* Sixteen quants, looked up as the two upper bytes of the float each one is: cheaper here than widening and converting.
 * A whole number of at most 8 bits has no bits below those two bytes. */
ALWAYS_INLINE void put_nibbles(uint8x16_t nibbles, float32x4_t scale, float32x4_t minimum, float *out) {
    static const uint8_t UPPER[16] = {0x00, 0x3F, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40,
                                      0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41};
    static const uint8_t LOWER[16] = {0x00, 0x80, 0x00, 0x40, 0x80, 0xA0, 0xC0, 0xE0,
                                      0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70};
    uint8x16_t upper = vqtbl1q_u8(vld1q_u8(UPPER), nibbles), lower = vqtbl1q_u8(vld1q_u8(LOWER), nibbles);
    uint16x8_t zero = vdupq_n_u16(0), first = vreinterpretq_u16_u8(vzip1q_u8(lower, upper));
    uint16x8_t second = vreinterpretq_u16_u8(vzip2q_u8(lower, upper));
    vst1q_f32(out, vfmaq_f32(minimum, vreinterpretq_f32_u16(vzip1q_u16(zero, first)), scale));
    vst1q_f32(out + 4, vfmaq_f32(minimum, vreinterpretq_f32_u16(vzip2q_u16(zero, first)), scale));
    vst1q_f32(out + 8, vfmaq_f32(minimum, vreinterpretq_f32_u16(vzip1q_u16(zero, second)), scale));
    vst1q_f32(out + 12, vfmaq_f32(minimum, vreinterpretq_f32_u16(vzip2q_u16(zero, second)), scale));
}

ALWAYS_INLINE void put_halves(const uint8_t *packed, float scale, float minimum, float *out) {
    uint8x16_t both = vld1q_u8(packed);
    put_nibbles(vandq_u8(both, vdupq_n_u8(15)), vdupq_n_f32(scale), vdupq_n_f32(minimum), out);
    put_nibbles(vshrq_n_u8(both, 4), vdupq_n_f32(scale), vdupq_n_f32(minimum), out + 16);
}

/* Sixteen signed bytes: 2^23 + 128 + q is written into the bits of a float, and 2^23 + 128 taken off again. */
ALWAYS_INLINE void put_bytes(const uint8_t *stored, float scale, float *out) {
    const float offset = 8388736.0f;
    uint8x16_t quants = veorq_u8(vld1q_u8(stored), vdupq_n_u8(0x80)), zero = vdupq_n_u8(0);
    uint16x8_t top = vdupq_n_u16(0x4B00), first = vreinterpretq_u16_u8(vzip1q_u8(quants, zero));
    uint16x8_t second = vreinterpretq_u16_u8(vzip2q_u8(quants, zero));
    float32x4_t off = vdupq_n_f32(offset);
    vst1q_f32(out, vmulq_n_f32(vsubq_f32(vreinterpretq_f32_u16(vzip1q_u16(first, top)), off), scale));
    vst1q_f32(out + 4, vmulq_n_f32(vsubq_f32(vreinterpretq_f32_u16(vzip2q_u16(first, top)), off), scale));
    vst1q_f32(out + 8, vmulq_n_f32(vsubq_f32(vreinterpretq_f32_u16(vzip1q_u16(second, top)), off), scale));
    vst1q_f32(out + 12, vmulq_n_f32(vsubq_f32(vreinterpretq_f32_u16(vzip2q_u16(second, top)), off), scale));
}

#else

ALWAYS_INLINE void put_halves(const uint8_t *packed, float scale, float minimum, float *out) {
    bytes16 both;
    memcpy(&both, packed, sizeof both);
    store16(out, __builtin_convertvector(both & 15, float16) * scale + minimum);
    store16(out + 16, __builtin_convertvector(both >> 4, float16) * scale + minimum);
}

ALWAYS_INLINE void put_bytes(const uint8_t *stored, float scale, float *out) {
    signed16 quants;
    memcpy(&quants, stored, sizeof quants);
    store16(out, __builtin_convertvector(quants, float16) * scale);
}

#endif

static void expand_q4(const uint8_t *stored, long blocks, int with_minimum, float *out) {
    int header = with_minimum ? 4 : 2;
    for (long block = 0; block < blocks; block++, stored += header + 16, out += BLOCK_ELEMENTS) {
        float scale = half_to_float(stored);
        float minimum = with_minimum ? half_to_float(stored + 2) : -8.0f * scale;
        put_halves(stored + header, scale, minimum, out);
    }
}

static void expand_q8(const uint8_t *stored, long blocks, float *out) {
    for (long block = 0; block < blocks; block++, stored += 34, out += BLOCK_ELEMENTS) {
        float scale = half_to_float(stored);
        put_bytes(stored + 2, scale, out);
        put_bytes(stored + 18, scale, out + 16);
    }
}

ALWAYS_INLINE void expand_numbers(const uint8_t *stored, long blocks, enum layout layout, float *out) {
    for (long i = 0; i < blocks * BLOCK_ELEMENTS; i += LANES) store(out + i, load_numbers(stored, i, layout));
}

void expand_blocks(enum layout layout, const uint8_t *stored, long blocks, float *out) {
    switch (layout) {
    case Q4_0: expand_q4(stored, blocks, 0, out); break;
    case Q4_1: expand_q4(stored, blocks, 1, out); break;
    case Q8_0: expand_q8(stored, blocks, out); break;
    case F16: expand_numbers(stored, blocks, F16, out); break;
    case BF16: expand_numbers(stored, blocks, BF16, out); break;
    case F32: memcpy(out, stored, (size_t)blocks * 128); break;
    default: expand_kquants(layout, stored, blocks, out);
    }
}
