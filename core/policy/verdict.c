/* See verdict.h. No state; runs on the VM's thread right after an entry. */
#include "policy/verdict.h"

#include <math.h>
#include <string.h>

#include "policy/vm_priv.h"

#define RETRY_AFTER_SECONDS 1 /* when SHED names none */

double pl_verdict_clamp(double value, double low, double high, int *clamped)
{
    if (value >= low && value <= high)
        return value;
    ++*clamped;
    return value > high ? high : low;
}

static bool good_reason(const char *p, int n)
{
    if (n < 1 || n > PL_REASON_MAX)
        return false;
    for (int i = 0; i < n; i++) {
        char c = p[i];
        if (!((c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
              c == '_' || c == '.' || c == '-'))
            return false;
    }
    return true;
}

static void give_reason(const struct pl_verdict *v, pl_judged *out)
{
    if (v->reason_len == 0) {
        strcpy(out->reason, pl_hook_name(PL_HOOK_ROUTE));
    } else if (good_reason(v->reason, v->reason_len)) {
        memcpy(out->reason, v->reason, (size_t)v->reason_len);
        out->reason[v->reason_len] = 0;
        out->own_reason = true;
    } else {
        strcpy(out->reason, pl_hook_name(PL_HOOK_ROUTE));
        out->clamped[PL_HOOK_ROUTE]++;
    }
}

double pl_verdict_shrink(const pl_records *r, int *clamped)
{
    if (r->verdict->action != PL_SHRINK)
        return -1;
    double most = r->req->max_tokens > 0 ? r->req->max_tokens : 0x1.0p53;
    return floor(pl_verdict_clamp(r->verdict->arg, 1, most, clamped));
}

/* admit's part. True when it ends the matter. */
static bool judge_admit(const pl_records *r, const pl_limits *limits, pl_judged *out)
{
    const struct pl_verdict *v = r->verdict;
    int *clamped = &out->clamped[PL_HOOK_ADMIT];
    if (v->action == PL_QUEUE || v->action == PL_SHED) {
        bool queue = v->action == PL_QUEUE;
        double most = queue ? limits->max_wait_seconds : limits->max_retry_after_seconds;
        double none = queue ? most : fmin(RETRY_AFTER_SECONDS, most);
        out->shrink_max_tokens = -1;
        out->action = queue ? PL_QUEUE : PL_SHED;
        out->arg = v->arg == -1 ? none : pl_verdict_clamp(v->arg, 0, most, clamped);
        strcpy(out->reason, pl_hook_name(PL_HOOK_ADMIT));
        return true;
    }
    out->shrink_max_tokens = pl_verdict_shrink(r, clamped);
    return false;
}

int pl_verdict_judge(pl_vm *vm, const pl_limits *limits, pl_judged *out, pl_vm_error *err)
{
    const pl_records *r = pl_vm_records(vm);
    const struct pl_verdict *v = r->verdict;
    memset(out, 0, offsetof(pl_judged, reason) + 1);
    out->action = PL_ADMIT;
    out->index = -1;
    if (judge_admit(r, limits, out))
        return 0;
    if (v->routed) {
        out->hook = PL_HOOK_ROUTE;
        if (!(v->index >= 0 && v->index < r->fleet->n && v->index == floor(v->index)))
            return pl_vm_hook_error(vm, PL_HOOK_ROUTE, err,
                                    "route answered %.17g, but an index is one of 0 .. n-1 (here "
                                    "0 .. %d): return w.index",
                                    v->index, r->fleet->n - 1);
        out->index = (int)v->index;
        if (!r->workers[out->index].eligible)
            return pl_vm_hook_error(vm, PL_HOOK_ROUTE, err,
                                    "route answered worker %d, which is not eligible (w.eligible "
                                    "is false, w.why says why)",
                                    out->index);
        give_reason(v, out);
    } else if (v->scored) {
        out->hook = PL_HOOK_SCORE;
        out->index = pl_vm_pick(vm, pl_vm_temperature(vm), true);
        if (out->index == -2)
            return pl_vm_hook_error(vm, PL_HOOK_SCORE, err,
                                    "score answered NaN (0/0?) for a worker");
        if (out->index < 0)
            out->clamped[PL_HOOK_SCORE]++; /* it refused everyone: somebody must serve */
        strcpy(out->reason, pl_hook_name(PL_HOOK_SCORE));
    }
    return 0;
}

/* --- degrade --- */

#define BIT(action) (1u << (action))

typedef struct fault_rule {
    uint32_t allowed;
    int fallback;
} fault_rule;

static fault_rule rule_of(const struct pl_fault *f)
{
    switch (f->kind) {
    case PL_NO_SESSION_ENGINE:
    case PL_OPEN_FAILED:
        return (fault_rule){BIT(PL_PROCEED) | BIT(PL_RETRY) | BIT(PL_REJECT), PL_PROCEED};
    case PL_ENGINE_FAILED:
        if (f->delta)
            return (fault_rule){BIT(PL_REJECT), PL_REJECT};
        return (fault_rule){BIT(PL_RETRY) | BIT(PL_REJECT), f->budget_left ? PL_RETRY : PL_REJECT};
    case PL_BOUND_GONE:
        if (f->delta)
            return (fault_rule){BIT(PL_REJECT), PL_REJECT};
        return (fault_rule){BIT(PL_REBIND) | BIT(PL_REJECT), PL_REBIND};
    case PL_ALL_BUSY:
        return (fault_rule){BIT(PL_QUEUE) | BIT(PL_REJECT), PL_QUEUE};
    default: /* PL_INDEX_STALE */
        return (fault_rule){BIT(PL_PROCEED) | BIT(PL_REJECT), PL_PROCEED};
    }
}

int pl_verdict_fault_default(const struct pl_fault *fault)
{
    return rule_of(fault).fallback;
}

/* "nil, pl.RETRY or pl.REJECT" */
static void list_allowed(uint32_t allowed, char *out, size_t cap)
{
    static const char *const names[] = {
        [PL_QUEUE] = "pl.QUEUE, seconds", [PL_PROCEED] = "pl.PROCEED", [PL_RETRY] = "pl.RETRY",
        [PL_REJECT] = "pl.REJECT",        [PL_REBIND] = "pl.REBIND",
    };
    int n = snprintf(out, cap, "nil");
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++) {
        if (!(allowed & BIT(i)))
            continue;
        allowed &= ~BIT(i);
        n += snprintf(out + n, cap - (size_t)n, "%s%s", allowed ? ", " : " or ", names[i]);
    }
}

static const char *fault_name(int kind)
{
    static const char *const kinds[] = {
        [PL_NO_SESSION_ENGINE] = "pl.NO_SESSION_ENGINE",
        [PL_OPEN_FAILED] = "pl.OPEN_FAILED",
        [PL_ENGINE_FAILED] = "pl.ENGINE_FAILED",
        [PL_BOUND_GONE] = "pl.BOUND_GONE",
        [PL_ALL_BUSY] = "pl.ALL_BUSY",
        [PL_INDEX_STALE] = "pl.INDEX_STALE",
    };
    return kinds[kind];
}

int pl_verdict_judge_fault(pl_vm *vm, pl_vm_error *err)
{
    const pl_records *r = pl_vm_records(vm);
    double action = r->verdict->action;
    uint32_t allowed = rule_of(r->fault).allowed;
    char may[128];
    if (action == PL_DEFAULT ||
        (action > 0 && action < 32 && action == floor(action) && allowed & BIT((uint32_t)action)))
        return 0;
    list_allowed(allowed, may, sizeof may);
    return pl_vm_hook_error(
        vm, PL_HOOK_DEGRADE, err, "degrade answered action %.17g, but for %s%s it may answer %s",
        action, fault_name(r->fault->kind), r->fault->delta ? " with fault.delta" : "", may);
}
