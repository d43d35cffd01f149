/* The bridge to torch's OpenMP runtime. The module links to no OpenMP library: a second one in the process would
 * bring a second pool of threads that fights with the first for the same cores. */
#include "parallel.h"

#include <stdlib.h>

typedef void (*parallel_function)(void (*run)(void *), void *data, unsigned threads, unsigned flags);

static parallel_function start_team = NULL;

void bind_runtime(void *parallel) { start_team = (parallel_function)parallel; }

void run_parallel(worker run, void *work, int threads) {
    if (threads > 1 && start_team != NULL)
        start_team(run, work, (unsigned)threads, 0);
    else
        run(work);
}

static _Thread_local struct {
    void *memory;
    size_t bytes;
} held[SCRATCH_SLOTS];

void *scratch(enum scratch_slot slot, size_t bytes) {
    if (held[slot].bytes < bytes) {
        free(held[slot].memory);
        held[slot].bytes = 0;
        held[slot].memory = NULL;
        size_t wanted = (bytes + 4095) & ~(size_t)4095;
        if (posix_memalign(&held[slot].memory, 64, wanted) != 0) {
            held[slot].memory = NULL;
            return NULL;
        }
        held[slot].bytes = wanted;
    }
    return held[slot].memory;
}
