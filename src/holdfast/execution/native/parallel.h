/* Work shared among the threads that torch already keeps, and scratch memory for each of them.
 * Starts no threads of its own: it calls the OpenMP runtime it was bound to, which is torch's. */
#ifndef HOLDFAST_PARALLEL_H
#define HOLDFAST_PARALLEL_H

#include <stdatomic.h>
#include <stddef.h>

/* Called once on each thread of the team; takes units of work until none is left. */
typedef void (*worker)(void *work);

typedef struct {
    atomic_long next;
    long units;
} work_queue;

/* A unit nobody else has, or -1 when all are taken. */
static inline long claim(work_queue *queue) {
    long unit = atomic_fetch_add_explicit(&queue->next, 1, memory_order_relaxed);
    return unit < queue->units ? unit : -1;
}

/* `parallel` is GOMP_parallel of the runtime to share. */
void bind_runtime(void *parallel);

/* Returns when every thread has left `run`. With one thread, or none bound, the caller does it all. */
void run_parallel(worker run, void *work, int threads);

/* Memory of the calling thread, aligned to 64 bytes, kept between calls; NULL when there is none left.
 * Valid until the same thread asks for the same slot again. */
enum scratch_slot { SCRATCH_TEAM, SCRATCH_OWN, SCRATCH_SLOTS };
void *scratch(enum scratch_slot slot, size_t bytes);

#endif
