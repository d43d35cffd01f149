/* Numbers in one byte, as KV pools may keep them: e4m3 (largest 448, no infinity) and e5m2 (the upper half of a
 * float16). Codes become floats without a rounding; floats become the nearest code, halves to even, and the largest
 * finite one where they are larger. A NaN stays one. */
#ifndef HOLDFAST_FLOAT8_H
#define HOLDFAST_FLOAT8_H

#include <math.h>
#include <stdint.h>

#include "blocks.h"

/* Loops over these have no branches, so that compilers make vectors of them; no number on the way is subnormal. */
static inline float float8_value(uint8_t code, enum layout stored) {
    const int mantissa = stored == E4M3 ? 3 : 2, bias = stored == E4M3 ? 7 : 15;
    const uint32_t size = code & 0x7F, small = size < (1u << mantissa);
    /* A subnormal code is what stands behind the point of the smallest normal number, which is taken off again. */
    const uint32_t bits = (size << (23 - mantissa)) + ((127u - (uint32_t)bias + small) << 23);
    const float smallest = stored == E4M3 ? 0x1p-6f : 0x1p-14f;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    value -= small ? smallest : 0.0f;
    const uint32_t odd = stored == E4M3 ? 0x7F : 0x7C; /* the first code that is no finite number */
    const float beyond = stored == E4M3 || size > odd ? NAN : INFINITY;
    value = size >= odd ? beyond : value;
    return code & 0x80 ? -value : value;
}

static inline uint8_t float8_code(float value, enum layout stored) {
    const int mantissa = stored == E4M3 ? 3 : 2, bias = stored == E4M3 ? 7 : 15, cut = 23 - mantissa;
    const uint32_t largest = stored == E4M3 ? 0x7E : 0x7B;
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    const uint32_t size = bits & 0x7FFFFFFF, sign = (bits >> 24) & 0x80;
    uint32_t code = ((size + (1u << (cut - 1)) - 1 + ((size >> cut) & 1)) >> cut) - ((127u - (uint32_t)bias) << mantissa);
    /* Below the smallest normal number: a sum whose last bit is worth one code rounds as the format does. */
    const float unit = stored == E4M3 ? 0x1p14f : 0x1p7f;
    float sum = fabsf(value) + unit;
    uint32_t sum_bits, unit_bits;
    __builtin_memcpy(&sum_bits, &sum, sizeof sum_bits);
    __builtin_memcpy(&unit_bits, &unit, sizeof unit_bits);
    code = size < ((127u - (uint32_t)bias + 1) << 23) ? sum_bits - unit_bits : code;
    code = code > largest ? largest : code;
    code = size > 0x7F800000 ? 0x7F : code;
    return (uint8_t)(code | sign);
}

#endif
