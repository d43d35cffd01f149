/* Slots are used in turns: whoever writes to one again has seen everybody count past its last use, and so be done with
 * reading it. */
#include "rank_sums.h"

#include <string.h>

#include "parallel.h"
#include "rank_words.h"

#define LINE_BYTES 64
#define LINE 512L
#define UNIT 8192L /* numbers that a thread adds up at a time */

static rank_word *count_of(const rank_group *group, long rank) {
    return (rank_word *)(uintptr_t)(group->counts + rank * LINE_BYTES);
}

static float *slot_of(const rank_group *group, long rank, int64_t turn) {
    return (float *)(uintptr_t)group->slots + (2 * rank + turn % 2) * group->slot_numbers;
}

static int await_rank(const rank_sums *sums, long rank) {
    const rank_group *group = sums->group;
    rank_word *word = count_of(group, rank), *alarm = (rank_word *)(uintptr_t)group->alarm;
    for (long waited_ns = 0;;) {
        const unsigned calm = *(const volatile uint32_t *)(uintptr_t)group->calm;
        const enum rank_outcome outcome =
            await_word(word, (unsigned)group->count, alarm, calm, (long)group->spin_ns, (long)group->patience_ns);
        if (outcome == RANK_REACHED) return 0;
        if (outcome == RANK_LATE) waited_ns += (long)group->patience_ns;
        if (sums->watch(sums->with, waited_ns)) return RANKS_LEFT;
    }
}

int meet_ranks(const rank_sums *sums) {
    rank_group *group = sums->group;
    group->count++;
    post_word(count_of(group, group->rank), (unsigned)group->count);
    for (long rank = 0; rank < group->ranks; rank++)
        if (rank != group->rank && await_rank(sums, rank)) return RANKS_LEFT;
    return 0;
}

typedef struct {
    float *out;
    const float *slots;
    long stride, ranks, count;
    int add;
    work_queue queue;
} addition;

static void add_line(float *restrict to, const float *restrict from, long count) {
    for (long i = 0; i < count; i++) to[i] += from[i];
}

/* Of all ranks in their order, a line of numbers that stays in the nearest cache at a time. */
static void add_unit(const addition *all, long first, long last) {
    float line[LINE];
    for (long begin = first; begin < last; begin += LINE) {
        const long count = last - begin < LINE ? last - begin : LINE;
        float *sum = all->add ? line : all->out + begin;
        memcpy(sum, all->slots + begin, (size_t)count * sizeof(float));
        for (long rank = 1; rank < all->ranks; rank++) add_line(sum, all->slots + rank * all->stride + begin, count);
        if (all->add) add_line(all->out + begin, sum, count);
    }
}

static void add_units(void *work) {
    addition *all = work;
    for (long unit; (unit = claim(&all->queue)) >= 0;) {
        const long first = unit * UNIT, last = first + UNIT < all->count ? first + UNIT : all->count;
        add_unit(all, first, last);
    }
}

float *next_slot(const rank_sums *sums, long count) {
    const rank_group *group = sums->group;
    return count <= group->slot_numbers ? slot_of(group, group->rank, group->count + 1) : NULL;
}

int sum_ranks(const rank_sums *sums, const float *shown, float *out, long count, int add) {
    rank_group *group = sums->group;
    for (long first = 0; first < count; first += (long)group->slot_numbers) {
        const long left = count - first, numbers = left < group->slot_numbers ? left : (long)group->slot_numbers;
        float *own = slot_of(group, group->rank, group->count + 1);
        if (own != shown) memcpy(own, shown + first, (size_t)numbers * sizeof(float));
        if (meet_ranks(sums)) return RANKS_LEFT;
        addition all = {
            .out = out + first,
            .slots = slot_of(group, 0, group->count),
            .stride = 2 * (long)group->slot_numbers,
            .ranks = (long)group->ranks,
            .count = numbers,
            .add = add,
            .queue = {.units = (numbers + UNIT - 1) / UNIT},
        };
        run_parallel(add_units, &all, all.queue.units < sums->threads ? (int)all.queue.units : sums->threads);
    }
    return 0;
}
