/* Moves codes and scales between the two orders; products read the woven one in kquant_dots.c. */
#include "kquant_weave.h"

#include "parallel.h"
#include "vector.h"

#define ROWS 4
#define SIX_BITS 64 /* numbers of six bits, in 48 bytes */

static int has_minimum(const kquant *kind) { return kind->minimum_at >= 0; }

static int groups_of(const kquant *kind) { return kind->elements / kind->group; }

/* Bytes of 32 columns of four rows. */
static int part_bytes(const kquant *kind) {
    return (kind->bits >= 4 ? 64 : 32) + (kind->bits == 6 ? 32 : 0) + (kind->bits % 2 ? 16 : 0);
}

static void unpack_six(const uint8_t *stored, uint8_t *numbers) {
    memset(numbers + 48, 0, 16);
    for (int i = 0; i < 48; i++) {
        numbers[i] = stored[i] & 63;
        numbers[48 + i % 16] = (uint8_t)(numbers[48 + i % 16] | (stored[i] >> 6) << (2 * (i / 16)));
    }
}

/* Small scales [row][group] of four rows. */
static void unweave_small(enum layout plain, const uint8_t *stored, int8_t small[ROWS][KQUANT_GROUPS],
                          int8_t lows[ROWS][KQUANT_GROUPS]) {
    const int groups = groups_of(kquant_of(plain)), raised = plain == Q3_K || plain == IQ4_XS ? 32 : 0;
    uint8_t numbers[SIX_BITS];
    if (plain == Q6_K || plain == Q2_K) {
        memcpy(numbers, stored, SIX_BITS);
    } else if (plain != IQ4_XS) {
        unpack_six(stored, numbers);
    } else {
        for (int i = 0; i < 32; i++)
            numbers[i] = (uint8_t)(((stored[i % 16] >> (i / 16 * 4)) & 15) | ((stored[16 + i % 8] >> (i / 8 * 2)) & 3) << 4);
    }
    for (int group = 0; group < groups; group++) {
        for (int row = 0; row < ROWS; row++) {
            int place = group * ROWS + row;
            small[row][group] = (int8_t)(numbers[place] - raised);
            if (plain == Q2_K) {
                small[row][group] = (int8_t)(numbers[place] & 15);
                lows[row][group] = (int8_t)(numbers[place] >> 4);
            }
            if (plain == Q4_K || plain == Q5_K) lows[row][group] = (int8_t)numbers[32 + place];
        }
    }
}

/* What turns a code into what is stored woven, and back. */
ALWAYS_INLINE uint8_t turn_of(int bits) { return (uint8_t)(bits == 4 || bits == 2 ? 0 : 1 << (bits - 1)); }

static void unweave_part(const kquant *kind, const uint8_t *part, uint8_t *codes) {
    const uint8_t *crumbs = part + (kind->bits >= 4 ? 64 : 0), *singles = crumbs + (kind->bits == 5 ? 0 : 32);
    for (int v = 0; v < 8; v++) {
        const uint8_t *nibbles = part + v % 4 * 16, *pairs = crumbs + v / 4 * 16;
        uint8_t vector[16] = {0};
        if (kind->bits >= 4)
            for (int lane = 0; lane < 16; lane++) vector[lane] = (nibbles[lane] >> (v / 4 * 4)) & 15;
        if (kind->bits == 6)
            for (int lane = 0; lane < 16; lane++) vector[lane] |= (uint8_t)(((pairs[lane] >> (v % 4 * 2)) & 3) << 4);
        if (kind->bits < 4)
            for (int lane = 0; lane < 16; lane++) vector[lane] = (pairs[lane] >> (v % 4 * 2)) & 3;
        if (kind->bits % 2)
            for (int lane = 0; lane < 16; lane++)
                vector[lane] |= (uint8_t)(((singles[lane] >> v) & 1) << (kind->bits - 1));
        for (int lane = 0; lane < 16; lane++) vector[lane] ^= turn_of(kind->bits);
        for (int row = 0; row < ROWS; row++) memcpy(codes + row * KQUANT_ELEMENTS + 4 * v, vector + 4 * row, 4);
    }
}

void expand_woven(const uint8_t *four, enum layout layout, long first, long count, float *out, long stride) {
    const enum layout plain = plain_layout(layout);
    const kquant *kind = kquant_of(plain);
    uint8_t codes[ROWS][KQUANT_ELEMENTS];
    int8_t small[ROWS][KQUANT_GROUPS], lows[ROWS][KQUANT_GROUPS];
    const int heads = has_minimum(kind) ? 16 : 8;
    four += first * ROWS * kind->bytes;
    for (long block = 0; block < count; block++, four += ROWS * kind->bytes, out += kind->elements) {
        const uint8_t *parts = four + heads + ROWS * kind->small_bytes;
        for (int part = 0; part < kind->elements / 32; part++)
            unweave_part(kind, parts + part * part_bytes(kind), codes[0] + 32 * part);
        for (int row = 0; row < ROWS; row++) small[row][0] = 1, lows[row][0] = -1;
        if (kind->small_bytes) unweave_small(plain, four + heads, small, lows);
        for (int row = 0; row < ROWS; row++) {
            float minimum = has_minimum(kind) ? half_to_float(four + 8 + 2 * row) : 0.0f;
            fill_block(plain, codes[row], small[row], lows[row], half_to_float(four + 2 * row), minimum,
                       out + row * stride);
        }
    }
}

#if defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)

static void pack_six(const uint8_t *numbers, uint8_t *out) {
    for (int i = 0; i < 48; i++) out[i] = (uint8_t)(numbers[i] | ((numbers[48 + i % 16] >> (2 * (i / 16))) & 3) << 6);
}

/* Small scales [row][group] of four rows. */
static void weave_small(enum layout plain, int8_t small[ROWS][KQUANT_GROUPS], int8_t lows[ROWS][KQUANT_GROUPS],
                        uint8_t *out) {
    const int groups = groups_of(kquant_of(plain)), raised = plain == Q3_K || plain == IQ4_XS ? 32 : 0;
    uint8_t numbers[SIX_BITS] = {0};
    for (int group = 0; group < groups; group++) {
        for (int row = 0; row < ROWS; row++) {
            int place = group * ROWS + row;
            numbers[place] = (uint8_t)(small[row][group] + raised);
            if (plain == Q2_K) numbers[place] = (uint8_t)(numbers[place] | lows[row][group] << 4);
            if (plain == Q4_K || plain == Q5_K) numbers[32 + place] = (uint8_t)lows[row][group];
        }
    }
    if (plain == Q6_K || plain == Q2_K) {
        memcpy(out, numbers, SIX_BITS);
    } else if (plain != IQ4_XS) {
        pack_six(numbers, out);
    } else {
        for (int i = 0; i < 16; i++) out[i] = (uint8_t)((numbers[i] & 15) | (numbers[i + 16] & 15) << 4);
        for (int i = 0; i < 8; i++)
            out[16 + i] = (uint8_t)(numbers[i] >> 4 | (numbers[i + 8] >> 4) << 2 | (numbers[i + 16] >> 4) << 4 |
                                    (numbers[i + 24] >> 4) << 6);
    }
}

/* 32 columns of four rows, whose codes lie KQUANT_ELEMENTS apart. */
ALWAYS_INLINE void weave_bits(int bits, const uint8_t *codes, uint8_t *out) {
    uint8_t *crumbs = out + (bits >= 4 ? 64 : 0), *singles = crumbs + (bits == 5 ? 0 : 32);
    uint8_t vectors[8][16];
    for (int v = 0; v < 8; v++) {
        for (int row = 0; row < ROWS; row++) memcpy(vectors[v] + 4 * row, codes + row * KQUANT_ELEMENTS + 4 * v, 4);
        for (int lane = 0; lane < 16; lane++) vectors[v][lane] ^= turn_of(bits);
    }
    for (int i = 0; i < 4 && bits >= 4; i++) {
        for (int lane = 0; lane < 16; lane++)
            out[16 * i + lane] = (uint8_t)((vectors[i][lane] & 15) | vectors[i + 4][lane] << 4);
    }
    for (int i = 0; i < 2 && (bits == 6 || bits < 4); i++) {
        uint8_t pairs[16] = {0};
        UNROLL for (int j = 0; j < 4; j++) {
            for (int lane = 0; lane < 16; lane++)
                pairs[lane] |= (uint8_t)(((vectors[4 * i + j][lane] >> (bits == 6 ? 4 : 0)) & 3) << (2 * j));
        }
        memcpy(crumbs + 16 * i, pairs, 16);
    }
    if (bits % 2) {
        uint8_t all[16] = {0};
        UNROLL for (int v = 0; v < 8; v++) {
            for (int lane = 0; lane < 16; lane++) all[lane] |= (uint8_t)((vectors[v][lane] >> (bits - 1)) << v);
        }
        memcpy(singles, all, 16);
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

/* One block of four rows, `stride` bytes apart in `rows`. */
static void weave_block(enum layout plain, const uint8_t *rows, long stride, uint8_t *out) {
    const kquant *kind = kquant_of(plain);
    uint8_t codes[ROWS][KQUANT_ELEMENTS];
    int8_t small[ROWS][KQUANT_GROUPS], lows[ROWS][KQUANT_GROUPS];
    const int heads = has_minimum(kind) ? 16 : 8;
    for (int row = 0; row < ROWS; row++) {
        const uint8_t *from = rows + row * stride;
        memcpy(out + 2 * row, from + kind->scale_at, 2);
        if (has_minimum(kind)) memcpy(out + 8 + 2 * row, from + kind->minimum_at, 2);
        read_codes(plain, from, codes[row]);
        read_small(plain, from, small[row], lows[row]);
    }
    if (kind->small_bytes) weave_small(plain, small, lows, out + heads);
    uint8_t *parts = out + heads + ROWS * kind->small_bytes;
    for (int part = 0; part < kind->elements / 32; part++)
        weave_part(kind, codes[0] + 32 * part, parts + part * part_bytes(kind));
}

int weave_kquants(uint8_t *weights, long rows, long columns, enum layout layout) {
    const long bytes = kquant_of(layout)->bytes, blocks = columns / kquant_of(layout)->elements, stride = blocks * bytes;
    uint8_t *woven = scratch(SCRATCH_OWN, (size_t)(ROWS * stride));
    if (woven == NULL) return -1;
    for (long row = 0; row + ROWS <= rows; row += ROWS) {
        uint8_t *four = weights + row * stride;
        for (long block = 0; block < blocks; block++)
            weave_block(layout, four + block * bytes, stride, woven + block * ROWS * bytes);
        memcpy(four, woven, (size_t)(ROWS * stride));
    }
    return (int)layout - Q5_0 + Q5_0_WOVEN;
}

#else

int weave_kquants(uint8_t *weights, long rows, long columns, enum layout layout) {
    (void)weights, (void)rows, (void)columns;
    return (int)layout;
}

#endif
