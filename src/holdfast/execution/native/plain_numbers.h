/* Stored numbers that are not quantized, widened to vectors of floats. Everything is inlined with a constant layout. */
#ifndef HOLDFAST_PLAIN_NUMBERS_H
#define HOLDFAST_PLAIN_NUMBERS_H

#include "blocks.h"
#include "vector.h"

typedef uint16_t placed_shorts __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
typedef uint32_t words_vec __attribute__((vector_size(4 * LANES)));
#if !defined(__F16C__)
typedef _Float16 placed_halves __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
#endif

ALWAYS_INLINE int is_plain(enum layout layout) { return layout == F32 || layout == F16 || layout == BF16; }

/* LANES numbers, the first of them number `place` of those that begin at `stored`. */
ALWAYS_INLINE vec load_numbers(const uint8_t *stored, long place, enum layout layout) {
    if (layout == F32) return load((const float *)stored + place);
    stored += 2 * place;
    if (layout == BF16) return (vec)(__builtin_convertvector(*(const placed_shorts *)stored, words_vec) << 16);
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)stored));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)stored));
#else
    return __builtin_convertvector(*(const placed_halves *)stored, vec);
#endif
}

#endif
