/* One run of the comparison (policies_bench.h): a discrete-event loop over simulated engines, the
 * real decider with a real policy in its VM, the real ledger, and the real knowledge of caches, all
 * on one virtual clock. It does with each request what http/proxy.c does: decide, begin a ticket,
 * send, first token, tokens, end. Engines tell their caches' changes to the index after a delay, as
 * the feed would; every half second the predictions are reconciled, as knowledge.c does; gauges are
 * looked at as fleet/gauges.h does. Nothing sleeps, nothing is random but by the seed.
 *
 * At one instant: what was told reaches the index, then engines step in their order, then timers,
 * then requests arrive. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policies_inner.h"

#define TICK_US 250000
#define LOOK_US 500000

typedef struct request {
    run *run;
    machine *at;
    int row;
    int64_t arrival_us;
    pl_arena arena;
    pl_prompt prompt;
    pl_ticket ticket;
    pl_ask ask;
    pl_sim_req *sim;
    double cached;
    int64_t first_us;
    char session[32];
} request;

/* --- arrivals --- */

static bool before(const arrival *a, const arrival *b)
{
    return a->at_us != b->at_us ? a->at_us < b->at_us : a->tie < b->tie;
}

static void push(run *r, int64_t at_us, int row)
{
    int i = r->heap_n++;
    const arrival a = {at_us, pl_rng_next(&r->rng), row};
    for (; i > 0 && before(&a, &r->heap[(i - 1) / 2]); i = (i - 1) / 2)
        r->heap[i] = r->heap[(i - 1) / 2];
    r->heap[i] = a;
}

static arrival pop(run *r)
{
    arrival top = r->heap[0], last = r->heap[--r->heap_n];
    int i = 0;
    for (int k; (k = 2 * i + 1) < r->heap_n; i = k) {
        if (k + 1 < r->heap_n && before(&r->heap[k + 1], &r->heap[k]))
            k++;
        if (!before(&r->heap[k], &last))
            break;
        r->heap[i] = r->heap[k];
    }
    if (r->heap_n)
        r->heap[i] = last;
    return top;
}

static void schedule(run *r)
{
    const pb_trace *t = r->trace;
    double rate = r->setup->rate;
    if (t->closed) {
        for (int i = 0; i < t->sessions_n; i++)
            push(r, EPOCH_US + (int64_t)(pl_rng_unit(&r->rng) * r->setup->window_s * 1e6 / rate),
                 t->sessions[i].first_row);
        return;
    }
    for (int i = 0; i < t->rows_n; i++) {
        double at = (double)t->rows[i].at_us + pl_rng_unit(&r->rng) * (double)t->bucket_us;
        push(r, EPOCH_US + (int64_t)(at / rate), i);
    }
}

/* --- requests --- */

static void free_request(request *q)
{
    pl_arena_free(&q->arena);
    free(q);
}

/* The next row of a closed-loop session, after its pause. */
static void go_on(run *r, int row)
{
    const pb_trace *t = r->trace;
    if (!t->closed)
        return;
    const pb_session *s = &t->sessions[t->rows[row].session];
    if (row + 1 < s->first_row + s->rows)
        push(r, r->now_us + t->rows[row + 1].think_us, row + 1);
}

static void on_tokens(void *user, int64_t now_us, int from, int n)
{
    request *q = user;
    run *r = q->run;
    (void)now_us; /* = r->now_us */
    if (from == 0) {
        double seconds = (double)(r->now_us - q->arrival_us) / 1e6;
        q->first_us = r->now_us;
        q->cached = pl_sim_cached_tokens(q->sim);
        pl_ticket_first_token(&q->ticket, seconds);
    }
    pl_ticket_output(&q->ticket, n);
}

static void tell_done(request *q)
{
    run *r = q->run;
    const pb_row *row = &r->trace->rows[q->row];
    if (!pl_decider_wants_done(r->decider))
        return;
    const struct pl_outcome outcome = {
        .ttft_seconds = (double)(q->first_us - q->arrival_us) / 1e6,
        .e2e_seconds = (double)(r->now_us - q->arrival_us) / 1e6,
        .prompt_tokens = row->input,
        .cached_tokens = q->cached,
        .output_tokens = row->output,
        .status = 200,
        .slot = q->at->w->slot,
        .attempts = 1,
        .end_cause = PL_END_OK,
    };
    pl_decide_done(r->decider, &q->ask, &outcome);
}

static void on_finish(void *user, int64_t now_us, pl_sim_finish why)
{
    request *q = user;
    run *r = q->run;
    machine *m = q->at;
    const pb_row *row = &r->trace->rows[q->row];
    (void)now_us;
    pl_ticket_end(&q->ticket);
    r->under_way--;
    if (atomic_load(&m->w->inflight) == 0)
        m->busy_us += r->now_us - m->since_us;
    if (why == PL_SIM_DONE) {
        r->ttft[r->out->requests++] = (double)(q->first_us - q->arrival_us) / 1e6;
        r->e2e_sum += (double)(r->now_us - q->arrival_us) / 1e6;
        r->cached += (int64_t)q->cached;
        r->prompted += row->input;
        if (r->setup->knowledge != PB_NONE) {
            r->predicted_error += (int64_t)fabs(q->prompt.expected_tokens - q->cached);
            pl_prompt_usage(r->loop, &q->prompt, q->cached, row->input, 0);
        }
        tell_done(q);
    } else {
        r->out->refused++;
    }
    go_on(r, q->row);
    free_request(q);
}

static const pl_sim_events sim_events = {.on_tokens = on_tokens, .on_finish = on_finish};

static const pl_kv_hit *match(void *ctx, uint32_t *stamp)
{
    request *q = ctx;
    return pl_prompt_match(q->run->loop, &q->prompt, q->run->model, stamp);
}

static void fill_ask(request *q, uint64_t seed)
{
    run *r = q->run;
    const pb_row *row = &r->trace->rows[q->row];
    snprintf(q->session, sizeof q->session, "s%d", row->session);
    q->ask.model = r->model;
    q->ask.req = (struct pl_req){.arrival_seconds = (double)r->now_us / 1e6,
                                 .prompt_tokens = row->input,
                                 .max_tokens = -1,
                                 .expected_output_tokens = -1,
                                 .body_bytes = row->input * 6.0,
                                 .api = PL_API_CHAT,
                                 .choices = 1,
                                 .stream = true,
                                 .has_session = true,
                                 .exact_tokens = true};
    q->ask.strings = (pl_request_view){.model = r->model->id,
                                       .path = PL_STR_INIT("/v1/chat/completions"),
                                       .id = PL_STR_INIT("bench"),
                                       .session_id = pl_str_c(q->session),
                                       .seed = seed};
    if (r->setup->knowledge != PB_NONE) {
        q->ask.match = match;
        q->ask.match_ctx = q;
    }
}

static void send(request *q, const pl_decision *d)
{
    run *r = q->run;
    const pb_row *row = &r->trace->rows[q->row];
    machine *m = &r->machines[d->worker->slot];
    q->at = m;
    r->out->digest = (r->out->digest ^ (uint64_t)m->w->slot) * 0x100000001b3u + 1;
    if (atomic_load(&m->w->inflight) == 0)
        m->since_us = r->now_us;
    pl_ticket_begin(
        &q->ticket, m->w,
        &(pl_load){.prompt_tokens = row->input, .cached_tokens = d->cached_tokens, .stream = true});
    if (r->setup->knowledge != PB_NONE)
        pl_prompt_routed(r->loop, &q->prompt, m->w, d->cached_tokens);
    if (pl_sim_submit(m->sim, r->now_us, r->tokens, row->input, row->output, 0,
                      (uint64_t)q->row + 1, &sim_events, q, &q->sim) != 0)
        on_finish(q, r->now_us, PL_SIM_REFUSED);
}

static void arrive(run *r, int row)
{
    request *q = calloc(1, sizeof *q);
    if (!q)
        abort();
    pl_decision d;
    q->run = r;
    q->row = row;
    q->arrival_us = r->now_us;
    q->prompt.slot = -1;
    pb_trace_tokens(r->trace, row, r->tokens);
    if (r->setup->knowledge != PB_NONE)
        pl_prompt_tokens(r->loop, r->model, r->tokens, (size_t)r->trace->rows[row].input, &q->arena,
                         (pl_str){NULL, 0}, &q->prompt);
    fill_ask(q, pl_rng_next(&r->rng));
    pl_decide(r->decider, &q->ask, &d);
    if (d.kind != PL_DECIDED || !d.by_policy)
        r->failed++;
    if (d.kind != PL_DECIDED) {
        go_on(r, row);
        free_request(q);
        return;
    }
    r->under_way++;
    send(q, &d);
}

/* --- the loop --- */

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void move_to(run *r, int64_t at_us)
{
    r->now_us = at_us;
    r->now_ns = (uint64_t)at_us * 1000;
}

/* One instant after the other, until nothing is left to do. */
static void drive(run *r)
{
    int n = r->setup->engines;
    while (r->heap_n || r->under_way) {
        int64_t at = r->heap_n ? r->heap[0].at_us : INT64_MAX;
        for (int i = 0; i < n; i++)
            at = least(at, pl_sim_next_us(r->machines[i].sim));
        if (r->told_head)
            at = least(at, r->told_head->due_us);
        at = least(at, least(r->tick_us, least(r->look_us, r->gauges_us)));
        move_to(r, at > r->now_us ? at : r->now_us);
        while (r->told_head && r->told_head->due_us <= r->now_us)
            pb_rig_hear(r);
        for (int i = 0; i < n; i++)
            if (pl_sim_next_us(r->machines[i].sim) <= r->now_us)
                pl_sim_step(r->machines[i].sim, r->now_us);
        if (r->tick_us <= r->now_us) {
            pl_decider_tick(r->decider, (double)r->now_us / 1e6);
            r->tick_us += TICK_US;
        }
        if (r->look_us <= r->now_us) {
            pb_rig_look(r);
            r->look_us += LOOK_US;
        }
        if (r->gauges_us <= r->now_us) {
            pb_rig_read_gauges(r);
            r->gauges_us += r->setup->gauges_us;
        }
        while (r->heap_n && r->heap[0].at_us <= r->now_us)
            arrive(r, pop(r).row);
    }
}

/* --- the result --- */

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The smallest value that at least the share q of them does not exceed. */
static double quantile(const double *v, int64_t n, double q)
{
    int64_t i = (int64_t)ceil(q * (double)n) - 1;
    return n ? v[i < 0 ? 0 : i] : NAN;
}

static void conclude(run *r)
{
    pb_result *out = r->out;
    double span = (double)(r->now_us - EPOCH_US), busy = 0, sum = 0;
    for (int i = 0; i < r->setup->engines; i++) {
        pl_sim_stats s;
        pl_sim_stats_of(r->machines[i].sim, &s);
        out->preempted += (int64_t)s.preempted;
        busy += (double)r->machines[i].busy_us;
    }
    for (int64_t i = 0; i < out->requests; i++)
        sum += r->ttft[i];
    qsort(r->ttft, (size_t)out->requests, sizeof *r->ttft, ascending);
    double n = (double)out->requests;
    out->metric[PB_CACHED] = (double)r->cached / (double)r->prompted;
    out->metric[PB_TTFT_P50] = quantile(r->ttft, out->requests, 0.5);
    out->metric[PB_TTFT_P99] = quantile(r->ttft, out->requests, 0.99);
    out->metric[PB_TTFT_MEAN] = sum / n;
    out->metric[PB_E2E_MEAN] = r->e2e_sum / n;
    out->busy = busy / span / r->setup->engines;
    out->known =
        r->setup->knowledge == PB_NONE ? -1 : (double)r->predicted_error / (double)r->prompted;
    out->virtual_s = span / 1e6;
    out->faults = (int64_t)(r->failed + atomic_load(&r->stats.fallbacks));
    for (int h = 0; h < PL_HOOK_COUNT; h++)
        out->faults += (int64_t)atomic_load(&r->stats.errors[h]);
}

bool pb_run(const pb_trace *t, const pb_setup *s, const pb_policy *p, uint64_t seed, pb_result *out)
{
    run *r = calloc(1, sizeof *r);
    if (!r)
        return pb_fail("run", "out of memory");
    memset(out, 0, sizeof *out);
    r->trace = t;
    r->setup = s;
    r->out = out;
    /* the stream of a neighbouring state is the same, shifted by one: mixed before it is used */
    r->rng.state = pl_rng_next(&(pl_rng){seed});
    move_to(r, EPOCH_US);
    r->tick_us = r->look_us = EPOCH_US;
    r->gauges_us = s->gauges_us > 0 ? EPOCH_US : INT64_MAX;
    int longest = 0;
    for (int i = 0; i < t->rows_n; i++)
        longest = t->rows[i].input > longest ? t->rows[i].input : longest;
    r->heap = malloc((size_t)t->rows_n * sizeof *r->heap);
    r->tokens = malloc((size_t)longest * sizeof *r->tokens);
    r->ttft = malloc((size_t)t->rows_n * sizeof *r->ttft);
    bool ok = r->heap && r->tokens && r->ttft ? true : pb_fail("run", "out of memory");
    ok = ok && pb_rig_open(r, p, seed);
    if (ok) {
        schedule(r);
        drive(r);
        conclude(r);
    }
    pb_rig_close(r);
    free(r->heap);
    free(r->tokens);
    free(r->ttft);
    free(r);
    return ok;
}
