/* Sessions at the simulated engine's HTTP front: opening and closing them, the turns that requests
 * ask for, and the view of what each holds. Called by front_admin.c (paths) and front_parse.c
 * (turns) on the front's thread; the sessions themselves are the engine's (sim_session.c).
 *
 * A turn that the engine refuses ends before it begins, in the words of SGLang. On /generate the
 * answer is 200 with finish_reason {"type": "abort", "message"}, prompt_tokens 1 and cached_tokens
 * 0 (streamed: one such event and [DONE]); on the OpenAI paths it is 400 with the message, streamed
 * or not.
 *
 * Chat: the first turn is rendered as any chat. The mark that ends the answer is added to the
 * conversation when the turn ends, and a later turn adds its messages and the assistant's mark
 * (its tools and system prompt are those of the first). So a session's tokens equal those of the
 * whole conversation sent at once, at every turn: after it, those of all messages with the answer
 * (/tokenize with add_generation_prompt false). The last token of the answer and the end mark are
 * computed by the next turn.
 *
 * GET /sim/sessions: how many are open, what they hold, counts, and for each: id, dp_rank (each
 * session is open at every rank, with turns only where they were sent; and counted there),
 * streaming, timeout, capacity_of_str_len, inflight, closing (when its turn ends), turns (that
 * ended well), tokens (of the conversation), kv_tokens (of them, computed and held), held_tokens
 * (of the pool, in whole blocks, beside the cache), prefix_tokens (locked in the cache),
 * idle_seconds (since its last turn began). */
#include "engine/front_call.h"

#include <math.h>

#include "base/err.h"

static pl_str text_of(const json_t *v)
{
    return json_is_string(v) ? (pl_str){json_string_value(v), json_string_length(v)}
                             : (pl_str){NULL, 0};
}

static bool absent(const json_t *v)
{
    return !v || json_is_null(v);
}

/* As SGLang answers what fails here. */
static void failed(pl_exchange *x, const char *message)
{
    pl_front_send(x, 400, json_pack("{s:{s:s}}", "error", "message", message));
}

static json_t *load_body(pl_exchange *x)
{
    json_t *body = json_loadb(x->body.p ? x->body.p : "", x->body.n, 0, NULL);
    if (json_is_object(body))
        return body;
    json_decref(body);
    failed(x, "The body is not a JSON object");
    return NULL;
}

/* --- open and close --- */

/* An answer that comes later. */
typedef struct late {
    pl_front_user user;
    pl_front *front;
    pl_exchange *x;
    pl_timer timer;
    pl_str body;
} late;

static void late_gone(pl_front_user *u)
{
    late *l = (late *)u;
    pl_wheel_cancel(&l->front->wheel, &l->timer);
}

static void late_due(pl_timer *t)
{
    late *l = (late *)(void *)((char *)t - offsetof(late, timer));
    l->x->user = NULL;
    pl_front_json(l->x, 200, pl_head_find(&l->x->head, PL_STR("x-request-id")), l->body);
}

static void answer_open(pl_front *f, pl_exchange *x, pl_str id, int fault)
{
    pl_str body = pl_front_quote(&x->arena, id);
    late *l = fault == PL_FAULT_OPEN_SLOW ? pl_arena_zalloc(&x->arena, sizeof *l) : NULL;
    if (!l || !body.p) {
        pl_front_json(x, body.p ? 200 : 500, pl_head_find(&x->head, PL_STR("x-request-id")), body);
        return;
    }
    l->user = (pl_front_user){late_gone, NULL};
    l->front = f;
    l->x = x;
    l->body = body;
    x->user = l;
    pl_wheel_arm(&f->wheel, &l->timer, f->fault[PL_FAULT_OPENS].delay_ms, late_due);
}

/* What is wrong with the body; NULL: nothing. The session's id points into the body. */
static const char *read_open(pl_front *f, const json_t *body, pl_sim_session *s)
{
    const json_t *capacity = json_object_get(body, "capacity_of_str_len");
    const json_t *id = json_object_get(body, "session_id");
    const json_t *streaming = json_object_get(body, "streaming");
    const json_t *timeout = json_object_get(body, "timeout");
    if (!capacity)
        return "capacity_of_str_len: Field required";
    if (!json_is_integer(capacity) || json_integer_value(capacity) < 0)
        return "capacity_of_str_len must be an integer, 0 or more";
    if (!absent(id) &&
        (!json_is_string(id) || !json_string_length(id) || json_string_length(id) > 1024))
        return "session_id must be a text of 1 to 1024 bytes";
    if (!absent(streaming) && !json_is_boolean(streaming))
        return "streaming must be true or false";
    if (!absent(timeout) && (!json_is_number(timeout) || json_number_value(timeout) < 0))
        return "timeout must be a number of seconds, 0 or more";
    double seconds = absent(timeout) ? -1 : json_number_value(timeout);
    *s = (pl_sim_session){.id = text_of(id),
                          .streaming = json_is_true(streaming),
                          .timeout_us = seconds < 0     ? -1
                                        : seconds < 1e9 ? (int64_t)(seconds * 1e6)
                                                        : 1000000000000000,
                          .capacity = json_integer_value(capacity)};
    if (s->streaming && !f->o->streaming_sessions)
        return "Streaming sessions are disabled. Please relaunch with --enable-streaming-session.";
    return NULL;
}

/* Every rank opens it, as SGLang's do; a turn is that of the rank it goes to. */
static int open_everywhere(pl_front *f, const pl_sim_session *s)
{
    int rc = 0, r = 0;
    while (r < f->ranks_n && (rc = pl_sim_open(f->rank[r].sim, pl_front_now_us(f), s)) == 0)
        r++;
    for (; rc != 0 && r > 0; r--)
        pl_sim_close(f->rank[r - 1].sim, pl_front_now_us(f), s->id);
    return rc;
}

void pl_front_open_session(pl_front *f, pl_exchange *x)
{
    static const char *const taken =
        "Failed to open the session. Check if a session with the same id is still open.";
    int fault = pl_fault_draw(f, PL_FAULT_OPENS);
    if (fault == PL_FAULT_OPEN_LOST)
        return; /* until the client leaves */
    if (fault == PL_FAULT_OPEN_FAIL) {
        failed(x, taken);
        return;
    }
    json_t *body = load_body(x);
    if (!body)
        return;
    pl_sim_session s;
    const char *wrong = read_open(f, body, &s);
    int rc = PL_EINVALID;
    if (!wrong) {
        if (!s.id.n) {
            pl_rng r = {f->o->seed ^ ++f->next_id};
            s.id = pl_arena_printf(&x->arena, "%016llx%016llx", (unsigned long long)pl_rng_next(&r),
                                   (unsigned long long)pl_rng_next(&r));
        }
        rc = s.id.p ? open_everywhere(f, &s) : PL_ENOMEM;
        wrong = rc == PL_EEXISTS  ? taken
                : rc == PL_ELIMIT ? "Failed to open the session: too many are open."
                                  : pl_strerror(rc);
    }
    if (rc == 0)
        answer_open(f, x, s.id, fault);
    else
        failed(x, wrong);
    json_decref(body);
    pl_front_arm(f);
}

void pl_front_close_session(pl_front *f, pl_exchange *x)
{
    switch (pl_fault_draw(f, PL_FAULT_CLOSES)) {
    case PL_FAULT_CLOSE_LOST:
        return; /* until the client leaves */
    case PL_FAULT_CLOSE_CUT:
        pl_exchange_abort(x);
        return;
    default:
        break;
    }
    json_t *body = load_body(x);
    if (!body)
        return;
    const json_t *id = json_object_get(body, "session_id");
    if (json_is_string(id)) {
        for (int r = 0; r < f->ranks_n; r++)
            pl_sim_close(f->rank[r].sim, pl_front_now_us(f), text_of(id));
        pl_exchange_respond(x, 200, NULL, 0, (pl_str){NULL, 0});
        pl_front_arm(f);
    } else {
        failed(x, "session_id: a text is required");
    }
    json_decref(body);
}

/* --- turns --- */

static int read_turn(const json_t *params, pl_sim_turn *turn, pl_errbuf *eb)
{
    const json_t *offset = json_object_get(params, "offset");
    const json_t *rid = json_object_get(params, "rid");
    if (!json_is_string(json_object_get(params, "id")))
        return pl_fail(eb, PL_EINVALID, "session_params must be an object with a text as its id");
    if (!absent(rid) && !json_is_string(rid))
        return pl_fail(eb, PL_EINVALID, "session_params.rid must be a text");
    if (!absent(offset) && !json_is_integer(offset))
        return pl_fail(eb, PL_EINVALID, "session_params.offset must be an integer");
    *turn = (pl_sim_turn){.id = text_of(json_object_get(params, "id")),
                          .after = text_of(rid),
                          .replace = json_is_true(json_object_get(params, "replace")),
                          .drop_previous_output =
                              json_is_true(json_object_get(params, "drop_previous_output")),
                          .offset = json_integer_value(offset)};
    return 0;
}

static int remember(pl_front_call *c, pl_str session)
{
    c->session = pl_arena_str(&c->x->arena, session);
    return c->session.p || !session.n ? 0 : PL_ENOMEM;
}

int pl_front_call_session(pl_front_call *c, const json_t *body, pl_errbuf *eb)
{
    pl_front *f = c->front;
    bool takes = c->api == PL_API_CHAT || c->api == PL_API_COMPLETIONS || c->api == PL_API_GENERATE;
    if (f->vllm || !takes)
        return 0;
    const json_t *tag = json_object_get(body, "session_id");
    const json_t *params = json_object_get(body, "session_params");
    bool turns =
        !absent(params) && !(json_is_object(params) && absent(json_object_get(params, "id")));
    if (!absent(tag) && !absent(params))
        return pl_fail(eb, PL_EINVALID, "session_id and session_params cannot both be set.");
    if (!absent(tag) && !json_is_string(tag))
        return pl_fail(eb, PL_EINVALID, "session_id must be a text");
    if (!turns)
        return remember(c, text_of(tag));
    pl_sim_turn turn;
    int rc = read_turn(params, &turn, eb);
    if (rc == 0)
        rc = remember(c, turn.id);
    if (rc != 0)
        return rc;
    const json_t *prompt = json_object_get(body, c->api == PL_API_COMPLETIONS         ? "prompt"
                                                 : json_object_get(body, "input_ids") ? "input_ids"
                                                                                      : "text");
    bool many = json_array_size(prompt) > 1 && !json_is_integer(json_array_get(prompt, 0));
    if (c->choices > 1 || (c->api != PL_API_CHAT && many))
        return pl_fail(eb, PL_EINVALID, "a turn of a session is one prompt and one choice");
    if (f->o->streaming_sessions)
        c->slot = pl_sim_turn_slot(pl_front_sim(c), pl_front_now_us(f), &turn, eb);
    else
        pl_fail(eb, PL_EINVALID,
                "Streaming sessions are disabled. Please relaunch with "
                "--enable-streaming-session.");
    c->turn_refused = !c->slot;
    return c->slot ? 0 : PL_EINVALID;
}

void pl_front_call_refuse_turn(pl_front_call *c, const char *message)
{
    pl_front *f = c->front;
    pl_exchange *x = c->x;
    f->turns_refused++;
    if (c->api != PL_API_GENERATE) {
        pl_front_call_refuse(c, 400, message);
        return;
    }
    json_t *v = json_pack("{s:s,s:[],s:{s:o,s:{s:s,s:s,s:i,s:s},s:i,s:i,s:i,s:f}}", "text", "",
                          "output_ids", "meta_info", "id", pl_front_string(c->id), "finish_reason",
                          "type", "abort", "message", message, "status_code", 400, "err_type",
                          "BadRequestError", "prompt_tokens", 1, "completion_tokens", 0,
                          "cached_tokens", 0, "e2e_latency", 0.0);
    pl_front_call_forget(c);
    x->user = NULL;
    if (!c->stream) {
        pl_front_send(x, 200, v);
        return;
    }
    char *text = v ? json_dumps(v, JSON_COMPACT) : NULL;
    json_decref(v);
    pl_header h[2] = {{PL_STR("content-type"), PL_STR("text/event-stream; charset=utf-8")},
                      {PL_STR("x-request-id"), c->request_id}};
    pl_str slices[3] = {PL_STR("data: "), text ? pl_str_c(text) : PL_STR("{}"),
                        PL_STR("\n\ndata: [DONE]\n\n")};
    pl_exchange_start(x, 200, h, 2, UINT64_MAX);
    pl_exchange_write(x, slices, 3);
    pl_exchange_end(x);
    free(text);
}

/* --- the view --- */

typedef struct view {
    json_t *list;
    int64_t now_us;
    int rank;
} view;

static void add_slot(void *user, const pl_sim_slot_info *i)
{
    view *v = user;
    json_t *timeout =
        i->session.timeout_us < 0 ? json_null() : json_real((double)i->session.timeout_us * 1e-6);
    json_array_append_new(
        v->list,
        json_pack("{s:o,s:i,s:b,s:o,s:I,s:b,s:b,s:i,s:i,s:i,s:I,s:I,s:f}", "id",
                  pl_front_string(i->session.id), "dp_rank", v->rank, "streaming",
                  i->session.streaming, "timeout", timeout, "capacity_of_str_len",
                  (json_int_t)i->session.capacity, "inflight", i->inflight, "closing", i->closing,
                  "turns", i->turns, "tokens", i->tokens, "kv_tokens", i->kv_tokens, "held_tokens",
                  (json_int_t)i->held_tokens, "prefix_tokens", (json_int_t)i->prefix_tokens,
                  "idle_seconds", (double)(v->now_us - i->active_us) * 1e-6));
}

void pl_front_sessions(pl_front *f, pl_exchange *x)
{
    pl_sim_stats st;
    view v = {json_array(), pl_front_now_us(f), 0};
    pl_front_stats(f, &st);
    for (; v.rank < f->ranks_n; v.rank++)
        pl_sim_each_slot(f->rank[v.rank].sim, add_slot, &v);
    pl_front_send(x, 200,
                  json_pack("{s:i,s:i,s:I,s:b,s:{s:I,s:I,s:I,s:I,s:I},s:o}", "open", st.sessions,
                            "streaming", st.streaming_sessions, "held_tokens",
                            (json_int_t)st.held_tokens, "stalled", st.stalled, "counts", "opened",
                            (json_int_t)st.opened, "closed", (json_int_t)st.closed, "timed_out",
                            (json_int_t)st.timed_out, "turns", (json_int_t)st.turns,
                            "turns_refused", (json_int_t)f->turns_refused, "sessions", v.list));
}
