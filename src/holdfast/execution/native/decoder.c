/* The order of a layer: norm, q k v, rotary positions and the pool, attention, output; norm, gate and up, down. */
#include "decoder.h"

/* x times every matrix of `parts`, their outputs side by side. */
static int multiply_parts(const decoder_layer *layer, const matrix *parts, long count, const float *x, float *out,
                          long rows, int add) {
    long width = 0, begin = 0;
    int failed = 0;
    for (long part = 0; part < count; part++) width += parts[part].outputs;
    for (long part = 0; part < count && !failed; part++) {
        const matrix *from = parts + part;
        product wanted = {
            .x = x,
            .x_stride = from->columns,
            .out = out + begin,
            .out_stride = width,
            .weights = (const uint8_t *)from->weights,
            .bias = (const float *)from->bias,
            .rows = rows,
            .columns = from->columns,
            .outputs = from->outputs,
            .layout = (enum layout)from->layout,
            .add = add,
            .threads = layer->threads,
        };
        failed = multiply(&wanted);
        begin += from->outputs;
    }
    return failed;
}

/* x times a matrix, added to the stream; where other ranks have the rest of the matrix, the sum of all of them is. */
static int add_to_stream(const decoder_layer *layer, const matrix *from, const float *x, float *stream, long rows) {
    const long numbers = rows * layer->hidden;
    if (layer->sums.group == NULL) return multiply_parts(layer, from, 1, x, stream, rows, 1);
    float *slot = next_slot(&layer->sums, numbers), *shown = slot != NULL ? slot : layer->branch;
    if (multiply_parts(layer, from, 1, x, shown, rows, 0)) return -1;
    return sum_ranks(&layer->sums, shown, stream, numbers, 1);
}

/* The same of any number of rows, as many at a time as the branch holds: all ranks cut alike. */
static int add_all_rows(const decoder_layer *layer, const matrix *from, const float *x) {
    const long most = layer->sums.group == NULL ? layer->tokens : layer->mlp_tokens;
    int failed = 0;
    for (long first = 0; first < layer->tokens && !failed; first += most) {
        const long rows = layer->tokens - first < most ? layer->tokens - first : most;
        failed = add_to_stream(layer, from, x + first * from->columns, layer->stream + first * layer->hidden, rows);
    }
    return failed;
}

static void normalize_stream(const decoder_layer *layer, float *stream, const float *weight, long rows) {
    normalization wanted = {
        .x = stream,
        .x_stride = layer->hidden,
        .weight = weight,
        .out = layer->normed,
        .out_stride = layer->hidden,
        .rows = rows,
        .columns = layer->hidden,
        .epsilon = layer->epsilon,
        .threads = layer->threads,
    };
    normalize(&wanted);
}

static void scale_floats(float *x, long count, float factor) {
    for (long i = 0; i < count; i++) x[i] *= factor;
}

/* Keys and values as the pool keeps them, and queries so that their products with such keys are the same. */
static void scale_heads(const decoder_layer *layer, long queries, long keys) {
    float *row = layer->qkv;
    for (long token = 0; token < layer->tokens; token++, row += queries + 2 * keys) {
        scale_floats(row, queries, layer->key_scale);
        scale_floats(row + queries, keys, 1.0f / layer->key_scale);
        scale_floats(row + queries + keys, keys, 1.0f / layer->value_scale);
    }
}

static int attention_half(decoder_layer *layer) {
    turning *turn = &layer->turn;
    attention *attend_to = &layer->attention;
    const matrix *output = layer->matrices + layer->qkv_parts;
    const long queries = turn->heads * turn->dim, keys = turn->kv_heads * turn->dim, width = queries + 2 * keys;
    normalize_stream(layer, layer->stream, layer->attention_norm, layer->tokens);
    if (multiply_parts(layer, layer->matrices, layer->qkv_parts, layer->normed, layer->qkv, layer->tokens, 0))
        return -1;
    turn->query = layer->qkv;
    turn->key = layer->qkv + queries;
    turn->value = layer->qkv + queries + keys;
    turn->query_stride = turn->key_stride = turn->value_stride = width;
    const int scaled = layer->key_scale != 1.0f || layer->value_scale != 1.0f;
    if (scaled) scale_heads(layer, queries, keys);
    turn_and_store(turn);
    attend_to->query = layer->qkv;
    attend_to->query_stride = width;
    attend_to->out = layer->attended;
    attend_to->out_stride = queries;
    if (attend(attend_to)) return -1;
    if (scaled) scale_floats(layer->attended, layer->tokens * queries, layer->value_scale);
    return add_all_rows(layer, output, layer->attended);
}

static int mlp_half(const decoder_layer *layer) {
    const matrix *gate_up = layer->matrices + layer->qkv_parts + 1, *down = gate_up + layer->gate_up_parts;
    for (long first = 0; first < layer->tokens; first += layer->mlp_tokens) {
        long rows = layer->tokens - first < layer->mlp_tokens ? layer->tokens - first : layer->mlp_tokens;
        float *stream = layer->stream + first * layer->hidden;
        normalize_stream(layer, stream, layer->mlp_norm, rows);
        if (multiply_parts(layer, gate_up, layer->gate_up_parts, layer->normed, layer->gate_up, rows, 0)) return -1;
        gating wanted = {
            .gate_up = layer->gate_up,
            .gate_stride = 2 * layer->inner_columns,
            .out = layer->inner,
            .out_stride = layer->inner_columns,
            .rows = rows,
            .columns = layer->inner_columns,
            .activation = layer->activation,
            .threads = layer->threads,
        };
        gate(&wanted);
        const int failed = add_to_stream(layer, down, layer->inner, stream, rows);
        if (failed) return failed;
    }
    return 0;
}

static void take_entry(decoder_layer *layer, const layer_entry *entry) {
    layer->matrices = (const matrix *)entry->matrices;
    layer->qkv_parts = entry->qkv_parts;
    layer->gate_up_parts = entry->gate_up_parts;
    layer->attention_norm = (const float *)entry->attention_norm;
    layer->mlp_norm = (const float *)entry->mlp_norm;
    layer->turn.keys = (uint8_t *)entry->keys;
    layer->turn.values = (uint8_t *)entry->values;
    layer->attention.keys = (const uint8_t *)entry->keys;
    layer->attention.values = (const uint8_t *)entry->values;
    layer->turn.center = (const float *)entry->center;
    layer->key_scale = (float)entry->key_scale;
    layer->value_scale = (float)entry->value_scale;
}

int run_layers(decoder_layer *shared, const layer_entry *entries, long count) {
    if (shared->tokens == 0) return 0;
    for (const layer_entry *entry = entries; entry < entries + count; entry++) {
        take_entry(shared, entry);
        int failed = attention_half(shared);
        if (!failed) failed = mlp_half(shared);
        if (failed) return failed;
    }
    return 0;
}
