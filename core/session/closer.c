/* Close RPCs. Submitted on any thread, done on the control thread with connections of its own, so
 * that they neither wait behind traffic nor end with the loop that asked for them. The closer owns
 * the closes and a lane for each engine that has some: a pool, a queue, a backoff.
 *
 *     submitted --turn under way--> kept by the gate --turn ends--+
 *         |                                                       v
 *         +----------------------- message to the control thread --> lane's queue
 *     queue --sent--> acknowledged --again: later once more--> queue
 *                 \                \--> over                     ^
 *                  \--failed: backoff of the lane, to its tail --+
 *     queue --the engine's own timeout has passed--> given up
 *
 * A session is dropped from the registry when its close is over or given up. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "session/sessions_impl.h"

#define MAX_ACTIVE      4     /* close RPCs under way on one engine */
#define BACKOFF_MS      250   /* doubled with each failure in a row */
#define MAX_BACKOFF_MS  30000 /* of an engine that is there */
#define GONE_BACKOFF_MS 2000  /* of one that was removed */
#define GONE_MS         10000 /* that long a removed engine is still asked */
#define LANE_IDLE_MS    5000
#define MAX_ANSWER      65536
#define REPEATS         2

typedef struct lane lane;

typedef struct item {
    pl_close pub; /* first */
    pl_sessions *s;
    pl_engine *engine; /* referenced */
    lane *lane;        /* NULL before the control thread has it */
    pl_close_notice *notice;
    uint64_t give_up_ms; /* by the control wheel; before that: after so long */
    pl_timer timer;      /* until the repeat */
    pl_fetch *fetch;
    uint64_t sent_ns;
    uint64_t expired; /* its binding's version, when that is why it is closed */
    uint8_t again;    /* closes still to come after an acknowledged one */
    bool tried;
    char name[PL_ENGINE_SESSION_MAX];
} item;

struct lane {
    lane *next;
    pl_closer *closer;
    pl_engine *engine; /* referenced */
    pl_pool *pool;
    pl_close *first, **end; /* to be sent */
    unsigned items;         /* here at all */
    item *all[MAX_ACTIVE];  /* under way */
    unsigned active, failures;
    pl_timer timer; /* the backoff; without items: the end */
    bool gone;
};

struct pl_closer {
    pl_sessions *s;
    lane *lanes;
    pl_rng rng;
    bool hurry, stopped;
    pl_close *waiting; /* for their repeat */
    _Atomic unsigned pending;
};

static lane *lane_of_timer(pl_timer *t)
{
    return (lane *)((char *)t - offsetof(lane, timer));
}

static pl_wheel *wheel(const pl_closer *c)
{
    return c->s->c.control_wheel;
}

/* --- the end of a close --- */

static void tell(pl_sessions *s, pl_close_notice *n)
{
    if (!n)
        return;
    uv_mutex_lock(&s->notice_lock);
    bool orphan = !n->mailbox;
    if (!orphan && pl_mailbox_post(n->mailbox, &n->message) != 0)
        n->undelivered = true;
    uv_mutex_unlock(&s->notice_lock);
    if (orphan)
        free(n);
}

static void item_free(item *i)
{
    pl_sessions *s = i->s;
    tell(s, i->notice);
    pl_registry_drop(s->registry, i->pub.nonce);
    if (i->engine)
        pl_engine_unref(i->engine);
    free(i);
    atomic_fetch_sub(&s->closer->pending, 1);
}

static void give_up(item *i, const char *why)
{
    static unsigned long allow[2];
    pl_count(&i->s->stats.close_given_up);
    if (i->lane && !i->s->closer->stopped) /* else another router may still do it */
        pl_sessions_settled(i->s, i->expired);
    if (pl_log_allow(allow, 5))
        pl_log(PL_LOG_WARN, "session_close_given_up", "%s on %s: %s", i->name,
               i->engine ? i->engine->name : "an engine that has left", why);
    item_free(i);
}

static void lane_free(lane *l)
{
    lane **at = &l->closer->lanes;
    while (*at != l)
        at = &(*at)->next;
    *at = l->next;
    pl_wheel_cancel(wheel(l->closer), &l->timer);
    pl_pool_free(l->pool);
    pl_engine_unref(l->engine);
    free(l);
}

static void on_idle(pl_timer *t)
{
    lane_free(lane_of_timer(t));
}

/* An item has left the lane. */
static void lane_less(lane *l)
{
    if (--l->items == 0)
        pl_wheel_arm(wheel(l->closer), &l->timer, LANE_IDLE_MS, on_idle);
}

/* --- RPCs --- */

static void pump(lane *l);

static void on_pause_over(pl_timer *t)
{
    pump(lane_of_timer(t));
}

static void enqueue(lane *l, item *i)
{
    i->pub.next = NULL;
    *l->end = &i->pub;
    l->end = &i->pub.next;
}

static item *dequeue(lane *l)
{
    item *i = (item *)l->first;
    if (i && !(l->first = i->pub.next))
        l->end = &l->first;
    return i;
}

/* The lane rests; failures that come meanwhile (of calls that went out together) count once. */
static void back_off(lane *l)
{
    if (pl_timer_armed(&l->timer))
        return;
    uint64_t ms = (uint64_t)BACKOFF_MS << (l->failures < 7 ? l->failures : 7);
    uint64_t most = l->gone ? GONE_BACKOFF_MS : MAX_BACKOFF_MS;
    l->failures++;
    if (ms > most)
        ms = most;
    ms = (uint64_t)((double)ms * (0.8 + 0.4 * pl_rng_unit(&l->closer->rng)));
    pl_wheel_arm(wheel(l->closer), &l->timer, ms, on_pause_over);
}

static void on_repeat(pl_timer *t)
{
    item *i = (item *)((char *)t - offsetof(item, timer));
    pl_close **at = &i->lane->closer->waiting;
    while (*at != &i->pub)
        at = &(*at)->next;
    *at = i->pub.next;
    enqueue(i->lane, i);
    pump(i->lane);
}

static void acknowledged(lane *l, item *i)
{
    pl_closer *c = l->closer;
    l->failures = 0;
    if (i->again == 0 || c->hurry) {
        pl_sessions_settled(c->s, i->expired);
        item_free(i);
        lane_less(l);
        return;
    }
    uint64_t ms = c->s->c.o.open_timeout_ms * (i->again-- == REPEATS ? 1 : 4);
    i->pub.next = c->waiting;
    c->waiting = &i->pub;
    pl_wheel_arm(wheel(c), &i->timer, ms, on_repeat);
}

/* The session is not there: closed, or its engine knows of no sessions (any more). */
static bool is_over(const pl_fetch_result *r)
{
    return r->err == 0 && ((r->status >= 200 && r->status <= 299) || r->status == 404 ||
                           r->status == 405 || r->status == 501);
}

static void on_answer(void *user, const pl_fetch_result *r)
{
    item *i = user;
    lane *l = i->lane;
    pl_sessions *s = i->s;
    i->fetch = NULL;
    for (unsigned k = 0; k < MAX_ACTIVE; k++)
        if (l->all[k] == i)
            l->all[k] = NULL;
    l->active--;
    i->tried = true;
    tell(s, i->notice);
    i->notice = NULL;
    if (is_over(r)) {
        pl_sessions_latency(s, &s->close_latency, pl_clock_now_ns(s->c.clock) - i->sent_ns);
        acknowledged(l, i);
    } else {
        pl_count(&s->stats.close_failures);
        enqueue(l, i);
        back_off(l);
    }
    pump(l);
}

static bool send_close(lane *l, item *i)
{
    char body[PL_ENGINE_SESSION_MAX + 32];
    pl_sessions *s = i->s;
    int n = snprintf(body, sizeof body, "{\"session_id\":\"%s\"}", i->name);
    i->fetch = pl_fetch_start(
        l->pool, PL_POST, PL_STR("/close_session"), PL_STR("Content-Type: application/json\r\n"),
        (pl_str){body, (size_t)n}, s->c.o.close_timeout_ms, MAX_ANSWER, on_answer, i);
    if (!i->fetch)
        return false;
    i->sent_ns = pl_clock_now_ns(s->c.clock);
    pl_count(&s->stats.close_rpcs);
    if (i->tried)
        pl_count(&s->stats.close_retries);
    for (unsigned k = 0; k < MAX_ACTIVE; k++)
        if (!l->all[k]) {
            l->all[k] = i;
            break;
        }
    l->active++;
    return true;
}

static void pump(lane *l)
{
    while (l->active < MAX_ACTIVE && l->first && !pl_timer_armed(&l->timer)) {
        item *i = dequeue(l);
        if (wheel(l->closer)->now_ms >= i->give_up_ms) {
            give_up(i, l->gone ? "the engine has left" : "the engine's own timeout has passed");
            lane_less(l);
        } else if (!send_close(l, i)) {
            enqueue(l, i);
            back_off(l);
        }
    }
}

/* --- the control thread gets one --- */

static lane *lane_for(pl_closer *c, pl_engine *e)
{
    for (lane *l = c->lanes; l; l = l->next)
        if (l->engine == e)
            return l;
    lane *l = calloc(1, sizeof *l);
    pl_pool_options o = *c->s->c.pool;
    o.max_idle = MAX_ACTIVE;
    o.api_key = e->api_key;
    if (l)
        l->pool = pl_pool_new(c->s->c.control, wheel(c), pl_str_c(e->host), e->port, &o);
    if (!l || !l->pool) {
        free(l);
        return NULL;
    }
    l->closer = c;
    l->engine = pl_engine_ref(e);
    l->end = &l->first;
    l->gone = atomic_load(&e->admin) == PL_ENGINE_REMOVED;
    l->next = c->lanes;
    c->lanes = l;
    return l;
}

static void on_message(pl_message *m, void *ctx)
{
    (void)ctx;
    item *i = (item *)m;
    pl_closer *c = i->s->closer;
    if (pl_sessions_arrived(i->s)) {
        free(i->notice); /* its loop has ended long ago */
        if (i->engine)
            pl_engine_unref(i->engine);
        free(i);
        return;
    }
    lane *l = c->stopped || !i->engine ? NULL : lane_for(c, i->engine);
    if (!i->engine) { /* it has left, and what it held with it */
        pl_sessions_settled(i->s, i->expired);
        item_free(i);
        return;
    }
    if (!l) {
        give_up(i, c->stopped ? "the router has stopped" : "out of memory");
        return;
    }
    if (l->items++ == 0)
        pl_wheel_cancel(wheel(c), &l->timer);
    i->lane = l;
    if (l->gone && i->give_up_ms > GONE_MS)
        i->give_up_ms = GONE_MS;
    i->give_up_ms += wheel(c)->now_ms;
    enqueue(l, i);
    pump(l);
}

/* --- any thread --- */

static void to_control(item *i)
{
    i->pub.message.run = on_message;
    if (pl_sessions_post(i->s, &i->pub.message) != 0)
        give_up(i, "the router has stopped");
}

void pl_close_send(pl_sessions *s, pl_close *list)
{
    (void)s;
    while (list) {
        item *i = (item *)list;
        list = list->next;
        to_control(i);
    }
}

void pl_close_submit(pl_sessions *s, const pl_session_name *name, const pl_binding *b,
                     pl_close_cause cause, bool again, pl_close_notice *notice)
{
    pl_session_note note;
    pl_worker_state *w;
    if (cause != PL_CLOSE_UNCOUNTED)
        pl_count(&s->stats.closes[cause]);
    item *i = pl_session_note_read(&b->note, &note) ? calloc(1, sizeof *i) : NULL;
    if (!i) { /* no memory, or not a binding of ours: the engine's own timeout frees it */
        pl_count(&s->stats.close_given_up);
        pl_registry_drop(s->registry, note.nonce);
        tell(s, notice);
        return;
    }
    i->s = s;
    i->pub.nonce = note.nonce;
    i->engine = pl_registry_closing(s->registry, note.nonce, &w);
    if (!i->engine && b->slot >= 0)
        i->engine = s->c.find(s->c.ctx, b->slot, b->generation, &w);
    if (!i->engine && b->slot >= 0) { /* it has left the fleet, and was told to close all then */
        pl_registry_drop(s->registry, note.nonce);
        tell(s, notice);
        free(i);
        return;
    }
    i->notice = notice;
    i->give_up_ms = (uint64_t)note.engine_seconds * 1000;
    i->again = again ? REPEATS : 0;
    i->expired = cause == PL_CLOSE_EXPIRED ? b->version : 0;
    pl_session_engine_name(name->id, note.nonce, i->name);
    atomic_fetch_add(&s->closer->pending, 1);
    if (!pl_gate_keep(s->gate, name, &i->pub))
        to_control(i);
}

/* --- the whole --- */

pl_closer *pl_closer_new(pl_sessions *s)
{
    pl_closer *c = calloc(1, sizeof *c);
    if (c) {
        c->s = s;
        c->rng.state = pl_now_ns(); /* spreads retries: routers that lost an engine drift apart */
    }
    return c;
}

void pl_closer_engine_gone(pl_closer *c, const pl_engine *e)
{
    for (lane *l = c->lanes; l; l = l->next) {
        if (l->engine != e)
            continue;
        uint64_t by_ms = wheel(c)->now_ms + GONE_MS;
        l->gone = true;
        for (pl_close *k = l->first; k; k = k->next)
            if (((item *)k)->give_up_ms > by_ms)
                ((item *)k)->give_up_ms = by_ms;
        for (unsigned k = 0; k < MAX_ACTIVE; k++)
            if (l->all[k] && l->all[k]->give_up_ms > by_ms)
                l->all[k]->give_up_ms = by_ms;
    }
}

void pl_closer_hurry(pl_closer *c)
{
    c->hurry = true;
    while (c->waiting) {
        item *i = (item *)c->waiting;
        c->waiting = i->pub.next;
        pl_wheel_cancel(wheel(c), &i->timer);
        enqueue(i->lane, i);
        pump(i->lane);
    }
}

void pl_closer_stop(pl_closer *c)
{
    c->stopped = true;
    while (c->waiting) {
        item *i = (item *)c->waiting;
        c->waiting = i->pub.next;
        pl_wheel_cancel(wheel(c), &i->timer);
        item_free(i); /* it was acknowledged */
    }
    while (c->lanes) {
        lane *l = c->lanes;
        for (unsigned k = 0; k < MAX_ACTIVE; k++)
            if (l->all[k]) {
                pl_fetch_cancel(l->all[k]->fetch);
                give_up(l->all[k], "the router stops");
            }
        for (item *i; (i = dequeue(l));)
            give_up(i, "the router stops");
        lane_free(l);
    }
}

unsigned pl_closer_pending(const pl_closer *c)
{
    return atomic_load(&c->pending);
}

void pl_closer_free(pl_closer *c)
{
    free(c);
}
