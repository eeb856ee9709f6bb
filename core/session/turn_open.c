/* Opening a session for a turn: see sessions.h and turn.h. First the engine's ok, then the binding,
 * by compare-and-set; who loses closes what he opened and waits for the winner's session. On the
 * turn's loop. */
#include "session/turn.h"

#define MAX_TRIES 5 /* of the compare-and-set, against bindings that only routers hold */

static int can_open(const pl_sessions *s, const pl_worker_state *w, uint32_t cap)
{
    const pl_sessions_options *o = &s->c.o;
    uint64_t until_ns = atomic_load_explicit(&w->engine->no_opens_until_ns, memory_order_relaxed);
    if (!(atomic_load_explicit(&w->engine->caps, memory_order_relaxed) & cap) ||
        (until_ns && pl_clock_now_ns(s->c.clock) < until_ns))
        return PL_EUNAVAILABLE;
    int32_t open = atomic_load_explicit(&w->sessions, memory_order_relaxed);
    int64_t held = atomic_load_explicit(&w->session_tokens, memory_order_relaxed);
    if (o->max_open_per_worker && open >= 0 && (uint32_t)open >= o->max_open_per_worker)
        return PL_ELIMIT;
    if (o->max_held_tokens_per_worker && held >= (int64_t)o->max_held_tokens_per_worker)
        return PL_ELIMIT;
    return 0;
}

int pl_sessions_can_open(const pl_sessions *s, const pl_worker_state *w)
{
    return can_open(s, w, PL_CAP_STREAMING_SESSIONS);
}

int pl_sessions_can_open_regular(const pl_sessions *s, const pl_worker_state *w)
{
    return can_open(s, w, PL_CAP_SESSIONS);
}

/* A binding to the session that was just opened, for the store and for closes. */
static pl_binding new_binding(const pl_turn_inner *in)
{
    pl_binding b = {.slot = in->w->slot,
                    .generation = in->w->generation,
                    .rank = in->w->rank,
                    .kind = PL_SESSION_ENGINE_BACKED,
                    .turns = in->bound ? in->binding.turns : 1,
                    .parent_hash = in->parent_hash,
                    .ttl_ms = in->ttl_ms};
    pl_session_note_write(&in->new_note, &b.note);
    return b;
}

static void close_own(pl_turn_inner *in, pl_close_cause cause)
{
    pl_binding b = new_binding(in);
    pl_close_submit(in->s, &in->name, &b, cause, false, NULL);
}

/* --- bind --- */

static void put(pl_turn_inner *in)
{
    in->call.binding = new_binding(in);
    in->call.when = in->bound ? PL_STORE_IF_VERSION : PL_STORE_IF_ABSENT;
    in->call.version = in->binding.version;
    pl_turn_call(in, PL_TURN_BINDING, PL_STORE_PUT);
}

static void bound(pl_turn_inner *in)
{
    pl_sessions *s = in->s;
    pl_binding old = in->call.old;
    bool rebind = in->call.had_old;
    pl_count(rebind ? &s->stats.rebinds : &s->stats.binds);
    in->bound = in->opened = true;
    in->binding = in->call.binding;
    in->note = in->new_note;
    in->sent = false;
    pl_turn_renew_stop(in);
    pl_turn_leased(in);
    pl_gate_mark(s->gate, &in->gate, in->note.nonce);
    pl_registry_bound(s->registry, in->note.nonce, in->binding.version, in->ttl_ms,
                      pl_clock_now_ns(s->c.clock), -1);
    if (rebind && old.kind == PL_SESSION_ENGINE_BACKED)
        pl_close_submit(s, &in->name, &old, in->poisoned ? PL_CLOSE_POISONED : PL_CLOSE_REBOUND,
                        false, NULL);
    in->poisoned = false;
    if (!in->t) {
        in->how = PL_TURN_FAILED;
        pl_turn_finish(in);
    } else if (atomic_load(&in->w->engine->admin) == PL_ENGINE_REMOVED ||
               atomic_load(&s->stopping)) { /* who closes what is there may have passed already */
        pl_turn_renew_stop(in);
        pl_gate_mark(s->gate, &in->gate, 0);
        pl_session_forget(s, in->l->c.store, &in->l->errands, &in->name, in->note.nonce);
        close_own(in, PL_CLOSE_GONE);
        in->bound = in->leased = in->opened = false;
        pl_turn_tell(in, atomic_load(&s->stopping) ? PL_ECANCELLED : PL_ECONNECT);
    } else {
        pl_turn_tell(in, 0);
    }
}

static void race_lost(pl_turn_inner *in)
{
    pl_count(&in->s->stats.open_races);
    close_own(in, PL_CLOSE_FAILED);
    pl_turn_renew_stop(in);
    in->leased = false;
    in->bound = in->call.had_old && in->call.old.slot >= 0;
    if (in->bound) {
        in->binding = in->call.old;
        if (!pl_session_note_read(&in->binding.note, &in->note))
            in->note.history.form = PL_HISTORY_LOST;
    }
    if (!in->t) {
        pl_turn_unwind(in);
    } else if (in->bound) {
        in->race_lost = true;
        pl_turn_take_lease(in);
    } else { /* its engine is not known here */
        pl_turn_tell(in, PL_EEXISTS);
    }
}

void pl_turn_on_put(pl_turn_inner *in, int rc)
{
    bool lost = pl_sessions_store_lost(in->s, rc);
    if (rc == 0) {
        bound(in);
        return;
    }
    bool again = ++in->tries < MAX_TRIES;
    if (again && rc == PL_ENOTFOUND) { /* what it should replace is over */
        pl_turn_renew_stop(in);
        in->bound = in->leased = false;
        put(in);
        return;
    }
    if (again && rc == PL_EEXISTS && in->call.had_old &&
        in->call.old.kind == PL_SESSION_ROUTER_ONLY) {
        in->bound = true;
        in->binding = in->call.old;
        put(in);
        return;
    }
    if (rc == PL_EEXISTS) {
        race_lost(in);
        return;
    }
    close_own(in, PL_CLOSE_FAILED);
    if (lost) { /* nobody knows whether it is bound, and in whose place */
        pl_session_forget(in->s, in->l->c.store, &in->l->errands, &in->name, in->new_note.nonce);
        if (in->bound && in->binding.kind == PL_SESSION_ENGINE_BACKED) {
            pl_session_forget(in->s, in->l->c.store, &in->l->errands, &in->name, in->note.nonce);
            pl_close_submit(in->s, &in->name, &in->binding, PL_CLOSE_REBOUND, false, NULL);
        }
        pl_turn_renew_stop(in);
        in->bound = in->leased = false;
    }
    if (!in->t) {
        pl_turn_unwind(in);
        return;
    }
    in->fallback = in->fallback || lost;
    pl_turn_tell(in, lost ? PL_EIO : rc);
}

/* --- open --- */

static void on_opened(void *ctx, int rc)
{
    pl_turn_inner *in = ctx;
    in->opening = NULL;
    if (rc < 0) {
        pl_turn_tell(in, rc);
        return;
    }
    in->tries = 0;
    put(in);
}

void pl_turn_open_gated(pl_turn_inner *in)
{
    pl_sessions *s = in->s;
    const pl_sessions_options *o = &s->c.o;
    uint32_t capacity = in->t->capacity_of_str_len;
    in->new_note = (pl_session_note){
        .nonce = pl_sessions_random(in->l),
        .engine_seconds = (in->ttl_ms + 999) / 1000 + o->engine_extra_seconds,
        .ttl_ms = in->ttl_ms,
        .streaming = in->streaming,
    };
    int rc = pl_registry_add(s->registry, in->new_note.nonce, in->w, &in->name,
                             o->max_open_per_worker, o->max_held_tokens_per_worker);
    if (rc < 0) {
        pl_turn_tell(in, rc);
        return;
    }
    in->state = PL_TURN_OPENING;
    in->opening = pl_opening_start(
        in->l,
        &(pl_opening_config){.worker = in->w,
                             .name = in->name,
                             .nonce = in->new_note.nonce,
                             .engine_seconds = in->new_note.engine_seconds,
                             .capacity_of_str_len = capacity ? capacity : o->capacity_of_str_len,
                             .streaming = in->streaming,
                             .done = on_opened,
                             .ctx = in});
    if (!in->opening)
        pl_turn_tell(in, PL_ENOMEM);
}

int pl_turn_open(pl_turn *t, pl_worker_state *w, uint64_t ttl_ms, bool streaming)
{
    pl_turn_inner *in = t->in;
    if (!in || in->state != PL_TURN_IDLE || ttl_ms == 0)
        return PL_EINVALID;
    pl_sessions *s = in->s;
    const pl_sessions_options *o = &s->c.o;
    if (in->fallback)
        return PL_EIO;
    if (atomic_load(&s->stopping))
        return PL_ECANCELLED;
    int rc = streaming ? pl_sessions_can_open(s, w) : pl_sessions_can_open_regular(s, w);
    if (rc < 0)
        return rc;
    if (o->max_ttl_ms && ttl_ms > o->max_ttl_ms)
        ttl_ms = o->max_ttl_ms;
    pl_engine_ref(w->engine);
    if (in->w)
        pl_engine_unref(in->w->engine);
    in->w = w;
    in->ttl_ms = ttl_ms < PL_SESSION_MAX_TTL_MS ? (uint32_t)ttl_ms : PL_SESSION_MAX_TTL_MS;
    in->streaming = streaming;
    in->in_open = in->inside = true;
    in->told = false;
    in->wait_by_ms = 0;
    rc = in->gated ? 0 : pl_turn_enter(in);
    if (rc == 0)
        pl_turn_open_gated(in);
    else if (rc < 0)
        pl_turn_tell(in, rc);
    in->inside = false;
    return in->told ? in->told_rc : PL_STORE_PENDING;
}
