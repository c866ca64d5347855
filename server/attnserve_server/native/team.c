/* A team: helpers sleep on a futex until a caller opens its work to them, and again when none of it is left.

   Waking a thread this way takes a few microseconds and no GIL: less than a tenth of what it takes Python to hand
   something over. The work stays valid while any helper is inside: the caller waits for those, and for no others. */

#define _GNU_SOURCE
#include "attention.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    TURNS = 2000,           /* how often a caller checks whether the last helper is done before it sleeps */
    AWAKE_TURNS = 4000      /* how often a helper checks whether there is more work before it sleeps, if more is
                               expected */
};

struct team {
    uint32_t rung;          /* how often helpers were called */
    uint32_t inside;        /* helpers at work */
    uint32_t asleep;        /* helpers that must be woken when they are called, or are about to sleep */
    uint32_t staying;       /* callers that have more work soon */
    int64_t seats;          /* how many more helpers may join */
    int busy;               /* it has a caller */
    int waits;              /* that caller sleeps until no helper is inside */
    int dismissed;
    int patient;            /* callers begin when all requested helpers have joined: so that tests know who works */
    task task;
    void *work;
};

static void sleep_while(uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(uint32_t *word, int64_t count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, (int)(count < INT_MAX ? count : INT_MAX), NULL, NULL, 0);
}

struct team *attnserve_gather(int64_t patient) {
    struct team *team = calloc(1, sizeof *team);
    if (team) team->patient = patient != 0;
    return team;
}

static void leave(struct team *team) {
    if (__atomic_sub_fetch(&team->inside, 1, __ATOMIC_SEQ_CST)) return;
    if (__atomic_load_n(&team->waits, __ATOMIC_SEQ_CST)) wake(&team->inside, 1);
}

/* Joins if there is work and a free seat. It counts as inside before it takes the seat, so that the caller waits for
   it. */
static int come_in(struct team *team) {
    if (__atomic_load_n(&team->seats, __ATOMIC_SEQ_CST) <= 0) return 0;
    __atomic_add_fetch(&team->inside, 1, __ATOMIC_SEQ_CST);
    if (__atomic_fetch_sub(&team->seats, 1, __ATOMIC_SEQ_CST) > 0) return 1;
    leave(team);
    return 0;
}

/* Waits for a little while, if more work is expected. Returns whether helpers were called meanwhile. */
static int called_soon(struct team *team, uint32_t rung) {
    for (int turn = 0; turn < AWAKE_TURNS && __atomic_load_n(&team->staying, __ATOMIC_SEQ_CST); turn++) {
        if (__atomic_load_n(&team->rung, __ATOMIC_SEQ_CST) != rung) return 1;
        __builtin_ia32_pause();
    }
    return 0;
}

void attnserve_help(struct team *team) {
    for (;;) {
        uint32_t rung = __atomic_load_n(&team->rung, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&team->dismissed, __ATOMIC_SEQ_CST)) return;
        if (come_in(team)) {
            team->task(team->work);
            leave(team);
        } else if (!called_soon(team, rung)) {
            __atomic_add_fetch(&team->asleep, 1, __ATOMIC_SEQ_CST);
            sleep_while(&team->rung, rung);
            __atomic_sub_fetch(&team->asleep, 1, __ATOMIC_SEQ_CST);
        }
    }
}

void stay(struct team *team) {
    if (team) __atomic_add_fetch(&team->staying, 1, __ATOMIC_SEQ_CST);
}

void part(struct team *team) {
    if (team) __atomic_sub_fetch(&team->staying, 1, __ATOMIC_SEQ_CST);
}

void attnserve_dismiss(struct team *team) {
    __atomic_store_n(&team->dismissed, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&team->rung, 1, __ATOMIC_SEQ_CST);
    wake(&team->rung, INT_MAX);
}

void share(struct team *team, int64_t helpers, task task, void *work) {
    if (!team || helpers < 1 || __atomic_exchange_n(&team->busy, 1, __ATOMIC_SEQ_CST)) {
        task(work);
        return;
    }
    team->task = task;
    team->work = work;
    __atomic_store_n(&team->seats, helpers, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&team->rung, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&team->asleep, __ATOMIC_SEQ_CST)) wake(&team->rung, helpers);
    while (team->patient && __atomic_load_n(&team->seats, __ATOMIC_SEQ_CST) > 0) usleep(1);
    task(work);
    __atomic_store_n(&team->seats, 0, __ATOMIC_SEQ_CST);
    for (int turn = 0; turn < TURNS && __atomic_load_n(&team->inside, __ATOMIC_SEQ_CST); turn++) __builtin_ia32_pause();
    __atomic_store_n(&team->waits, 1, __ATOMIC_SEQ_CST);
    for (uint32_t inside; (inside = __atomic_load_n(&team->inside, __ATOMIC_SEQ_CST));)
        sleep_while(&team->inside, inside);
    __atomic_store_n(&team->waits, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&team->busy, 0, __ATOMIC_SEQ_CST);
}
