/* How weights lie in memory: plain numbers, or GGUF's blocks of 32 with a 16-bit scale. Bytes exactly as in the
 * file. Knows nothing of products. */
#ifndef HOLDFAST_BLOCKS_H
#define HOLDFAST_BLOCKS_H

#include <stdint.h>

#define BLOCK_ELEMENTS 32

enum layout { F32, F16, BF16, Q8_0, Q4_0, Q4_1, LAYOUTS };

/* Bytes of 32 elements. */
int block_bytes(enum layout layout);

/* `blocks` blocks as floats: bit for bit what scale * quant + minimum gives in float arithmetic. */
void expand_blocks(enum layout layout, const uint8_t *stored, long blocks, float *out);

static inline float half_to_float(const uint8_t *stored) {
    _Float16 value;
    __builtin_memcpy(&value, stored, sizeof value);
    return (float)value;
}

#endif
