/* A decision that is only looked at: what the policy would answer to a request now, and why. On the
 * decider's thread, with the decider's own VM, because what a policy has learned is in there. It
 * leaves no trace in statistics, guard, shared counters, averages, metrics and log; what a hook
 * writes into the policy's own state it writes here, too. */
#ifndef PL_DRY_H
#define PL_DRY_H

#include "policy/decide.h"

typedef struct pl_dry {
    pl_decision decision;
    const double *cost; /* by index: what score answered, without that hook what route left in
                           fleet.cost (NaN: nothing); the VM's, until its next decision. NULL:
                           neither is there, or it failed */
    bool suspended;     /* the policy is, or its VM is to be rebuilt: it was not asked */
    bool failed;        /* a hook did: the first error */
    int hook;
    pl_vm_error error;
} pl_dry;

/* PL_ENOMEM. */
int pl_decide_dry(pl_decider *d, pl_ask *ask, pl_dry *out) __attribute__((warn_unused_result));

/* Worker `index` of the ask's model as the policy is shown it; after pl_decide_dry. */
void pl_decide_shown(const pl_decider *d, const pl_ask *ask, int index, struct pl_worker *out);

#endif
