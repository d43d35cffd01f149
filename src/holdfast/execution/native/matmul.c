/* Products of many rows: a tile of weights is expanded into a scratch that stays in the first-level cache, and every
 * row of x passes over it in register tiles of dot products. Few rows go through digits.c where the machine can.
 *
 *   x [rows, columns] ---> 4 rows at a time  \
 *                                              4 x 4 sums in registers ---> out
 *   W [outputs, columns] -> WIDE rows x DEEP columns expanded /
 */
#include "matmul.h"

#include "vector.h"

/* Rows and columns of weights expanded at a time: 40 KB on Arm (64 KB of cache), 20 KB elsewhere. */
#if defined(__aarch64__)
#define WIDE 16
#else
#define WIDE 8
#endif
#define DEEP 640
#define FEW_ROWS 8 /* up to here digits are faster than floats */
#define BLOCK_ROWS 32

typedef struct {
    const product *wanted;
    long deep;            /* columns expanded at a time */
    long tiles;           /* of WIDE outputs */
    long row_blocks, tall; /* x is cut into blocks of `tall` rows when there are too few tiles for the threads */
    work_queue queue;
} tile_work;

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

/* Rows first..last-1 of x over the expanded columns column..column+depth-1 of outputs output..output+WIDE-1. */
static void pass_rows(const product *wanted, const float *tile, long output, long column, long depth, long first,
                      long last) {
    long wide = wanted->outputs - output < WIDE ? wanted->outputs - output : WIDE;
    float sums[TILE_ROWS * TILE_COLUMNS];
    for (long row = first; row < last; row += TILE_ROWS) {
        int rows = last - row < TILE_ROWS ? (int)(last - row) : TILE_ROWS;
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

static void expand_tile(const tile_work *work, float *tile, long output, long column, long depth) {
    const product *wanted = work->wanted;
    const long bytes = block_bytes(wanted->layout), stride = wanted->columns / BLOCK_ELEMENTS * bytes;
    for (long i = 0; i < WIDE; i++) {
        if (output + i < wanted->outputs) {
            const uint8_t *stored = wanted->weights + (output + i) * stride + column / BLOCK_ELEMENTS * bytes;
            expand_blocks(wanted->layout, stored, depth / BLOCK_ELEMENTS, tile + i * depth);
        } else {
            /* Read by the last register tile, its sums dropped: any number will do but those that trap or crawl. */
            memset(tile + i * depth, 0, (size_t)depth * sizeof(float));
        }
    }
}

static void run_tiles(void *pointer) {
    tile_work *work = pointer;
    const product *wanted = work->wanted;
    float *tile = scratch(SCRATCH_OWN, sizeof(float) * WIDE * DEEP);
    if (tile == NULL) return; /* the others take this thread's share; multiply() has its own scratch before it starts */
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        long output = unit % work->tiles * WIDE, first = unit / work->tiles * work->tall;
        long last = first + work->tall < wanted->rows ? first + work->tall : wanted->rows;
        for (long column = 0; column < wanted->columns; column += work->deep) {
            long depth = wanted->columns - column < work->deep ? wanted->columns - column : work->deep;
            expand_tile(work, tile, output, column, depth);
            pass_rows(wanted, tile, output, column, depth, first, last);
        }
    }
}

int multiply(const product *wanted) {
    if (wanted->rows == 0 || wanted->outputs == 0) return 0;
    if (wanted->rows <= FEW_ROWS) {
        int done = multiply_by_digits(wanted);
        if (done <= 0) return done;
    }
    if (scratch(SCRATCH_OWN, sizeof(float) * WIDE * DEEP) == NULL) return -1;
    tile_work work = {.wanted = wanted};
    long blocks = wanted->columns / BLOCK_ELEMENTS, pieces = (wanted->columns + DEEP - 1) / DEEP;
    work.deep = (blocks + pieces - 1) / pieces * BLOCK_ELEMENTS;
    work.tiles = (wanted->outputs + WIDE - 1) / WIDE;
    work.row_blocks = 1;
    if (work.tiles < 4L * wanted->threads) {
        long most = (wanted->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        work.row_blocks = (4L * wanted->threads + work.tiles - 1) / work.tiles;
        if (work.row_blocks > most) work.row_blocks = most;
    }
    work.tall = (wanted->rows + work.row_blocks - 1) / work.row_blocks;
    work.tall = (work.tall + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    work.row_blocks = (wanted->rows + work.tall - 1) / work.tall;
    work.queue.units = work.tiles * work.row_blocks;
    int small = wanted->outputs * wanted->columns * wanted->rows < 32768;
    run_parallel(run_tiles, &work, small ? 1 : wanted->threads);
    return 0;
}

typedef struct {
    const expansion *wanted;
    work_queue queue;
} expand_work;

#define EXPAND_ROWS 16

static void run_expansion(void *pointer) {
    expand_work *work = pointer;
    const expansion *wanted = work->wanted;
    const long blocks = wanted->columns / BLOCK_ELEMENTS, stride = blocks * block_bytes(wanted->layout);
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        long last = (unit + 1) * EXPAND_ROWS < wanted->rows ? (unit + 1) * EXPAND_ROWS : wanted->rows;
        for (long row = unit * EXPAND_ROWS; row < last; row++) {
            long stored = wanted->chosen != NULL ? (long)wanted->chosen[row] : row;
            float *out = wanted->out + row * wanted->out_stride;
            expand_blocks(wanted->layout, wanted->weights + stored * stride, blocks, out);
        }
    }
}

void expand_rows(const expansion *wanted) {
    expand_work work = {.wanted = wanted, .queue = {.units = (wanted->rows + EXPAND_ROWS - 1) / EXPAND_ROWS}};
    run_parallel(run_expansion, &work, work.queue.units < 2 ? 1 : wanted->threads);
}
