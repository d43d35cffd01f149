/* What attention does with one tile of keys: scores, their weights, the weighted values. Knows no rows and no tables.
 *
 * In two forms, for what stands in the lanes of a vector:
 *   queries   many of them, in whole vectors; scores [key][query]. No sum ever goes across lanes.
 *   keys      few queries, one kv head's group; scores [query][key].
 * Weights are powers of two rather than of e: the factor between them is in the queries already. Included once. */
#ifndef HOLDFAST_ATTENTION_TILES_H
#define HOLDFAST_ATTENTION_TILES_H

#include <float.h>
#include <math.h>

#include "plain_numbers.h"
#include "vector.h"

#if defined(__F16C__)
#define READS_HALVES /* few queries read float16 where it lies */
#endif

#define TILE_KEYS 64
#define STEP_KEYS 8    /* whose scores with few queries are made in one go, and their values added */
#define AT_ONCE 4      /* vectors of scores that become weights side by side */
#define WIDTH 4        /* vectors of dimensions whose sums are held in registers */
#define LINE_FLOATS 16 /* of 64 bytes */

/* The largest score of a query that has seen none: finite, so that it can be subtracted from what it does not see. */
#define NO_SCORE (-FLT_MAX)

/* Kernels are compiled apart: put into one another, gcc would keep their pointers in memory. */
#define KERNEL static __attribute__((noinline)) void

/* Carried along by queries from tile to tile. */
typedef struct {
    float *sums;             /* [queries, padded] weighted values */
    float *largest, *weight; /* [queries] score so far, and sum of weights */
    long padded;
} softmax;

/* Vectors of one kv head: of each key the place of its first head, and how far the wanted one lies from there. */
typedef struct {
    const uint8_t *const *places;
    long offset, element; /* bytes */
} vectors;

ALWAYS_INLINE const float *floats_of(vectors from, long key) {
    return (const float *)(from.places[key] + from.offset);
}

/* Asks for the line that holds element `at`, which the machine does not foresee: heads and pages lie apart. Lines are
 * asked for one by one among the products; many at a time would hold these up. */
ALWAYS_INLINE void fetch(vectors next, long key, long at) {
    __builtin_prefetch(next.places[key] + next.offset + at * next.element);
}

/* x becomes 2 to its power, for `count` vectors of x <= 0: within 2e-7 of the true value, zero from -126.5 on, NaN for
 * NaN. Several vectors go side by side (a constant where inlined), for each waits long on its own steps. */
ALWAYS_INLINE void powers_of_two(int count, vec *x) {
    /* 1.5 * 2^23 rounds what is added to a whole number n, whose last bits then hold n + 127: the exponent of 2^n. */
    const float magic = 12582912.0f + 127.0f;
    vec whole[AT_ONCE], power[AT_ONCE], square[AT_ONCE], low[AT_ONCE], high[AT_ONCE], r[AT_ONCE];
    UNROLL for (int i = 0; i < count; i++) x[i] = larger(spread(-127.0f), x[i]);
    UNROLL for (int i = 0; i < count; i++) whole[i] = x[i] + magic;
    UNROLL for (int i = 0; i < count; i++) power[i] = (vec)((ivec)whole[i] << 23);
    UNROLL for (int i = 0; i < count; i++) r[i] = x[i] - (whole[i] - magic);
    UNROLL for (int i = 0; i < count; i++) square[i] = r[i] * r[i];
    UNROLL for (int i = 0; i < count; i++) high[i] = r[i] * 0x1.5bba14p-10f + 0x1.3cea88p-7f;
    UNROLL for (int i = 0; i < count; i++) low[i] = r[i] * 0x1.c6b752p-5f + 0x1.ebf9bcp-3f;
    UNROLL for (int i = 0; i < count; i++) low[i] += square[i] * high[i];
    UNROLL for (int i = 0; i < count; i++) high[i] = r[i] * 0x1.62e42ap-1f + 1.0f;
    UNROLL for (int i = 0; i < count; i++) high[i] += square[i] * low[i];
    UNROLL for (int i = 0; i < count; i++) x[i] = high[i] * power[i];
}

/* What was summed before is scaled to a new largest score. */
static void scale_sums(const softmax *state, long query, float factor) {
    float *sums = state->sums + query * state->padded;
    for (long i = 0; i < state->padded; i += LANES) store(sums + i, load(sums + i) * factor);
}

/* ---- queries in lanes ---- */

/* Scores of `width` vectors of queries [dim, columns] with keys key..key+3, `width` a constant where inlined. */
ALWAYS_INLINE void score_four_keys(int width, const float *queries, long columns, vectors keys, long key, long dim,
                                   float *scores) {
    const float *k0 = floats_of(keys, key), *k1 = floats_of(keys, key + 1);
    const float *k2 = floats_of(keys, key + 2), *k3 = floats_of(keys, key + 3);
    vec total[4][TILE_ROWS];
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int w = 0; w < width; w++) total[i][w] = (vec){0};
    }
    for (long d = 0; d < dim; d += 4) {
        four a0 = load_four(k0 + d), a1 = load_four(k1 + d), a2 = load_four(k2 + d), a3 = load_four(k3 + d);
        UNROLL for (int lane = 0; lane < 4; lane++, queries += columns) {
            UNROLL for (int w = 0; w < width; w++) {
                vec query = load(queries + w * LANES);
                total[0][w] += query * a0[lane];
                total[1][w] += query * a1[lane];
                total[2][w] += query * a2[lane];
                total[3][w] += query * a3[lane];
            }
        }
    }
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int w = 0; w < width; w++) store(scores + i * columns + w * LANES, total[i][w]);
    }
}

/* Makes `count` a multiple of four: there must be keys, and room for scores. `next` are the values of the tile. */
KERNEL score_queries(const float *queries, long columns, vectors keys, vectors next, long count, long dim,
                     float *scores) {
    for (long key = 0; key < count; key += 4, scores += 4 * columns) {
        for (long i = key; i < key + 4; i++) {
            for (long d = 0; d < dim; d += LINE_FLOATS) fetch(next, i, d);
        }
        long at = 0;
        for (; at + TILE_ROWS * LANES <= columns; at += TILE_ROWS * LANES)
            score_four_keys(TILE_ROWS, queries + at, columns, keys, key, dim, scores + at);
        /* What is left in one go: sums of one vector alone would wait for each other. */
        switch ((columns - at) / LANES) {
        case 1: score_four_keys(1, queries + at, columns, keys, key, dim, scores + at); break;
#if TILE_ROWS == 4
        case 2: score_four_keys(2, queries + at, columns, keys, key, dim, scores + at); break;
        case 3: score_four_keys(3, queries + at, columns, keys, key, dim, scores + at); break;
#endif
        }
    }
}

/* Scores of all queries become weights. What a query does not see has the score -INFINITY. Makes `count` a multiple of
 * AT_ONCE: there must be scores. */
KERNEL weigh_queries(const softmax *state, float *scores, long columns, long count) {
    for (long at = 0; at < columns; at += LANES) {
        vec before = load(state->largest + at), largest[AT_ONCE], x[AT_ONCE], sum = {0};
        UNROLL for (int i = 0; i < AT_ONCE; i++) largest[i] = before;
        for (long key = 0; key < count; key += AT_ONCE) {
            UNROLL for (int i = 0; i < AT_ONCE; i++)
                largest[i] = larger(largest[i], load(scores + (key + i) * columns + at));
        }
        vec now = larger(larger(largest[0], largest[1]), larger(largest[2], largest[3]));
        for (long key = 0; key < count; key += AT_ONCE) {
            float *from = scores + key * columns + at;
            UNROLL for (int i = 0; i < AT_ONCE; i++) x[i] = load(from + i * columns) - now;
            powers_of_two(AT_ONCE, x);
            UNROLL for (int i = 0; i < AT_ONCE; i++) store(from + i * columns, x[i]);
            UNROLL for (int i = 0; i < AT_ONCE; i++) sum += x[i];
        }
        x[0] = before - now;
        powers_of_two(1, x);
        for (int lane = 0; lane < LANES; lane++) {
            if (x[0][lane] != 1.0f) scale_sums(state, at + lane, x[0][lane]);
        }
        store(state->weight + at, load(state->weight + at) * x[0] + sum);
        store(state->largest + at, now);
    }
}

/* Adds weight times value for TILE_ROWS queries over `width` vectors of dimensions, a constant where inlined. */
ALWAYS_INLINE void add_values(int width, const float *weights, long columns, vectors values, long count, long at,
                              float *sums, long padded) {
    vec total[TILE_ROWS][WIDTH];
    UNROLL for (int r = 0; r < TILE_ROWS; r++) {
        UNROLL for (int w = 0; w < width; w++) total[r][w] = load(sums + r * padded + at + w * LANES);
    }
    for (long key = 0; key < count; key++, weights += columns) {
        const float *from = floats_of(values, key) + at;
        four weight = load_four(weights);
        UNROLL for (int w = 0; w < width; w++) {
            vec value = load(from + w * LANES);
            UNROLL for (int r = 0; r < TILE_ROWS; r++) total[r][w] += value * weight[r];
        }
    }
    UNROLL for (int r = 0; r < TILE_ROWS; r++) {
        UNROLL for (int w = 0; w < width; w++) store(sums + r * padded + at + w * LANES, total[r][w]);
    }
}

/* `next` are `coming` keys of the tile that follows. */
KERNEL add_values_to_queries(const softmax *state, const float *weights, long columns, long queries, vectors values,
                             long count, vectors next, long coming) {
    const long padded = state->padded;
    long asked = 0;
    for (long query = 0; query < queries; query += TILE_ROWS) {
        for (; asked * queries < coming * (query + TILE_ROWS) && asked < coming; asked++) {
            for (long d = 0; d < padded; d += LINE_FLOATS) fetch(next, asked, d);
        }
        float *sums = state->sums + query * padded;
        long at = 0;
        for (; at + WIDTH * LANES <= padded; at += WIDTH * LANES)
            add_values(WIDTH, weights + query, columns, values, count, at, sums, padded);
        for (; at < padded; at += LANES) add_values(1, weights + query, columns, values, count, at, sums, padded);
    }
}

/* ---- keys in lanes ---- */

/* Adds to the scores of `rows` queries with four keys what dimensions d.. of one vector give. */
ALWAYS_INLINE void score_step(int rows, const float *queries, long padded, const uint8_t *const *keys, long d,
                              enum layout stored, vec (*total)[4]) {
    vec k0 = load_numbers(keys[0], d, stored), k1 = load_numbers(keys[1], d, stored);
    vec k2 = load_numbers(keys[2], d, stored), k3 = load_numbers(keys[3], d, stored);
    UNROLL for (int r = 0; r < rows; r++) {
        vec query = load(queries + r * padded + d);
        total[r][0] += query * k0;
        total[r][1] += query * k1;
        total[r][2] += query * k2;
        total[r][3] += query * k3;
    }
}

/* Scores of `rows` queries with keys key..key+3, `rows` a constant where inlined. */
ALWAYS_INLINE void score_rows(int rows, const float *queries, long padded, vectors keys, vectors next, long key,
                              enum layout stored, float *scores) {
    const uint8_t *from[4];
    vec total[TILE_ROWS][4];
    UNROLL for (int i = 0; i < 4; i++) from[i] = keys.places[key + i] + keys.offset;
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int i = 0; i < 4; i++) total[r][i] = (vec){0};
    }
    long d = 0;
    for (; d + LINE_FLOATS <= padded; d += LINE_FLOATS) {
        UNROLL for (int i = 0; i < 4; i++) fetch(next, key + i, d);
        UNROLL for (int i = 0; i < LINE_FLOATS; i += LANES) score_step(rows, queries, padded, from, d + i, stored, total);
    }
    for (; d < padded; d += LANES) score_step(rows, queries, padded, from, d, stored, total);
    UNROLL for (int r = 0; r < rows; r++) sums_of_four(total[r], scores + r * TILE_KEYS + key);
}

ALWAYS_INLINE void score_group_of(const float *queries, long group, long padded, vectors keys, vectors next,
                                  enum layout stored, float *scores) {
    for (; group > 0; group -= TILE_ROWS, queries += TILE_ROWS * padded, scores += TILE_ROWS * TILE_KEYS) {
        for (long key = 0; key < STEP_KEYS; key += 4) {
            switch (group) {
            case 1: score_rows(1, queries, padded, keys, next, key, stored, scores); break;
#if TILE_ROWS == 4
            case 2: score_rows(2, queries, padded, keys, next, key, stored, scores); break;
            case 3: score_rows(3, queries, padded, keys, next, key, stored, scores); break;
#endif
            default: score_rows(TILE_ROWS, queries, padded, keys, next, key, stored, scores); break;
            }
        }
    }
}

/* Scores [group, TILE_KEYS] of one kv head's queries [group, padded] with STEP_KEYS keys; `next` are as many. */
KERNEL score_group(const float *queries, long group, long padded, vectors keys, vectors next, float *scores) {
    score_group_of(queries, group, padded, keys, next, F32, scores);
}

#if defined(READS_HALVES)
/* The same with keys in float16. */
KERNEL score_group_halves(const float *queries, long group, long padded, vectors keys, vectors next, float *scores) {
    score_group_of(queries, group, padded, keys, next, F16, scores);
}
#endif

/* Scores of one query become weights; beyond `count`, to AT_ONCE whole vectors, they become zero. */
KERNEL weigh_keys(const softmax *state, long query, float *scores, long count) {
    for (long i = count; i % (AT_ONCE * LANES) != 0; i++) scores[i] = -INFINITY;
    const float before = state->largest[query];
    vec largest[AT_ONCE], x[AT_ONCE], sum = {0};
    UNROLL for (int i = 0; i < AT_ONCE; i++) largest[i] = spread(before);
    for (long key = 0; key < count; key += AT_ONCE * LANES) {
        UNROLL for (int i = 0; i < AT_ONCE; i++) largest[i] = larger(largest[i], load(scores + key + i * LANES));
    }
    const float now = largest_of(larger(larger(largest[0], largest[1]), larger(largest[2], largest[3])));
    for (long key = 0; key < count; key += AT_ONCE * LANES) {
        UNROLL for (int i = 0; i < AT_ONCE; i++) x[i] = load(scores + key + i * LANES) - now;
        powers_of_two(AT_ONCE, x);
        UNROLL for (int i = 0; i < AT_ONCE; i++) store(scores + key + i * LANES, x[i]);
        sum += (x[0] + x[1]) + (x[2] + x[3]);
    }
    if (now != before) {
        x[0] = spread(before - now);
        powers_of_two(1, x);
        state->weight[query] *= x[0][0];
        state->largest[query] = now;
        scale_sums(state, query, x[0][0]);
    }
    state->weight[query] += sum_of(sum);
}

/* Adds weight times value for `rows` queries over `width` vectors of dimensions, both constants where inlined. Takes
 * four keys at a time: beyond the last, weights are zero and values are those of any key. */
ALWAYS_INLINE void add_row_values(int rows, int width, const float *weights, vectors values, vectors next, long count,
                                  long at, enum layout stored, float *sums, long padded) {
    vec total[TILE_ROWS][WIDTH];
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int w = 0; w < width; w++) total[r][w] = load(sums + r * padded + at + w * LANES);
    }
    for (long key = 0; key < count; key += 4) {
        four weight[TILE_ROWS];
        UNROLL for (int r = 0; r < rows; r++) weight[r] = load_four(weights + r * TILE_KEYS + key);
        UNROLL for (int lane = 0; lane < 4; lane++) {
            const uint8_t *from = values.places[key + lane] + values.offset;
            vec value[WIDTH];
            UNROLL for (int w = 0; w < width; w++) value[w] = load_numbers(from, at + w * LANES, stored);
            UNROLL for (int line = 0; line < width * LANES; line += LINE_FLOATS) fetch(next, key + lane, at + line);
            UNROLL for (int r = 0; r < rows; r++) {
                UNROLL for (int w = 0; w < width; w++) total[r][w] += value[w] * weight[r][lane];
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int w = 0; w < width; w++) store(sums + r * padded + at + w * LANES, total[r][w]);
    }
}

ALWAYS_INLINE void add_values_of(int rows, const float *weights, vectors values, vectors next, long count,
                                 enum layout stored, float *sums, long padded) {
    long at = 0;
    for (; at + WIDTH * LANES <= padded; at += WIDTH * LANES)
        add_row_values(rows, WIDTH, weights, values, next, count, at, stored, sums, padded);
    for (; at < padded; at += LANES)
        add_row_values(rows, 1, weights, values, next, count, at, stored, sums, padded);
}

ALWAYS_INLINE void add_group_values(const softmax *state, long query, long group, const float *weights, vectors values,
                                    vectors next, long count, enum layout stored) {
    const long padded = state->padded;
    float *sums = state->sums + query * padded;
    for (; group > 0; group -= TILE_ROWS, sums += TILE_ROWS * padded, weights += TILE_ROWS * TILE_KEYS) {
        switch (group) {
        case 1: add_values_of(1, weights, values, next, count, stored, sums, padded); break;
#if TILE_ROWS == 4
        case 2: add_values_of(2, weights, values, next, count, stored, sums, padded); break;
        case 3: add_values_of(3, weights, values, next, count, stored, sums, padded); break;
#endif
        default: add_values_of(TILE_ROWS, weights, values, next, count, stored, sums, padded); break;
        }
    }
}

/* For the `group` queries of one kv head, of which the first is `query`. `next` are as many values, in fours. */
KERNEL add_values_to_group(const softmax *state, long query, long group, const float *weights, vectors values,
                           vectors next, long count) {
    add_group_values(state, query, group, weights, values, next, count, F32);
}

#if defined(READS_HALVES)
/* The same with values in float16. */
KERNEL add_halves_to_group(const softmax *state, long query, long group, const float *weights, vectors values,
                           vectors next, long count) {
    add_group_values(state, query, group, weights, values, next, count, F16);
}
#endif

#endif
