/* Intake: what is known of a request before anything is decided. on_head checks path, method and
 * key, so that a refused request never uploads its body; then the body is scanned in place and the
 * request's record is filled. Called by proxy.c on the loop's thread. Everything that points into
 * the exchange lives as long as it does. */
#include <math.h>
#include <stdio.h>

#include "http/json.h"
#include "http/request.h"

/* --- head --- */

static bool path_is_forwarded(const pl_loop *l, pl_str path)
{
    bool known;
    pl_api_of_path(path, &known);
    const pl_config *c = &l->router->config;
    for (int i = 0; i < c->extra_paths_n && !known; i++)
        known = pl_str_eq(c->extra_paths[i], path);
    return known;
}

static bool path_is_page(const pl_loop *l, pl_str path)
{
    return pl_str_eq(path, PL_STR("/health")) || pl_str_eq(path, PL_STR("/readyz")) ||
           pl_str_eq(path, PL_STR("/v1/models")) || pl_str_starts(path, PL_STR("/v1/models/")) ||
           (pl_str_eq(path, PL_STR("/metrics")) && l->router->config.metrics_public);
}

/* The tenant a key stands for. False: keys are configured and none matches. Every key is compared,
 * so that the time tells nothing. */
static bool authorize(const pl_loop *l, const pl_exchange *x, pl_str *tenant)
{
    const pl_config *c = &l->router->config;
    *tenant = PL_STR("default");
    if (c->api_keys_n == 0)
        return true;
    pl_str key = pl_head_find(&x->head, PL_STR("authorization"));
    pl_str scheme = PL_STR("Bearer ");
    if (key.p && key.n > scheme.n && pl_str_ieq((pl_str){key.p, scheme.n}, scheme))
        key = pl_str_trim((pl_str){key.p + scheme.n, key.n - scheme.n});
    else
        key = pl_head_find(&x->head, PL_STR("x-api-key"));
    bool found = false;
    for (int i = 0; i < c->api_keys_n; i++)
        if (key.p && pl_str_eq_secret(key, c->api_keys[i].key)) {
            *tenant = c->api_keys[i].tenant;
            found = true;
        }
    return found;
}

static void answer_405(pl_loop *l, pl_exchange *x, pl_str allow)
{
    const pl_header h = {PL_STR("allow"), allow};
    char message[160];
    snprintf(message, sizeof message, "%.*s is not for this method; allowed: %.*s",
             PL_FMT(x->head.path), PL_FMT(allow));
    pl_answer_error(l, x, 405, "method_not_allowed", -1, &h, 1, message);
}

/* What the router cannot read it cannot route. */
static bool encoded(const pl_head *h)
{
    pl_str coding = pl_head_find(h, PL_STR("content-encoding"));
    return coding.n && !pl_str_ieq(coding, PL_STR("identity"));
}

bool pl_intake_head(pl_loop *l, pl_exchange *x)
{
    const pl_head *h = &x->head;
    bool forwarded = path_is_forwarded(l, h->path), page = path_is_page(l, h->path);
    char message[512];
    if (h->method == PL_OPTIONS) {
        pl_header allow = {PL_STR("allow"), page        ? PL_STR("GET, HEAD, OPTIONS")
                                            : forwarded ? PL_STR("POST, OPTIONS")
                                                        : PL_STR("GET, HEAD, POST, OPTIONS")};
        pl_count_status(l, 204);
        pl_exchange_respond(x, 204, &allow, 1, (pl_str){NULL, 0});
        return false;
    }
    if (page) {
        if (h->method != PL_GET && h->method != PL_HEAD) {
            answer_405(l, x, PL_STR("GET, HEAD, OPTIONS"));
            return false;
        }
        pl_str tenant;
        if (pl_str_starts(h->path, PL_STR("/v1/")) && !authorize(l, x, &tenant))
            goto unauthorized;
        return true;
    }
    if (!forwarded) {
        const char *hint = pl_api_control_hint(h->path);
        snprintf(message, sizeof message, "%.*s: %s", PL_FMT(h->path),
                 hint ? hint : "no such path here; `paths` in the configuration adds some");
        pl_answer_error(l, x, 404, "not_found", -1, NULL, 0, message);
        return false;
    }
    if (h->method != PL_POST) {
        answer_405(l, x, PL_STR("POST, OPTIONS"));
        return false;
    }
    pl_str tenant;
    if (!authorize(l, x, &tenant))
        goto unauthorized;
    if (encoded(h)) {
        const pl_header accept = {PL_STR("accept-encoding"), PL_STR("identity")};
        pl_answer_error(l, x, 415, "unsupported_encoding", -1, &accept, 1,
                        "bodies of requests are read as they are: send it without a "
                        "Content-Encoding");
        return false;
    }
    return true;

unauthorized:
    pl_count(&l->metrics.unauthorized, 1);
    const pl_header challenge = {PL_STR("www-authenticate"), PL_STR("Bearer")};
    pl_answer_error(l, x, 401, "invalid_api_key", -1, &challenge, 1,
                    "a valid API key is needed: Authorization: Bearer KEY (or x-api-key)");
    return false;
}

/* --- body --- */

static bool valid_id(pl_str id, size_t max)
{
    if (!id.p || id.n == 0 || id.n > max)
        return false;
    for (size_t i = 0; i < id.n; i++)
        if ((unsigned char)id.p[i] <= 0x20 || (unsigned char)id.p[i] >= 0x7f)
            return false;
    return true;
}

static pl_str make_id(pl_request *rq)
{
    char *p = pl_arena_alloc(&rq->x->arena, 32);
    if (!p)
        return PL_STR("-");
    for (int half = 0; half < 2; half++) {
        uint64_t bits = pl_rng_next(&rq->loop->rng);
        for (int i = 0; i < 16; i++, bits >>= 4)
            p[half * 16 + i] = "0123456789abcdef"[bits & 15];
    }
    return (pl_str){p, 32};
}

/* An optional number among the members: *out stays when it is absent. */
static int number(pl_request *rq, pl_member_id id, const char *name, double min, double max,
                  double *out)
{
    double v;
    int rc = pl_member_number(&rq->scan->members[id], &v);
    if (rc == PL_ENOTFOUND)
        return 0;
    if (rc != 0 || !(v >= min && v <= max)) {
        pl_relay_error(rq, 400, "invalid_value", -1, "'%s' must be a number from %.0f to %.0f",
                       name, min, max);
        return PL_EINVALID;
    }
    *out = v;
    return 0;
}

/* What the client asks for as its output limit, over the APIs' spellings; -1 when nothing. */
static int read_limits(pl_request *rq)
{
    double limit = -1, choices = 1, priority = 0;
    if (number(rq, PL_MEMBER_MAX_TOKENS, "max_tokens", -1, 1e9, &limit) != 0 ||
        number(rq, PL_MEMBER_MAX_OUTPUT_TOKENS, "max_output_tokens", -1, 1e9, &limit) != 0 ||
        number(rq, PL_MEMBER_MAX_COMPLETION_TOKENS, "max_completion_tokens", -1, 1e9, &limit) !=
            0 ||
        number(rq, PL_MEMBER_PRIORITY, "priority", -2147483648.0, 2147483647.0, &priority) != 0)
        return PL_EINVALID;
    if (pl_member_number(&rq->scan->members[PL_MEMBER_N], &choices) != 0 ||
        !(choices >= 1 && choices <= 1e6))
        choices = 1; /* the engine judges it */
    const pl_member *sampling = &rq->scan->members[PL_MEMBER_SAMPLING_PARAMS];
    if (limit < 0 && sampling->type == PL_JSON_OBJECT) {
        pl_member m = pl_object_find(sampling->raw, PL_STR("max_new_tokens"));
        double v;
        if (pl_member_number(&m, &v) == 0)
            limit = v;
    }
    rq->ask.req.max_tokens = limit;
    rq->ask.req.choices = (int32_t)choices;
    rq->ask.req.priority = (int32_t)priority;
    return 0;
}

static pl_str known_models(pl_request *rq)
{
    pl_buf b = {0};
    for (int i = 0; i < rq->view->models_n && b.n < 400; i++)
        if (pl_buf_addf(&b, "%s'%.*s'", i ? ", " : "", PL_FMT(rq->view->models[i].id)) != 0)
            break;
    pl_str s = pl_arena_str(&rq->x->arena, pl_buf_str(&b));
    pl_buf_free(&b);
    return s.p ? s : PL_STR("");
}

/* The answer to a model that nobody serves, or knows yet. */
static int unknown_model(pl_request *rq, pl_str id)
{
    pl_count(&rq->loop->metrics.unknown_model, 1);
    if (rq->view->models_n == 0)
        pl_relay_error(rq, 503, "no_models", 2,
                       "no engine has told its models yet (%d engines configured)",
                       rq->view->engines_n);
    else
        pl_relay_error(rq, 404, "model_not_found", -1,
                       "the model '%.*s' does not exist here; known: %.*s",
                       (int)(id.n < 200 ? id.n : 200), id.p ? id.p : "", PL_FMT(known_models(rq)));
    return PL_ENOTFOUND;
}

/* Engines that serve several models need to be told which one was meant. */
static void name_model(pl_request *rq, pl_str id)
{
    pl_str raw = pl_json_quoted(&rq->x->arena, id);
    if (raw.p)
        pl_edits_set(&rq->edits, &rq->x->arena, rq->x->body, rq->scan, PL_MEMBER_MODEL, raw);
}

static int find_model(pl_request *rq)
{
    const pl_member *m = &rq->scan->members[PL_MEMBER_MODEL];
    bool absent = m->type == PL_JSON_ABSENT || m->type == PL_JSON_NULL;
    if (!absent && m->type != PL_JSON_STRING) {
        pl_relay_error(rq, 400, "invalid_value", -1, "'model' must be a string");
        return PL_EINVALID;
    }
    pl_str id =
        absent ? rq->loop->router->config.default_model : pl_member_string(&rq->x->arena, m);
    if (absent && (rq->ask.model = pl_view_only_model(rq->view)) != NULL)
        return 0;
    if (absent && id.n == 0 && rq->view->models_n > 0) {
        pl_relay_error(rq, 400, "model_required", -1, "'model' is missing; known: %.*s",
                       PL_FMT(known_models(rq)));
        return PL_EINVALID;
    }
    rq->ask.model = id.p ? pl_view_model(rq->view, id) : NULL;
    if (!rq->ask.model)
        return unknown_model(rq, id);
    if (absent)
        name_model(rq, id);
    return 0;
}

/* --- usage --- */

/* Usage is what done is told. Chat and completion streams carry it only on demand: the router
 * demands it and keeps the extra chunk from a client that did not. */
void pl_intake_usage(pl_request *rq)
{
    int mode = rq->loop->router->config.usage;
    bool known = pl_decider_wants_done(rq->loop->decider) || pl_prompt_wants_usage(rq) ||
                 pl_session_backed(rq);
    rq->want_usage = mode == 2 || (mode == 1 && known);
    if (!rq->want_usage || !rq->ask.req.stream ||
        (rq->api != PL_API_CHAT && rq->api != PL_API_COMPLETIONS))
        return;
    const pl_member *options = &rq->scan->members[PL_MEMBER_STREAM_OPTIONS];
    pl_str body = rq->x->body;
    int rc;
    if (options->type == PL_JSON_OBJECT) {
        pl_member include = pl_object_find(options->raw, PL_STR("include_usage"));
        if (pl_object_find(options->raw, PL_STR("continuous_usage_stats")).type == PL_JSON_TRUE)
            return; /* usage would show in every chunk, not in one that can be kept back */
        if (include.type == PL_JSON_TRUE)
            return;
        if (include.type != PL_JSON_ABSENT) {
            rc = pl_edits_add(&rq->edits, (size_t)(include.raw.p - body.p), include.raw.n,
                              PL_STR("true"));
        } else {
            bool empty = pl_object_is_empty(options->raw);
            rc = pl_edits_add(&rq->edits, (size_t)(options->raw.p - body.p) + 1, 0,
                              empty ? PL_STR("\"include_usage\":true")
                                    : PL_STR("\"include_usage\":true,"));
        }
    } else if (options->type == PL_JSON_ABSENT || options->type == PL_JSON_NULL) {
        rc = pl_edits_set(&rq->edits, &rq->x->arena, body, rq->scan, PL_MEMBER_STREAM_OPTIONS,
                          PL_STR("{\"include_usage\":true}"));
    } else {
        return; /* the engine judges it */
    }
    rq->swallow_usage = rc == 0;
}

pl_str pl_intake_kept_string(pl_request *rq, pl_member_id id)
{
    const pl_member *m = &rq->scan->members[id];
    pl_str s = pl_member_string(&rq->x->arena, m);
    return s.p && !m->escaped ? pl_arena_str(&rq->x->arena, s) : s;
}

int pl_intake_body(pl_request *rq)
{
    pl_loop *l = rq->loop;
    pl_exchange *x = rq->x;
    const pl_config *c = &l->router->config;
    pl_str id = pl_head_find(&x->head, PL_STR("x-request-id"));
    rq->id = valid_id(id, c->max_id_bytes) ? id : make_id(rq);
    rq->trusted =
        c->trusted_n && pl_cidr_match(c->trusted, c->trusted_n, (const struct sockaddr *)&x->peer);
    bool known;
    rq->api = pl_api_of_path(x->head.path, &known);

    pl_scan scan;
    int rc = pl_scan_body(x->body, c->max_json_depth, &scan);
    if (rc != 0) {
        pl_count(&l->metrics.bad_body, 1);
        pl_relay_error(rq, 400, "invalid_json", -1, "the body is not usable: %s at byte %zu",
                       x->body.n ? scan.error : "it is empty", scan.error_at);
        return rc;
    }
    /* kept as long as the stream, without the room that it did not take */
    rq->scan = pl_arena_alloc(&x->arena, pl_scan_bytes(&scan));
    if (!rq->scan) {
        pl_relay_error(rq, 503, "out_of_memory", 1, "the router is out of memory");
        return PL_ENOMEM;
    }
    memcpy(rq->scan, &scan, pl_scan_bytes(&scan));

    struct pl_req *req = &rq->ask.req;
    req->arrival_seconds = (double)x->head_at_ns / 1e9;
    req->prompt_tokens = pl_scan_prompt_tokens(rq->scan);
    req->body_bytes = (double)x->body.n;
    req->api = (int32_t)rq->api;
    const pl_member *stream = &rq->scan->members[PL_MEMBER_STREAM];
    req->stream = stream->type == PL_JSON_TRUE;
    if (stream->type != PL_JSON_ABSENT && stream->type != PL_JSON_NULL &&
        stream->type != PL_JSON_TRUE && stream->type != PL_JSON_FALSE) {
        pl_relay_error(rq, 400, "invalid_value", -1, "'stream' must be true or false");
        return PL_EINVALID;
    }
    if (read_limits(rq) != 0 || (rq->api != PL_API_CLOSE_SESSION && find_model(rq) != 0))
        return PL_EINVALID;

    pl_str tenant;
    authorize(l, x, &tenant);
    rq->ask.strings = (pl_request_view){
        .model = rq->ask.model ? rq->ask.model->id : PL_STR(""),
        .tenant = tenant,
        .path = x->head.path,
        .id = rq->id,
        .find_header = pl_intake_find_header,
        .find_member = pl_intake_find_member,
        .ctx = rq,
        .seed = pl_rng_next(&l->rng),
    };
    pl_pins_remove(rq);
    int read = pl_session_read(rq);
    if (read == 0)
        read = pl_pins_read(rq);
    if (read != 0)
        return read;
    pl_prompt_of(rq);
    if (!rq->session)
        pl_intake_usage(rq);
    return 0;
}

pl_str pl_intake_find_header(void *ctx, pl_str name)
{
    const pl_request *rq = ctx;
    /* credentials are none of a policy's business: what it logs would show them */
    static const pl_str secret[] = {PL_STR_INIT("authorization"), PL_STR_INIT("x-api-key"),
                                    PL_STR_INIT("cookie"), PL_STR_INIT("proxy-authorization")};
    for (size_t i = 0; i < sizeof secret / sizeof *secret; i++)
        if (pl_str_ieq(name, secret[i]))
            return (pl_str){NULL, 0};
    return pl_head_find(&rq->x->head, name);
}

pl_str pl_intake_find_member(void *ctx, pl_str name)
{
    pl_request *rq = ctx;
    if (!rq->x->body.p)
        return (pl_str){NULL, 0}; /* given back while the answer streams */
    pl_member m = pl_scan_find(rq->x->body, rq->scan, name);
    if (m.type == PL_JSON_ABSENT)
        return (pl_str){NULL, 0};
    if (m.type != PL_JSON_STRING)
        return m.raw;
    unsigned kept = sizeof rq->unescaped / sizeof rq->unescaped[0];
    for (unsigned i = 0; i < kept; i++)
        if (rq->unescaped[i].at == m.raw.p)
            return rq->unescaped[i].text;
    pl_str text = pl_member_string(&rq->x->arena, &m);
    if (m.escaped && text.p) {
        rq->unescaped[rq->unescaped_n % kept].at = m.raw.p;
        rq->unescaped[rq->unescaped_n++ % kept].text = text;
    }
    return text;
}

/* --- admit's SHRINK --- */

/* What the engines generate when a request names no limit (vLLM's and SGLang's completions,
 * SGLang's native API); the other APIs go on to the end of the context. */
#define COMPLETIONS_DEFAULT_TOKENS 16
#define GENERATE_DEFAULT_TOKENS    128

static bool given(const pl_member *m)
{
    return m->type != PL_JSON_ABSENT && m->type != PL_JSON_NULL;
}

/* Negative limits mean none; what is no number is the engine's to refuse. */
static bool lowers(const pl_member *m, double limit)
{
    double v;
    return pl_member_number(m, &v) == 0 && (v < 0 || v > limit);
}

static int shrink_sampling(pl_request *rq, pl_edits *edits, pl_str text)
{
    pl_arena *a = &rq->x->arena;
    const pl_member *sampling = &rq->scan->members[PL_MEMBER_SAMPLING_PARAMS];
    double limit = 0;
    pl_str_double(text, &limit);
    if (sampling->type == PL_JSON_OBJECT) {
        size_t at = (size_t)(sampling->raw.p - rq->x->body.p);
        pl_member m = pl_object_find(sampling->raw, PL_STR("max_new_tokens"));
        if (given(&m))
            return lowers(&m, limit) ? pl_edits_add(edits, at + (size_t)(m.raw.p - sampling->raw.p),
                                                    m.raw.n, text)
                                     : PL_EINVALID;
        if (limit >= GENERATE_DEFAULT_TOKENS)
            return PL_EINVALID;
        if (m.type == PL_JSON_NULL)
            return pl_edits_add(edits, at + (size_t)(m.raw.p - sampling->raw.p), m.raw.n, text);
        bool more = !pl_object_is_empty(sampling->raw);
        pl_str member =
            pl_arena_printf(a, "\"max_new_tokens\":%.*s%s", PL_FMT(text), more ? "," : "");
        return member.p ? pl_edits_add(edits, at + 1, 0, member) : PL_ENOMEM;
    }
    /* a list has parameters for each prompt of a batch: left as it is */
    if (given(sampling) || limit >= GENERATE_DEFAULT_TOKENS)
        return PL_EINVALID;
    pl_str raw = pl_arena_printf(a, "{\"max_new_tokens\":%.*s}", PL_FMT(text));
    return raw.p ? pl_edits_set(edits, a, rq->x->body, rq->scan, PL_MEMBER_SAMPLING_PARAMS, raw)
                 : PL_ENOMEM;
}

int pl_intake_shrink(pl_request *rq, pl_edits *edits, double max_tokens)
{
    pl_arena *a = &rq->x->arena;
    const pl_member *members = rq->scan->members;
    pl_str text = pl_arena_printf(a, "%.0f", max_tokens);
    if (!text.p)
        return PL_ENOMEM;
    pl_member_id names[2];
    int n = 0;
    switch (rq->api) {
    case PL_API_GENERATE:
        return shrink_sampling(rq, edits, text);
    case PL_API_CHAT: /* engines differ in which one counts when both are there */
        names[n++] = PL_MEMBER_MAX_TOKENS;
        names[n++] = PL_MEMBER_MAX_COMPLETION_TOKENS;
        break;
    case PL_API_COMPLETIONS:
    case PL_API_MESSAGES:
        names[n++] = PL_MEMBER_MAX_TOKENS;
        break;
    case PL_API_RESPONSES:
        names[n++] = PL_MEMBER_MAX_OUTPUT_TOKENS;
        break;
    default:
        return PL_EINVALID; /* nothing is generated there */
    }
    int rc = PL_EINVALID;
    bool any = false;
    for (int i = 0; i < n; i++) {
        any |= given(&members[names[i]]);
        if (lowers(&members[names[i]], max_tokens))
            rc = pl_edits_set(edits, a, rq->x->body, rq->scan, names[i], text);
    }
    if (any || (rq->api == PL_API_COMPLETIONS && max_tokens >= COMPLETIONS_DEFAULT_TOKENS))
        return rc;
    return pl_edits_set(edits, a, rq->x->body, rq->scan, names[0], text);
}
