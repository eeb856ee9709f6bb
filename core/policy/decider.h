/* The inside of a decider, shared by decide.c (the flow), refresh.c (records) and decider.c
 * (housekeeping, degrade, done, tick) and session_hooks.c (session, retain, expire). */
#ifndef PL_DECIDER_H
#define PL_DECIDER_H

#include "policy/decide.h"
#include "policy/guard.h"
#include "policy/verdict.h"

struct pl_decider {
    pl_decider_options o;
    pl_limits limits;
    pl_policy_stats *stats; /* borrowed */
    pl_vm *vm;              /* NULL: the built-in choice decides */
    bool wants_cache;       /* its policy's text names a worker's cached tokens */
    uint64_t generation;
    pl_guard guard;
    json_t *carry;         /* last save, for a VM that has to be rebuilt */
    uint64_t saved_ns;     /* when save was last asked */
    uint64_t rebuild_ns;   /* not before */
    uint64_t rebuild_wait; /* backoff of failing rebuilds */
    uint64_t refreshes;
    unsigned long log_state[PL_HOOK_COUNT][2];
    bool logged[PL_HOOK_COUNT]; /* its first error of this generation was logged in full */
};

/* How many workers could take the request, and how many only lack room. */
typedef struct pl_crowd {
    int eligible, busy;
} pl_crowd;

/* Where a request stands whose session is bound. */
typedef enum pl_pin {
    PL_PIN_NONE, /* not bound, or as if it were not */
    PL_PIN_HELD, /* the answer */
    PL_PIN_SOFT, /* could be the answer; the policy chooses */
    PL_PIN_FULL, /* at its cap: another serves this turn */
    PL_PIN_WAIT, /* at its cap, and no other may */
    PL_PIN_OUT   /* cannot be picked, and no other may */
} pl_pin;

/* --- refresh.c --- */
/* Of the ask's session, without looking at what the policy wants (SOFT is never answered). */
pl_pin pl_refresh_pin(const pl_decider *d, const pl_ask *ask, uint64_t now_ns);
/* For a hook that sees no fleet: the request and its session. */
void pl_refresh_alone(pl_decider *d, pl_ask *ask);
/* For a hook that sees one worker. */
void pl_refresh_one(pl_decider *d, pl_ask *ask, pl_worker_state *w, uint64_t now_ns);
/* Are there workers that could serve, but not open a session? */
bool pl_refresh_others(const pl_decider *d, const pl_ask *ask, uint64_t now_ns);
/* Fills the records from the fleet and binds the request's strings. */
pl_crowd pl_refresh(pl_decider *d, pl_ask *ask, uint64_t now_ns);
/* Counts only, for decisions without a policy. */
pl_crowd pl_refresh_count(const pl_decider *d, const pl_ask *ask, uint64_t now_ns);

/* --- decider.c --- */
bool pl_decider_admits(pl_decider *d, uint64_t now_ns); /* may the policy decide this request? */
bool pl_decider_may_ask(const pl_decider *d); /* still so, after an error within the decision? */
void pl_decider_good(pl_decider *d, uint64_t now_ns);
void pl_decider_failed(pl_decider *d, int hook, const pl_vm_error *err, uint64_t now_ns);
void pl_decider_clamped(pl_decider *d, pl_ask *ask, int hook, int n);
/* Books the entry that began at from_ns (machine clock): which hooks ran and how long. */
void pl_decider_timed(pl_decider *d, uint32_t skip, uint64_t from_ns, bool ok);
void pl_decider_count(_Atomic uint64_t *counter);
/* Books one entry for one hook: a call, its time, and its error when rc < 0. */
void pl_decider_called(pl_decider *d, int hook, uint64_t from_ns, int rc, const pl_vm_error *err);
/* May this hook be called: is it there, the VM usable and the policy not suspended? */
bool pl_decider_has(const pl_decider *d, int hook);

#endif
