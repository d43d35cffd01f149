/* Experts that are computed for a GPU, layer after layer of a step, as it asks for them through memory both see. */
#ifndef HOLDFAST_HOST_EXPERTS_H
#define HOLDFAST_HOST_EXPERTS_H

#include "decoder.h"

/* As host_experts.py writes it: addresses and numbers. A layer of one expert is an MLP, which every token goes through
 * with weight 1: nothing is read of what was chosen. */
typedef struct {
    int64_t gate_up; /* matrix [experts, parts] */
    int64_t down;    /* matrix [experts] */
    int64_t experts, parts, activation, inner_columns;
    int64_t request, reply; /* int32 each: the number of a step */
    int64_t chosen;         /* int32 [tokens, per_token]; below 0: not the host's */
    int64_t weights;        /* float [tokens, per_token] */
    int64_t x;              /* [tokens, hidden] of `numbers` */
    int64_t y;              /* float [tokens, hidden] */
    int64_t uses;           /* int64 [experts]: the tokens that chose each are added to it */
} host_layer;

typedef struct {
    const host_layer *layers;
    long count, hidden, per_token;
    enum layout numbers; /* F32, F16 or BF16 */
    uint8_t *room;       /* at a cache line */
    long room_bytes;
    int threads;
} host_experts;

/* Bytes of room for steps of so many tokens, at most PIECE_ROWS. */
long host_room_bytes(const host_experts *host, long tokens);

enum host_result { HOST_SERVED, HOST_NO_MEMORY, HOST_NOT_ASKED, HOST_NO_SUCH_EXPERT };

typedef struct {
    enum host_result result;
    long layer;                  /* that it ended with, when it was not served to its end */
    long waited_ns, computed_ns; /* for requests, and from a request to its reply */
    long pairs;
} host_outcome;

/* Serves step `step` of `tokens` tokens; waits at most `patience_ns` for each layer's request. */
host_outcome serve_step(const host_experts *host, int step, long tokens, long patience_ns);

#endif
