/* Paged attention with the softmax carried along (running maximum and sum), so scores never leave the cache.
 *
 *   piece = (row, kv head, some queries, some keys)     what a thread takes at a time
 *     the queries of all heads that share the kv head stand together: keys and values are read once for them
 *     keys pass in tiles of TILE_KEYS: scores -> weights -> weighted values added to the sums
 *
 * A row of one token with a long context is cut at every PIECE_KEYS positions, and the parts are joined at the end.
 * Where the cuts lie depends on positions alone: an answer does not change with its company or the threads. */
#include "attention.h"

#include <math.h>

#include "parallel.h"
#include "vector.h"

#define TILE_KEYS 64
#define PIECE_KEYS 128
#define PIECE_QUERIES 48 /* queries times heads of a group, about: their sums stay in the first-level cache */

typedef struct {
    int32_t row, head;
    int32_t query, queries;        /* first of the row's tokens, and how many */
    int32_t first_key, last_key;   /* positions */
    int32_t part, parts;           /* which of how many that are joined */
    int32_t partial;               /* where its sums are kept; only when parts > 1 */
} piece;

typedef struct {
    const attention *wanted;
    piece *pieces;
    float *partials; /* [partial][head of the group][dim sums, maximum, sum of weights] */
    long group, padded, partial_floats;
    work_queue queue;
} attention_work;

/* What one thread works in. */
typedef struct {
    float *query, *sums;       /* [queries * group, padded] */
    float *scores;             /* [queries * group, TILE_KEYS] */
    float *keys, *values;      /* [TILE_KEYS, padded]: only where the stored form cannot be read in place */
    float *largest, *weight;   /* [queries * group] */
    const float *key[TILE_KEYS], *value[TILE_KEYS];
} bench;

static long row_count(const attention *wanted, long row) { return wanted->counts != NULL ? wanted->counts[row] : 1; }

static long first_seen(const attention *wanted, long position) {
    long first = wanted->window > 0 ? position - wanted->window + 1 : 0;
    return first > 0 ? first : 0;
}

static float *head_of(const attention *wanted, float *tokens, long stride, const piece *part, long i, long group) {
    long first = wanted->firsts != NULL ? wanted->firsts[part->row] : part->row;
    return tokens + (first + part->query + i / group) * stride + (part->head * group + i % group) * wanted->dim;
}

/* One stored vector as floats, zero beyond its end. */
static void widen(const attention *wanted, const uint8_t *stored, float *out, long padded) {
    const long dim = wanted->dim;
    if (wanted->stored == F32) {
        memcpy(out, stored, (size_t)dim * sizeof(float));
    } else if (wanted->stored == F16) {
        const _Float16 *halves = (const _Float16 *)stored;
        for (long i = 0; i < dim; i++) out[i] = (float)halves[i];
    } else {
        const uint16_t *halves = (const uint16_t *)stored;
        uint32_t *bits = (uint32_t *)out;
        for (long i = 0; i < dim; i++) bits[i] = (uint32_t)halves[i] << 16;
    }
    for (long i = dim; i < padded; i++) out[i] = 0;
}

/* Vectors that are needed soon: heads lie apart in a page, so the machine would not foresee them. */
static void fetch(const uint8_t *stored, long tokens, long token_bytes, long bytes) {
    for (long i = 0; i < tokens; i++, stored += token_bytes) {
        for (long line = 0; line < bytes; line += 64) __builtin_prefetch(stored + line);
    }
}

/* Points at the keys and values of positions first..last-1, in their pages or widened. */
static void find_tile(const attention_work *work, bench *here, const piece *part, long first, long last) {
    const attention *wanted = work->wanted;
    const long slot = wanted->slots != NULL ? wanted->slots[part->row] : part->row, padded = work->padded;
    const int32_t *table = wanted->tables + slot * wanted->table_stride;
    const long bytes = wanted->dim * (wanted->stored == F32 ? 4 : 2), token = wanted->kv_heads * bytes;
    const int in_place = wanted->stored == F32 && padded == wanted->dim;
    long i = 0;
    for (long position = first; position < last;) {
        long block = position / wanted->block_tokens, within = position - block * wanted->block_tokens;
        long tokens = wanted->block_tokens - within < last - position ? wanted->block_tokens - within : last - position;
        const uint8_t *base = wanted->keys + part->head * bytes + within * token;
        const uint8_t *key = base + table[block] * wanted->page_bytes, *value = key + (wanted->values - wanted->keys);
        long ahead = position + TILE_KEYS;
        /* Keys are multiplied while this tile's values and the next tile's keys are on their way. */
        if (in_place) fetch(value, tokens, token, bytes);
        if (ahead < part->last_key)
            fetch(base + table[ahead / wanted->block_tokens] * wanted->page_bytes, tokens, token, bytes);
        position += tokens;
        for (; tokens > 0; tokens--, i++, key += token, value += token) {
            here->key[i] = in_place ? (const float *)key : here->keys + i * padded;
            here->value[i] = in_place ? (const float *)value : here->values + i * padded;
            if (in_place) continue;
            widen(wanted, key, here->keys + i * padded, padded);
            widen(wanted, value, here->values + i * padded, padded);
        }
    }
    /* Score tiles are four keys wide: beyond the last key stands the last again, its scores are dropped. */
    for (; i % TILE_COLUMNS != 0; i++) here->key[i] = here->key[last - first - 1];
}

static void score_tile(const attention_work *work, bench *here, long queries, long keys) {
    for (long row = 0; row < queries; row += TILE_ROWS) {
        int rows = queries - row < TILE_ROWS ? (int)(queries - row) : TILE_ROWS;
        const float *query[TILE_ROWS];
        for (int r = 0; r < rows; r++) query[r] = here->query + (row + r) * work->padded;
        float *scores = here->scores + row * TILE_KEYS;
        for (long key = 0; key < keys; key += TILE_COLUMNS)
            dot_tile_of(rows, query, here->key + key, work->padded, scores + key, TILE_KEYS);
    }
}

/* Scores of one query become weights; what was summed before is scaled to the new maximum. Keys from..to-1 are seen. */
static void weigh_scores(const attention_work *work, bench *here, long query, long from, long to) {
    float *scores = here->scores + query * TILE_KEYS;
    if (from < 0) from = 0;
    if (to > TILE_KEYS) to = TILE_KEYS;
    if (from >= to) {
        memset(scores, 0, sizeof(float) * TILE_KEYS);
        return;
    }
    for (long i = 0; i < from; i++) scores[i] = -INFINITY;
    for (long i = to; i < TILE_KEYS; i++) scores[i] = -INFINITY;
    vec largest = spread(here->largest[query]), sum = {0};
    for (long i = 0; i < to; i += LANES) largest = larger(largest, load(scores + i));
    float now = largest_of(largest);
    for (long i = 0; i < to; i += LANES) store(scores + i, exponential(load(scores + i) - now));
    memset(scores, 0, sizeof(float) * (size_t)from);
    memset(scores + to, 0, sizeof(float) * (size_t)(TILE_KEYS - to));
    for (long i = 0; i < to; i += LANES) sum += load(scores + i);
    if (now > here->largest[query]) {
        float shrink = expf(here->largest[query] - now), *sums = here->sums + query * work->padded;
        here->weight[query] *= shrink;
        for (long i = 0; i < work->padded; i += LANES) store(sums + i, load(sums + i) * shrink);
        here->largest[query] = now;
    }
    here->weight[query] += sum_of(sum);
}

/* Adds weight times value for `rows` queries over `width` vectors of dimensions, both constants where inlined. */
ALWAYS_INLINE void add_values(int rows, int width, const float *weights, const float *const *values, long keys, long at,
                              float *sums, long padded) {
    vec total[TILE_ROWS][4];
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int w = 0; w < width; w++) total[r][w] = load(sums + r * padded + at + w * LANES);
    }
    for (long key = 0; key < keys; key++) {
        vec value[4];
        UNROLL for (int w = 0; w < width; w++) value[w] = load(values[key] + at + w * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            float weight = weights[r * TILE_KEYS + key];
            UNROLL for (int w = 0; w < width; w++) total[r][w] += value[w] * weight;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int w = 0; w < width; w++) store(sums + r * padded + at + w * LANES, total[r][w]);
    }
}

ALWAYS_INLINE void add_values_of(int rows, const float *weights, const float *const *values, long keys, float *sums,
                                 long padded) {
    long at = 0;
    for (; at + 4 * LANES <= padded; at += 4 * LANES) add_values(rows, 4, weights, values, keys, at, sums, padded);
    for (; at < padded; at += LANES) add_values(rows, 1, weights, values, keys, at, sums, padded);
}

static void value_tile(const attention_work *work, bench *here, long queries, long keys) {
    for (long row = 0; row < queries; row += TILE_ROWS) {
        const float *weights = here->scores + row * TILE_KEYS;
        float *sums = here->sums + row * work->padded;
        switch (queries - row) {
        case 1: add_values_of(1, weights, here->value, keys, sums, work->padded); break;
#if TILE_ROWS == 4
        case 2: add_values_of(2, weights, here->value, keys, sums, work->padded); break;
        case 3: add_values_of(3, weights, here->value, keys, sums, work->padded); break;
#endif
        default: add_values_of(TILE_ROWS, weights, here->value, keys, sums, work->padded); break;
        }
    }
}

static void open_bench(const attention_work *work, bench *here, const piece *part) {
    const attention *wanted = work->wanted;
    const long queries = part->queries * work->group;
    for (long i = 0; i < queries; i++) {
        const float *from = head_of(wanted, (float *)wanted->query, wanted->query_stride, part, i, work->group);
        float *to = here->query + i * work->padded;
        for (long d = 0; d < wanted->dim; d++) to[d] = from[d] * wanted->scale;
        for (long d = wanted->dim; d < work->padded; d++) to[d] = 0;
        here->largest[i] = -INFINITY;
        here->weight[i] = 0;
    }
    memset(here->sums, 0, sizeof(float) * (size_t)(queries * work->padded));
}

static void close_bench(const attention_work *work, const bench *here, const piece *part) {
    const attention *wanted = work->wanted;
    for (long i = 0; i < part->queries * work->group; i++) {
        const float *sums = here->sums + i * work->padded;
        if (part->parts > 1) {
            float *kept = work->partials + part->partial * work->partial_floats + i * (wanted->dim + 2);
            memcpy(kept, sums, sizeof(float) * (size_t)wanted->dim);
            kept[wanted->dim] = here->largest[i];
            kept[wanted->dim + 1] = here->weight[i];
            continue;
        }
        float *out = head_of(wanted, wanted->out, wanted->out_stride, part, i, work->group);
        float inverse = part->last_key > part->first_key ? 1.0f / here->weight[i] : 0.0f;
        for (long d = 0; d < wanted->dim; d++) out[d] = sums[d] * inverse;
    }
}

static void attend_piece(const attention_work *work, bench *here, const piece *part) {
    const attention *wanted = work->wanted;
    const long queries = part->queries * work->group;
    const long position = wanted->ends[part->row] - row_count(wanted, part->row) + part->query;
    open_bench(work, here, part);
    for (long first = part->first_key; first < part->last_key; first += TILE_KEYS) {
        long last = first + TILE_KEYS < part->last_key ? first + TILE_KEYS : part->last_key;
        find_tile(work, here, part, first, last);
        score_tile(work, here, queries, last - first);
        for (long i = 0; i < queries; i++) {
            long at = position + i / work->group, seen = at + 1 < last ? at + 1 : last;
            weigh_scores(work, here, i, first_seen(wanted, at) - first, seen - first);
        }
        value_tile(work, here, queries, last - first);
    }
    close_bench(work, here, part);
}

/* Joins the parts of one row and kv head, as if they had been one. */
static void join_parts(const attention_work *work, const piece *part) {
    const attention *wanted = work->wanted;
    const long dim = wanted->dim;
    for (long i = 0; i < work->group; i++) {
        const float *kept = work->partials + part->partial * work->partial_floats + i * (dim + 2);
        float *out = head_of(wanted, wanted->out, wanted->out_stride, part, i, work->group);
        float largest = -INFINITY, weight = 0;
        for (long p = 0; p < part->parts; p++) largest = fmaxf(largest, kept[p * work->partial_floats + dim]);
        for (long d = 0; d < dim; d++) out[d] = 0;
        for (long p = 0; p < part->parts; p++, kept += work->partial_floats) {
            float share = expf(kept[dim] - largest);
            weight += share * kept[dim + 1];
            for (long d = 0; d < dim; d++) out[d] += share * kept[d];
        }
        for (long d = 0; d < dim; d++) out[d] /= weight;
    }
}

static long most_queries(const attention_work *work) {
    long most = PIECE_QUERIES / work->group;
    return most > 0 ? most : 1;
}

static size_t bench_floats(const attention_work *work) {
    size_t queries = (size_t)(most_queries(work) * work->group), padded = (size_t)work->padded;
    return queries * (2 * padded + TILE_KEYS + 2) + 2 * TILE_KEYS * padded;
}

static void run_pieces(void *pointer) {
    attention_work *work = pointer;
    bench here;
    float *memory = scratch(SCRATCH_OWN, sizeof(float) * bench_floats(work));
    if (memory == NULL) return; /* the others do it: attend() has its own before it starts */
    const long queries = most_queries(work) * work->group, padded = work->padded;
    here.query = memory;
    here.sums = here.query + queries * padded;
    here.keys = here.sums + queries * padded;
    here.values = here.keys + TILE_KEYS * padded;
    here.scores = here.values + TILE_KEYS * padded;
    here.largest = here.scores + queries * TILE_KEYS;
    here.weight = here.largest + queries;
    for (long unit; (unit = claim(&work->queue)) >= 0;) attend_piece(work, &here, work->pieces + unit);
}

static void run_joins(void *pointer) {
    attention_work *work = pointer;
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        const piece *part = work->pieces + unit;
        if (part->parts > 1 && part->part == 0) join_parts(work, part);
    }
}

/* Pieces of one row, for one kv head; returns how many. Only counts them when `out` is NULL. */
static long cut_row(const attention_work *work, long row, long head, piece *out, long *partials) {
    const attention *wanted = work->wanted;
    const long count = row_count(wanted, row), end = wanted->ends[row], most = most_queries(work);
    long pieces = 0;
    if (count == 1) {
        long first = end > 0 ? first_seen(wanted, end - 1) : 0, parts = 0;
        parts = end > first ? (end - 1) / PIECE_KEYS - first / PIECE_KEYS + 1 : 1;
        for (long part = 0; part < parts; part++, pieces++) {
            long from = part == 0 ? first : (first / PIECE_KEYS + part) * PIECE_KEYS;
            long to = part == parts - 1 ? end : (first / PIECE_KEYS + part + 1) * PIECE_KEYS;
            if (out != NULL)
                out[pieces] = (piece){(int32_t)row, (int32_t)head,  0, 1, (int32_t)from, (int32_t)to, (int32_t)part,
                                      (int32_t)parts, (int32_t)(*partials + part)};
        }
        if (parts > 1) *partials += parts;
        return pieces;
    }
    /* The last queries see the most keys: they come first, so that the threads end together. */
    for (long query = (count - 1) / most * most; query >= 0; query -= most, pieces++) {
        long queries = count - query < most ? count - query : most, position = end - count + query;
        if (out != NULL)
            out[pieces] = (piece){(int32_t)row, (int32_t)head, (int32_t)query, (int32_t)queries,
                                  (int32_t)first_seen(wanted, position), (int32_t)(position + queries), 0, 1, 0};
    }
    return pieces;
}

static long cut_rows(const attention_work *work, piece *out, long *partials) {
    long pieces = 0;
    *partials = 0;
    /* Rows of many tokens are the large pieces, and stand last in a batch. */
    for (long row = work->wanted->rows - 1; row >= 0; row--) {
        for (long head = 0; head < work->wanted->kv_heads; head++)
            pieces += cut_row(work, row, head, out != NULL ? out + pieces : NULL, partials);
    }
    return pieces;
}

int attend(const attention *wanted) {
    if (wanted->rows == 0) return 0;
    attention_work work = {.wanted = wanted, .group = wanted->heads / wanted->kv_heads};
    work.padded = (wanted->dim + LANES - 1) / LANES * LANES;
    work.partial_floats = work.group * (wanted->dim + 2);
    long partials, pieces = cut_rows(&work, NULL, &partials);
    work.pieces = scratch(SCRATCH_TEAM, sizeof(piece) * (size_t)pieces +
                                            sizeof(float) * (size_t)(partials * work.partial_floats));
    if (work.pieces == NULL || scratch(SCRATCH_OWN, sizeof(float) * bench_floats(&work)) == NULL) return -1;
    work.partials = (float *)(work.pieces + pieces);
    cut_rows(&work, work.pieces, &partials);
    work.queue.units = pieces;
    run_parallel(run_pieces, &work, pieces > 1 ? wanted->threads : 1);
    if (partials > 0) {
        atomic_store(&work.queue.next, 0);
        run_parallel(run_joins, &work, partials > 64 ? wanted->threads : 1);
    }
    return 0;
}
