/* A layer's experts. Tokens choose, pairs of a token and an expert are sorted by expert, and each matrix that somebody
 * chose is multiplied once with all its lines:
 *
 *   logits [tokens, experts] -> chosen, weights -> sorted [pairs, hidden] -> gate and up -> inner -> down -> out
 *
 * Experts that nobody chose are not read. What a token gets is added up in the order in which it chose, so that it
 * does not change with its company. Of experts that are elsewhere there are no lines: they are chosen, and whoever has
 * them adds their part. */
#include "experts.h"

#include <math.h>
#include <string.h>

#include "vector.h"

#define UNIT_TOKENS 8
#define ELSEWHERE (-1) /* the place of a pair whose expert another rank has */

typedef struct {
    const expert_layer *layer;
    work_queue queue;
} expert_work;

/* The experts of the largest logits, the first of equals; their shares of the softmax over all. */
static void choose(const expert_layer *layer, const float *logits, int32_t *chosen, float *weights) {
    const long count = layer->per_token;
    float chosen_sum = 0.0f, sum = 0.0f;
    for (long place = 0; place < count; place++) {
        long best = -1;
        for (long expert = 0; expert < layer->experts; expert++) {
            int taken = 0;
            for (long before = 0; before < place; before++) taken |= chosen[before] == expert;
            /* A number that is none is never larger: such a token still gets experts that there are. */
            if (!taken && (best < 0 || logits[expert] > logits[best])) best = expert;
        }
        chosen[place] = (int32_t)best;
    }
    const float largest = logits[chosen[0]];
    for (long place = 0; place < count; place++) chosen_sum += weights[place] = expf(logits[chosen[place]] - largest);
    for (long expert = 0; !layer->normalized && expert < layer->experts; expert++) sum += expf(logits[expert] - largest);
    const float all = layer->normalized ? chosen_sum : sum;
    for (long place = 0; place < count; place++) weights[place] /= all;
}

static void run_choice(void *pointer) {
    expert_work *work = pointer;
    const expert_layer *layer = work->layer;
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        long last = (unit + 1) * UNIT_TOKENS < layer->tokens ? (unit + 1) * UNIT_TOKENS : layer->tokens;
        for (long token = unit * UNIT_TOKENS; token < last; token++)
            choose(layer, layer->logits + token * layer->experts, layer->chosen + token * layer->per_token,
                   layer->weights + token * layer->per_token);
    }
}

static int is_here(const expert_layer *layer, long expert) { return layer->down[expert].weights != 0; }

/* A counting sort: lines of an expert are in the order of its tokens. */
static void place_pairs(const expert_layer *layer) {
    const long pairs = layer->tokens * layer->per_token;
    int32_t *firsts = layer->firsts;
    memset(firsts, 0, (size_t)(layer->experts + 1) * sizeof *firsts);
    for (long pair = 0; pair < pairs; pair++)
        layer->places[pair] = is_here(layer, layer->chosen[pair]) ? firsts[layer->chosen[pair] + 1]++ : ELSEWHERE;
    for (long expert = 0; expert < layer->experts; expert++) firsts[expert + 1] += firsts[expert];
    for (long pair = 0; pair < pairs; pair++)
        if (layer->places[pair] != ELSEWHERE) layer->places[pair] += firsts[layer->chosen[pair]];
}

static void run_gathering(void *pointer) {
    expert_work *work = pointer;
    const expert_layer *layer = work->layer;
    const long count = layer->per_token;
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        long last = (unit + 1) * UNIT_TOKENS < layer->tokens ? (unit + 1) * UNIT_TOKENS : layer->tokens;
        for (long pair = unit * UNIT_TOKENS * count; pair < last * count; pair++)
            if (layer->places[pair] != ELSEWHERE)
                memcpy(layer->sorted + layer->places[pair] * layer->hidden, layer->x + pair / count * layer->hidden,
                       (size_t)layer->hidden * sizeof(float));
    }
}

static void run_summing(void *pointer) {
    expert_work *work = pointer;
    const expert_layer *layer = work->layer;
    const long count = layer->per_token;
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        long last = (unit + 1) * UNIT_TOKENS < layer->tokens ? (unit + 1) * UNIT_TOKENS : layer->tokens;
        for (long token = unit * UNIT_TOKENS; token < last; token++) {
            float *out = layer->out + token * layer->out_stride;
            for (long pair = token * count; pair < (token + 1) * count; pair++) {
                if (layer->places[pair] == ELSEWHERE) continue;
                const float *line = layer->sorted + layer->places[pair] * layer->hidden, weight = layer->weights[pair];
                for (long i = 0; i < layer->hidden; i++) out[i] += weight * line[i];
            }
        }
    }
}

static void over_tokens(worker run, expert_work *work) {
    atomic_store(&work->queue.next, 0);
    work->queue.units = (work->layer->tokens + UNIT_TOKENS - 1) / UNIT_TOKENS;
    run_parallel(run, work, work->queue.units < 2 ? 1 : work->layer->threads);
}

/* The lines of every expert with its `parts` matrices. */
static int multiply_lines(const expert_layer *layer, const matrix *matrices, long parts, const float *x, float *out) {
    long width = 0;
    for (long part = 0; part < parts; part++) width += matrices[part].outputs;
    for (long expert = 0; expert < layer->experts; expert++) {
        const long first = layer->firsts[expert], rows = layer->firsts[expert + 1] - first;
        long begin = 0;
        for (long part = 0; part < parts && rows > 0; part++) {
            const matrix *from = matrices + expert * parts + part;
            product wanted = {
                .x = x + first * from->columns,
                .x_stride = from->columns,
                .out = out + first * width + begin,
                .out_stride = width,
                .weights = (const uint8_t *)from->weights,
                .rows = rows,
                .columns = from->columns,
                .outputs = from->outputs,
                .layout = (enum layout)from->layout,
                .threads = layer->threads,
            };
            if (multiply(&wanted)) return -1;
            begin += from->outputs;
        }
    }
    return 0;
}

int run_experts(const expert_layer *layer) {
    if (layer->tokens == 0) return 0;
    expert_work work = {.layer = layer};
    over_tokens(run_choice, &work);
    place_pairs(layer);
    over_tokens(run_gathering, &work);
    if (multiply_lines(layer, layer->gate_up, layer->gate_up_parts, layer->sorted, layer->gate_up_out)) return -1;
    gating gated = {
        .gate_up = layer->gate_up_out,
        .gate_stride = 2 * layer->inner_columns,
        .out = layer->inner,
        .out_stride = layer->inner_columns,
        .rows = layer->firsts[layer->experts],
        .columns = layer->inner_columns,
        .activation = layer->activation,
        .threads = layer->threads,
    };
    gate(&gated);
    if (multiply_lines(layer, layer->down, 1, layer->inner, layer->sorted)) return -1;
    over_tokens(run_summing, &work);
    return 0;
}
