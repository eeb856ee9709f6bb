/* Turns: see sessions.h and turn.h. Begin, the waits, the lease and its renewal, cancel; and the
 * loop's part of the controller. Called by the proxy on the loop's thread. */
#include "session/turn.h"

#include <stdlib.h>
#include <string.h>

static pl_wheel *wheel(const pl_turn_inner *in)
{
    return in->l->c.wheel;
}

/* --- answers --- */

void pl_turn_show(pl_turn_inner *in)
{
    pl_turn *t = in->t;
    if (!t)
        return;
    bool engine = in->bound && in->binding.kind == PL_SESSION_ENGINE_BACKED;
    t->bound = in->bound;
    t->leased = in->leased;
    t->fallback = in->fallback;
    t->binding = in->binding;
    t->history = engine ? in->note.history : (pl_history){0};
    t->held_tokens = engine ? in->note.held_tokens : -1;
    t->streaming = engine && in->note.streaming;
}

void pl_turn_tell(pl_turn_inner *in, int rc)
{
    pl_turn *t = in->t;
    bool over = rc < 0 && !in->in_open, inside = in->inside;
    in->state = PL_TURN_IDLE;
    in->in_open = in->race_lost = false;
    in->told = true;
    in->told_rc = rc;
    pl_turn_show(in);
    if (over) {
        t->in = NULL;
        in->t = NULL;
        if (!inside)
            pl_turn_over(in); /* else begin does it */
    }
    if (!inside)
        t->ready(t, rc);
}

/* --- the store --- */

static void on_lookup(pl_turn_inner *in, int rc);
static void on_lease(pl_turn_inner *in, int rc);

static void answered(pl_turn_inner *in, int rc)
{
    switch (in->state) {
    case PL_TURN_LOOKUP:
        on_lookup(in, rc);
        break;
    case PL_TURN_LEASE:
        on_lease(in, rc);
        break;
    case PL_TURN_BINDING:
        pl_turn_on_put(in, rc);
        break;
    case PL_TURN_SENT:
        pl_turn_on_sent(in, rc);
        break;
    default:
        pl_turn_on_ended(in, rc);
    }
}

static void on_call(pl_store_call *c)
{
    pl_turn_inner *in = (pl_turn_inner *)((char *)c - offsetof(pl_turn_inner, call));
    in->calling = false;
    answered(in, c->result);
}

void pl_turn_call(pl_turn_inner *in, pl_turn_state s, pl_store_op op)
{
    in->state = s;
    in->call.op = op;
    in->call.name = in->name;
    in->call.owner = op == PL_STORE_PUT && s != PL_TURN_BINDING ? 0 : in->owner;
    in->call.lease_ms = (uint32_t)in->s->c.o.lease_ms;
    in->call.done = on_call;
    in->calling = true;
    int rc = pl_store_start(in->l->c.store, &in->call);
    if (rc == PL_STORE_PENDING)
        return;
    in->calling = false;
    answered(in, rc);
}

static void take_binding(pl_turn_inner *in, const pl_binding *b)
{
    in->bound = true;
    in->binding = *b;
    if (b->kind == PL_SESSION_ENGINE_BACKED && !pl_session_note_read(&b->note, &in->note))
        in->note.history.form = PL_HISTORY_LOST; /* nobody knows its name on the engine */
}

/* stale: what is bound is what this process knew before the store went away. */
static void fall_back(pl_turn_inner *in, bool stale)
{
    in->fallback = true;
    in->bound = in->bound && stale;
    in->leased = false;
    if (in->gated) {
        pl_close *kept = pl_gate_leave(in->s->gate, &in->gate);
        in->gated = false;
        pl_close_send(in->s, kept);
    }
    pl_turn_tell(in, in->in_open ? PL_EIO : 0);
}

/* --- waits --- */

static void begin_to_wait(pl_turn_inner *in)
{
    if (in->wait_by_ms)
        return;
    pl_count(&in->s->stats.turns_waited);
    in->wait_by_ms = wheel(in)->now_ms + in->s->c.o.turn_wait_ms;
}

static void refuse(pl_turn_inner *in, int rc)
{
    pl_count(&in->s->stats.turns_refused);
    pl_turn_tell(in, in->in_open ? PL_EBUSY : rc);
}

static void on_gate_timeout(pl_timer *t)
{
    pl_turn_inner *in = (pl_turn_inner *)((char *)t - offsetof(pl_turn_inner, timer));
    if (pl_gate_cancel(in->s->gate, &in->gate))
        refuse(in, PL_ETIMEOUT); /* else its turn has come this moment */
}

static void look_up(pl_turn_inner *in)
{
    pl_turn_call(in, PL_TURN_LOOKUP, PL_STORE_GET);
}

static void on_granted(pl_gate_waiter *w)
{
    pl_turn_inner *in = (pl_turn_inner *)w;
    in->gated = true;
    if (!in->l) { /* the loop has ended meanwhile */
        pl_close_send(in->s, pl_gate_leave(in->s->gate, &in->gate));
        free(in);
        return;
    }
    pl_wheel_cancel(wheel(in), &in->timer);
    if (!in->t)
        pl_turn_unwind(in);
    else if (in->in_open)
        pl_turn_open_gated(in);
    else if (in->bound)
        pl_turn_take_lease(in);
    else
        look_up(in);
}

int pl_turn_enter(pl_turn_inner *in)
{
    in->gate.mailbox = in->l->c.mailbox;
    in->gate.granted = on_granted;
    int rc = pl_gate_enter(in->s->gate, &in->name, &in->gate, in->s->c.o.max_waiting_turns);
    if (rc == 0) {
        in->gated = true;
    } else if (rc == PL_STORE_PENDING) {
        begin_to_wait(in);
        in->state = PL_TURN_GATE;
        pl_wheel_arm(wheel(in), &in->timer, in->s->c.o.turn_wait_ms, on_gate_timeout);
    } else if (rc == PL_EBUSY) {
        pl_count(&in->s->stats.turns_refused);
    }
    return rc;
}

/* --- look up and lease --- */

/* It is not bound, or not engine-backed, or not any more. */
static void not_engine_backed(pl_turn_inner *in)
{
    bool keep = in->t->wish && in->t->wish->action == PL_WISH_OPEN;
    if (!keep && in->gated) {
        pl_close *kept = pl_gate_leave(in->s->gate, &in->gate);
        in->gated = false;
        pl_close_send(in->s, kept);
    }
    pl_turn_tell(in, in->race_lost ? PL_EBUSY : 0);
}

static void on_lookup(pl_turn_inner *in, int rc)
{
    pl_sessions *s = in->s;
    bool stale = rc == 0 && in->call.stale;
    bool lost = pl_sessions_store_lost(s, stale ? PL_EUNAVAILABLE : rc);
    if (rc == 0)
        take_binding(in, &in->call.binding);
    if (rc == 0 || rc == PL_ENOTFOUND)
        pl_count(rc == 0 ? &s->stats.hits : &s->stats.misses);
    if (!in->t) {
        pl_turn_unwind(in);
    } else if (lost) {
        fall_back(in, stale);
    } else if (rc < 0 && rc != PL_ENOTFOUND) {
        pl_turn_tell(in, rc);
    } else if (in->t->only_closes && (rc == 0 || in->gated)) {
        not_engine_backed(in);       /* or it is: then the end removes it, and its turn goes on */
    } else if (in->t->only_closes) { /* it may be being opened */
        int e = pl_turn_enter(in);
        if (e == 0)
            not_engine_backed(in);
        else if (e < 0)
            pl_turn_tell(in, e);
    } else if (rc == 0 && in->binding.kind == PL_SESSION_ENGINE_BACKED) {
        int e = in->gated ? 0 : pl_turn_enter(in);
        if (e == 0)
            pl_turn_take_lease(in);
        else if (e < 0)
            pl_turn_tell(in, e);
    } else {
        not_engine_backed(in);
    }
}

void pl_turn_take_lease(pl_turn_inner *in)
{
    pl_turn_call(in, PL_TURN_LEASE, PL_STORE_LEASE);
}

static void on_poll(pl_timer *t)
{
    pl_turn_inner *in = (pl_turn_inner *)((char *)t - offsetof(pl_turn_inner, timer));
    if (in->taken)
        pl_turn_release(in);
    else
        pl_turn_take_lease(in);
}

void pl_turn_poll(pl_turn_inner *in, uint64_t after_ms)
{
    in->state = PL_TURN_POLL;
    pl_wheel_arm(wheel(in), &in->timer, after_ms, on_poll);
}

static void on_lease(pl_turn_inner *in, int rc)
{
    bool lost = pl_sessions_store_lost(in->s, rc);
    bool engine = rc == 0 && in->call.binding.kind == PL_SESSION_ENGINE_BACKED;
    if (rc == 0) {
        take_binding(in, &in->call.binding);
        if (engine && in->call.lapsed) /* its router has died: what the note says may be old */
            in->note.history.form = PL_HISTORY_LOST;
        pl_turn_leased(in);
    }
    if (lost) /* it may have been taken nonetheless */
        pl_session_unlease(in->s, in->l->c.store, &in->l->errands, &in->name, in->owner);
    if (!in->t) {
        pl_turn_unwind(in);
    } else if (engine) {
        pl_gate_mark(in->s->gate, &in->gate, in->note.nonce);
        pl_turn_tell(in, in->race_lost ? PL_EEXISTS : 0);
    } else if (rc == 0) { /* bound anew, router-only: such turns hold nothing */
        pl_turn_renew_stop(in);
        in->leased = false;
        not_engine_backed(in);
    } else if (rc == PL_ENOTFOUND) {
        in->bound = false;
        not_engine_backed(in);
    } else if (rc == PL_EBUSY) {
        begin_to_wait(in);
        if (wheel(in)->now_ms >= in->wait_by_ms)
            refuse(in, PL_ETIMEOUT);
        else
            pl_turn_poll(in, PL_TURN_POLL_MS + pl_rng_below(in->l->c.rng, PL_TURN_POLL_MS / 4));
    } else if (lost) {
        fall_back(in, false);
    } else {
        in->bound = in->race_lost && in->bound;
        pl_turn_tell(in, in->in_open ? PL_EIO : rc);
    }
}

/* --- renewal --- */

static void renew(pl_timer *t);

static void renewed(pl_turn_inner *in, int rc)
{
    uint64_t half_ms = in->s->c.o.lease_ms / 2;
    in->renewing = false;
    in->spoiled = in->spoiled || (rc == 0 && in->renewal.lapsed);
    if (rc == 0 && in->renewal.binding.version == in->binding.version) {
        in->lease_by_ms = wheel(in)->now_ms + in->s->c.o.lease_ms;
        pl_wheel_arm(wheel(in), &in->renew_timer, half_ms, renew);
    } else if (pl_sessions_store_lost(in->s, rc)) { /* the lease lasts a while: try again */
        pl_wheel_arm(wheel(in), &in->renew_timer, half_ms / 4, renew);
    } else { /* closed, or bound anew, or another router's turn now: who did that cares for it */
        if (rc == 0)
            pl_session_unlease(in->s, in->l->c.store, &in->l->errands, &in->name, in->owner);
        in->leased = false;
        if (in->t)
            in->t->leased = false;
        pl_log(PL_LOG_WARN, "session_lease_lost",
               "a turn on %s goes on without its session's lease",
               in->w ? in->w->name : "a worker");
    }
}

static void on_renewal(pl_store_call *c)
{
    pl_turn_inner *in = (pl_turn_inner *)((char *)c - offsetof(pl_turn_inner, renewal));
    renewed(in, c->result);
}

static void renew(pl_timer *t)
{
    pl_turn_inner *in = (pl_turn_inner *)((char *)t - offsetof(pl_turn_inner, renew_timer));
    in->renewal = (pl_store_call){.op = PL_STORE_LEASE,
                                  .name = in->name,
                                  .owner = in->owner,
                                  .lease_ms = (uint32_t)in->s->c.o.lease_ms,
                                  .done = on_renewal};
    in->renewing = true;
    int rc = pl_store_start(in->l->c.store, &in->renewal);
    if (rc != PL_STORE_PENDING)
        renewed(in, rc);
}

void pl_turn_leased(pl_turn_inner *in)
{
    in->leased = true;
    in->lease_by_ms = wheel(in)->now_ms + in->s->c.o.lease_ms;
    pl_wheel_arm(wheel(in), &in->renew_timer, in->s->c.o.lease_ms / 2, renew);
}

void pl_turn_renew_stop(pl_turn_inner *in)
{
    pl_wheel_cancel(wheel(in), &in->renew_timer);
    if (in->renewing)
        pl_store_cancel(in->l->c.store, &in->renewal);
    in->renewing = false;
}

/* --- the ends --- */

static void unlink_turn(pl_turn_inner *in)
{
    *in->link = in->next;
    if (in->next)
        in->next->link = in->link;
    in->l = NULL;
}

void pl_turn_over(pl_turn_inner *in)
{
    pl_sessions *s = in->s;
    pl_turn_renew_stop(in);
    pl_wheel_cancel(wheel(in), &in->timer);
    pl_close *kept = in->gated ? pl_gate_leave(s->gate, &in->gate) : NULL;
    if (in->w)
        pl_engine_unref(in->w->engine);
    unlink_turn(in);
    free(in);
    pl_close_send(s, kept);
    atomic_fetch_sub(&s->turns, 1);
}

void pl_turn_unwind(pl_turn_inner *in)
{
    in->how = PL_TURN_FAILED;
    if (in->closes && !in->leased) /* who asked for it has left, and meant it nonetheless */
        pl_session_remove(in->s, in->l->c.store, &in->l->errands, &in->name, PL_CLOSE_CLIENT, NULL,
                          NULL);
    if (in->leased)
        pl_turn_finish(in);
    else
        pl_turn_over(in);
}

void pl_turn_cancel(pl_turn *t)
{
    pl_turn_inner *in = t->in;
    if (!in)
        return;
    t->in = NULL;
    in->t = NULL;
    switch (in->state) {
    case PL_TURN_IDLE: /* there was nothing to wait for */
        in->how = PL_TURN_FAILED;
        pl_turn_finish(in);
        break;
    case PL_TURN_GATE:
        pl_wheel_cancel(wheel(in), &in->timer);
        if (pl_gate_cancel(in->s->gate, &in->gate))
            pl_turn_unwind(in);
        break; /* else on_granted does */
    case PL_TURN_POLL:
        pl_wheel_cancel(wheel(in), &in->timer);
        pl_turn_unwind(in);
        break;
    case PL_TURN_OPENING:
        pl_opening_abandon(in->opening);
        in->opening = NULL;
        pl_turn_unwind(in);
        break;
    default:
        break; /* the store's answer does it */
    }
}

/* --- begin --- */

/* Opens and closes of one name wait for each other: what is being opened is there to be closed. */
static int begin(pl_turn_inner *in)
{
    const pl_wish *w = in->t->wish;
    bool gate =
        w && !in->t->only_closes && (w->action == PL_WISH_OPEN || w->action == PL_WISH_CLOSE);
    in->inside = true;
    int rc = gate ? pl_turn_enter(in) : 0;
    if (rc == 0)
        look_up(in);
    else if (rc < 0)
        pl_turn_tell(in, rc);
    in->inside = false;
    return in->told ? in->told_rc : PL_STORE_PENDING;
}

int pl_turn_begin(pl_sessions_loop *l, pl_turn *t)
{
    t->in = NULL;
    t->bound = t->leased = t->fallback = t->streaming = false;
    if (t->name.id.n == 0 || t->name.id.n > PL_SESSION_MAX_ID_BYTES ||
        t->name.tenant.n > PL_SESSION_MAX_TENANT_BYTES)
        return PL_EINVALID;
    size_t bytes = t->name.tenant.n + t->name.id.n;
    pl_turn_inner *in = malloc(sizeof *in + bytes);
    if (!in)
        return PL_ENOMEM;
    memset(in, 0, sizeof *in);
    in->l = l;
    in->s = l->s;
    atomic_fetch_add(&l->s->turns, 1);
    in->t = t;
    in->owner = pl_sessions_random(l);
    in->begun_ms = l->c.wheel->now_ms;
    in->name = pl_session_name_copy(&t->name, in->bytes);
    if (t->wish) {
        in->closes = t->wish->action == PL_WISH_CLOSE || t->wish->final;
        if (t->wish->parent.n) {
            pl_session_name parent = {t->name.tenant, t->wish->parent};
            in->parent_hash = pl_session_name_hash(&parent);
        }
    }
    in->next = l->turns;
    in->link = &l->turns;
    if (in->next)
        in->next->link = &in->next;
    l->turns = in;
    t->in = in;
    int rc = begin(in);
    if (rc < 0)
        pl_turn_over(in);
    return rc;
}

pl_worker_state *pl_turn_worker(const pl_turn *t, const pl_model *m)
{
    int lo = 0, hi = t->bound && m ? m->workers_n : 0;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        pl_worker_state *w = m->workers[mid];
        if (w->slot == t->binding.slot)
            return w->generation == t->binding.generation ? w : NULL;
        if (w->slot < t->binding.slot)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

size_t pl_turn_engine_id(const pl_turn *t, char buf[PL_ENGINE_SESSION_MAX])
{
    buf[0] = 0;
    if (!t->in || !t->leased || !t->in->note.nonce)
        return 0;
    return pl_session_engine_name(t->in->name.id, t->in->note.nonce, buf);
}

/* --- the loop's part --- */

uint64_t pl_sessions_random(pl_sessions_loop *l)
{
    uint64_t n;
    do
        n = pl_rng_next(&l->nonces);
    while (n == 0);
    return n;
}

/* The loop ends with it under way: what can be given back at once is. */
static void drop(pl_turn_inner *in)
{
    pl_store *store = in->l->c.store;
    if (in->t)
        in->t->in = NULL;
    in->t = NULL;
    if (in->calling)
        pl_store_cancel(store, &in->call);
    pl_turn_renew_stop(in);
    if (in->leased) {
        in->call = (pl_store_call){.op = PL_STORE_RELEASE, .name = in->name, .owner = in->owner};
        if (pl_store_start(store, &in->call) == PL_STORE_PENDING)
            pl_store_cancel(store, &in->call);
    }
    if (in->state == PL_TURN_GATE && !pl_gate_cancel(in->s->gate, &in->gate)) {
        pl_wheel_cancel(wheel(in), &in->timer);
        if (in->w)
            pl_engine_unref(in->w->engine);
        unlink_turn(in); /* on_granted frees it */
        atomic_fetch_sub(&in->s->turns, 1);
        return;
    }
    pl_turn_over(in);
}

void pl_sessions_loop_drained(pl_sessions_loop *l)
{
    pl_openings_stop(l);
}

void pl_sessions_loop_free(pl_sessions_loop *l)
{
    if (!l)
        return;
    pl_openings_stop(l);
    while (l->turns)
        drop(l->turns);
    pl_store_errands_cancel(&l->errands);
    free(l);
}
