/* Matrices of quantized checkpoints, in planes of codes, scales and zero points (footprint/scaled_layouts.py):
 *
 *   element = (value of its code - zero point of its group) * scale of its group
 *
 * Woven (weave.h), a bundle's planes keep their bytes in another order: codes that are multiplied as whole numbers
 * (INT4, INT8, MXFP4) lie as GGUF's do, without scales among them; those that become floats (FP8, NF4) lie
 * [column][row]; scales and zero points of groups that are one row high lie [group][row]. */
#ifndef HOLDFAST_SCALED_H
#define HOLDFAST_SCALED_H

#include "blocks.h"

enum code_type { INT4_CODES, INT8_CODES, MXFP4_CODES, FP8_CODES, NF4_CODES };
enum scale_type { FLOAT_SCALES, HALF_SCALES, BFLOAT_SCALES, POWER_SCALES };
enum input_type { PLAIN_INPUTS, INT8_INPUTS, FP8_INPUTS };

/* As scaled.py writes it: addresses and numbers. What there is none of is 0. */
typedef struct {
    int64_t codes, scales, zeros, order, input_scale;
    int64_t code_type, scale_type, input_type;
    int64_t rows, columns;
    int64_t group, group_rows; /* columns and rows that share a scale */
    int64_t input_group;       /* columns of an input that share one */
    int64_t first_row;         /* of the codes, counted in the rows of the scales */
    int64_t input_bound;       /* bits of a float: no input counts for more when a scale is chosen; 0: no bound */
    int64_t input_powers;      /* scales of inputs are powers of two, the next above */
} scaled_matrix;

static inline int is_four_bits(const scaled_matrix *matrix) {
    return matrix->code_type != INT8_CODES && matrix->code_type != FP8_CODES;
}

static inline long code_row_bytes(const scaled_matrix *matrix) {
    return is_four_bits(matrix) ? matrix->columns / 2 : matrix->columns;
}

static inline long scale_bytes(const scaled_matrix *matrix) {
    return matrix->scale_type == FLOAT_SCALES ? 4 : (matrix->scale_type == POWER_SCALES ? 1 : 2);
}

/* The rows from `row` on, where they are not woven. */
scaled_matrix rows_from(const scaled_matrix *matrix, long row);

/* Columns column..column+depth-1 of a row that is not woven, as floats; all are multiples of BLOCK_ELEMENTS. */
void expand_scaled(const scaled_matrix *matrix, long row, long column, long depth, float *out);

/* Weaves the planes where they lie and returns the layout they have from now on: the same when this machine has no use
 * for it; -1 when there is no memory for scratch. */
int weave_scaled(const scaled_matrix *matrix);

/* Whether inputs are multiplied otherwise than they come. */
static inline int changes_inputs(const scaled_matrix *matrix) {
    return matrix->order != 0 || matrix->input_type != PLAIN_INPUTS;
}

/* One input as it is multiplied, in the order of the columns: numbers into `out`, and what each block of 32 of them is
 * worth into `scales`. Where inputs are rounded, numbers are their codes; else scales are 1. */
void prepare_input(const scaled_matrix *matrix, const float *x, float *out, float *scales);

/* The same as one number each, into `out`. `scales` is room for one of every block. */
void round_input(const scaled_matrix *matrix, const float *x, float *out, float *scales);

extern const float NF4_VALUES[16];
extern const int8_t MXFP4_DOUBLED[16]; /* twice what the codes stand for */

#endif
