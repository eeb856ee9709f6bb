/* The inside of a decider, shared by decide.c (the flow), refresh.c (records) and decider.c
 * (housekeeping, the other hooks). */
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

/* --- refresh.c --- */
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

#endif
