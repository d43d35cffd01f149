/* Woven blocks read into vectors on x86: codes as unsigned bytes, scales as floats. Everything is inlined with a
 * constant kind; the order of the bytes is weave.h's and kquant_weave.h's. */
#ifndef HOLDFAST_X86_CODES_H
#define HOLDFAST_X86_CODES_H

#include "kquant_weave.h"
#include "scaled.h"

#define VECTOR_BYTES (4 * LANES)

typedef uint8_t bytes_vec __attribute__((vector_size(VECTOR_BYTES)));
typedef int8_t signed_bytes __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t pairs_vec __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t placed_bytes __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));

ALWAYS_INLINE bytes_vec load_bytes(const uint8_t *from) { return *(const placed_bytes *)from; }

/* What a kind is, as constants where it is inlined. */
ALWAYS_INLINE int blocks_of_32(enum layout plain) { return plain < Q2_K; }
#define SHORT_GROUPS(plain) ((plain) == Q2_K || (plain) == Q3_K || (plain) == Q6_K)
ALWAYS_INLINE int short_groups(enum layout plain) { return SHORT_GROUPS(plain); }
ALWAYS_INLINE int with_minimum(enum layout plain) {
    return plain == Q4_1 || plain == Q5_1 || plain == Q2_K || plain == Q4_K || plain == Q5_K;
}
ALWAYS_INLINE int with_zeros(enum layout plain) { return plain == INT4_ZERO_PLANES || plain == INT8_ZERO_PLANES; }
ALWAYS_INLINE int bits_of(enum layout plain) {
    switch (plain) {
    case INT8_PLANES:
    case INT8_ZERO_PLANES:
    case Q8_0: return 8;
    case Q6_K: return 6;
    case Q5_0:
    case Q5_1:
    case Q5_K: return 5;
    case Q3_K: return 3;
    case Q2_K: return 2;
    default: return 4;
    }
}
/* What stands for 0; where that is a zero point of its own, what it is multiplied with. */
#define OFFSET(plain)                                                                        \
    ((plain) == INT4_ZERO_PLANES || (plain) == INT8_ZERO_PLANES ? 1                          \
     : (plain) == INT8_PLANES                                  ? 128                         \
     : (plain) == INT4_PLANES                                  ? 8                           \
     : (plain) == MXFP4_PLANES                                 ? 12                          \
     : (plain) == Q8_0 || (plain) == IQ4_NL || (plain) == IQ4_XS ? 128                         \
     : (plain) == Q6_K                                         ? 32                          \
     : (plain) == Q5_0 || (plain) == Q5_1 || (plain) == Q5_K   ? 16                          \
     : (plain) == Q4_0 || (plain) == Q4_1                      ? 8                           \
     : (plain) == Q3_K                                         ? 4                           \
                                                               : 0)
ALWAYS_INLINE int offset_of(enum layout plain) { return OFFSET(plain); }
/* Of 32 columns. */
ALWAYS_INLINE int code_bytes(enum layout plain) { return bits_of(plain) * VECTOR_BYTES; }
ALWAYS_INLINE int head_bytes(enum layout plain) {
    const int small = plain == Q2_K || plain == Q6_K ? 16 : (plain == IQ4_XS ? 6 : 12);
    return BUNDLE * (2 + 2 * with_minimum(plain) + (blocks_of_32(plain) ? 0 : small));
}

/* In bytes, by as much as no bit that is wanted later leaves its byte. */
ALWAYS_INLINE bytes_vec shifted_left(bytes_vec bytes, int by) {
    return by >= 0 ? (bytes_vec)((pairs_vec)bytes << by) : (bytes_vec)((pairs_vec)bytes >> -by);
}

/* Codes looked up in a table of signed bytes, raised by what stands for 0. */
ALWAYS_INLINE bytes_vec table_values(bytes_vec codes, const int8_t *values, int offset) {
    __m128i table = _mm_loadu_si128((const __m128i *)values);
    table = _mm_add_epi8(table, _mm_set1_epi8((char)offset));
#if LANES == 16
    return (bytes_vec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#else
    return (bytes_vec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes);
#endif
}

/* Vector `v` of the eight that 32 columns have. */
ALWAYS_INLINE bytes_vec load_codes(const uint8_t *part, enum layout plain, int v) {
    const int bits = bits_of(plain);
    if (bits == 8) return load_bytes(part + v * VECTOR_BYTES);
    const uint8_t *crumbs = part + (bits >= 4 ? 4 * VECTOR_BYTES : 0) + v / 4 * VECTOR_BYTES;
    bytes_vec codes;
    if (bits >= 4)
        codes = shifted_left(load_bytes(part + v % 4 * VECTOR_BYTES), v < 4 ? 0 : -4) & 15;
    else
        codes = shifted_left(load_bytes(crumbs), -2 * (v % 4)) & 3;
    if (bits == 6) codes |= shifted_left(load_bytes(crumbs), 4 - 2 * (v % 4)) & 0x30;
    if (bits == 5) codes |= shifted_left(load_bytes(part + 4 * VECTOR_BYTES), 4 - v) & 0x10;
    if (bits == 3) codes |= shifted_left(load_bytes(part + 2 * VECTOR_BYTES), 2 - v) & 4;
    if (plain == IQ4_NL || plain == IQ4_XS) return table_values(codes, IQ4_VALUES, 128);
    return plain == MXFP4_PLANES ? table_values(codes, MXFP4_DOUBLED, 12) : codes;
}

ALWAYS_INLINE vec load_halves(const uint8_t *stored) {
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)stored));
#else
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)stored));
#endif
}

/* A byte of each row. */
ALWAYS_INLINE ivec load_small(const uint8_t *stored) {
#if LANES == 16
    return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)stored));
#else
    return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)stored));
#endif
}

ALWAYS_INLINE vec times(ivec small, vec unit) { return __builtin_convertvector(small, vec) * unit; }

/* Number `place` of sixteen of six bits. */
ALWAYS_INLINE ivec six_bits(const uint8_t *stored, int place) {
    const uint8_t *from = stored + BUNDLE * place;
    if (place < 12) return load_small(from) & 63;
    return load_small(from - 12 * BUNDLE) >> 6 | (load_small(from - 8 * BUNDLE) >> 6) << 2 |
           (load_small(from - 4 * BUNDLE) >> 6) << 4;
}

/* Scale and what is added of every group of a block; `stored` is where the block begins. */
ALWAYS_INLINE void load_scales(const uint8_t *stored, enum layout plain, vec *scales, vec *added) {
    const uint8_t *small = stored + BUNDLE * (with_minimum(plain) ? 4 : 2);
    const vec unit = load_halves(stored);
    vec low = {0};
    if (with_minimum(plain)) low = load_halves(stored + 2 * BUNDLE);
    if (blocks_of_32(plain)) {
        scales[0] = unit;
        if (with_minimum(plain)) added[0] = low + unit * (float)offset_of(plain);
    } else if (plain == Q4_K || plain == Q5_K) {
        UNROLL for (int group = 0; group < 8; group++) {
            scales[group] = times(six_bits(small, group), unit);
            added[group] = times(six_bits(small, group + 8), -low);
            if (plain == Q5_K) added[group] += scales[group] * 16.0f;
        }
    } else if (plain == IQ4_XS) {
        const uint8_t *upper = small + VECTOR_BYTES;
        UNROLL for (int group = 0; group < 8; group++) {
            ivec lower = load_small(small + group % 4 * BUNDLE) >> (group / 4 * 4) & 15;
            ivec two = load_small(upper + group % 2 * BUNDLE) >> (group / 2 * 2) & 3;
            scales[group] = times((lower | two << 4) - 32, unit);
        }
    } else {
        UNROLL for (int group = 0; group < 16; group++) {
            if (plain == Q3_K) {
                scales[group] = times(six_bits(small, group) - 32, unit);
            } else if (plain == Q6_K) {
                scales[group] = times(load_small(small + BUNDLE * group) << 24 >> 24, unit);
            } else {
                ivec both = load_small(small + BUNDLE * group);
                scales[group] = times(both & 15, unit);
                added[group] = times(both >> 4, -low);
            }
        }
    }
}

#endif
