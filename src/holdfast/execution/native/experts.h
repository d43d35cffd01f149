/* The MLP of a layer with experts: routing, and one product for each expert that a token chose. */
#ifndef HOLDFAST_EXPERTS_H
#define HOLDFAST_EXPERTS_H

#include "decoder.h"

typedef struct {
    const matrix *gate_up; /* [experts, gate_up_parts]; the outputs of parts stand in a line */
    const matrix *down;    /* [experts]; without weights: another rank has that expert */
    long experts, gate_up_parts, per_token;
    int normalized; /* the weights of a token's experts add up to one */
    enum activation activation;
    const float *logits; /* [tokens, experts] */
    const float *x;      /* [tokens, hidden] */
    float *out;          /* [tokens, hidden], rows `out_stride` floats apart: the experts' sums are added to it */
    long out_stride;
    /* A line for every pair of a token and an expert that is here, those of an expert one below the other: */
    float *sorted;          /* [lines, hidden]: inputs, then outputs */
    float *gate_up_out;     /* [lines, 2 inner] */
    float *inner;           /* [lines, inner] */
    float *weights;         /* [tokens, per_token] */
    int32_t *chosen;        /* [tokens, per_token]: experts */
    int32_t *places;        /* [tokens, per_token]: the pair's line, or -1 */
    int32_t *firsts;        /* [experts + 1]: the lines of each expert begin there */
    long tokens, hidden, inner_columns;
    int threads;
} expert_layer;

/* 0, or -1 when there is no memory for scratch. */
int run_experts(const expert_layer *layer);

#endif
