/* Sleeping until a word changes: a futex on Linux, one mutex and condition variable elsewhere. Knows no threads. */
#ifndef HOLDFAST_PARKING_H
#define HOLDFAST_PARKING_H

#include <stdatomic.h>

#if defined(__linux__) && !defined(PARK_ON_CONDITION)

#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

/* May return early: the caller looks again. */
static inline void park(atomic_uint *word, unsigned value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

/* Wakes at most `count` of those who sleep on the word, which has changed already. */
static inline void unpark(atomic_uint *word, unsigned count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count > INT_MAX ? INT_MAX : (int)count, NULL, NULL, 0);
}

static inline void unpark_after_fork(void) {}

#else

#include <pthread.h>

static pthread_mutex_t parking = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t parked = PTHREAD_COND_INITIALIZER;

static inline void park(atomic_uint *word, unsigned value) {
    pthread_mutex_lock(&parking);
    while (atomic_load(word) == value) pthread_cond_wait(&parked, &parking);
    pthread_mutex_unlock(&parking);
}

static inline void unpark(atomic_uint *word, unsigned count) {
    (void)word, (void)count;
    pthread_mutex_lock(&parking);
    pthread_cond_broadcast(&parked);
    pthread_mutex_unlock(&parking);
}

/* Whoever held them is not in the child. */
static inline void unpark_after_fork(void) {
    pthread_mutex_init(&parking, NULL);
    pthread_cond_init(&parked, NULL);
}

#endif

#endif
