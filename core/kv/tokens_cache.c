/* The cache of token ids: see tokens_cache.h. Called on the loops' threads; owns entries, jobs,
 * calls and what is said about models; tickets are shared with those who wait.
 *
 * An entry is what one prompt's ids are, or a job that finds them out. A job has one or two calls
 * under way; it publishes the ids as soon as it has them, and lives until its last call has ended,
 * since that may be the check of the other one. The lock guards all of it but the ids, which are
 * immutable: parsing, comparing and building bodies happen outside. */
#include "kv/tokens_cache.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include <xxhash.h>

#include "base/err.h"
#include "kv/canon.h"
#include "kv/tokens_ask.h"

struct pl_tokcache_ticket {
    pl_message message;
    pl_tokcache_ticket *next; /* of its job */
    _Atomic int refs;         /* the waiter's and the cache's */
    bool left;                /* the waiter's thread only */
    pl_mailbox *mailbox;
    void (*ready)(void *ctx, int rc, pl_tokens *ids);
    void *ctx;
    int rc;
    pl_tokens *ids;
};

typedef struct model {
    uint64_t name;  /* hash */
    uint64_t epoch; /* in the keys of all its entries */
    pl_tokens *anchor;
    bool anchor_asked;
    uint32_t agreed, parts; /* checks in a row; parts since the last check */
    uint32_t distrust;      /* turns to go */
    uint32_t failures;      /* calls in a row */
    uint64_t off_until_ns;
} model;

typedef struct entry entry;

typedef struct job {
    entry *entry; /* NULL once it has published or given up */
    model *model;
    pl_tokcache_ticket *waiting;
    int calls;
    bool whole_asked;
    pl_tokens *whole, *joined;
} job;

struct entry {
    uint64_t key;
    entry *chain, *newer, *older; /* the latter two when it has ids */
    pl_tokens *ids;               /* or */
    job *job;
};

typedef enum call_kind { WHOLE, PART, ANCHOR } call_kind;

struct pl_tokcache_call {
    call_kind kind;
    job *job; /* NULL: ANCHOR */
    model *model;
    pl_tokens *prefix; /* of WHOLE and PART: the longest known one, or NULL */
    pl_tokens *anchor; /* of PART */
};

struct pl_tokcache {
    pthread_mutex_t lock;
    pl_clock clock;
    uint64_t max_bytes;
    uint32_t max_calls, calls;
    entry **table;
    uint32_t mask, count;
    entry *newest, *oldest;
    model models[PL_TOKCACHE_MODELS];
    uint32_t models_n;
    _Atomic uint64_t bytes;
    pl_tokcache_stats stats;
};

enum { FIRST_TABLE = 64 };

int pl_tokcache_new(const pl_tokcache_options *o, pl_tokcache **out)
{
    *out = NULL;
    if (!o->clock.now_ns || o->max_calls < 1)
        return PL_EINVALID;
    pl_tokcache *c = calloc(1, sizeof *c);
    if (!c)
        return PL_ENOMEM;
    c->table = calloc(FIRST_TABLE, sizeof(entry *));
    if (!c->table) {
        free(c);
        return PL_ENOMEM;
    }
    c->mask = FIRST_TABLE - 1;
    pthread_mutex_init(&c->lock, NULL);
    c->clock = o->clock;
    c->max_bytes = o->max_bytes;
    c->max_calls = o->max_calls;
    *out = c;
    return 0;
}

/* --- tickets --- */

static void ticket_unref(pl_tokcache_ticket *t)
{
    if (atomic_fetch_sub_explicit(&t->refs, 1, memory_order_acq_rel) == 1) {
        pl_tokens_release(t->ids);
        free(t);
    }
}

static void ticket_run(pl_message *m, void *loop_ctx)
{
    (void)loop_ctx;
    pl_tokcache_ticket *t = (pl_tokcache_ticket *)m;
    if (!t->left) {
        pl_tokens *ids = t->ids;
        t->ids = NULL;
        t->ready(t->ctx, t->rc, ids);
        ticket_unref(t); /* the waiter's: it has had its answer */
    }
    ticket_unref(t);
}

void pl_tokcache_leave(pl_tokcache_ticket *t)
{
    t->left = true;
    ticket_unref(t);
}

static pl_tokcache_ticket *ticket_new(const pl_tokcache_request *r)
{
    pl_tokcache_ticket *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->message.run = ticket_run;
    atomic_init(&t->refs, 2);
    t->mailbox = r->mailbox;
    t->ready = r->ready;
    t->ctx = r->ctx;
    return t;
}

/* Without the lock: what the job's waiters get. */
static void deliver(pl_tokcache_ticket *t, int rc, pl_tokens *ids)
{
    for (pl_tokcache_ticket *next; t; t = next) {
        next = t->next;
        t->rc = rc;
        t->ids = ids ? pl_tokens_ref(ids) : NULL;
        if (pl_mailbox_post(t->mailbox, &t->message) != 0)
            ticket_unref(t); /* its loop has ended: the waiter leaves by itself */
    }
    pl_tokens_release(ids);
}

/* --- entries --- */

static entry **find(pl_tokcache *c, uint64_t key)
{
    entry **at = &c->table[key & c->mask];
    while (*at && (*at)->key != key)
        at = &(*at)->chain;
    return at;
}

static void table_grow(pl_tokcache *c)
{
    uint32_t n = (c->mask + 1) * 2;
    entry **to = calloc(n, sizeof(entry *));
    if (!to)
        return; /* longer chains, then */
    for (uint32_t i = 0; i <= c->mask; i++)
        for (entry *e = c->table[i], *next; e; e = next) {
            next = e->chain;
            e->chain = to[e->key & (n - 1)];
            to[e->key & (n - 1)] = e;
        }
    free(c->table);
    c->table = to;
    c->mask = n - 1;
}

static entry *entry_new(pl_tokcache *c, uint64_t key)
{
    if (c->count > c->mask)
        table_grow(c);
    entry *e = calloc(1, sizeof *e);
    if (!e)
        return NULL;
    e->key = key;
    e->chain = c->table[key & c->mask];
    c->table[key & c->mask] = e;
    c->count++;
    atomic_fetch_add_explicit(&c->bytes, sizeof *e, memory_order_relaxed);
    return e;
}

static void order_take(pl_tokcache *c, entry *e)
{
    *(e->newer ? &e->newer->older : &c->newest) = e->older;
    *(e->older ? &e->older->newer : &c->oldest) = e->newer;
}

static void order_put(pl_tokcache *c, entry *e)
{
    e->newer = NULL;
    e->older = c->newest;
    *(c->newest ? &c->newest->newer : &c->oldest) = e;
    c->newest = e;
}

static void entry_free(pl_tokcache *c, entry *e)
{
    *find(c, e->key) = e->chain;
    if (e->ids)
        order_take(c, e);
    c->count--;
    atomic_fetch_sub_explicit(&c->bytes, sizeof *e, memory_order_relaxed);
    pl_tokens_release(e->ids);
    free(e);
}

static void evict(pl_tokcache *c)
{
    while (c->oldest && atomic_load_explicit(&c->bytes, memory_order_relaxed) > c->max_bytes) {
        entry_free(c, c->oldest);
        c->stats.evicted++;
    }
}

/* --- models --- */

static model *model_of(pl_tokcache *c, uint64_t name)
{
    for (uint32_t i = 0; i < c->models_n; i++)
        if (c->models[i].name == name)
            return &c->models[i];
    if (c->models_n == PL_TOKCACHE_MODELS)
        return NULL;
    c->models[c->models_n].name = name;
    return &c->models[c->models_n++];
}

static void agreed(pl_tokcache *c, model *m)
{
    c->stats.agreed++;
    m->agreed++;
}

/* Its prompts do not add up: what was joined is out of reach from now on, and evicted in time. */
static void differed(pl_tokcache *c, model *m)
{
    c->stats.differed++;
    m->agreed = 0;
    m->distrust = PL_TOKCACHE_DISTRUST;
    m->epoch++;
    pl_tokens_release(m->anchor); /* the model may have another tokenizer by now */
    m->anchor = NULL;
    m->anchor_asked = false;
}

static void call_ended(pl_tokcache *c, model *m, bool ok)
{
    c->calls--;
    if (ok) {
        m->failures = 0;
        return;
    }
    c->stats.failures++;
    if (++m->failures < PL_TOKCACHE_FAILURES)
        return;
    m->failures = 0;
    m->off_until_ns = pl_clock_now_ns(c->clock) + PL_TOKCACHE_PAUSE_MS * 1000000ull;
}

/* --- asking --- */

static uint64_t key_of(const model *m, uint64_t boundary)
{
    return pl_kv_canon_link(boundary, m->epoch * 0x632be59bd9b4e019u);
}

/* What is to be asked for, decided under the lock. */
typedef struct plan {
    pl_tokcache_call *calls[3];
    int n;
    size_t from; /* of PART: the first message that is new */
} plan;

static bool plan_add(plan *p, call_kind kind, job *j, model *m, pl_tokens *prefix)
{
    pl_tokcache_call *call = calloc(1, sizeof *call);
    if (!call)
        return false;
    *call = (pl_tokcache_call){.kind = kind, .job = j, .model = m};
    call->prefix = prefix ? pl_tokens_ref(prefix) : NULL;
    call->anchor = kind == PART ? pl_tokens_ref(m->anchor) : NULL;
    p->calls[p->n++] = call;
    return true;
}

static void call_free(pl_tokcache_call *call)
{
    pl_tokens_release(call->prefix);
    pl_tokens_release(call->anchor);
    free(call);
}

/* The ids of the longest known list of messages that the request goes on from; *n of them. */
static pl_tokens *prefix_of(pl_tokcache *c, const model *m, const pl_ask *q, size_t *n)
{
    for (*n = q->n - 1; *n > 0; --*n) {
        entry *e = *find(c, key_of(m, q->keys[*n - 1]));
        if (e && e->ids)
            return e->ids;
    }
    return NULL;
}

static bool make_plan(pl_tokcache *c, model *m, job *j, const pl_ask *q, plan *p)
{
    pl_tokens *prefix = prefix_of(c, m, q, &p->from);
    bool add_up = q->chat && q->plain && prefix && m->distrust == 0;
    bool part = add_up && m->anchor && pl_ask_reply(q, p->from);
    bool whole = !part || m->agreed < PL_TOKCACHE_CHECKS || m->parts + 1 >= PL_TOKCACHE_RECHECK;
    if (m->distrust > 0)
        m->distrust--;
    if (whole && !plan_add(p, WHOLE, j, m, prefix))
        return false;
    if (part && !plan_add(p, PART, j, m, prefix))
        return false;
    j->whole_asked = whole;
    j->calls = p->n;
    if (part)
        m->parts = whole ? 0 : m->parts + 1;
    if (add_up && !m->anchor && !m->anchor_asked)
        m->anchor_asked = plan_add(p, ANCHOR, NULL, m, NULL);
    for (int i = 0; i < p->n; i++)
        ++*(p->calls[i]->kind == WHOLE  ? &c->stats.whole
            : p->calls[i]->kind == PART ? &c->stats.parts
                                        : &c->stats.anchors);
    c->calls += (uint32_t)p->n;
    return true;
}

static void plan_drop(plan *p)
{
    for (int i = 0; i < p->n; i++)
        call_free(p->calls[i]);
}

/* With the lock: how the request fares; *p says what is to be asked for. */
static pl_tokcache_result look_up(pl_tokcache *c, const pl_ask *q, uint64_t name,
                                  pl_tokcache_ticket *t, pl_tokens **ids, plan *p)
{
    model *m = model_of(c, name);
    if (!m || pl_clock_now_ns(c->clock) < m->off_until_ns)
        return PL_TOKCACHE_OFF;
    uint64_t key = key_of(m, q->keys[q->n - 1]);
    entry *e = *find(c, key);
    if (e && e->ids) {
        order_take(c, e);
        order_put(c, e);
        c->stats.hits++;
        *ids = pl_tokens_ref(e->ids);
        return PL_TOKCACHE_HIT;
    }
    if (e) {
        t->next = e->job->waiting;
        e->job->waiting = t;
        c->stats.joined++;
        return PL_TOKCACHE_WAIT;
    }
    if (c->calls >= c->max_calls)
        return PL_TOKCACHE_OFF;
    job *j = calloc(1, sizeof *j);
    if (!j || !make_plan(c, m, j, q, p) || !(e = entry_new(c, key))) {
        if (j && j->calls) /* the plan was made and counted */
            c->calls -= (uint32_t)p->n;
        for (int i = 0; i < p->n; i++)
            m->anchor_asked &= p->calls[i]->kind != ANCHOR;
        plan_drop(p);
        p->n = 0;
        free(j);
        return PL_TOKCACHE_OFF;
    }
    *j = (job){e, m, t, j->calls, j->whole_asked, NULL, NULL};
    e->job = j;
    return PL_TOKCACHE_ASK;
}

static int body_of(const pl_ask *q, const plan *p, int i, pl_str name, pl_buf *body)
{
    switch (p->calls[i]->kind) {
    case WHOLE:
        return pl_ask_whole(q, name, body);
    case PART:
        return pl_ask_after(q, p->from, name, body);
    default:
        return pl_ask_anchor(q, name, body);
    }
}

pl_tokcache_result pl_tokcache_get(pl_tokcache *c, const pl_tokcache_request *r,
                                   pl_tokcache_answer *out)
{
    *out = (pl_tokcache_answer){0};
    uint64_t name = XXH3_64bits_withSeed(r->model.p, r->model.n, (uint64_t)r->api);
    pl_ask q;
    plan p = {.n = 0};
    pl_tokcache_result result = PL_TOKCACHE_OFF;
    if (pl_ask_read(&q, r->body, r->scan, r->api, name) == 0) {
        pl_tokcache_ticket *t = ticket_new(r);
        if (t) {
            pthread_mutex_lock(&c->lock);
            result = look_up(c, &q, name, t, &out->ids, &p);
            pthread_mutex_unlock(&c->lock);
        }
        if (result == PL_TOKCACHE_WAIT || result == PL_TOKCACHE_ASK)
            out->ticket = t;
        else
            free(t);
    }
    for (int i = 0; i < p.n; i++) {
        pl_tokcache_post *post = &out->calls[out->calls_n];
        post->call = p.calls[i];
        if (body_of(&q, &p, i, r->model, &post->body) == 0) {
            out->calls_n++;
            continue;
        }
        pl_buf_free(&post->body); /* out of memory: as if the engine had failed */
        pl_tokcache_fail(c, p.calls[i]);
    }
    pl_ask_free(&q);
    return result;
}

/* --- answers --- */

/* With the lock: what the job has is known now, and goes to those who wait; the caller delivers. */
static pl_tokcache_ticket *publish(pl_tokcache *c, job *j, pl_tokens *ids)
{
    pl_tokcache_ticket *waiting = j->waiting;
    entry *e = j->entry;
    j->waiting = NULL;
    j->entry = NULL;
    e->job = NULL;
    if (ids) {
        e->ids = pl_tokens_ref(ids);
        order_put(c, e);
        evict(c);
    } else {
        entry_free(c, e);
    }
    return waiting;
}

/* A WHOLE or PART call of a job has ended with these ids (the function's to keep), or without. */
static void job_result(pl_tokcache *c, pl_tokcache_call *call, pl_tokens *ids, bool odd)
{
    job *j = call->job;
    model *m = j->model;
    pl_tokens *known = NULL;
    pl_tokcache_ticket *waiting = NULL;
    bool done = false;
    pthread_mutex_lock(&c->lock);
    call_ended(c, m, ids || odd);
    *(call->kind == WHOLE ? &j->whole : &j->joined) = ids;
    j->calls--;
    if (odd)
        differed(c, m);
    else if (j->whole && j->joined && pl_tokens_same_addition(j->whole, j->joined))
        agreed(c, m);
    else if (j->whole && j->joined)
        differed(c, m);
    if (j->entry && (j->whole || (j->joined && !j->whole_asked)))
        known = j->whole ? j->whole : j->joined;
    done = j->entry && (known || j->calls == 0);
    if (done && !known && j->joined && m->agreed >= PL_TOKCACHE_CHECKS)
        known = j->joined; /* the check failed, not what it was to check */
    if (known)
        pl_tokens_ref(known);
    if (done)
        waiting = publish(c, j, known);
    if (j->calls == 0) {
        pl_tokens_release(j->whole);
        pl_tokens_release(j->joined);
        free(j);
    }
    pthread_mutex_unlock(&c->lock);
    if (done)
        deliver(waiting, known ? 0 : PL_EUNAVAILABLE, known);
}

static void anchor_result(pl_tokcache *c, model *m, pl_tokens *ids)
{
    pthread_mutex_lock(&c->lock);
    call_ended(c, m, ids != NULL);
    pl_tokens_release(m->anchor);
    m->anchor = ids;
    m->anchor_asked = ids != NULL; /* else it is asked for again */
    pthread_mutex_unlock(&c->lock);
}

bool pl_tokcache_fill(pl_tokcache *c, pl_tokcache_call *call, pl_str response)
{
    uint32_t *ids;
    int64_t n = pl_ask_answer(response, &ids);
    pl_tokens *t = NULL;
    bool odd = false;
    if (n >= 0 && call->kind == PART) {
        size_t skip = pl_tokens_count(call->anchor);
        odd = !pl_tokens_begin(call->anchor, ids, (size_t)n);
        if (!odd)
            t = pl_tokens_new(call->prefix, ids + skip, (size_t)n - skip, &c->bytes);
    } else if (n >= 0) {
        bool goes_on = call->prefix && pl_tokens_begin(call->prefix, ids, (size_t)n);
        size_t skip = goes_on ? pl_tokens_count(call->prefix) : 0;
        t = pl_tokens_new(goes_on ? call->prefix : NULL, ids + skip, (size_t)n - skip, &c->bytes);
    }
    free(ids);
    if (call->kind == ANCHOR)
        anchor_result(c, call->model, t);
    else
        job_result(c, call, t, odd);
    call_free(call);
    return n >= 0;
}

void pl_tokcache_fail(pl_tokcache *c, pl_tokcache_call *call)
{
    if (call->kind == ANCHOR)
        anchor_result(c, call->model, NULL);
    else
        job_result(c, call, NULL, false);
    call_free(call);
}

void pl_tokcache_stats_of(pl_tokcache *c, pl_tokcache_stats *out)
{
    pthread_mutex_lock(&c->lock);
    *out = c->stats;
    out->entries = c->count;
    pthread_mutex_unlock(&c->lock);
    out->bytes = atomic_load_explicit(&c->bytes, memory_order_relaxed);
}

void pl_tokcache_free(pl_tokcache *c)
{
    if (!c)
        return;
    while (c->oldest)
        entry_free(c, c->oldest);
    for (uint32_t i = 0; i < c->models_n; i++)
        pl_tokens_release(c->models[i].anchor);
    free(c->table);
    pthread_mutex_destroy(&c->lock);
    free(c);
}
