/* Paged attention with the softmax carried along (running maximum and sum), so scores never leave the cache.
 *
 *   piece = (row, kv heads, some queries, some keys)     what a thread takes at a time
 *     a row of one token: all kv heads together, so that pages are read from end to end, as they lie in memory
 *     a row of many: one kv head, whose keys and values then serve many queries from the cache; the queries stand in
 *     panels, which pass over a tile of keys one after the other: what is stored in halves is widened once for all
 *     the queries of all heads that share a kv head stand together: keys and values are read once for them
 *     keys pass in tiles: scores -> weights -> weighted values added to the sums
 *
 * A row of one token with a long context is cut at every PIECE_KEYS positions, and the parts are joined at the end.
 * Where the cuts lie depends on positions alone: an answer does not change with its company or the threads. Tiles of a
 * row of many tokens end at multiples of TILE_KEYS, whichever queries stand together. */
#if defined(__GNUC__) && !defined(__clang__)
/* gcc's first scheduling pass moves so many loads ahead of the products that registers run out. */
#pragma GCC optimize("no-schedule-insns")
#endif

#include "attention.h"

#include "attention_tiles.h"
#include "float8.h"
#include "parallel.h"
#include "plain_numbers.h"

#define PIECE_KEYS 128
#define SPARE_KEYS (2 * STEP_KEYS)
#define NEXT_TILE (TILE_KEYS + SPARE_KEYS) /* two of them are room for PIECE_KEYS and SPARE_KEYS */
#define CROWDING_BYTES 2048
#define PANEL_QUERIES 48 /* queries times heads of a group, about: their sums stay in the first-level cache */
#define MOST_PANELS 4    /* of a piece */
#define QUERIES_AHEAD 4  /* tokens whose queries are asked for early */
#define EVEN_PIECES 8    /* of each thread, so that all end at about the same time */
#define PANELS_BYTES (192L << 10) /* of all panels of a piece, about: in the second-level cache */

typedef struct {
    int32_t row;
    int32_t head, heads;           /* kv heads */
    int32_t query, queries;        /* first of the row's tokens, and how many */
    int32_t first_key, last_key;   /* positions */
    int32_t part, parts;           /* which of how many that are joined */
    int32_t partial;               /* where its sums are kept; only when parts > 1 */
} piece;

typedef struct {
    const attention *wanted;
    piece *pieces;
    float *partials; /* [partial][head][dim sums, maximum, sum of weights] */
    long group, padded, partial_floats;
    long heads_together; /* kv heads of a piece of one token */
    long panels;         /* of a piece of many tokens, at most */
    work_queue queue;
} attention_work;

/* Queries that are scored together: some of a piece of many tokens, or all of a piece of one. */
typedef struct {
    float *query;  /* many: [dim, columns]; of one token: [heads, padded] */
    softmax state; /* of as many queries */
    float *scores; /* many: [TILE_KEYS, columns]; of one token: [heads, TILE_KEYS] */
    long columns;  /* queries, in whole vectors */
    long token, tokens; /* first of the piece's, and how many */
} query_panel;

/* What one thread works in. */
typedef struct {
    query_panel panels[MOST_PANELS];
    float *copied; /* [TILE_KEYS, padded] as floats: only where the stored form is not read in place */
    const uint8_t *copied_at[TILE_KEYS];
    /* The piece's first kv head of each position. Many: this tile and the next, in turn at 0 and at NEXT_TILE. */
    const uint8_t *key[2 * NEXT_TILE], *value[2 * NEXT_TILE];
} bench;

static long shorter(long a, long b) { return a < b ? a : b; }

static long round_up(long count, long unit) { return (count + unit - 1) / unit * unit; }

static long row_count(const attention *wanted, long row) { return wanted->counts != NULL ? wanted->counts[row] : 1; }

static long first_seen(const attention *wanted, long position) {
    long first = wanted->window > 0 ? position - wanted->window + 1 : 0;
    return first > 0 ? first : 0;
}

static long element_bytes(const attention *wanted) {
    return wanted->stored == F32 ? 4 : wanted->stored == E4M3 || wanted->stored == E5M2 ? 1 : 2;
}

static long head_bytes(const attention *wanted) { return wanted->dim * element_bytes(wanted); }

/* Query or output i of a piece. */
static float *head_of(const attention_work *work, float *tokens, long stride, const piece *part, long i) {
    long first = work->wanted->firsts != NULL ? work->wanted->firsts[part->row] : part->row;
    long together = part->heads * work->group;
    long head = part->head * work->group + i % together;
    return tokens + (first + part->query + i / together) * stride + head * work->wanted->dim;
}

/* One stored vector as floats, zero beyond its end. */
static void widen(const attention *wanted, const uint8_t *stored, float *out, long padded) {
    const long dim = wanted->dim;
    if (wanted->stored == F32) {
        memcpy(out, stored, (size_t)dim * sizeof(float));
    } else if (wanted->stored == F16) {
        const _Float16 *halves = (const _Float16 *)stored;
        long i = 0;
#if defined(__F16C__) /* gcc would convert one at a time */
        for (; i + LANES <= dim; i += LANES) store(out + i, load_numbers(stored, i, F16));
#endif
        for (; i < dim; i++) out[i] = (float)halves[i];
    } else if (wanted->stored == E4M3) {
        for (long i = 0; i < dim; i++) out[i] = float8_value(stored[i], E4M3);
    } else if (wanted->stored == E5M2) {
        for (long i = 0; i < dim; i++) out[i] = float8_value(stored[i], E5M2);
    } else {
        const uint16_t *halves = (const uint16_t *)stored;
        uint32_t *bits = (uint32_t *)out;
        for (long i = 0; i < dim; i++) bits[i] = (uint32_t)halves[i] << 16;
    }
    for (long i = dim; i < padded; i++) out[i] = 0;
}

/* Points at the keys and values of positions first..last-1, from key[at] on. */
static void find_keys(const attention_work *work, bench *here, const piece *part, long first, long last, long at) {
    const attention *wanted = work->wanted;
    const long slot = wanted->slots != NULL ? wanted->slots[part->row] : part->row;
    const int32_t *table = wanted->tables + slot * wanted->table_stride;
    const long bytes = head_bytes(wanted), token = wanted->kv_heads * bytes;
    for (long position = first; position < last;) {
        long block = position / wanted->block_tokens, within = position - block * wanted->block_tokens;
        long tokens = shorter(wanted->block_tokens - within, last - position);
        const uint8_t *key = wanted->keys + table[block] * wanted->page_bytes + part->head * bytes + within * token;
        position += tokens;
        for (; tokens > 0; tokens--, at++, key += token) {
            here->key[at] = key;
            here->value[at] = key + (wanted->values - wanted->keys);
        }
    }
    /* Keys are taken by fours, and more are fetched ahead: beyond the last stands the last again, with no weight. */
    for (long i = 0; i < SPARE_KEYS; i++, at++) {
        here->key[at] = here->key[at - 1];
        here->value[at] = here->value[at - 1];
    }
}

/* Vectors of `head`, counted from the piece's first, as they are stored. */
static vectors stored_vectors(const attention_work *work, const uint8_t *const *places, long head) {
    const attention *wanted = work->wanted;
    return (vectors){places, head * head_bytes(wanted), element_bytes(wanted)};
}

/* The same as floats: in their pages, or copied, valid until the next are. */
static vectors float_vectors(const attention_work *work, bench *here, const uint8_t *const *places, long count,
                             long head, int in_place) {
    const attention *wanted = work->wanted;
    vectors stored = stored_vectors(work, places, head);
    if (in_place && wanted->stored == F32 && work->padded == wanted->dim) return stored;
    for (long i = 0; i < count; i++) {
        float *room = here->copied + i * work->padded;
        widen(wanted, places[i] + stored.offset, room, work->padded);
        here->copied_at[i] = (const uint8_t *)room;
    }
    return (vectors){here->copied_at, 0, 4};
}

/* Takes from the queries what they do not see of positions first..last-1, and what stands beyond to a round number. */
static void hide_unseen(const attention_work *work, const query_panel *here, long position, long first, long last) {
    const attention *wanted = work->wanted;
    const long keys = round_up(last - first, AT_ONCE), columns = here->columns;
    if (keys == last - first && last <= position + 1 && first >= first_seen(wanted, position + here->tokens - 1))
        return;
    for (long i = 0; i < here->tokens * work->group; i++) {
        long at = position + i / work->group, from = first_seen(wanted, at) - first, to = shorter(at + 1, last) - first;
        for (long key = 0; key < from && key < keys; key++) here->scores[key * columns + i] = -INFINITY;
        for (long key = to > 0 ? to : 0; key < keys; key++) here->scores[key * columns + i] = -INFINITY;
    }
}

/* Caps `count` scores, which are in powers of two; there is room for whole vectors. */
static void cap_scores(const attention *wanted, float *scores, long count) {
    if (wanted->softcap == 0) return;
    const float cap = wanted->softcap * 1.44269504f, steep = 2.0f / cap;
    for (long i = 0; i < count; i += LANES) {
        vec grown = exponential(load(scores + i) * steep);
        store(scores + i, cap - 2.0f * cap / (grown + 1.0f));
    }
}

static long panels_of(const piece *part, const bench *here) {
    const query_panel *last = here->panels;
    while (last->token + last->tokens < part->queries) last++;
    return last - here->panels + 1;
}

/* Where a panel of a piece begins. */
static long position_of(const attention_work *work, const piece *part, const query_panel *panel) {
    return work->wanted->ends[part->row] - row_count(work->wanted, part->row) + part->query + panel->token;
}

/* How many of the tile's keys, from the first on, some query of the panel sees. */
static long keys_seen(const attention_work *work, const query_panel *panel, long position, long first, long last) {
    const long end = shorter(last, position + panel->tokens);
    return end > first && last > first_seen(work->wanted, position) ? end - first : 0;
}

/* A row of many tokens: queries in lanes. */
static void attend_many(const attention_work *work, bench *here, const piece *part) {
    /* Tokens so far apart share few places of the first-level cache, and a tile could not stay there. */
    const int in_place = work->wanted->kv_heads * head_bytes(work->wanted) % CROWDING_BYTES != 0;
    const query_panel *end = here->panels + panels_of(part, here);
    long first = part->first_key, at = 0, keys = shorter(part->last_key - first, TILE_KEYS - first % TILE_KEYS);
    find_keys(work, here, part, first, first + keys, at);
    while (keys > 0) {
        const long last = first + keys, coming = shorter(part->last_key - last, TILE_KEYS), next_at = NEXT_TILE - at;
        vectors read = float_vectors(work, here, here->key + at, round_up(keys, 4), 0, in_place);
        vectors next = stored_vectors(work, here->value + at, 0);
        for (const query_panel *panel = here->panels; panel < end; panel++) {
            const long position = position_of(work, part, panel), seen = keys_seen(work, panel, position, first, last);
            if (seen == 0) continue;
            score_queries(panel->query, panel->columns, read, next, seen, work->wanted->dim, panel->scores);
            cap_scores(work->wanted, panel->scores, seen * panel->columns);
            hide_unseen(work, panel, position, first, first + seen);
            weigh_queries(&panel->state, panel->scores, panel->columns, seen);
        }
        read = float_vectors(work, here, here->value + at, keys, 0, in_place);
        if (coming > 0) find_keys(work, here, part, last, last + coming, next_at);
        next = stored_vectors(work, here->key + next_at, 0);
        for (const query_panel *panel = here->panels; panel < end; panel++) {
            const long seen = keys_seen(work, panel, position_of(work, part, panel), first, last);
            if (seen == 0) continue;
            add_values_to_queries(&panel->state, panel->scores, panel->columns, panel->tokens * work->group, read, seen,
                                  next, coming);
        }
        first = last, at = next_at, keys = coming;
    }
}

/* A row of one token: keys in lanes. Pages are read from end to end: some keys of all heads, then the next keys. */
static void attend_one(const attention_work *work, bench *here, const piece *part) {
    const long group = work->group, padded = work->padded, count = part->last_key - part->first_key;
    const query_panel *panel = here->panels;
    if (count == 0) return;
#if defined(READS_HALVES)
    const int halves = work->wanted->stored == F16 && padded == work->wanted->dim;
#endif
    find_keys(work, here, part, part->first_key, part->last_key, 0);
    for (long first = 0; first < count; first += TILE_KEYS) {
        const long last = shorter(first + TILE_KEYS, count);
        for (long i = first; i < last; i += STEP_KEYS) {
            for (long head = 0; head < part->heads; head++) {
                vectors next = stored_vectors(work, here->key + i + STEP_KEYS, head);
                float *scores = panel->scores + head * group * TILE_KEYS + i - first;
                const float *query = panel->query + head * group * padded;
#if defined(READS_HALVES)
                if (halves) {
                    score_group_halves(query, group, padded, stored_vectors(work, here->key + i, head), next, scores);
                    continue;
                }
#endif
                vectors read = float_vectors(work, here, here->key + i, STEP_KEYS, head, 1);
                score_group(query, group, padded, read, next, scores);
            }
        }
        for (long i = 0; i < part->heads * group; i++) {
            cap_scores(work->wanted, panel->scores + i * TILE_KEYS, last - first);
            weigh_keys(&panel->state, i, panel->scores + i * TILE_KEYS, last - first);
        }
        for (long i = first; i < last; i += STEP_KEYS) {
            const long keys = shorter(STEP_KEYS, last - i);
            for (long head = 0; head < part->heads; head++) {
                vectors next = stored_vectors(work, here->value + i + STEP_KEYS, head);
                const float *weights = panel->scores + head * group * TILE_KEYS + i - first;
#if defined(READS_HALVES)
                if (halves) {
                    vectors stored = stored_vectors(work, here->value + i, head);
                    add_halves_to_group(&panel->state, head * group, group, weights, stored, next, keys);
                    continue;
                }
#endif
                vectors read = float_vectors(work, here, here->value + i, round_up(keys, 4), head, 1);
                add_values_to_group(&panel->state, head * group, group, weights, read, next, keys);
            }
        }
    }
}

/* Query or output i of a panel. */
static float *panel_head(const attention_work *work, float *tokens, long stride, const piece *part,
                         const query_panel *panel, long i) {
    return head_of(work, tokens, stride, part, panel->token * part->heads * work->group + i);
}

static void open_panel(const attention_work *work, query_panel *here, const piece *part, int many) {
    const attention *wanted = work->wanted;
    const long queries = here->tokens * part->heads * work->group, dim = wanted->dim;
    const float scale = wanted->scale * 1.44269504f; /* from powers of e to powers of two */
    const long columns = here->columns = round_up(queries, LANES);
    for (long i = 0; i < columns; i++) {
        here->state.largest[i] = NO_SCORE;
        here->state.weight[i] = 0;
    }
    memset(here->state.sums, 0, sizeof(float) * (size_t)(columns * work->padded));
    if (queries < columns) memset(here->query, 0, sizeof(float) * (size_t)(columns * work->padded));
    for (long i = 0; i < queries; i++) {
        const float *from = panel_head(work, (float *)wanted->query, wanted->query_stride, part, here, i);
        if (many) {
            /* Tokens lie so far apart that the machine does not foresee the next one's heads. */
            const float *ahead = from + QUERIES_AHEAD * wanted->query_stride;
            if (i / work->group + QUERIES_AHEAD < here->tokens)
                for (long d = 0; d < dim; d += LINE_FLOATS) __builtin_prefetch(ahead + d);
            for (long d = 0; d < dim; d++) here->query[d * columns + i] = from[d] * scale;
            continue;
        }
        float *to = here->query + i * work->padded;
        for (long d = 0; d < dim; d++) to[d] = from[d] * scale;
        for (long d = dim; d < work->padded; d++) to[d] = 0;
    }
}

static void close_panel(const attention_work *work, const query_panel *here, const piece *part) {
    const attention *wanted = work->wanted;
    const softmax *state = &here->state;
    for (long i = 0; i < here->tokens * part->heads * work->group; i++) {
        const float *sums = state->sums + i * work->padded;
        if (part->parts > 1) {
            float *kept = work->partials + part->partial * work->partial_floats;
            kept += (part->head * work->group + i) * (wanted->dim + 2);
            memcpy(kept, sums, sizeof(float) * (size_t)wanted->dim);
            kept[wanted->dim] = state->largest[i];
            kept[wanted->dim + 1] = state->weight[i];
            continue;
        }
        float *out = panel_head(work, wanted->out, wanted->out_stride, part, here, i);
        float inverse = part->last_key > part->first_key ? 1.0f / state->weight[i] : 0.0f;
        for (long d = 0; d < wanted->dim; d++) out[d] = sums[d] * inverse;
    }
}

static long panel_tokens(const attention_work *work) {
    long most = PANEL_QUERIES / work->group;
    return most > 0 ? most : 1;
}

static void attend_piece(const attention_work *work, bench *here, const piece *part) {
    const int many = row_count(work->wanted, part->row) > 1;
    const long most = panel_tokens(work);
    query_panel *panel = here->panels;
    for (long token = 0; token < part->queries; token += most, panel++) {
        panel->token = token;
        panel->tokens = shorter(part->queries - token, most);
        open_panel(work, panel, part, many);
    }
    if (many)
        attend_many(work, here, part);
    else
        attend_one(work, here, part);
    while (panel-- > here->panels) close_panel(work, panel, part);
}

/* Joins the parts of one row, as if they had been one. */
static void join_parts(const attention_work *work, const piece *part) {
    const attention *wanted = work->wanted;
    const long dim = wanted->dim;
    for (long i = 0; i < part->heads * work->group; i++) {
        const float *first = work->partials + part->partial * work->partial_floats;
        first += (part->head * work->group + i) * (dim + 2);
        float *out = head_of(work, wanted->out, wanted->out_stride, part, i), largest = NO_SCORE, weight = 0;
        for (long p = 0; p < part->parts; p++) largest = fmaxf(largest, first[p * work->partial_floats + dim]);
        for (long d = 0; d < dim; d++) out[d] = 0;
        for (long p = 0; p < part->parts; p++) {
            const float *kept = first + p * work->partial_floats;
            float share = exp2f(kept[dim] - largest);
            weight += share * kept[dim + 1];
            for (long d = 0; d < dim; d++) out[d] += share * kept[d];
        }
        float inverse = 1.0f / weight;
        for (long d = 0; d < dim; d++) out[d] *= inverse;
    }
}

/* Most queries a panel may have, in whole vectors. */
static long most_columns(const attention_work *work) {
    long many = panel_tokens(work) * work->group, one = work->wanted->heads;
    return round_up(many > one ? many : one, LANES);
}

static long panel_floats(const attention_work *work) {
    return most_columns(work) * (2 * work->padded + TILE_KEYS + 2);
}

static size_t bench_floats(const attention_work *work) {
    return (size_t)(work->panels * panel_floats(work) + TILE_KEYS * work->padded);
}

static void run_pieces(void *pointer) {
    attention_work *work = pointer;
    bench here;
    float *memory = scratch(SCRATCH_OWN, sizeof(float) * bench_floats(work));
    if (memory == NULL) return; /* the others do it: attend() has its own before it starts */
    const long columns = most_columns(work), padded = work->padded;
    here.copied = memory;
    memory += TILE_KEYS * padded;
    for (query_panel *panel = here.panels; panel < here.panels + work->panels; panel++, memory += panel_floats(work)) {
        panel->query = memory;
        panel->state = (softmax){.sums = panel->query + columns * padded, .padded = padded};
        panel->scores = panel->state.sums + columns * padded;
        panel->state.largest = panel->scores + columns * TILE_KEYS;
        panel->state.weight = panel->state.largest + columns;
    }
    for (long unit; (unit = claim(&work->queue)) >= 0;) attend_piece(work, &here, work->pieces + unit);
}

static void run_joins(void *pointer) {
    attention_work *work = pointer;
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        const piece *part = work->pieces + unit;
        if (part->parts > 1 && part->part == 0) join_parts(work, part);
    }
}

static long cut_one(const attention_work *work, long row, piece *out, long *partials) {
    const long end = work->wanted->ends[row], first = end > 0 ? first_seen(work->wanted, end - 1) : 0;
    const long heads = work->wanted->kv_heads, together = work->heads_together;
    const long parts = end > first ? (end - 1) / PIECE_KEYS - first / PIECE_KEYS + 1 : 1;
    long pieces = 0;
    for (long part = 0; part < parts; part++) {
        long from = part == 0 ? first : (first / PIECE_KEYS + part) * PIECE_KEYS;
        long to = part == parts - 1 ? end : (first / PIECE_KEYS + part + 1) * PIECE_KEYS;
        for (long head = 0; head < heads; head += together, pieces++) {
            if (out == NULL) continue;
            out[pieces] = (piece){.row = (int32_t)row, .head = (int32_t)head, .queries = 1,
                                  .heads = (int32_t)shorter(heads - head, together),
                                  .first_key = (int32_t)from, .last_key = (int32_t)to, .part = (int32_t)part,
                                  .parts = (int32_t)parts, .partial = (int32_t)(*partials + part)};
        }
    }
    if (parts > 1) *partials += parts;
    return pieces;
}

static long cut_many(const attention_work *work, long row, piece *out) {
    const attention *wanted = work->wanted;
    const long count = row_count(wanted, row), most = work->panels * panel_tokens(work);
    long pieces = 0;
    for (long head = 0; head < wanted->kv_heads; head++) {
        /* The last queries see the most keys: they come first, so that the threads end together. */
        for (long query = (count - 1) / most * most; query >= 0; query -= most, pieces++) {
            if (out == NULL) continue;
            long queries = shorter(count - query, most), position = wanted->ends[row] - count + query;
            out[pieces] = (piece){.row = (int32_t)row, .head = (int32_t)head, .heads = 1, .query = (int32_t)query,
                                  .queries = (int32_t)queries, .first_key = (int32_t)first_seen(wanted, position),
                                  .last_key = (int32_t)(position + queries), .parts = 1};
        }
    }
    return pieces;
}

/* Returns how many pieces there are. Only counts them when `out` is NULL. */
static long cut_rows(const attention_work *work, piece *out, long *partials) {
    long pieces = 0;
    *partials = 0;
    /* Rows of many tokens are the large pieces, and stand last in a batch. */
    for (long row = work->wanted->rows - 1; row >= 0; row--) {
        piece *here = out != NULL ? out + pieces : NULL;
        pieces += row_count(work->wanted, row) > 1 ? cut_many(work, row, here) : cut_one(work, row, here, partials);
    }
    return pieces;
}

int attend(const attention *wanted) {
    if (wanted->rows == 0) return 0;
    attention_work work = {.wanted = wanted, .group = wanted->heads / wanted->kv_heads};
    work.padded = round_up(wanted->dim, LANES);
    work.partial_floats = wanted->heads * (wanted->dim + 2);
    work.heads_together = wanted->kv_heads;
    work.panels = shorter(PANELS_BYTES / ((long)sizeof(float) * panel_floats(&work)), MOST_PANELS);
    if (work.panels < 1) work.panels = 1;
    long partials, pieces = cut_rows(&work, NULL, &partials);
    /* Too few pieces for the threads: panels part, then heads, which changes no answer. */
    for (; pieces < EVEN_PIECES * wanted->threads && work.panels > 1; pieces = cut_rows(&work, NULL, &partials))
        work.panels--;
    for (; pieces < wanted->threads && work.heads_together > 1; pieces = cut_rows(&work, NULL, &partials))
        work.heads_together = (work.heads_together + 1) / 2;
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
