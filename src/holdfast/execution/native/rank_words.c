/* Waiting between processes: the sleeper counts itself before it looks a last time, the writer looks at the count after
 * it has written, so that one of the two sees the other. Sleeps are short at any rate: an alarm is another word, and
 * nobody who sleeps on this one is woken by it. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "rank_words.h"

#include <limits.h>
#include <time.h>

#include "waiting.h"

#define LOOKS 32           /* between two looks at the clock */
#define SLEEP_NS 20000000L /* at most, before the alarm is looked at */
#define LEAST_SPIN_NS 1000L
#define FIRST_SPIN_NS (16 * LEAST_SPIN_NS)

/* How long it is worth while to look before sleeping, by what came of it so far: where the other has a core to itself it
 * comes within microseconds, and sleeping takes longer than that; where both share a core, looking is what keeps it from
 * coming, and the switch that sleeping makes is all it needs. */
static atomic_long spin_now = FIRST_SPIN_NS;

static void learn(int came, long most_ns) {
    const long now = atomic_load_explicit(&spin_now, memory_order_relaxed), next = came ? 2 * now : now / 2;
    const long within = next > most_ns ? most_ns : next < LEAST_SPIN_NS ? LEAST_SPIN_NS : next;
    if (within != now) atomic_store_explicit(&spin_now, within, memory_order_relaxed);
}

#if defined(__linux__)

#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Not FUTEX_PRIVATE: whoever wakes us is another process. */
static void sleep_on(atomic_uint *word, unsigned seen, long most_ns) {
    struct timespec most = {most_ns / 1000000000L, most_ns % 1000000000L};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &most, NULL, 0);
}

static void wake_all(atomic_uint *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

#else

static void sleep_on(atomic_uint *word, unsigned seen, long most_ns) {
    struct timespec most = {0, most_ns < 100000L ? most_ns : 100000L};
    (void)word, (void)seen;
    nanosleep(&most, NULL);
}

static void wake_all(atomic_uint *word) { (void)word; }

#endif

void post_word(rank_word *word, unsigned value) {
    atomic_store(&word->value, value);
    if (atomic_load(&word->sleepers) > 0) wake_all(&word->value);
}

static int reached(unsigned seen, unsigned value) { return (int)(seen - value) >= 0; }

typedef struct {
    rank_word *word, *alarm;
    unsigned value, calm;
} awaited;

static int has_come(const awaited *one) {
    return reached(atomic_load_explicit(&one->word->value, memory_order_acquire), one->value);
}

/* Looks for `spin_ns` at most, then sleeps; `asleep` tells whether it came to that. */
static enum rank_outcome look_and_sleep(const awaited *one, long began_ns, long spin_ns, long patience_ns, int *asleep) {
    for (;;) {
        for (int look = 0; look < LOOKS; look++, relax())
            if (has_come(one)) return RANK_REACHED;
        if (atomic_load_explicit(&one->alarm->value, memory_order_acquire) != one->calm) return RANK_ALARM;
        const long passed_ns = now_ns() - began_ns, left_ns = patience_ns - passed_ns;
        if (left_ns <= 0) return RANK_LATE;
        if (passed_ns < spin_ns && !*asleep) continue;
        *asleep = 1;
        atomic_fetch_add(&one->word->sleepers, 1);
        const unsigned seen = atomic_load(&one->word->value);
        if (!reached(seen, one->value))
            sleep_on(&one->word->value, seen, left_ns < SLEEP_NS ? left_ns : SLEEP_NS);
        atomic_fetch_sub(&one->word->sleepers, 1);
    }
}

enum rank_outcome await_word(rank_word *word, unsigned value, rank_word *alarm, unsigned calm, long spin_ns,
                             long patience_ns) {
    const awaited one = {word, alarm, value, calm};
    if (has_come(&one)) return RANK_REACHED;
    int asleep = 0;
    const long learned = atomic_load_explicit(&spin_now, memory_order_relaxed);
    const enum rank_outcome found =
        look_and_sleep(&one, now_ns(), learned < spin_ns ? learned : spin_ns, patience_ns, &asleep);
    /* Who may not spin learns nothing of it: what sums have learned is of this process as a whole. */
    if (spin_ns > 0 && (asleep || found == RANK_REACHED)) learn(!asleep, spin_ns);
    return found;
}

enum rank_outcome await_mail(rank_word *word, unsigned value, rank_word *alarm, unsigned calm, long mail_spin_ns,
                             long patience_ns, long *waited_ns) {
    const awaited one = {word, alarm, value, calm};
    const long learned = atomic_load_explicit(&spin_now, memory_order_relaxed);
    const int busy = *waited_ns < mail_spin_ns, alone = learned >= FIRST_SPIN_NS;
    const long began_ns = now_ns();
    int asleep = 0;
    const enum rank_outcome found =
        look_and_sleep(&one, began_ns, busy && alone ? mail_spin_ns : learned, patience_ns, &asleep);
    *waited_ns = now_ns() - began_ns;
    return found;
}
