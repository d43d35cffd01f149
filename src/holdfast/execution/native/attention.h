/* Attention over a paged KV pool, for batches of rows of one token or many. Knows nothing of who owns which page. */
#ifndef HOLDFAST_ATTENTION_H
#define HOLDFAST_ATTENTION_H

#include "blocks.h"

typedef struct {
    const float *query; /* [tokens, heads, dim], tokens `query_stride` floats apart */
    long query_stride;
    float *out; /* like query */
    long out_stride;
    const uint8_t *keys, *values; /* of this layer in page 0: [block tokens, kv heads, dim] */
    long page_bytes;              /* from a page to the next */
    enum layout stored;           /* F32, F16, BF16, E4M3 or E5M2 */
    long block_tokens, heads, kv_heads, dim;
    const int32_t *tables; /* [slots, blocks] page numbers, rows `table_stride` apart */
    long table_stride;
    const int32_t *slots;  /* the table row of each batch row; NULL: its own number */
    const int32_t *ends;   /* position after the last token of each row; 0: no token, its output becomes zero */
    const int32_t *counts; /* query tokens of each row, the last ones before its end; NULL: one */
    const int32_t *firsts; /* where they begin in query and out; NULL: the row's own number */
    long rows;
    long window; /* a token sees itself and window-1 before; 0: all before */
    float scale;
    float softcap; /* scores s become softcap * tanh(s / softcap); 0: they do not */
    int threads;
} attention;

/* 0, or -1 when there is no memory for scratch. Reads only positions that some query of the row sees. */
int attend(const attention *wanted);

#endif
