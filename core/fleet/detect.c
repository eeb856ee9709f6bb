/* Detection: see detect.h. Called by health.c on the control loop. A detection owns the fetch that
 * is under way and the JSON that the model ids point into, and frees itself after done.
 *
 *   MODELS --no usable answer--------------------------------------------> done (error)
 *     |  \--the kind is known, and is not SGLang--------------------------> done
 *     |   \-404: no such endpoint, and the kind is not given--------------> done (other)
 *     v
 *   SERVER_INFO --SGLang's members--> done (sglang, what it can do)
 *     |        \--404 of an SGLang--> OLD_INFO --> done (sglang, what it can do)
 *     v
 *   VERSION --> done (vllm or other)
 *
 * Only SGLang's settings tell of what can be used beyond serving. An SGLang that has neither path
 * for them can open sessions, and nothing more is known to work. A question about the kind that
 * gets no answer at all leaves the kind open (auto) and the models as found. What an engine says is
 * not trusted: sizes are bounded, and ids that cannot be shown on one line are dropped. */
#include "fleet/detect.h"

#include <jansson.h>
#include <stdlib.h>

#include "fleet/gauge_read.h"

#define MAX_ANSWER   (1u << 20)
#define MAX_MODELS   1024
#define MAX_ID_BYTES 256

typedef enum step { MODELS, SERVER_INFO, OLD_INFO, VERSION } step;

static const pl_str paths[] = {
    [MODELS] = PL_STR_INIT("/v1/models"),
    [SERVER_INFO] = PL_STR_INIT("/server_info"),
    [OLD_INFO] = PL_STR_INIT("/get_server_info"),
    [VERSION] = PL_STR_INIT("/version"),
};

struct pl_detect {
    pl_pool *pool;
    pl_fetch *fetch; /* NULL while done runs */
    step step;
    pl_engine_kind given;
    uint64_t timeout_ms;
    json_t *models; /* the answer to MODELS; ids point into it */
    pl_str *ids, *adapters;
    pl_detected found;
    void (*done)(void *user, const pl_detected *found);
    void *user;
};

static void detect_free(pl_detect *d)
{
    json_decref(d->models);
    free(d->ids);
    free(d->adapters);
    free(d);
}

static void finish(pl_detect *d, int err, const char *detail)
{
    d->fetch = NULL;
    d->found.err = err;
    d->found.detail = detail;
    d->found.ids = d->ids;
    d->found.adapters = d->adapters;
    d->done(d->user, &d->found);
    detect_free(d);
}

static bool printable(pl_str id)
{
    for (size_t i = 0; i < id.n; i++)
        if ((unsigned char)id.p[i] < 0x20 || id.p[i] == 0x7f)
            return false;
    return id.n > 0 && id.n <= MAX_ID_BYTES; /* UTF-8 is jansson's business */
}

static pl_engine_kind kind_of_owner(const json_t *model)
{
    const char *owner = json_string_value(json_object_get(model, "owned_by"));
    if (owner && strcmp(owner, "sglang") == 0)
        return PL_KIND_SGLANG;
    if (owner && strcmp(owner, "vllm") == 0)
        return PL_KIND_VLLM;
    return PL_KIND_AUTO;
}

/* ids and, when an entry tells it, the kind, from {"data":[{"id","owned_by","parent"}, ...]}. */
static const char *read_models(pl_detect *d)
{
    const json_t *data = json_object_get(d->models, "data");
    if (!json_is_array(data))
        return "/v1/models has no data array";
    size_t n = json_array_size(data);
    size_t room = n < MAX_MODELS ? n + 1 : MAX_MODELS;
    d->ids = calloc(room, sizeof *d->ids);
    d->adapters = calloc(room, sizeof *d->adapters);
    if (!d->ids || !d->adapters)
        return "out of memory";
    for (size_t i = 0; i < n; i++) {
        const json_t *model = json_array_get(data, i);
        const json_t *id = json_object_get(model, "id");
        pl_str s = {json_string_value(id), json_string_length(id)};
        if (d->found.kind == PL_KIND_AUTO)
            d->found.kind = kind_of_owner(model);
        if (d->found.ids_n == MAX_MODELS || !printable(s))
            d->found.dropped++;
        else
            d->ids[d->found.ids_n++] = s;
        if (d->found.adapters_n < MAX_MODELS && printable(s) &&
            json_string_length(json_object_get(model, "parent")) > 0)
            d->adapters[d->found.adapters_n++] = s;
    }
    return NULL;
}

/* SGLang answers with its settings; vLLM's development server has a path of this name, too. */
static bool is_sglang_info(const json_t *info)
{
    return json_is_string(json_object_get(info, "model_path")) &&
           json_object_get(info, "tp_size") != NULL;
}

static uint32_t caps_of(const json_t *info)
{
    static const struct {
        const char *flag;
        uint32_t cap;
    } flags[] = {{"enable_streaming_session", PL_CAP_STREAMING_SESSIONS},
                 {"enable_session_radix_cache", PL_CAP_SESSION_TAG},
                 {"enable_priority_scheduling", PL_CAP_PRIORITY}};
    uint32_t caps = PL_CAP_SESSIONS;
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (json_is_true(json_object_get(info, flags[i].flag)))
            caps |= flags[i].cap;
    const json_t *simulated = json_object_get(info, "perilune_engine");
    if (json_is_true(json_object_get(simulated, "retention")))
        caps |= PL_CAP_RETENTION;
    return caps;
}

/* The sizes of its KV cache, which no later poll of its gauges may tell. */
static void read_sizes(pl_detected *found, const json_t *info)
{
    found->block_tokens = (int32_t)pl_gauge_size(
        json_number_value(json_object_get(info, "page_size")), PL_GAUGE_MAX_BLOCK_TOKENS);
    found->kv_tokens = pl_gauge_size(
        json_number_value(json_object_get(info, "max_total_num_tokens")), PL_GAUGE_MAX_KV_TOKENS);
}

static bool ask(pl_detect *d, step s);

/* The kind that is known so far. */
static pl_engine_kind kind_of(const pl_detect *d)
{
    return d->given != PL_KIND_AUTO ? d->given : d->found.kind;
}

/* What is left to ask once the models are known, or are not to be had. */
static void after_models(pl_detect *d)
{
    pl_engine_kind k = kind_of(d);
    d->found.caps_known = k != PL_KIND_AUTO && k != PL_KIND_SGLANG; /* nothing */
    if (d->found.caps_known || !ask(d, SERVER_INFO))
        finish(d, 0, NULL);
}

/* The answer to /v1/models. */
static void on_models(pl_detect *d, const pl_fetch_result *r, json_t *json)
{
    d->models = json;
    d->found.kind = PL_KIND_AUTO;
    if (r->err < 0) {
        finish(d, r->err, r->detail);
    } else if (r->status == 404 || r->status == 405 || r->status == 501) {
        d->found.kind = PL_KIND_OTHER;
        d->found.no_models = true;
        after_models(d);
    } else if (r->status == 401 || r->status == 403) {
        finish(d, PL_EPROTOCOL, "it tells its models only to those who have a key");
    } else {
        const char *wrong = json ? read_models(d) : "/v1/models did not answer with JSON";
        if (wrong)
            finish(d, PL_EPROTOCOL, wrong);
        else
            after_models(d);
    }
}

/* The answer to one of the questions after the models. */
static void on_kind(pl_detect *d, const pl_fetch_result *r, const json_t *json)
{
    bool answered = r->err == 0 && (r->status < 500 || r->status == 501);
    if ((d->step == SERVER_INFO || d->step == OLD_INFO) &&
        (is_sglang_info(json) || (json_is_object(json) && kind_of(d) == PL_KIND_SGLANG))) {
        d->found.kind = PL_KIND_SGLANG;
        d->found.caps_known = true;
        d->found.caps = caps_of(json);
        read_sizes(&d->found, json);
        d->found.info = r->body;
    } else if (kind_of(d) == PL_KIND_SGLANG) {
        if (answered && d->step == SERVER_INFO && ask(d, OLD_INFO))
            return;
        d->found.caps_known = answered;
        d->found.caps = PL_CAP_SESSIONS;
    } else if (d->step == VERSION && json_is_string(json_object_get(json, "version"))) {
        d->found.kind = PL_KIND_VLLM;
    } else if (answered && d->step == VERSION) {
        d->found.kind = PL_KIND_OTHER;
    } else if (answered && ask(d, VERSION)) {
        return;
    }
    if (d->step == VERSION && d->found.kind != PL_KIND_AUTO)
        d->found.caps_known = true;
    finish(d, 0, NULL);
}

static void on_answer(void *user, const pl_fetch_result *r)
{
    pl_detect *d = user;
    json_t *json = NULL;
    if (r->err == 0 && r->status >= 200 && r->status <= 299 && r->body.n > 0)
        json = json_loadb(r->body.p, r->body.n, 0, NULL);
    if (d->step == MODELS) {
        d->found.status = r->status;
        on_models(d, r, json); /* keeps json */
    } else {
        on_kind(d, r, json);
        json_decref(json);
    }
}

static bool ask(pl_detect *d, step s)
{
    d->step = s;
    d->fetch = pl_fetch_start(d->pool, PL_GET, paths[s], (pl_str){NULL, 0}, (pl_str){NULL, 0},
                              d->timeout_ms, MAX_ANSWER, on_answer, d);
    return d->fetch != NULL;
}

pl_detect *pl_detect_start(pl_pool *p, pl_engine_kind given, uint64_t timeout_ms,
                           void (*done)(void *user, const pl_detected *found), void *user)
{
    pl_detect *d = calloc(1, sizeof *d);
    if (!d)
        return NULL;
    d->pool = p;
    d->given = given;
    d->timeout_ms = timeout_ms;
    d->done = done;
    d->user = user;
    if (!ask(d, MODELS)) {
        detect_free(d);
        return NULL;
    }
    return d;
}

void pl_detect_cancel(pl_detect *d)
{
    if (!d->fetch) /* from inside done */
        return;
    pl_fetch_cancel(d->fetch);
    detect_free(d);
}
