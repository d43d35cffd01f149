/* The pool by itself, compiled and run by test_native_threads.py: prints one line for each promise that it keeps, and
 * ends with 1 at the first that it does not. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "parallel.h"

#define MOST_UNITS 5000

typedef struct {
    work_queue queue;
    atomic_int done[MOST_UNITS]; /* how often each unit was */
    atomic_int entered, inner;
    int nested, labour;
} job;

static void fail(const char *what) {
    printf("broken: %s\n", what);
    exit(1);
}

static void run_inner(void *pointer) { atomic_fetch_add(&((job *)pointer)->inner, 1); }

static void run_units(void *pointer) {
    job *work = pointer;
    atomic_fetch_add(&work->entered, 1);
    for (long unit; (unit = claim(&work->queue)) >= 0;) {
        for (volatile int i = 0; i < work->labour; i++) {
        }
        if (work->nested) run_parallel(run_inner, work, 4);
        atomic_fetch_add(&work->done[unit], 1);
    }
}

/* On the stack, as the kernels have it: a thread that came after the end would write to what is no longer there. */
static int check(long units, int threads, int nested, int labour) {
    job work;
    memset(&work, 0, sizeof work);
    work.queue.units = units;
    work.nested = nested;
    work.labour = labour;
    run_parallel(run_units, &work, threads);
    for (long unit = 0; unit < units; unit++)
        if (atomic_load(&work.done[unit]) != 1) fail("a unit was not done once");
    if (atomic_load(&work.entered) > (threads > 1 ? threads : 1)) fail("more threads than were wanted");
    if (nested && atomic_load(&work.inner) != units) fail("a region within a region ran on more than its caller");
    return atomic_load(&work.entered);
}

static void *call_often(void *seed) {
    unsigned state = (unsigned)(uintptr_t)seed;
    for (int i = 0; i < 300; i++) check(rand_r(&state) % 40, 1 + rand_r(&state) % 6, 0, rand_r(&state) % 200);
    return NULL;
}

static void check_callers(void) {
    pthread_t callers[4];
    for (uintptr_t i = 0; i < 4; i++) pthread_create(&callers[i], NULL, call_often, (void *)(i + 1));
    for (int i = 0; i < 4; i++) pthread_join(callers[i], NULL);
}

static void check_fork(void) {
    pid_t child = fork();
    if (child == 0) {
        check(100, 4, 0, 100);
        stop_pool();
        _exit(0);
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) fail("the child of a fork");
    check(100, 4, 0, 100);
}

int main(void) {
    unsigned state = 7;
    if (prepare_pool() != 0) fail("preparing");
    for (int i = 0; i < 2000; i++)
        check(rand_r(&state) % (i % 50 == 0 ? MOST_UNITS : 60), 1 + rand_r(&state) % 8, 0, rand_r(&state) % 300);
    puts("units");
    for (int i = 0; i < 50; i++) check(20, 4, 1, 10);
    puts("nested");
    check(MOST_UNITS, 64, 0, 500); /* more threads than any machine here has cores */
    puts("oversubscribed");
    int helped = 0;
    for (int i = 0; i < 300 && !helped; i++) {
        usleep(5000); /* longer than anybody spins: they sleep, and come only if they are woken */
        helped = check(64, 3, 0, 200000) > 1;
    }
    if (!helped) fail("who slept was never woken");
    puts("slept");
    check_callers();
    puts("callers");
    check_fork();
    puts("fork");
    for (int i = 0; i < 20; i++) {
        check(50, 3, 0, 10);
        stop_pool();
    }
    stop_pool();
    puts("stopped");
    return 0;
}
