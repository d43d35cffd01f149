/* Words that processes of one machine count in, in memory that all of them map: one writes, the others wait. */
#ifndef HOLDFAST_RANK_WORDS_H
#define HOLDFAST_RANK_WORDS_H

#include <stdatomic.h>

/* At the head of a cache line that it has to itself. Whoever shares the memory must agree on this. */
typedef struct {
    atomic_uint value;
    atomic_uint sleepers;
} rank_word;

enum rank_outcome { RANK_REACHED, RANK_LATE, RANK_ALARM };

/* Everything that was written before is seen by those who have seen the value. */
void post_word(rank_word *word, unsigned value);

/* Until the word has counted up to `value` (counts may wrap around), `alarm` has another value than `calm`, or
 * `patience_ns` have passed. Spins for `spin_ns` at most, and less where that has been of no use; then sleeps. */
enum rank_outcome await_word(rank_word *word, unsigned value, rank_word *alarm, unsigned calm, long spin_ns,
                             long patience_ns);

#endif
