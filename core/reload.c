/* Reloading a policy is a transaction over all loops, driven by the control thread:
 *
 *   read -> a fresh VM: parse, run, check, init, self-test -> one VM for each loop
 *        -> each loop: save of the old VM, init of the new one with that carry   (prepare)
 *        -> all of them ready: every loop swaps                                  (commit)
 *        -> any of them failed: every loop drops its candidate                   (abort)
 *
 * Requests under way keep the decision that they have; their done runs in the VM that is current
 * then. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "loop.h"
#include "policy/check.h"

typedef struct pl_reload pl_reload;

typedef struct step {
    pl_message message;
    pl_reload *reload;
    pl_loop *loop;
    pl_vm *vm; /* prepare: to the loop; commit and abort: back, to be freed by the control thread */
    pl_vm_error error;
    bool ok;
} step;

struct pl_reload {
    pl_router *router;
    pl_policy_source *source;
    json_t *params; /* given with this reload: kept for the next one; NULL when none */
    step *steps;    /* one for each loop */
    int waiting;
    bool failed;
    pl_reload_result result;
    void (*done)(void *ctx, const pl_reload_result *res);
    void *ctx;
};

static void finish(pl_reload *rl)
{
    pl_router *r = rl->router;
    pl_reload_result *res = &rl->result;
    if (res->ok) {
        snprintf(r->policy.name, sizeof r->policy.name, "%s", res->name);
        snprintf(r->policy.file, sizeof r->policy.file, "%s", pl_policy_source_file(rl->source));
        snprintf(r->policy.sha256, sizeof r->policy.sha256, "%s", res->sha256);
        r->policy.hooks = res->hooks;
        r->policy.loaded_at = pl_wall_seconds();
        r->policy.reloads++;
        pl_policy_source_unref(r->source);
        r->source = pl_policy_source_ref(rl->source);
        if (rl->params) {
            json_decref(r->config.policy_params);
            r->config.policy_params = json_incref(rl->params);
        }
        pl_log(PL_LOG_INFO, "policy_reloaded", "%s, generation %llu, sha256 %.12s", res->name,
               (unsigned long long)res->generation, res->sha256);
    } else {
        r->policy.reload_failures++;
        r->policy.last_error = res->error;
        char line[16] = "";
        if (res->error.line > 0)
            snprintf(line, sizeof line, ":%d", res->error.line);
        pl_log(PL_LOG_ERROR, "policy_refused", "stage %s: %s%s%s%s (the old one stays)",
               res->error.stage, res->error.file, res->error.file[0] ? line : "",
               res->error.file[0] ? ": " : "", res->error.message);
    }
    r->reload = NULL;
    if (rl->done)
        rl->done(rl->ctx, res);
    if (rl->source)
        pl_policy_source_unref(rl->source);
    json_decref(rl->params);
    free(rl->steps);
    free(rl);
    if (r->reconcile_again && !r->stopping && !r->reload) {
        r->reconcile_again = false;
        pl_router_reconcile(r);
    }
}

/* --- on the loop's thread --- */

static void settled(pl_message *m, void *ctx);
static void prepared(pl_message *m, void *ctx);

static void reply(step *s, void (*back)(pl_message *m, void *ctx))
{
    s->message.run = back;
    if (pl_mailbox_post(&s->loop->router->control_mailbox, &s->message) != 0)
        back(&s->message, s->loop->router);
}

static void prepare(pl_message *m, void *ctx)
{
    step *s = (step *)m;
    pl_loop *l = ctx;
    json_t *carry = NULL;
    pl_vm_error ignored;
    /* a save that fails must not keep a better policy out: the new one starts afresh */
    pl_vm *old = pl_decider_vm(l->decider);
    if (old && pl_vm_save(old, &carry, &ignored) != 0) {
        pl_log(PL_LOG_WARN, "policy_save_failed", "loop %d: %s", l->index, ignored.message);
        carry = NULL;
    }
    s->ok = pl_vm_init(s->vm, carry, &s->error) == 0;
    json_decref(carry);
    l->candidate = s->vm;
    s->vm = NULL;
    reply(s, prepared);
}

static void commit(pl_message *m, void *ctx)
{
    step *s = (step *)m;
    pl_loop *l = ctx;
    s->vm = pl_decider_swap(l->decider, l->candidate, s->reload->result.generation);
    l->candidate = NULL;
    reply(s, settled);
}

static void drop(pl_message *m, void *ctx)
{
    step *s = (step *)m;
    pl_loop *l = ctx;
    s->vm = l->candidate;
    l->candidate = NULL;
    reply(s, settled);
}

/* --- on the control thread --- */

static void settled(pl_message *m, void *ctx)
{
    step *s = (step *)m;
    pl_reload *rl = s->reload;
    if (s->vm)
        pl_vm_free(s->vm);
    s->vm = NULL;
    if (--rl->waiting == 0)
        finish(rl);
}

/* A loop that takes no messages any more has ended: the router is stopping. */
static void send_step(step *s, void (*run)(pl_message *m, void *ctx))
{
    s->message.run = run;
    if (pl_mailbox_post(&s->loop->mailbox, &s->message) != 0) {
        s->ok = false;
        snprintf(s->error.stage, sizeof s->error.stage, "swap");
        snprintf(s->error.message, sizeof s->error.message, "the router is stopping");
        (run == prepare ? prepared : settled)(&s->message, s->loop->router);
    }
}

static void prepared(pl_message *m, void *ctx)
{
    step *s = (step *)m;
    pl_reload *rl = s->reload;
    if (!s->ok && !rl->failed) {
        rl->failed = true;
        rl->result.error = s->error;
    }
    if (--rl->waiting > 0)
        return;
    pl_router *r = rl->router;
    rl->result.ok = !rl->failed;
    if (!rl->failed)
        rl->result.generation = ++r->generation;
    rl->waiting = r->loops_n;
    for (int i = 0, n = r->loops_n; i < n; i++)
        send_step(&rl->steps[i], rl->failed ? drop : commit);
}

/* Runs through every stage on a VM that nobody will use; then one VM for each loop. */
static int build(pl_reload *rl, pl_vm_error *err)
{
    pl_router *r = rl->router;
    pl_vm_options o = {
        .loops = r->loops_n,
        .seed = r->config.seed,
        .memory_bytes = r->config.vm_memory_bytes,
        .clock = r->config.decider.clock,
    };
    int rc = pl_try_out(rl->source, &o, err);
    o.shared = r->shared;
    for (int i = 0; i < r->loops_n && rc == 0; i++) {
        step *s = &rl->steps[i];
        s->reload = rl;
        s->loop = &r->loops[i];
        o.loop = i;
        rc = pl_vm_new(rl->source, &o, &s->vm, err);
    }
    if (rc == 0) {
        snprintf(rl->result.name, sizeof rl->result.name, "%s", pl_vm_name(rl->steps[0].vm));
        snprintf(rl->result.sha256, sizeof rl->result.sha256, "%s",
                 pl_policy_source_sha256(rl->source));
        rl->result.hooks = pl_vm_hooks(rl->steps[0].vm);
    }
    return rc;
}

int pl_router_reload(pl_router *r, pl_str name_or_file, const json_t *params,
                     void (*done)(void *ctx, const pl_reload_result *res), void *ctx)
{
    if (r->reload)
        return PL_EBUSY;
    pl_reload *rl = calloc(1, sizeof *rl);
    if (!rl)
        return PL_ENOMEM;
    rl->router = r;
    rl->done = done;
    rl->ctx = ctx;
    rl->steps = calloc((size_t)r->loops_n, sizeof *rl->steps);
    rl->params = params ? json_deep_copy(params) : NULL;
    r->reload = rl;
    pl_str same = pl_str_c(pl_policy_source_file(r->source));
    if (pl_str_starts(same, PL_STR("builtin:")))
        same = (pl_str){same.p + 8, same.n - 8};
    pl_errbuf eb = {""};
    pl_vm_error *err = &rl->result.error;
    int rc = rl->steps ? pl_policy_source_load(name_or_file.n ? name_or_file : same,
                                               params ? params : r->config.policy_params,
                                               &rl->source, &eb)
                       : PL_ENOMEM;
    if (rc != 0) {
        snprintf(err->stage, sizeof err->stage, "read");
        snprintf(err->message, sizeof err->message, "%s", eb.text[0] ? eb.text : pl_strerror(rc));
    } else {
        rc = build(rl, err);
    }
    if (rc != 0) {
        for (int i = 0; rl->steps && i < r->loops_n; i++)
            if (rl->steps[i].vm)
                pl_vm_free(rl->steps[i].vm);
        finish(rl);
        return 0; /* done has been told */
    }
    rl->waiting = r->loops_n;
    for (int i = 0, n = r->loops_n; i < n; i++)
        send_step(&rl->steps[i], prepare);
    return 0;
}
