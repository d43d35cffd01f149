/* Products of few rows in floats: a tile of weights is expanded into a scratch that stays in the first-level cache, and
 * the rows of x pass over it in register tiles of dot products.
 *
 *   x [rows, columns] ---> 4 rows at a time  \
 *                                              4 x 4 sums in registers ---> out
 *   W [outputs, columns] -> WIDE rows x DEEP columns expanded /
 */
#include "matmul.h"

#include "vector.h"

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

int multiply_by_dots(const product *wanted) {
    if (scratch(SCRATCH_OWN, sizeof(float) * WIDE * DEEP) == NULL) return -1;
    dot_work work = {.wanted = wanted, .deep = tile_depth(wanted)};
    work.queue.units = (wanted->outputs + WIDE - 1) / WIDE;
    int small = wanted->outputs * wanted->columns * wanted->rows < 32768;
    run_parallel(run_tiles, &work, small ? 1 : wanted->threads);
    return 0;
}
