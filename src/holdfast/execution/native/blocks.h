/* How weights lie in memory: plain numbers, or GGUF's blocks of 32 with a 16-bit scale, bytes exactly as in the file;
 * or such blocks in fours (fours.c). Knows nothing of products. */
#ifndef HOLDFAST_BLOCKS_H
#define HOLDFAST_BLOCKS_H

#include <stdint.h>

#define BLOCK_ELEMENTS 32

enum layout { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q8_0_FOURS, Q4_0_FOURS, Q4_1_FOURS, LAYOUTS };

/* Bytes of 32 elements of one row. */
int block_bytes(enum layout layout);

/* `blocks` blocks as floats: bit for bit what scale * quant + minimum gives in float arithmetic. Not for fours. */
void expand_blocks(enum layout layout, const uint8_t *stored, long blocks, float *out);

static inline float half_to_float(const uint8_t *stored) {
    _Float16 value;
    __builtin_memcpy(&value, stored, sizeof value);
    return (float)value;
}

#endif
