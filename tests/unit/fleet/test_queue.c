/* Waiting room: order, bound, grants that are cancelled, refused by a closing loop or not used, and
 * a storm of requests on several loops in which none may be forgotten. Real loops and mailboxes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/err.h"
#include "base/rng.h"
#include "fleet/queue.h"

/* --- one loop, driven by hand --- */

typedef struct room {
    uv_loop_t loop;
    pl_mailbox mailbox;
    pl_queue *q;
    pl_fleet *fleet;
    pl_view *view;
    pl_engine *a, *b; /* a serves m and n, b serves m; one request each */
    char woken[200];  /* names in the order of waking; '!' behind a cancelled one */
} room;

typedef struct guest {
    pl_waiter waiter;
    room *r;
    const char *name;
    enum { LEAVE, TAKE, GO_BACK } then; /* what it does when woken */
    pl_worker_state *takes;
    pl_ticket ticket;
} guest;

static void drop_view(void *ctx, pl_view *v)
{
    (void)ctx;
    pl_view_unref(v);
}

static pl_engine *engine(pl_fleet *f, const char *name, const pl_str *models, int n, int cap)
{
    pl_engine *e = NULL;
    pl_engine_spec s = {.url = PL_STR("http://h"),
                        .name = pl_str_c(name),
                        .max_inflight = cap,
                        .models = models,
                        .models_n = n};
    if (pl_fleet_add(f, &s, &e, NULL) != 0)
        abort();
    e->health = PL_HEALTH_UP;
    return e;
}

static room *open_room(unsigned max)
{
    static const pl_str models[] = {PL_STR_INIT("m"), PL_STR_INIT("n")};
    room *r = calloc(1, sizeof *r);
    assert_int_equal(uv_loop_init(&r->loop), 0);
    assert_int_equal(pl_mailbox_init(&r->mailbox, &r->loop, r), 0);
    uv_ref((uv_handle_t *)&r->mailbox.async);
    r->q = pl_queue_new(max);
    r->fleet = pl_fleet_new(drop_view, NULL);
    r->a = engine(r->fleet, "a", models, 2, 1);
    r->b = engine(r->fleet, "b", models, 1, 1);
    r->view = pl_fleet_view(r->fleet);
    return r;
}

static void close_room(room *r)
{
    if (!r->mailbox.closed)
        pl_mailbox_close(&r->mailbox);
    uv_run(&r->loop, UV_RUN_DEFAULT);
    pl_mailbox_destroy(&r->mailbox);
    assert_int_equal(uv_loop_close(&r->loop), 0);
    assert_int_equal(pl_queue_waiting(r->q), 0);
    pl_queue_free(r->q);
    pl_view_unref(r->view);
    assert_int_equal(atomic_load(&r->a->refs), 3); /* no grant has kept one: fleet, its view, us */
    pl_engine_unref(r->a);
    pl_engine_unref(r->b);
    pl_fleet_free(r->fleet);
    free(r);
}

static void on_wake(pl_waiter *w)
{
    guest *g = (guest *)w;
    strcat(g->r->woken, g->name);
    if (w->cancelled)
        strcat(g->r->woken, "!");
    else if (g->then == TAKE)
        pl_ticket_begin(&g->ticket, g->takes, &(pl_load){.prompt_tokens = 1, .stream = false});
    else if (g->then == GO_BACK)
        assert_int_equal(pl_queue_put(g->r->q, w), 0);
}

static void guest_init(guest *g, room *r, const char *name, const char *model, int64_t priority)
{
    *g = (guest){.r = r, .name = name, .then = TAKE, .takes = &r->a->workers[0]};
    g->waiter.loop = &r->mailbox;
    g->waiter.model = pl_str_c(model);
    g->waiter.priority = priority;
    g->waiter.wake = on_wake;
}

static void guest_put(guest *g, room *r, const char *name, const char *model, int64_t priority)
{
    guest_init(g, r, name, model, priority);
    assert_int_equal(pl_queue_put(r->q, &g->waiter), 0);
}

/* Runs the loop until it has nothing to do. */
static const char *run(room *r)
{
    for (int i = 0; i < 100; i++)
        uv_run(&r->loop, UV_RUN_NOWAIT);
    return r->woken;
}

static void freed(room *r, pl_engine *e)
{
    pl_queue_freed(r->q, &e->workers[0], r->view);
}

/* Ends what was begun on e and tells the queue. */
static void end_and_free(room *r, guest *g)
{
    pl_worker_state *w = g->ticket.worker;
    pl_ticket_end(&g->ticket);
    pl_queue_freed(r->q, w, r->view);
}

static void priority_then_arrival(void **state)
{
    (void)state;
    room *r = open_room(10);
    guest g[5];
    guest_put(&g[0], r, "c", "m", 0);
    guest_put(&g[1], r, "a", "m", 5);
    guest_put(&g[2], r, "d", "m", 0);
    guest_put(&g[3], r, "b", "m", 5);
    guest_put(&g[4], r, "e", "m", -7);
    assert_int_equal(pl_queue_waiting(r->q), 5);
    freed(r, r->a);
    assert_string_equal(run(r), "a"); /* one place, one waiter */
    end_and_free(r, &g[1]);
    assert_string_equal(run(r), "ab");
    end_and_free(r, &g[3]);
    run(r);
    end_and_free(r, &g[0]);
    run(r);
    end_and_free(r, &g[2]);
    assert_string_equal(run(r), "abcde");
    pl_ticket_end(&g[4].ticket);
    close_room(r);
}

/* A tier of strict_priority lies above the 32 bits of the priorities in it. */
static void tiers_are_above_priorities(void **state)
{
    (void)state;
    room *r = open_room(10);
    const int64_t tier = (int64_t)1 << 32;
    guest g[5];
    guest_put(&g[0], r, "d", "m", INT32_MAX);
    guest_put(&g[1], r, "c", "m", tier - 5);
    guest_put(&g[2], r, "a", "m", 2 * tier + INT32_MIN);
    guest_put(&g[3], r, "b", "m", tier);
    guest_put(&g[4], r, "e", "m", 0);
    freed(r, r->a);
    assert_string_equal(run(r), "a");
    for (int i = 0; i < 3; i++) {
        static const int order[] = {2, 3, 1};
        end_and_free(r, &g[order[i]]);
        run(r);
    }
    assert_string_equal(run(r), "abcd");
    end_and_free(r, &g[0]);
    assert_string_equal(run(r), "abcde");
    pl_ticket_end(&g[4].ticket);
    /* a grant that its waiter does not use goes on to those behind it, by the whole number, too */
    r->woken[0] = 0;
    guest_put(&g[0], r, "f", "m", tier);
    guest_put(&g[1], r, "g", "m", 3);
    g[0].then = LEAVE;
    freed(r, r->a);
    assert_string_equal(run(r), "fg");
    pl_ticket_end(&g[1].ticket);
    close_room(r);
}

static void only_what_the_worker_serves(void **state)
{
    (void)state;
    room *r = open_room(10);
    guest g[2];
    guest_put(&g[0], r, "n", "n", 9);
    guest_put(&g[1], r, "m", "m", 0);
    g[1].takes = &r->b->workers[0];
    freed(r, r->b); /* serves m only: the first in line is passed by */
    assert_string_equal(run(r), "m");
    end_and_free(r, &g[1]);
    assert_string_equal(run(r), "m");
    freed(r, r->a);
    assert_string_equal(run(r), "mn");
    pl_ticket_end(&g[0].ticket);
    freed(r, r->a); /* nobody there */
    guest_put(&g[0], r, "x", "unknown", 0);
    freed(r, r->a);
    assert_string_equal(run(r), "mn");
    assert_true(pl_queue_remove(r->q, &g[0].waiter));
    close_room(r);
}

static void a_full_room_refuses_but_takes_back(void **state)
{
    (void)state;
    room *r = open_room(2);
    guest g[4];
    guest_put(&g[0], r, "a", "m", 0);
    guest_put(&g[1], r, "b", "m", 0);
    guest_init(&g[2], r, "c", "m", 0);
    assert_int_equal(pl_queue_put(r->q, &g[2].waiter), PL_ELIMIT);
    assert_int_equal(pl_queue_waiting(r->q), 2);
    g[0].then = GO_BACK;
    freed(r, r->a);
    assert_int_equal(pl_queue_waiting(r->q), 1);
    assert_int_equal(pl_queue_put(r->q, &g[2].waiter),
                     PL_ELIMIT); /* a granted one holds its place */
    g[1].then = GO_BACK;
    assert_string_equal(run(r), "ab"); /* a went back, so b was asked */
    g[0].then = g[1].then = TAKE;
    freed(r, r->a);
    assert_string_equal(run(r), "aba"); /* and a had kept its place before b */
    pl_ticket_end(&g[0].ticket);
    assert_int_equal(pl_queue_put(r->q, &g[2].waiter), 0);
    assert_true(pl_queue_remove(r->q, &g[1].waiter));
    assert_true(pl_queue_remove(r->q, &g[2].waiter));
    assert_true(pl_queue_remove(r->q, &g[2].waiter)); /* out already */
    close_room(r);
    r = open_room(0); /* no waiting at all */
    guest_init(&g[0], r, "a", "m", 0);
    assert_int_equal(pl_queue_put(r->q, &g[0].waiter), PL_ELIMIT);
    close_room(r);
}

static void a_removed_waiter_is_not_woken(void **state)
{
    (void)state;
    room *r = open_room(10);
    guest g[3];
    guest_put(&g[0], r, "a", "m", 0);
    guest_put(&g[1], r, "b", "m", 0);
    guest_put(&g[2], r, "c", "m", 0);
    assert_true(pl_queue_remove(r->q, &g[1].waiter));
    assert_true(pl_queue_remove(r->q, &g[0].waiter));
    freed(r, r->a);
    assert_string_equal(run(r), "c");
    pl_ticket_end(&g[2].ticket);
    close_room(r);
}

static void a_cancelled_grant_goes_to_the_next(void **state)
{
    (void)state;
    room *r = open_room(10);
    guest g[3];
    guest_put(&g[0], r, "a", "m", 0);
    guest_put(&g[1], r, "b", "m", 0);
    guest_put(&g[2], r, "c", "m", 0);
    freed(r, r->a);
    assert_false(pl_queue_remove(r->q, &g[0].waiter)); /* under way */
    assert_true(g[0].waiter.cancelled);
    assert_string_equal(run(r), "a!b"); /* c waits on: b has taken the place */
    end_and_free(r, &g[1]);
    assert_string_equal(run(r), "a!bc");
    pl_ticket_end(&g[2].ticket);
    close_room(r);
}

static void an_unused_grant_goes_to_the_next(void **state)
{
    (void)state;
    room *r = open_room(10);
    guest g[3];
    guest_put(&g[0], r, "a", "m", 0);
    guest_put(&g[1], r, "b", "n", 0);
    guest_put(&g[2], r, "c", "m", 0);
    g[0].takes = &r->b->workers[0]; /* another one had become free, too */
    freed(r, r->a);
    assert_string_equal(run(r), "ab");
    pl_ticket_end(&g[0].ticket);
    pl_ticket_end(&g[1].ticket);
    assert_true(pl_queue_remove(r->q, &g[2].waiter));
    /* not passed on to a worker that can take nobody */
    r->woken[0] = 0;
    guest_put(&g[0], r, "a", "m", 0);
    guest_put(&g[1], r, "b", "m", 0);
    g[0].then = LEAVE;
    r->a->health = PL_HEALTH_DOWN;
    freed(r, r->a);
    assert_string_equal(run(r), "a");
    assert_true(pl_queue_remove(r->q, &g[1].waiter));
    close_room(r);
}

/* A policy that sends all of them back must not have the whole line asked for each freed place. */
static void passing_on_has_an_end(void **state)
{
    (void)state;
    enum { N = 60 };
    room *r = open_room(N);
    guest g[N];
    for (int i = 0; i < N; i++) {
        guest_put(&g[i], r, "x", "m", 0);
        g[i].then = GO_BACK;
    }
    freed(r, r->a);
    size_t asked = strlen(run(r));
    assert_true(asked > 8 && asked < 20);
    assert_int_equal(pl_queue_waiting(r->q), N);
    for (int i = 0; i < N; i++)
        assert_true(pl_queue_remove(r->q, &g[i].waiter));
    close_room(r);
}

static void all_are_woken_in_order(void **state)
{
    (void)state;
    room *r = open_room(10);
    guest g[3];
    guest_put(&g[0], r, "b", "m", 0);
    guest_put(&g[1], r, "c", "n", 0);
    guest_put(&g[2], r, "a", "gone", 1);
    for (int i = 0; i < 3; i++)
        g[i].then = LEAVE;
    g[0].then = GO_BACK;
    pl_queue_wake_all(r->q);
    assert_int_equal(pl_queue_waiting(r->q), 0);
    assert_false(pl_queue_remove(r->q, &g[1].waiter));
    assert_string_equal(run(r), "abc!");
    assert_true(pl_queue_remove(r->q, &g[0].waiter));
    close_room(r);
}

static void a_closed_loop_is_passed_by(void **state)
{
    (void)state;
    room *r = open_room(10), *closed = open_room(1);
    guest g[2];
    guest_put(&g[0], r, "a", "m", 0);
    guest_put(&g[1], r, "b", "m", 0);
    g[0].waiter.loop = &closed->mailbox;
    pl_mailbox_close(&closed->mailbox);
    freed(r, r->a);
    assert_string_equal(run(r), "b");
    assert_true(pl_queue_remove(r->q, &g[0].waiter)); /* its owner may free it */
    pl_ticket_end(&g[1].ticket);
    close_room(closed);
    close_room(r);
}

static void thousand_waiters_keep_their_order(void **state)
{
    (void)state;
    enum { N = 1024 };
    room *r = open_room(N);
    guest *g = calloc(N, sizeof *g);
    pl_rng rng = {9};
    for (int i = 0; i < N; i++) {
        guest_put(&g[i], r, "", "m", (int)pl_rng_below(&rng, 5));
        if (i % 3 == 0)
            assert_true(pl_queue_remove(r->q, &g[pl_rng_below(&rng, (uint32_t)i + 1)].waiter));
    }
    const pl_waiter *last = NULL;
    int left = 0;
    for (unsigned n = pl_queue_waiting(r->q); n > 0; n--) {
        freed(r, r->a);
        uv_run(&r->loop, UV_RUN_NOWAIT);
        const pl_waiter *w = NULL;
        for (int i = 0; i < N; i++)
            if (g[i].ticket.worker) {
                assert_null(w);
                w = &g[i].waiter;
                pl_ticket_end(&g[i].ticket);
            }
        assert_non_null(w);
        assert_true(!last || w->priority < last->priority ||
                    (w->priority == last->priority && w->arrival > last->arrival));
        last = w;
        left++;
    }
    assert_true(left > 500);
    free(g);
    close_room(r);
}

/* --- several loops: every request is served or leaves; one that is forgotten hangs the test --- */

enum { LOOPS = 3, AT_ONCE = 12, REQUESTS = 1500 };

typedef struct storm {
    pl_queue *q;
    pl_view *view;
    pl_worker_state *w[2];
    _Atomic int inside[2], over, queued, grants_cancelled;
} storm;

typedef struct storm_loop {
    storm *s;
    uv_loop_t loop;
    pl_mailbox mailbox;
    uv_thread_t thread;
    pl_rng rng;
    int started, ended;
    struct storm_request *waiting[AT_ONCE];
    int waiting_n;
} storm_loop;

typedef struct storm_request {
    pl_waiter waiter; /* first */
    pl_message message;
    storm_loop *l;
    pl_ticket ticket;
    int which;
    bool left; /* its client is gone */
} storm_request;

static void start_next(storm_loop *l);

static void request_over(storm_request *rq)
{
    storm_loop *l = rq->l;
    free(rq);
    if (++l->ended == REQUESTS)
        pl_mailbox_close(&l->mailbox);
    else
        start_next(l);
}

static void waits_no_more(storm_request *rq)
{
    storm_loop *l = rq->l;
    for (int i = 0; i < l->waiting_n; i++)
        if (l->waiting[i] == rq)
            l->waiting[i] = l->waiting[--l->waiting_n];
}

/* The client of some waiting request leaves, often while its grant is under way. */
static void somebody_leaves(storm_loop *l)
{
    if (!l->waiting_n || pl_rng_below(&l->rng, 4))
        return;
    storm_request *rq = l->waiting[pl_rng_below(&l->rng, (uint32_t)l->waiting_n)];
    waits_no_more(rq);
    rq->left = true;
    if (pl_queue_remove(l->s->q, &rq->waiter))
        request_over(rq);
    else
        atomic_fetch_add(&l->s->grants_cancelled, 1);
}

static void serve_end(pl_message *m, void *ctx)
{
    (void)ctx;
    storm_request *rq = (storm_request *)((char *)m - offsetof(storm_request, message));
    storm *s = rq->l->s;
    atomic_fetch_sub(&s->inside[rq->which], 1);
    pl_ticket_end(&rq->ticket);
    pl_queue_freed(s->q, s->w[rq->which], s->view);
    somebody_leaves(rq->l);
    request_over(rq);
}

/* As the proxy does it: claims, then looks whether it was too late. */
static bool try_worker(storm_request *rq, int i)
{
    storm *s = rq->l->s;
    if (pl_worker_at_capacity(s->w[i]))
        return false;
    pl_ticket_begin(&rq->ticket, s->w[i], &(pl_load){.prompt_tokens = 1, .stream = false});
    if (pl_engine_inflight(s->w[i]->engine) > s->w[i]->engine->max_inflight) {
        pl_ticket_end(&rq->ticket);
        pl_queue_freed(s->q, s->w[i], s->view);
        return false;
    }
    rq->which = i;
    if (atomic_fetch_add(&s->inside[i], 1) >= s->w[i]->engine->max_inflight)
        atomic_fetch_add(&s->over, 1);
    if (pl_mailbox_post(&rq->l->mailbox, &rq->message) != 0)
        abort();
    return true;
}

static bool any_room(const storm *s)
{
    return !pl_worker_at_capacity(s->w[0]) || !pl_worker_at_capacity(s->w[1]);
}

static void go(storm_request *rq)
{
    storm *s = rq->l->s;
    for (;;) {
        int first = (int)pl_rng_below(&rq->l->rng, 2);
        if (try_worker(rq, first) || try_worker(rq, !first))
            return;
        if (pl_queue_put(s->q, &rq->waiter) != 0)
            abort();
        atomic_fetch_add(&s->queued, 1);
        if (any_room(s) && pl_queue_remove(s->q, &rq->waiter))
            continue;
        rq->waiter.cancelled = false;
        rq->l->waiting[rq->l->waiting_n++] = rq;
        return;
    }
}

static void on_storm_wake(pl_waiter *w)
{
    storm_request *rq = (storm_request *)w;
    if (rq->left) {
        request_over(rq);
        return;
    }
    waits_no_more(rq);
    go(rq);
}

static void start_message(pl_message *m, void *ctx)
{
    (void)ctx;
    go((storm_request *)((char *)m - offsetof(storm_request, message)));
}

static void begin_again(pl_message *m, void *ctx)
{
    m->run = serve_end;
    start_message(m, ctx);
}

static void start_next(storm_loop *l)
{
    if (l->started == REQUESTS)
        return;
    storm_request *rq = calloc(1, sizeof *rq);
    l->started++;
    rq->l = l;
    rq->waiter.loop = &l->mailbox;
    rq->waiter.model = PL_STR("m");
    rq->waiter.priority = (int)pl_rng_below(&l->rng, 3);
    rq->waiter.wake = on_storm_wake;
    rq->message.run = begin_again;
    if (pl_mailbox_post(&l->mailbox, &rq->message) != 0)
        abort();
}

static void storm_thread(void *arg)
{
    storm_loop *l = arg;
    for (int i = 0; i < AT_ONCE; i++)
        start_next(l);
    uv_ref((uv_handle_t *)&l->mailbox.async);
    uv_run(&l->loop, UV_RUN_DEFAULT);
}

static void no_request_is_forgotten(void **state)
{
    (void)state;
    const pl_str m = PL_STR("m");
    storm s = {0};
    pl_fleet *f = pl_fleet_new(drop_view, NULL);
    pl_engine *e[2] = {engine(f, "a", &m, 1, 2), engine(f, "b", &m, 1, 1)};
    s.w[0] = &e[0]->workers[0];
    s.w[1] = &e[1]->workers[0];
    s.q = pl_queue_new(1024);
    s.view = pl_fleet_view(f);
    alarm(200); /* a lost grant ends here */
    storm_loop *l = calloc(LOOPS, sizeof *l);
    for (int i = 0; i < LOOPS; i++) {
        l[i].s = &s;
        l[i].rng.state = (uint64_t)i;
        assert_int_equal(uv_loop_init(&l[i].loop), 0);
        assert_int_equal(pl_mailbox_init(&l[i].mailbox, &l[i].loop, NULL), 0);
    }
    for (int i = 0; i < LOOPS; i++)
        uv_thread_create(&l[i].thread, storm_thread, &l[i]);
    for (int i = 0; i < LOOPS; i++)
        uv_thread_join(&l[i].thread);
    alarm(0);
    for (int i = 0; i < LOOPS; i++) {
        assert_int_equal(l[i].ended, REQUESTS);
        pl_mailbox_destroy(&l[i].mailbox);
        assert_int_equal(uv_loop_close(&l[i].loop), 0);
    }
    assert_int_equal(s.over, 0); /* no cap was ever exceeded */
    assert_true(s.queued > REQUESTS);
    assert_true(s.grants_cancelled > 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(atomic_load(&s.w[i]->inflight), 0);
        assert_int_equal(atomic_load(&e[i]->refs), 3);
        pl_engine_unref(e[i]);
    }
    assert_int_equal(pl_queue_waiting(s.q), 0);
    free(l);
    pl_queue_free(s.q);
    pl_view_unref(s.view);
    pl_fleet_free(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(priority_then_arrival),
        cmocka_unit_test(tiers_are_above_priorities),
        cmocka_unit_test(only_what_the_worker_serves),
        cmocka_unit_test(a_full_room_refuses_but_takes_back),
        cmocka_unit_test(a_removed_waiter_is_not_woken),
        cmocka_unit_test(a_cancelled_grant_goes_to_the_next),
        cmocka_unit_test(an_unused_grant_goes_to_the_next),
        cmocka_unit_test(passing_on_has_an_end),
        cmocka_unit_test(all_are_woken_in_order),
        cmocka_unit_test(a_closed_loop_is_passed_by),
        cmocka_unit_test(thousand_waiters_keep_their_order),
        cmocka_unit_test(no_request_is_forgotten),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
