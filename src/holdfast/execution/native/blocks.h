/* How weights lie in memory: plain numbers, or GGUF's blocks of 32 with a 16-bit scale, bytes exactly as in the file;
 * or such blocks woven together (weave.h). Knows nothing of products. */
#ifndef HOLDFAST_BLOCKS_H
#define HOLDFAST_BLOCKS_H

#include <stdint.h>

#define BLOCK_ELEMENTS 32

enum layout {
    F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q8_0_WOVEN, Q4_0_WOVEN, Q4_1_WOVEN,
    /* The denser kinds (kquants.h), and the same woven together (kquant_weave.h). */
    Q5_0, Q5_1, IQ4_NL, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS,
    Q5_0_WOVEN, Q5_1_WOVEN, IQ4_NL_WOVEN, Q2_K_WOVEN, Q3_K_WOVEN, Q4_K_WOVEN, Q5_K_WOVEN, Q6_K_WOVEN, IQ4_XS_WOVEN,
    LAYOUTS,
    /* Planes of codes and scales: weights point to a scaled_matrix (scaled.h). */
    SCALED = 40, SCALED_WOVEN,
    /* What their codes are to the kernels that multiply whole numbers (x86_planes.c, arm_planes.c). */
    INT4_PLANES, INT4_ZERO_PLANES, INT8_PLANES, INT8_ZERO_PLANES, MXFP4_PLANES,
    E4M3 = 100, E5M2, /* of KV pools alone (float8.h) */
};

static inline int is_kquant(enum layout layout) { return layout >= Q5_0 && layout < LAYOUTS; }

static inline int is_scaled(enum layout layout) { return layout == SCALED || layout == SCALED_WOVEN; }

/* What one row was before it was woven together with others. */
static inline enum layout plain_layout(enum layout layout) {
    if (is_scaled(layout)) return SCALED;
    if (layout >= Q5_0_WOVEN) return (enum layout)(layout - Q5_0_WOVEN + Q5_0);
    return layout >= Q8_0_WOVEN && layout <= Q4_1_WOVEN ? (enum layout)(layout - Q8_0_WOVEN + Q8_0) : layout;
}

/* Bytes of one block (not of planes), and its elements: BLOCK_ELEMENTS, or 256 of a K-quant. Numbers count as blocks of
 * 32. */
int block_bytes(enum layout layout);
int block_elements(enum layout layout);

static inline long row_bytes(enum layout layout, long columns) {
    return columns / block_elements(layout) * block_bytes(layout);
}

/* `blocks` blocks as floats: bit for bit what scale * quant + minimum gives in float arithmetic. Not for woven ones. */
void expand_blocks(enum layout layout, const uint8_t *stored, long blocks, float *out);

static inline float half_to_float(const uint8_t *stored) {
    _Float16 value;
    __builtin_memcpy(&value, stored, sizeof value);
    return (float)value;
}

#endif
