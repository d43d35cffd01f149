/* How woven weights are multiplied on x86 with panels of x (x86_digits.h): few rows straight from where the weights lie;
 * for many, the quants of 32 columns are laid out once, as pairs that are passed over by SUB_ROWS rows at a time, or as
 * tiles. */
#if defined(__GNUC__) && !defined(__clang__)
/* gcc would make many products before it adds the first to a sum, and have no registers for them. */
#pragma GCC optimize("no-tree-ter")
#endif

#include "digits.h"

#if defined(X86_DIGITS)

#include "x86_sums.h"
#include "x86_tiles.h"

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
            const weights_part here = {.codes = bundle, .scales = scales + part * groups, .added = added + part * groups};
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
    const vec nothing[SUB_ROWS] = {0}; /* clearing all totals beforehand would take as long as a block */
    for (long block = 0; block < blocks; block += blocks_together) {
        UNROLL for (int b = 0; b < wide; b++) read_scales(bundle + b * bundle_bytes, plain, scales[b], added[b]);
        bundle += head_bytes(plain);
        for (int part = 0; part < blocks_together; part++, bundle += code_bytes(plain), x += panel_block_bytes(rows)) {
            const row_head *heads = (const row_head *)(x + 2 * BLOCK_ELEMENTS * rows);
            const int begins = block + part == 0;
            weights_part here[BUNDLES_AT_ONCE];
            UNROLL for (int b = 0; b < wide; b++) {
                const uint8_t *stored = bundle + b * bundle_bytes;
                fetch_ahead(stored, plain);
                UNROLL for (int v = 0; v < 8; v++) load_pairs(stored, plain, 0, v, laid[b] + 2 * v);
                here[b] = (weights_part){
                    .codes = (const uint8_t *)laid[b], .scales = scales[b] + part * groups, .added = added[b] + part * groups};
            }
            for (int first = 0; first < rows; first += SUB_ROWS) {
                vec total[BUNDLES_AT_ONCE][8];
                UNROLL for (int b = 0; b < wide; b++) {
                    /* Else gcc would hold what is laid out in registers, and the sums in memory. */
                    __asm__("" : "+r"(here[b].codes));
                    const vec *before = begins ? nothing : totals + b * rows + first;
                    UNROLL for (int r = 0; r < SUB_ROWS; r++) total[b][r] = before[r];
                }
                add_part(here, wide, plain, 1, x + 2 * BLOCK_ELEMENTS * first, heads + first, SUB_ROWS, total);
                UNROLL for (int b = 0; b < wide; b++) {
                    UNROLL for (int r = 0; r < SUB_ROWS; r++) totals[b * rows + first + r] = total[b][r];
                }
            }
        }
    }
}

#if defined(X86_TILES)

/* The same by tiles, and any number of rows. Not for groups of 16 columns, each with a scale: tiles are then half as
 * deep, twice as many sums are taken from them, and pairs are faster (measured, Q6_K). */
ALWAYS_INLINE void multiply_tall(const uint8_t *bundle, const uint8_t *x, long blocks, int rows, vec *totals,
                                 enum layout plain) {
    const int blocks_together = blocks_of_32(plain) ? 1 : 8;
    vec scales[KQUANT_GROUPS], added[KQUANT_GROUPS];
    laid_weights laid; /* 30 KB, which an initializer would clear for every bundle */
    laid.blocks = 0;
    for (long block = 0, first = 0; block < blocks;) {
        read_scales(bundle, plain, scales, added);
        bundle += head_bytes(plain);
        for (int part = 0; part < blocks_together; part++, block++, bundle += code_bytes(plain)) {
            const weights_part here = {.codes = bundle, .scales = scales + part, .added = added + part};
            fetch_ahead(bundle, plain);
            lay_out(&laid, &here, plain, with_minimum(plain));
        }
        if (laid.blocks + blocks_together <= LAID_BLOCKS && block < blocks) continue;
        multiply_laid(&laid, with_minimum(plain), first == 0, x + first * panel_block_bytes(rows), rows, totals);
        first = block;
    }
}

#endif

/* A function for each kind and number of rows, so that each keeps what it needs in registers. */
#define PARAMETERS                                                                                                 \
    const uint8_t *bundle, long bundle_bytes, int wide, const scaled_matrix *planes, const uint8_t *x, long blocks, \
        int rows, vec *totals
#define FEW(plain, number)                                        \
    static void plain##_##number(PARAMETERS) {                    \
        (void)bundle_bytes, (void)wide, (void)planes, (void)rows; \
        multiply_few(bundle, x, blocks, totals, number, plain);   \
    }
#define MANY_BY(multiply, plain)                                                                    \
    static void plain##_many(PARAMETERS) {                                                         \
        (void)planes;                                                                              \
        if (wide == 2)                                                                             \
            multiply(bundle, bundle_bytes, 2, x, blocks, rows, totals, plain);                     \
        else                                                                                       \
            multiply(bundle, bundle_bytes, 1, x, blocks, rows, totals, plain);                     \
    }
#define TALL(plain)                                                                               \
    static void plain##_many(PARAMETERS) {                                                        \
        (void)planes;                                                                             \
        for (int b = 0; b < wide; b++)                                                            \
            multiply_tall(bundle + b * bundle_bytes, x, blocks, rows, totals + b * rows, plain);  \
    }
#if LANES == 16
#define EACH(plain)                                                                             \
    FEW(plain, 1) FEW(plain, 2) FEW(plain, 3) FEW(plain, 4) FEW(plain, 5) FEW(plain, 6)          \
    FEW(plain, 7) FEW(plain, 8)
#define FEW_OF(plain) \
    {NULL, plain##_1, plain##_2, plain##_3, plain##_4, plain##_5, plain##_6, plain##_7, plain##_8}
#else
#define EACH(plain) FEW(plain, 1) FEW(plain, 2) FEW(plain, 3) FEW(plain, 4)
#define FEW_OF(plain) {NULL, plain##_1, plain##_2, plain##_3, plain##_4}
#endif
#define KIND(plain) EACH(plain) MANY_BY(multiply_wide, plain)
#if defined(X86_TILES)
#define TILE_KIND(plain) EACH(plain) TALL(plain)
#define IN_TILES(plain) (!SHORT_GROUPS(plain))
#else
#define TILE_KIND KIND
#define IN_TILES(plain) 0
#endif
#define ENTRY(plain)                                                                                   \
    [plain] = {.few = FEW_OF(plain), .many = plain##_many, .offset = OFFSET(plain),                    \
               .short_groups = SHORT_GROUPS(plain), .in_tiles = IN_TILES(plain)}

TILE_KIND(Q8_0) TILE_KIND(Q4_0) TILE_KIND(Q4_1) TILE_KIND(Q5_0) TILE_KIND(Q5_1) TILE_KIND(IQ4_NL)
KIND(Q2_K) KIND(Q3_K) TILE_KIND(Q4_K) TILE_KIND(Q5_K) KIND(Q6_K) TILE_KIND(IQ4_XS)

static const digit_kind KINDS[LAYOUTS] = {
    ENTRY(Q8_0), ENTRY(Q4_0), ENTRY(Q4_1), ENTRY(Q5_0), ENTRY(Q5_1), ENTRY(IQ4_NL),
    ENTRY(Q2_K), ENTRY(Q3_K), ENTRY(Q4_K), ENTRY(Q5_K), ENTRY(Q6_K), ENTRY(IQ4_XS),
};

const digit_kind *digit_kind_of(enum layout plain) { return KINDS + plain; }

#endif
