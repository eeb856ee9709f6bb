/* See made_up.h. Runs on the control thread over VMs that serve nobody yet; the records are the
 * VM's, and the strings are static. */
#include "policy/made_up.h"

#include <math.h>
#include <stdio.h>

static char name_space[32]; /* control thread only */

static pl_str made_up_name(void *ctx, int index)
{
    char *name = ctx;
    int n = snprintf(name, sizeof name_space, "made-up-%d", index);
    return (pl_str){name, (size_t)n};
}

static pl_str made_up_text(void *ctx, pl_str name)
{
    return name.n % 2 ? PL_STR("made-up") : (pl_str){NULL, 0};
}

/* k counts the sessions. */
static struct pl_session session_of(uint64_t k, int n)
{
    static const int events[] = {PL_SESSION_TURN, PL_SESSION_OPEN, PL_SESSION_BIND,
                                 PL_SESSION_CLOSE};
    int event = events[k % 4];
    bool bound = event == PL_SESSION_TURN ? k / 4 % 2 : event == PL_SESSION_CLOSE;
    bool parent = (k ^ k / 4 ^ k / 8) & 1;
    bool engine = event == PL_SESSION_OPEN || (bound && k % 3 == 0);
    int at = bound ? (int)(k / 2 % (uint64_t)n) : -1;
    return (struct pl_session){.age_seconds = bound ? 12 : 0,
                               .idle_seconds = bound ? 2 : 0,
                               .ttl_seconds = 300,
                               .held_tokens = bound && engine ? 5000 : -1,
                               .id_hash = 1 + (double)k * 7919,
                               .parent_hash = parent ? 104729 : 0,
                               .event = event,
                               .turn = bound ? (int)(k % 5) + 1 : 0,
                               .kind = engine ? PL_ENGINE_BACKED : PL_ROUTER_ONLY,
                               .bound_slot = at,
                               .bound_generation = bound ? 1 : 0,
                               .bound_index = at,
                               .has_parent = parent,
                               .delta = bound && engine && event == PL_SESSION_TURN,
                               .final = event == PL_SESSION_CLOSE};
}

static struct pl_worker worker_of(int i, pl_made_up_kind kind, pl_rng *rng)
{
    bool tied = kind == PL_ALL_TIED;
    bool known = kind != PL_ALL_TIED && i % 4 != 3; /* its engine publishes events and gauges */
    bool out = kind == PL_ALL_OUT || (kind == PL_SOME_OUT && i % 3 == 1);
    return (struct pl_worker){.inflight = tied ? 4 : floor(pl_rng_unit(rng) * 32),
                              .queued_prefill_tokens = tied ? 0 : floor(pl_rng_unit(rng) * 32000),
                              .streams = tied ? 2 : floor(pl_rng_unit(rng) * 16),
                              .cached_tokens = tied || i % 2 ? 0 : floor(pl_rng_unit(rng) * 8000),
                              .decode_blocks = tied ? 64 : floor(pl_rng_unit(rng) * 4096),
                              .running_requests = known ? floor(pl_rng_unit(rng) * 16) : -1,
                              .waiting_requests = known ? floor(pl_rng_unit(rng) * 8) : -1,
                              .kv_usage = known ? pl_rng_unit(rng) : -1,
                              .gauges_age_seconds = known ? pl_rng_unit(rng) : INFINITY,
                              .max_inflight = INFINITY,
                              .max_queued_prefill_tokens = INFINITY,
                              .prefill_tokens_per_second = 8000,
                              .ttft_seconds = tied ? 0 : pl_rng_unit(rng),
                              .weight = 1,
                              .index = i,
                              .slot = i,
                              .generation = 1,
                              .block_tokens = 16,
                              .kv_trust = known ? PL_KV_LIVE : PL_KV_ROUTED,
                              .why = !out    ? PL_WHY_ELIGIBLE
                                     : i % 2 ? PL_WHY_UNHEALTHY
                                             : PL_WHY_AT_CAPACITY,
                              .eligible = !out};
}

void pl_make_up(pl_vm *vm, int n, pl_made_up_kind kind, uint64_t seed)
{
    pl_records *r = pl_vm_records(vm);
    pl_rng rng = {seed};
    bool named = seed & 1;
    pl_request_view view = {.model = PL_STR_INIT("made-up"),
                            .tenant = PL_STR_INIT("default"),
                            .path = PL_STR_INIT("/v1/chat/completions"),
                            .id = PL_STR_INIT("made-up"),
                            .find_header = made_up_text,
                            .find_member = made_up_text,
                            .worker_name = made_up_name,
                            .worker_ctx = name_space,
                            .seed = seed};
    *r->session = (struct pl_session){.event = PL_SESSION_NONE};
    if (named) {
        view.session_id = PL_STR("made-up-session");
        *r->session = session_of(seed / 2, n);
        if (r->session->has_parent)
            view.session_parent = PL_STR("made-up-parent");
    }
    pl_vm_bind(vm, &view);
    *r->req = (struct pl_req){.arrival_seconds = 1,
                              .prompt_tokens = floor(pl_rng_unit(&rng) * 8000),
                              .max_tokens = seed & 2 ? 256 : -1,
                              .body_bytes = 4000,
                              .api = PL_API_CHAT,
                              .expected_output_tokens = seed & 4 ? 300 : -1,
                              .choices = 1,
                              .stream = named,
                              .has_session = named};
    r->fleet->n = n;
    r->fleet->eligible = 0;
    for (int i = 0; i < n; i++) {
        r->workers[i] = worker_of(i, kind, &rng);
        r->fleet->eligible += r->workers[i].eligible;
    }
    *r->fault = (struct pl_fault){.kind = PL_ALL_BUSY, .budget_left = true};
    *r->outcome = (struct pl_outcome){.ttft_seconds = 0.1,
                                      .e2e_seconds = 1,
                                      .prompt_tokens = 100,
                                      .cached_tokens = -1,
                                      .output_tokens = 20,
                                      .status = 200,
                                      .slot = 0,
                                      .generation = 1,
                                      .attempts = 1};
}
