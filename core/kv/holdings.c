/* What the workers hold of a prompt: see holdings.h. Called by the proxy on its loop (everything
 * with a pl_holdings_loop) and by the control thread (the rest). The index has one writer, the
 * feed's thread; the two approximate ones lock by themselves. */
#include "kv/holdings.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#define MIB ((uint64_t)1 << 20)

/* What engines said of their cached tokens. */
typedef struct told {
    _Atomic uint64_t requests, predicted, actual, error; /* as in pl_accuracy */
    _Atomic uint32_t shapes; /* bits of the shapes in which this worker told them */
} told;

struct pl_holdings {
    pl_holdings_options o;
    pl_index *index;
    pl_approx *routed;
    pl_approx *predicted; /* NULL: off */
    told by_slot[PL_MAX_WORKERS];
};

/* A model's namespace and keys for one block size: names are hashed once, and again only when the
 * index has got a namespace more, which may be a better one. */
typedef struct space_entry {
    uint64_t name;   /* of model, salt and size */
    uint64_t spaces; /* that the index had */
    pl_index_space index;
    pl_keys_space space;
} space_entry;

#define SPACES_KEPT 64

struct pl_holdings_loop {
    pl_holdings *h;
    pl_index_reader *reader;
    uint32_t stamp;
    uint32_t trusted[PL_MAX_WORKERS]; /* by slot: of the last match in which its events were */
    space_entry spaces[SPACES_KEPT];  /* by name modulo; block_tokens 0: empty */
    pl_kv_hit hits[PL_MAX_WORKERS];
    pl_match matches[PL_MAX_WORKERS];
    pl_approx_hit approx[PL_MAX_WORKERS];
};

void pl_holdings_options_default(pl_holdings_options *o)
{
    *o = (pl_holdings_options){.clock = pl_clock_real(),
                               .index_bytes = 1024 * MIB,
                               .routed_bytes = 256 * MIB,
                               .routed_ttl_ms = PL_APPROX_TTL_MS,
                               .predicted_ttl_ms = PL_APPROX_PREDICTED_MS,
                               .chunk_bytes = 128};
}

int pl_holdings_new(const pl_holdings_options *o, pl_holdings **out)
{
    *out = NULL;
    pl_holdings *h = calloc(1, sizeof *h);
    if (!h)
        return PL_ENOMEM;
    h->o = *o;
    const pl_index_options io = {.max_bytes = o->index_bytes};
    pl_approx_options ao = {.clock = o->clock,
                            .ttl_ms = o->routed_ttl_ms,
                            .slots = PL_MAX_WORKERS,
                            .max_bytes = o->routed_bytes};
    int rc = pl_index_new(&io, &h->index);
    if (rc == 0)
        rc = pl_approx_new(&ao, &h->routed);
    ao.ttl_ms = o->predicted_ttl_ms;
    if (rc == 0 && o->predicted_ttl_ms)
        rc = pl_approx_new(&ao, &h->predicted);
    if (rc != 0) {
        pl_holdings_free(h);
        return rc;
    }
    *out = h;
    return 0;
}

void pl_holdings_free(pl_holdings *h)
{
    if (!h)
        return;
    if (h->index)
        pl_index_free(h->index);
    pl_approx_free(h->routed);
    pl_approx_free(h->predicted);
    free(h);
}

pl_index *pl_holdings_index(pl_holdings *h)
{
    return h->index;
}

void pl_holdings_advance(pl_holdings *h)
{
    pl_approx_advance(h->routed);
    if (h->predicted)
        pl_approx_advance(h->predicted);
}

void pl_holdings_worker_gone(pl_holdings *h, int slot)
{
    atomic_store_explicit(&h->by_slot[slot].shapes, 0, memory_order_relaxed);
    pl_approx_worker_gone(h->routed, slot);
    if (h->predicted)
        pl_approx_worker_gone(h->predicted, slot);
}

void pl_holdings_published(pl_holdings *h, int slot, uint64_t until_ns)
{
    if (h->predicted)
        pl_approx_reconcile(h->predicted, slot, until_ns);
}

void pl_holdings_accuracy(pl_holdings *h, int slot, pl_accuracy *out)
{
    const told *t = &h->by_slot[slot];
    *out = (pl_accuracy){atomic_load_explicit(&t->requests, memory_order_relaxed),
                         atomic_load_explicit(&t->predicted, memory_order_relaxed),
                         atomic_load_explicit(&t->actual, memory_order_relaxed),
                         atomic_load_explicit(&t->error, memory_order_relaxed)};
}

void pl_holdings_stats_of(pl_holdings *h, pl_holdings_stats *out)
{
    pl_approx_stats_of(h->routed, &out->routed);
    memset(&out->predicted, 0, sizeof out->predicted);
    if (h->predicted)
        pl_approx_stats_of(h->predicted, &out->predicted);
    out->accuracy = (pl_accuracy){0, 0, 0, 0};
    for (int i = 0; i < PL_MAX_WORKERS; i++) {
        pl_accuracy a;
        pl_holdings_accuracy(h, i, &a);
        out->accuracy.requests += a.requests;
        out->accuracy.predicted_tokens += a.predicted_tokens;
        out->accuracy.actual_tokens += a.actual_tokens;
        out->accuracy.error_tokens += a.error_tokens;
    }
}

pl_holdings_loop *pl_holdings_loop_new(pl_holdings *h)
{
    pl_holdings_loop *l = calloc(1, sizeof *l);
    if (!l)
        return NULL;
    l->h = h;
    l->reader = pl_index_reader_new(h->index);
    if (l->reader)
        return l;
    free(l);
    return NULL;
}

void pl_holdings_loop_free(pl_holdings_loop *l)
{
    if (!l)
        return;
    pl_index_reader_free(l->reader);
    free(l);
}

/* --- keys --- */

/* Which namespace of blocks a prompt is in: adapters are models of their own to a client, but named
 * by events, so a space of that name says that the model is one, if its engine does not; and so
 * with Eagle's windows. An adapter that no event has named (SGLang's never do) is not looked for
 * among the base model's blocks. */
typedef struct namespace
{
    pl_index_space index;
    pl_str lora;
    bool eagle;
}
namespace;

static namespace namespace_of(const pl_index *ix, const pl_model *m, uint32_t block_tokens,
                              int windows)
{
    const pl_str any = PL_STR("*"), none = {NULL, 0};
    for (int way = 0; way < (m->adapter ? 2 : 4); way++) {
        namespace n = {.lora = way < 2 ? m->id : none, .eagle = way & 1};
        if (windows && n.eagle != (windows == 2))
            continue;
        n.index = pl_index_space_find(ix, any, block_tokens, n.eagle, n.lora);
        if (n.index)
            return n;
    }
    return (namespace){0, m->adapter ? m->id : none, windows == 2};
}

/* NULL: there can be no keys. */
static const space_entry *space_of(pl_holdings_loop *l, const pl_model *m, uint32_t block_tokens,
                                   int windows, pl_str salt)
{
    uint64_t spaces = pl_index_spaces(l->h->index);
    uint64_t how = (uint64_t)block_tokens << 3 | (unsigned)windows << 1 | m->adapter;
    uint64_t name = XXH3_64bits_withSeed(m->id.p, m->id.n, how);
    if (salt.n)
        name = XXH3_64bits_withSeed(salt.p, salt.n, name + 1);
    space_entry *e = &l->spaces[name % SPACES_KEPT];
    if (e->space.block.block_tokens == block_tokens && e->name == name && e->spaces == spaces)
        return e;
    const namespace n = namespace_of(l->h->index, m, block_tokens, windows);
    e->name = name;
    e->spaces = spaces;
    e->index = n.index;
    if (pl_keys_space_init(&e->space, m->id, block_tokens, n.eagle, n.lora, salt,
                           l->h->o.chunk_bytes) == 0)
        return e;
    memset(e, 0, sizeof *e);
    return NULL;
}

/* A salt that was named so long ago that the index has forgotten it counts as unnamed: its blocks
 * are found all the same, and what was routed beside them. */
static bool is_unnamed(const pl_holdings_loop *l, const space_entry *e, pl_str salt)
{
    return !e || !e->index || (salt.n && !pl_index_seed_known(l->h->index, e->space.block.seed));
}

static uint32_t block_tokens_of(const pl_worker_state *w)
{
    int32_t n = atomic_load_explicit(&w->block_tokens, memory_order_relaxed);
    return n > 0 ? (uint32_t)n : PL_LEDGER_BLOCK_TOKENS;
}

static int windows_of(const pl_worker_state *w)
{
    return atomic_load_explicit(&w->kv_windows, memory_order_relaxed);
}

/* Which of size[] is the worker's; sizes_n: none. What is not known is what the others have. */
static int find_size(const pl_prompt *p, const pl_worker_state *w)
{
    uint32_t n = block_tokens_of(w);
    int windows = windows_of(w), k = 0;
    while (k < p->sizes_n && (p->size[k].block_tokens != n ||
                              (windows && p->size[k].windows && p->size[k].windows != windows)))
        k++;
    return k;
}

/* For the block sizes of the model's workers, the first few. */
static void begin(const pl_model *m, pl_prompt *p)
{
    memset(p, 0, sizeof *p);
    p->slot = -1;
    for (int i = 0; i < m->workers_n; i++) {
        int k = find_size(p, m->workers[i]);
        if (k == PL_PROMPT_SIZES)
            continue;
        if (k == p->sizes_n)
            p->size[p->sizes_n++].block_tokens = block_tokens_of(m->workers[i]);
        if (!p->size[k].windows)
            p->size[k].windows = windows_of(m->workers[i]);
    }
}

bool pl_prompt_read(pl_holdings_loop *l, const pl_model *m, const pl_scan *s, pl_arena *a,
                    pl_str cache_salt, double estimated_tokens, pl_prompt *p, bool *exact)
{
    bool any = false;
    *exact = false;
    begin(m, p);
    p->tokens = estimated_tokens;
    for (int i = 0; i < p->sizes_n; i++) {
        pl_keys *k = &p->size[i].keys;
        if (i > 0 && p->size[0].keys.kind == PL_KEYS_TEXT) { /* chunks know no block size */
            *k = p->size[0].keys;
            continue;
        }
        const space_entry *e =
            space_of(l, m, p->size[i].block_tokens, p->size[i].windows, cache_salt);
        p->size[i].space = e ? e->index : 0;
        p->size[i].unnamed = is_unnamed(l, e, cache_salt);
        if (!e || pl_keys_of_request(&e->space, s, a, k) != 0)
            *k = (pl_keys){.kind = PL_KEYS_NONE};
        if (k->kind == PL_KEYS_TOKENS && k->batch <= 1) {
            *exact = true;
            p->tokens = (double)k->tokens_n;
        }
        /* text of less than one chunk, where chunks are long, may have token ids */
        any = any || k->n > 0 || k->local_n > 0 ||
              (k->kind == PL_KEYS_TEXT && k->bytes >= PL_KV_CANON_CHUNK);
    }
    return any;
}

bool pl_prompt_tokens(pl_holdings_loop *l, const pl_model *m, const uint32_t *ids, size_t n,
                      pl_arena *a, pl_str cache_salt, pl_prompt *p)
{
    bool any = false;
    begin(m, p);
    p->tokens = (double)n;
    for (int i = 0; i < p->sizes_n; i++) {
        const space_entry *e =
            space_of(l, m, p->size[i].block_tokens, p->size[i].windows, cache_salt);
        pl_keys *k = &p->size[i].keys;
        p->size[i].space = e ? e->index : 0;
        p->size[i].unnamed = is_unnamed(l, e, cache_salt);
        if (!e || pl_keys_of_tokens(&e->space, ids, n, a, k) != 0)
            *k = (pl_keys){.kind = PL_KEYS_NONE};
        any = any || k->n > 0 || k->local_n > 0;
    }
    return any;
}

/* --- match --- */

static int size_of(const pl_prompt *p, const pl_worker_state *w)
{
    int k = find_size(p, w);
    return k < p->sizes_n ? k : -1;
}

static bool believed(const pl_worker_state *w)
{
    int trust = atomic_load_explicit(&w->kv_trust, memory_order_relaxed);
    return trust == PL_KV_LIVE || trust == PL_KV_BEHIND;
}

static pl_kv_hit *hit_of(pl_holdings_loop *l, int slot)
{
    pl_kv_hit *h = &l->hits[slot];
    if (h->stamp != l->stamp)
        *h = (pl_kv_hit){.stamp = l->stamp};
    return h;
}

static uint32_t tokens_of(const pl_prompt *p, double tokens)
{
    return (uint32_t)fmax(0, fmin(tokens, p->tokens));
}

/* Engines that publish, by their events. */
static void match_index(pl_holdings_loop *l, const pl_prompt *p, int at)
{
    const pl_keys *k = &p->size[at].keys;
    if (!p->size[at].space || k->kind != PL_KEYS_TOKENS || !k->local_n)
        return;
    int n = pl_index_match(l->reader, p->size[at].space, k->local, k->local_n, l->matches,
                           PL_MAX_WORKERS);
    for (int i = 0; i < n; i++) {
        const pl_match *x = &l->matches[i];
        if (l->trusted[x->slot] != l->stamp)
            continue; /* kept, but not believed */
        pl_kv_hit *h = hit_of(l, x->slot);
        double b = p->size[at].block_tokens;
        h->device = tokens_of(p, x->blocks[PL_TIER_DEVICE] * b);
        h->host = tokens_of(p, x->blocks[PL_TIER_HOST] * b) - h->device;
        h->disk = tokens_of(p, x->blocks[PL_TIER_EXTERNAL] * b) - h->device - h->host;
    }
}

/* What was routed or predicted, for the workers whose events are trusted or for the others; of
 * what events do not tell (text, a namespace without a name), for all. */
static void match_routed(pl_holdings_loop *l, const pl_prompt *p, int at, pl_approx *from,
                         bool trusted)
{
    const pl_keys *k = &p->size[at].keys;
    if (!k->n)
        return;
    int n = pl_approx_match(from, k->key, k->n, l->approx, PL_MAX_WORKERS);
    for (int i = 0; i < n; i++) {
        int slot = l->approx[i].slot;
        if (k->kind == PL_KEYS_TOKENS && !p->size[at].unnamed &&
            (l->trusted[slot] == l->stamp) != trusted)
            continue;
        pl_kv_hit *h = hit_of(l, slot);
        uint32_t tokens = tokens_of(p, pl_keys_tokens(k, l->approx[i].chunks, p->tokens));
        if (tokens <= h->device)
            continue;
        uint32_t further = h->device + h->host + h->disk;
        h->device = tokens;
        h->host = h->disk = 0;
        if (further > tokens)
            h->host = further - tokens;
    }
}

const pl_kv_hit *pl_prompt_match(pl_holdings_loop *l, const pl_prompt *p, const pl_model *m,
                                 uint32_t *stamp)
{
    bool published = false, silent = false;
    if (++l->stamp == 0)
        l->stamp = 1; /* 0 is what hits begin with */
    *stamp = l->stamp;
    for (int i = 0; i < m->workers_n; i++) {
        bool yes = believed(m->workers[i]);
        l->trusted[m->workers[i]->slot] = yes ? l->stamp : 0;
        published = published || yes;
        silent = silent || !yes;
    }
    for (int i = 0; i < p->sizes_n; i++) {
        bool text = p->size[i].keys.kind == PL_KEYS_TEXT, untold = text || p->size[i].unnamed;
        if (text && i > 0)
            break; /* the same keys once more */
        if (published)
            match_index(l, p, i);
        /* text says nothing to the index: what was routed is all there is */
        if (silent || untold)
            match_routed(l, p, i, l->h->routed, false);
        if (published && !untold && l->h->predicted)
            match_routed(l, p, i, l->h->predicted, true);
    }
    return l->hits;
}

pl_active_keys pl_prompt_blocks(const pl_prompt *p, const pl_worker_state *w)
{
    int at = size_of(p, w);
    if (at < 0 || p->size[at].keys.kind != PL_KEYS_TOKENS)
        return (pl_active_keys){NULL, 0, 0};
    const pl_keys *k = &p->size[at].keys;
    return (pl_active_keys){k->key, (int32_t)k->n, (int32_t)k->unit};
}

/* --- what became of it --- */

void pl_prompt_routed(pl_holdings_loop *l, pl_prompt *p, const pl_worker_state *w,
                      double expected_tokens)
{
    p->slot = -1;
    p->at = size_of(p, w);
    if (p->at < 0 || !p->size[p->at].keys.n)
        return;
    const pl_keys *k = &p->size[p->at].keys;
    p->live = believed(w) && k->kind == PL_KEYS_TOKENS && !p->size[p->at].unnamed;
    p->slot = w->slot;
    p->routed_ns = pl_clock_now_ns(l->h->o.clock);
    p->expected_tokens = expected_tokens;
    /* of text the tokens were rounded; of token ids only whole units count */
    double units = expected_tokens / fmax(pl_keys_tokens(k, 1, p->tokens), 1e-9);
    p->expected_units = (size_t)fmax(0, floor(units + (k->kind == PL_KEYS_TEXT ? 0.5 : 0)));
    if (p->live && l->h->predicted)
        pl_approx_insert(l->h->predicted, k->key, k->n, w->slot);
    else if (!p->live)
        pl_approx_insert(l->h->routed, k->key, k->n, w->slot);
}

static void add(_Atomic uint64_t *to, double n)
{
    atomic_fetch_add_explicit(to, (uint64_t)n, memory_order_relaxed);
}

void pl_prompt_usage(pl_holdings_loop *l, pl_prompt *p, double cached_tokens, double prompt_tokens,
                     unsigned shape)
{
    if (p->slot < 0 || prompt_tokens <= 0)
        return;
    const pl_keys *k = &p->size[p->at].keys;
    told *t = &l->h->by_slot[p->slot];
    const uint32_t bit = 1u << (shape & 31);
    bool tells = atomic_load_explicit(&t->shapes, memory_order_relaxed) & bit;
    if (cached_tokens < 0 && !tells)
        return;
    if (!tells)
        atomic_fetch_or_explicit(&t->shapes, bit, memory_order_relaxed);
    cached_tokens = fmax(cached_tokens, 0);
    add(&t->requests, 1);
    add(&t->predicted, p->expected_tokens);
    add(&t->actual, cached_tokens);
    add(&t->error, fabs(p->expected_tokens - cached_tokens));
    if (!p->live && p->expected_units)
        pl_approx_correct(l->h->routed, k->key, k->n, p->slot,
                          pl_keys_held(k, p->expected_units, cached_tokens, prompt_tokens),
                          p->routed_ns);
    p->slot = -1;
}

void pl_prompt_failed(pl_holdings_loop *l, pl_prompt *p)
{
    if (p->slot < 0)
        return;
    const pl_keys *k = &p->size[p->at].keys;
    pl_approx *in = p->live ? l->h->predicted : l->h->routed;
    if (in)
        pl_approx_forget(in, k->key, k->n, p->slot, p->expected_units);
    p->slot = -1;
}
