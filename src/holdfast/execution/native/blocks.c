/* Turns stored blocks into floats. A scale has 11 significant bits and a quant at most 8, so their product is exact
 * and a fused multiply-add rounds as a multiplication and an addition would. */
#include "blocks.h"

#include "vector.h"

typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef int8_t signed16 __attribute__((vector_size(16)));
typedef uint16_t short16 __attribute__((vector_size(32)));
typedef uint32_t word16 __attribute__((vector_size(64)));
typedef _Float16 half16 __attribute__((vector_size(32)));
typedef float float16 __attribute__((vector_size(64)));

static const int BYTES_OF_32[LAYOUTS] = {
    [F32] = 128, [F16] = 64, [BF16] = 64, [Q8_0] = 34, [Q4_0] = 18, [Q4_1] = 20,
};

int block_bytes(enum layout layout) { return BYTES_OF_32[layout]; }

ALWAYS_INLINE void store16(float *out, float16 value) { memcpy(out, &value, sizeof value); }

static void expand_q4(const uint8_t *stored, long blocks, int with_minimum, float *out) {
    int header = with_minimum ? 4 : 2;
    for (long block = 0; block < blocks; block++, stored += header + 16, out += BLOCK_ELEMENTS) {
        float scale = half_to_float(stored);
        float minimum = with_minimum ? half_to_float(stored + 2) : -8.0f * scale;
        bytes16 packed;
        memcpy(&packed, stored + header, sizeof packed);
        store16(out, __builtin_convertvector(packed & 15, float16) * scale + minimum);
        store16(out + 16, __builtin_convertvector(packed >> 4, float16) * scale + minimum);
    }
}

static void expand_q8(const uint8_t *stored, long blocks, float *out) {
    for (long block = 0; block < blocks; block++, stored += 34, out += BLOCK_ELEMENTS) {
        float scale = half_to_float(stored);
        signed16 quants[2];
        memcpy(quants, stored + 2, sizeof quants);
        store16(out, __builtin_convertvector(quants[0], float16) * scale);
        store16(out + 16, __builtin_convertvector(quants[1], float16) * scale);
    }
}

static void expand_f16(const uint8_t *stored, long blocks, float *out) {
    for (long part = 0; part < 2 * blocks; part++, stored += 32, out += 16) {
        half16 halves;
        memcpy(&halves, stored, sizeof halves);
        store16(out, __builtin_convertvector(halves, float16));
    }
}

static void expand_bf16(const uint8_t *stored, long blocks, float *out) {
    for (long part = 0; part < 2 * blocks; part++, stored += 32, out += 16) {
        short16 halves;
        memcpy(&halves, stored, sizeof halves);
        store16(out, (float16)(__builtin_convertvector(halves, word16) << 16));
    }
}

void expand_blocks(enum layout layout, const uint8_t *stored, long blocks, float *out) {
    switch (layout) {
    case Q4_0: expand_q4(stored, blocks, 0, out); break;
    case Q4_1: expand_q4(stored, blocks, 1, out); break;
    case Q8_0: expand_q8(stored, blocks, out); break;
    case F16: expand_f16(stored, blocks, out); break;
    case BF16: expand_bf16(stored, blocks, out); break;
    default: memcpy(out, stored, (size_t)blocks * 128);
    }
}
