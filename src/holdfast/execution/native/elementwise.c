/* Norms, gates and rotary positions. A small batch is done by the caller alone: waking threads would take longer. */
#include "elementwise.h"

#include <math.h>

#include "float8.h"
#include "parallel.h"
#include "vector.h"

#define WORTH_SHARING 65536 /* floats below which one thread does it */

typedef struct {
    const void *wanted;
    long chunk;
    work_queue queue;
} row_work;

static void share_rows(worker run, const void *wanted, long rows, long floats, int threads) {
    if (floats < WORTH_SHARING) threads = 1;
    row_work work = {.wanted = wanted, .chunk = threads > 1 ? (rows + 4L * threads - 1) / (4L * threads) : rows};
    if (rows == 0) return;
    work.queue.units = (rows + work.chunk - 1) / work.chunk;
    run_parallel(run, &work, threads);
}

/* The next rows of this work: first..last-1; 0 when there are none left. */
static int next_rows(row_work *work, long rows, long *first, long *last) {
    long unit = claim(&work->queue);
    if (unit < 0) return 0;
    *first = unit * work->chunk;
    *last = *first + work->chunk < rows ? *first + work->chunk : rows;
    return 1;
}

static void normalize_row(const normalization *wanted, long row) {
    float *x = wanted->x + row * wanted->x_stride, *out = wanted->out + row * wanted->out_stride;
    const long columns = wanted->columns, whole = columns / (2 * LANES) * (2 * LANES);
    if (wanted->residual != NULL) {
        const float *residual = wanted->residual + row * wanted->residual_stride;
        for (long i = 0; i < columns; i++) x[i] += residual[i];
    }
    vec even = {0}, odd = {0};
    for (long i = 0; i < whole; i += 2 * LANES) {
        vec a = load(x + i), b = load(x + i + LANES);
        even += a * a;
        odd += b * b;
    }
    float squares = sum_of(even + odd);
    for (long i = whole; i < columns; i++) squares += x[i] * x[i];
    float scale = 1.0f / sqrtf(squares / (float)columns + wanted->epsilon);
    for (long i = 0; i < columns; i++) out[i] = x[i] * scale * wanted->weight[i];
}

static void run_normalize(void *pointer) {
    row_work *work = pointer;
    const normalization *wanted = work->wanted;
    for (long first, last; next_rows(work, wanted->rows, &first, &last);)
        for (long row = first; row < last; row++) normalize_row(wanted, row);
}

void normalize(const normalization *wanted) {
    share_rows(run_normalize, wanted, wanted->rows, wanted->rows * wanted->columns, wanted->threads);
}

/* Both are x * sigmoid(y): y is x itself, or the tanh form of gelu written as a sigmoid. */
ALWAYS_INLINE vec activate(vec x, enum activation activation) {
    vec y = activation == SILU ? x : x * (1.5957691216f + 0.0713548163f * x * x);
    return x / (1.0f + exponential(-y));
}

ALWAYS_INLINE void gate_row(const gating *wanted, long row, enum activation activation) {
    const float *gate = wanted->gate_up + row * wanted->gate_stride, *up = gate + wanted->columns;
    float *out = wanted->out + row * wanted->out_stride;
    const long columns = wanted->columns, whole = columns / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) store(out + i, activate(load(gate + i), activation) * load(up + i));
    for (long i = whole; i < columns; i++) out[i] = activate(spread(gate[i]), activation)[0] * up[i];
}

static void run_gate(void *pointer) {
    row_work *work = pointer;
    const gating *wanted = work->wanted;
    for (long first, last; next_rows(work, wanted->rows, &first, &last);) {
        for (long row = first; row < last; row++) {
            if (wanted->activation == SILU)
                gate_row(wanted, row, SILU);
            else
                gate_row(wanted, row, GELU_TANH);
        }
    }
}

void gate(const gating *wanted) {
    /* An exponential an element: worth sharing sooner than plain sums. */
    share_rows(run_gate, wanted, wanted->rows, 4 * wanted->rows * wanted->columns, wanted->threads);
}

static void turn_heads(float *heads, long count, const turning *wanted, const float *cosines, const float *sines) {
    for (long head = 0; head < count; head++) {
        float *first = heads + head * wanted->dim, *second = first + wanted->half;
        for (long i = 0; i < wanted->half; i++) {
            float a = first[i], b = second[i];
            first[i] = a * cosines[i] - b * sines[i];
            second[i] = b * cosines[i] + a * sines[i];
        }
    }
}

/* To the nearest bfloat16, halves to even; a NaN stays one. */
static uint16_t to_bfloat(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

static void store_row(uint8_t *pool, long place, const float *from, long count, enum layout stored) {
    if (stored == F32) {
        memcpy((float *)pool + place * count, from, (size_t)count * sizeof(float));
    } else if (stored == F16) {
        _Float16 *out = (_Float16 *)pool + place * count;
        for (long i = 0; i < count; i++) out[i] = (_Float16)from[i];
    } else if (stored == E4M3) {
        for (long i = 0; i < count; i++) pool[place * count + i] = float8_code(from[i], E4M3);
    } else if (stored == E5M2) {
        for (long i = 0; i < count; i++) pool[place * count + i] = float8_code(from[i], E5M2);
    } else {
        uint16_t *out = (uint16_t *)pool + place * count;
        for (long i = 0; i < count; i++) out[i] = to_bfloat(from[i]);
    }
}

static void run_turn(void *pointer) {
    row_work *work = pointer;
    const turning *wanted = work->wanted;
    const long width = wanted->kv_heads * wanted->dim;
    for (long first, last; next_rows(work, wanted->tokens, &first, &last);) {
        for (long token = first; token < last; token++) {
            long angle = (wanted->positions != NULL ? (long)wanted->positions[token] : token) * wanted->half;
            const float *cosines = wanted->cosines + angle, *sines = wanted->sines + angle;
            float *key = wanted->key + token * wanted->key_stride;
            turn_heads(wanted->query + token * wanted->query_stride, wanted->heads, wanted, cosines, sines);
            turn_heads(key, wanted->kv_heads, wanted, cosines, sines);
            if (wanted->center != NULL)
                for (long i = 0; i < width; i++) key[i] -= wanted->center[i];
            store_row(wanted->keys, (long)wanted->places[token], key, width, wanted->stored);
            store_row(wanted->values, (long)wanted->places[token], wanted->value + token * wanted->value_stride, width,
                      wanted->stored);
        }
    }
}

void turn_and_store(const turning *wanted) {
    long floats = wanted->tokens * (wanted->heads + 2 * wanted->kv_heads) * wanted->dim;
    share_rows(run_turn, wanted, wanted->tokens, floats, wanted->threads);
}
