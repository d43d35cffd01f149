/* A part of the work is open as one word, so that whoever takes a unit learns at the same moment whether it is one:
 *
 *   ticket    bits 24-47: units of the part · bits 0-23: the next of them
 *
 * A thread that comes late takes a unit of whatever is open by then. While one has a unit, the part is not done, and its
 * leader changes nothing. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "team.h"

#include <sched.h>
#include <stdint.h>

#include "parallel.h"
#include "parking.h"
#include "waiting.h"

#define NEXT_BITS 24
#define NEXT ((UINT64_C(1) << NEXT_BITS) - 1)
#define SPIN_NS 500000 /* longer than what lies between two layers */
#define LOOKS 64       /* between two looks at the clock */

struct team {
    _Alignas(64) _Atomic(uint64_t) ticket;
    _Alignas(64) atomic_uint parts; /* counts them; members sleep on it */
    _Alignas(64) atomic_long done;  /* units of the open part */
    _Alignas(64) atomic_uint asleep;
    atomic_int over;
    unit_function run;
    void *work;
    team_leader lead;
    void *lead_work;
};

static void take_units(team *members) {
    long mine = 0;
    for (;; mine++) {
        const uint64_t ticket = atomic_fetch_add_explicit(&members->ticket, 1, memory_order_acquire);
        if ((ticket & NEXT) >= ticket >> NEXT_BITS) break;
        members->run(members->work, (long)(ticket & NEXT));
    }
    if (mine > 0) atomic_fetch_add_explicit(&members->done, mine, memory_order_release);
}

static void await_part(team *members, unsigned seen) {
    for (long until = 0;;) {
        for (int i = 0; i < LOOKS; i++, relax())
            if (atomic_load_explicit(&members->parts, memory_order_acquire) != seen) return;
        const long now = now_ns();
        if (until == 0)
            until = now + SPIN_NS;
        else if (now > until)
            break;
    }
    atomic_fetch_add(&members->asleep, 1);
    while (atomic_load(&members->parts) == seen) park(&members->parts, seen);
    atomic_fetch_sub(&members->asleep, 1);
}

static void open_part(team *members) {
    atomic_fetch_add(&members->parts, 1);
    const unsigned asleep = atomic_load(&members->asleep);
    if (asleep > 0) unpark(&members->parts, asleep);
}

void share_units(team *members, unit_function run, void *work, long units) {
    if (units < 2) {
        if (units == 1) run(work, 0);
        return;
    }
    members->run = run;
    members->work = work;
    atomic_store_explicit(&members->done, 0, memory_order_relaxed);
    atomic_store_explicit(&members->ticket, (uint64_t)units << NEXT_BITS, memory_order_release);
    open_part(members);
    take_units(members);
    for (long looks = 0; atomic_load_explicit(&members->done, memory_order_acquire) != units; looks++) {
        if (looks < 100 * LOOKS)
            relax();
        else
            sched_yield(); /* whoever has the last unit may want this core */
    }
}

static void run_member(void *pointer) {
    team *members = pointer;
    for (;;) {
        const unsigned seen = atomic_load_explicit(&members->parts, memory_order_acquire);
        if (atomic_load_explicit(&members->over, memory_order_acquire)) return;
        take_units(members);
        await_part(members, seen);
    }
}

static _Thread_local team *leads; /* what the calling thread is about to lead */

static void run_leader_or_member(void *pointer) {
    team *members = pointer;
    if (leads != members) {
        run_member(members);
        return;
    }
    members->lead(members, members->lead_work);
    atomic_store_explicit(&members->over, 1, memory_order_release);
    open_part(members);
}

void run_team(team_leader lead, void *work, int threads) {
    team members = {.lead = lead, .lead_work = work};
    leads = &members;
    run_parallel(run_leader_or_member, &members, threads);
    leads = NULL;
}
