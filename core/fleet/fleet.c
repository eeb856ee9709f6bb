/* The fleet: the list of engines with the models that each serves, the slots of their workers, and
 * the views made from it. Changes come from the control thread (any thread may make them); each
 * builds the next view completely before anything is replaced, so that a change that runs out of
 * memory changes nothing. Two locks: `change` is held over a change and its publish(), which keeps
 * views in order and lets publish() read the fleet; `lock` guards the data, for short.
 *
 * The fleet owns one reference to each engine, also to a removed one until it is the last reference
 * to it: only then are the engine's slots given to others, with the next generation. So whatever
 * goes by slot alone (a done hook, a counter) never mistakes a request that outlived its engine's
 * removal for one of its successor's. */
#include "fleet/fleet.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/arena.h"
#include "policy_abi.h"

/* A set of model ids: sorted, without duplicates; one block with the bytes behind it. */
typedef struct model_set {
    int n;
    pl_str ids[];
} model_set;

typedef struct node {
    struct node *next;
    pl_engine *engine;
    model_set *models, *adapters;
    bool removed; /* out of every new view; waits for its last request */
} node;

struct pl_fleet_state {
    pthread_mutex_t change; /* recursive: publish() may make a change */
    pthread_mutex_t lock;
    void (*publish)(void *ctx, pl_view *v);
    void *ctx;
    node *first; /* in the order in which they were added */
    pl_view *view;
    uint64_t version;
    bool used[PL_MAX_WORKERS];          /* slots */
    int32_t generation[PL_MAX_WORKERS]; /* of the slot's last user; 0: never used */
};

/* --- model sets --- */

static int str_cmp(pl_str a, pl_str b)
{
    size_t n = a.n < b.n ? a.n : b.n;
    int d = n ? memcmp(a.p, b.p, n) : 0;
    return d ? d : (a.n > b.n) - (a.n < b.n);
}

static int id_cmp(const void *a, const void *b)
{
    return str_cmp(*(const pl_str *)a, *(const pl_str *)b);
}

static bool ids_ok(const pl_str *ids, int n)
{
    if (n < 0 || n > PL_FLEET_MAX_MODELS)
        return false;
    for (int i = 0; i < n; i++)
        if (ids[i].n == 0 || ids[i].n > PL_FLEET_MAX_MODEL_BYTES)
            return false;
    return true;
}

static model_set *model_set_new(const pl_str *ids, int n)
{
    size_t bytes = 0;
    for (int i = 0; i < n; i++)
        bytes += ids[i].n;
    model_set *s = malloc(sizeof *s + (size_t)n * sizeof s->ids[0] + bytes);
    if (!s)
        return NULL;
    char *to = (char *)&s->ids[n];
    for (int i = 0; i < n; i++) {
        memcpy(to, ids[i].p, ids[i].n);
        s->ids[i] = (pl_str){to, ids[i].n};
        to += ids[i].n;
    }
    if (n > 1)
        qsort(s->ids, (size_t)n, sizeof s->ids[0], id_cmp);
    s->n = 0;
    for (int i = 0; i < n; i++)
        if (s->n == 0 || !pl_str_eq(s->ids[i], s->ids[s->n - 1]))
            s->ids[s->n++] = s->ids[i];
    return s;
}

static bool model_sets_equal(const model_set *a, const model_set *b)
{
    if (a->n != b->n)
        return false;
    for (int i = 0; i < a->n; i++)
        if (!pl_str_eq(a->ids[i], b->ids[i]))
            return false;
    return true;
}

static bool model_set_has(const model_set *s, pl_str id)
{
    return s->n && bsearch(&id, s->ids, (size_t)s->n, sizeof s->ids[0], id_cmp);
}

/* --- views --- */

typedef struct view_box {
    pl_view view; /* first */
    pl_arena arena;
} view_box;

pl_view *pl_view_ref(pl_view *v)
{
    atomic_fetch_add_explicit(&v->refs, 1, memory_order_relaxed);
    return v;
}

void pl_view_unref(pl_view *v)
{
    if (!v || atomic_fetch_sub_explicit(&v->refs, 1, memory_order_acq_rel) != 1)
        return;
    for (int i = 0; i < v->engines_n; i++)
        pl_engine_unref(v->engines[i]);
    view_box *box = (view_box *)v;
    pl_arena_free(&box->arena);
    free(box);
}

const pl_model *pl_view_model(const pl_view *v, pl_str id)
{
    int lo = 0, hi = v->models_n;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        int d = str_cmp(v->models[mid].id, id);
        if (d == 0)
            return &v->models[mid];
        if (d < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

const pl_model *pl_view_only_model(const pl_view *v)
{
    return v->models_n == 1 ? &v->models[0] : NULL;
}

bool pl_model_has(const pl_model *m, const pl_worker_state *w)
{
    int lo = 0, hi = m->workers_n;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        if (m->workers[mid]->slot < w->slot)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < m->workers_n && m->workers[lo] == w;
}

/* That an engine serves a model. */
typedef struct serves {
    pl_str id;
    pl_engine *engine;
    bool adapter;
} serves;

static int serves_cmp(const void *a, const void *b)
{
    return str_cmp(((const serves *)a)->id, ((const serves *)b)->id);
}

static int slot_cmp(const void *a, const void *b)
{
    int x = (*(pl_worker_state *const *)a)->slot, y = (*(pl_worker_state *const *)b)->slot;
    return (x > y) - (x < y);
}

/* All workers of the engines in the list, in order of slot. */
static pl_worker_state **workers_of(pl_arena *a, const serves *list, int n, int *count)
{
    int total = 0, at = 0;
    for (int i = 0; i < n; i++)
        total += list[i].engine->workers_n;
    pl_worker_state **w = pl_arena_alloc(a, ((size_t)total + 1) * sizeof(pl_worker_state *));
    if (!w)
        return NULL;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < list[i].engine->workers_n; k++)
            w[at++] = &list[i].engine->workers[k];
    if (total > 1)
        qsort(w, (size_t)total, sizeof(pl_worker_state *), slot_cmp);
    *count = total;
    return w;
}

/* Groups the pairs, which are sorted by id, into models. */
static int add_models(view_box *box, const serves *pairs, int n)
{
    pl_view *v = &box->view;
    int distinct = 0;
    for (int i = 0; i < n; i++)
        distinct += i == 0 || !pl_str_eq(pairs[i].id, pairs[i - 1].id);
    v->models = pl_arena_alloc(&box->arena, ((size_t)distinct + 1) * sizeof(pl_model));
    if (!v->models)
        return PL_ENOMEM;
    for (int i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && pl_str_eq(pairs[end].id, pairs[i].id);)
            end++;
        pl_model *m = &v->models[v->models_n++];
        m->id = pl_arena_str(&box->arena, pairs[i].id);
        m->workers = workers_of(&box->arena, &pairs[i], end - i, &m->workers_n);
        if (!m->id.p || !m->workers)
            return PL_ENOMEM;
        m->adapter = false;
        for (int k = i; k < end; k++)
            m->adapter |= pairs[k].adapter;
    }
    return 0;
}

static int fill_view(view_box *box, const pl_fleet *f, serves *pairs, int engines_n)
{
    pl_view *v = &box->view;
    v->engines = pl_arena_alloc(&box->arena, ((size_t)engines_n + 1) * sizeof(pl_engine *));
    if (!v->engines)
        return PL_ENOMEM;
    for (const node *n = f->first; n; n = n->next)
        if (!n->removed) {
            pairs[v->engines_n] = (serves){{NULL, 0}, n->engine, false};
            v->engines[v->engines_n++] = pl_engine_ref(n->engine);
        }
    v->workers = workers_of(&box->arena, pairs, v->engines_n, &v->workers_n);
    if (!v->workers)
        return PL_ENOMEM;
    int pairs_n = 0;
    for (const node *n = f->first; n; n = n->next)
        for (int i = 0; !n->removed && i < n->models->n; i++)
            pairs[pairs_n++] = (serves){n->models->ids[i], n->engine,
                                        model_set_has(n->adapters, n->models->ids[i])};
    if (pairs_n > 1)
        qsort(pairs, (size_t)pairs_n, sizeof *pairs, serves_cmp);
    return add_models(box, pairs, pairs_n);
}

/* What the list says now; NULL when out of memory. */
static pl_view *view_new(pl_fleet *f)
{
    int engines_n = 0;
    size_t pairs_n = 0;
    for (const node *n = f->first; n; n = n->next)
        if (!n->removed) {
            engines_n++;
            pairs_n += (size_t)n->models->n;
        }
    size_t room = (pairs_n > (size_t)engines_n ? pairs_n : (size_t)engines_n) + 1;
    view_box *box = calloc(1, sizeof *box);
    serves *pairs = malloc(room * sizeof *pairs);
    if (box)
        box->view.refs = 1;
    int rc = box && pairs ? fill_view(box, f, pairs, engines_n) : PL_ENOMEM;
    free(pairs);
    if (rc != 0) {
        pl_view_unref(box ? &box->view : NULL);
        return NULL;
    }
    box->view.version = ++f->version;
    return &box->view;
}

/* --- the fleet --- */

pl_fleet *pl_fleet_new(void (*publish)(void *ctx, pl_view *v), void *ctx)
{
    pl_fleet *f = calloc(1, sizeof *f);
    if (!f)
        return NULL;
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&f->change, &recursive);
    pthread_mutexattr_destroy(&recursive);
    pthread_mutex_init(&f->lock, NULL);
    f->publish = publish;
    f->ctx = ctx;
    f->view = view_new(f);
    if (!f->view) {
        pl_fleet_free(f);
        return NULL;
    }
    return f;
}

static void node_free(node *n)
{
    if (!n)
        return;
    pl_engine_unref(n->engine);
    free(n->models);
    free(n->adapters);
    free(n);
}

void pl_fleet_free(pl_fleet *f)
{
    if (!f)
        return;
    pl_view_unref(f->view);
    for (node *n = f->first, *next; n; n = next) {
        next = n->next;
        node_free(n);
    }
    pthread_mutex_destroy(&f->lock);
    pthread_mutex_destroy(&f->change);
    free(f);
}

/* The slots of removed engines that nobody but the fleet refers to. Nobody can start to again: they
 * are in no view and are not found. */
static void sweep(pl_fleet *f)
{
    for (node **at = &f->first; *at;) {
        node *n = *at;
        if (!n->removed || atomic_load_explicit(&n->engine->refs, memory_order_acquire) > 1) {
            at = &n->next;
            continue;
        }
        for (int i = 0; i < n->engine->workers_n; i++)
            f->used[n->engine->workers[i].slot] = false;
        *at = n->next;
        node_free(n);
    }
}

static void begin(pl_fleet *f)
{
    pthread_mutex_lock(&f->change);
    pthread_mutex_lock(&f->lock);
    sweep(f);
}

/* Ends a change: publishes v unless it is NULL. */
static void end(pl_fleet *f, pl_view *v)
{
    pl_view *old = NULL;
    if (v) {
        old = f->view;
        f->view = v;
        pl_view_ref(v);
    }
    pthread_mutex_unlock(&f->lock);
    pl_view_unref(old);
    if (v && f->publish)
        f->publish(f->ctx, v);
    else if (v)
        pl_view_unref(v);
    pthread_mutex_unlock(&f->change);
}

static node *find(pl_fleet *f, pl_str name)
{
    for (node *n = f->first; n; n = n->next)
        if (!n->removed && pl_str_eq(pl_str_c(n->engine->name), name))
            return n;
    return NULL;
}

static node *node_of(const pl_fleet *f, const pl_engine *e)
{
    for (node *n = f->first; n; n = n->next)
        if (!n->removed && n->engine == e)
            return n;
    return NULL;
}

static int take_slots(pl_fleet *f, pl_engine *e)
{
    int at = 0;
    for (int i = 0; i < e->workers_n; i++) {
        while (at < PL_MAX_WORKERS && f->used[at])
            at++;
        if (at == PL_MAX_WORKERS) {
            while (--i >= 0)
                f->used[e->workers[i].slot] = false;
            return PL_ELIMIT;
        }
        f->used[at] = true;
        e->workers[i].slot = at;
    }
    for (int i = 0; i < e->workers_n; i++)
        e->workers[i].generation = ++f->generation[e->workers[i].slot];
    return 0;
}

static int add(pl_fleet *f, node *n, pl_view **v, pl_errbuf *eb)
{
    pl_engine *e = n->engine;
    const node *same = find(f, pl_str_c(e->name));
    if (same)
        return pl_fail(eb, PL_EEXISTS,
                       "an engine named \"%s\" is there already (%s): give this one another name "
                       "(NAME=URL), or remove the other first",
                       e->name, same->engine->url);
    if (take_slots(f, e) != 0)
        return pl_fail(eb, PL_ELIMIT,
                       "engine \"%s\" has %d workers, which is more than are left of %d for the "
                       "fleet",
                       e->name, e->workers_n, PL_MAX_WORKERS);
    node **tail = &f->first;
    while (*tail)
        tail = &(*tail)->next;
    *tail = n;
    *v = view_new(f);
    if (!*v) {
        *tail = NULL;
        for (int i = 0; i < e->workers_n; i++)
            f->used[e->workers[i].slot] = false;
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    }
    return 0;
}

int pl_fleet_add(pl_fleet *f, const pl_engine_spec *spec, pl_engine **out, pl_errbuf *eb)
{
    if (out)
        *out = NULL;
    int models_n = spec->models ? spec->models_n : 0;
    if (!ids_ok(spec->models, models_n))
        return pl_fail(eb, PL_EINVALID,
                       "an engine's models must be at most %d names of 1 to %d "
                       "bytes",
                       PL_FLEET_MAX_MODELS, PL_FLEET_MAX_MODEL_BYTES);
    node *n = calloc(1, sizeof *n);
    if (!n)
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    n->models = model_set_new(spec->models, models_n);
    n->adapters = model_set_new(NULL, 0);
    int rc = n->models && n->adapters ? pl_engine_new(spec, &n->engine, eb)
                                      : pl_fail(eb, PL_ENOMEM, "out of memory");
    if (rc != 0) {
        node_free(n);
        return rc;
    }
    pl_view *v = NULL;
    begin(f);
    rc = add(f, n, &v, eb);
    if (rc == 0 && out)
        *out = pl_engine_ref(n->engine);
    end(f, v);
    if (rc != 0)
        node_free(n);
    return rc;
}

pl_engine *pl_fleet_find(pl_fleet *f, pl_str name)
{
    pthread_mutex_lock(&f->lock);
    node *n = find(f, name);
    pl_engine *e = n ? pl_engine_ref(n->engine) : NULL;
    pthread_mutex_unlock(&f->lock);
    return e;
}

int pl_fleet_drain(pl_fleet *f, pl_engine *e, bool draining)
{
    int want = draining ? PL_ENGINE_DRAINING : PL_ENGINE_ACTIVE, rc = PL_ENOTFOUND;
    pl_view *v = NULL;
    begin(f);
    if (node_of(f, e)) {
        rc = 0;
        if (atomic_load(&e->admin) != want) {
            v = view_new(f);
            rc = v ? 0 : PL_ENOMEM;
            if (v)
                atomic_store(&e->admin, want);
        }
    }
    end(f, v);
    return rc;
}

int pl_fleet_remove(pl_fleet *f, pl_engine *e)
{
    int rc = PL_ENOTFOUND;
    pl_view *v = NULL;
    begin(f);
    node *n = node_of(f, e);
    if (n) {
        n->removed = true;
        v = view_new(f);
        n->removed = v != NULL;
        rc = v ? 0 : PL_ENOMEM;
        if (v)
            atomic_store(&e->admin, PL_ENGINE_REMOVED);
    }
    end(f, v);
    return rc;
}

static int set(pl_fleet *f, pl_engine *e, bool adapters, const pl_str *ids, int n)
{
    if (!ids_ok(ids, n))
        return PL_ELIMIT;
    model_set *fresh = model_set_new(ids, n);
    if (!fresh)
        return PL_ENOMEM;
    int rc = PL_ENOTFOUND;
    pl_view *v = NULL;
    begin(f);
    node *at = node_of(f, e);
    model_set **which = !at ? NULL : adapters ? &at->adapters : &at->models;
    if (which) {
        rc = 0;
        if (!model_sets_equal(*which, fresh)) {
            model_set *old = *which;
            *which = fresh;
            v = view_new(f);
            if (v) {
                fresh = old; /* to be freed */
            } else {
                *which = old;
                rc = PL_ENOMEM;
            }
        }
    }
    end(f, v);
    free(fresh);
    return rc;
}

int pl_fleet_set_models(pl_fleet *f, pl_engine *e, const pl_str *ids, int n)
{
    return set(f, e, false, ids, n);
}

int pl_fleet_set_adapters(pl_fleet *f, pl_engine *e, const pl_str *ids, int n)
{
    return set(f, e, true, ids, n);
}

int pl_fleet_models(pl_fleet *f, const pl_engine *e, struct pl_arena *a, pl_str **ids)
{
    int rc = PL_ENOTFOUND;
    *ids = NULL;
    pthread_mutex_lock(&f->lock);
    const node *n = node_of(f, e);
    if (n) {
        const model_set *s = n->models;
        pl_str *copy = pl_arena_alloc(a, ((size_t)s->n + 1) * sizeof *copy);
        rc = copy ? s->n : PL_ENOMEM;
        for (int i = 0; copy && i < s->n; i++) {
            copy[i] = pl_arena_str(a, s->ids[i]);
            if (!copy[i].p)
                rc = PL_ENOMEM;
        }
        if (rc >= 0)
            *ids = copy;
    }
    pthread_mutex_unlock(&f->lock);
    return rc;
}

pl_view *pl_fleet_view(pl_fleet *f)
{
    pthread_mutex_lock(&f->lock);
    pl_view *v = pl_view_ref(f->view);
    pthread_mutex_unlock(&f->lock);
    return v;
}
