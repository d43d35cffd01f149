/* Products of any number of rows with quantized weights in fours, in whole numbers (digits.h).
 *
 *   x [rows, columns] -> panels of 8, 4, 2 and 1 rows, split into digits  \
 *                                                                           rows x 4 sums in registers ---> out
 *   W [outputs, columns] in fours -> as it lies, or a strip at a time     /
 *
 * One dot product adds four columns of one row of x to the sums of four outputs, which fill one vector. Every row is
 * computed alike in all panels, so a result does not change with its company, bit for bit. Needs Arm's dot products. */
#include "digits.h"

#if defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)

/* Of a whole number: two balanced digits hold it, and 32 times 128 times it stays below 2^31. */
#define LARGEST 32600.0f
#define PANEL_BYTES (512L << 10) /* of panels at a time, so that they stay in the second-level cache */
#define STRIP_BYTES (32L << 10)  /* of a strip, so that it stays in the first-level cache beside a panel */
#define STRIP_OUTPUTS 16
#define STRIP_PANELS 2 /* a strip is worth making from here on */

typedef struct {
    const product *wanted;
    const digit_kind *kind;
    panel panels[MOST_PANELS];
    long first, last; /* the rows whose panels are split now */
    long count, blocks;
    long chunk, chunks; /* outputs in a unit of work, and how many such there are */
    long tall;          /* panels in a unit of work: fewer than all when there are too few chunks for the threads */
    long strip;         /* outputs in a strip; 0: weights are read where they lie */
    work_queue queue;
} digit_work;

static void split_block(const float *x, uint8_t *out, int row, int rows, float quant_worth) {
    float32x4_t part[8], largest = vdupq_n_f32(0);
    UNROLL for (int i = 0; i < 8; i++) {
        part[i] = vld1q_f32(x + 4 * i);
        largest = vmaxq_f32(largest, vabsq_f32(part[i]));
    }
    float peak = vmaxvq_f32(largest);
    /* Below this the inverse would overflow; such a block is nothing beside any other. NaN falls through. */
    float inverse = peak < 1e-30f ? 0.0f : LARGEST / peak, scale = peak < 1e-30f ? 0.0f : peak / LARGEST;
    int32x4_t total = vdupq_n_s32(0), digit[DIGITS][8];
    UNROLL for (int i = 0; i < 8; i++) {
        int32x4_t whole = vcvtnq_s32_f32(vmulq_n_f32(part[i], inverse));
        total = vaddq_s32(total, whole);
        /* Balanced digits: the nearest first one, so both are signed bytes. */
        digit[0][i] = vrshrq_n_s32(whole, 8);
        digit[1][i] = vsubq_s32(whole, vshlq_n_s32(digit[0][i], 8));
    }
    int8_t *to = (int8_t *)out + 16 * row;
    UNROLL for (int d = 0; d < DIGITS; d++) {
        UNROLL for (int half = 0; half < 2; half++) {
            const int32x4_t *from = digit[d] + 4 * half;
            int16x8_t low = vcombine_s16(vmovn_s32(from[0]), vmovn_s32(from[1]));
            int16x8_t high = vcombine_s16(vmovn_s32(from[2]), vmovn_s32(from[3]));
            vst1q_s8(to + 16 * (2 * d + half) * rows, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
        }
    }
    float *scales = (float *)(out + digit_bytes(rows)), *sums = scales + padded(rows);
    scales[row] = scale * quant_worth;
    sums[row] = (float)vaddvq_s32(total) * scale;
}

static void split_panels(void *pointer) {
    digit_work *work = pointer;
    const product *wanted = work->wanted;
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        const panel *here = work->panels + unit;
        uint8_t *out = (uint8_t *)here->blocks;
        for (long block = 0; block < work->blocks; block++, out += panel_block_bytes(here->rows)) {
            for (int row = 0; row < here->rows; row++)
                split_block(wanted->x + (here->first + row) * wanted->x_stride + block * BLOCK_ELEMENTS, out, row,
                            here->rows, work->kind->quant_worth);
        }
    }
}

/* A panel with outputs output..last-1, both multiples of four, whose quants begin at `quants`. */
static void pass_panel(const digit_work *work, const panel *here, four_function multiply_four, const uint8_t *quants,
                       long four_bytes, long output, long last) {
    const product *wanted = work->wanted;
    for (; output < last; output += FOUR, quants += four_bytes) {
        float32x4_t total[PANEL_ROWS];
        multiply_four(quants, here->blocks, work->blocks, total);
        float *out = wanted->out + here->first * wanted->out_stride + output;
        for (int r = 0; r < here->rows; r++, out += wanted->out_stride) {
            float32x4_t value = total[r];
            if (wanted->bias != NULL) value = vaddq_f32(value, vld1q_f32(wanted->bias + output));
            vst1q_f32(out, wanted->add ? vaddq_f32(vld1q_f32(out), value) : value);
        }
    }
}

static void pass_panels(const digit_work *work, const uint8_t *quants, int from_strip, long four_bytes, long output,
                        long last, long from, long to) {
    const four_function *functions = from_strip ? work->kind->many : work->kind->few;
    for (const panel *here = work->panels + from; here < work->panels + to; here++)
        pass_panel(work, here, functions[here->rows], quants, four_bytes, output, last);
}

static long strip_bytes(const digit_work *work) {
    return work->strip / FOUR * work->blocks * work->kind->strip_block_bytes;
}

static void run_digits(void *pointer) {
    digit_work *work = pointer;
    const product *wanted = work->wanted;
    const long four_bytes = FOUR * row_bytes(wanted->layout, wanted->columns);
    const long strip_four_bytes = work->blocks * work->kind->strip_block_bytes;
    uint8_t *strip = work->strip > 0 ? scratch(SCRATCH_OWN, (size_t)strip_bytes(work)) : NULL;
    if (work->strip > 0 && strip == NULL) return; /* the others take this thread's share; the caller has its own */
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        long from = unit / work->chunks * work->tall, to = from + work->tall < work->count ? from + work->tall : work->count;
        long output = unit % work->chunks * work->chunk;
        long end = output + work->chunk < wanted->outputs ? output + work->chunk : wanted->outputs;
        const uint8_t *stored = wanted->weights + output / FOUR * four_bytes;
        if (strip == NULL) {
            pass_panels(work, stored, 0, four_bytes, output, end, from, to);
            continue;
        }
        for (long last; output < end; output = last) {
            last = output + work->strip < end ? output + work->strip : end;
            for (long four = 0; four < (last - output) / FOUR; four++, stored += four_bytes)
                work->kind->make_strip(stored, work->blocks, strip + four * strip_four_bytes);
            pass_panels(work, strip, 1, strip_four_bytes, output, last, from, to);
        }
    }
}

/* Panels of 8 rows, then of 4, 2 and 1, of the rows first..last-1; returns the bytes that all take. */
static long cut_panels(digit_work *work, const uint8_t *memory) {
    long bytes = 0;
    work->count = 0;
    for (long first = work->first, rows = PANEL_ROWS; first < work->last; first += rows) {
        while (first + rows > work->last) rows /= 2;
        work->panels[work->count++] = (panel){memory + bytes, first, (int)rows};
        bytes += work->blocks * panel_block_bytes((int)rows);
    }
    return bytes;
}

/* Chunks small enough to even out threads that run at different speeds, large enough to stream. */
static void cut_work(digit_work *work, int threads) {
    const long outputs = work->wanted->outputs, share = outputs / (8L * threads);
    work->chunk = share < STRIP_OUTPUTS ? STRIP_OUTPUTS : (share > 256 ? 256 : share / STRIP_OUTPUTS * STRIP_OUTPUTS);
    work->chunks = (outputs + work->chunk - 1) / work->chunk;
    work->tall = work->count;
    if (work->chunks < 4L * threads && work->count > STRIP_PANELS) {
        long parts = (4L * threads + work->chunks - 1) / work->chunks;
        work->tall = (work->count + parts - 1) / parts;
        if (work->tall < STRIP_PANELS) work->tall = STRIP_PANELS;
    }
    work->strip = 0;
    if (work->tall >= STRIP_PANELS) {
        for (work->strip = STRIP_OUTPUTS; work->strip > FOUR && strip_bytes(work) > STRIP_BYTES;) work->strip /= 2;
    }
    work->queue.units = work->chunks * ((work->count + work->tall - 1) / work->tall);
}

static int multiply_rows(digit_work *work) {
    const product *wanted = work->wanted;
    const uint8_t *memory = scratch(SCRATCH_TEAM, (size_t)cut_panels(work, NULL));
    if (memory == NULL) return -1;
    cut_panels(work, memory);
    atomic_store(&work->queue.next, 0);
    work->queue.units = work->count;
    run_parallel(split_panels, work, work->count > 1 ? wanted->threads : 1);
    const int threads = wanted->outputs * wanted->columns * (work->last - work->first) < 32768 ? 1 : wanted->threads;
    cut_work(work, threads);
    if (work->strip > 0 && scratch(SCRATCH_OWN, (size_t)strip_bytes(work)) == NULL) return -1;
    atomic_store(&work->queue.next, 0);
    run_parallel(run_digits, work, threads);
    return 0;
}

int multiply_by_digits(const product *wanted) {
    digit_work work = {.wanted = wanted, .blocks = wanted->columns / BLOCK_ELEMENTS};
    work.kind = digit_kind_of(plain_layout(wanted->layout));
    long at_once = PANEL_BYTES / (work.blocks * panel_block_bytes(PANEL_ROWS));
    at_once = PANEL_ROWS * (at_once < STRIP_PANELS ? STRIP_PANELS : (at_once > PANELS_AT_ONCE ? PANELS_AT_ONCE : at_once));
    for (work.first = 0; work.first < wanted->rows; work.first = work.last) {
        work.last = work.first + at_once < wanted->rows ? work.first + at_once : wanted->rows;
        if (multiply_rows(&work)) return -1;
    }
    return 0;
}

#else

int multiply_by_digits(const product *wanted) {
    (void)wanted;
    return -1; /* nothing lies in fours here */
}

#endif
