/* Products with woven weights of the denser kinds, in integers: the way of digits.c, with two digits.
 *
 * A block of 32 activations becomes 16-bit whole numbers times one scale: each is off by at most 1/65278 of the block's
 * largest, 257 times less than eight bits would leave. A whole number is two signed 8-bit digits:
 *
 *   sum(x q) = scale_x * (256 * sum(high q) + sum(low q))
 *
 * Codes are put together as signed bytes (kquant_weave.h), so that nothing is widened to float but one sum a group.
 * Rows of x are taken in panels of 8, 4, 2 and 1, and every row is computed alike in all of them: a result does not
 * change with its company, bit for bit. Needs Arm's dot product instructions. */
#include "kquant_dots.h"

#include "kquant_weave.h"
#include "vector.h"

#if defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)

#define DIGITS 2
#define MOST_ROWS 8
#define ROWS_AT_ONCE 64
#define MOST_PANELS (ROWS_AT_ONCE / MOST_ROWS + 3)
#define LARGEST 32639.0f /* 127 * 256 + 127 */
#define WOVEN_ROWS 4
#define AHEAD 1536 /* bytes of weights that are asked for early */

/* Of 32 columns: [digit][half of the columns][row][16], then the scale of each row, then sums of its numbers: of all 32,
 * or where groups are half as long of the first 16 and of the others. */
typedef struct {
    const uint8_t *parts;
    long first;
    int rows;
} panel;

typedef struct {
    const product *wanted;
    const kquant *kind;
    enum layout plain;
    panel panels[MOST_PANELS];
    long begin, end; /* rows of x */
    long count, chunk;
    work_queue queue;
} dots_work;

ALWAYS_INLINE long digit_bytes(int rows) { return DIGITS * BLOCK_ELEMENTS * rows; }
ALWAYS_INLINE long padded(int rows) { return rows < 4 ? 4 : rows; }
ALWAYS_INLINE long x_part_bytes(int rows) { return digit_bytes(rows) + 3 * padded(rows) * (long)sizeof(float); }

static void split_part(const float *x, uint8_t *out, int row, int rows, int short_groups) {
    float32x4_t part[8], largest = vdupq_n_f32(0);
    UNROLL for (int i = 0; i < 8; i++) {
        part[i] = vld1q_f32(x + 4 * i);
        largest = vmaxq_f32(largest, vabsq_f32(part[i]));
    }
    float peak = vmaxvq_f32(largest);
    /* Below this the inverse would overflow; such a block is nothing beside any other. NaN falls through. */
    float inverse = peak < 1e-30f ? 0.0f : LARGEST / peak, scale = peak < 1e-30f ? 0.0f : peak / LARGEST;
    int8_t *to = (int8_t *)out + 16 * row;
    float *scales = (float *)(out + digit_bytes(rows)), *sums = scales + padded(rows);
    float total[2];
    UNROLL for (int half = 0; half < 2; half++) {
        int32x4_t whole[4], sum = vdupq_n_s32(0);
        int16x4_t high[4], low[4];
        UNROLL for (int i = 0; i < 4; i++) {
            whole[i] = vcvtnq_s32_f32(vmulq_n_f32(part[4 * half + i], inverse));
            sum = vaddq_s32(sum, whole[i]);
            /* Balanced digits: the nearest, so both are signed bytes. */
            int32x4_t upper = vrshrq_n_s32(whole[i], 8);
            high[i] = vmovn_s32(upper);
            low[i] = vmovn_s32(vsubq_s32(whole[i], vshlq_n_s32(upper, 8)));
        }
        vst1q_s8(to + 16 * half * rows, vcombine_s8(vmovn_s16(vcombine_s16(high[0], high[1])),
                                                    vmovn_s16(vcombine_s16(high[2], high[3]))));
        vst1q_s8(to + 16 * (2 + half) * rows, vcombine_s8(vmovn_s16(vcombine_s16(low[0], low[1])),
                                                          vmovn_s16(vcombine_s16(low[2], low[3]))));
        total[half] = (float)vaddvq_s32(sum) * scale;
    }
    scales[row] = scale;
    sums[row] = short_groups ? total[0] : total[0] + total[1];
    sums[padded(rows) + row] = total[1];
}

static void split_panels(void *pointer) {
    dots_work *work = pointer;
    const product *wanted = work->wanted;
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        const panel *here = work->panels + unit;
        uint8_t *out = (uint8_t *)here->parts;
        for (long column = 0; column < wanted->columns; column += BLOCK_ELEMENTS, out += x_part_bytes(here->rows)) {
            for (int row = 0; row < here->rows; row++)
                split_part(wanted->x + (here->first + row) * wanted->x_stride + column, out, row, here->rows,
                           work->kind->group == 16);
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

/* sum[r] = whole sums of 16 columns (begun) or of 16 more, for four outputs and every row: the high digit's apart. */
ALWAYS_INLINE void add_half(const int8_t *x, const int8x16_t *q, int rows, int half, int begins, int32x4_t *high,
                            int32x4_t *low) {
    UNROLL for (int lane = 0; lane < 4; lane++) {
        UNROLL for (int r = 0; r < rows; r++) {
            int8x16_t of_high = vld1q_s8(x + 16 * (half * rows + r));
            int8x16_t of_low = vld1q_s8(x + 16 * ((2 + half) * rows + r));
            int32x4_t none = vdupq_n_s32(0);
            high[r] = dot_lane(begins && lane == 0 ? none : high[r], q[4 * half + lane], of_high, lane);
            low[r] = dot_lane(begins && lane == 0 ? none : low[r], q[4 * half + lane], of_low, lane);
        }
    }
}

/* The sums of 4 and of 8 rows, one digit after the other: they fill the registers. */
ALWAYS_INLINE void add_rows(const int8_t *x, const int8x16_t *q, int rows, int first, int last, int32x4_t *sum) {
    UNROLL for (int r = 0; r < rows; r++) sum[r] = vdupq_n_s32(0);
    UNROLL for (int digit = 0; digit < DIGITS; digit++) {
        if (digit > 0) {
            UNROLL for (int r = 0; r < rows; r++) sum[r] = vshlq_n_s32(sum[r], 8);
        }
        UNROLL for (int half = first; half < last; half++) {
            int8x16_t of_x[MOST_ROWS];
            UNROLL for (int r = 0; r < rows; r++) of_x[r] = vld1q_s8(x + 16 * ((2 * digit + half) * rows + r));
            UNROLL for (int lane = 0; lane < 4; lane++) {
                UNROLL for (int r = 0; r < rows; r++) sum[r] = dot_lane(sum[r], q[4 * half + lane], of_x[r], lane);
            }
        }
    }
}

/* Halves first..last-1 of 32 columns: whole sums for four outputs and every row. */
ALWAYS_INLINE void part_sums(const int8_t *x, const int8x16_t *q, int rows, int first, int last, int32x4_t *sum) {
    int32x4_t high[MOST_ROWS], low[MOST_ROWS];
    if (rows > 2) {
        add_rows(x, q, rows, first, last, sum);
        return;
    }
    UNROLL for (int half = first; half < last; half++) add_half(x, q, rows, half, half == first, high, low);
    UNROLL for (int r = 0; r < rows; r++) sum[r] = vaddq_s32(vshlq_n_s32(high[r], 8), low[r]);
}

/* The signed bytes of 32 columns. Six bits come out four times as large, their lower bits being zero. */
ALWAYS_INLINE void load_codes(const uint8_t *part, enum layout plain, int8x16_t *q) {
    const int bits = plain == Q6_K ? 6 : (plain == Q5_0 || plain == Q5_1 || plain == Q5_K ? 5
                                          : (plain == Q3_K ? 3 : (plain == Q2_K ? 2 : 4)));
    const uint8x16_t low = vdupq_n_u8(15), two = vdupq_n_u8(3), upper = vdupq_n_u8(0xF0);
    if (bits < 4) {
        const uint8x16_t singles = bits == 3 ? vld1q_u8(part + 32) : low;
        UNROLL for (int v = 0; v < 8; v++) {
            uint8x16_t crumbs = vshlq_u8(vld1q_u8(part + v / 4 * 16), vdupq_n_s8((int8_t)(-2 * (v % 4))));
            /* The upper six bits are the sign. */
            if (bits == 3) q[v] = vreinterpretq_s8_u8(vsliq_n_u8(crumbs, vtstq_u8(singles, vdupq_n_u8(1 << v)), 2));
            else q[v] = vreinterpretq_s8_u8(vandq_u8(crumbs, two));
        }
        return;
    }
    const int8x16_t table = vld1q_s8(IQ4_VALUES);
    const uint8x16_t singles = bits == 5 ? vld1q_u8(part + 64) : low;
    UNROLL for (int i = 0; i < 4; i++) {
        uint8x16_t both = vld1q_u8(part + 16 * i);
        if (bits == 5) {
            /* The upper half of a byte is the sign. */
            q[i] = vreinterpretq_s8_u8(vsliq_n_u8(both, vtstq_u8(singles, vdupq_n_u8(1 << i)), 4));
            q[i + 4] = vreinterpretq_s8_u8(vsriq_n_u8(vtstq_u8(singles, vdupq_n_u8(16 << i)), both, 4));
        } else if (bits == 6) {
            uint8x16_t first = vshlq_u8(vld1q_u8(part + 64), vdupq_n_s8((int8_t)(6 - 2 * i)));
            uint8x16_t second = vshlq_u8(vld1q_u8(part + 80), vdupq_n_s8((int8_t)(6 - 2 * i)));
            q[i] = vreinterpretq_s8_u8(vsriq_n_u8(first, vshlq_n_u8(both, 4), 2));
            q[i + 4] = vreinterpretq_s8_u8(vsriq_n_u8(second, vandq_u8(both, upper), 2));
        } else if (plain == Q4_K) {
            q[i] = vreinterpretq_s8_u8(vandq_u8(both, low));
            q[i + 4] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        } else {
            q[i] = vqtbl1q_s8(table, vandq_u8(both, low));
            q[i + 4] = vqtbl1q_s8(table, vshrq_n_u8(both, 4));
        }
    }
}

ALWAYS_INLINE float32x4_t four_halves(const uint8_t *stored) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(stored)));
}

/* Sixteen signed bytes, four of each group, times four units. */
ALWAYS_INLINE void put_units(int8x16_t bytes, float32x4_t unit, float *out) {
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    vst1q_f32(out, vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), unit));
    vst1q_f32(out + 4, vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))), unit));
    vst1q_f32(out + 8, vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), unit));
    vst1q_f32(out + 12, vmulq_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(high))), unit));
}

ALWAYS_INLINE void six_bits(const uint8_t *stored, int8x16_t *numbers) {
    uint8x16_t part[3], mask = vdupq_n_u8(63);
    UNROLL for (int i = 0; i < 3; i++) {
        part[i] = vld1q_u8(stored + 16 * i);
        numbers[i] = vreinterpretq_s8_u8(vandq_u8(part[i], mask));
    }
    uint8x16_t rest = vshrq_n_u8(part[0], 6);
    rest = vorrq_u8(rest, vandq_u8(vshrq_n_u8(part[1], 4), vdupq_n_u8(12)));
    numbers[3] = vreinterpretq_s8_u8(vorrq_u8(rest, vandq_u8(vshrq_n_u8(part[2], 2), vdupq_n_u8(48))));
}

/* Small scales of IQ4_XS, eight groups of four. */
ALWAYS_INLINE void iq4_bits(const uint8_t *stored, int8x16_t *numbers) {
    uint8x16_t both = vld1q_u8(stored), low = vdupq_n_u8(15), two = vdupq_n_u8(0x30);
    uint8x8_t quarters = vld1_u8(stored + 16);
    uint8x16_t first = vcombine_u8(vshl_n_u8(quarters, 4), vshl_n_u8(quarters, 2));
    uint8x16_t second = vcombine_u8(quarters, vshr_n_u8(quarters, 2));
    int8x16_t raised = vdupq_n_s8(32);
    numbers[0] = vsubq_s8(vreinterpretq_s8_u8(vorrq_u8(vandq_u8(both, low), vandq_u8(first, two))), raised);
    numbers[1] = vsubq_s8(vreinterpretq_s8_u8(vorrq_u8(vshrq_n_u8(both, 4), vandq_u8(second, two))), raised);
}

/* Scales and what is added of every group of a block, [group][output]; `stored` is where the block begins. */
ALWAYS_INLINE void load_scales(const uint8_t *stored, enum layout plain, float *scales, float *added) {
    float32x4_t unit = four_halves(stored);
    int8x16_t small[4];
    if (plain == Q5_0 || plain == IQ4_NL) {
        vst1q_f32(scales, unit);
    } else if (plain == Q5_1) {
        vst1q_f32(scales, unit);
        vst1q_f32(added, vfmaq_n_f32(four_halves(stored + 8), unit, 16.0f));
    } else if (plain == Q4_K || plain == Q5_K) {
        float32x4_t low = vnegq_f32(four_halves(stored + 8));
        six_bits(stored + 16, small);
        UNROLL for (int i = 0; i < 2; i++) put_units(small[i], unit, scales + 16 * i);
        UNROLL for (int i = 0; i < 2; i++) put_units(small[i + 2], low, added + 16 * i);
        if (plain == Q5_K) {
            UNROLL for (int i = 0; i < 32; i += 4)
                vst1q_f32(added + i, vfmaq_n_f32(vld1q_f32(added + i), vld1q_f32(scales + i), 16.0f));
        }
    } else if (plain == Q2_K) {
        float32x4_t low = vnegq_f32(four_halves(stored + 8));
        UNROLL for (int i = 0; i < 4; i++) {
            uint8x16_t both = vld1q_u8(stored + 16 + 16 * i);
            put_units(vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), unit, scales + 16 * i);
            put_units(vreinterpretq_s8_u8(vshrq_n_u8(both, 4)), low, added + 16 * i);
        }
    } else if (plain == Q3_K) {
        six_bits(stored + 8, small);
        UNROLL for (int i = 0; i < 4; i++) put_units(vsubq_s8(small[i], vdupq_n_s8(32)), unit, scales + 16 * i);
    } else if (plain == Q6_K) {
        unit = vmulq_n_f32(unit, 0.25f);
        UNROLL for (int i = 0; i < 4; i++) put_units(vld1q_s8((const int8_t *)stored + 8 + 16 * i), unit, scales + 16 * i);
    } else {
        iq4_bits(stored + 8, small);
        UNROLL for (int i = 0; i < 2; i++) put_units(small[i], unit, scales + 16 * i);
    }
}

/* What a kind is, as constants where it is inlined. */
ALWAYS_INLINE int blocks_of_32(enum layout plain) { return plain == Q5_0 || plain == Q5_1 || plain == IQ4_NL; }
ALWAYS_INLINE int short_groups(enum layout plain) { return plain == Q2_K || plain == Q3_K || plain == Q6_K; }
ALWAYS_INLINE int with_minimum(enum layout plain) {
    return plain == Q5_1 || plain == Q2_K || plain == Q4_K || plain == Q5_K;
}
ALWAYS_INLINE int code_bytes(enum layout plain) {
    switch (plain) {
    case Q5_0:
    case Q5_1:
    case Q5_K: return 80;
    case Q6_K: return 96;
    case Q3_K: return 48;
    case Q2_K: return 32;
    default: return 64;
    }
}
ALWAYS_INLINE int head_bytes(enum layout plain) {
    switch (plain) {
    case Q5_0:
    case IQ4_NL: return 8;
    case Q5_1: return 16;
    case Q2_K: return 80;
    case Q3_K: return 56;
    case Q6_K: return 72;
    case IQ4_XS: return 32;
    default: return 64;
    }
}

/* 32 columns: their codes at `part`, their groups' scales, the rows' digits at x. */
ALWAYS_INLINE void multiply_part(const uint8_t *part, const float *scales, const float *added, const uint8_t *x,
                                 int rows, enum layout plain, float32x4_t *total) {
    const int groups = short_groups(plain) ? 2 : 1;
    const float *worths = (const float *)(x + digit_bytes(rows)), *sums = worths + padded(rows);
    int8x16_t q[8];
    load_codes(part, plain, q);
    UNROLL for (int group = 0; group < groups; group++) {
        int32x4_t sum[MOST_ROWS];
        part_sums((const int8_t *)x, q, rows, group, groups == 2 ? group + 1 : 2, sum);
        float32x4_t scale = vld1q_f32(scales + 4 * group);
        UNROLL for (int r = 0; r < rows; r++) {
            float32x4_t worth = vld1q_f32(worths + r / 4 * 4);
            total[r] = vfmaq_f32(total[r], times_lane(vcvtq_f32_s32(sum[r]), worth, r % 4), scale);
            if (with_minimum(plain))
                total[r] = add_lane(total[r], vld1q_f32(added + 4 * group),
                                    vld1q_f32(sums + group * padded(rows) + r / 4 * 4), r % 4);
        }
    }
}

/* Four outputs, whose weights begin at `four`, for the rows of a panel. */
ALWAYS_INLINE void multiply_four(const uint8_t *four, long blocks, const uint8_t *x, int rows, enum layout plain,
                                 float32x4_t *totals) {
    const int parts = blocks_of_32(plain) ? 1 : 8, groups = short_groups(plain) ? 2 : 1;
    float scales[4 * KQUANT_GROUPS], added[4 * KQUANT_GROUPS];
    float32x4_t total[MOST_ROWS];
    UNROLL for (int r = 0; r < rows; r++) total[r] = vdupq_n_f32(0);
    for (long block = 0; block < blocks; block++) {
        load_scales(four, plain, scales, added);
        four += head_bytes(plain);
        for (int part = 0; part < parts; part++, four += code_bytes(plain), x += x_part_bytes(rows)) {
            /* Prefetching past the end harms nobody. */
            __builtin_prefetch(four + AHEAD);
            __builtin_prefetch(four + AHEAD + 64);
            multiply_part(four, scales + 4 * part * groups, added + 4 * part * groups, x, rows, plain, total);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) totals[r] = total[r];
}

/* The rows of a panel with outputs output..last-1, both multiples of four. */
ALWAYS_INLINE void multiply_panel(const dots_work *work, const panel *here, int rows, enum layout plain, long output,
                                  long last) {
    const product *wanted = work->wanted;
    const long blocks = wanted->columns / work->kind->elements, stride = blocks * work->kind->bytes;
    for (; output < last; output += WOVEN_ROWS) {
        float32x4_t total[MOST_ROWS];
        multiply_four(wanted->weights + output * stride, blocks, here->parts, rows, plain, total);
        UNROLL for (int r = 0; r < rows; r++) {
            float *out = wanted->out + (here->first + r) * wanted->out_stride + output;
            if (wanted->bias != NULL) total[r] = vaddq_f32(total[r], vld1q_f32(wanted->bias + output));
            vst1q_f32(out, wanted->add ? vaddq_f32(vld1q_f32(out), total[r]) : total[r]);
        }
    }
}

/* A function for each kind and number of rows, so that each keeps what it needs in registers. */
typedef void (*panel_function)(const dots_work *work, const panel *here, long output, long last);

#define PANEL(plain, rows)                                                                                     \
    static void panel_##plain##_##rows(const dots_work *work, const panel *here, long output, long last) {    \
        multiply_panel(work, here, rows, plain, output, last);                                                 \
    }
#define PANELS_OF(plain) PANEL(plain, 1) PANEL(plain, 2) PANEL(plain, 4) PANEL(plain, 8)
PANELS_OF(Q5_0)
PANELS_OF(Q5_1)
PANELS_OF(IQ4_NL)
PANELS_OF(Q2_K)
PANELS_OF(Q3_K)
PANELS_OF(Q4_K)
PANELS_OF(Q5_K)
PANELS_OF(Q6_K)
PANELS_OF(IQ4_XS)

#define NAMES_OF(plain) {[1] = panel_##plain##_1, [2] = panel_##plain##_2, [4] = panel_##plain##_4, [8] = panel_##plain##_8}
static const panel_function FUNCTIONS[LAYOUTS][MOST_ROWS + 1] = {
    [Q5_0] = NAMES_OF(Q5_0), [Q5_1] = NAMES_OF(Q5_1), [IQ4_NL] = NAMES_OF(IQ4_NL),
    [Q2_K] = NAMES_OF(Q2_K), [Q3_K] = NAMES_OF(Q3_K), [Q4_K] = NAMES_OF(Q4_K),
    [Q5_K] = NAMES_OF(Q5_K), [Q6_K] = NAMES_OF(Q6_K), [IQ4_XS] = NAMES_OF(IQ4_XS),
};

#define STRIP 16 /* outputs whose weights are still in cache when the next panel comes */

static void run_dots(void *pointer) {
    dots_work *work = pointer;
    const long outputs = work->wanted->outputs, strip = work->count > 1 ? STRIP : work->chunk;
    const panel_function *functions = FUNCTIONS[work->plain];
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        long end = (unit + 1) * work->chunk < outputs ? (unit + 1) * work->chunk : outputs;
        for (long output = unit * work->chunk; output < end; output += strip) {
            long last = output + strip < end ? output + strip : end;
            for (const panel *here = work->panels; here < work->panels + work->count; here++)
                functions[here->rows](work, here, output, last);
        }
    }
}

/* Panels of 8 rows, then of 4, 2 and 1, for rows begin..end-1; returns the bytes that all take. */
static long cut_panels(dots_work *work, const uint8_t *memory) {
    long bytes = 0, parts = work->wanted->columns / BLOCK_ELEMENTS;
    work->count = 0;
    for (long first = work->begin, rows = MOST_ROWS; first < work->end; first += rows) {
        while (first + rows > work->end) rows /= 2;
        work->panels[work->count++] = (panel){memory + bytes, first, (int)rows};
        bytes += parts * x_part_bytes((int)rows);
    }
    return bytes;
}

int multiply_kquants(const product *wanted) {
    dots_work work = {.wanted = wanted, .kind = kquant_of(wanted->layout), .plain = plain_layout(wanted->layout)};
    /* Small enough to even out threads that run at different speeds, large enough to stream. */
    long share = wanted->outputs / (8L * wanted->threads);
    work.chunk = share < 16 ? 16 : (share > 256 ? 256 : share / STRIP * STRIP);
    for (work.begin = 0; work.begin < wanted->rows; work.begin = work.end) {
        work.end = work.begin + ROWS_AT_ONCE < wanted->rows ? work.begin + ROWS_AT_ONCE : wanted->rows;
        const uint8_t *memory = scratch(SCRATCH_TEAM, (size_t)cut_panels(&work, NULL));
        if (memory == NULL) return -1;
        cut_panels(&work, memory);
        int small = wanted->outputs * wanted->columns * (work.end - work.begin) < 32768;
        atomic_store(&work.queue.next, 0);
        work.queue.units = work.count;
        run_parallel(split_panels, &work, work.count > 1 ? wanted->threads : 1);
        atomic_store(&work.queue.next, 0);
        work.queue.units = (wanted->outputs + work.chunk - 1) / work.chunk;
        run_parallel(run_dots, &work, small ? 1 : wanted->threads);
    }
    return 0;
}

#else

int multiply_kquants(const product *wanted) {
    (void)wanted;
    return -1; /* nothing is woven here */
}

#endif
