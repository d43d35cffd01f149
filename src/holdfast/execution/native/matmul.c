/* Chooses how a product is computed, and expands weights for those that are computed in floats. */
#include "matmul.h"

#include <string.h>

#include "weave.h"
#include "kquant_weave.h"

long tile_depth(const product *wanted) {
    const long unit = block_elements(wanted->layout), most = DEEP / unit * unit;
    long blocks = wanted->columns / unit, pieces = (wanted->columns + most - 1) / most;
    return (blocks + pieces - 1) / pieces * unit;
}

/* `depth` columns of a row that may lie in a bundle. */
static void expand_part(const uint8_t *weights, enum layout layout, long columns, long row, long column, long depth,
                        float *out) {
    const enum layout plain = plain_layout(layout);
    const long bytes = block_bytes(layout), unit = block_elements(layout), stored_bytes = row_bytes(layout, columns);
    const long first = column / unit, count = depth / unit;
    if (!is_woven(layout)) {
        expand_blocks(plain, weights + row * stored_bytes + first * bytes, count, out);
        return;
    }
    const uint8_t *bundle = weights + row / BUNDLE * BUNDLE * stored_bytes;
    if (is_kquant(layout)) {
        expand_woven(bundle, layout, (int)(row % BUNDLE), first, count, out);
        return;
    }
    uint8_t apart[DEEP / BLOCK_ELEMENTS * 34]; /* of Q8_0, the largest of these */
    for (long done = 0, most = DEEP / BLOCK_ELEMENTS; done < count; done += most) {
        const long now = count - done < most ? count - done : most;
        unweave_row(bundle, layout, (int)(row % BUNDLE), first + done, now, apart);
        expand_blocks(plain, apart, now, out + done * BLOCK_ELEMENTS);
    }
}

void expand_tile(const product *wanted, float *tile, long output, long column, long depth) {
    const long left = wanted->outputs - output, rows = left < WIDE ? left : WIDE;
    for (long row = 0; row < rows; row++)
        expand_part(wanted->weights, wanted->layout, wanted->columns, output + row, column, depth, tile + row * depth);
    /* Read by the last register tile, its sums dropped: any number will do but those that trap or crawl. */
    memset(tile + rows * depth, 0, (size_t)((WIDE - rows) * depth) * sizeof(float));
}

/* The rows beyond the last bundle, which are stored apart. */
static int multiply_rest(const product *wanted, long whole) {
    const enum layout plain = plain_layout(wanted->layout);
    product rest = *wanted;
    rest.layout = plain;
    rest.weights += whole * row_bytes(plain, wanted->columns);
    rest.out += whole;
    rest.outputs -= whole;
    if (rest.bias != NULL) rest.bias += whole;
    return multiply_by_dots(&rest);
}

int multiply(const product *wanted) {
    if (wanted->rows == 0 || wanted->outputs == 0) return 0;
    if (!is_woven(wanted->layout))
        return wanted->rows <= DOT_ROWS ? multiply_by_dots(wanted) : multiply_by_panels(wanted);
    product woven = *wanted;
    woven.outputs = wanted->outputs / BUNDLE * BUNDLE;
    if (woven.outputs > 0 && multiply_by_digits(&woven)) return -1;
    return woven.outputs < wanted->outputs ? multiply_rest(wanted, woven.outputs) : 0;
}

typedef struct {
    const expansion *wanted;
    work_queue queue;
} expand_work;

#define EXPAND_ROWS 16

static void expand_row(const expansion *wanted, long row, float *out) {
    const int alone = row >= wanted->stored_rows / BUNDLE * BUNDLE;
    const enum layout layout = alone ? plain_layout(wanted->layout) : wanted->layout;
    expand_part(wanted->weights, layout, wanted->columns, row, 0, wanted->columns, out);
}

static void run_expansion(void *pointer) {
    expand_work *work = pointer;
    const expansion *wanted = work->wanted;
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        long last = (unit + 1) * EXPAND_ROWS < wanted->rows ? (unit + 1) * EXPAND_ROWS : wanted->rows;
        for (long row = unit * EXPAND_ROWS; row < last; row++) {
            long stored = wanted->chosen != NULL ? (long)wanted->chosen[row] : row;
            expand_row(wanted, stored, wanted->out + row * wanted->out_stride);
        }
    }
}

void expand_rows(const expansion *wanted) {
    expand_work work = {.wanted = wanted, .queue = {.units = (wanted->rows + EXPAND_ROWS - 1) / EXPAND_ROWS}};
    run_parallel(run_expansion, &work, work.queue.units < 2 ? 1 : wanted->threads);
}
