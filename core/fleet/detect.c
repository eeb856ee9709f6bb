/* Detection: see detect.h. Called by health.c on the control loop. A detection owns the fetch that
 * is under way and the JSON that the model ids point into, and frees itself after done.
 *
 *   MODELS --owned_by says the kind, or it is not wanted--> done
 *     |  \--404: no such endpoint-------------------------> done (other, no models)
 *     |   \-no usable answer------------------------------> done (error)
 *     v
 *   SERVER_INFO --SGLang's members--> done (sglang)
 *     v
 *   VERSION --> done (vllm or other)
 *
 * A question about the kind that gets no answer at all leaves the kind open (auto) and the models
 * as found. What an engine says is not trusted: sizes are bounded, and ids that cannot be shown on
 * one line are dropped. */
#include "fleet/detect.h"

#include <jansson.h>
#include <stdlib.h>

#define MAX_ANSWER   (1u << 20)
#define MAX_MODELS   1024
#define MAX_ID_BYTES 256

typedef enum step { MODELS, SERVER_INFO, VERSION } step;

static const pl_str paths[] = {
    [MODELS] = PL_STR_INIT("/v1/models"),
    [SERVER_INFO] = PL_STR_INIT("/server_info"),
    [VERSION] = PL_STR_INIT("/version"),
};

struct pl_detect {
    pl_pool *pool;
    pl_fetch *fetch; /* NULL while done runs */
    step step;
    bool want_kind;
    uint64_t timeout_ms;
    json_t *models; /* the answer to MODELS; ids point into it */
    pl_str *ids;
    pl_detected found;
    void (*done)(void *user, const pl_detected *found);
    void *user;
};

static void detect_free(pl_detect *d)
{
    json_decref(d->models);
    free(d->ids);
    free(d);
}

static void finish(pl_detect *d, int err, const char *detail)
{
    d->fetch = NULL;
    d->found.err = err;
    d->found.detail = detail;
    d->found.ids = d->ids;
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

/* ids and, when an entry tells it, the kind, from {"data":[{"id","owned_by"}, ...]}. */
static const char *read_models(pl_detect *d)
{
    const json_t *data = json_object_get(d->models, "data");
    if (!json_is_array(data))
        return "/v1/models has no data array";
    size_t n = json_array_size(data);
    d->ids = calloc(n < MAX_MODELS ? n + 1 : MAX_MODELS, sizeof *d->ids);
    if (!d->ids)
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
    }
    return NULL;
}

/* SGLang answers with its settings; vLLM's development server has a path of this name, too. */
static bool is_sglang_info(const json_t *info)
{
    return json_is_string(json_object_get(info, "model_path")) &&
           json_object_get(info, "tp_size") != NULL;
}

static bool ask(pl_detect *d, step s);

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
        finish(d, 0, NULL);
    } else if (r->status == 401 || r->status == 403) {
        finish(d, PL_EPROTOCOL, "it tells its models only to those who have a key");
    } else {
        const char *wrong = json ? read_models(d) : "/v1/models did not answer with JSON";
        if (wrong)
            finish(d, PL_EPROTOCOL, wrong);
        else if (d->found.kind != PL_KIND_AUTO || !d->want_kind || !ask(d, SERVER_INFO))
            finish(d, 0, NULL);
    }
}

/* The answer to one of the questions for the kind. */
static void on_kind(pl_detect *d, const pl_fetch_result *r, const json_t *json)
{
    bool answered = r->err == 0 && (r->status < 500 || r->status == 501);
    if (d->step == SERVER_INFO && is_sglang_info(json))
        d->found.kind = PL_KIND_SGLANG;
    else if (d->step == VERSION && json_is_string(json_object_get(json, "version")))
        d->found.kind = PL_KIND_VLLM;
    else if (answered && d->step == VERSION)
        d->found.kind = PL_KIND_OTHER;
    else if (answered && ask(d, VERSION))
        return;
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

pl_detect *pl_detect_start(pl_pool *p, bool want_kind, uint64_t timeout_ms,
                           void (*done)(void *user, const pl_detected *found), void *user)
{
    pl_detect *d = calloc(1, sizeof *d);
    if (!d)
        return NULL;
    d->pool = p;
    d->want_kind = want_kind;
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
