/* Sent and end of a turn: see sessions.h and turn.h. Nobody waits for what is written here: the
 * inner turn goes on without its pl_turn until the store has answered. On the turn's loop. */
#include "session/turn.h"

#define RETRY_MS 1000 /* between attempts to give a lease back */

/* --- sent: router-only bindings --- */

static void put(pl_turn_inner *in, pl_store_when when, uint64_t version)
{
    in->call.binding = (pl_binding){.slot = in->w->slot,
                                    .generation = in->w->generation,
                                    .rank = in->w->rank,
                                    .kind = PL_SESSION_ROUTER_ONLY,
                                    .turns = in->bound ? in->binding.turns : 1,
                                    .parent_hash = in->parent_hash,
                                    .ttl_ms = in->ttl_ms};
    in->call.when = when;
    in->call.version = version;
    pl_turn_call(in, PL_TURN_SENT, PL_STORE_PUT);
}

void pl_turn_on_sent(pl_turn_inner *in, int rc)
{
    pl_sessions *s = in->s;
    if (!in->fallback)
        pl_sessions_store_lost(s, rc);
    if (rc == PL_ENOTFOUND && in->tries++ == 0) { /* it expired while the turn waited */
        in->bound = false;
        put(in, PL_STORE_IF_ABSENT, 0);
        return;
    }
    if (rc == 0) {
        if (in->call.had_old && in->call.old.kind == PL_SESSION_ENGINE_BACKED) {
            pl_turn_renew_stop(in); /* its lease went with it */
            in->leased = false;
            pl_close_submit(s, &in->name, &in->call.old, PL_CLOSE_REBOUND, false, NULL);
        }
        if (!in->call.had_old)
            pl_count(&s->stats.binds);
        else if (in->call.old.slot != in->w->slot || in->call.old.generation != in->w->generation)
            pl_count(&s->stats.rebinds);
        in->bound = true;
        in->binding = in->call.binding;
    } /* else another turn was faster, or the store is full or away: affinity is a favour */
    in->state = PL_TURN_IDLE;
    if (in->t)
        pl_turn_show(in);
    else
        pl_turn_finish(in);
}

/* Bound there for that long, and the look-up that said so has just refreshed it. */
static bool is_fresh(const pl_turn_inner *in, const pl_worker_state *w)
{
    uint64_t age_ms = in->l->c.wheel->now_ms - in->begun_ms;
    return in->bound && in->binding.slot == w->slot && in->binding.generation == w->generation &&
           in->binding.ttl_ms == in->ttl_ms && age_ms < 1000 && age_ms < in->ttl_ms / 4;
}

void pl_turn_sent(pl_turn *t, pl_worker_state *w, uint64_t ttl_ms)
{
    pl_turn_inner *in = t->in;
    if (!in || in->state != PL_TURN_IDLE)
        return;
    in->sent = true;
    bool there =
        in->bound && in->binding.slot == w->slot && in->binding.generation == w->generation;
    bool engine = in->bound && in->binding.kind == PL_SESSION_ENGINE_BACKED;
    if (ttl_ms == 0 || in->closes || (in->fallback && there) ||
        (engine && (!t->instead || there || !in->leased)))
        return;
    uint64_t max_ms = in->s->c.o.max_ttl_ms ? in->s->c.o.max_ttl_ms : PL_SESSION_MAX_TTL_MS;
    if (max_ms > PL_SESSION_MAX_TTL_MS)
        max_ms = PL_SESSION_MAX_TTL_MS;
    in->ttl_ms = (uint32_t)(ttl_ms < max_ms ? ttl_ms : max_ms);
    if (is_fresh(in, w))
        return;
    pl_engine_ref(w->engine);
    if (in->w)
        pl_engine_unref(in->w->engine);
    in->w = w;
    in->tries = 0;
    if (in->bound)
        put(in, PL_STORE_IF_VERSION, in->binding.version);
    else
        put(in, PL_STORE_IF_ABSENT, 0);
}

/* --- end --- */

static bool is_engine_backed(const pl_turn_inner *in)
{
    return in->bound && in->binding.kind == PL_SESSION_ENGINE_BACKED;
}

/* What it is closed for; -1: it stays. */
static int cause_of(const pl_turn_inner *in)
{
    if (is_engine_backed(in) && in->how == PL_TURN_POISONED)
        return PL_CLOSE_POISONED;
    if (in->closes)
        return PL_CLOSE_CLIENT;
    if (is_engine_backed(in) && in->opened && !in->sent && in->how != PL_TURN_DONE)
        return PL_CLOSE_FAILED;
    return -1;
}

/* Gives the lease back, with the note. When the session was extended while nobody used it, it gets
 * its own time to live back: only a put changes that; it ends the lease, too. */
void pl_turn_release(pl_turn_inner *in)
{
    bool restore = in->note.extended_ms && in->note.ttl_ms;
    if (in->spoiled)
        in->note.history.form = PL_HISTORY_LOST;
    in->call.binding = in->binding;
    if (in->note.nonce) {
        pl_session_note note = in->note;
        note.extended_ms = 0;
        pl_session_note_write(&note, &in->call.binding.note);
    }
    if (restore) {
        in->call.binding.ttl_ms = in->note.ttl_ms;
        in->call.when = PL_STORE_IF_VERSION;
        in->call.version = in->binding.version;
        pl_turn_call(in, PL_TURN_ENDING, PL_STORE_PUT);
        return;
    }
    pl_turn_call(in, PL_TURN_ENDING, PL_STORE_RELEASE);
}

static void on_released(pl_turn_inner *in, int rc)
{
    pl_sessions *s = in->s;
    if (rc == 0) {
        bool put = in->call.op == PL_STORE_PUT;
        pl_registry_bound(s->registry, in->note.nonce,
                          put ? in->call.binding.version : in->binding.version,
                          put ? in->note.ttl_ms : in->binding.ttl_ms, pl_clock_now_ns(s->c.clock),
                          in->note.held_tokens);
    } else if (pl_sessions_store_lost(s, rc) && in->l->c.wheel->now_ms < in->lease_by_ms) {
        /* what the engine has got by now must be known, or the next turn says it twice */
        if (in->gated)
            pl_close_send(s, pl_gate_leave(s->gate, &in->gate));
        in->gated = false;
        in->taken = true;
        pl_turn_poll(in, RETRY_MS);
        return;
    }
    pl_turn_over(in);
}

static void on_removed(pl_turn_inner *in, int rc)
{
    pl_sessions *s = in->s;
    int cause = cause_of(in);
    if (rc == PL_EEXISTS && cause == PL_CLOSE_CLIENT && in->tries++ < 3 &&
        in->call.old.kind == PL_SESSION_ROUTER_ONLY) { /* another turn has refreshed it */
        in->call.version = in->call.old.version;
        pl_turn_call(in, PL_TURN_ENDING, PL_STORE_REMOVE);
        return;
    }
    if (rc == 0 && in->call.old.kind == PL_SESSION_ENGINE_BACKED)
        pl_close_submit(s, &in->name, &in->call.old, (pl_close_cause)cause, false, NULL);
    else if (pl_sessions_store_lost(s, rc) && is_engine_backed(in))
        pl_close_submit(s, &in->name, &in->binding, (pl_close_cause)cause, false, NULL);
    /* else who removed or replaced it has it in hand */
    pl_turn_over(in);
}

void pl_turn_on_ended(pl_turn_inner *in, int rc)
{
    if (in->call.op == PL_STORE_REMOVE)
        on_removed(in, rc);
    else
        on_released(in, rc);
}

void pl_turn_finish(pl_turn_inner *in)
{
    int cause = cause_of(in);
    pl_turn_renew_stop(in);
    if (cause >= 0 && in->bound) {
        in->tries = 0;
        in->call.when = PL_STORE_IF_VERSION;
        in->call.version = in->binding.version;
        pl_turn_call(in, PL_TURN_ENDING, PL_STORE_REMOVE);
    } else if (in->leased && in->bound) {
        pl_turn_release(in);
    } else {
        if (cause == PL_CLOSE_CLIENT && in->fallback) /* perhaps it can be reached by now */
            pl_session_remove(in->s, in->l->c.store, &in->l->errands, &in->name, PL_CLOSE_CLIENT,
                              NULL, NULL);
        pl_turn_over(in);
    }
}

void pl_turn_poisoned(pl_turn *t)
{
    if (!t->in || t->in->poisoned)
        return;
    t->in->poisoned = true;
    pl_count(&t->in->s->stats.poisoned);
}

void pl_turn_end(pl_turn *t, pl_turn_end_kind how, const pl_history *history, double held_tokens)
{
    pl_turn_inner *in = t->in;
    if (!in)
        return;
    if (in->state != PL_TURN_IDLE && in->state != PL_TURN_SENT) { /* still before a ready() */
        pl_turn_cancel(t);
        return;
    }
    t->in = NULL;
    in->t = NULL;
    in->how = how;
    if (t->wish) /* it may have become so meanwhile */
        in->closes = t->wish->action == PL_WISH_CLOSE || t->wish->final;
    if (how == PL_TURN_POISONED && !in->poisoned)
        pl_count(&in->s->stats.poisoned);
    if (how == PL_TURN_ABORTED)
        pl_count(&in->s->stats.discarded);
    if (history && (how == PL_TURN_DONE || history->form == PL_HISTORY_LOST))
        in->note.history = *history;
    else if (how != PL_TURN_DONE && in->sent)
        in->note.history.form = PL_HISTORY_LOST;
    if (held_tokens >= 0)
        in->note.held_tokens = held_tokens;
    if (in->state == PL_TURN_IDLE)
        pl_turn_finish(in);
    /* else SENT: its answer does it */
}
