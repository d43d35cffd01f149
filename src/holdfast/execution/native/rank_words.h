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

/* The same of what comes between steps: it is worth while to look for `mail_spin_ns` where the last one came as soon as
 * that (`waited_ns`, 0 at first; this call's own afterwards) and sums have not shown that ranks share cores. Whoever sleeps has the plan of the next step later by what waking takes. */
enum rank_outcome await_mail(rank_word *word, unsigned value, rank_word *alarm, unsigned calm, long mail_spin_ns,
                             long patience_ns, long *waited_ns);

#endif
