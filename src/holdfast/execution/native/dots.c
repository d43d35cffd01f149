/* Products of few rows in floats. Numbers that are not quantized are widened on their way into the sums; of others a tile
 * is expanded into a scratch that stays in the first-level cache, and the rows of x pass over it in register tiles of dot
 * products.
 *
 *   x [rows, columns] ---> 4 rows at a time  \
 *                                              4 x 4 sums in registers ---> out
 *   W [outputs, columns] -> WIDE rows x DEEP columns expanded /
 */
#include "matmul.h"

#include "plain_numbers.h"

typedef struct {
    const product *wanted;
    long deep;
    work_queue queue;
} dot_work;

static void put_sums(const product *wanted, const float *sums, long row, int rows, long output, int begins) {
    int valid = wanted->outputs - output < TILE_COLUMNS ? (int)(wanted->outputs - output) : TILE_COLUMNS;
    for (int r = 0; r < rows; r++) {
        float *out = wanted->out + (row + r) * wanted->out_stride + output;
        for (int i = 0; i < valid; i++) {
            float value = sums[r * TILE_COLUMNS + i];
            if (begins && wanted->bias != NULL) value += wanted->bias[output + i];
            out[i] = begins && !wanted->add ? value : out[i] + value;
        }
    }
}

/* All rows of x over the expanded columns column..column+depth-1 of outputs output..output+WIDE-1. */
static void pass_rows(const product *wanted, const float *tile, long output, long column, long depth) {
    long wide = wanted->outputs - output < WIDE ? wanted->outputs - output : WIDE;
    float sums[TILE_ROWS * TILE_COLUMNS];
    for (long row = 0; row < wanted->rows; row += TILE_ROWS) {
        int rows = wanted->rows - row < TILE_ROWS ? (int)(wanted->rows - row) : TILE_ROWS;
        const float *x[TILE_ROWS];
        for (int r = 0; r < rows; r++) x[r] = wanted->x + (row + r) * wanted->x_stride + column;
        for (long i = 0; i < wide; i += TILE_COLUMNS) {
            const float *w[TILE_COLUMNS];
            for (int j = 0; j < TILE_COLUMNS; j++) w[j] = tile + (i + j) * depth;
            dot_tile_of(rows, x, w, depth, sums, TILE_COLUMNS);
            put_sums(wanted, sums, row, rows, output + i, column == 0);
        }
    }
}

static void run_tiles(void *pointer) {
    dot_work *work = pointer;
    const product *wanted = work->wanted;
    float *tile = scratch(SCRATCH_OWN, sizeof(float) * WIDE * DEEP);
    if (tile == NULL) return; /* the others take this thread's share; the caller has its own before it starts */
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        for (long column = 0; column < wanted->columns; column += work->deep) {
            long depth = wanted->columns - column < work->deep ? wanted->columns - column : work->deep;
            expand_tile(wanted, tile, unit * WIDE, column, depth);
            pass_rows(wanted, tile, unit * WIDE, column, depth);
        }
    }
}

/* sums[row][output] of `rows` rows of x, a constant where it is inlined, with TILE_COLUMNS rows of plain weights. */
ALWAYS_INLINE void dot_numbers(int rows, const float *const *x, const uint8_t *const *w, long length, enum layout layout,
                               float *sums) {
    vec total[TILE_ROWS][TILE_COLUMNS];
    UNROLL for (int row = 0; row < rows; row++) {
        UNROLL for (int column = 0; column < TILE_COLUMNS; column++) total[row][column] = (vec){0};
    }
    const uint8_t *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
    const float *rows_of_x[TILE_ROWS];
    UNROLL for (int row = 0; row < rows; row++) rows_of_x[row] = x[row];
    for (long i = 0; i < length; i += LANES) {
        const vec b0 = load_numbers(w0, i, layout), b1 = load_numbers(w1, i, layout);
        const vec b2 = load_numbers(w2, i, layout), b3 = load_numbers(w3, i, layout);
        UNROLL for (int row = 0; row < rows; row++) {
            const vec a = load(rows_of_x[row] + i);
            total[row][0] += a * b0;
            total[row][1] += a * b1;
            total[row][2] += a * b2;
            total[row][3] += a * b3;
        }
    }
    UNROLL for (int row = 0; row < rows; row++) sums_of_four(total[row], sums + row * TILE_COLUMNS);
}

ALWAYS_INLINE void dot_numbers_of(int rows, const float *const *x, const uint8_t *const *w, long length,
                                  enum layout layout, float *sums) {
    switch (rows) {
    case 1: dot_numbers(1, x, w, length, layout, sums); break;
#if TILE_ROWS == 4
    case 2: dot_numbers(2, x, w, length, layout, sums); break;
    case 3: dot_numbers(3, x, w, length, layout, sums); break;
#endif
    default: dot_numbers(TILE_ROWS, x, w, length, layout, sums);
    }
}

/* Outputs output..output+WIDE-1 of all rows. */
static void pass_numbers(const product *wanted, long output) {
    const long last = output + WIDE < wanted->outputs ? output + WIDE : wanted->outputs;
    const long bytes = row_bytes(wanted->layout, wanted->columns);
    float sums[TILE_ROWS * TILE_COLUMNS];
    for (long row = 0; row < wanted->rows; row += TILE_ROWS) {
        const int rows = wanted->rows - row < TILE_ROWS ? (int)(wanted->rows - row) : TILE_ROWS;
        const float *x[TILE_ROWS];
        for (int r = 0; r < rows; r++) x[r] = wanted->x + (row + r) * wanted->x_stride;
        for (long i = output; i < last; i += TILE_COLUMNS) {
            const uint8_t *w[TILE_COLUMNS];
            /* Beyond the last output its row is read again, and the sums are dropped. */
            for (int j = 0; j < TILE_COLUMNS; j++) w[j] = wanted->weights + (i + j < last ? i + j : last - 1) * bytes;
            switch (wanted->layout) {
            case F32: dot_numbers_of(rows, x, w, wanted->columns, F32, sums); break;
            case F16: dot_numbers_of(rows, x, w, wanted->columns, F16, sums); break;
            default: dot_numbers_of(rows, x, w, wanted->columns, BF16, sums);
            }
            put_sums(wanted, sums, row, rows, i, 1);
        }
    }
}

static void run_numbers(void *pointer) {
    dot_work *work = pointer;
    for (long unit; (unit = claim(&work->queue)) >= 0;) pass_numbers(work->wanted, unit * WIDE);
}

int multiply_by_dots(const product *wanted) {
    if (scratch(SCRATCH_OWN, sizeof(float) * WIDE * DEEP) == NULL) return -1;
    dot_work work = {.wanted = wanted, .deep = tile_depth(wanted)};
    work.queue.units = (wanted->outputs + WIDE - 1) / WIDE;
    int small = wanted->outputs * wanted->columns * wanted->rows < 32768;
    run_parallel(is_plain(wanted->layout) ? run_numbers : run_tiles, &work, small ? 1 : wanted->threads);
    return 0;
}
