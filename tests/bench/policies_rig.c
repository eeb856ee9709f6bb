/* What a run of the comparison stands on (policies_inner.h): simulated engines that tell their
 * caches' changes, after a delay, to the router's index, as the feed would; the reconciling of
 * predictions as knowledge.c does it; gauges as fleet/gauges.h reads them; the policy in its VM.
 * Called by policies_run.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policies_inner.h"

#define PAGE        16
#define MODEL       "sim"
#define LOOK_LAG_NS 500000000u

/* --- what engines tell --- */

static told *tell(machine *m, const pl_sim_kv_run *kv, bool removed)
{
    run *r = m->run;
    size_t n = (size_t)kv->n;
    told *x = malloc(sizeof *x + (removed ? 1 : 2) * n * sizeof x->hashes[0]);
    if (!x)
        abort();
    *x = (told){.due_us = r->now_us + r->setup->events_delay_us,
                .slot = m->w->slot,
                .removed = removed,
                .has_parent = kv->parent != NULL,
                .n = n};
    if (kv->parent)
        x->parent = pl_sim_kv_vllm(kv->parent);
    for (size_t i = 0; i < n; i++)
        x->hashes[i] = pl_sim_kv_vllm(&kv->names[i]);
    *r->told_tail = x;
    r->told_tail = &x->next;
    return x;
}

static void on_stored(void *user, const pl_sim_kv_run *kv)
{
    machine *m = user;
    told *x = tell(m, kv, false);
    if (pl_block_hash(&m->run->space, kv->tokens, (size_t)kv->n * PAGE, x->hashes + x->n, NULL,
                      x->n) != (int64_t)x->n)
        m->run->failed++;
}

static void on_removed(void *user, const pl_sim_kv_run *kv)
{
    tell(user, kv, true);
}

static const pl_sim_kv_events kv_events = {.on_stored = on_stored, .on_removed = on_removed};

void pb_rig_hear(run *r)
{
    told *x = r->told_head;
    pl_index *ix = pl_holdings_index(r->holdings);
    r->told_head = x->next;
    if (!r->told_head)
        r->told_tail = &r->told_head;
    if (x->removed) {
        if (pl_index_remove(ix, x->slot, PL_TIER_DEVICE, x->hashes, x->n) != x->n)
            r->failed++;
    } else if (pl_index_store(ix, r->index_space, x->slot, PL_TIER_DEVICE,
                              x->has_parent ? &x->parent : NULL, x->hashes, x->hashes + x->n,
                              x->n) != 0) {
        r->failed++;
    }
    r->machines[x->slot].published = true;
    free(x);
}

/* --- timers --- */

void pb_rig_look(run *r)
{
    for (int i = 0; i < r->setup->engines; i++) {
        machine *m = &r->machines[i];
        if (m->published && atomic_load(&m->w->queued_prefill_tokens) == 0)
            pl_holdings_published(r->holdings, m->w->slot, r->now_ns - LOOK_LAG_NS);
        m->published = false;
    }
    pl_holdings_advance(r->holdings);
    pl_index_maintain(pl_holdings_index(r->holdings));
}

void pb_rig_read_gauges(run *r)
{
    for (int i = 0; i < r->setup->engines; i++) {
        pl_worker_state *w = r->machines[i].w;
        pl_sim_stats s;
        pl_sim_stats_of(r->machines[i].sim, &s);
        atomic_store(&w->running_requests, s.running);
        atomic_store(&w->waiting_requests, s.waiting);
        atomic_store(&w->kv_usage, (double)s.used_tokens / (double)s.pool_tokens);
        atomic_store(&w->gauges_at_ns, r->now_ns);
    }
}

/* --- set up --- */

bool pb_fail(const char *what, const char *detail)
{
    fprintf(stderr, "bench_policies: %s: %s\n", what, detail);
    return false;
}

static void drop_view(void *ctx, pl_view *v)
{
    (void)ctx;
    pl_view_unref(v);
}

static bool open_engines(run *r)
{
    const pl_str model = PL_STR(MODEL);
    const pb_setup *s = r->setup;
    r->machines = calloc((size_t)s->engines, sizeof *r->machines);
    r->fleet = pl_fleet_new(drop_view, NULL);
    if (!r->machines || !r->fleet)
        return pb_fail("engines", "out of memory");
    for (int i = 0; i < s->engines; i++) {
        machine *m = &r->machines[i];
        char url[64];
        pl_errbuf eb;
        pl_engine *e;
        snprintf(url, sizeof url, "http://127.0.0.1:%d", 10000 + i);
        const pl_engine_spec spec = {
            .url = pl_str_c(url), .models = &model, .models_n = 1, .block_tokens = PAGE};
        if (pl_fleet_add(r->fleet, &spec, &e, &eb) != 0)
            return pb_fail("engines", eb.text);
        m->run = r;
        m->w = &e->workers[0];
        atomic_store(&e->health, PL_HEALTH_UP);
        atomic_store(&m->w->block_tokens, PAGE);
        atomic_store(&m->w->kv_trust, s->knowledge == PB_EVENTS ? PL_KV_LIVE : PL_KV_ROUTED);
        pl_engine_unref(e);
        if (m->w->slot != i)
            return pb_fail("engines", "slots out of order");
        if (pl_sim_new(&s->sim, &m->sim, &eb) != 0)
            return pb_fail("engine", eb.text);
        if (s->knowledge == PB_EVENTS &&
            pl_sim_watch_kv(m->sim, &kv_events, m, PL_SIM_KV_QUICK) != 0)
            return pb_fail("engine", "out of memory");
    }
    r->view = pl_fleet_view(r->fleet);
    r->model = r->view ? pl_view_only_model(r->view) : NULL;
    return r->model != NULL || pb_fail("engines", "out of memory");
}

static bool open_knowledge(run *r)
{
    pl_holdings_options o;
    const pl_str none = {NULL, 0};
    pl_holdings_options_default(&o);
    o.clock = pl_clock_virtual(&r->now_ns);
    if (pl_holdings_new(&o, &r->holdings) != 0 || !(r->loop = pl_holdings_loop_new(r->holdings)) ||
        pl_block_space_init(&r->space, PAGE, false, none, none) != 0)
        return pb_fail("knowledge", "out of memory");
    r->index_space =
        pl_index_space_open(pl_holdings_index(r->holdings), PL_STR("*"), PAGE, false, none);
    return r->index_space != 0 || pb_fail("knowledge", "out of memory");
}

static bool open_policy(run *r, const pb_policy *p, uint64_t seed)
{
    pl_policy_source *src;
    pl_errbuf eb;
    pl_vm_error err;
    pl_vm *vm = NULL;
    pl_decider_options o;
    pl_decider_options_default(&o);
    o.clock = pl_clock_virtual(&r->now_ns);
    r->shared = pl_shared_new();
    pl_vm_options vo = {
        .loops = 1, .seed = seed, .memory_bytes = 64u << 20, .shared = r->shared, .clock = o.clock};
    r->decider = pl_decider_new(&o, &r->stats);
    if (!r->shared || !r->decider)
        return pb_fail(p->name, "out of memory");
    if (pl_policy_source_load(pl_str_c(p->name), p->params, &src, &eb) != 0)
        return pb_fail(p->name, eb.text);
    int rc = pl_vm_new(src, &vo, &vm, &err);
    pl_policy_source_unref(src);
    if (rc == 0 && (rc = pl_vm_init(vm, NULL, &err)) != 0)
        pl_vm_free(vm);
    if (rc != 0)
        return pb_fail(p->name, err.message);
    pl_decider_swap(r->decider, vm, 1);
    return true;
}

bool pb_rig_open(run *r, const pb_policy *p, uint64_t seed)
{
    r->told_tail = &r->told_head;
    return open_engines(r) && open_knowledge(r) && open_policy(r, p, seed);
}

void pb_rig_close(run *r)
{
    pl_decider_free(r->decider);
    if (r->shared)
        pl_shared_free(r->shared);
    for (int i = 0; r->machines && i < r->setup->engines; i++)
        pl_sim_free(r->machines[i].sim);
    while (r->told_head) {
        told *x = r->told_head;
        r->told_head = x->next;
        free(x);
    }
    pl_holdings_loop_free(r->loop);
    pl_holdings_free(r->holdings);
    pl_view_unref(r->view);
    if (r->fleet)
        pl_fleet_free(r->fleet);
    free(r->machines);
}

void pb_setup_default(pb_setup *s)
{
    memset(s, 0, sizeof *s);
    pl_sim_options_default(&s->sim);
    s->sim.timing = *pl_timing_find(PL_STR("llama-8b-h100-tp1"));
    s->sim.page_tokens = PAGE;
    s->sim.pool_tokens = 400000;
    s->engines = 8;
    s->rate = 1;
    s->window_s = 1800;
    s->events_delay_us = 5000;
    s->gauges_us = 1000000;
}
