/* Faults on demand and the view of what the simulated engine has seen. Called by front.c,
 * front_session.c and front_admin.c on the front's thread.
 *
 * POST /sim/fault {"kind", "after_chunks", "probability", "count", "delay_ms", "health"} puts a
 * fault in force; GET tells what is and how often each kind has struck. One strikes inference
 * requests (and GET /health with "health": true), one opens and one closes of sessions; a new one
 * replaces the one that strikes the same. Each strikes with the given probability (1), at most
 * count times (0: no bound), then it is none again:
 *
 * - none: nothing is broken, whatever it was that struck
 * - refuse: the connection is closed without an answer
 * - reset_mid_stream: closed after after_chunks tokens of a stream; an answer that is not streamed
 *   breaks off in the middle of its body
 * - hang: never answered
 * - error_500: answered at once
 * - slow: delay_ms (real milliseconds) before each token of a stream, or before the answer
 * - open_fail: the session is not opened, and the answer says so
 * - open_slow: it is opened, and the answer comes after delay_ms
 * - open_lost: it is not opened, and there is no answer
 * - close_lost: the session stays, and there is no answer
 * - close_cut: the session stays, and the connection is closed
 *
 * GET /sim/requests: inflight (requests received and not over), running and waiting (prompts in the
 * engine), counts in all and by path: received = inflight + failed (answered with an error) + done
 * + gone (the client left) + aborted (by /abort_request) + cut (by a fault); every request under
 * way; the last 1,024 that are over, with how they ended and their tokens. */
#include "engine/front_call.h"

#include <string.h>

static const char *const names[PL_FAULT_COUNT] = {
    "none",      "refuse",    "reset_mid_stream", "hang",       "error_500", "slow",
    "open_fail", "open_slow", "open_lost",        "close_lost", "close_cut"};
static const char *const ends[PL_CALL_ENDS] = {"done", "gone", "aborted", "cut"};

static int target_of(int way)
{
    return way >= PL_FAULT_CLOSE_LOST  ? PL_FAULT_CLOSES
           : way >= PL_FAULT_OPEN_FAIL ? PL_FAULT_OPENS
                                       : PL_FAULT_REQUESTS;
}

int pl_fault_draw(pl_front *f, int target)
{
    pl_front_fault *v = &f->fault[target];
    if (v->way == PL_FAULT_NONE || v->left == 0 || pl_rng_unit(&v->rng) >= v->probability)
        return PL_FAULT_NONE;
    int way = v->way;
    f->hit[way]++;
    if (v->left > 0 && --v->left == 0)
        v->way = PL_FAULT_NONE;
    return way;
}

static json_t *in_force(const pl_front_fault *v)
{
    return json_pack("{s:s,s:i,s:f,s:I,s:I,s:b}", "kind", names[v->way], "after_chunks",
                     v->after_chunks, "probability", v->probability, "count",
                     (json_int_t)(v->left > 0 ? v->left : 0), "delay_ms", (json_int_t)v->delay_ms,
                     "health", v->health);
}

json_t *pl_fault_state(const pl_front *f)
{
    json_t *hit = json_object(), *state = in_force(&f->fault[PL_FAULT_REQUESTS]);
    for (int i = 1; i < PL_FAULT_COUNT; i++)
        json_object_set_new(hit, names[i], json_integer((json_int_t)f->hit[i]));
    json_object_set_new(state, "open", in_force(&f->fault[PL_FAULT_OPENS]));
    json_object_set_new(state, "close", in_force(&f->fault[PL_FAULT_CLOSES]));
    json_object_set_new(state, "hits", hit);
    return state;
}

static const char *set_fault(pl_front *f, const json_t *body)
{
    static const char *const known[] = {"kind",     "after_chunks", "probability", "count",
                                        "delay_ms", "health",       NULL};
    const char *kind = json_string_value(json_object_get(body, "kind"));
    int way = 0;
    if (!pl_front_only(body, known))
        return "members are kind, after_chunks, probability, count, delay_ms and health";
    while (kind && way < PL_FAULT_COUNT && strcmp(kind, names[way]) != 0)
        way++;
    if (!kind || way == PL_FAULT_COUNT)
        return "kind must be none, refuse, reset_mid_stream, hang, error_500, slow, open_fail, "
               "open_slow, open_lost, close_lost or close_cut";
    pl_front_fault v = f->fault[target_of(way)];
    v.way = way;
    v.after_chunks = 0;
    v.probability = 1;
    v.left = -1;
    v.delay_ms = 100;
    const json_t *n = json_object_get(body, "health");
    v.health = json_is_true(n);
    if (n && !json_is_boolean(n))
        return "health must be true or false";
    if ((n = json_object_get(body, "probability"))) {
        v.probability = json_number_value(n);
        if (!json_is_number(n) || !(v.probability >= 0 && v.probability <= 1))
            return "probability must be a number from 0 to 1";
    }
    static const char *const counts[] = {"after_chunks", "count", "delay_ms"};
    for (int i = 0; i < 3; i++) {
        if (!(n = json_object_get(body, counts[i])))
            continue;
        json_int_t value = json_integer_value(n);
        if (!json_is_integer(n) || value < 0 || value > 1000000)
            return "after_chunks, count and delay_ms must be integers from 0 to 1000000";
        if (i == 0)
            v.after_chunks = (int)value;
        else if (i == 1)
            v.left = value ? value : -1;
        else
            v.delay_ms = (uint64_t)value;
    }
    for (int i = 0; way == PL_FAULT_NONE && i < PL_FAULT_TARGETS; i++)
        f->fault[i].way = PL_FAULT_NONE;
    f->fault[target_of(way)] = v;
    return NULL;
}

void pl_fault_control(pl_front *f, pl_exchange *x)
{
    if (x->head.method == PL_POST) {
        json_t *body = json_loadb(x->body.p ? x->body.p : "", x->body.n, 0, NULL);
        const char *wrong = json_is_object(body) ? set_fault(f, body) : "a JSON object is needed";
        json_decref(body);
        if (wrong) {
            pl_front_error(f, x, 400, "%s", wrong);
            return;
        }
    }
    pl_front_send(x, 200, pl_fault_state(f));
}

static json_t *under_way(const pl_front_call *c)
{
    int prompt = 0, cached = 0, output = 0;
    bool running = false;
    for (int i = 0; i < c->parts_n; i++) {
        const pl_part *p = &c->parts[i];
        prompt += p->prompt;
        cached += p->req ? pl_sim_cached_tokens(p->req) : p->cached;
        output += p->ready;
        running |= p->req && pl_sim_is_running(p->req);
    }
    const char *state = c->fault == PL_FAULT_HANG     ? "hanging"
                        : c->parts_done == c->parts_n ? "answering"
                        : running                     ? "running"
                                                      : "waiting";
    return json_pack("{s:o,s:s,s:i,s:o,s:s,s:b,s:i,s:i,s:i}", "id", pl_front_string(c->request_id),
                     "path", pl_front_paths[c->path].p, "dp_rank", c->rank, "session",
                     pl_front_string(c->session), "state", state, "stream", c->stream,
                     "prompt_tokens", prompt, "cached_tokens", cached, "output_tokens", output);
}

static json_t *counts_of(uint64_t received, uint64_t failed, const uint64_t over[PL_CALL_ENDS])
{
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I}", "received", (json_int_t)received, "failed",
                     (json_int_t)failed, ends[PL_CALL_DONE], (json_int_t)over[PL_CALL_DONE],
                     ends[PL_CALL_GONE], (json_int_t)over[PL_CALL_GONE], ends[PL_CALL_ABORTED],
                     (json_int_t)over[PL_CALL_ABORTED], ends[PL_CALL_CUT],
                     (json_int_t)over[PL_CALL_CUT]);
}

json_t *pl_front_requests(const pl_front *f)
{
    json_t *paths = json_object(), *calls = json_array(), *last = json_array();
    uint64_t received = 0, failed = 0, over[PL_CALL_ENDS] = {0};
    for (int i = 0; i < PL_FRONT_PATHS; i++) {
        received += f->count[i].received;
        failed += f->count[i].failed;
        for (int k = 0; k < PL_CALL_ENDS; k++)
            over[k] += f->count[i].over[k];
        if (f->count[i].received)
            json_object_set_new(
                paths, pl_front_paths[i].p,
                counts_of(f->count[i].received, f->count[i].failed, f->count[i].over));
    }
    for (const pl_front_call *c = f->calls; c; c = c->next)
        json_array_append_new(calls, under_way(c));
    uint64_t first = f->records_n > PL_FRONT_RECORDS ? f->records_n - PL_FRONT_RECORDS : 0;
    for (uint64_t i = first; i < f->records_n; i++) {
        const pl_front_record *r = &f->records[i % PL_FRONT_RECORDS];
        json_array_append_new(
            last,
            json_pack("{s:o,s:s,s:i,s:o,s:s,s:i,s:i,s:i}", "id", pl_front_string(pl_str_c(r->id)),
                      "path", pl_front_paths[r->path].p, "dp_rank", r->rank, "session",
                      pl_front_string(pl_str_c(r->session)), "end", ends[r->end], "prompt_tokens",
                      r->prompt, "cached_tokens", r->cached, "output_tokens", r->output));
    }
    pl_sim_stats st;
    pl_front_stats(f, &st);
    return json_pack("{s:i,s:i,s:i,s:o,s:o,s:o,s:o,s:o}", "inflight", f->calls_n, "running",
                     st.running, "waiting", st.waiting, "counts", counts_of(received, failed, over),
                     "paths", paths, "under_way", calls, "over", last, "fault", pl_fault_state(f));
}
