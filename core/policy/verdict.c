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
