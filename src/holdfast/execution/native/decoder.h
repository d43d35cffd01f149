/* Decoder layers from end to end: the other kernels in their order, with nothing between them but calls. */
#ifndef HOLDFAST_DECODER_H
#define HOLDFAST_DECODER_H

#include "attention.h"
#include "elementwise.h"
#include "matmul.h"
#include "rank_sums.h"

typedef struct {
    int64_t weights, bias; /* addresses */
    int64_t outputs, columns, layout;
} matrix;

/* What a layer has to itself, as decoder.py lists it. */
typedef struct {
    int64_t matrices, qkv_parts, gate_up_parts;
    int64_t attention_norm, mlp_norm; /* addresses, like those that follow */
    int64_t keys, values;
    int64_t center; /* 0: none */
    double key_scale, value_scale;
} layer_entry;

typedef struct {
    const matrix *matrices; /* qkv_parts, then o, then gate_up_parts, then down; the outputs of parts stand in a line */
    long qkv_parts, gate_up_parts;
    const float *attention_norm, *mlp_norm;
    float epsilon;
    enum activation activation;
    float *stream; /* [tokens, hidden]: the layer's sums are added to it */
    float *normed; /* [tokens, hidden] */
    float *qkv;    /* [tokens, (heads + 2 kv heads) dim] */
    float *attended;
    float *gate_up, *inner; /* [mlp_tokens, ...]: the MLP takes that many at a time */
    long tokens, hidden, inner_columns, mlp_tokens;
    turning turn;       /* all but what lies in qkv */
    attention attention; /* all but what lies in qkv and attended */
    rank_sums sums; /* of the ranks that have the rest of each layer */
    float *branch;  /* [mlp_tokens, hidden], where there are such */
    float key_scale, value_scale; /* the pool keeps keys and values divided by them; both 1: as they are */
    int threads;
} decoder_layer;

/* One after another; `shared` is what all of them have in common and is written over. 0, -1 when there is no memory for
 * scratch, or RANKS_LEFT. */
int run_layers(decoder_layer *shared, const layer_entry *entries, long count);

#endif
