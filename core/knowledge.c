/* Puts the KV knowledge together: see knowledge.h. Each engine of the fleet is a source of the feed
 * from when it is known where it publishes (configured, or read from its /server_info) until it
 * leaves, or says that it publishes elsewhere. Twice a second the feed's judgement of each worker
 * is written into the worker's state, where the records and the matching read it. */
#include "knowledge.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "kv/discover.h"
#include "kv/feed.h"
#include "kv/known.h"

#define LOOK_MS        500
#define TOKENIZE_CALLS 256 /* under way at once, of all loops */

typedef struct source {
    struct source *next;
    pl_engine *engine; /* referenced */
    bool fed;          /* it is a source of the feed */
    bool told;         /* that it publishes nowhere that we could use was said */
    bool in_view;
    pl_discovered where; /* it told us so; the feed has it */
    struct {
        uint64_t events;
        bool asleep;
        bool off;           /* its cached tokens are far from those predicted; that was told */
        pl_accuracy judged; /* then */
    } rank[];               /* as of the last look */
} source;

struct pl_knowledge {
    pl_router *router;
    pl_feed *feed;
    pl_timer timer;
    source *sources;
};

/* --- sources --- */

static source *source_of(pl_knowledge *k, const pl_engine *e)
{
    source *s = k->sources;
    while (s && s->engine != e)
        s = s->next;
    return s;
}

/* d NULL: what the configuration says is all. */
static void feed_from(pl_knowledge *k, source *s, const pl_discovered *d)
{
    pl_engine *e = s->engine;
    int *slots = calloc((size_t)e->workers_n, sizeof *slots);
    pl_errbuf eb = {""};
    if (!slots || s->fed) {
        free(slots);
        return;
    }
    for (int i = 0; i < e->workers_n; i++)
        slots[i] = e->workers[i].slot;
    pl_feed_source src = {
        .engine = pl_str_c(e->name),
        .slots = slots,
        .ranks_n = e->workers_n,
        .generation = (uint32_t)e->workers[0].generation,
        .model = PL_STR("*"), /* token ids of other models are other workers' (holdings.c) */
        .block_tokens = e->block_tokens,
        .mode = e->events_mode == PL_EVENTS_BIND     ? PL_FEED_BIND
                : e->events_mode == PL_EVENTS_INGEST ? PL_FEED_INGEST
                                                     : PL_FEED_CONNECT,
        .endpoint = pl_str_c(e->events_endpoint),
        .replay = pl_str_c(e->events_replay),
        .one_stream = e->events_one_stream,
        .topic = pl_str_c(e->events_topic),
    };
    if (d) {
        pl_discovered_source(d, &src);
        if (!src.replay.n) /* older SGLang has one and does not tell */
            src.replay = pl_str_c(e->events_replay);
    }
    if (src.block_tokens)
        for (int i = 0; i < e->workers_n; i++)
            atomic_store(&e->workers[i].block_tokens, (int32_t)src.block_tokens);
    int rc = pl_feed_source_add(k->feed, &src, &eb);
    s->fed = rc == 0;
    if (rc == 0 && src.mode != PL_FEED_INGEST)
        pl_log(PL_LOG_INFO, "kv_events", "%s: events of its KV cache from %.*s", e->name,
               PL_FMT(src.endpoint));
    else if (rc != 0)
        pl_log(PL_LOG_WARN, "kv_events_refused", "%s: %s", e->name,
               eb.text[0] ? eb.text : pl_strerror(rc));
    free(slots);
}

/* It is no source of the feed any more, and the index has nothing of it. */
static void unfeed(pl_knowledge *k, source *s)
{
    pl_engine *e = s->engine;
    if (!s->fed || pl_feed_source_remove(k->feed, e->workers[0].slot) == PL_ENOMEM)
        return; /* out of memory: as it was */
    s->fed = false;
    for (int i = 0; i < e->workers_n; i++) {
        atomic_store_explicit(&e->workers[i].kv_trust, PL_KV_ROUTED, memory_order_relaxed);
        s->rank[i].events = 0;
    }
}

static void forget(pl_knowledge *k, source *s)
{
    pl_engine *e = s->engine;
    unfeed(k, s);
    for (int i = 0; i < e->workers_n; i++)
        pl_holdings_worker_gone(k->router->holdings, e->workers[i].slot);
    pl_engine_unref(e);
    free(s);
}

static void take_in(pl_knowledge *k, pl_engine *e)
{
    source *s = calloc(1, sizeof *s + (size_t)e->workers_n * sizeof s->rank[0]);
    if (!s)
        return; /* tried again with the next change */
    s->engine = pl_engine_ref(e);
    s->in_view = true;
    for (int i = 0; i < e->workers_n; i++) /* others had its slots before */
        pl_holdings_accuracy(k->router->holdings, e->workers[i].slot, &s->rank[i].judged);
    s->next = k->sources;
    k->sources = s;
    if (e->events_mode != PL_EVENTS_OFF)
        /* what is not published may still be handed in, until the engine tells where it does */
        if (e->events_mode != PL_EVENTS_AUTO)
            feed_from(k, s, NULL);
}

void pl_knowledge_sync(pl_router *r)
{
    pl_knowledge *k = r->knowledge;
    if (!k)
        return;
    pl_view *v = pl_fleet_view(r->fleet);
    for (source *s = k->sources; s; s = s->next)
        s->in_view = false;
    for (int i = 0; v && i < v->engines_n; i++) {
        source *s = source_of(k, v->engines[i]);
        if (s)
            s->in_view = true;
        else
            take_in(k, v->engines[i]);
    }
    pl_view_unref(v);
    for (source **at = &k->sources; *at;) {
        source *s = *at;
        if (s->in_view) {
            at = &s->next;
            continue;
        }
        *at = s->next;
        forget(k, s);
    }
}

static bool same(const pl_discovered *a, const pl_discovered *b)
{
    return a->mode == b->mode && strcmp(a->endpoint, b->endpoint) == 0 &&
           strcmp(a->replay, b->replay) == 0 && strcmp(a->snapshot, b->snapshot) == 0 &&
           strcmp(a->topic, b->topic) == 0 && a->block_tokens == b->block_tokens &&
           a->ranks == b->ranks;
}

/* Told again and again: where it has changed, another program answers by now. */
void pl_knowledge_described(pl_router *r, pl_engine *e, pl_str server_info)
{
    pl_knowledge *k = r->knowledge;
    source *s = k ? source_of(k, e) : NULL;
    if (!s || e->events_mode != PL_EVENTS_AUTO)
        return;
    pl_discovered d;
    pl_errbuf eb = {""};
    int rc = pl_discover_sglang(server_info, pl_str_c(e->host), &d, &eb);
    bool publishes = rc == 0 && d.endpoint[0];
    if (s->fed && (publishes ? !same(&d, &s->where) : rc == PL_ENOTFOUND)) {
        pl_log(PL_LOG_INFO, "kv_events_moved", "%s publishes the events of its KV cache %s",
               e->name, publishes ? "elsewhere, or cut otherwise" : "no more");
        unfeed(k, s);
    }
    if (publishes && !s->fed) {
        if (d.ranks && d.ranks != e->workers_n && !e->events_one_stream)
            pl_log(PL_LOG_WARN, "kv_ranks",
                   "%s: %d data-parallel ranks publish events, and dp_size is %d: set it to know "
                   "of all",
                   e->name, d.ranks, e->workers_n);
        s->where = d;
        feed_from(k, s, &d);
    } else if (rc != 0 && rc != PL_ENOTFOUND && !s->told) {
        s->told = true;
        pl_log(PL_LOG_WARN, "kv_events_unusable", "%s: %s", e->name,
               eb.text[0] ? eb.text : pl_strerror(rc));
    }
}

/* --- trust --- */

static int trust_of(const pl_feed_stats *st)
{
    switch (st->state) {
    case PL_TRUST_LIVE:
        return PL_KV_LIVE;
    case PL_TRUST_GAP:
    case PL_TRUST_REPLAYING:
    case PL_TRUST_RESET:
        return PL_KV_BEHIND;
    case PL_TRUST_NEW:
        return PL_KV_ROUTED;
    default:
        return PL_KV_STALE;
    }
}

static void look_at(pl_knowledge *k, source *s)
{
    for (int i = 0; i < s->engine->workers_n; i++) {
        pl_worker_state *w = &s->engine->workers[i];
        pl_feed_stats st;
        if (pl_feed_stats_of(k->feed, w->slot, &st) != 0)
            continue;
        atomic_store_explicit(&w->kv_trust, trust_of(&st), memory_order_relaxed);
        if (st.block_tokens)
            atomic_store_explicit(&w->block_tokens, (int32_t)st.block_tokens, memory_order_relaxed);
        atomic_store_explicit(&w->kv_windows, st.eagle ? 2 : st.plain, memory_order_relaxed);
        /* with nothing under way that was not computed yet, all that was predicted is told by now
         */
        if (st.counts.events != s->rank[i].events && atomic_load(&w->queued_prefill_tokens) == 0)
            pl_holdings_published(k->router->holdings, w->slot,
                                  pl_now_ns() - (uint64_t)LOOK_MS * 1000000u);
        s->rank[i].events = st.counts.events;
    }
}

/* An engine that falls asleep drops its cache, and tells so with its next step at the earliest. */
static void look_for_sleep(pl_knowledge *k, source *s)
{
    for (int i = 0; i < s->engine->workers_n; i++) {
        pl_worker_state *w = &s->engine->workers[i];
        bool asleep = atomic_load_explicit(&w->asleep, memory_order_relaxed);
        if (asleep && !s->rank[i].asleep) {
            pl_log(PL_LOG_INFO, "engine_asleep", "%s sleeps: what it had cached is forgotten",
                   w->name);
            if (s->fed)
                pl_feed_emptied(k->feed, w->slot);
            pl_holdings_worker_gone(k->router->holdings, w->slot);
        }
        s->rank[i].asleep = asleep;
    }
}

#define JUDGED_REQUESTS 32 /* at once */
#define JUDGED_TOKENS   64 /* cached of each, or it does not matter */

/* Half of the cached tokens wrong: its events, or the tokens of the prompts, are not what they are
 * taken for. */
static void judge(pl_knowledge *k, source *s)
{
    for (int i = 0; i < s->engine->workers_n; i++) {
        pl_accuracy a, *was = &s->rank[i].judged;
        pl_holdings_accuracy(k->router->holdings, s->engine->workers[i].slot, &a);
        uint64_t n = a.requests - was->requests, error = a.error_tokens - was->error_tokens;
        uint64_t predicted = a.predicted_tokens - was->predicted_tokens;
        uint64_t actual = a.actual_tokens - was->actual_tokens;
        uint64_t most = predicted > actual ? predicted : actual;
        if (n < JUDGED_REQUESTS)
            continue;
        bool off = most >= n * JUDGED_TOKENS && error * 2 > most;
        if (off != s->rank[i].off)
            pl_log(off ? PL_LOG_WARN : PL_LOG_INFO, "kv_accuracy",
                   "%s: %llu cached tokens were predicted and %llu counted by the engine, in %llu "
                   "requests (off by %llu)",
                   s->engine->workers[i].name, (unsigned long long)predicted,
                   (unsigned long long)actual, (unsigned long long)n, (unsigned long long)error);
        s->rank[i].off = off;
        *was = a;
    }
}

static void on_timer(pl_timer *t)
{
    pl_knowledge *k = (pl_knowledge *)((char *)t - offsetof(pl_knowledge, timer));
    for (source *s = k->sources; s; s = s->next) {
        look_for_sleep(k, s);
        judge(k, s);
        if (s->fed)
            look_at(k, s);
    }
    pl_holdings_advance(k->router->holdings);
    pl_wheel_arm(&k->router->control_wheel, t, LOOK_MS, on_timer);
}

/* --- start and stop --- */

int pl_knowledge_start(pl_router *r, pl_errbuf *eb)
{
    const pl_config *c = &r->config;
    if (c->kv_use == 2)
        return 0;
    pl_knowledge *k = calloc(1, sizeof *k);
    int rc = k ? pl_holdings_new(&c->holdings, &r->holdings) : PL_ENOMEM;
    if (rc == 0) {
        pl_feed_options o = PL_FEED_OPTIONS;
        const pl_known known = pl_known_of(pl_holdings_index(r->holdings));
        o.index = pl_holdings_index(r->holdings);
        o.known = &known;
        o.trust = c->trust;
        rc = pl_feed_new(&o, &k->feed);
    }
    if (rc == 0 && c->tokenize_ms) {
        const pl_tokcache_options to = {.clock = c->holdings.clock,
                                        .max_bytes = c->tokenize_bytes,
                                        .max_calls = TOKENIZE_CALLS};
        rc = pl_tokcache_new(&to, &r->tokcache);
    }
    if (rc == 0) /* nothing until a policy or the configuration wants it */
        rc = (r->active = pl_active_new(PL_ACTIVE_MAX_BLOCKS)) ? 0 : PL_ENOMEM;
    if (rc == 0)
        rc = pl_feed_start(k->feed, eb);
    if (rc != 0) {
        if (k)
            pl_feed_free(k->feed);
        free(k);
        pl_knowledge_free(r);
        return eb->text[0] ? rc : pl_fail(eb, rc, "cannot make the KV index: %s", pl_strerror(rc));
    }
    k->router = r;
    r->knowledge = k;
    r->feed = k->feed;
    pl_knowledge_sync(r);
    pl_wheel_arm(&r->control_wheel, &k->timer, LOOK_MS, on_timer);
    return 0;
}

void pl_knowledge_stop(pl_router *r)
{
    pl_knowledge *k = r->knowledge;
    if (!k)
        return;
    pl_wheel_cancel(&r->control_wheel, &k->timer);
    r->knowledge = NULL;
    while (k->sources) {
        source *s = k->sources;
        k->sources = s->next;
        pl_engine_unref(s->engine);
        free(s);
    }
    pl_feed_stop(k->feed);
    free(k);
}

void pl_knowledge_free(pl_router *r)
{
    pl_feed_free(r->feed);
    r->feed = NULL;
    pl_holdings_free(r->holdings);
    r->holdings = NULL;
    if (r->tokcache)
        pl_tokcache_free(r->tokcache);
    r->tokcache = NULL;
    if (r->active)
        pl_active_free(r->active);
    r->active = NULL;
}
