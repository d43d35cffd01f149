/* Work shared among threads of our own, and scratch memory for each of them.
 *
 * A region is a piece of work that several threads take units of until none is left. The caller takes part. A region
 * ends when its units are done, and waits for nobody who has not begun: a thread that the system does not run at the
 * moment (others want the cores too) comes too late, and the rest do its share. Whoever waits spins for some
 * microseconds, then sleeps. (Threads shared with torch do not: its runtime waits for all of them, spinning.) */
#ifndef HOLDFAST_PARALLEL_H
#define HOLDFAST_PARALLEL_H

#include <stdatomic.h>
#include <stddef.h>

/* Called at most once on each thread; takes units of work until none is left. */
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

/* GOMP_parallel of torch's runtime, to share its threads instead of having a pool; NULL: the pool. Two sets of threads
 * that compute in turn would fight for the cores: OpenMP's spin for milliseconds after each of torch's products. */
void share_runtime(void *parallel);

/* Once, before any region: a forked child has none of the threads. 0: it is so. */
int prepare_pool(void);

/* Returns when every thread that entered `run` has left it, the caller among them. At most `threads` enter. The caller
 * does it all when that is 1, within another region, and while another thread has the pool. Threads are started when
 * they are first wanted, and in a forked child anew. */
void run_parallel(worker run, void *work, int threads);

/* Ends the pool's threads and waits for them; the next region starts new ones. */
void stop_pool(void);

/* Memory of the calling thread, aligned to 64 bytes, kept between calls; NULL when there is none left.
 * Valid until the same thread asks for the same slot again. */
enum scratch_slot { SCRATCH_TEAM, SCRATCH_OWN, SCRATCH_SLOTS };
void *scratch(enum scratch_slot slot, size_t bytes);

#endif
