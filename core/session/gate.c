/* The gate: one turn of a session at a time, over all loops of this process. Called by turns.c on
 * any loop and by closer.c on any thread. Sessions without a turn are not here. 64 shards by the
 * name's hash, a lock each. The gate owns its entries; waiters belong to who waits, and are in no
 * list once they are inside or out. A grant travels as a message through the waiter's mailbox, on
 * its own loop too, so that granted() never runs inside a call of another turn. */
#include <stdlib.h>
#include <string.h>

#include "session/sessions_impl.h"

#define SHARDS 64
#define CHAINS 64

struct pl_gate_entry {
    pl_gate_entry *next;
    struct shard *shard;
    uint64_t hash;
    uint64_t nonce;               /* of the engine's session that the turn inside works on */
    pl_gate_waiter *first, *last; /* who waits */
    uint32_t waiting;
    pl_close *kept, **kept_end;
    size_t tenant_n, id_n;
    char bytes[];
};

typedef struct shard {
    uv_mutex_t lock;
    pl_gate_entry *chains[CHAINS];
} shard;

struct pl_gate {
    shard shards[SHARDS];
};

pl_gate *pl_gate_new(void)
{
    pl_gate *g = calloc(1, sizeof *g);
    for (int i = 0; g && i < SHARDS; i++)
        uv_mutex_init(&g->shards[i].lock);
    return g;
}

void pl_gate_free(pl_gate *g)
{
    for (int i = 0; g && i < SHARDS; i++)
        uv_mutex_destroy(&g->shards[i].lock);
    free(g);
}

/* Where the entry of that name is, or would be linked. The shard is locked. */
static pl_gate_entry **find(shard *s, const pl_session_name *name, uint64_t hash)
{
    pl_gate_entry **at = &s->chains[hash / SHARDS % CHAINS];
    for (; *at; at = &(*at)->next) {
        pl_gate_entry *e = *at;
        if (e->hash == hash && pl_str_eq((pl_str){e->bytes, e->tenant_n}, name->tenant) &&
            pl_str_eq((pl_str){e->bytes + e->tenant_n, e->id_n}, name->id))
            break;
    }
    return at;
}

static pl_gate_entry *entry_new(shard *s, const pl_session_name *name, uint64_t hash)
{
    pl_gate_entry *e = calloc(1, sizeof *e + name->tenant.n + name->id.n);
    if (!e)
        return NULL;
    e->shard = s;
    e->hash = hash;
    e->kept_end = &e->kept;
    e->tenant_n = name->tenant.n;
    e->id_n = name->id.n;
    pl_session_name_copy(name, e->bytes);
    return e;
}

static void unqueue(pl_gate_entry *e, pl_gate_waiter *w)
{
    *(w->prev ? &w->prev->next : &e->first) = w->next;
    *(w->next ? &w->next->prev : &e->last) = w->prev;
    w->next = w->prev = NULL;
    e->waiting--;
}

static void on_grant(pl_message *m, void *loop_ctx)
{
    (void)loop_ctx;
    pl_gate_waiter *w = (pl_gate_waiter *)m;
    w->granted(w);
}

int pl_gate_enter(pl_gate *g, const pl_session_name *name, pl_gate_waiter *w, uint32_t max_waiting)
{
    uint64_t hash = pl_session_name_hash(name);
    shard *s = &g->shards[hash % SHARDS];
    int rc = 0;
    w->granting = false;
    uv_mutex_lock(&s->lock);
    pl_gate_entry **at = find(s, name, hash);
    if (!*at) {
        w->entry = *at = entry_new(s, name, hash);
        rc = *at ? 0 : PL_ENOMEM;
    } else if ((*at)->waiting >= max_waiting) {
        rc = PL_EBUSY;
    } else {
        pl_gate_entry *e = w->entry = *at;
        w->next = NULL;
        w->prev = e->last;
        *(e->last ? &e->last->next : &e->first) = w;
        e->last = w;
        e->waiting++;
        rc = PL_STORE_PENDING;
    }
    uv_mutex_unlock(&s->lock);
    return rc;
}

bool pl_gate_cancel(pl_gate *g, pl_gate_waiter *w)
{
    (void)g;
    if (!w->entry)
        return true;
    shard *s = w->entry->shard;
    uv_mutex_lock(&s->lock);
    bool out = !w->granting;
    if (out)
        unqueue(w->entry, w);
    uv_mutex_unlock(&s->lock);
    return out;
}

pl_close *pl_gate_leave(pl_gate *g, pl_gate_waiter *w)
{
    (void)g;
    pl_gate_entry *e = w->entry, *gone = NULL;
    shard *s = e->shard;
    uv_mutex_lock(&s->lock);
    pl_close *kept = e->kept;
    e->kept = NULL;
    e->kept_end = &e->kept;
    e->nonce = 0;
    w->entry = NULL;
    pl_gate_waiter *next;
    while ((next = e->first)) {
        unqueue(e, next);
        next->granting = true;
        next->message.run = on_grant;
        if (pl_mailbox_post(next->mailbox, &next->message) == 0)
            break;
        next->entry = NULL; /* its loop has ended and waits for nothing any more */
        next->granting = false;
    }
    if (!next) {
        pl_gate_entry **at = &s->chains[e->hash / SHARDS % CHAINS];
        while (*at != e)
            at = &(*at)->next;
        *at = e->next;
        gone = e;
    }
    uv_mutex_unlock(&s->lock);
    free(gone);
    return kept;
}

void pl_gate_mark(pl_gate *g, pl_gate_waiter *w, uint64_t nonce)
{
    (void)g;
    uv_mutex_lock(&w->entry->shard->lock);
    w->entry->nonce = nonce;
    uv_mutex_unlock(&w->entry->shard->lock);
}

bool pl_gate_keep(pl_gate *g, const pl_session_name *name, pl_close *c)
{
    uint64_t hash = pl_session_name_hash(name);
    shard *s = &g->shards[hash % SHARDS];
    uv_mutex_lock(&s->lock);
    pl_gate_entry *e = *find(s, name, hash);
    bool keep = e && e->nonce == c->nonce;
    if (keep) {
        c->next = NULL;
        *e->kept_end = c;
        e->kept_end = &c->next;
    }
    uv_mutex_unlock(&s->lock);
    return keep;
}
