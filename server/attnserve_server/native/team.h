/* Threads that wait for work, and share what one caller at a time has. */

#ifndef ATTNSERVE_TEAM_H
#define ATTNSERVE_TEAM_H

#include <stdint.h>

struct team;

/* A part of the work, or all of it: whoever calls it takes what nobody has taken, until nothing is left. */
typedef void (*task)(void *work);

/* Does work, together with at most so many helpers of a team, which may be NULL. Those that come too late, because the
   processor is busy, are not waited for; those that have begun are. */
void share(struct team *team, int64_t helpers, task task, void *work);

#endif
