/* One layer of a step, for all tokens together:
 *
 *   pairs sorted by expert -> rows of x, split ─► gate and up ─► gated, split ─► down and weighted sums ─► y
 *                             a row a unit        outputs        a row a unit    outputs, of all experts
 *
 * Each arrow is a part that the team shares in units (team.h). Experts of a layer are computed together, so that all
 * threads read weights all the time, however few tokens there are. A row is computed alike in all company, and a token's
 * experts are added in the order of their numbers, so that y does not change with what else is asked. */
#include "host_experts.h"

#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "plain_numbers.h"
#include "team.h"
#include "waiting.h"

#define LINE 64
#define UNITS_A_THREAD 12 /* enough to even out threads that run at different speeds */
#define MOST_OUTPUTS 256  /* in a unit */
#define SPIN_LOOKS 64     /* between two looks at the clock */
#define SPIN_NS 2000000   /* a request that takes longer is waited for with naps */
#define NAP_NS 50000
#define EARLY_BYTES 2048 /* of the next expert's weights that are fetched early: the kernels do it from there on */

typedef struct {
    const host_experts *host;
    const host_layer *layer;
    long tokens, pairs, present; /* experts that have pairs */
    /* By line, those of an expert one below the other: */
    int32_t *token;
    float *weight;
    /* By number of a present expert: */
    int32_t *expert, *first; /* `first` has one more */
    long *gate_up_digits, *down_digits; /* [present, parts] and [present]: where split rows lie */
    int32_t *places;                    /* by expert: the next of its lines */
    float *lines, *gate_up_out, *inner;
    uint8_t *digits;
    long chunk, chunks;   /* outputs in a unit, and such units of an expert */
    int one_row;          /* all experts have the same row of x, which is split once */
    atomic_int no_memory; /* for scratch */
} layer_work;

static long lines_of(long bytes) { return (bytes + LINE - 1) / LINE * LINE; }

static long least(long a, long b) { return a < b ? a : b; }

/* Of a layer's experts `number` with `rows` rows. */
static product product_of(const matrix *from, const float *x, float *out, long out_stride, long rows) {
    return (product){
        .x = x,
        .x_stride = from->columns,
        .out = out,
        .out_stride = out_stride,
        .weights = (const uint8_t *)from->weights,
        .rows = rows,
        .columns = from->columns,
        .outputs = from->outputs,
        .layout = (enum layout)from->layout,
        .threads = 1,
    };
}

static long rows_of(const layer_work *work, long present) { return work->first[present + 1] - work->first[present]; }

static product gate_up_of(const layer_work *work, long present, long part) {
    const host_layer *layer = work->layer;
    const matrix *from = (const matrix *)layer->gate_up + work->expert[present] * layer->parts;
    const long first = work->first[present];
    const float *x = work->lines + (work->one_row ? 0 : first) * work->host->hidden;
    float *out = work->gate_up_out + first * 2 * layer->inner_columns;
    for (long before = 0; before < part; before++) out += from[before].outputs;
    return product_of(from + part, x, out, 2 * layer->inner_columns, rows_of(work, present));
}

/* Its outputs take the place of x, which was multiplied by then. */
static product down_of(const layer_work *work, long present) {
    const host_layer *layer = work->layer;
    const matrix *from = (const matrix *)layer->down + work->expert[present];
    const long first = work->first[present], hidden = work->host->hidden;
    return product_of(from, work->inner + first * layer->inner_columns, work->lines + first * hidden, hidden,
                      rows_of(work, present));
}

/* The present expert that has this line. */
static long owner_of(const layer_work *work, long line) {
    long low = 0, high = work->present;
    while (high - low > 1) {
        const long middle = (low + high) / 2;
        if (work->first[middle] <= line)
            low = middle;
        else
            high = middle;
    }
    return low;
}

ALWAYS_INLINE void widen_as(const uint8_t *from, long count, enum layout numbers, float *out) {
    for (long i = 0; i < count; i += LANES) store(out + i, load_numbers(from, i, numbers));
}

static void widen(const uint8_t *from, long count, enum layout numbers, float *out) {
    switch (numbers) {
    case F32: widen_as(from, count, F32, out); break;
    case F16: widen_as(from, count, F16, out); break;
    default: widen_as(from, count, BF16, out);
    }
}

static void note(layer_work *work, int failed) {
    if (failed) atomic_store_explicit(&work->no_memory, 1, memory_order_relaxed);
}

/* A line of x: as floats, and split for each part. */
static void split_x(void *pointer, long line) {
    layer_work *work = pointer;
    const host_layer *layer = work->layer;
    const long hidden = work->host->hidden, bytes = hidden * (work->host->numbers == F32 ? 4 : 2);
    const long present = owner_of(work, line);
    widen((const uint8_t *)layer->x + work->token[line] * bytes, hidden, work->host->numbers,
          work->lines + line * hidden);
    for (long part = 0; part < layer->parts; part++) {
        const product wanted = gate_up_of(work, present, part);
        uint8_t *digits = work->digits + work->gate_up_digits[present * layer->parts + part];
        note(work, split_piece(&wanted, digits, line - work->first[present]));
    }
}

/* Where a unit's neighbour begins: what is read first of it comes while the unit is computed. */
static void fetch_early(const matrix *from, long output) {
    const enum layout layout = (enum layout)from->layout;
    if (is_scaled(layout)) return;
    const uint8_t *weights = (const uint8_t *)from->weights + output * row_bytes(layout, from->columns);
    for (long at = 0; at < EARLY_BYTES; at += LINE) __builtin_prefetch(weights + at);
}

static void run_gate_up(void *pointer, long unit) {
    layer_work *work = pointer;
    const long present = unit / work->chunks;
    long chunk = unit % work->chunks;
    for (long part = 0; part < work->layer->parts; part++) {
        const product wanted = gate_up_of(work, present, part);
        const long chunks = (wanted.outputs + work->chunk - 1) / work->chunk, output = chunk * work->chunk;
        const uint8_t *digits = work->digits + work->gate_up_digits[present * work->layer->parts + part];
        if (chunk < chunks) {
            note(work, multiply_piece(&wanted, digits, output, least(output + work->chunk, wanted.outputs)));
            return;
        }
        chunk -= chunks;
    }
}

static void gate_and_split(void *pointer, long line) {
    layer_work *work = pointer;
    const host_layer *layer = work->layer;
    const long present = owner_of(work, line);
    gating gated = {
        .gate_up = work->gate_up_out + line * 2 * layer->inner_columns,
        .gate_stride = 2 * layer->inner_columns,
        .out = work->inner + line * layer->inner_columns,
        .out_stride = layer->inner_columns,
        .rows = 1,
        .columns = layer->inner_columns,
        .activation = (enum activation)layer->activation,
        .threads = 1,
    };
    gate(&gated);
    const product wanted = down_of(work, present);
    note(work, split_piece(&wanted, work->digits + work->down_digits[present], line - work->first[present]));
}

/* Outputs of all experts, added up for every token. */
static void run_down(void *pointer, long unit) {
    layer_work *work = pointer;
    const long hidden = work->host->hidden, output = unit * work->chunk, last = least(output + work->chunk, hidden);
    float *y = (float *)work->layer->y;
    for (long present = 0; present < work->present; present++) {
        const product wanted = down_of(work, present);
        if (present + 1 < work->present)
            fetch_early((const matrix *)work->layer->down + work->expert[present + 1], output);
        note(work, multiply_piece(&wanted, work->digits + work->down_digits[present], output, last));
    }
    for (long token = 0; token < work->tokens; token++)
        memset(y + token * hidden + output, 0, (size_t)(last - output) * sizeof *y);
    for (long line = 0; line < work->pairs; line++) {
        const float *from = work->lines + line * hidden, weight = work->weight[line];
        float *to = y + work->token[line] * hidden;
        for (long i = output; i < last; i++) to[i] += weight * from[i];
    }
}

/* Outputs of a unit, when so many are to be shared. */
static long chunk_of(const layer_work *work, long outputs) {
    const long share = outputs / ((long)UNITS_A_THREAD * work->host->threads) / PIECE_OUTPUTS * PIECE_OUTPUTS;
    return share < PIECE_OUTPUTS ? PIECE_OUTPUTS : least(share, MOST_OUTPUTS);
}

/* A counting sort: lines of an expert are in the order of its tokens. -1 when an expert is asked for that there is not. */
static int sort_pairs(layer_work *work) {
    const host_layer *layer = work->layer;
    const int32_t *chosen = (const int32_t *)layer->chosen;
    const float *weights = (const float *)layer->weights;
    const long per_token = layer->experts > 1 ? work->host->per_token : 1, all = work->tokens * per_token;
    int64_t *uses = (int64_t *)layer->uses;
    memset(work->places, 0, (size_t)layer->experts * sizeof *work->places);
    if (layer->experts == 1) work->places[0] = (int32_t)work->tokens;
    for (long pair = 0; pair < all && layer->experts > 1; pair++) {
        if (chosen[pair] >= layer->experts) return -1;
        if (chosen[pair] >= 0) work->places[chosen[pair]]++;
    }
    work->present = work->pairs = 0;
    for (long expert = 0; expert < layer->experts; expert++) {
        const int32_t count = work->places[expert];
        if (count == 0) continue;
        uses[expert] += count;
        work->places[expert] = (int32_t)work->pairs;
        work->expert[work->present] = (int32_t)expert;
        work->first[work->present++] = (int32_t)work->pairs;
        work->pairs += count;
    }
    work->first[work->present] = (int32_t)work->pairs;
    for (long pair = 0; pair < all; pair++) {
        const int32_t expert = layer->experts > 1 ? chosen[pair] : 0;
        if (expert < 0) continue;
        const int32_t line = work->places[expert]++;
        work->token[line] = (int32_t)(pair / per_token);
        work->weight[line] = layer->experts > 1 ? weights[pair] : 1.0f;
    }
    return 0;
}

/* Takes bytes of the room, a whole number of cache lines. */
static void *take(uint8_t **room, long bytes) {
    void *taken = *room;
    *room += lines_of(bytes);
    return taken;
}

/* What does not depend on what was chosen; returns its end. With a room at NULL it tells how much is taken. */
static uint8_t *lay_out(layer_work *work, uint8_t *room, long tokens) {
    const host_layer *layer = work->layer;
    const long pairs = tokens * (layer->experts > 1 ? work->host->per_token : 1);
    const long present = least(pairs, layer->experts);
    work->token = take(&room, pairs * (long)sizeof *work->token);
    work->weight = take(&room, pairs * (long)sizeof *work->weight);
    work->expert = take(&room, present * (long)sizeof *work->expert);
    work->first = take(&room, (present + 1) * (long)sizeof *work->first);
    work->places = take(&room, layer->experts * (long)sizeof *work->places);
    work->gate_up_digits = take(&room, present * layer->parts * (long)sizeof *work->gate_up_digits);
    work->down_digits = take(&room, present * (long)sizeof *work->down_digits);
    work->lines = take(&room, pairs * work->host->hidden * (long)sizeof(float));
    work->gate_up_out = take(&room, pairs * 2 * layer->inner_columns * (long)sizeof(float));
    work->inner = take(&room, pairs * layer->inner_columns * (long)sizeof(float));
    work->digits = room;
    return room;
}

/* Where each expert's rows are split to. -1 when the room does not hold them. */
static int place_digits(layer_work *work) {
    const long left = work->host->room_bytes - (long)(work->digits - work->host->room), parts = work->layer->parts;
    long used = 0;
    int alike = work->tokens == 1;
    for (long present = 0; present < work->present; present++) {
        for (long part = 0; part < parts; part++) {
            const product wanted = gate_up_of(work, present, part);
            work->gate_up_digits[present * parts + part] = used;
            used += lines_of(piece_bytes(&wanted));
            alike &= !piece_is_own(&wanted);
        }
    }
    for (long present = 0; present < work->present; present++) {
        const product wanted = down_of(work, present);
        work->down_digits[present] = used;
        used += lines_of(piece_bytes(&wanted));
    }
    work->one_row = alike;
    for (long i = parts; alike && i < work->present * parts; i++) work->gate_up_digits[i] = work->gate_up_digits[i % parts];
    return used <= left ? 0 : -1;
}

long host_room_bytes(const host_experts *host, long tokens) {
    long most = 0;
    for (long number = 0; number < host->count; number++) {
        const host_layer *layer = host->layers + number;
        layer_work work = {.host = host, .layer = layer};
        const long fixed = (long)(lay_out(&work, NULL, tokens) - (uint8_t *)NULL);
        const long pairs = tokens * (layer->experts > 1 ? host->per_token : 1);
        long each = 0;
        for (long part = 0; part <= layer->parts; part++) {
            const matrix *from = part < layer->parts ? (const matrix *)layer->gate_up + part : (const matrix *)layer->down;
            const product one = product_of(from, NULL, NULL, 0, 1);
            each += lines_of(piece_bytes(&one));
        }
        /* Rows that are split together take at most twice as much as those apart: tiles are filled up to 16. */
        const long bytes = fixed + 2 * pairs * each;
        if (bytes > most) most = bytes;
    }
    return most;
}

static enum host_result run_host_layer(team *members, layer_work *work) {
    const host_layer *layer = work->layer;
    lay_out(work, work->host->room, work->tokens);
    if (sort_pairs(work)) return HOST_NO_SUCH_EXPERT;
    if (work->pairs == 0) {
        memset((void *)layer->y, 0, (size_t)(work->tokens * work->host->hidden) * sizeof(float));
        return HOST_SERVED;
    }
    if (place_digits(work)) return HOST_NO_MEMORY;
    share_units(members, split_x, work, work->one_row ? 1 : work->pairs);
    work->chunk = chunk_of(work, work->present * 2 * layer->inner_columns);
    work->chunks = 0;
    for (long part = 0; part < layer->parts; part++)
        work->chunks += (((const matrix *)layer->gate_up)[part].outputs + work->chunk - 1) / work->chunk;
    share_units(members, run_gate_up, work, work->present * work->chunks);
    share_units(members, gate_and_split, work, work->pairs);
    work->chunk = chunk_of(work, work->host->hidden);
    share_units(members, run_down, work, (work->host->hidden + work->chunk - 1) / work->chunk);
    return atomic_load_explicit(&work->no_memory, memory_order_relaxed) ? HOST_NO_MEMORY : HOST_SERVED;
}

/* 0 when the request for this step is there; what was written before it is seen then. */
static int await_request(const host_layer *layer, int step, long patience_ns) {
    const _Atomic(int32_t) *request = (const _Atomic(int32_t) *)layer->request;
    for (long began = 0;;) {
        for (int look = 0; look < SPIN_LOOKS; look++, relax())
            if (atomic_load_explicit(request, memory_order_acquire) == step) return 0;
        const long now = now_ns();
        if (began == 0) began = now;
        if (now - began > patience_ns) return -1;
        if (now - began > SPIN_NS) nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    }
}

typedef struct {
    const host_experts *host;
    int step;
    long tokens, patience_ns;
    host_outcome outcome;
} step_work;

static void lead_step(team *members, void *pointer) {
    step_work *step = pointer;
    host_outcome *outcome = &step->outcome;
    long before = now_ns();
    for (outcome->layer = 0; outcome->layer < step->host->count; outcome->layer++) {
        const host_layer *layer = step->host->layers + outcome->layer;
        if (await_request(layer, step->step, step->patience_ns)) {
            outcome->result = HOST_NOT_ASKED;
            return;
        }
        const long asked = now_ns();
        layer_work work = {.host = step->host, .layer = layer, .tokens = step->tokens};
        outcome->result = run_host_layer(members, &work);
        if (outcome->result != HOST_SERVED) return;
        atomic_store_explicit((_Atomic(int32_t) *)layer->reply, step->step, memory_order_release);
        const long replied = now_ns();
        outcome->waited_ns += asked - before;
        outcome->computed_ns += replied - asked;
        outcome->pairs += work.pairs;
        before = replied;
    }
}

host_outcome serve_step(const host_experts *host, int step, long tokens, long patience_ns) {
    step_work work = {.host = host, .step = step, .tokens = tokens, .patience_ns = patience_ns};
    run_team(lead_step, &work, host->threads);
    return work.outcome;
}
