/* Threads that stay together for work of many short parts, of which each needs all of the last: one region of parallel.h
 * for all of them, led by its caller. Between parts the others spin for a while, then sleep. */
#ifndef HOLDFAST_TEAM_H
#define HOLDFAST_TEAM_H

typedef struct team team;

typedef void (*team_leader)(team *members, void *work);
typedef void (*unit_function)(void *work, long unit);

/* Calls `lead` on the calling thread, while at most `threads` - 1 others wait for what it shares. */
void run_team(team_leader lead, void *work, int threads);

/* By the leader alone: returns when `run` was called for every unit, by whoever was free. A thread that the system does
 * not run at the moment holds up nobody, unless it has a unit. */
#define MOST_UNITS 0xFFFF00L
void share_units(team *members, unit_function run, void *work, long units);

#endif
