/* Products of few rows with quantized weights, in integers, without losing what floats would keep.
 *
 * A block of 32 activations becomes 24-bit whole numbers times one scale: each is off by at most half a unit in the
 * last place of the block's largest, which is what a float sum with that term in it loses too. A whole number is three
 * signed 8-bit digits, and the machine's 8-bit dot product multiplies digits with quants sixteen at a time, exactly.
 * So nothing is widened to float but one sum a block:
 *
 *   sum(x q) = scale_x * (256 * (256 * sum(high q) + sum(middle q)) + sum(low q))
 *
 * 4-bit quants are taken as q - 8, which fits 32 bits whatever the numbers are: 8 sum(x) is subtracted from the sum,
 * and sums that overflow on the way come back. Four rows of weights are taken together: their four sums fill one
 * vector. Needs Arm's dot product instructions. */
#include "matmul.h"

#include "vector.h"

#if defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)

#define GROUP 4      /* rows of weights taken together */
#define MOST_ROWS 4  /* rows of x for one reading of the weights */
/* Of a whole number: three digits hold it, and 8 * 32 times it stays below 2^31. */
#define LARGEST 8355000.0f

typedef struct {
    int8_t high[32], middle[32], low[32];
} digit_block;

typedef struct {
    digit_block *blocks; /* [rows][blocks of a row] */
    float *scales;       /* beside them: what a whole number is worth */
    float *sums;         /* the sum of the 32 numbers */
    int32_t *eighths;    /* 8 times the sum of the 32 whole numbers */
} digits;

typedef struct {
    const product *wanted;
    digits x;
    long blocks, chunk;
    work_queue queue;
} digit_work;

static void split_block(const float *x, digit_block *out, float *scale, float *sum, int32_t *eighths) {
    float32x4_t part[8], largest = vdupq_n_f32(0);
    UNROLL for (int i = 0; i < 8; i++) {
        part[i] = vld1q_f32(x + 4 * i);
        largest = vmaxq_f32(largest, vabsq_f32(part[i]));
    }
    float peak = vmaxvq_f32(largest);
    /* Below this the inverse would overflow; such a block is nothing beside any other. NaN falls through. */
    float inverse = peak < 1e-30f ? 0.0f : LARGEST / peak;
    int32x4_t total = vdupq_n_s32(0), low[8], middle[8], high[8];
    UNROLL for (int i = 0; i < 8; i++) {
        int32x4_t whole = vcvtnq_s32_f32(vmulq_n_f32(part[i], inverse));
        total = vaddq_s32(total, whole);
        /* Balanced digits: each is the nearest, so all three are signed bytes. */
        int32x4_t rest = vrshrq_n_s32(whole, 8);
        low[i] = vsubq_s32(whole, vshlq_n_s32(rest, 8));
        high[i] = vrshrq_n_s32(rest, 8);
        middle[i] = vsubq_s32(rest, vshlq_n_s32(high[i], 8));
    }
    UNROLL for (int i = 0; i < 8; i += 2) {
        vst1_s8(out->low + 4 * i, vmovn_s16(vcombine_s16(vmovn_s32(low[i]), vmovn_s32(low[i + 1]))));
        vst1_s8(out->middle + 4 * i, vmovn_s16(vcombine_s16(vmovn_s32(middle[i]), vmovn_s32(middle[i + 1]))));
        vst1_s8(out->high + 4 * i, vmovn_s16(vcombine_s16(vmovn_s32(high[i]), vmovn_s32(high[i + 1]))));
    }
    *scale = peak < 1e-30f ? 0.0f : peak / LARGEST;
    *sum = (float)vaddvq_s32(total) * *scale;
    *eighths = 8 * vaddvq_s32(total);
}

/* The dot product with a fresh zero: the compiler would copy a zero it keeps, and a copy costs what a zero does not. */
ALWAYS_INLINE int32x4_t first_dot(int8x16_t q, int8x16_t x) {
    int32x4_t sum;
    __asm__("movi %0.4s, #0\n\tsdot %0.4s, %1.16b, %2.16b" : "=&w"(sum) : "w"(q), "w"(x));
    return sum;
}

/* Sums of digit times quant over a block, for four rows of weights. */
ALWAYS_INLINE int32x4_t dot_digit(const int8x16_t *q0, const int8x16_t *q1, const int8_t *digit) {
    int8x16_t x0 = vld1q_s8(digit), x1 = vld1q_s8(digit + 16);
    int32x4_t sum[GROUP];
    UNROLL for (int i = 0; i < GROUP; i++) sum[i] = vdotq_s32(first_dot(q0[i], x0), q1[i], x1);
    return vpaddq_s32(vpaddq_s32(sum[0], sum[1]), vpaddq_s32(sum[2], sum[3]));
}

/* Four bytes into the lowest lane; said in assembly because the compiler would clear and insert. */
ALWAYS_INLINE float32x4_t word_of(const uint8_t *stored) {
    float32x4_t value;
    __asm__("ldr %s0, %1" : "=w"(value) : "m"(*(const uint8_t(*)[4])stored));
    return value;
}

/* The first four bytes of a block, from four rows. */
ALWAYS_INLINE uint32x4_t heads_of(const uint8_t *const *row) {
    float32x4_t first = vzip1q_f32(word_of(row[0]), word_of(row[1]));
    float32x4_t second = vzip1q_f32(word_of(row[2]), word_of(row[3]));
    return vreinterpretq_u32_f64(vzip1q_f64(vreinterpretq_f64_f32(first), vreinterpretq_f64_f32(second)));
}

ALWAYS_INLINE float32x4_t even_halves(uint32x4_t words) {
    uint16x8_t halves = vreinterpretq_u16_u32(words);
    return vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(vuzp1q_u16(halves, halves))));
}

ALWAYS_INLINE float32x4_t odd_halves(uint32x4_t words) {
    uint16x8_t halves = vreinterpretq_u16_u32(words);
    return vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(vuzp2q_u16(halves, halves))));
}

/* What is left to do of a block when its whole numbers are there. It is done while the next block is multiplied:
 * the chain from a block's bytes to its total is longer than what the machine looks ahead. */
typedef struct {
    int32x4_t whole[MOST_ROWS];
    float32x4_t scale, minimum;
    long block;
} pending;

ALWAYS_INLINE void settle(const digit_work *work, const pending *done, int rows, long first, int with_sums, float worth,
                          float32x4_t *total) {
    UNROLL for (int r = 0; r < rows; r++) {
        long at = (first + r) * work->blocks + done->block;
        float32x4_t sum = vmulq_n_f32(vcvtq_f32_s32(done->whole[r]), worth * work->x.scales[at]);
        total[r] = vfmaq_f32(total[r], sum, done->scale);
        if (with_sums) total[r] = vfmaq_n_f32(total[r], done->minimum, work->x.sums[at]);
    }
}

ALWAYS_INLINE void block_q4(const digit_work *work, const uint8_t *const *row, int rows, long first, long block,
                            int with_minimum, pending *done) {
    int8x16_t q0[GROUP], q1[GROUP];
    UNROLL for (int i = 0; i < GROUP; i++) {
        uint8x16_t packed = vld1q_u8(row[i] + (with_minimum ? 4 : 2));
        q0[i] = vreinterpretq_s8_u8(vandq_u8(packed, vdupq_n_u8(15)));
        q1[i] = vreinterpretq_s8_u8(vshrq_n_u8(packed, 4));
    }
    uint32x4_t heads = heads_of(row);
    done->block = block;
    done->scale = even_halves(heads);
    /* Of quants that begin at -8; without a minimum of its own a block has none left. */
    done->minimum = with_minimum ? vfmaq_n_f32(odd_halves(heads), done->scale, 8.0f) : done->scale;
    UNROLL for (int r = 0; r < rows; r++) {
        const long at = (first + r) * work->blocks + block;
        const digit_block *x = work->x.blocks + at;
        int32x4_t upper = vaddq_s32(vshlq_n_s32(dot_digit(q0, q1, x->high), 8), dot_digit(q0, q1, x->middle));
        int32x4_t low = vsubq_s32(dot_digit(q0, q1, x->low), vld1q_dup_s32(work->x.eighths + at));
        done->whole[r] = vaddq_s32(vshlq_n_s32(upper, 8), low);
    }
}

/* An 8-bit block's sum has more bits than a 32-bit lane holds: the low digit's part is added rounded to 4 bits less. */
ALWAYS_INLINE void block_q8(const digit_work *work, const uint8_t *const *row, int rows, long first, long block,
                            pending *done) {
    int8x16_t q0[GROUP], q1[GROUP];
    UNROLL for (int i = 0; i < GROUP; i++) {
        q0[i] = vld1q_s8((const int8_t *)row[i] + 2);
        q1[i] = vld1q_s8((const int8_t *)row[i] + 18);
    }
    done->block = block;
    done->scale = done->minimum = even_halves(heads_of(row));
    UNROLL for (int r = 0; r < rows; r++) {
        const digit_block *x = work->x.blocks + (first + r) * work->blocks + block;
        int32x4_t upper = vaddq_s32(vshlq_n_s32(dot_digit(q0, q1, x->high), 8), dot_digit(q0, q1, x->middle));
        done->whole[r] = vrsraq_n_s32(vshlq_n_s32(upper, 4), dot_digit(q0, q1, x->low), 4);
    }
}

ALWAYS_INLINE long bytes_of(enum layout layout) { return layout == Q8_0 ? 34 : (layout == Q4_1 ? 20 : 18); }

ALWAYS_INLINE void next_block(const digit_work *work, const uint8_t **row, int rows, long first, long block,
                              enum layout layout, pending *done) {
    const long bytes = bytes_of(layout), ahead = work->blocks * bytes * GROUP;
    if (layout == Q8_0)
        block_q8(work, row, rows, first, block, done);
    else
        block_q4(work, row, rows, first, block, layout == Q4_1, done);
    UNROLL for (int i = 0; i < GROUP; i++) {
        /* Four short rows are no stream the machine would foresee. Prefetching past the end harms nobody. */
        __builtin_prefetch(row[i] + ahead);
        row[i] += bytes;
    }
}

ALWAYS_INLINE void group_of(const digit_work *work, const uint8_t *const *start, int rows, long first,
                            enum layout layout, float32x4_t *totals) {
    const uint8_t *row[GROUP] = {start[0], start[1], start[2], start[3]};
    const float worth = layout == Q8_0 ? 16.0f : 1.0f;
    const int with_sums = layout == Q4_1;
    float32x4_t total[MOST_ROWS];
    pending done, next;
    UNROLL for (int r = 0; r < rows; r++) total[r] = vdupq_n_f32(0);
    next_block(work, row, rows, first, 0, layout, &done);
    for (long block = 1; block < work->blocks; block++) {
        next_block(work, row, rows, first, block, layout, &next);
        settle(work, &done, rows, first, with_sums, worth, total);
        done = next;
    }
    settle(work, &done, rows, first, with_sums, worth, total);
    UNROLL for (int r = 0; r < rows; r++) totals[r] = total[r];
}

static void put_totals(const product *wanted, const float32x4_t *total, int rows, long first, long output) {
    int valid = wanted->outputs - output < GROUP ? (int)(wanted->outputs - output) : GROUP;
    for (int r = 0; r < rows; r++) {
        float *out = wanted->out + (first + r) * wanted->out_stride + output;
        for (int i = 0; i < valid; i++) {
            float value = total[r][i] + (wanted->bias != NULL ? wanted->bias[output + i] : 0.0f);
            out[i] = wanted->add ? out[i] + value : value;
        }
    }
}

/* Rows first..first+rows-1 of x with outputs output..last-1. */
ALWAYS_INLINE void multiply_groups(const digit_work *work, int rows, enum layout layout, long first, long output,
                                   long last) {
    const product *wanted = work->wanted;
    const long stride = work->blocks * bytes_of(layout);
    for (; output < last; output += GROUP) {
        const uint8_t *start[GROUP];
        float32x4_t total[MOST_ROWS];
        /* Beyond the last row the last one is taken again, and its sums are dropped. */
        UNROLL for (int i = 0; i < GROUP; i++) {
            long row = output + i < wanted->outputs ? output + i : wanted->outputs - 1;
            start[i] = wanted->weights + row * stride;
        }
        group_of(work, start, rows, first, layout, total);
        put_totals(wanted, total, rows, first, output);
    }
}

/* A function for each layout and number of rows, so that each keeps what it needs in registers. */
typedef void (*group_function)(const digit_work *work, long first, long output, long last);

#define GROUPS(layout, rows)                                                                            \
    static void groups_##layout##_##rows(const digit_work *work, long first, long output, long last) { \
        multiply_groups(work, rows, layout, first, output, last);                                       \
    }
#define GROUPS_OF(layout) GROUPS(layout, 1) GROUPS(layout, 2) GROUPS(layout, 3) GROUPS(layout, 4)
GROUPS_OF(Q4_1)
GROUPS_OF(Q4_0)
GROUPS_OF(Q8_0)

#define NAMES_OF(layout) {groups_##layout##_1, groups_##layout##_2, groups_##layout##_3, groups_##layout##_4}
static const group_function FUNCTIONS[LAYOUTS][MOST_ROWS] = {
    [Q4_1] = NAMES_OF(Q4_1),
    [Q4_0] = NAMES_OF(Q4_0),
    [Q8_0] = NAMES_OF(Q8_0),
};

#define STRIP 16 /* outputs whose weights are still in cache when the next rows of x come */

static void run_digits(void *pointer) {
    digit_work *work = pointer;
    const product *wanted = work->wanted;
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        long end = (unit + 1) * work->chunk < wanted->outputs ? (unit + 1) * work->chunk : wanted->outputs;
        long strip = wanted->rows > MOST_ROWS ? STRIP : work->chunk;
        for (long output = unit * work->chunk; output < end; output += strip) {
            long last = output + strip < end ? output + strip : end;
            for (long first = 0; first < wanted->rows; first += MOST_ROWS) {
                long rows = wanted->rows - first < MOST_ROWS ? wanted->rows - first : MOST_ROWS;
                FUNCTIONS[wanted->layout][rows - 1](work, first, output, last);
            }
        }
    }
}

int multiply_by_digits(const product *wanted) {
    if (wanted->layout != Q4_1 && wanted->layout != Q4_0 && wanted->layout != Q8_0) return 1;
    digit_work work = {.wanted = wanted, .blocks = wanted->columns / BLOCK_ELEMENTS};
    const long count = wanted->rows * work.blocks;
    work.x.blocks = scratch(SCRATCH_TEAM, (size_t)count * (sizeof(digit_block) + 3 * sizeof(float)));
    if (work.x.blocks == NULL) return -1;
    work.x.scales = (float *)(work.x.blocks + count);
    work.x.sums = work.x.scales + count;
    work.x.eighths = (int32_t *)(work.x.sums + count);
    for (long at = 0; at < count; at++) {
        const float *x = wanted->x + at / work.blocks * wanted->x_stride + at % work.blocks * BLOCK_ELEMENTS;
        split_block(x, work.x.blocks + at, work.x.scales + at, work.x.sums + at, work.x.eighths + at);
    }
    /* Small enough to even out threads that run at different speeds, large enough to stream. */
    long share = wanted->outputs / (8L * wanted->threads);
    work.chunk = share < 16 ? 16 : (share > 256 ? 256 : share / GROUP * GROUP);
    work.queue.units = (wanted->outputs + work.chunk - 1) / work.chunk;
    int small = wanted->outputs * wanted->columns * wanted->rows < 32768;
    run_parallel(run_digits, &work, small ? 1 : wanted->threads);
    return 0;
}

#else

int multiply_by_digits(const product *wanted) {
    (void)wanted;
    return 1;
}

#endif
