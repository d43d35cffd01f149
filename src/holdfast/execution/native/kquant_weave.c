/* Moves codes and scales between the two orders; products read the woven one (kquant_dots.c, x86_dots.c). */
#include "kquant_weave.h"

#include "parallel.h"

#define SIX_BITS (16 * BUNDLE) /* numbers of six bits, in three quarters of the bytes */
#define QUARTER (4 * BUNDLE)   /* bytes of a vector, and of a quarter of these numbers */

static int has_minimum(const kquant *kind) { return kind->minimum_at >= 0; }

static int groups_of(const kquant *kind) { return kind->elements / kind->group; }

/* Bytes of 32 columns of a bundle. */
static int part_bytes(const kquant *kind) {
    return QUARTER * ((kind->bits >= 4 ? 4 : 2) + (kind->bits == 6 ? 2 : 0) + (kind->bits % 2 ? 1 : 0));
}

static int heads_bytes(const kquant *kind) { return 2 * BUNDLE * (has_minimum(kind) ? 2 : 1); }

static void unpack_six(const uint8_t *stored, uint8_t *numbers) {
    uint8_t *last = numbers + 3 * QUARTER;
    memset(last, 0, QUARTER);
    for (int i = 0; i < 3 * QUARTER; i++) {
        numbers[i] = stored[i] & 63;
        last[i % QUARTER] = (uint8_t)(last[i % QUARTER] | (stored[i] >> 6) << (2 * (i / QUARTER)));
    }
}

/* Small scales [row][group] of a bundle. */
static void unweave_small(enum layout plain, const uint8_t *stored, int8_t small[BUNDLE][KQUANT_GROUPS],
                          int8_t lows[BUNDLE][KQUANT_GROUPS]) {
    const int groups = groups_of(kquant_of(plain)), raised = plain == Q3_K || plain == IQ4_XS ? 32 : 0;
    uint8_t numbers[SIX_BITS];
    if (plain == Q6_K || plain == Q2_K) {
        memcpy(numbers, stored, SIX_BITS);
    } else if (plain != IQ4_XS) {
        unpack_six(stored, numbers);
    } else {
        const uint8_t *upper = stored + QUARTER;
        const int pair = QUARTER / 2;
        for (int i = 0; i < 2 * QUARTER; i++)
            numbers[i] = (uint8_t)(((stored[i % QUARTER] >> (i / QUARTER * 4)) & 15) |
                                   ((upper[i % pair] >> (i / pair * 2)) & 3) << 4);
    }
    for (int group = 0; group < groups; group++) {
        for (int row = 0; row < BUNDLE; row++) {
            int place = group * BUNDLE + row;
            small[row][group] = (int8_t)(numbers[place] - raised);
            if (plain == Q2_K) {
                small[row][group] = (int8_t)(numbers[place] & 15);
                lows[row][group] = (int8_t)(numbers[place] >> 4);
            }
            if (plain == Q4_K || plain == Q5_K) lows[row][group] = (int8_t)numbers[2 * QUARTER + place];
        }
    }
}

/* What turns a code into what is stored woven, and back: nothing where products take unsigned codes. */
ALWAYS_INLINE uint8_t turn_of(int bits) {
#if defined(X86_DIGITS)
    (void)bits;
    return 0;
#else
    return (uint8_t)(bits == 4 || bits == 2 ? 0 : 1 << (bits - 1));
#endif
}

/* 32 codes of one row. */
static void unweave_part(const kquant *kind, const uint8_t *part, int row, uint8_t *codes) {
    const uint8_t *crumbs = part + (kind->bits >= 4 ? 4 * QUARTER : 0);
    const uint8_t *singles = crumbs + (kind->bits == 5 ? 0 : 2 * QUARTER);
    for (int v = 0; v < 8; v++) {
        const uint8_t *nibbles = part + v % 4 * QUARTER + 4 * row, *pairs = crumbs + v / 4 * QUARTER + 4 * row;
        for (int lane = 0; lane < 4; lane++, codes++) {
            int code = kind->bits >= 4 ? (nibbles[lane] >> (v / 4 * 4)) & 15 : (pairs[lane] >> (v % 4 * 2)) & 3;
            if (kind->bits == 6) code |= ((pairs[lane] >> (v % 4 * 2)) & 3) << 4;
            if (kind->bits % 2) code |= ((singles[4 * row + lane] >> v) & 1) << (kind->bits - 1);
            *codes = (uint8_t)(code ^ turn_of(kind->bits));
        }
    }
}

void expand_woven(const uint8_t *bundle, enum layout layout, int row, long first, long count, float *out) {
    const enum layout plain = plain_layout(layout);
    const kquant *kind = kquant_of(plain);
    uint8_t codes[KQUANT_ELEMENTS];
    int8_t small[BUNDLE][KQUANT_GROUPS], lows[BUNDLE][KQUANT_GROUPS];
    bundle += first * BUNDLE * kind->bytes;
    for (long block = 0; block < count; block++, bundle += BUNDLE * kind->bytes, out += kind->elements) {
        const uint8_t *heads = bundle + heads_bytes(kind), *parts = heads + BUNDLE * kind->small_bytes;
        for (int part = 0; part < kind->elements / 32; part++)
            unweave_part(kind, parts + part * part_bytes(kind), row, codes + 32 * part);
        small[row][0] = 1, lows[row][0] = -1;
        if (kind->small_bytes) unweave_small(plain, heads, small, lows);
        float minimum = has_minimum(kind) ? half_to_float(bundle + 2 * (BUNDLE + row)) : 0.0f;
        fill_block(plain, codes, small[row], lows[row], half_to_float(bundle + 2 * row), minimum, out);
    }
}

#if defined(ARM_DIGITS) || defined(X86_DIGITS)

static void pack_six(const uint8_t *numbers, uint8_t *out) {
    const uint8_t *last = numbers + 3 * QUARTER;
    for (int i = 0; i < 3 * QUARTER; i++)
        out[i] = (uint8_t)(numbers[i] | ((last[i % QUARTER] >> (2 * (i / QUARTER))) & 3) << 6);
}

/* Small scales [row][group] of a bundle. */
static void weave_small(enum layout plain, int8_t small[BUNDLE][KQUANT_GROUPS], int8_t lows[BUNDLE][KQUANT_GROUPS],
                        uint8_t *out) {
    const int groups = groups_of(kquant_of(plain)), raised = plain == Q3_K || plain == IQ4_XS ? 32 : 0;
    uint8_t numbers[SIX_BITS] = {0};
    for (int group = 0; group < groups; group++) {
        for (int row = 0; row < BUNDLE; row++) {
            int place = group * BUNDLE + row;
            numbers[place] = (uint8_t)(small[row][group] + raised);
            if (plain == Q2_K) numbers[place] = (uint8_t)(numbers[place] | lows[row][group] << 4);
            if (plain == Q4_K || plain == Q5_K) numbers[2 * QUARTER + place] = (uint8_t)lows[row][group];
        }
    }
    if (plain == Q6_K || plain == Q2_K) {
        memcpy(out, numbers, SIX_BITS);
    } else if (plain != IQ4_XS) {
        pack_six(numbers, out);
    } else {
        const int pair = QUARTER / 2;
        for (int i = 0; i < QUARTER; i++) out[i] = (uint8_t)((numbers[i] & 15) | (numbers[i + QUARTER] & 15) << 4);
        for (int i = 0; i < pair; i++)
            out[QUARTER + i] = (uint8_t)(numbers[i] >> 4 | (numbers[i + pair] >> 4) << 2 |
                                         (numbers[i + 2 * pair] >> 4) << 4 | (numbers[i + 3 * pair] >> 4) << 6);
    }
}

/* 32 columns of a bundle, whose rows of codes lie KQUANT_ELEMENTS apart. */
ALWAYS_INLINE void weave_bits(int bits, const uint8_t *codes, uint8_t *out) {
    uint8_t *crumbs = out + (bits >= 4 ? 4 * QUARTER : 0), *singles = crumbs + (bits == 5 ? 0 : 2 * QUARTER);
    uint8_t vectors[8][QUARTER];
    for (int v = 0; v < 8; v++) {
        for (int row = 0; row < BUNDLE; row++) memcpy(vectors[v] + 4 * row, codes + row * KQUANT_ELEMENTS + 4 * v, 4);
        for (int lane = 0; lane < QUARTER; lane++) vectors[v][lane] ^= turn_of(bits);
    }
    for (int i = 0; i < 4 && bits >= 4; i++) {
        for (int lane = 0; lane < QUARTER; lane++)
            out[QUARTER * i + lane] = (uint8_t)((vectors[i][lane] & 15) | vectors[i + 4][lane] << 4);
    }
    for (int i = 0; i < 2 && (bits == 6 || bits < 4); i++) {
        uint8_t pairs[QUARTER] = {0};
        UNROLL for (int j = 0; j < 4; j++) {
            for (int lane = 0; lane < QUARTER; lane++)
                pairs[lane] |= (uint8_t)(((vectors[4 * i + j][lane] >> (bits == 6 ? 4 : 0)) & 3) << (2 * j));
        }
        memcpy(crumbs + QUARTER * i, pairs, QUARTER);
    }
    if (bits % 2) {
        uint8_t all[QUARTER] = {0};
        UNROLL for (int v = 0; v < 8; v++) {
            for (int lane = 0; lane < QUARTER; lane++) all[lane] |= (uint8_t)((vectors[v][lane] >> (bits - 1)) << v);
        }
        memcpy(singles, all, QUARTER);
    }
}

/* A copy for each number of bits, so that each is a few vectors. */
static void weave_part(const kquant *kind, const uint8_t *codes, uint8_t *out) {
    switch (kind->bits) {
    case 2: weave_bits(2, codes, out); break;
    case 3: weave_bits(3, codes, out); break;
    case 4: weave_bits(4, codes, out); break;
    case 5: weave_bits(5, codes, out); break;
    default: weave_bits(6, codes, out);
    }
}

/* One block of a bundle, whose rows are `stride` bytes apart. */
static void weave_block(enum layout plain, const uint8_t *rows, long stride, uint8_t *out) {
    const kquant *kind = kquant_of(plain);
    uint8_t codes[BUNDLE][KQUANT_ELEMENTS];
    int8_t small[BUNDLE][KQUANT_GROUPS], lows[BUNDLE][KQUANT_GROUPS];
    const int heads = heads_bytes(kind);
    for (int row = 0; row < BUNDLE; row++) {
        const uint8_t *from = rows + row * stride;
        memcpy(out + 2 * row, from + kind->scale_at, 2);
        if (has_minimum(kind)) memcpy(out + 2 * (BUNDLE + row), from + kind->minimum_at, 2);
        read_codes(plain, from, codes[row]);
        read_small(plain, from, small[row], lows[row]);
    }
    if (kind->small_bytes) weave_small(plain, small, lows, out + heads);
    uint8_t *parts = out + heads + BUNDLE * kind->small_bytes;
    for (int part = 0; part < kind->elements / 32; part++)
        weave_part(kind, codes[0] + 32 * part, parts + part * part_bytes(kind));
}

int weave_kquants(uint8_t *weights, long rows, long columns, enum layout layout) {
    const long bytes = kquant_of(layout)->bytes, blocks = columns / kquant_of(layout)->elements, stride = blocks * bytes;
    uint8_t *woven = scratch(SCRATCH_OWN, (size_t)(BUNDLE * stride));
    if (woven == NULL) return -1;
    for (long row = 0; row + BUNDLE <= rows; row += BUNDLE) {
        uint8_t *bundle = weights + row * stride;
        for (long block = 0; block < blocks; block++)
            weave_block(layout, bundle + block * bytes, stride, woven + block * BUNDLE * bytes);
        memcpy(bundle, woven, (size_t)(BUNDLE * stride));
    }
    return (int)layout - Q5_0 + Q5_0_WOVEN;
}

#else

int weave_kquants(uint8_t *weights, long rows, long columns, enum layout layout) {
    (void)weights, (void)rows, (void)columns;
    return (int)layout;
}

#endif
