/* Products of few rows with quantized weights in fours, in integers, without losing what floats would keep.
 *
 * A block of 32 activations becomes 24-bit whole numbers times one scale: each is off by at most half a unit in the
 * last place of the block's largest, which is what a float sum with that term in it loses too. A whole number is three
 * signed 8-bit digits, and the machine's 8-bit dot product multiplies digits with quants sixteen at a time, exactly.
 * So nothing is widened to float but one sum a block:
 *
 *   sum(x q) = scale_x * (256 * (256 * sum(high q) + sum(middle q)) + sum(low q))
 *
 * Weights lie in fours (fours.h): one dot product adds four columns of one row of x to the sums of four outputs, which
 * fill one vector. Rows of x are taken in panels of 8, 4, 2 and 1, and every row is computed alike in all of them: up
 * to DIGIT_ROWS rows a result does not change with its company, bit for bit. Beyond that, panels.c computes in floats,
 * which differs in the last places. Needs Arm's dot product instructions. */
#include "matmul.h"

#include "fours.h"
#include "vector.h"

#if defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)

#define DIGITS 3
#define MOST_ROWS 8
#define MOST_PANELS (DIGIT_ROWS / MOST_ROWS + 3)
/* Of a whole number: three digits hold it, and 8 * 32 times it stays below 2^31. */
#define LARGEST 8355000.0f

/* Of one block: [digit][half of the columns][row][16], then the scale of each row, then the sum of its 32 numbers. */
typedef struct {
    const uint8_t *blocks;
    long first;
    int rows;
} panel;

typedef struct {
    const product *wanted;
    panel panels[MOST_PANELS];
    long count, blocks, chunk;
    work_queue queue;
} digit_work;

ALWAYS_INLINE long digit_bytes(int rows) { return DIGITS * BLOCK_ELEMENTS * rows; }
ALWAYS_INLINE long padded(int rows) { return rows < 4 ? 4 : rows; }
ALWAYS_INLINE long panel_block_bytes(int rows) { return digit_bytes(rows) + 2 * padded(rows) * (long)sizeof(float); }

static void split_block(const float *x, uint8_t *out, int row, int rows) {
    float32x4_t part[8], largest = vdupq_n_f32(0);
    UNROLL for (int i = 0; i < 8; i++) {
        part[i] = vld1q_f32(x + 4 * i);
        largest = vmaxq_f32(largest, vabsq_f32(part[i]));
    }
    float peak = vmaxvq_f32(largest);
    /* Below this the inverse would overflow; such a block is nothing beside any other. NaN falls through. */
    float inverse = peak < 1e-30f ? 0.0f : LARGEST / peak;
    int32x4_t total = vdupq_n_s32(0), digit[DIGITS][8];
    UNROLL for (int i = 0; i < 8; i++) {
        int32x4_t whole = vcvtnq_s32_f32(vmulq_n_f32(part[i], inverse));
        total = vaddq_s32(total, whole);
        /* Balanced digits: each is the nearest, so all three are signed bytes. */
        int32x4_t rest = vrshrq_n_s32(whole, 8);
        digit[2][i] = vsubq_s32(whole, vshlq_n_s32(rest, 8));
        digit[0][i] = vrshrq_n_s32(rest, 8);
        digit[1][i] = vsubq_s32(rest, vshlq_n_s32(digit[0][i], 8));
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
    scales[row] = peak < 1e-30f ? 0.0f : peak / LARGEST;
    sums[row] = (float)vaddvq_s32(total) * scales[row];
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
                            here->rows);
        }
    }
}

/* The lane must be a constant where it is inlined, and so it is when every loop around is unrolled. */
ALWAYS_INLINE int32x4_t dot_lane(int32x4_t sum, int8x16_t q, int8x16_t x, int lane) {
    switch (lane) {
    case 0: return vdotq_laneq_s32(sum, q, x, 0);
    case 1: return vdotq_laneq_s32(sum, q, x, 1);
    case 2: return vdotq_laneq_s32(sum, q, x, 2);
    default: return vdotq_laneq_s32(sum, q, x, 3);
    }
}

ALWAYS_INLINE float32x4_t times_lane(float32x4_t a, float32x4_t b, int lane) {
    switch (lane) {
    case 0: return vmulq_laneq_f32(a, b, 0);
    case 1: return vmulq_laneq_f32(a, b, 1);
    case 2: return vmulq_laneq_f32(a, b, 2);
    default: return vmulq_laneq_f32(a, b, 3);
    }
}

ALWAYS_INLINE float32x4_t add_lane(float32x4_t sum, float32x4_t a, float32x4_t b, int lane) {
    switch (lane) {
    case 0: return vfmaq_laneq_f32(sum, a, b, 0);
    case 1: return vfmaq_laneq_f32(sum, a, b, 1);
    case 2: return vfmaq_laneq_f32(sum, a, b, 2);
    default: return vfmaq_laneq_f32(sum, a, b, 3);
    }
}

/* Adds the dot products of one digit to the sums of every row. The rows go side by side: a sum waits for its last. */
ALWAYS_INLINE void add_digit(const int8_t *digit, const int8x16_t *q, int rows, int32x4_t *sum) {
    UNROLL for (int half = 0; half < 2; half++) {
        int8x16_t x[MOST_ROWS];
        UNROLL for (int r = 0; r < rows; r++) x[r] = vld1q_s8(digit + 16 * (half * rows + r));
        UNROLL for (int lane = 0; lane < 4; lane++) {
            UNROLL for (int r = 0; r < rows; r++) sum[r] = dot_lane(sum[r], q[4 * half + lane], x[r], lane);
        }
    }
}

/* The three digits' sums apart: for so few rows that one sum after another would leave the machine waiting. */
ALWAYS_INLINE void digit_sums(const int8_t *x, const int8x16_t *q, int rows, int32x4_t sum[DIGITS][MOST_ROWS]) {
    UNROLL for (int half = 0; half < 2; half++) {
        UNROLL for (int lane = 0; lane < 4; lane++) {
            UNROLL for (int i = 0; i < DIGITS * rows; i++) {
                int d = i / rows, r = i % rows;
                int8x16_t digit = vld1q_s8(x + 16 * ((2 * d + half) * rows + r));
                int32x4_t before = half + lane == 0 ? vdupq_n_s32(0) : sum[d][r];
                sum[d][r] = dot_lane(before, q[4 * half + lane], digit, lane);
            }
        }
    }
}

/* Whole sums of a block for four outputs and every row. An 8-bit block's sum has more bits than a 32-bit lane holds:
 * it is left at 1/16, the low digit's part added rounded. */
ALWAYS_INLINE void block_sums(const int8_t *x, const int8x16_t *q, int rows, int eight_bits, int32x4_t *sum) {
    const long next = BLOCK_ELEMENTS * rows;
    int32x4_t apart[DIGITS][MOST_ROWS];
    if (rows <= 2) {
        digit_sums(x, q, rows, apart);
        UNROLL for (int r = 0; r < rows; r++) {
            int32x4_t upper = vaddq_s32(vshlq_n_s32(apart[0][r], 8), apart[1][r]);
            sum[r] = eight_bits ? vrsraq_n_s32(vshlq_n_s32(upper, 4), apart[2][r], 4)
                                : vaddq_s32(vshlq_n_s32(upper, 8), apart[2][r]);
        }
        return;
    }
    UNROLL for (int r = 0; r < rows; r++) sum[r] = vdupq_n_s32(0);
    add_digit(x, q, rows, sum);
    UNROLL for (int r = 0; r < rows; r++) sum[r] = vshlq_n_s32(sum[r], 8);
    add_digit(x + next, q, rows, sum);
    UNROLL for (int r = 0; r < rows; r++) sum[r] = vshlq_n_s32(sum[r], eight_bits ? 4 : 8);
    if (eight_bits) {
        UNROLL for (int r = 0; r < rows; r++) apart[2][r] = vdupq_n_s32(0);
        add_digit(x + 2 * next, q, rows, apart[2]);
        UNROLL for (int r = 0; r < rows; r++) sum[r] = vrsraq_n_s32(sum[r], apart[2][r], 4);
    } else {
        add_digit(x + 2 * next, q, rows, sum);
    }
}

ALWAYS_INLINE void load_quants(const uint8_t *stored, int eight_bits, int8x16_t *q) {
    const int8_t *from = (const int8_t *)stored;
    if (eight_bits) {
        UNROLL for (int i = 0; i < 8; i++) q[i] = vld1q_s8(from + 16 * i);
    } else {
        UNROLL for (int i = 0; i < 4; i++) {
            int8x16_t both = vld1q_s8(from + 16 * i);
            q[i] = vshrq_n_s8(vshlq_n_s8(both, 4), 4);
            q[i + 4] = vshrq_n_s8(both, 4);
        }
    }
}

ALWAYS_INLINE float32x4_t four_halves(const uint8_t *stored) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(stored)));
}

/* Four outputs, whose weights begin at `four`, for the rows of a panel. */
ALWAYS_INLINE void multiply_four(const uint8_t *four, long blocks, const uint8_t *x, int rows, enum layout plain,
                                 float32x4_t *totals) {
    const int eight_bits = plain == Q8_0, with_minimum = plain == Q4_1;
    const long bytes = FOUR * (plain == Q8_0 ? 34 : (plain == Q4_1 ? 20 : 18)), heads = with_minimum ? 16 : 8;
    float32x4_t total[MOST_ROWS];
    UNROLL for (int r = 0; r < rows; r++) total[r] = vdupq_n_f32(0);
    for (long block = 0; block < blocks; block++, four += bytes, x += panel_block_bytes(rows)) {
        int8x16_t q[8];
        int32x4_t sum[MOST_ROWS];
        /* Prefetching past the end harms nobody. */
        __builtin_prefetch(four + 16 * bytes);
        __builtin_prefetch(four + 16 * bytes + 64);
        load_quants(four + heads, eight_bits, q);
        block_sums((const int8_t *)x, q, rows, eight_bits, sum);
        const float *scales = (const float *)(x + digit_bytes(rows)), *sums = scales + padded(rows);
        float32x4_t scale = four_halves(four);
        if (eight_bits) scale = vmulq_n_f32(scale, 16.0f);
        /* Of quants that begin at -8. */
        float32x4_t minimum = with_minimum ? vfmaq_n_f32(four_halves(four + 8), scale, 8.0f) : scale;
        UNROLL for (int r = 0; r < rows; r++) {
            float32x4_t worth = vld1q_f32(scales + r / 4 * 4);
            total[r] = vfmaq_f32(total[r], times_lane(vcvtq_f32_s32(sum[r]), worth, r % 4), scale);
            if (with_minimum) total[r] = add_lane(total[r], minimum, vld1q_f32(sums + r / 4 * 4), r % 4);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) totals[r] = total[r];
}

/* The rows of a panel with outputs output..last-1, both multiples of four. */
ALWAYS_INLINE void multiply_panel(const digit_work *work, const panel *here, int rows, enum layout plain, long output,
                                  long last) {
    const product *wanted = work->wanted;
    const long stride = work->blocks * block_bytes(plain);
    for (; output < last; output += FOUR) {
        float32x4_t total[MOST_ROWS];
        multiply_four(wanted->weights + output * stride, work->blocks, here->blocks, rows, plain, total);
        UNROLL for (int r = 0; r < rows; r++) {
            float *out = wanted->out + (here->first + r) * wanted->out_stride + output;
            if (wanted->bias != NULL) total[r] = vaddq_f32(total[r], vld1q_f32(wanted->bias + output));
            vst1q_f32(out, wanted->add ? vaddq_f32(vld1q_f32(out), total[r]) : total[r]);
        }
    }
}

/* A function for each layout and number of rows, so that each keeps what it needs in registers. */
typedef void (*panel_function)(const digit_work *work, const panel *here, long output, long last);

#define PANEL(plain, rows)                                                                                     \
    static void panel_##plain##_##rows(const digit_work *work, const panel *here, long output, long last) {   \
        multiply_panel(work, here, rows, plain, output, last);                                                 \
    }
#define PANELS_OF(plain) PANEL(plain, 1) PANEL(plain, 2) PANEL(plain, 4) PANEL(plain, 8)
PANELS_OF(Q4_1)
PANELS_OF(Q4_0)
PANELS_OF(Q8_0)

#define NAMES_OF(plain) {[1] = panel_##plain##_1, [2] = panel_##plain##_2, [4] = panel_##plain##_4, [8] = panel_##plain##_8}
static const panel_function FUNCTIONS[LAYOUTS][MOST_ROWS + 1] = {
    [Q4_1] = NAMES_OF(Q4_1),
    [Q4_0] = NAMES_OF(Q4_0),
    [Q8_0] = NAMES_OF(Q8_0),
};

#define STRIP 16 /* outputs whose weights are still in cache when the next panel comes */

static void run_digits(void *pointer) {
    digit_work *work = pointer;
    const long outputs = work->wanted->outputs, strip = work->count > 1 ? STRIP : work->chunk;
    const panel_function *functions = FUNCTIONS[plain_layout(work->wanted->layout)];
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        long end = (unit + 1) * work->chunk < outputs ? (unit + 1) * work->chunk : outputs;
        for (long output = unit * work->chunk; output < end; output += strip) {
            long last = output + strip < end ? output + strip : end;
            for (const panel *here = work->panels; here < work->panels + work->count; here++)
                functions[here->rows](work, here, output, last);
        }
    }
}

/* Panels of 8 rows, then of 4, 2 and 1; returns the bytes that all take. */
static long cut_panels(digit_work *work, const uint8_t *memory) {
    long bytes = 0;
    work->count = 0;
    for (long first = 0, rows = MOST_ROWS; first < work->wanted->rows; first += rows) {
        while (first + rows > work->wanted->rows) rows /= 2;
        work->panels[work->count++] = (panel){memory + bytes, first, (int)rows};
        bytes += work->blocks * panel_block_bytes((int)rows);
    }
    return bytes;
}

int multiply_by_digits(const product *wanted) {
    digit_work work = {.wanted = wanted, .blocks = wanted->columns / BLOCK_ELEMENTS};
    const uint8_t *memory = scratch(SCRATCH_TEAM, (size_t)cut_panels(&work, NULL));
    if (memory == NULL) return -1;
    cut_panels(&work, memory);
    work.queue.units = work.count;
    run_parallel(split_panels, &work, work.count > 1 ? wanted->threads : 1);
    /* Small enough to even out threads that run at different speeds, large enough to stream. */
    long share = wanted->outputs / (8L * wanted->threads);
    work.chunk = share < 16 ? 16 : (share > 256 ? 256 : share / STRIP * STRIP);
    atomic_store(&work.queue.next, 0);
    work.queue.units = (wanted->outputs + work.chunk - 1) / work.chunk;
    int small = wanted->outputs * wanted->columns * wanted->rows < 32768;
    run_parallel(run_digits, &work, small ? 1 : wanted->threads);
    return 0;
}

#else

int multiply_by_digits(const product *wanted) {
    (void)wanted;
    return -1; /* nothing lies in fours here */
}

#endif
