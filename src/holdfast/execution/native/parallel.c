/* The pool. One region is open at a time:
 *
 *   caller    opens: seats = threads - 1 ──► runs units ──► closes: seats = 0 ──► waits until inside is 0
 *   worker    sleeps on `opened` ──► takes a seat, is inside ──► runs units ──► leaves
 *
 *   state     bit 31: the caller sleeps · bits 15-29: seats · bits 0-14: inside
 *
 * A worker that finds no seat goes back to wait. Being inside is what keeps `run` and `work` valid, so the two need no
 * other guard, and a worker that comes late, from an earlier region, does no harm: whatever it enters is open. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "parking.h"
#include "waiting.h"

#define MOST_WORKERS 1023
#define SPIN_NS 50000 /* about what waking a thread on an idle core takes */
#define CALLER_SLEEPS (1u << 31)
#define SEAT (1u << 15)
#define INSIDE (SEAT - 1)

static struct {
    _Alignas(64) atomic_uint opened; /* counts regions */
    _Alignas(64) atomic_uint state;
    _Alignas(64) atomic_uint asleep; /* workers who sleep on `opened`, or are about to */
    atomic_int taken;                /* some thread has a region open, or changes the pool */
    atomic_int stopping;
    worker run;
    void *work;
    int workers; /* belongs to who has taken the pool */
    pthread_t threads[MOST_WORKERS];
} pool;

static _Thread_local int within; /* a region */

typedef void (*parallel_function)(void (*run)(void *), void *data, unsigned threads, unsigned flags);
static _Atomic(parallel_function) shared_runtime;

void share_runtime(void *parallel) { atomic_store(&shared_runtime, (parallel_function)parallel); }

long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

/* Waits for `(word & mask) != value` without sleeping; 0 when it took too long. */
static int spin(atomic_uint *word, unsigned mask, unsigned value) {
    for (long until = 0;;) {
        for (int i = 0; i < 64; i++, relax())
            if ((atomic_load_explicit(word, memory_order_acquire) & mask) != value) return 1;
        const long now = now_ns();
        if (until == 0)
            until = now + SPIN_NS;
        else if (now > until)
            return 0;
    }
}

static void await_region(unsigned seen) {
    if (spin(&pool.opened, ~0u, seen)) return;
    atomic_fetch_add(&pool.asleep, 1);
    while (atomic_load(&pool.opened) == seen) park(&pool.opened, seen);
    atomic_fetch_sub(&pool.asleep, 1);
}

static int enter(void) {
    unsigned state = atomic_load_explicit(&pool.state, memory_order_relaxed);
    while (state / SEAT % SEAT > 0)
        if (atomic_compare_exchange_weak_explicit(&pool.state, &state, state - SEAT + 1, memory_order_acquire,
                                                  memory_order_relaxed))
            return 1;
    return 0;
}

static void leave(void) {
    if (atomic_fetch_sub_explicit(&pool.state, 1, memory_order_acq_rel) == (CALLER_SLEEPS | 1)) unpark(&pool.state, 1);
}

static void free_scratch(void);

static void *serve(void *unused) {
    (void)unused;
    within = 1;
    for (unsigned seen = 0;; await_region(seen)) {
        seen = atomic_load(&pool.opened);
        if (atomic_load(&pool.stopping)) break;
        if (enter()) {
            pool.run(pool.work);
            leave();
        }
    }
    free_scratch();
    return NULL;
}

/* None of the threads is in the child, nor is a region of another thread. */
static void forget_pool(void) {
    atomic_store(&pool.state, 0);
    atomic_store(&pool.asleep, 0);
    atomic_store(&pool.taken, 0);
    atomic_store(&pool.stopping, 0);
    pool.workers = 0;
    unpark_after_fork();
}

int prepare_pool(void) { return pthread_atfork(NULL, NULL, forget_pool); }

static void name_worker(int number) {
#if defined(__linux__)
    char name[16];
    snprintf(name, sizeof name, "holdfast-%u", (unsigned)number % 10000u);
    pthread_setname_np(pool.threads[number - 1], name);
#else
    (void)number;
#endif
}

static int start_workers(int wanted) {
    if (wanted > MOST_WORKERS) wanted = MOST_WORKERS;
    if (pool.workers >= wanted) return wanted;
    sigset_t all, before; /* signals are for the interpreter's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.workers < wanted) {
        if (pthread_create(&pool.threads[pool.workers], NULL, serve, NULL) != 0) break; /* fewer will do it */
        name_worker(++pool.workers);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool.workers;
}

static int take_pool(void) {
    int free_now = 0;
    return atomic_compare_exchange_strong_explicit(&pool.taken, &free_now, 1, memory_order_acquire,
                                                   memory_order_relaxed);
}

static void give_pool(void) { atomic_store_explicit(&pool.taken, 0, memory_order_release); }

static void close_region(void) {
    unsigned state = atomic_fetch_and_explicit(&pool.state, INSIDE, memory_order_acquire) & INSIDE;
    if (state == 0) return;
    for (unsigned last = state; last != 0; last = atomic_load_explicit(&pool.state, memory_order_acquire) & INSIDE) {
        if (spin(&pool.state, INSIDE, last)) continue;
        atomic_fetch_or_explicit(&pool.state, CALLER_SLEEPS, memory_order_acquire);
        while ((state = atomic_load_explicit(&pool.state, memory_order_acquire)) & INSIDE) park(&pool.state, state);
        break;
    }
}

void run_parallel(worker run, void *work, int threads) {
    const parallel_function shared = atomic_load_explicit(&shared_runtime, memory_order_relaxed);
    if (shared != NULL && threads > 1) {
        shared(run, work, (unsigned)threads, 0);
        return;
    }
    if (threads < 2 || within || !take_pool()) {
        run(work);
        return;
    }
    const int seats = start_workers(threads - 1);
    within = 1;
    pool.run = run;
    pool.work = work;
    atomic_store_explicit(&pool.state, (unsigned)seats * SEAT, memory_order_release);
    atomic_fetch_add(&pool.opened, 1);
    if (atomic_load(&pool.asleep) > 0) unpark(&pool.opened, (unsigned)seats);
    run(work);
    close_region();
    within = 0;
    give_pool();
}

void stop_pool(void) {
    while (!take_pool()) sched_yield();
    atomic_store(&pool.stopping, 1);
    atomic_fetch_add(&pool.opened, 1);
    unpark(&pool.opened, MOST_WORKERS);
    for (int i = 0; i < pool.workers; i++) pthread_join(pool.threads[i], NULL);
    pool.workers = 0;
    atomic_store(&pool.stopping, 0);
    give_pool();
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

static void free_scratch(void) {
    for (int slot = 0; slot < SCRATCH_SLOTS; slot++) free(held[slot].memory);
}
