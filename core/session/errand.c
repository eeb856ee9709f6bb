/* Operations of the store that no turn waits for: what is left to do when a turn is over, and the
 * control thread's own. An errand owns itself and its copy of the name; it belongs to the thread of
 * its store handle, whose end cancels it. */
#include <stdlib.h>

#include "session/sessions_impl.h"

static void errand_free(pl_store_errand *e)
{
    *e->link = e->next;
    if (e->next)
        e->next->link = e->link;
    free(e);
}

static void answered(pl_store_call *c)
{
    pl_store_errand *e = (pl_store_errand *)c;
    e->again = false;
    e->then(e);
    if (e->again)
        pl_store_errand_go(e);
    else
        errand_free(e);
}

void pl_store_errand_go(pl_store_errand *e)
{
    e->call.done = answered;
    do {
        e->again = false;
        if (pl_store_start(e->store, &e->call) == PL_STORE_PENDING)
            return;
        e->then(e);
    } while (e->again);
    errand_free(e);
}

pl_store_errand *pl_store_errand_new(pl_sessions *s, pl_store *store, pl_store_errands *of,
                                     const pl_session_name *name)
{
    pl_store_errand *e = calloc(1, sizeof *e);
    if (!e)
        return NULL;
    e->s = s;
    e->store = store;
    e->call.name = pl_session_name_copy(name, e->bytes);
    e->next = of->first;
    e->link = &of->first;
    if (e->next)
        e->next->link = &e->next;
    of->first = e;
    return e;
}

void pl_store_errands_cancel(pl_store_errands *of)
{
    while (of->first) {
        pl_store_errand *e = of->first;
        void (*done)(void *ctx, int rc) = e->done;
        void *ctx = e->ctx;
        pl_store_cancel(e->store, &e->call);
        errand_free(e);
        if (done)
            done(ctx, PL_ECANCELLED);
    }
}

static void then_forget(pl_store_errand *e)
{
    pl_session_note note;
    if (e->call.op != PL_STORE_PEEK || e->call.result < 0 ||
        !pl_session_note_read(&e->call.binding.note, &note) || note.nonce != e->nonce)
        return;
    e->call.op = PL_STORE_REMOVE;
    e->call.when = PL_STORE_IF_VERSION;
    e->call.version = e->call.binding.version;
    e->again = true;
}

void pl_session_forget(pl_sessions *s, pl_store *store, pl_store_errands *of,
                       const pl_session_name *name, uint64_t nonce)
{
    pl_store_errand *e = pl_store_errand_new(s, store, of, name);
    if (!e) /* a later turn finds that the engine does not know the session */
        return;
    e->call.op = PL_STORE_PEEK;
    e->nonce = nonce;
    e->then = then_forget;
    pl_store_errand_go(e);
}

static void then_unleased(pl_store_errand *e)
{
    pl_sessions_store_lost(e->s, e->call.result); /* else it ends by itself */
}

void pl_session_unlease(pl_sessions *s, pl_store *store, pl_store_errands *of,
                        const pl_session_name *name, uint64_t owner)
{
    pl_store_errand *e = pl_store_errand_new(s, store, of, name);
    if (!e)
        return;
    e->call.op = PL_STORE_RELEASE;
    e->call.owner = owner;
    e->then = then_unleased;
    pl_store_errand_go(e);
}

/* PEEK, then REMOVE: so that what is removed is known also when the answer is lost. */
static void then_removed(pl_store_errand *e)
{
    int rc = e->call.result;
    bool lost = pl_sessions_store_lost(e->s, rc);
    if (e->call.op == PL_STORE_PEEK && rc == 0) {
        e->call.op = PL_STORE_REMOVE;
        e->call.when = PL_STORE_IF_VERSION;
        e->call.version = e->call.binding.version;
        e->again = true;
        return;
    }
    if (e->call.op == PL_STORE_REMOVE) {
        if (rc == PL_EEXISTS && e->tries++ < 5) { /* it was bound anew meanwhile */
            e->call.op = PL_STORE_PEEK;
            e->again = true;
            return;
        }
        if ((rc == 0 || lost) && e->call.binding.kind == PL_SESSION_ENGINE_BACKED)
            pl_close_submit(e->s, &e->call.name, &e->call.binding, (pl_close_cause)e->cause, false,
                            NULL);
    }
    if (e->done)
        e->done(e->ctx, rc);
}

void pl_session_remove(pl_sessions *s, pl_store *store, pl_store_errands *of,
                       const pl_session_name *name, pl_close_cause cause,
                       void (*done)(void *ctx, int rc), void *ctx)
{
    pl_store_errand *e = pl_store_errand_new(s, store, of, name);
    if (!e) {
        if (done)
            done(ctx, PL_ENOMEM);
        return;
    }
    e->call.op = PL_STORE_PEEK;
    e->cause = (int)cause;
    e->then = then_removed;
    e->done = done;
    e->ctx = ctx;
    pl_store_errand_go(e);
}
