/* GGUF's denser kinds of blocks: five-bit ones, K-quants and IQ4. An element is
 *
 *   (code - offset, or table[code]) * scale of its group + minimum of its group
 *
 * with 32 elements and one group in a block, or 256 in groups of 16 or 32 whose scales (and minimums) are small whole
 * numbers of the block's own. Codes, scales and floats only: products are in kquant_dots.c. */
#ifndef HOLDFAST_KQUANTS_H
#define HOLDFAST_KQUANTS_H

#include "blocks.h"

#define KQUANT_ELEMENTS 256 /* the most of a block */
#define KQUANT_GROUPS 16    /* the most of a block */

typedef struct {
    int elements, bytes, bits, group;
    int offset, table; /* IQ4's table, instead of an offset */
    int scale_at;      /* byte of the half that is the scale */
    int minimum_at;    /* likewise; -1: there is none */
    int small_bytes;   /* of small scales */
} kquant;

/* By plain layout, and by the woven one too. */
const kquant *kquant_of(enum layout layout);

extern const int8_t IQ4_VALUES[16];

/* Of one block: codes as they are written, and the small scales and minimums of its groups. */
void read_codes(enum layout plain, const uint8_t *block, uint8_t *codes);
void read_small(enum layout plain, const uint8_t *block, int8_t *scales, int8_t *minimums);

/* The elements of one block, from these. */
void fill_block(enum layout plain, const uint8_t *codes, const int8_t *small, const int8_t *small_minimums, float scale,
                float minimum, float *out);

/* As expand_blocks, which calls it. */
void expand_kquants(enum layout plain, const uint8_t *stored, long blocks, float *out);

#endif
