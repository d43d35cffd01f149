/* Products of any number of rows with woven weights, in whole numbers (digits.h).
 *
 *   x [rows, columns] -> panels of rows in whole numbers                  \
 *                                                                           rows x BUNDLE sums in registers ---> out
 *   W [outputs, columns] in bundles -> as it lies, or a strip at a time   /
 *
 * One dot product adds some columns of one row of x to the sums of a bundle's outputs, which fill one vector. Every row
 * is computed alike in all panels, so a result does not change with its company, bit for bit. */
#include "digits.h"

#if defined(ARM_DIGITS) || defined(X86_DIGITS)

#define PANEL_BYTES (512L << 10) /* of panels at a time, so that they stay in the second-level cache */
#define STRIP_BYTES (32L << 10)  /* of a strip, so that it stays in the first-level cache beside a panel */
#define STRIP_OUTPUTS 16
#define SPLIT_ROWS 8 /* that a thread splits at a time */
#define MOST_PANELS (PANELS_AT_ONCE + 3)

typedef struct {
    const product *wanted;
    const digit_kind *kind;
    const scaled_matrix *planes; /* NULL: scales lie among the codes */
    long bundle_bytes;
    panel panels[MOST_PANELS];
    long first, last; /* the rows whose panels are split now */
    long count, blocks;
    long chunk, chunks; /* outputs in a unit of work, and how many such there are */
    long tall;          /* panels in a unit of work: fewer than all when there are too few chunks for the threads */
    long strip;         /* outputs in a strip; 0: weights are read where they lie */
    work_queue queue;
} digit_work;

/* Rows first..last-1 of a panel as planes want them: rounded, in another order, or as numbers. */
static void prepare_rows(const digit_work *work, const panel *here, int first, int last, float *prepared) {
    const product *wanted = work->wanted;
    const long step = input_block_bytes(work->kind, here->rows);
    float *scales = prepared + wanted->columns;
    for (int row = first; row < last; row++) {
        prepare_input(work->planes, wanted->x + (here->first + row) * wanted->x_stride, prepared, scales);
        for (long block = 0; block < work->blocks; block++)
            put_prepared(work->planes, prepared + block * BLOCK_ELEMENTS, scales[block],
                         (uint8_t *)here->blocks + block * step, row, here->rows, work->kind);
    }
}

/* Room of the calling thread for one row. */
static float *row_room(const digit_work *work) {
    return scratch(SCRATCH_OWN, sizeof(float) * (size_t)(work->wanted->columns + work->blocks));
}

static int prepares(const digit_work *work) {
    return work->planes != NULL && (in_floats(work->kind) || changes_inputs(work->planes));
}

static void split_prepared(digit_work *work) {
    float *prepared = row_room(work);
    if (prepared == NULL) return; /* the others take this thread's share; the caller has its own before it starts */
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        const panel *here = work->panels + unit / (PANEL_ROWS / SPLIT_ROWS);
        const int first = (int)(unit % (PANEL_ROWS / SPLIT_ROWS)) * SPLIT_ROWS;
        prepare_rows(work, here, first, first + SPLIT_ROWS < here->rows ? first + SPLIT_ROWS : here->rows, prepared);
    }
}

static void split_panels(void *pointer) {
    digit_work *work = pointer;
    const product *wanted = work->wanted;
    if (prepares(work)) {
        split_prepared(work);
        return;
    }
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        const panel *here = work->panels + unit / (PANEL_ROWS / SPLIT_ROWS);
        const int first = (int)(unit % (PANEL_ROWS / SPLIT_ROWS)) * SPLIT_ROWS;
        const int last = first + SPLIT_ROWS < here->rows ? first + SPLIT_ROWS : here->rows;
        uint8_t *out = (uint8_t *)here->blocks;
        for (long block = 0; block < work->blocks; block++, out += panel_block_bytes(here->rows)) {
            for (int row = first; row < last; row++)
                split_block(wanted->x + (here->first + row) * wanted->x_stride + block * BLOCK_ELEMENTS, out, row,
                            here->rows, work->kind);
        }
    }
}

/* A panel with outputs output..last-1, both multiples of BUNDLE, whose quants begin at `quants`. */
static void pass_panel(const digit_work *work, const panel *here, bundle_function multiply_bundles, const uint8_t *quants,
                       long bundle_bytes, long output, long last) {
    const product *wanted = work->wanted;
    const long most = bundles_at_once(here->rows);
    for (long wide; output < last; output += wide * BUNDLE, quants += wide * bundle_bytes) {
        bundle_sums total[BUNDLES_AT_ONCE * PANEL_ROWS], *from = total;
        wide = (last - output) / BUNDLE < most ? (last - output) / BUNDLE : most;
        multiply_bundles(quants, bundle_bytes, (int)wide, work->planes, here->blocks, work->blocks, here->rows, total);
        for (long to = output; to < output + wide * BUNDLE; to += BUNDLE) {
            float *out = wanted->out + here->first * wanted->out_stride + to;
            for (int r = 0; r < here->rows; r++, from++, out += wanted->out_stride) {
                vec value = (vec)*from;
                if (wanted->bias != NULL) value += load(wanted->bias + to);
                store(out, wanted->add ? load(out) + value : value);
            }
        }
    }
}

static void pass_panels(const digit_work *work, const uint8_t *quants, int from_strip, long bundle_bytes, long output,
                        long last, long from, long to) {
    for (const panel *here = work->panels + from; here < work->panels + to; here++)
        pass_panel(work, here, function_of(work->kind, from_strip, here->rows), quants, bundle_bytes, output, last);
}

static long strip_bytes(const digit_work *work) {
    return work->strip / BUNDLE * work->blocks * work->kind->strip_block_bytes;
}

static void run_digits(void *pointer) {
    digit_work *work = pointer;
    const product *wanted = work->wanted;
    const uint8_t *weights = work->planes == NULL ? wanted->weights : (const uint8_t *)work->planes->codes;
    const long bundle_bytes = work->bundle_bytes;
    const long strip_bundle_bytes = work->blocks * work->kind->strip_block_bytes;
    uint8_t *strip = work->strip > 0 ? scratch(SCRATCH_OWN, (size_t)strip_bytes(work)) : NULL;
    if (work->strip > 0 && strip == NULL) return; /* the others take this thread's share; the caller has its own */
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        long from = unit / work->chunks * work->tall, to = from + work->tall < work->count ? from + work->tall : work->count;
        long output = unit % work->chunks * work->chunk;
        long end = output + work->chunk < wanted->outputs ? output + work->chunk : wanted->outputs;
        const uint8_t *stored = weights + output / BUNDLE * bundle_bytes;
        if (strip == NULL) {
            pass_panels(work, stored, 0, bundle_bytes, output, end, from, to);
            continue;
        }
        for (long last; output < end; output = last) {
            last = output + work->strip < end ? output + work->strip : end;
            for (long bundle = 0; bundle < (last - output) / BUNDLE; bundle++, stored += bundle_bytes)
                work->kind->make_strip(stored, bundle_bytes, work->planes, work->blocks,
                                       strip + bundle * strip_bundle_bytes);
            pass_panels(work, strip, 1, strip_bundle_bytes, output, last, from, to);
        }
    }
}

/* The rows first..last-1 in panels; returns the bytes that all take. */
static long cut_panels(digit_work *work, const uint8_t *memory) {
    long bytes = 0;
    work->count = 0;
    for (long first = work->first, rows; first < work->last; first += rows) {
        rows = panel_rows(work->kind, work->last - first);
        work->panels[work->count++] = (panel){memory + bytes, first, (int)rows};
        bytes += work->blocks * input_block_bytes(work->kind, (int)rows);
    }
    return bytes;
}

/* Chunks small enough to even out threads that run at different speeds, large enough to stream. */
static void cut_work(digit_work *work, int threads) {
    const long outputs = work->wanted->outputs, share = outputs / (8L * threads);
    work->chunk = share < STRIP_OUTPUTS ? STRIP_OUTPUTS : (share > 256 ? 256 : share / STRIP_OUTPUTS * STRIP_OUTPUTS);
    work->chunks = (outputs + work->chunk - 1) / work->chunk;
    work->tall = work->count;
    if (work->chunks < 4L * threads && work->count > LEAST_PANELS) {
        long parts = (4L * threads + work->chunks - 1) / work->chunks;
        work->tall = (work->count + parts - 1) / parts;
        if (work->tall < LEAST_PANELS) work->tall = LEAST_PANELS;
    }
    work->strip = 0;
    if (work->kind->make_strip != NULL && work->tall >= LEAST_PANELS) {
        for (work->strip = STRIP_OUTPUTS; work->strip > BUNDLE && strip_bytes(work) > STRIP_BYTES;) work->strip /= 2;
    }
    work->queue.units = work->chunks * ((work->count + work->tall - 1) / work->tall);
}

static int multiply_rows(digit_work *work) {
    const product *wanted = work->wanted;
    const uint8_t *memory = scratch(SCRATCH_TEAM, (size_t)cut_panels(work, NULL));
    if (memory == NULL) return -1;
    cut_panels(work, memory);
    if (prepares(work) && row_room(work) == NULL) return -1;
    atomic_store(&work->queue.next, 0);
    work->queue.units = work->count * (PANEL_ROWS / SPLIT_ROWS);
    run_parallel(split_panels, work, work->last - work->first > SPLIT_ROWS ? wanted->threads : 1);
    const int threads = wanted->outputs * wanted->columns * (work->last - work->first) < 32768 ? 1 : wanted->threads;
    cut_work(work, threads);
    if (work->strip > 0 && scratch(SCRATCH_OWN, (size_t)strip_bytes(work)) == NULL) return -1;
    atomic_store(&work->queue.next, 0);
    run_parallel(run_digits, work, threads);
    return 0;
}

static digit_work work_of(const product *wanted) {
    digit_work work = {.wanted = wanted, .blocks = wanted->columns / BLOCK_ELEMENTS};
    if (is_scaled(wanted->layout)) {
        work.planes = (const scaled_matrix *)wanted->weights;
        work.kind = planes_digits_of(work.planes);
        work.bundle_bytes = BUNDLE * code_row_bytes(work.planes);
    } else {
        work.kind = digit_kind_of(plain_layout(wanted->layout));
        work.bundle_bytes = BUNDLE * row_bytes(wanted->layout, wanted->columns);
    }
    return work;
}

int multiply_by_digits(const product *wanted) {
    digit_work work = work_of(wanted);
    long at_once = PANEL_BYTES / (work.blocks * input_block_bytes(work.kind, PANEL_ROWS));
    at_once = PANEL_ROWS * (at_once < LEAST_PANELS ? LEAST_PANELS : (at_once > PANELS_AT_ONCE ? PANELS_AT_ONCE : at_once));
    for (work.first = 0; work.first < wanted->rows; work.first = work.last) {
        work.last = work.first + at_once < wanted->rows ? work.first + at_once : wanted->rows;
        if (multiply_rows(&work)) return -1;
    }
    return 0;
}

static digit_work whole_work(const product *wanted, const uint8_t *memory, long *bytes) {
    digit_work work = work_of(wanted);
    work.last = wanted->rows;
    *bytes = cut_panels(&work, memory);
    return work;
}

long digits_bytes(const product *wanted) {
    long bytes;
    whole_work(wanted, NULL, &bytes);
    return bytes;
}

int own_digits(const product *wanted) {
    const digit_work work = work_of(wanted);
    return prepares(&work);
}

int split_row(const product *wanted, uint8_t *memory, long row) {
    long bytes;
    const digit_work work = whole_work(wanted, memory, &bytes);
    const panel *here = work.panels;
    while (row >= here->first + here->rows) here++;
    const int at = (int)(row - here->first);
    if (prepares(&work)) {
        float *prepared = row_room(&work);
        if (prepared == NULL) return -1;
        prepare_rows(&work, here, at, at + 1, prepared);
        return 0;
    }
    const float *x = wanted->x + row * wanted->x_stride;
    uint8_t *out = (uint8_t *)here->blocks;
    for (long block = 0; block < work.blocks; block++, out += panel_block_bytes(here->rows))
        split_block(x + block * BLOCK_ELEMENTS, out, at, here->rows, work.kind);
    return 0;
}

void multiply_split(const product *wanted, const uint8_t *memory, long output, long last) {
    long bytes;
    const digit_work work = whole_work(wanted, memory, &bytes);
    const uint8_t *weights = work.planes == NULL ? wanted->weights : (const uint8_t *)work.planes->codes;
    pass_panels(&work, weights + output / BUNDLE * work.bundle_bytes, 0, work.bundle_bytes, output, last, 0, work.count);
}

#else

int multiply_by_digits(const product *wanted) {
    (void)wanted;
    return -1; /* nothing is woven here */
}

long digits_bytes(const product *wanted) { return (void)wanted, 0; }
int own_digits(const product *wanted) { return (void)wanted, 0; }
int split_row(const product *wanted, uint8_t *memory, long row) { return (void)wanted, (void)memory, (void)row, 0; }
void multiply_split(const product *wanted, const uint8_t *memory, long output, long last) {
    (void)wanted, (void)memory, (void)output, (void)last;
}

#endif
