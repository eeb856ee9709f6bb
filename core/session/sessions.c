/* The controller as a whole: see sessions.h. Made and ended on the control thread; expiry comes on
 * any. It owns its parts (gate, registry, closer); the store is the router's. What the control
 * thread does of itself: closes (closer.c), extensions, the look at bindings that should be over,
 * and the stop. */
#include "session/sessions_impl.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "policy_abi.h"

#define LOOK_MS   2000 /* between looks for bindings that should be over */
#define LOOKS_MAX 64   /* at a time */
#define STOP_MS   20
#define MS        1000000u

const char *const pl_close_cause_names[PL_CLOSE_CAUSES] = {
    "client", "expired", "rebound", "poisoned", "failed", "gone", "admin", "shutdown"};

void pl_sessions_options_default(pl_sessions_options *o)
{
    *o = (pl_sessions_options){.open_timeout_ms = 5000,
                               .close_timeout_ms = 5000,
                               .engine_extra_seconds = 30,
                               .capacity_of_str_len = 65536,
                               .max_waiting_turns = 8,
                               .turn_wait_ms = 60000,
                               .lease_ms = 30000,
                               .max_open_per_worker = 256,
                               .max_ttl_ms = 86400000};
}

/* --- shared by the parts --- */

bool pl_sessions_store_lost(pl_sessions *s, int rc)
{
    bool lost = rc == PL_EUNAVAILABLE || rc == PL_ETIMEOUT;
    if (lost)
        pl_count(&s->stats.store_unavailable);
    return lost;
}

int pl_sessions_post(pl_sessions *s, pl_message *m)
{
    atomic_fetch_add(&s->posted, 1);
    int rc = pl_mailbox_post(s->c.control_mailbox, m);
    if (rc != 0)
        atomic_fetch_sub(&s->posted, 1);
    return rc;
}

static void destroy(pl_sessions *s)
{
    pl_closer_free(s->closer);
    uv_mutex_destroy(&s->hist_lock);
    uv_mutex_destroy(&s->notice_lock);
    free(s);
}

bool pl_sessions_arrived(pl_sessions *s)
{
    bool freed = s->freed;
    if (atomic_fetch_sub(&s->posted, 1) == 1 && freed)
        destroy(s);
    return freed;
}

void pl_sessions_latency(pl_sessions *s, pl_hist *h, uint64_t ns)
{
    uv_mutex_lock(&s->hist_lock); /* one writer at a time */
    pl_hist_observe(h, ns);
    uv_mutex_unlock(&s->hist_lock);
}

void pl_sessions_settled(pl_sessions *s, uint64_t version)
{
    if (s->c.settled && version)
        s->c.settled(s->c.ctx, version);
}

/* --- bindings that should be over: another router has closed or taken over the session --- */

static void looked(pl_store_errand *e)
{
    pl_sessions *s = e->s;
    pl_session_note note;
    uint64_t now = pl_clock_now_ns(s->c.clock);
    int rc = e->call.result;
    s->looks--;
    pl_sessions_store_lost(s, rc);
    if (rc == PL_ENOTFOUND || (rc == 0 && (e->call.binding.kind != PL_SESSION_ENGINE_BACKED ||
                                           !pl_session_note_read(&e->call.binding.note, &note) ||
                                           note.nonce != e->nonce))) {
        if (e->in_hand) {
            pl_registry_drop(s->registry, e->nonce);
            return;
        }
        /* nobody may know of it any more: the store has lost it, or an answer. Twice does no harm
         */
        pl_binding b = {.slot = -1};
        note = (pl_session_note){.nonce = e->nonce, .engine_seconds = s->c.o.engine_extra_seconds};
        pl_session_note_write(&note, &b.note);
        if (pl_registry_is_open(s->registry, e->nonce))
            pl_close_submit(s, &e->call.name, &b, PL_CLOSE_UNCOUNTED, false, NULL);
    } else {
        uint64_t ttl_ms = rc == 0 ? e->call.binding.ttl_ms : LOOK_MS;
        pl_registry_looked(s->registry, e->nonce, rc == 0 ? now : 0, now + ttl_ms * MS);
    }
}

static void look(pl_timer *t)
{
    pl_sessions *s = (pl_sessions *)((char *)t - offsetof(pl_sessions, look_timer));
    unsigned room = LOOKS_MAX - s->looks;
    pl_store_stats st = {0};
    pl_store_stats_read(s->store, &st);
    if (st.outages != s->outages) {
        s->outages = st.outages;
        s->outage_ns = pl_clock_now_ns(s->c.clock);
    }
    pl_registered *list =
        room ? pl_registry_pick(s->registry, NULL, pl_clock_now_ns(s->c.clock), room) : NULL;
    while (list) {
        pl_registered *r = list;
        list = r->next;
        pl_store_errand *e = pl_store_errand_new(s, s->store, &s->errands, &r->name);
        if (e) {
            e->call.op = PL_STORE_PEEK;
            e->nonce = r->nonce;
            e->in_hand = s->outage_ns < r->seen_ns;
            e->then = looked;
            s->looks++;
            pl_store_errand_go(e);
        } else {
            pl_registry_looked(s->registry, r->nonce, 0, 0);
        }
        free(r);
    }
    pl_wheel_arm(s->c.control_wheel, &s->look_timer, LOOK_MS, look);
}

/* --- expiry --- */

typedef struct verdict {
    pl_message message; /* first */
    pl_sessions *s;
    pl_session_name name; /* points to bytes */
    pl_binding b;
    char bytes[PL_NAME_BYTES];
} verdict;

static void extended(pl_store_errand *e)
{
    pl_sessions *s = e->s;
    pl_binding *b = &e->call.binding;
    if (e->call.result == 0) {
        pl_count(&s->stats.extended);
        pl_sessions_settled(s, e->call.version);
        pl_registry_bound(s->registry, e->nonce, b->version, b->ttl_ms, pl_clock_now_ns(s->c.clock),
                          -1);
        return;
    }
    if (pl_sessions_store_lost(s, e->call.result)) /* perhaps it is bound again */
        pl_session_forget(s, s->store, &s->errands, &e->call.name, e->nonce);
    pl_close_submit(s, &e->call.name, b, PL_CLOSE_EXPIRED, false, NULL);
}

static void extend(pl_message *m, void *ctx)
{
    (void)ctx;
    verdict *v = (verdict *)m;
    pl_sessions *s = v->s;
    if (pl_sessions_arrived(s)) {
        free(v);
        return;
    }
    pl_session_note note;
    pl_store_errand *e = s->store && !atomic_load(&s->stopping)
                             ? pl_store_errand_new(s, s->store, &s->errands, &v->name)
                             : NULL;
    if (e) {
        pl_session_note_read(&v->b.note, &note);
        e->call.op = PL_STORE_PUT;
        e->call.when = PL_STORE_IF_ABSENT;
        e->call.binding = v->b;
        e->call.version = v->b.version; /* the claim's */
        e->nonce = note.nonce;
        e->then = extended;
        pl_store_errand_go(e);
    } else {
        pl_close_submit(s, &v->name, &v->b, PL_CLOSE_EXPIRED, false, NULL);
    }
    free(v);
}

/* The binding that an extension puts; false: its engine would not keep it that long. */
static bool extension(const pl_sessions *s, pl_binding *b, double seconds)
{
    pl_session_note note;
    if (!pl_session_note_read(&b->note, &note) || !(seconds > 0))
        return false;
    uint64_t most_ms = (uint64_t)s->c.o.engine_extra_seconds * 1000;
    uint64_t left_ms = note.extended_ms < most_ms ? most_ms - note.extended_ms : 0;
    uint64_t ms = seconds * 1000 < (double)left_ms ? (uint64_t)(seconds * 1000) : left_ms;
    if (ms == 0)
        return false;
    note.extended_ms += (uint32_t)ms;
    pl_session_note_write(&note, &b->note);
    b->ttl_ms = (uint32_t)ms;
    return true;
}

static void dropped(pl_message *m, void *ctx)
{
    (void)ctx;
    verdict *v = (verdict *)m;
    if (!pl_sessions_arrived(v->s))
        pl_sessions_settled(v->s, v->b.version);
    free(v);
}

static bool post_verdict(pl_sessions *s, const pl_session_name *name, const pl_binding *b,
                         void (*run)(pl_message *m, void *ctx))
{
    verdict *v = malloc(sizeof *v);
    if (!v)
        return false;
    v->message.run = run;
    v->s = s;
    v->b = *b;
    v->name = pl_session_name_copy(name, v->bytes);
    if (pl_sessions_post(s, &v->message) == 0)
        return true;
    free(v);
    return false;
}

void pl_sessions_expire(pl_sessions *s, const pl_session_name *name, const pl_binding *b,
                        int action, double seconds)
{
    pl_binding next = *b;
    if (action == PL_DROP) {
        pl_session_note note;
        pl_count(&s->stats.dropped);
        if (pl_session_note_read(&b->note, &note))
            pl_registry_drop(s->registry, note.nonce);
        if (s->c.settled)
            post_verdict(s, name, b, dropped);
        return;
    }
    if (action == PL_EXTEND && extension(s, &next, seconds) && post_verdict(s, name, &next, extend))
        return;
    pl_close_submit(s, name, b, PL_CLOSE_EXPIRED, false, NULL);
}

void pl_sessions_expired(void *sessions, const pl_session_name *name, const pl_binding *b)
{
    pl_sessions *s = sessions;
    pl_count(&s->stats.expired);
    if (s->c.expiring && !atomic_load(&s->stopping))
        s->c.expiring(s->c.ctx, name, b);
    else
        pl_close_submit(s, name, b, PL_CLOSE_EXPIRED, false, NULL);
}

/* --- engines that leave, closes by name --- */

static void close_list(pl_sessions *s, pl_registered *list, pl_close_cause cause)
{
    while (list) {
        pl_registered *r = list;
        pl_session_note note = {.nonce = r->nonce,
                                .engine_seconds = r->ttl_ms / 1000 + s->c.o.engine_extra_seconds};
        pl_binding b = {.slot = r->worker->slot, .generation = r->worker->generation};
        list = r->next;
        pl_session_note_write(&note, &b.note);
        pl_close_submit(s, &r->name, &b, cause, false, NULL);
        free(r);
    }
}

void pl_sessions_engine_gone(pl_sessions *s, pl_engine *e)
{
    if (!s)
        return;
    close_list(s, pl_registry_pick(s->registry, e, 0, 0), PL_CLOSE_GONE);
    pl_closer_engine_gone(s->closer, e);
}

void pl_sessions_close(pl_sessions *s, pl_store *store, const pl_session_name *name,
                       void (*done)(void *ctx, int rc), void *ctx)
{
    if (name->id.n == 0 || name->id.n > PL_SESSION_MAX_ID_BYTES ||
        name->tenant.n > PL_SESSION_MAX_TENANT_BYTES)
        done(ctx, PL_EINVALID);
    else
        pl_session_remove(s, store, &s->errands, name, PL_CLOSE_ADMIN, done, ctx);
}

/* --- start and stop --- */

int pl_sessions_new(const pl_sessions_config *c, pl_sessions **out)
{
    *out = NULL;
    pl_sessions *s = calloc(1, sizeof *s);
    if (!s)
        return PL_ENOMEM;
    s->c = *c;
    uv_mutex_init(&s->hist_lock);
    uv_mutex_init(&s->notice_lock);
    s->gate = pl_gate_new();
    s->registry = pl_registry_new();
    s->closer = pl_closer_new(s);
    if (!s->gate || !s->registry || !s->closer) {
        pl_sessions_free(s);
        return PL_ENOMEM;
    }
    *out = s;
    return 0;
}

void pl_sessions_set_store(pl_sessions *s, pl_store *store)
{
    s->store = store;
    pl_wheel_arm(s->c.control_wheel, &s->look_timer, LOOK_MS, look);
}

static void wait_for_end(pl_timer *t)
{
    pl_sessions *s = (pl_sessions *)((char *)t - offsetof(pl_sessions, stop_timer));
    bool busy = pl_closer_pending(s->closer) || atomic_load(&s->turns);
    if (busy && s->c.control_wheel->now_ms < s->stop_by_ms) {
        pl_wheel_arm(s->c.control_wheel, t, STOP_MS, wait_for_end);
        return;
    }
    pl_closer_stop(s->closer);
    s->stopped(s->stopped_ctx);
}

void pl_sessions_stop(pl_sessions *s, bool close_all, uint64_t deadline_ms, void (*done)(void *ctx),
                      void *ctx)
{
    atomic_store(&s->stopping, true);
    s->stopped = done;
    s->stopped_ctx = ctx;
    s->stop_by_ms = s->c.control_wheel->now_ms + deadline_ms;
    pl_closer_hurry(s->closer);
    if (close_all)
        close_list(s, pl_registry_pick(s->registry, NULL, 0, 0), PL_CLOSE_SHUTDOWN);
    pl_wheel_arm(s->c.control_wheel, &s->stop_timer, STOP_MS, wait_for_end);
}

void pl_sessions_free(pl_sessions *s)
{
    if (!s)
        return;
    if (s->closer)
        pl_closer_stop(s->closer);
    pl_wheel_cancel(s->c.control_wheel, &s->look_timer);
    pl_wheel_cancel(s->c.control_wheel, &s->stop_timer);
    pl_store_errands_cancel(&s->errands);
    pl_registry_free(s->registry);
    pl_gate_free(s->gate);
    s->freed = true;
    if (atomic_load(&s->posted) == 0)
        destroy(s);
}

const pl_sessions_stats *pl_sessions_stats_of(const pl_sessions *s)
{
    return &s->stats;
}

double pl_binding_held_tokens(const pl_binding *b)
{
    pl_session_note note;
    return b->kind == PL_SESSION_ENGINE_BACKED && pl_session_note_read(&b->note, &note)
               ? note.held_tokens
               : -1;
}

const pl_hist *pl_sessions_open_latency(const pl_sessions *s)
{
    return &s->open_latency;
}

const pl_hist *pl_sessions_close_latency(const pl_sessions *s)
{
    return &s->close_latency;
}

pl_sessions_loop *pl_sessions_loop_new(pl_sessions *s, const pl_sessions_loop_config *c)
{
    pl_sessions_loop *l = calloc(1, sizeof *l);
    if (!l)
        return NULL;
    l->s = s;
    l->c = *c;
    if (getrandom(&l->nonces.state, sizeof l->nonces.state, 0) != sizeof l->nonces.state)
        l->nonces.state = pl_now_ns() ^ (uint64_t)(uintptr_t)l; /* worse, not wrong */
    return l;
}
