/* The sums that kernels of x86 have in common (x86_dots.c, x86_planes.c): columns of one group of woven codes, times rows
 * of x in whole numbers, added to totals in floats. Everything is inlined with a constant kind. */
#ifndef HOLDFAST_X86_SUMS_H
#define HOLDFAST_X86_SUMS_H

#include "digits.h"
#include "x86_codes.h"

#define AHEAD 2048 /* bytes of weights that are asked for early */
#define PAIRS 16   /* vectors of 32 columns, two columns of each output in each */

/* Sums of one output that are built side by side, because each waits for its last. */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define CHAINS(sums) ((sums) == 1 ? 4 : ((sums) <= 8 ? 2 : 1))
#else
#define CHAINS(sums) 1
#endif

ALWAYS_INLINE ivec spread_word(int32_t value) { return value - (ivec){0}; }

/* A pair of numbers of x for all outputs. */
ALWAYS_INLINE ivec load_pair(const uint8_t *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return spread_word(pair);
}

ALWAYS_INLINE ivec add_pairs(ivec sum, pairs_vec quants, ivec x) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)quants, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (ivec)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)quants, (__m256i)x);
#elif defined(__AVX512BW__)
    return sum + (ivec)_mm512_madd_epi16((__m512i)quants, (__m512i)x);
#else
    return sum + (ivec)_mm256_madd_epi16((__m256i)quants, (__m256i)x);
#endif
}

/* Pairs 2v and 2v + 1: of stored codes, or of those laid out before. */
ALWAYS_INLINE void load_pairs(const uint8_t *part, enum layout plain, int laid_out, int v, pairs_vec *pairs) {
    if (laid_out) {
        pairs[0] = ((const pairs_vec *)part)[2 * v];
        pairs[1] = ((const pairs_vec *)part)[2 * v + 1];
        return;
    }
    const pairs_vec codes = (pairs_vec)load_codes(part, plain, v);
    pairs[0] = codes & 0xFF;
    pairs[1] = codes >> 8;
}

/* 32 columns of the weights of a bundle. */
typedef struct {
    const uint8_t *codes; /* as stored, or laid out */
    const vec *scales, *added;
    ivec zeros; /* where codes have zero points */
} weights_part;

/* Adds the columns of one group, vectors first..last-1 of the eight, to the totals of every bundle and row. */
ALWAYS_INLINE void add_group(const weights_part *parts, int wide, enum layout plain, int laid_out, int first, int last,
                             const uint8_t *x, const row_head *heads, int minimum, int rows, vec (*total)[8]) {
    const int chains = CHAINS(rows * wide), group = first / 4;
    ivec sum[BUNDLES_AT_ONCE][8][4];
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int b = 0; b < wide; b++) {
            sum[b][r][0] = offset_of(plain) == 0 ? (ivec){0} : spread_word(heads[r].starts[group]);
            if (with_zeros(plain)) sum[b][r][0] *= parts[b].zeros;
            UNROLL for (int chain = 1; chain < chains; chain++) sum[b][r][chain] = (ivec){0};
        }
    }
    UNROLL for (int v = first; v < last; v++) {
        pairs_vec pairs[BUNDLES_AT_ONCE][2];
        UNROLL for (int b = 0; b < wide; b++) load_pairs(parts[b].codes, plain, laid_out, v, pairs[b]);
        UNROLL for (int i = 0; i < 2; i++) {
            const int chain = (2 * v + i) % chains;
            UNROLL for (int r = 0; r < rows; r++) {
                const ivec numbers = load_pair(x + 2 * BLOCK_ELEMENTS * r + 4 * (2 * v + i));
                UNROLL for (int b = 0; b < wide; b++)
                    sum[b][r][chain] = add_pairs(sum[b][r][chain], pairs[b][i], numbers);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int b = 0; b < wide; b++) {
            ivec *sums = sum[b][r];
            if (chains == 4) sums[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            if (chains == 2) sums[0] += sums[1];
            const vec worth = parts[b].scales[group] * heads[r].scale;
            total[b][r] += __builtin_convertvector(sums[0], vec) * worth;
            if (minimum) total[b][r] += parts[b].added[0] * heads[r].sum;
        }
    }
}

ALWAYS_INLINE void fetch_ahead(const uint8_t *part, enum layout plain) {
    /* Prefetching past the end harms nobody. */
    UNROLL for (int line = 0; line < code_bytes(plain) + 32; line += 64) __builtin_prefetch(part + AHEAD + line);
}

#endif
