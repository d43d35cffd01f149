/* How woven planes (scaled.h) are multiplied on x86 with panels of x. INT4, INT8 and MXFP4 are multiplied as whole
 * numbers, as GGUF's blocks are (x86_dots.c). FP8 and NF4 become floats: 32 columns of a bundle at a time, each column a
 * vector that is multiplied with numbers of x; even columns and odd ones are summed apart, for any number of rows. */
#if defined(__GNUC__) && !defined(__clang__)
/* gcc would make many products before it adds the first to a sum, and have no registers for them. */
#pragma GCC optimize("no-tree-ter")
#endif

#include "digits.h"

#if defined(X86_DIGITS)

#include "plane_scales.h"
#include "x86_sums.h"
#include "x86_tiles.h"

ALWAYS_INLINE vec load_bfloats(const uint8_t *stored) {
#if LANES == 16
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)stored)), 16);
#else
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)stored)), 16);
#endif
}

/* 2 ^ (stored - 127) */
ALWAYS_INLINE ivec powers_of(ivec stored) { return stored << 23 | ((stored == 0) & 0x00400000); }

static __attribute__((noinline)) vec group_scales(const bundle_scales *from, long group) {
    uint8_t copies[4 * BUNDLE];
    const uint8_t *stored = stored_scales(from, group, copies);
    switch (from->type) {
    case HALF_SCALES: return load_halves(stored);
    case BFLOAT_SCALES: return load_bfloats(stored);
    case POWER_SCALES: return (vec)powers_of(load_small(stored)) * 0.5f; /* codes are twice what they stand for */
    default: return load((const float *)stored);
    }
}

ALWAYS_INLINE ivec group_zeros(const bundle_scales *from, long group) {
    const ivec stored = load_small(from->zeros + group * BUNDLE);
    return from->signed_zeros ? (stored << 24 >> 24) + 128 : stored;
}

/* In whole numbers */

ALWAYS_INLINE void multiply_few(const uint8_t *bundle, long bundle_bytes, const scaled_matrix *planes, const uint8_t *x,
                                long blocks, vec *totals, int rows, enum layout plain) {
    const bundle_scales scales = scales_of(planes, bundle, bundle_bytes);
    vec total[1][8];
    UNROLL for (int r = 0; r < rows; r++) total[0][r] = (vec){0};
    for (long block = 0, group = 0; block < blocks; group++) {
        const vec scale = group_scales(&scales, group);
        weights_part here = {.scales = &scale, .added = &scale};
        if (with_zeros(plain)) here.zeros = group_zeros(&scales, group);
        const long last = block + scales.group_blocks;
        for (; block < last; block++, bundle += code_bytes(plain), x += panel_block_bytes(rows)) {
            here.codes = bundle;
            fetch_ahead(bundle, plain);
            add_group(&here, 1, plain, 0, 0, 8, x, (const row_head *)(x + 2 * BLOCK_ELEMENTS * rows), 0, rows, total);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) totals[r] = total[0][r];
}

/* `wide` bundles, a constant where it is inlined, and a multiple of SUB_ROWS rows. */
ALWAYS_INLINE void multiply_wide(const uint8_t *bundle, long bundle_bytes, int wide, const scaled_matrix *planes,
                                 const uint8_t *x, long blocks, int rows, vec *totals, enum layout plain) {
    bundle_scales scales[BUNDLES_AT_ONCE];
    vec scale[BUNDLES_AT_ONCE];
    pairs_vec laid[BUNDLES_AT_ONCE][PAIRS];
    weights_part here[BUNDLES_AT_ONCE];
    UNROLL for (int b = 0; b < wide; b++) {
        scales[b] = scales_of(planes, bundle + b * bundle_bytes, bundle_bytes);
        here[b] = (weights_part){.codes = (const uint8_t *)laid[b], .scales = scale + b, .added = scale + b};
    }
    for (int i = 0; i < wide * rows; i++) totals[i] = (vec){0};
    for (long block = 0; block < blocks; block++, bundle += code_bytes(plain), x += panel_block_bytes(rows)) {
        const row_head *heads = (const row_head *)(x + 2 * BLOCK_ELEMENTS * rows);
        UNROLL for (int b = 0; b < wide; b++) {
            const uint8_t *stored = bundle + b * bundle_bytes;
            if (block % scales[0].group_blocks == 0) {
                const long group = block / scales[0].group_blocks;
                scale[b] = group_scales(scales + b, group);
                if (with_zeros(plain)) here[b].zeros = group_zeros(scales + b, group);
            }
            fetch_ahead(stored, plain);
            UNROLL for (int v = 0; v < 8; v++) load_pairs(stored, plain, 0, v, laid[b] + 2 * v);
        }
        for (int first = 0; first < rows; first += SUB_ROWS) {
            vec total[BUNDLES_AT_ONCE][8];
            UNROLL for (int b = 0; b < wide; b++) {
                /* Else gcc would hold what is laid out in registers, and the sums in memory. */
                __asm__("" : "+r"(here[b].codes));
                UNROLL for (int r = 0; r < SUB_ROWS; r++) total[b][r] = totals[b * rows + first + r];
            }
            add_group(here, wide, plain, 1, 0, 8, x + 2 * BLOCK_ELEMENTS * first, heads + first, 0, SUB_ROWS, total);
            UNROLL for (int b = 0; b < wide; b++) {
                UNROLL for (int r = 0; r < SUB_ROWS; r++) totals[b * rows + first + r] = total[b][r];
            }
        }
    }
}

#if defined(X86_TILES)

/* The same by tiles, and any number of rows. */
ALWAYS_INLINE void multiply_tall(const uint8_t *bundle, long bundle_bytes, const scaled_matrix *planes, const uint8_t *x,
                                 long blocks, int rows, vec *totals, enum layout plain) {
    const bundle_scales scales = scales_of(planes, bundle, bundle_bytes);
    vec scale = {0};
    weights_part here = {.scales = &scale, .added = &scale};
    laid_weights laid; /* 30 KB, which an initializer would clear for every bundle */
    laid.blocks = 0;
    for (long block = 0, first = 0; block < blocks; bundle += code_bytes(plain)) {
        if (block % scales.group_blocks == 0) {
            scale = group_scales(&scales, block / scales.group_blocks);
            if (with_zeros(plain)) here.zeros = group_zeros(&scales, block / scales.group_blocks);
        }
        here.codes = bundle;
        fetch_ahead(bundle, plain);
        lay_out(&laid, &here, plain, 0);
        if (++block < blocks && laid.blocks < LAID_BLOCKS) continue;
        multiply_laid(&laid, 0, first == 0, x + first * panel_block_bytes(rows), rows, totals);
        first = block;
    }
}

#endif

/* In floats */

/* Two columns of FP8 codes: their bits are float16's, but for an exponent less by 8. */
ALWAYS_INLINE void decode_fp8(const uint8_t *codes, vec *values) {
#if LANES == 16
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    const __m512i size = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x7F)), 7);
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8);
    const __m512i halves = _mm512_or_si512(size, sign);
    values[0] = (vec)_mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    values[1] = (vec)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
#else
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes));
    const __m256i size = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7F)), 7);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    const __m256i halves = _mm256_or_si256(size, sign);
    values[0] = (vec)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    values[1] = (vec)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
#endif
}

/* A column of NF4's codes, in the lower halves of bytes or in the upper ones. */
ALWAYS_INLINE vec decode_nf4(const uint8_t *codes, int upper) {
    const ivec places = load_small(codes) >> (upper ? 4 : 0);
#if LANES == 16
    return (vec)_mm512_permutexvar_ps((__m512i)places, _mm512_loadu_ps(NF4_VALUES));
#else
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(NF4_VALUES), (__m256i)places);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(NF4_VALUES + 8), (__m256i)places);
    return (vec)_mm256_blendv_ps(low, high, (__m256)(places << 28));
#endif
}

/* What is left out of the values that decoding makes. */
ALWAYS_INLINE float value_of_one(enum code_type type) { return type == FP8_CODES ? 256.0f : 1.0f; }
ALWAYS_INLINE int float_code_bytes(enum code_type type) { return BUNDLE * (type == FP8_CODES ? 32 : 16); }

/* Columns 2 pair and 2 pair + 1 of 32: of stored codes, or of floats laid out before. */
ALWAYS_INLINE void load_columns(const uint8_t *codes, enum code_type type, int laid_out, int pair, vec *values) {
    if (laid_out) {
        values[0] = ((const vec *)codes)[2 * pair];
        values[1] = ((const vec *)codes)[2 * pair + 1];
    } else if (type == FP8_CODES) {
        decode_fp8(codes + 2 * pair * BUNDLE, values);
    } else {
        values[0] = decode_nf4(codes + 2 * pair % 16 * BUNDLE, pair >= 8);
        values[1] = decode_nf4(codes + (2 * pair + 1) % 16 * BUNDLE, pair >= 8);
    }
}

/* 32 columns of a bundle with rows of x that lie `BLOCK_ELEMENTS` apart. */
ALWAYS_INLINE void add_floats(const uint8_t *codes, enum code_type type, int laid_out, vec scale, const float *x,
                              const float *worths, int rows, vec *total) {
    vec sum[8][2];
    UNROLL for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (vec){0};
    UNROLL for (int pair = 0; pair < 16; pair++) {
        vec values[2];
        load_columns(codes, type, laid_out, pair, values);
        UNROLL for (int r = 0; r < rows; r++) {
            const float *numbers = x + BLOCK_ELEMENTS * r + 2 * pair;
            sum[r][0] += values[0] * numbers[0];
            sum[r][1] += values[1] * numbers[1];
        }
    }
    UNROLL for (int r = 0; r < rows; r++) total[r] += (sum[r][0] + sum[r][1]) * (scale * worths[r]);
}

ALWAYS_INLINE void fetch_floats(const uint8_t *codes, enum code_type type) {
    UNROLL for (int line = 0; line < float_code_bytes(type); line += 64) __builtin_prefetch(codes + AHEAD + line);
}

ALWAYS_INLINE void multiply_few_floats(const uint8_t *bundle, long bundle_bytes, const scaled_matrix *planes,
                                       const uint8_t *x, long blocks, vec *totals, int rows, enum code_type type) {
    const bundle_scales scales = scales_of(planes, bundle, bundle_bytes);
    vec total[8], scale = {0};
    UNROLL for (int r = 0; r < rows; r++) total[r] = (vec){0};
    for (long block = 0; block < blocks; block++, bundle += float_code_bytes(type), x += float_block_bytes(rows)) {
        const float *numbers = (const float *)x;
        if (block % scales.group_blocks == 0)
            scale = group_scales(&scales, block / scales.group_blocks) * value_of_one(type);
        fetch_floats(bundle, type);
        add_floats(bundle, type, 0, scale, numbers, numbers + BLOCK_ELEMENTS * rows, rows, total);
    }
    UNROLL for (int r = 0; r < rows; r++) totals[r] = total[r];
}

ALWAYS_INLINE void multiply_many_floats(const uint8_t *bundle, long bundle_bytes, const scaled_matrix *planes,
                                        const uint8_t *x, long blocks, int rows, vec *totals, enum code_type type) {
    const bundle_scales scales = scales_of(planes, bundle, bundle_bytes);
    vec laid[BLOCK_ELEMENTS], scale = {0};
    for (int i = 0; i < rows; i++) totals[i] = (vec){0};
    for (long block = 0; block < blocks; block++, bundle += float_code_bytes(type), x += float_block_bytes(rows)) {
        const float *numbers = (const float *)x;
        if (block % scales.group_blocks == 0)
            scale = group_scales(&scales, block / scales.group_blocks) * value_of_one(type);
        fetch_floats(bundle, type);
        UNROLL for (int pair = 0; pair < 16; pair++) load_columns(bundle, type, 0, pair, laid + 2 * pair);
        for (int first = 0; first < rows; first += SUB_ROWS) {
            const uint8_t *columns = (const uint8_t *)laid;
            __asm__("" : "+r"(columns)); /* as in multiply_wide */
            add_floats(columns, type, 1, scale, numbers + BLOCK_ELEMENTS * first,
                       numbers + BLOCK_ELEMENTS * rows + first, SUB_ROWS, totals + first);
        }
    }
}

/* A function for each kind and number of rows, so that each keeps what it needs in registers. */
#define PARAMETERS                                                                                                 \
    const uint8_t *bundle, long bundle_bytes, int wide, const scaled_matrix *planes, const uint8_t *x, long blocks, \
        int rows, vec *totals
#define FEW(plain, number)                                                                     \
    static void plain##_##number(PARAMETERS) {                                                 \
        (void)wide, (void)rows;                                                                \
        multiply_few(bundle, bundle_bytes, planes, x, blocks, totals, number, plain);          \
    }
#define MANY_BY(multiply, plain)                                                               \
    static void plain##_many(PARAMETERS) {                                                     \
        if (wide == 1)                                                                         \
            multiply(bundle, bundle_bytes, 1, planes, x, blocks, rows, totals, plain);         \
        else                                                                                   \
            multiply(bundle, bundle_bytes, 2, planes, x, blocks, rows, totals, plain);         \
    }
#define TALL(plain)                                                                                            \
    static void plain##_many(PARAMETERS) {                                                                     \
        for (int b = 0; b < wide; b++)                                                                         \
            multiply_tall(bundle + b * bundle_bytes, bundle_bytes, planes, x, blocks, rows, totals + b * rows, \
                          plain);                                                                              \
    }
#define FEW_FLOATS(type, number)                                                               \
    static void type##_##number(PARAMETERS) {                                                  \
        (void)wide, (void)rows;                                                                \
        multiply_few_floats(bundle, bundle_bytes, planes, x, blocks, totals, number, type);    \
    }
#define MANY_FLOATS(type)                                                                                          \
    static void type##_many(PARAMETERS) {                                                                          \
        for (int b = 0; b < wide; b++)                                                                             \
            multiply_many_floats(bundle + b * bundle_bytes, bundle_bytes, planes, x, blocks, rows, totals + b * rows, \
                                 type);                                                                            \
    }
#if LANES == 16
#define EACH(define, plain)                                                                            \
    define(plain, 1) define(plain, 2) define(plain, 3) define(plain, 4) define(plain, 5) define(plain, 6) \
    define(plain, 7) define(plain, 8)
#define FUNCTIONS(plain)                                                                                      \
    .few = {NULL, plain##_1, plain##_2, plain##_3, plain##_4, plain##_5, plain##_6, plain##_7, plain##_8}, \
    .many = plain##_many
#else
#define EACH(define, plain) define(plain, 1) define(plain, 2) define(plain, 3) define(plain, 4)
#define FUNCTIONS(plain) .few = {NULL, plain##_1, plain##_2, plain##_3, plain##_4}, .many = plain##_many
#endif
#define KIND(plain)                                  \
    EACH(FEW, plain) MANY_BY(multiply_wide, plain)   \
    static const digit_kind plain##_KIND = {FUNCTIONS(plain), .offset = OFFSET(plain)};
/* Of codes that are signed bytes once their zero is taken off. */
#if defined(X86_TILES)
#define TILE_KIND(plain)                             \
    EACH(FEW, plain) TALL(plain)                     \
    static const digit_kind plain##_KIND = {FUNCTIONS(plain), .offset = OFFSET(plain), .in_tiles = 1};
#else
#define TILE_KIND KIND
#endif
#define FLOAT_KIND(type)                     \
    EACH(FEW_FLOATS, type) MANY_FLOATS(type) \
    static const digit_kind type##_KIND = {FUNCTIONS(type), .in_floats = 1};

TILE_KIND(INT4_PLANES) TILE_KIND(INT4_ZERO_PLANES) TILE_KIND(INT8_PLANES) TILE_KIND(MXFP4_PLANES) KIND(INT8_ZERO_PLANES)
FLOAT_KIND(FP8_CODES) FLOAT_KIND(NF4_CODES)

const digit_kind *planes_digits_of(const scaled_matrix *planes) {
    switch ((enum code_type)planes->code_type) {
    case INT4_CODES: return planes->zeros != 0 ? &INT4_ZERO_PLANES_KIND : &INT4_PLANES_KIND;
    case INT8_CODES: return planes->zeros != 0 ? &INT8_ZERO_PLANES_KIND : &INT8_PLANES_KIND;
    case MXFP4_CODES: return &MXFP4_PLANES_KIND;
    case FP8_CODES: return &FP8_CODES_KIND;
    default: return &NF4_CODES_KIND;
    }
}

#endif
