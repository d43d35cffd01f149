/* Products of many rows in floats. Rows of x are turned into panels once, so that a vector holds the same column of
 * several rows, and every panel passes over a tile of expanded weights:
 *
 *   x [rows, columns] -> panels [rows / PANEL, columns, PANEL]   \
 *                                                                  TILE_OUTPUTS x PANEL sums in registers ---> out
 *   W [outputs, columns] -> WIDE rows x DEEP columns expanded     /
 *
 * The last panel is filled up with zeros. A row's sums are built in the same order wherever it stands. */
#include "matmul.h"

#include "scaled.h"
#include "vector.h"

#define VECTORS 2
#define PANEL (VECTORS * LANES)
#if defined(__AVX__) && !defined(__AVX512F__)
#define TILE_OUTPUTS 4 /* half the registers of the others */
#else
#define TILE_OUTPUTS 8
#endif
#define PACKED_BYTES (4L << 20) /* of panels at a time */
#define BLOCK_PANELS 4

typedef struct {
    const product *wanted;
    long first, last; /* the rows whose panels are packed now */
    float *packed;
    long deep, tiles, panels;
    long tall; /* panels in a unit of work: fewer than all when there are too few tiles for the threads */
    work_queue queue;
} panel_work;

/* Inputs of planes, as those want them. */
static void run_changed_packing(panel_work *work, const scaled_matrix *planes) {
    const product *wanted = work->wanted;
    const long columns = wanted->columns;
    float *changed = scratch(SCRATCH_OWN, sizeof(float) * (size_t)(columns + columns / BLOCK_ELEMENTS));
    if (changed == NULL) return; /* the others take this thread's share; the caller has its own before it starts */
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        float *out = work->packed + unit * PANEL * columns;
        for (long r = 0; r < PANEL; r++) {
            const long row = work->first + unit * PANEL + r;
            if (row < work->last) round_input(planes, wanted->x + row * wanted->x_stride, changed, changed + columns);
            for (long i = 0; i < columns; i++) out[i * PANEL + r] = row < work->last ? changed[i] : 0.0f;
        }
    }
}

static void run_packing(void *pointer) {
    panel_work *work = pointer;
    const product *wanted = work->wanted;
    if (is_scaled(wanted->layout) && changes_inputs((const scaled_matrix *)wanted->weights)) {
        run_changed_packing(work, (const scaled_matrix *)wanted->weights);
        return;
    }
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        long row = work->first + unit * PANEL, rows = work->last - row < PANEL ? work->last - row : PANEL;
        float *out = work->packed + unit * PANEL * wanted->columns;
        for (long from = 0; from < wanted->columns; from += BLOCK_ELEMENTS) {
            for (long r = 0; r < PANEL; r++) {
                const float *x = wanted->x + (row + r) * wanted->x_stride;
                for (long i = from; i < from + BLOCK_ELEMENTS; i++) out[i * PANEL + r] = r < rows ? x[i] : 0.0f;
            }
        }
    }
}

/* sums[output] = panel . weights, over `depth` columns of TILE_OUTPUTS expanded rows. */
ALWAYS_INLINE void multiply_tile(const float *weights, const float *x, long depth, vec sums[TILE_OUTPUTS][VECTORS]) {
    vec sum[TILE_OUTPUTS][VECTORS];
    UNROLL for (int o = 0; o < TILE_OUTPUTS; o++) {
        UNROLL for (int v = 0; v < VECTORS; v++) sum[o][v] = (vec){0};
    }
#if LANES == 4 && defined(__aarch64__)
#define COLUMN(lane)                                                                                         \
    UNROLL for (int v = 0; v < VECTORS; v++) {                                                               \
        float32x4_t of_rows = vld1q_f32(x + lane * PANEL + v * LANES);                                       \
        UNROLL for (int o = 0; o < TILE_OUTPUTS; o++)                                                        \
            sum[o][v] = (vec)vfmaq_laneq_f32((float32x4_t)sum[o][v], of_rows, of_columns[o], lane);          \
    }
    for (long i = 0; i < depth; i += 4, x += 4 * PANEL) {
        /* A panel comes from the second-level cache, the tile stays in the first. */
        __builtin_prefetch(x + 128);
        __builtin_prefetch(x + 144);
        float32x4_t of_columns[TILE_OUTPUTS];
        UNROLL for (int o = 0; o < TILE_OUTPUTS; o++) of_columns[o] = vld1q_f32(weights + o * depth + i);
        COLUMN(0) COLUMN(1) COLUMN(2) COLUMN(3)
    }
#undef COLUMN
#else
    for (long i = 0; i < depth; i++, x += PANEL) {
        vec of_rows[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) of_rows[v] = load(x + v * LANES);
        UNROLL for (int o = 0; o < TILE_OUTPUTS; o++) {
            UNROLL for (int v = 0; v < VECTORS; v++) sum[o][v] += of_rows[v] * weights[o * depth + i];
        }
    }
#endif
    UNROLL for (int o = 0; o < TILE_OUTPUTS; o++) {
        UNROLL for (int v = 0; v < VECTORS; v++) sums[o][v] = sum[o][v];
    }
}

/* turned[row][output] = sums[output][row] */
ALWAYS_INLINE void turn_tile(vec sums[TILE_OUTPUTS][VECTORS], float turned[PANEL][TILE_OUTPUTS]) {
#if LANES == 4 && defined(__aarch64__)
    UNROLL for (int o = 0; o < TILE_OUTPUTS; o += 4) {
        UNROLL for (int v = 0; v < VECTORS; v++) {
            float32x4_t a = (float32x4_t)sums[o][v], b = (float32x4_t)sums[o + 1][v];
            float32x4_t c = (float32x4_t)sums[o + 2][v], d = (float32x4_t)sums[o + 3][v];
            float64x2_t even_ab = (float64x2_t)vtrn1q_f32(a, b), even_cd = (float64x2_t)vtrn1q_f32(c, d);
            float64x2_t odd_ab = (float64x2_t)vtrn2q_f32(a, b), odd_cd = (float64x2_t)vtrn2q_f32(c, d);
            store(&turned[v * LANES][o], (vec)vtrn1q_f64(even_ab, even_cd));
            store(&turned[v * LANES + 1][o], (vec)vtrn1q_f64(odd_ab, odd_cd));
            store(&turned[v * LANES + 2][o], (vec)vtrn2q_f64(even_ab, even_cd));
            store(&turned[v * LANES + 3][o], (vec)vtrn2q_f64(odd_ab, odd_cd));
        }
    }
#else
    UNROLL for (int o = 0; o < TILE_OUTPUTS; o++) {
        UNROLL for (int r = 0; r < PANEL; r++) turned[r][o] = sums[o][r / LANES][r % LANES];
    }
#endif
}

/* The sums of a tile to rows row.. of out. */
ALWAYS_INLINE void put_tile(const product *wanted, vec sums[TILE_OUTPUTS][VECTORS], long row, long rows, long output,
                            int begins) {
    const long valid = wanted->outputs - output < TILE_OUTPUTS ? wanted->outputs - output : TILE_OUTPUTS;
    const int adds = !begins || wanted->add, with_bias = begins && wanted->bias != NULL;
    float turned[PANEL][TILE_OUTPUTS];
    turn_tile(sums, turned);
    for (long r = 0; r < rows; r++) {
        float *out = wanted->out + (row + r) * wanted->out_stride + output;
        if (valid == TILE_OUTPUTS && !with_bias) {
            /* All but the edges; the number of outputs is a constant, so these are a few vectors. */
            UNROLL for (int o = 0; o < TILE_OUTPUTS; o++) out[o] = adds ? out[o] + turned[r][o] : turned[r][o];
            continue;
        }
        for (long o = 0; o < valid; o++) {
            float value = with_bias ? turned[r][o] + wanted->bias[output + o] : turned[r][o];
            out[o] = adds ? out[o] + value : value;
        }
    }
}

/* Panels first..last-1 over the expanded columns column..column+depth-1 of outputs output..output+WIDE-1. */
static void pass_panels(const panel_work *work, const float *tile, long output, long column, long depth, long first,
                        long last) {
    const product *wanted = work->wanted;
    const long wide = wanted->outputs - output < WIDE ? wanted->outputs - output : WIDE;
    for (long panel = first; panel < last; panel++) {
        long row = work->first + panel * PANEL, rows = work->last - row < PANEL ? work->last - row : PANEL;
        const float *x = work->packed + (panel * wanted->columns + column) * PANEL;
        for (long i = 0; i < wide; i += TILE_OUTPUTS) {
            vec sums[TILE_OUTPUTS][VECTORS];
            multiply_tile(tile + i * depth, x, depth, sums);
            put_tile(wanted, sums, row, rows, output + i, column == 0);
        }
    }
}

static void run_panels(void *pointer) {
    panel_work *work = pointer;
    const product *wanted = work->wanted;
    float *tile = scratch(SCRATCH_OWN, sizeof(float) * WIDE * DEEP);
    if (tile == NULL) return; /* the others take this thread's share; the caller has its own before it starts */
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        long output = unit % work->tiles * WIDE, first = unit / work->tiles * work->tall;
        long last = first + work->tall < work->panels ? first + work->tall : work->panels;
        for (long column = 0; column < wanted->columns; column += work->deep) {
            long depth = wanted->columns - column < work->deep ? wanted->columns - column : work->deep;
            expand_tile(wanted, tile, output, column, depth);
            pass_panels(work, tile, output, column, depth, first, last);
        }
    }
}

static void run_units(worker run, panel_work *work, long units, int threads) {
    atomic_store(&work->queue.next, 0);
    work->queue.units = units;
    run_parallel(run, work, threads);
}

int multiply_by_panels(const product *wanted) {
    panel_work work = {.wanted = wanted, .deep = tile_depth(wanted), .tiles = (wanted->outputs + WIDE - 1) / WIDE};
    /* Panels of at least BLOCK_PANELS, so that an expanded tile is used more than once. */
    long at_once = PACKED_BYTES / (wanted->columns * (long)sizeof(float) * PANEL);
    long all = (wanted->rows + PANEL - 1) / PANEL;
    if (at_once < BLOCK_PANELS) at_once = BLOCK_PANELS;
    if (at_once > all) at_once = all;
    work.packed = scratch(SCRATCH_TEAM, (size_t)(at_once * PANEL * wanted->columns) * sizeof(float));
    const long own = wanted->columns * 2 > WIDE * DEEP ? wanted->columns * 2 : WIDE * DEEP;
    if (work.packed == NULL || scratch(SCRATCH_OWN, sizeof(float) * (size_t)own) == NULL) return -1;
    int threads = wanted->outputs * wanted->columns * wanted->rows < 32768 ? 1 : wanted->threads;
    for (work.first = 0; work.first < wanted->rows; work.first = work.last) {
        work.last = work.first + at_once * PANEL < wanted->rows ? work.first + at_once * PANEL : wanted->rows;
        work.panels = (work.last - work.first + PANEL - 1) / PANEL;
        run_units(run_packing, &work, work.panels, threads);
        work.tall = work.panels;
        if (work.tiles < 4L * threads) {
            long blocks = (4L * threads + work.tiles - 1) / work.tiles;
            work.tall = (work.panels + blocks - 1) / blocks;
            if (work.tall < BLOCK_PANELS) work.tall = BLOCK_PANELS;
        }
        run_units(run_panels, &work, work.tiles * ((work.panels + work.tall - 1) / work.tall), threads);
    }
    return 0;
}
