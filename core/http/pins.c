/* Pins: what a request says about where it is to go. Clients of trusted_clients are obeyed; from
 * others it is taken out and counted. Called by intake.c, proxy.c and forward.c on the loop's
 * thread. */
#include "http/request.h"

pl_pin pl_pin_of(pl_str name)
{
    static const struct {
        pl_str name;
        pl_pin pin;
    } pins[] = {
        {PL_STR_INIT("x-perilune-worker"), PL_PIN_WORKER},
        {PL_STR_INIT("x-dynamo-worker-instance-id"), PL_PIN_INSTANCE},
        {PL_STR_INIT("x-worker-instance-id"), PL_PIN_INSTANCE},
        {PL_STR_INIT("x-dynamo-dp-rank"), PL_PIN_RANK},
        {PL_STR_INIT("x-dp-rank"), PL_PIN_RANK},
        {PL_STR_INIT("x-dynamo-prefill-instance-id"), PL_PIN_PREFILL},
        {PL_STR_INIT("x-prefill-instance-id"), PL_PIN_PREFILL},
        {PL_STR_INIT("x-dynamo-prefill-dp-rank"), PL_PIN_PREFILL},
        {PL_STR_INIT("x-prefill-dp-rank"), PL_PIN_PREFILL},
        {PL_STR_INIT("x-data-parallel-rank"), PL_PIN_ENGINES},
    };
    for (size_t i = 0; i < sizeof pins / sizeof *pins; i++)
        if (pins[i].name.n == name.n && pl_str_ieq(pins[i].name, name))
            return pins[i].pin;
    return PL_PIN_NONE;
}

/* From clients that may not pin: taken out of the body (headers: forward.c leaves them out). */
void pl_pins_remove(pl_request *rq)
{
    if (rq->trusted)
        return;
    static const pl_member_id pins[] = {
        PL_MEMBER_ROUTED_DP_RANK,    PL_MEMBER_DATA_PARALLEL_RANK, PL_MEMBER_DISAGG_PREFILL_DP_RANK,
        PL_MEMBER_BOOTSTRAP_HOST,    PL_MEMBER_BOOTSTRAP_PORT,     PL_MEMBER_BOOTSTRAP_ROOM,
        PL_MEMBER_KV_TRANSFER_PARAMS};
    const pl_head *h = &rq->x->head;
    int removed = 0;
    for (size_t i = 0; i < sizeof pins / sizeof *pins; i++)
        if (rq->scan->members[pins[i]].type != PL_JSON_ABSENT)
            removed += pl_edits_remove(&rq->edits, rq->x->body, rq->scan, pins[i]) == 0;
    for (int i = 0; i < h->headers_n; i++)
        removed += pl_pin_of(h->headers[i].name) != PL_PIN_NONE;
    if (removed)
        pl_count(&rq->loop->metrics.pins_removed, (uint64_t)removed);
}

void pl_pins_blank_nvext(pl_request *rq)
{
    static const pl_str names[] = {
        PL_STR_INIT("backend_instance_id"), PL_STR_INIT("dp_rank"),
        PL_STR_INIT("prefill_worker_id"),   PL_STR_INIT("decode_worker_id"),
        PL_STR_INIT("prefill_dp_rank"),
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        pl_member m = pl_object_find(rq->scan->members[PL_MEMBER_NVEXT].raw, names[i]);
        if (m.type != PL_JSON_ABSENT)
            pl_edits_add(&rq->edits, (size_t)(m.raw.p - rq->x->body.p), m.raw.n, PL_STR("null"));
    }
}

/* Instance and rank from the headers of those who may; stronger than nvext's. */
int pl_pins_read(pl_request *rq)
{
    const pl_head *h = &rq->x->head;
    double found[] = {-1, -1};
    for (int i = 0; rq->trusted && i < h->headers_n; i++) {
        pl_str name = h->headers[i].name, value = h->headers[i].value;
        pl_pin pin = pl_pin_of(name);
        double *to = &found[pin == PL_PIN_RANK];
        uint64_t v;
        if ((pin != PL_PIN_INSTANCE && pin != PL_PIN_RANK) || value.n == 0)
            continue;
        if (pl_str_u64(value, UINT32_MAX, &v) != 0 || (*to >= 0 && *to != (double)v)) {
            pl_relay_error(rq, 400, "invalid_value", -1,
                           "header %.*s must be one whole number from 0 to %u", PL_FMT(name),
                           UINT32_MAX);
            return PL_EINVALID;
        }
        *to = (double)v;
    }
    if (found[0] >= 0)
        rq->pin_instance = found[0];
    if (found[1] >= 0)
        rq->pin_rank = found[1];
    return 0;
}

/* --- the choice --- */

static pl_str named_worker(const pl_request *rq)
{
    return rq->trusted ? pl_head_find(&rq->x->head, PL_STR("x-perilune-worker"))
                       : (pl_str){NULL, 0};
}

bool pl_pins_any(const pl_request *rq)
{
    return rq->pin_instance >= 0 || rq->pin_rank >= 0 || named_worker(rq).p;
}

/* By name; or by nvext's numbers: an instance is an engine, named by its first worker's slot. */
static bool is_wanted(const pl_request *rq, pl_str name, const pl_worker_state *w)
{
    if (name.p)
        return pl_str_eq(pl_str_c(w->name), name);
    return (rq->pin_instance < 0 || w->engine->workers[0].slot == rq->pin_instance) &&
           (rq->pin_rank < 0 || w->rank == rq->pin_rank);
}

/* Of several that are meant (all ranks of an instance, a rank of any) the least busy one. */
bool pl_pinned(pl_request *rq, pl_decision *d)
{
    pl_str want = named_worker(rq);
    if (!pl_pins_any(rq))
        return false;
    *d = (pl_decision){.kind = PL_NO_WORKER, .shrink_max_tokens = -1, .reason = "pinned"};
    int32_t least = INT32_MAX;
    for (int i = 0; i < rq->ask.model->workers_n; i++) {
        pl_worker_state *w = rq->ask.model->workers[i];
        int32_t n = atomic_load_explicit(&w->inflight, memory_order_relaxed);
        if (n < least && is_wanted(rq, want, w) &&
            pl_engine_why(w->engine, &rq->loop->router->config.decider.breaker, pl_now_ns()) == 0) {
            d->kind = PL_DECIDED;
            d->worker = w;
            least = n;
        }
    }
    rq->ask.hits = NULL; /* of an earlier look */
    pl_decide_cached(&rq->ask, d);
    return true;
}

bool pl_pins_may_tell_rank(const pl_request *rq)
{
    const pl_worker_state *held = rq->ask.pin_must ? rq->ask.pin : NULL;
    return rq->trusted && !(held && held->engine->workers_n > 1);
}

/* That worker is the one that gets the load. */
void pl_pins_told_rank(pl_request *rq, pl_decision *d)
{
    const pl_member *m = rq->scan->members;
    pl_str header = pl_head_find(&rq->x->head, PL_STR("x-data-parallel-rank"));
    double rank;
    if (!pl_pins_may_tell_rank(rq))
        return;
    if (header.p ? pl_str_double(header, &rank) != 0
                 : pl_member_number(&m[PL_MEMBER_ROUTED_DP_RANK], &rank) != 0 &&
                       pl_member_number(&m[PL_MEMBER_DATA_PARALLEL_RANK], &rank) != 0)
        return;
    pl_engine *e = d->worker->engine;
    for (int i = 0; i < e->workers_n; i++) {
        if (e->workers[i].rank != rank || d->worker == &e->workers[i])
            continue;
        d->worker = &e->workers[i];
        pl_decide_cached(&rq->ask, d);
        return;
    }
}
