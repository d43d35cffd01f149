/* Chooses how a product is computed, and expands weights for those that are computed in floats. */
#include "matmul.h"

#include <string.h>

#include "kquant_weave.h"
#include "scaled.h"
#include "weave.h"

long tile_depth(const product *wanted) {
    const long unit = block_elements(wanted->layout), most = DEEP / unit * unit;
    long blocks = wanted->columns / unit, pieces = (wanted->columns + most - 1) / most;
    return (blocks + pieces - 1) / pieces * unit;
}

/* `depth` columns of a row that may lie in a bundle. */
static void expand_part(const uint8_t *weights, enum layout layout, long columns, long row, long column, long depth,
                        float *out) {
    if (is_scaled(layout)) {
        expand_scaled((const scaled_matrix *)weights, row, column, depth, out);
        return;
    }
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

/* Dot products with planes whose inputs are rounded or in another order, some rows of x at a time. */
static int multiply_changed(const product *wanted) {
    const scaled_matrix *planes = (const scaled_matrix *)wanted->weights;
    const long columns = wanted->columns;
    float *inputs = scratch(SCRATCH_TEAM, sizeof(float) * (size_t)(DOT_ROWS * columns + columns / BLOCK_ELEMENTS));
    if (inputs == NULL) return -1;
    for (long first = 0; first < wanted->rows; first += DOT_ROWS) {
        product some = *wanted;
        some.rows = wanted->rows - first < DOT_ROWS ? wanted->rows - first : DOT_ROWS;
        for (long row = 0; row < some.rows; row++)
            round_input(planes, wanted->x + (first + row) * wanted->x_stride, inputs + row * columns,
                        inputs + DOT_ROWS * columns);
        some.x = inputs;
        some.x_stride = columns;
        some.out += first * wanted->out_stride;
        if (multiply_by_dots(&some)) return -1;
    }
    return 0;
}

static int multiply_few(const product *wanted) {
    const int planes = is_scaled(wanted->layout);
    if (planes && changes_inputs((const scaled_matrix *)wanted->weights)) return multiply_changed(wanted);
    return multiply_by_dots(wanted);
}

/* Outputs from `whole` on, up to `last`, which are not woven. */
static int multiply_rest(const product *wanted, long whole, long last) {
    const enum layout plain = plain_layout(wanted->layout);
    product rest = *wanted;
    scaled_matrix planes;
    rest.layout = plain;
    if (plain == SCALED) {
        planes = rows_from((const scaled_matrix *)wanted->weights, whole);
        rest.weights = (const uint8_t *)&planes;
    } else {
        rest.weights += whole * row_bytes(plain, wanted->columns);
    }
    rest.out += whole;
    rest.outputs = last - whole;
    if (rest.bias != NULL) rest.bias += whole;
    return multiply_few(&rest);
}

int multiply(const product *wanted) {
    if (wanted->rows == 0 || wanted->outputs == 0) return 0;
    if (!is_woven(wanted->layout))
        return wanted->rows <= DOT_ROWS ? multiply_few(wanted) : multiply_by_panels(wanted);
    product woven = *wanted;
    woven.outputs = wanted->outputs / BUNDLE * BUNDLE;
    if (woven.outputs > 0 && multiply_by_digits(&woven)) return -1;
    return woven.outputs < wanted->outputs ? multiply_rest(wanted, woven.outputs, wanted->outputs) : 0;
}

static long woven_outputs(const product *wanted) {
    return is_woven(wanted->layout) ? wanted->outputs / BUNDLE * BUNDLE : 0;
}

long piece_bytes(const product *wanted) { return woven_outputs(wanted) > 0 ? digits_bytes(wanted) : 0; }

int piece_is_own(const product *wanted) { return woven_outputs(wanted) > 0 && own_digits(wanted); }

int split_piece(const product *wanted, uint8_t *memory, long row) {
    return woven_outputs(wanted) > 0 ? split_row(wanted, memory, row) : 0;
}

int multiply_piece(const product *wanted, const uint8_t *memory, long output, long last) {
    const long woven = woven_outputs(wanted), end = last < woven ? last : woven;
    if (output < end) multiply_split(wanted, memory, output, end);
    return last > woven ? multiply_rest(wanted, output > woven ? output : woven, last) : 0;
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
