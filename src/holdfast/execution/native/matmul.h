/* Products of float activations with stored weights: out = x . W^T (+ bias), or out += the same. */
#ifndef HOLDFAST_MATMUL_H
#define HOLDFAST_MATMUL_H

#include "blocks.h"
#include "parallel.h"

typedef struct {
    const float *x; /* [rows, columns], rows `x_stride` floats apart */
    long x_stride;
    float *out; /* [rows, outputs], rows `out_stride` floats apart */
    long out_stride;
    const uint8_t *weights; /* [outputs, columns] as stored, rows without gaps */
    const float *bias;      /* [outputs] or NULL */
    long rows, columns, outputs;
    enum layout layout;
    int add; /* to what `out` holds */
    int threads;
} product;

/* 0, or -1 when there is no memory for scratch. */
int multiply(const product *wanted);

typedef struct {
    const uint8_t *weights;
    const int64_t *chosen; /* which rows, or NULL: the first `rows` in order */
    long rows, columns;
    enum layout layout;
    float *out;
    long out_stride;
    int threads;
} expansion;

/* Rows of stored weights as floats. */
void expand_rows(const expansion *wanted);

/* The product for few rows through integer digits; 0 when done, 1 when this machine or layout has no such form. */
int multiply_by_digits(const product *wanted);

#endif
