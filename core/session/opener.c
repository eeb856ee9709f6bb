/* Open RPCs, on the loop of the request that asked. An opening owns its fetch and lives by itself:
 * the turn may leave (abandon), and what lands on the engine nonetheless is closed.
 *
 *     OPENING --answer: the id-----------------------------------------> done(0)
 *        |  \---refused, or never reached: dropped---------------------> done(error)
 *        |   \--nobody knows: close submitted--> CLOSING --told, 1 s---> done(error)
 *        \--abandoned: goes on without done; when it lands, closed
 */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "session/sessions_impl.h"

#define MAX_ANSWER    65536
#define CLOSE_WAIT_MS 1000 /* for the close of an open that timed out */
#define FAILURES      3    /* in a row, before an engine is left alone for a while */
#define MAX_PAUSE_S   30

struct pl_opening {
    pl_sessions_loop *l;
    pl_opening *next, **link;
    pl_opening_config c;
    pl_fetch *fetch;         /* OPENING */
    pl_close_notice *notice; /* CLOSING */
    pl_timer timer;
    int rc; /* what done will be told */
    uint64_t started_ns;
    char engine_name[PL_ENGINE_SESSION_MAX];
    char bytes[PL_NAME_BYTES];
};

static void opening_free(pl_opening *o)
{
    *o->link = o->next;
    if (o->next)
        o->next->link = o->link;
    if (o->notice)
        o->notice->owner = NULL; /* frees itself when it comes */
    pl_wheel_cancel(o->l->c.wheel, &o->timer);
    pl_engine_unref(o->c.worker->engine);
    free(o);
}

static void finish(pl_opening *o, int rc)
{
    void (*done)(void *ctx, int rc) = o->c.done;
    void *ctx = o->c.ctx;
    opening_free(o);
    if (done)
        done(ctx, rc);
}

/* --- a session that may be open and must not be --- */

static void on_wait_over(pl_timer *t)
{
    pl_opening *o = (pl_opening *)((char *)t - offsetof(pl_opening, timer));
    finish(o, o->rc);
}

static void notice_unlink(pl_close_notice *n)
{
    *n->link = n->next;
    if (n->next)
        n->next->link = n->link;
    n->link = NULL;
}

static void on_notice(pl_message *m, void *ctx)
{
    (void)ctx;
    pl_close_notice *n = (pl_close_notice *)m;
    pl_opening *o = n->owner;
    if (n->link)
        notice_unlink(n);
    free(n);
    if (o) {
        o->notice = NULL;
        finish(o, o->rc);
    }
}

static void submit_close(pl_opening *o, bool may_land_later, pl_close_notice *notice)
{
    pl_session_note note = {.nonce = o->c.nonce, .engine_seconds = o->c.engine_seconds};
    pl_binding b = {.slot = o->c.worker->slot, .generation = o->c.worker->generation};
    pl_session_note_write(&note, &b.note);
    pl_close_submit(o->l->s, &o->c.name, &b, PL_CLOSE_FAILED, may_land_later, notice);
}

static void close_then_finish(pl_opening *o, int rc, bool may_land_later)
{
    pl_close_notice *n = o->c.done ? calloc(1, sizeof *n) : NULL;
    if (n) {
        n->message.run = on_notice;
        n->mailbox = o->l->c.mailbox;
        n->owner = o;
        n->next = o->l->notices;
        n->link = &o->l->notices;
        if (n->next)
            n->next->link = &n->next;
        o->l->notices = n;
    }
    o->rc = rc;
    o->notice = n;
    if (n)
        pl_wheel_arm(o->l->c.wheel, &o->timer, CLOSE_WAIT_MS, on_wait_over);
    submit_close(o, may_land_later, n);
    if (!n)
        finish(o, rc);
}

/* --- the answer --- */

/* A bare JSON string, the id that was sent. */
static bool names_it(const pl_opening *o, pl_str body)
{
    json_t *j = json_loadb(body.p, body.n, JSON_DECODE_ANY, NULL);
    const char *s = json_string_value(j);
    bool same = s && strcmp(s, o->engine_name) == 0;
    json_decref(j);
    return same;
}

static void refused(pl_opening *o, int status)
{
    pl_engine *e = o->c.worker->engine;
    uint32_t lost = PL_CAP_STREAMING_SESSIONS;
    if (status == 404 || status == 405 || status == 501)
        lost |= PL_CAP_SESSIONS;
    else if (!o->c.streaming)
        lost = 0;
    if (atomic_fetch_and(&e->caps, ~lost) & lost)
        pl_log(PL_LOG_WARN, "sessions_not_supported",
               "%s answers %d to an open: no sessions on it until it is asked again what it can do",
               e->name, status);
    pl_registry_drop(o->l->s->registry, o->c.nonce);
    finish(o, PL_EUNAVAILABLE);
}

/* An engine that fails at opens may serve well all the same: its breaker does not count this. But
 * after a few in a row nobody waits for it, for a while that doubles with each further one. */
static void failed(const pl_opening *o, const pl_fetch_result *r)
{
    static unsigned long seen[2];
    pl_engine *e = o->c.worker->engine;
    uint64_t now_ns = pl_clock_now_ns(o->l->s->c.clock);
    unsigned pause_s = 0;
    if (now_ns >= atomic_load(&e->no_opens_until_ns)) { /* else it began before */
        unsigned n = atomic_fetch_add(&e->opens_failed, 1) + 1;
        if (n >= FAILURES)
            pause_s = n - FAILURES < 5 ? 1u << (n - FAILURES) : MAX_PAUSE_S;
        if (pause_s)
            atomic_store(&e->no_opens_until_ns, now_ns + pause_s * 1000000000ull);
    }
    if (!pause_s && !pl_log_allow(seen, 1))
        return;
    char status[32], pause[48] = "";
    snprintf(status, sizeof status, "status %d%s", r->status,
             r->status >= 200 && r->status <= 299 ? " without its id" : "");
    if (pause_s)
        snprintf(pause, sizeof pause, "; no sessions on it for %u s", pause_s);
    pl_log(PL_LOG_WARN, "session_open_failed", "%s: /open_session: %s%s", e->name,
           !r->err     ? status
           : r->detail ? r->detail
                       : pl_strerror(r->err),
           pause);
}

static void on_answer(void *user, const pl_fetch_result *r)
{
    pl_opening *o = user;
    pl_sessions *s = o->l->s;
    o->fetch = NULL;
    pl_sessions_latency(s, &s->open_latency, pl_clock_now_ns(s->c.clock) - o->started_ns);
    if (r->err == 0 && r->status >= 200 && r->status <= 299 && names_it(o, r->body)) {
        atomic_store(&o->c.worker->engine->opens_failed, 0);
        if (o->c.done) {
            finish(o, 0);
        } else {
            submit_close(o, false, NULL);
            opening_free(o);
        }
        return;
    }
    pl_count(&s->stats.open_failures);
    if (r->err == 0 && r->status >= 400 && r->status <= 499 && r->status != 408 &&
        r->status != 429) {
        refused(o, r->status);
    } else if (r->err == 0 && r->status == 501) {
        refused(o, r->status);
    } else if (r->err == PL_ECONNECT || r->err == PL_ERESOLVE || r->err == PL_EUNAVAILABLE ||
               r->err == PL_ENOMEM) { /* it never got there */
        failed(o, r);
        pl_registry_drop(s->registry, o->c.nonce);
        finish(o, r->err == PL_EUNAVAILABLE ? PL_EIO : r->err);
    } else {
        bool answered = !r->err || r->err == PL_ELIMIT; /* too long to be what was asked for */
        failed(o, r);
        close_then_finish(o, answered ? PL_EPROTOCOL : r->err, !answered);
    }
}

pl_opening *pl_opening_start(pl_sessions_loop *l, const pl_opening_config *c)
{
    pl_sessions *s = l->s;
    pl_engine *e = c->worker->engine;
    pl_pool *pool = l->c.pool(l->c.ctx, e);
    pl_opening *o = pool ? calloc(1, sizeof *o) : NULL;
    if (o) {
        char body[PL_ENGINE_SESSION_MAX + 160], extra[96];
        o->l = l;
        o->c = *c;
        o->c.name = pl_session_name_copy(&c->name, o->bytes);
        pl_session_engine_name(c->name.id, c->nonce, o->engine_name);
        int n = snprintf(body, sizeof body,
                         "{\"capacity_of_str_len\":%u,\"session_id\":\"%s\",\"streaming\":%s,"
                         "\"timeout\":%u}",
                         c->capacity_of_str_len, o->engine_name, c->streaming ? "true" : "false",
                         c->engine_seconds);
        int x = snprintf(extra, sizeof extra, "Content-Type: application/json\r\n");
        if (e->workers_n > 1)
            x += snprintf(extra + x, sizeof extra - (size_t)x, "X-Data-Parallel-Rank: %d\r\n",
                          c->worker->rank);
        o->fetch = pl_fetch_start(pool, PL_POST, PL_STR("/open_session"),
                                  (pl_str){extra, (size_t)x}, (pl_str){body, (size_t)n},
                                  s->c.o.open_timeout_ms, MAX_ANSWER, on_answer, o);
    }
    if (!o || !o->fetch) {
        pl_registry_drop(s->registry, c->nonce);
        free(o);
        return NULL;
    }
    pl_engine_ref(e);
    pl_count(&s->stats.opens);
    o->started_ns = pl_clock_now_ns(s->c.clock);
    o->next = l->openings;
    o->link = &l->openings;
    if (o->next)
        o->next->link = &o->next;
    l->openings = o;
    return o;
}

void pl_opening_abandon(pl_opening *o)
{
    o->c.done = NULL;
    if (!o->fetch) /* the close is under way, by itself */
        opening_free(o);
}

void pl_openings_stop(pl_sessions_loop *l)
{
    while (l->openings) {
        pl_opening *o = l->openings;
        if (o->fetch) {
            pl_fetch_cancel(o->fetch);
            submit_close(o, true, NULL);
        }
        opening_free(o);
    }
    if (!l->notices) /* then the controller may be gone already */
        return;
    uv_mutex_lock(&l->s->notice_lock);
    while (l->notices) {
        pl_close_notice *n = l->notices;
        notice_unlink(n);
        if (n->undelivered)
            free(n);
        else
            n->mailbox = NULL; /* the closer frees it, or the mailbox has it already */
    }
    uv_mutex_unlock(&l->s->notice_lock);
}
