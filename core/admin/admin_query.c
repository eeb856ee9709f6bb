/* POST /query and /query_by_hash: who holds a prompt, by the engines' events, in the shape of
 * Dynamo's standalone indexer, so that its clients can ask here. An instance is an engine, named by
 * the slot of its first worker, as in nvext.worker_id; a rank is the engine's data-parallel rank.
 *
 *     {"scores":    {INSTANCE: {RANK: tokens}},    on the device, from the prompt's start
 *      "frequencies": [],
 *      "instances": {INSTANCE: {"longest_matched", "gpu", "dp": {RANK: tokens}, "cpu", "disk",
 *                               "engine": name}}}
 *
 * gpu, cpu and disk are tokens from the start without a hole in that tier or a nearer one, of the
 * rank that has the most. On the control loop; the index is read without waiting for its writer. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "admin/admin_api.h"
#include "http/scan.h"
#include "kv/block_hash.h"
#include "kv/feed.h"

#define JSON_DEPTH 16
#define SIZES      8 /* block sizes among the workers of one model */

typedef struct query {
    const pl_model *model;
    pl_str lora, salt;
    uint64_t *values; /* token ids or block hashes */
    size_t n;
    bool hashes;
} query;

/* --- input --- */

/* One integer of 64 bits: a number, signed or not, or either as a string (also after 0x). Returns
 * behind it; NULL: it is none. */
static const char *integer(const char *p, const char *end, uint64_t max, uint64_t *out)
{
    bool quoted = *p == '"', minus = false, hex = false;
    uint64_t v = 0;
    const char *from;
    p += quoted;
    if (p < end && *p == '-') {
        minus = true;
        p++;
    } else if (quoted && end - p > 2 && p[0] == '0' && (p[1] | 0x20) == 'x') {
        hex = true;
        p += 2;
    }
    for (from = p; p < end; p++) {
        int c = (unsigned char)*p, low = c | 0x20;
        int digit = c >= '0' && c <= '9'              ? c - '0'
                    : hex && low >= 'a' && low <= 'f' ? low - 'a' + 10
                                                      : -1;
        if (digit < 0)
            break;
        uint64_t base = hex ? 16 : 10;
        if (v > (UINT64_MAX - (uint64_t)digit) / base)
            return NULL;
        v = v * base + (uint64_t)digit;
    }
    if (p == from || (minus && (max != UINT64_MAX || v > (uint64_t)1 << 63)) || v > max)
        return NULL;
    if (quoted && (p == end || *p++ != '"'))
        return NULL;
    *out = minus ? 0 - v : v;
    return p;
}

static const char *skip(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || (*p >= '\t' && *p <= '\r')))
        p++;
    return p;
}

/* The elements of a valid JSON array, which are numbers up to max. False: *n is the first that is
 * not. */
static bool integers(pl_str raw, uint64_t max, uint64_t *out, size_t *n)
{
    const char *end = raw.p + raw.n, *p = skip(raw.p + 1, end);
    for (*n = 0; p < end && *p != ']'; (*n)++) {
        p = integer(p, end, max, &out[*n]);
        if (!p)
            return false;
        p = skip(p, end);
        if (p < end && *p == ',')
            p = skip(p + 1, end);
        else if (p < end && *p != ']')
            return false; /* 1.5, 1e9 */
    }
    return true;
}

static bool values(pl_exchange *x, const pl_scan *s, query *q)
{
    pl_str name = q->hashes ? PL_STR("block_hashes") : PL_STR("token_ids");
    const pl_member m = pl_scan_find(x->body, s, name);
    if (m.type != PL_JSON_ARRAY) {
        pl_admin_error(x, 400, "invalid_value", "%.*s should be an array of numbers", PL_FMT(name));
        return false;
    }
    /* an element and its comma have two bytes or more */
    q->values = pl_arena_alloc(&x->arena, (m.raw.n / 2 + 1) * sizeof *q->values);
    if (!q->values) {
        pl_admin_json(x, 503, NULL);
        return false;
    }
    if (integers(m.raw, q->hashes ? UINT64_MAX : UINT32_MAX, q->values, &q->n))
        return true;
    pl_admin_error(x, 400, "invalid_value", "%.*s[%zu] is no whole number of %d bits", PL_FMT(name),
                   q->n, q->hashes ? 64 : 32);
    return false;
}

/* An optional string; false: it has been answered. */
static bool string(pl_exchange *x, const pl_scan *s, pl_str name, pl_str *out)
{
    const pl_member m = pl_scan_find(x->body, s, name);
    *out = (pl_str){NULL, 0};
    if (m.type == PL_JSON_ABSENT || m.type == PL_JSON_NULL)
        return true;
    if (m.type == PL_JSON_STRING)
        *out = pl_member_string(&x->arena, &m);
    if (!out->p)
        pl_admin_error(x, 400, "invalid_value", "%.*s should be a string", PL_FMT(name));
    return out->p != NULL;
}

static bool read_query(pl_exchange *x, const pl_view *v, query *q)
{
    pl_scan s;
    pl_str model;
    if (pl_scan_body(x->body, JSON_DEPTH, &s) != 0) {
        pl_admin_error(x, 400, "invalid_json", "the body is not usable: %s at byte %zu",
                       x->body.n ? s.error : "it is empty", s.error_at);
        return false;
    }
    if (!string(x, &s, PL_STR("model_name"), &model) ||
        !string(x, &s, PL_STR("lora_name"), &q->lora) ||
        !string(x, &s, PL_STR("cache_salt"), &q->salt))
        return false;
    if (q->hashes && q->salt.n) {
        pl_admin_error(x, 400, "invalid_value", "hashes have their cache_salt in them already");
        return false;
    }
    q->model = model.n ? pl_view_model(v, model) : pl_view_only_model(v);
    if (!q->model) {
        if (model.n)
            pl_admin_error(x, 404, "model_not_found", "no engine serves the model '%.*s'",
                           (int)(model.n < 200 ? model.n : 200), model.p);
        else
            pl_admin_error(x, 400, "invalid_value", "model_name is missing");
        return false;
    }
    return values(x, &s, q);
}

/* --- matching --- */

/* The most tokens that were found for a worker, by slot: of the spaces that could be meant one. */
typedef struct found {
    double tokens[PL_TIERS];
} found;

static size_t local_hashes(const query *q, const pl_block_space *b, uint64_t *local)
{
    uint32_t *ids = malloc((q->n + 1) * sizeof *ids);
    for (size_t i = 0; ids && i < q->n; i++)
        ids[i] = (uint32_t)q->values[i];
    int64_t n = ids ? pl_block_hash(b, ids, q->n, local, NULL, q->n + 1) : 0;
    free(ids);
    return n > 0 ? (size_t)n : 0;
}

static void take_in(const pl_match *m, int n, uint32_t block_tokens, found *by_slot)
{
    for (int i = 0; i < n; i++)
        for (int t = 0; t < PL_TIERS; t++)
            by_slot[m[i].slot].tokens[t] =
                fmax(by_slot[m[i].slot].tokens[t], (double)m[i].blocks[t] * block_tokens);
}

static void match(pl_index_reader *reader, pl_index *ix, const query *q, uint32_t block_tokens,
                  bool eagle, pl_str lora, uint64_t *local, pl_match *m, found *by_slot)
{
    pl_block_space b;
    pl_index_space space = pl_index_space_find(ix, PL_STR("*"), block_tokens, eagle, lora);
    if (!space || pl_block_space_init(&b, block_tokens, eagle, lora, q->salt) != 0)
        return;
    size_t n = local_hashes(q, &b, local);
    int workers = pl_index_match(reader, space, local, n, m, PL_MAX_WORKERS);
    take_in(m, workers, block_tokens, by_slot);
}

/* Adapter, salt and block size are in the hashes: the space that has them is the right one. */
typedef struct by_hash {
    pl_index_reader *reader;
    const query *q;
    pl_match *m;
    found *by_slot;
} by_hash;

static void match_hashes(void *ctx, pl_index_space space, uint32_t block_tokens, pl_str lora)
{
    by_hash *h = ctx;
    if (h->q->lora.n && !pl_str_eq(h->q->lora, lora))
        return;
    int workers = pl_index_match(h->reader, space, h->q->values, h->q->n, h->m, PL_MAX_WORKERS);
    take_in(h->m, workers, block_tokens, h->by_slot);
}

/* With a name that is given, that adapter; else the model may be one itself. */
static void match_all(pl_index_reader *reader, pl_index *ix, const query *q, uint64_t *local,
                      pl_match *m, found *by_slot)
{
    uint32_t sizes[SIZES];
    int sizes_n = 0;
    if (q->hashes) {
        by_hash h = {reader, q, m, by_slot};
        pl_index_each_space(ix, match_hashes, &h);
        return;
    }
    for (int i = 0; i < q->model->workers_n; i++) {
        int32_t n = atomic_load(&q->model->workers[i]->block_tokens);
        uint32_t size = n > 0 ? (uint32_t)n : PL_LEDGER_BLOCK_TOKENS;
        int k = 0;
        while (k < sizes_n && sizes[k] != size)
            k++;
        if (k == sizes_n && k < SIZES)
            sizes[sizes_n++] = size;
    }
    for (int i = 0; i < sizes_n; i++)
        for (int eagle = 0; eagle < 2; eagle++) {
            if (q->lora.n) {
                match(reader, ix, q, sizes[i], eagle, q->lora, local, m, by_slot);
                continue;
            }
            if (!q->model->adapter)
                match(reader, ix, q, sizes[i], eagle, (pl_str){NULL, 0}, local, m, by_slot);
            match(reader, ix, q, sizes[i], eagle, q->model->id, local, m, by_slot);
        }
}

/* --- output --- */

static void most(json_t *instance, const char *key, double tokens)
{
    json_t *had = json_object_get(instance, key);
    if (!had || (double)json_integer_value(had) < tokens)
        json_object_set_new(instance, key, json_integer((json_int_t)tokens));
}

static json_t *within(json_t *object, const char *key)
{
    json_t *j = json_object_get(object, key);
    if (!j && json_object_set_new(object, key, json_object()) == 0)
        j = json_object_get(object, key);
    return j;
}

static json_t *reply(const query *q, const found *by_slot)
{
    json_t *scores = json_object(), *instances = json_object();
    for (int i = 0; i < q->model->workers_n; i++) {
        const pl_worker_state *w = q->model->workers[i];
        const double *t = by_slot[w->slot].tokens;
        if (t[PL_TIER_EXTERNAL] <= 0)
            continue;
        char id[16], rank[16];
        snprintf(id, sizeof id, "%d", w->engine->workers[0].slot);
        snprintf(rank, sizeof rank, "%d", w->rank);
        json_t *instance = within(instances, id);
        most(instance, "longest_matched", t[PL_TIER_EXTERNAL]);
        most(instance, "gpu", t[PL_TIER_DEVICE]);
        most(instance, "cpu", t[PL_TIER_HOST]);
        most(instance, "disk", t[PL_TIER_EXTERNAL]);
        most(within(instance, "dp"), rank, t[PL_TIER_DEVICE]);
        json_object_set_new(instance, "engine", json_string(w->engine->name));
        most(within(scores, id), rank, t[PL_TIER_DEVICE]);
    }
    return json_pack("{s:o, s:[], s:o}", "scores", scores, "frequencies", "instances", instances);
}

static void ask(pl_admin *a, pl_exchange *x, bool hashes)
{
    pl_router *r = a->router;
    query q = {.hashes = hashes};
    if (!r->holdings) {
        pl_admin_error(x, 409, "kv_off", "kv.use is \"off\" in the configuration");
        return;
    }
    pl_view *v = pl_fleet_view(r->fleet);
    if (v && !read_query(x, v, &q)) {
        pl_view_unref(v);
        return;
    }
    pl_index *ix = pl_holdings_index(r->holdings);
    pl_index_reader *reader = v ? pl_index_reader_new(ix) : NULL;
    found *by_slot = calloc(PL_MAX_WORKERS, sizeof *by_slot);
    pl_match *m = calloc(PL_MAX_WORKERS, sizeof *m);
    uint64_t *local = malloc((q.n + 1) * sizeof *local);
    json_t *j = NULL;
    if (reader && by_slot && m && local) {
        match_all(reader, ix, &q, local, m, by_slot);
        j = reply(&q, by_slot);
    }
    pl_admin_json(x, j ? 200 : 503, j);
    if (reader)
        pl_index_reader_free(reader);
    free(by_slot);
    free(m);
    free(local);
    pl_view_unref(v);
}

void pl_admin_query(pl_admin *a, pl_exchange *x, pl_str name)
{
    ask(a, x, false);
}

void pl_admin_query_by_hash(pl_admin *a, pl_exchange *x, pl_str name)
{
    ask(a, x, true);
}
