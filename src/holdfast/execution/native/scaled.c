/* Reads planes as they are loaded, and rounds inputs as the formats say. Products with woven planes are in x86_planes.c and arm_planes.c. */
#include "scaled.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "float8.h"
#include "parallel.h"
#include "weave.h"

const float NF4_VALUES[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};
const int8_t MXFP4_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

scaled_matrix rows_from(const scaled_matrix *matrix, long row) {
    const long groups = matrix->columns / matrix->group;
    scaled_matrix rest = *matrix;
    rest.codes += row * code_row_bytes(matrix);
    rest.rows -= row;
    if (matrix->group_rows > 1) {
        rest.first_row += row;
    } else {
        rest.scales += row * groups * scale_bytes(matrix);
        rest.zeros += matrix->zeros != 0 ? row * groups : 0;
    }
    return rest;
}

static float scale_at(const scaled_matrix *matrix, long place) {
    const uint8_t *stored = (const uint8_t *)matrix->scales + place * scale_bytes(matrix);
    uint32_t bits;
    uint16_t half;
    float value;
    switch ((enum scale_type)matrix->scale_type) {
    case HALF_SCALES: return half_to_float(stored);
    case BFLOAT_SCALES:
        memcpy(&half, stored, sizeof half);
        bits = (uint32_t)half << 16;
        break;
    case POWER_SCALES: bits = *stored == 0 ? 0x00400000u : (uint32_t)*stored << 23; break; /* 2 ^ (stored - 127) */
    default: memcpy(&bits, stored, sizeof bits);
    }
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float zero_at(const scaled_matrix *matrix, long place) {
    if (matrix->zeros == 0) return matrix->code_type == INT4_CODES ? 8.0f : 0.0f;
    if (matrix->code_type == INT8_CODES) return ((const int8_t *)matrix->zeros)[place];
    return ((const uint8_t *)matrix->zeros)[place];
}

/* 32 values of codes. */
static void expand_codes(const scaled_matrix *matrix, const uint8_t *codes, float *out) {
    switch ((enum code_type)matrix->code_type) {
    case INT8_CODES:
        for (int i = 0; i < BLOCK_ELEMENTS; i++) out[i] = (float)(int8_t)codes[i];
        break;
    case FP8_CODES:
        for (int i = 0; i < BLOCK_ELEMENTS; i++) out[i] = float8_value(codes[i], E4M3);
        break;
    case INT4_CODES:
        for (int i = 0; i < 16; i++) {
            out[i] = (float)(codes[i] & 15);
            out[i + 16] = (float)(codes[i] >> 4);
        }
        break;
    case MXFP4_CODES:
        for (int i = 0; i < 16; i++) {
            out[i] = 0.5f * MXFP4_DOUBLED[codes[i] & 15];
            out[i + 16] = 0.5f * MXFP4_DOUBLED[codes[i] >> 4];
        }
        break;
    default: /* NF4 */
        for (int i = 0; i < 16; i++) {
            out[i] = NF4_VALUES[codes[i] & 15];
            out[i + 16] = NF4_VALUES[codes[i] >> 4];
        }
    }
}

void expand_scaled(const scaled_matrix *matrix, long row, long column, long depth, float *out) {
    const long groups = matrix->columns / matrix->group, block_codes = is_four_bits(matrix) ? 16 : 32;
    const uint8_t *codes = (const uint8_t *)matrix->codes + row * code_row_bytes(matrix);
    const long line = (matrix->first_row + row) / matrix->group_rows * groups;
    for (long at = column; at < column + depth; at += BLOCK_ELEMENTS, out += BLOCK_ELEMENTS) {
        const float scale = scale_at(matrix, line + at / matrix->group), zero = zero_at(matrix, line + at / matrix->group);
        expand_codes(matrix, codes + at / BLOCK_ELEMENTS * block_codes, out);
        for (int i = 0; i < BLOCK_ELEMENTS; i++) out[i] = (out[i] - zero) * scale;
    }
}

/* Inputs */

static float largest_size(const float *x, long count) {
    uint32_t largest = 0;
    for (long i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7FFFFFFF; /* Compared as whole numbers, what is no number is larger than all. */
        largest = bits > largest ? bits : largest;
    }
    float value;
    memcpy(&value, &largest, sizeof value);
    return value;
}

/* The nearest number that E4M3 has, of one no larger than 448. */
static inline float nearest_float8(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits &= 0x7F800000;
    bits = bits < 0x3C800000 ? 0x3C800000 : bits; /* 2^-6: below, codes are as far apart as there */
    bits += 20u << 23;
    float unit; /* whose half's last bit is worth one code: adding it rounds */
    memcpy(&unit, &bits, sizeof unit);
    unit *= 1.5f;
    return (value + unit) - unit;
}

/* What the largest of some inputs is divided by to become `most`, as the format says. */
static float scale_for(const scaled_matrix *matrix, float peak, float most) {
    uint32_t bits = (uint32_t)matrix->input_bound;
    float bound, scale;
    memcpy(&bound, &bits, sizeof bound);
    if (bound > 0.0f && peak > bound && peak <= FLT_MAX) peak = bound; /* what is not finite stays so */
    scale = peak / most;
    scale = scale < 1e-12f ? 1e-12f : scale; /* rows of zeros stay zeros */
    if (!matrix->input_powers || scale != scale) return scale;
    memcpy(&bits, &scale, sizeof bits);
    bits = (bits + 0x7FFFFFu) & 0x7F800000u;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

/* Numbers that share a scale; returns it. */
static float round_group(const scaled_matrix *matrix, float *x, long count) {
    const int whole = matrix->input_type == INT8_INPUTS;
    const float most = whole ? 127.0f : 448.0f, least = whole ? -128.0f : -448.0f, peak = largest_size(x, count);
    const float scale =
        matrix->input_scale != 0 ? *(const float *)matrix->input_scale : scale_for(matrix, peak, most);
    for (long i = 0; i < count; i++) {
        float value = x[i] / scale;
        value = value < least ? least : value;
        value = value > most ? most : value;
        x[i] = whole ? rintf(value) : nearest_float8(value);
    }
    return peak != peak ? peak : scale;
}

void prepare_input(const scaled_matrix *matrix, const float *x, float *out, float *scales) {
    const int32_t *order = (const int32_t *)matrix->order;
    const long columns = matrix->columns;
    if (order != NULL) {
        for (long i = 0; i < columns; i++) out[i] = x[order[i]];
    } else {
        memcpy(out, x, (size_t)columns * sizeof *x);
    }
    const int rounded = matrix->input_type != PLAIN_INPUTS;
    for (long first = 0; first < columns; first += matrix->input_group) {
        const float scale = rounded ? round_group(matrix, out + first, matrix->input_group) : 1.0f;
        for (long block = first; block < first + matrix->input_group; block += BLOCK_ELEMENTS)
            scales[block / BLOCK_ELEMENTS] = scale;
    }
}

void round_input(const scaled_matrix *matrix, const float *x, float *out, float *scales) {
    prepare_input(matrix, x, out, scales);
    if (matrix->input_type == PLAIN_INPUTS) return;
    for (long i = 0; i < matrix->columns; i++) out[i] *= scales[i / BLOCK_ELEMENTS];
}

/* Weaving */

#if defined(X86_DIGITS) || defined(ARM_DIGITS)

/* One block of a bundle, whose rows are `stride` bytes apart, in words or, for floats, in single bytes. */
static void weave_codes(const uint8_t *rows, long stride, int bytes, int unit, uint8_t flipped, uint8_t *out) {
    for (int at = 0; at < bytes; at += unit) {
        for (int row = 0; row < BUNDLE; row++, out += unit) {
            for (int i = 0; i < unit; i++) out[i] = rows[row * stride + at + i] ^ flipped;
        }
    }
}

/* [row][group] becomes [group][row]. */
static void weave_plane(uint8_t *plane, long groups, long bytes, uint8_t *woven) {
    for (long group = 0; group < groups; group++) {
        for (int row = 0; row < BUNDLE; row++)
            memcpy(woven + (group * BUNDLE + row) * bytes, plane + (row * groups + group) * bytes, (size_t)bytes);
    }
    memcpy(plane, woven, (size_t)(BUNDLE * groups * bytes));
}

int weave_scaled(const scaled_matrix *matrix) {
    const long stride = code_row_bytes(matrix), groups = matrix->columns / matrix->group, bytes = scale_bytes(matrix);
    const int in_floats = matrix->code_type == FP8_CODES || matrix->code_type == NF4_CODES;
    const int block = is_four_bits(matrix) ? 16 : 32;
#if defined(X86_DIGITS)
    const int flipped = matrix->code_type == INT8_CODES ? 0x80 : 0;
#else
    const int flipped = 0;
    if (in_floats || (matrix->code_type == INT8_CODES && matrix->zeros != 0)) return SCALED; /* no signed bytes */
#endif
    /* 16 rows are the most that a bundle has on any machine: all decide alike. */
    if (matrix->group_rows > 1 && matrix->group_rows % 16 != 0) return SCALED;
    uint8_t *woven = scratch(SCRATCH_OWN, (size_t)(BUNDLE * (stride > groups * bytes ? stride : groups * bytes)));
    if (woven == NULL) return -1;
    for (long row = 0; row + BUNDLE <= matrix->rows; row += BUNDLE) {
        uint8_t *codes = (uint8_t *)matrix->codes + row * stride;
        for (long at = 0; at < stride; at += block)
            weave_codes(codes + at, stride, block, in_floats ? 1 : 4, (uint8_t)flipped, woven + at * BUNDLE);
        memcpy(codes, woven, (size_t)(BUNDLE * stride));
        if (matrix->group_rows > 1) continue;
        weave_plane((uint8_t *)matrix->scales + row * groups * bytes, groups, bytes, woven);
        if (matrix->zeros != 0) weave_plane((uint8_t *)matrix->zeros + row * groups, groups, 1, woven);
    }
    return SCALED_WOVEN;
}

#else

int weave_scaled(const scaled_matrix *matrix) {
    (void)matrix;
    return SCALED;
}

#endif
