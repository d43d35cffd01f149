/* For loops that wait without sleeping. */
#ifndef HOLDFAST_WAITING_H
#define HOLDFAST_WAITING_H

/* Lets the core's other thread work. */
static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* `yield` does nothing on most cores */
#endif
}

/* Of a clock that only goes forward. */
long now_ns(void);

#endif
