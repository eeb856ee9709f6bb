/* Judges what the hooks answered: ranges, eligibility, NaN, clamps.
 * Used for live decisions and for made-up ones (check, self-test). */
#ifndef PL_VERDICT_H
#define PL_VERDICT_H

#include "policy/vm.h"

typedef struct pl_limits {
    double max_wait_seconds, max_retry_after_seconds;
} pl_limits;

typedef struct pl_judged {
    int action;                 /* PL_ADMIT, PL_QUEUE, PL_SHED */
    double arg;                 /* QUEUE: seconds; SHED: retry-after seconds */
    double shrink_max_tokens;   /* -1: not asked */
    int index;                  /* of the worker; -1: the policy chose none */
    int hook;                   /* that chose it */
    int clamped[PL_HOOK_COUNT]; /* corrections made, by hook */
    bool own_reason;            /* route gave one that can be used */
    char reason[PL_REASON_MAX + 1];
} pl_judged;

/* After pl_vm_decide answered 0. Negative when a hook's answer cannot be used: err is filled and
 * verdict->hook names the hook. */
int pl_verdict_judge(pl_vm *vm, const pl_limits *limits, pl_judged *out, pl_vm_error *err);

/* SHRINK of an admit that went well before another hook failed; -1 when it was something else. */
double pl_verdict_shrink(const pl_records *r, int *clamped);

/* After pl_vm_degrade answered 0: is the action one that the fault allows? err is filled when not.
 */
int pl_verdict_judge_fault(pl_vm *vm, pl_vm_error *err);

/* What is done (enum pl_action) when degrade has no opinion. */
int pl_verdict_fault_default(const struct pl_fault *fault);

/* value within low .. high; counts a correction. */
double pl_verdict_clamp(double value, double low, double high, int *clamped);

#endif
