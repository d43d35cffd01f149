/* Small operations between products, each one pass over its data. Rows may lie apart; strides count floats. */
#ifndef HOLDFAST_ELEMENTWISE_H
#define HOLDFAST_ELEMENTWISE_H

#include "blocks.h"

typedef struct {
    float *x; /* [rows, columns]; with a residual it becomes x + residual */
    long x_stride;
    const float *residual; /* like x, or NULL */
    long residual_stride;
    const float *weight; /* [columns] */
    float *out;          /* [rows, columns]; may be x */
    long out_stride;
    long rows, columns;
    float epsilon;
    int threads;
} normalization;

/* out = x / sqrt(mean(x^2) + epsilon) * weight */
void normalize(const normalization *wanted);

enum activation { SILU, GELU_TANH };

typedef struct {
    const float *gate_up; /* [rows, 2 * columns]: what is activated, then what it is multiplied with */
    long gate_stride;
    float *out; /* [rows, columns] */
    long out_stride;
    long rows, columns;
    enum activation activation;
    int threads;
} gating;

void gate(const gating *wanted);

typedef struct {
    float *query, *key;  /* [tokens, heads, dim] and [tokens, kv heads, dim]: turned in place */
    const float *value;  /* like key */
    long query_stride, key_stride, value_stride;
    const float *cosines, *sines; /* [positions, half]: the first half of a head is turned against the second */
    const int64_t *positions;     /* the row of the tables for each token; NULL: its own number */
    const int64_t *places;        /* where each token goes in the pool, in rows of kv_heads * dim */
    const float *center;          /* [kv heads, dim]: taken off keys once they are turned; NULL: nothing is */
    uint8_t *keys, *values;       /* the pool as seen by this layer */
    enum layout stored;           /* F32, F16, BF16, E4M3 or E5M2 */
    long tokens, heads, kv_heads, dim, half;
    int threads;
} turning;

/* Turns queries and keys to their positions and writes keys and values into the pool. */
void turn_and_store(const turning *wanted);

#endif
