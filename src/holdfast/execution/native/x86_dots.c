/* How woven weights are multiplied on x86 with panels of x (x86_digits.h): few rows straight from where the weights lie;
 * for many, the quants of 32 columns are laid out once as pairs and passed over by SUB_ROWS rows at a time. */
#if defined(__GNUC__) && !defined(__clang__)
/* gcc would make many products before it adds the first to a sum, and have no registers for them. */
#pragma GCC optimize("no-tree-ter")
#endif

#include "digits.h"

#if defined(X86_DIGITS)

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
} weights_part;

/* Adds the columns of one group, vectors first..last-1 of the eight, to the totals of every bundle and row. */
ALWAYS_INLINE void add_group(const weights_part *parts, int wide, enum layout plain, int laid_out, int first, int last,
                             const uint8_t *x, const row_head *heads, int minimum, int rows, vec (*total)[8]) {
    const int chains = CHAINS(rows * wide), group = first / 4;
    ivec sum[BUNDLES_AT_ONCE][8][4];
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int b = 0; b < wide; b++) {
            sum[b][r][0] = offset_of(plain) == 0 ? (ivec){0} : spread_word(heads[r].starts[group]);
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

/* 32 columns with one scale, or two. */
ALWAYS_INLINE void add_part(const weights_part *parts, int wide, enum layout plain, int laid_out, const uint8_t *x,
                            const row_head *heads, int rows, vec (*total)[8]) {
    if (!short_groups(plain)) {
        add_group(parts, wide, plain, laid_out, 0, 8, x, heads, with_minimum(plain), rows, total);
        return;
    }
    add_group(parts, wide, plain, laid_out, 0, 4, x, heads, 0, rows, total);
    add_group(parts, wide, plain, laid_out, 4, 8, x, heads, 0, rows, total);
    if (!with_minimum(plain)) return;
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int b = 0; b < wide; b++) {
            total[b][r] += parts[b].added[0] * (heads[r].sum - heads[r].second_sum);
            total[b][r] += parts[b].added[1] * heads[r].second_sum;
        }
    }
}

ALWAYS_INLINE void fetch_ahead(const uint8_t *part, enum layout plain) {
    /* Prefetching past the end harms nobody. */
    UNROLL for (int line = 0; line < code_bytes(plain) + 32; line += 64) __builtin_prefetch(part + AHEAD + line);
}

/* Those of 256 columns are read by a function for each kind, not one for each kind and number of rows. */
#define SCALES(plain)                                                                                       \
    static __attribute__((noinline)) void plain##_scales(const uint8_t *stored, vec *scales, vec *added) {  \
        load_scales(stored, plain, scales, added);                                                          \
    }
SCALES(Q2_K) SCALES(Q3_K) SCALES(Q4_K) SCALES(Q5_K) SCALES(Q6_K) SCALES(IQ4_XS)

ALWAYS_INLINE void read_scales(const uint8_t *stored, enum layout plain, vec *scales, vec *added) {
    switch (plain) {
    case Q2_K: Q2_K_scales(stored, scales, added); break;
    case Q3_K: Q3_K_scales(stored, scales, added); break;
    case Q4_K: Q4_K_scales(stored, scales, added); break;
    case Q5_K: Q5_K_scales(stored, scales, added); break;
    case Q6_K: Q6_K_scales(stored, scales, added); break;
    case IQ4_XS: IQ4_XS_scales(stored, scales, added); break;
    default: load_scales(stored, plain, scales, added);
    }
}

/* `blocks` counts 32 columns, as everywhere in digits.c. */
ALWAYS_INLINE void multiply_few(const uint8_t *bundle, const uint8_t *x, long blocks, vec *totals, int rows,
                                enum layout plain) {
    const int blocks_together = blocks_of_32(plain) ? 1 : 8, groups = short_groups(plain) ? 2 : 1;
    vec total[1][8], scales[KQUANT_GROUPS], added[KQUANT_GROUPS];
    UNROLL for (int r = 0; r < rows; r++) total[0][r] = (vec){0};
    for (long block = 0; block < blocks; block += blocks_together) {
        read_scales(bundle, plain, scales, added);
        bundle += head_bytes(plain);
        for (int part = 0; part < blocks_together; part++, bundle += code_bytes(plain), x += panel_block_bytes(rows)) {
            const weights_part here = {bundle, scales + part * groups, added + part * groups};
            fetch_ahead(bundle, plain);
            add_part(&here, 1, plain, 0, x, (const row_head *)(x + 2 * BLOCK_ELEMENTS * rows), rows, total);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) totals[r] = total[0][r];
}

/* `wide` bundles, a constant where it is inlined, and a multiple of SUB_ROWS rows. */
ALWAYS_INLINE void multiply_wide(const uint8_t *bundle, long bundle_bytes, int wide, const uint8_t *x, long blocks,
                                 int rows, vec *totals, enum layout plain) {
    const int blocks_together = blocks_of_32(plain) ? 1 : 8, groups = short_groups(plain) ? 2 : 1;
    vec scales[BUNDLES_AT_ONCE][KQUANT_GROUPS], added[BUNDLES_AT_ONCE][KQUANT_GROUPS];
    pairs_vec laid[BUNDLES_AT_ONCE][PAIRS];
    for (int i = 0; i < wide * rows; i++) totals[i] = (vec){0};
    for (long block = 0; block < blocks; block += blocks_together) {
        UNROLL for (int b = 0; b < wide; b++) read_scales(bundle + b * bundle_bytes, plain, scales[b], added[b]);
        bundle += head_bytes(plain);
        for (int part = 0; part < blocks_together; part++, bundle += code_bytes(plain), x += panel_block_bytes(rows)) {
            const row_head *heads = (const row_head *)(x + 2 * BLOCK_ELEMENTS * rows);
            weights_part here[BUNDLES_AT_ONCE];
            UNROLL for (int b = 0; b < wide; b++) {
                const uint8_t *stored = bundle + b * bundle_bytes;
                fetch_ahead(stored, plain);
                UNROLL for (int v = 0; v < 8; v++) load_pairs(stored, plain, 0, v, laid[b] + 2 * v);
                here[b] = (weights_part){(const uint8_t *)laid[b], scales[b] + part * groups, added[b] + part * groups};
            }
            for (int first = 0; first < rows; first += SUB_ROWS) {
                vec total[BUNDLES_AT_ONCE][8];
                UNROLL for (int b = 0; b < wide; b++) {
                    /* Else gcc would hold what is laid out in registers, and the sums in memory. */
                    __asm__("" : "+r"(here[b].codes));
                    UNROLL for (int r = 0; r < SUB_ROWS; r++) total[b][r] = totals[b * rows + first + r];
                }
                add_part(here, wide, plain, 1, x + 2 * BLOCK_ELEMENTS * first, heads + first, SUB_ROWS, total);
                UNROLL for (int b = 0; b < wide; b++) {
                    UNROLL for (int r = 0; r < SUB_ROWS; r++) totals[b * rows + first + r] = total[b][r];
                }
            }
        }
    }
}

/* A function for each kind and number of rows, so that each keeps what it needs in registers. */
#define PARAMETERS \
    const uint8_t *bundle, long bundle_bytes, int wide, const uint8_t *x, long blocks, int rows, vec *totals
#define FEW(plain, number)                                        \
    static void plain##_##number(PARAMETERS) {                    \
        (void)bundle_bytes, (void)wide, (void)rows;               \
        multiply_few(bundle, x, blocks, totals, number, plain);   \
    }
#define MANY(plain)                                                                           \
    static void plain##_many(PARAMETERS) {                                                    \
        if (wide == 1)                                                                        \
            multiply_wide(bundle, bundle_bytes, 1, x, blocks, rows, totals, plain);           \
        else                                                                                  \
            multiply_wide(bundle, bundle_bytes, 2, x, blocks, rows, totals, plain);           \
    }
#define TRAITS(plain) .many = plain##_many, .offset = OFFSET(plain), .short_groups = SHORT_GROUPS(plain)
#if LANES == 16
#define KIND(plain)                                                                              \
    FEW(plain, 1) FEW(plain, 2) FEW(plain, 3) FEW(plain, 4) FEW(plain, 5) FEW(plain, 6)           \
    FEW(plain, 7) FEW(plain, 8) MANY(plain)
#define ENTRY(plain)                                                                                                \
    [plain] = {.few = {NULL, plain##_1, plain##_2, plain##_3, plain##_4, plain##_5, plain##_6, plain##_7, plain##_8}, \
               TRAITS(plain)}
#else
#define KIND(plain) FEW(plain, 1) FEW(plain, 2) FEW(plain, 3) FEW(plain, 4) MANY(plain)
#define ENTRY(plain) [plain] = {.few = {NULL, plain##_1, plain##_2, plain##_3, plain##_4}, TRAITS(plain)}
#endif

KIND(Q8_0) KIND(Q4_0) KIND(Q4_1)
KIND(Q5_0) KIND(Q5_1) KIND(IQ4_NL) KIND(Q2_K) KIND(Q3_K) KIND(Q4_K) KIND(Q5_K) KIND(Q6_K) KIND(IQ4_XS)

static const digit_kind KINDS[LAYOUTS] = {
    ENTRY(Q8_0), ENTRY(Q4_0), ENTRY(Q4_1), ENTRY(Q5_0), ENTRY(Q5_1), ENTRY(IQ4_NL),
    ENTRY(Q2_K), ENTRY(Q3_K), ENTRY(Q4_K), ENTRY(Q5_K), ENTRY(Q6_K), ENTRY(IQ4_XS),
};

const digit_kind *digit_kind_of(enum layout plain) { return KINDS + plain; }

#endif
