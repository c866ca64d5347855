/* Threads that wait for work, and share that of one caller at a time. */

#ifndef ATTNSERVE_TEAM_H
#define ATTNSERVE_TEAM_H

#include <stdint.h>

struct team;

/* Does a part of the work, or all of it: each thread that calls it takes untaken units until none is left. */
typedef void (*task)(void *work);

/* Does work, together with at most `helpers` of a team, which may be NULL. Waits for helpers that have begun, but not
   for those that come too late because the processor is busy. */
void share(struct team *team, int64_t helpers, task task, void *work);

/* After `stay`, helpers that have nothing to do stay awake for a little while, since more work will follow soon. That
   ends when `part` has been called as often as `stay`. The team may be NULL. */
void stay(struct team *team);
void part(struct team *team);

#endif
