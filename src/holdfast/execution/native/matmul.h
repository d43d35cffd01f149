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
    const uint8_t *weights; /* [outputs, columns] as stored, rows without gaps; or a scaled_matrix (scaled.h) */
    const float *bias;      /* [outputs] or NULL */
    long rows, columns, outputs;
    enum layout layout;
    int add; /* to what `out` holds */
    int threads;
} product;

/* 0, or -1 when there is no memory for scratch. */
int multiply(const product *wanted);

/* Before the first product: asks the system for what the kernels need; 0, or -1 when it refuses. Threads of the process have
 * it then, those that run already too. */
int prepare_tiles(void);

typedef struct {
    const uint8_t *weights;
    const int64_t *chosen; /* which rows, or NULL: all in order */
    long rows;             /* to write: of those chosen, or all */
    long stored_rows, columns;
    enum layout layout;
    float *out;
    long out_stride;
    int threads;
} expansion;

/* Rows of stored weights as floats. */
void expand_rows(const expansion *wanted);

/* The parts of multiply(), each for its number of rows. Returns as multiply() does. */
#define DOT_ROWS 8 /* up to here dot products are faster than panels */
int multiply_by_digits(const product *wanted); /* woven weights, outputs a multiple of BUNDLE */
int multiply_by_dots(const product *wanted);
int multiply_by_panels(const product *wanted);

/* A product in pieces, for threads that share several at a time (host_experts.c). First every row of x is split into
 * memory of the caller, at a cache line; then outputs are computed, any range of them by any thread, always alike. At most
 * PIECE_ROWS rows. */
#define PIECE_ROWS 256
long piece_bytes(const product *wanted);
int split_piece(const product *wanted, uint8_t *memory, long row);
/* Outputs output..last-1, where output is a multiple of PIECE_OUTPUTS, and last too or the last of all. */
#define PIECE_OUTPUTS 16
int multiply_piece(const product *wanted, const uint8_t *memory, long output, long last);
/* Whether what a row is split into depends on the matrix, beyond its layout. */
int piece_is_own(const product *wanted);

/* What these call for woven weights. */
long digits_bytes(const product *wanted);
int own_digits(const product *wanted);
int split_row(const product *wanted, uint8_t *memory, long row);
void multiply_split(const product *wanted, const uint8_t *memory, long output, long last);

/* How the float products cut weights into tiles of WIDE outputs and at most DEEP columns, expanded at a time:
 * 40 KB on Arm (64 KB of first-level cache), 20 KB elsewhere. */
#if defined(__aarch64__)
#define WIDE 16
#else
#define WIDE 8
#endif
#define DEEP 640

/* Columns expanded at a time: all pieces alike, each at most DEEP. */
long tile_depth(const product *wanted);

/* Outputs output..output+WIDE-1, columns column..column+depth-1, into tile [WIDE, depth]; zeros beyond the last output. */
void expand_tile(const product *wanted, float *tile, long output, long column, long depth);

#endif
