/* Reads codes and scales where GGUF puts them. Every product of a scale, a small scale and a code has at most 24
 * significant bits and is exact, so that a fused addition of the minimum rounds as a separate one would. */
#include "kquants.h"

#include "vector.h"

const int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static const kquant KINDS[LAYOUTS] = {
    [Q5_0] = {32, 22, 5, 32, .offset = 16, .minimum_at = -1},
    [Q5_1] = {32, 24, 5, 32, .minimum_at = 2},
    [IQ4_NL] = {32, 18, 4, 32, .table = 1, .minimum_at = -1},
    [Q2_K] = {256, 84, 2, 16, .scale_at = 80, .minimum_at = 82, .small_bytes = 16},
    [Q3_K] = {256, 110, 3, 16, .offset = 4, .scale_at = 108, .minimum_at = -1, .small_bytes = 12},
    [Q4_K] = {256, 144, 4, 32, .minimum_at = 2, .small_bytes = 12},
    [Q5_K] = {256, 176, 5, 32, .minimum_at = 2, .small_bytes = 12},
    [Q6_K] = {256, 210, 6, 16, .offset = 32, .scale_at = 208, .minimum_at = -1, .small_bytes = 16},
    [IQ4_XS] = {256, 136, 4, 32, .table = 1, .minimum_at = -1, .small_bytes = 6},
};

const kquant *kquant_of(enum layout layout) { return KINDS + plain_layout(layout); }

/* Codes of `bits` bits: the lowest of `width` bytes one after another, then the next of the same bytes. */
ALWAYS_INLINE void spread_bits(const uint8_t *stored, int bytes, int width, int bits, int place, uint8_t *codes) {
    for (int first = 0; first < bytes; first += width) {
        for (int shift = 0; shift < 8; shift += bits, codes += width) {
            for (int i = 0; i < width; i++)
                codes[i] = (uint8_t)(codes[i] | ((stored[first + i] >> shift) & ((1 << bits) - 1)) << place);
        }
    }
}

/* Bit i of four bytes becomes bit 4 of code i; eight of them at a time. */
static void spread_fifth_bits(const uint8_t *stored, uint8_t *codes) {
    for (int byte = 0; byte < 4; byte++, codes += 8) {
        uint64_t each, bits = (stored[byte] * 0x0101010101010101u) & 0x8040201008040201u;
        bits = ((bits + 0x7F7F7F7F7F7F7F7Fu) >> 7) & 0x0101010101010101u;
        memcpy(&each, codes, sizeof each);
        each |= bits << 4;
        memcpy(codes, &each, sizeof each);
    }
}

void read_codes(enum layout plain, const uint8_t *block, uint8_t *codes) {
    memset(codes, 0, (size_t)KINDS[plain].elements);
    switch (plain) {
    case Q5_0:
    case Q5_1:
        block += plain == Q5_0 ? 2 : 4;
        spread_bits(block + 4, 16, 16, 4, 0, codes);
        spread_fifth_bits(block, codes);
        break;
    case IQ4_NL: spread_bits(block + 2, 16, 16, 4, 0, codes); break;
    case IQ4_XS: spread_bits(block + 8, 128, 16, 4, 0, codes); break;
    case Q2_K: spread_bits(block + 16, 64, 32, 2, 0, codes); break;
    case Q3_K:
        spread_bits(block + 32, 64, 32, 2, 0, codes);
        spread_bits(block, 32, 32, 1, 2, codes);
        break;
    case Q4_K: spread_bits(block + 16, 128, 32, 4, 0, codes); break;
    case Q5_K:
        spread_bits(block + 48, 128, 32, 4, 0, codes);
        spread_bits(block + 16, 32, 32, 1, 4, codes);
        break;
    default: /* Q6_K */
        spread_bits(block, 128, 64, 4, 0, codes);
        spread_bits(block + 128, 64, 32, 2, 4, codes);
    }
}

/* Six bits each; those of the last four groups are in two pieces. */
static void read_small_q4_k(const uint8_t *stored, int8_t *scales, int8_t *minimums) {
    for (int i = 0; i < 4; i++) {
        scales[i] = (int8_t)(stored[i] & 63);
        minimums[i] = (int8_t)(stored[i + 4] & 63);
        scales[i + 4] = (int8_t)((stored[i + 8] & 15) | ((stored[i] >> 2) & 48));
        minimums[i + 4] = (int8_t)((stored[i + 8] >> 4) | ((stored[i + 4] >> 2) & 48));
    }
}

void read_small(enum layout plain, const uint8_t *block, int8_t *scales, int8_t *minimums) {
    uint8_t six[KQUANT_GROUPS] = {0};
    switch (plain) {
    case Q2_K:
        for (int i = 0; i < 16; i++) {
            scales[i] = (int8_t)(block[i] & 15);
            minimums[i] = (int8_t)(block[i] >> 4);
        }
        break;
    case Q3_K:
        spread_bits(block + 96, 8, 8, 4, 0, six);
        spread_bits(block + 104, 4, 4, 2, 4, six);
        for (int i = 0; i < 16; i++) scales[i] = (int8_t)(six[i] - 32);
        break;
    case Q4_K:
    case Q5_K: read_small_q4_k(block + 4, scales, minimums); break;
    case Q6_K: memcpy(scales, block + 192, 16); break;
    case IQ4_XS:
        spread_bits(block + 4, 4, 1, 4, 0, six);
        spread_bits(block + 2, 2, 1, 2, 4, six);
        for (int i = 0; i < 8; i++) scales[i] = (int8_t)(six[i] - 32);
        break;
    default: scales[0] = 1, minimums[0] = -1; /* blocks of 32: the scale itself, and a minimum that is added */
    }
}

void fill_block(enum layout plain, const uint8_t *codes, const int8_t *small, const int8_t *small_minimums, float scale,
                float minimum, float *out) {
    const kquant *kind = KINDS + plain;
    for (int group = 0; group * kind->group < kind->elements; group++) {
        const float unit = scale * small[group];
        const float low = kind->minimum_at < 0 ? 0.0f : -(minimum * small_minimums[group]);
        const uint8_t *from = codes + group * kind->group;
        float *to = out + group * kind->group;
        if (kind->table) {
            for (int i = 0; i < kind->group; i++) to[i] = unit * IQ4_VALUES[from[i]];
        } else if (kind->minimum_at < 0) {
            for (int i = 0; i < kind->group; i++) to[i] = unit * (float)(from[i] - kind->offset);
        } else {
            for (int i = 0; i < kind->group; i++) to[i] = unit * (float)from[i] + low;
        }
    }
}

void expand_kquants(enum layout plain, const uint8_t *stored, long blocks, float *out) {
    const kquant *kind = KINDS + plain;
    uint8_t codes[KQUANT_ELEMENTS];
    int8_t small[KQUANT_GROUPS] = {0}, small_minimums[KQUANT_GROUPS] = {0};
    for (long block = 0; block < blocks; block++, stored += kind->bytes, out += kind->elements) {
        read_codes(plain, stored, codes);
        read_small(plain, stored, small, small_minimums);
        float minimum = kind->minimum_at < 0 ? 0.0f : half_to_float(stored + kind->minimum_at);
        fill_block(plain, codes, small, small_minimums, half_to_float(stored + kind->scale_at), minimum, out);
    }
}
