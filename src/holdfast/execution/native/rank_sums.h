/* Sums over the ranks of one machine, each of which shows its numbers in a slot that all of them see. */
#ifndef HOLDFAST_RANK_SUMS_H
#define HOLDFAST_RANK_SUMS_H

#include <stdint.h>

/* One rank's view of the memory they share, as shared_memory.py lists it. */
typedef struct {
    int64_t counts;          /* address of rank 0's word; those of the others follow, a line each */
    int64_t slots;           /* address of rank 0's two slots; those of the others follow */
    int64_t slot_numbers;    /* float32 numbers that a slot holds */
    int64_t ranks, rank;     /* how many, and which of them this is */
    int64_t alarm, calm;     /* addresses of a word, and of the value that it has while nothing is wrong */
    int64_t spin_ns;         /* as await_word takes them */
    int64_t patience_ns;
    int64_t count;           /* of what was done together so far; counted up here */
} rank_group;

/* Called while others are awaited, with the nanoseconds so far, and at an alarm: other than 0 ends the waiting. */
typedef int (*rank_watch)(void *with, long waited_ns);

typedef struct {
    rank_group *group; /* NULL: there are no others */
    rank_watch watch;
    void *with;
    int threads;
} rank_sums;

/* What is said of a sum that was left by its watch. */
#define RANKS_LEFT (-2)

/* Counts up, and waits until all others have. 0, or RANKS_LEFT. */
int meet_ranks(const rank_sums *sums);

/* Where this rank's next `count` numbers may be written to be shown as they are; NULL: they are more than a slot holds,
 * and sum_ranks takes them from elsewhere. */
float *next_slot(const rank_sums *sums, long count);

/* out = (or +=) the sum of what all ranks show, added up in the order of ranks, in pieces of a slot. `shown`: this rank's
 * numbers; next_slot's memory, or any other. 0, or RANKS_LEFT. */
int sum_ranks(const rank_sums *sums, const float *shown, float *out, long count, int add);

#endif
