/* The shared store when its server is not there, does not answer, dies: every call is answered, in
 * time; sessions that this process knows keep their worker; what was bound meanwhile is written
 * when the server is back; one line in the log for each outage. */
#include "redis_down.h"

static void not_there_at_the_start(void **state)
{
    fixture *f = *state;
    pl_redis_options o = options(f);
    open_with(f, &o);
    assert_unavailable(f); /* not yet known to be down */
    down(f);
    assert_unavailable(f);
    uint64_t outages = atomic_load(&pl_redis_stats_of(f->r)->outages);
    DRIVE_UNTIL(&f->d,
                ((pl_redis_handle *)f->s)->wheel->now_ms > 0 && times(logged(f), "store_down"));
    server_start(&f->srv);
    up(f);
    pl_store_call c = put("s", 4, PL_SESSION_ENGINE_BACKED);
    assert_int_equal(ask(f, &c), 0);
    assert_int_equal(outages, 1);
    assert_int_equal(times(logged(f), "store_down"), 1);
    assert_int_equal(times(logged(f), "store_up"), 1);
}

static void it_stops_answering(void **state)
{
    fixture *f = *state;
    server_start(&f->srv);
    pl_redis_options o = options(f);
    open_with(f, &o);
    up(f);
    pl_store_call known = put("known", 3, PL_SESSION_ENGINE_BACKED);
    assert_int_equal(ask(f, &known), 0);
    assert_int_equal(kill(f->srv.pid, SIGSTOP), 0);
    enum { MANY = 40 };
    pl_store_call c[MANY];
    char id[MANY][16];
    for (int i = 0; i < MANY; i++) {
        snprintf(id[i], sizeof id[i], "%d", i);
        c[i] = call(i % 2 ? PL_STORE_LEASE : PL_STORE_GET, id[i]);
        c[i].owner = 1;
        c[i].lease_ms = 100;
        assert_int_equal(pl_store_start(f->s, &c[i]), PL_STORE_PENDING);
    }
    pl_store_list_call l = {.limit = 10};
    assert_int_equal(pl_store_list(f->s, &l), PL_STORE_PENDING);
    for (int i = 0; i < MANY; i++) {
        DRIVE_UNTIL(&f->d, !c[i].pending);
        assert_true(c[i].result == PL_ETIMEOUT || c[i].result == PL_EUNAVAILABLE);
    }
    DRIVE_UNTIL(&f->d, !l.pending);
    assert_true(l.result == PL_ETIMEOUT || l.result == PL_EUNAVAILABLE);
    down(f);
    assert_unavailable(f);
    /* but this process knows where it is */
    pl_store_call g = call(PL_STORE_GET, "known");
    assert_int_equal(pl_store_start(f->s, &g), 0);
    assert_true(g.stale);
    assert_int_equal(g.binding.slot, 3);
    assert_int_equal(kill(f->srv.pid, SIGCONT), 0);
    up(f);
    g = call(PL_STORE_GET, "known");
    assert_int_equal(ask(f, &g), 0);
    assert_false(g.stale);
    assert_int_equal(g.binding.slot, 3);
    assert_int_equal(times(logged(f), "store_down"), 1);
    assert_int_equal(times(logged(f), "store_up"), 1);
}

static void it_is_killed_with_calls_under_way_and_comes_back_empty(void **state)
{
    fixture *f = *state;
    server_start(&f->srv);
    pl_redis_options o = options(f);
    open_with(f, &o);
    up(f);
    pl_store_call r = put("before", 3, PL_SESSION_ROUTER_ONLY),
                  e = put("engine", 5, PL_SESSION_ENGINE_BACKED),
                  idle = put("idle", 9, PL_SESSION_ROUTER_ONLY);
    assert_int_equal(ask(f, &r), 0);
    assert_int_equal(ask(f, &e), 0);
    assert_int_equal(ask(f, &idle), 0);
    kill(f->srv.pid, SIGSTOP);
    pl_store_call c[10];
    for (int i = 0; i < 10; i++) {
        c[i] = call(PL_STORE_GET, "x");
        assert_int_equal(pl_store_start(f->s, &c[i]), PL_STORE_PENDING);
    }
    server_kill(&f->srv);
    for (int i = 0; i < 10; i++) {
        DRIVE_UNTIL(&f->d, !c[i].pending);
        assert_true(c[i].result == PL_ETIMEOUT || c[i].result == PL_EUNAVAILABLE);
    }
    down(f);
    pl_store_call g = call(PL_STORE_GET, "before");
    assert_int_equal(ask(f, &g), 0);
    assert_int_equal(g.binding.slot, 3);
    /* opened meanwhile, by the deterministic choice */
    pl_store_call n = put("new", 6, PL_SESSION_ROUTER_ONLY),
                  again = put("new", 7, PL_SESSION_ROUTER_ONLY),
                  gone = put("gone", 6, PL_SESSION_ROUTER_ONLY);
    n.when = again.when = PL_STORE_IF_ABSENT;
    assert_int_equal(pl_store_start(f->s, &n), 0);
    assert_true(n.stale);
    assert_int_equal(pl_store_start(f->s, &again), PL_EEXISTS);
    assert_int_equal(again.old.slot, 6);
    assert_int_equal(pl_store_start(f->s, &gone), 0);
    g = call(PL_STORE_GET, "new");
    assert_int_equal(pl_store_start(f->s, &g), 0);
    assert_int_equal(g.binding.slot, 6);
    assert_int_equal(g.binding.version, n.binding.version);
    pl_store_call rm = call(PL_STORE_REMOVE, "gone");
    assert_int_equal(pl_store_start(f->s, &rm), 0);
    assert_int_equal(rm.old.slot, 6);
    /* its worker has left: bound anew, if it is still what the caller saw */
    pl_store_call moved = put("new", 7, PL_SESSION_ROUTER_ONLY);
    moved.when = PL_STORE_IF_VERSION;
    moved.version = g.binding.version + 1;
    assert_int_equal(pl_store_start(f->s, &moved), PL_EUNAVAILABLE);
    moved.version = g.binding.version;
    assert_int_equal(pl_store_start(f->s, &moved), 0);
    assert_true(moved.stale);
    assert_int_equal(moved.old.slot, 6);
    /* an engine-backed one cannot be moved while nobody can be asked */
    pl_store_call move = put("engine", 8, PL_SESSION_ROUTER_ONLY);
    assert_int_equal(pl_store_start(f->s, &move), PL_EUNAVAILABLE);

    server_start(&f->srv);
    up(f);
    const pl_redis_stats *st = pl_redis_stats_of(f->r);
    DRIVE_UNTIL(&f->d, st->written == 2);
    pl_store_call p = call(PL_STORE_PEEK, "new");
    assert_int_equal(ask(f, &p), 0);
    assert_false(p.stale);
    assert_int_equal(p.binding.slot, 7);
    p = call(PL_STORE_PEEK, "before"); /* used in the outage */
    assert_int_equal(ask(f, &p), 0);
    assert_int_equal(p.binding.slot, 3);
    static const char *const lost[] = {"gone", "engine", "idle"};
    for (int i = 0; i < 3; i++) {
        p = call(PL_STORE_PEEK, lost[i]);
        assert_int_equal(ask(f, &p), PL_ENOTFOUND);
    }
    assert_int_equal(st->conflicts, 0);
    /* no version comes again, although the server starts anew */
    p = put("engine", 5, PL_SESSION_ENGINE_BACKED);
    assert_int_equal(ask(f, &p), 0);
    assert_true(p.binding.version > e.binding.version);
    assert_int_equal(times(logged(f), "store_down"), 1);
}

/* Until all is written, what is not yet there is known here. */
static void it_is_asked_before_all_is_written(void **state)
{
    enum { N = 400 };
    fixture *f = *state;
    pl_redis_options o = options(f);
    open_with(f, &o);
    down(f);
    static pl_store_call c[N];
    static char ids[N][16];
    for (int i = 0; i < N; i++) {
        snprintf(ids[i], sizeof ids[i], "s%d", i);
        pl_store_call p = put(ids[i], i % 10, PL_SESSION_ROUTER_ONLY);
        assert_int_equal(pl_store_start(f->s, &p), 0);
    }
    server_start(&f->srv);
    up(f);
    for (int i = 0; i < N; i++) {
        c[i] = call(PL_STORE_GET, ids[i]);
        pl_store_start(f->s, &c[i]);
    }
    for (int i = 0; i < N; i++) {
        DRIVE_UNTIL(&f->d, !c[i].pending);
        assert_int_equal(c[i].result, 0);
        assert_int_equal(c[i].binding.slot, i % 10);
    }
    DRIVE_UNTIL(&f->d, pl_redis_stats_of(f->r)->written == N);
    pl_store_call g = call(PL_STORE_GET, ids[0]);
    assert_int_equal(ask(f, &g), 0);
    assert_false(g.stale);
    assert_int_equal(pl_redis_stats_of(f->r)->conflicts, 0);
}

static void the_servers_binding_wins(void **state)
{
    fixture *f = *state;
    server_start(&f->srv);
    pl_redis_options o = options(f);
    open_with(f, &o);
    up(f);
    kill(f->srv.pid, SIGSTOP);
    pl_store_call x = call(PL_STORE_GET, "x"); /* notices it */
    assert_int_not_equal(ask(f, &x), 0);
    down(f);
    pl_store_call a = put("a", 1, PL_SESSION_ROUTER_ONLY), b = put("b", 1, PL_SESSION_ROUTER_ONLY);
    assert_int_equal(pl_store_start(f->s, &a), 0);
    assert_int_equal(pl_store_start(f->s, &b), 0);
    /* another router, which can reach the server, binds b elsewhere: sent before ours, since the
     * server reads it when it goes on */
    fixture other = {.srv = f->srv};
    driver_open(&other.d);
    pl_redis_options oo = options(&other);
    oo.command_ms = oo.connect_ms = 60000;
    kill(f->srv.pid, SIGCONT);
    open_with(&other, &oo);
    up(&other);
    pl_store_call theirs = put("b", 2, PL_SESSION_ROUTER_ONLY);
    assert_int_equal(ask(&other, &theirs), 0);
    close_store(&other);
    driver_close(&other.d);
    const pl_redis_stats *st = pl_redis_stats_of(f->r);
    up(f);
    DRIVE_UNTIL(&f->d, st->written + st->conflicts == 2);
    assert_int_equal(st->conflicts, 1);
    pl_store_call g = call(PL_STORE_GET, "b");
    assert_int_equal(ask(f, &g), 0);
    assert_int_equal(g.binding.slot, 2);
    g = call(PL_STORE_GET, "a");
    assert_int_equal(ask(f, &g), 0);
    assert_int_equal(g.binding.slot, 1);
}
static void fail_done(pl_store_call *c)
{
    (void)c;
    fail_msg("a cancelled call was answered");
}

static void fail_list(pl_store_list_call *c)
{
    (void)c;
    fail_msg("a cancelled list was answered");
}

static void calls_are_cancelled_and_the_store_freed_under_way(void **state)
{
    fixture *f = *state;
    server_start(&f->srv);
    pl_redis_options o = options(f);
    open_with(f, &o);
    up(f);
    for (int round = 0; round < 3; round++) {
        pl_store_call *c = calloc(20, sizeof *c);
        char *id = strdup("heap");
        for (int i = 0; i < 20; i++) {
            c[i] = call(i % 2 ? PL_STORE_REMOVE : PL_STORE_GET, id);
            c[i].done = fail_done;
            assert_int_equal(pl_store_start(f->s, &c[i]), PL_STORE_PENDING);
        }
        pl_store_list_call *l = calloc(1, sizeof *l);
        l->limit = 1;
        l->done = fail_list;
        assert_int_equal(pl_store_list(f->s, l), PL_STORE_PENDING);
        pl_store_advance(f->s); /* a sweep is under way, too */
        for (int i = 0; i < 20; i++)
            pl_store_cancel(f->s, &c[(i * 7) % 20]);
        pl_store_cancel_list(f->s, l);
        free(c);
        free(l);
        free(id);
        if (round == 1) {
            pl_store_call g = call(PL_STORE_GET, "x"); /* behind them: their replies are in */
            assert_int_equal(ask(f, &g), PL_ENOTFOUND);
        }
    }
}

static void free_inside(pl_store_call *c)
{
    fixture *f = *(fixture **)(c + 1);
    pl_store_free(f->s);
    f->s = NULL;
}

static void the_store_is_freed_by_the_last_answer(void **state)
{
    fixture *f = *state;
    for (int how = 0; how < 2; how++) {
        if (f->srv.pid <= 0)
            server_start(&f->srv);
        pl_redis_options o = options(f);
        open_with(f, &o);
        up(f);
        if (how)
            kill(f->srv.pid, SIGSTOP); /* by the timeout */
        struct {
            pl_store_call c;
            fixture *f;
        } x = {call(PL_STORE_GET, "x"), f};
        x.c.done = free_inside;
        pl_store_advance(f->s);
        assert_int_equal(pl_store_start(f->s, &x.c), PL_STORE_PENDING);
        DRIVE_UNTIL(&f->d, !f->s);
        close_store(f);
    }
}

/* The loop was busy for longer than the timeout while the answer came: that is no outage. */
static void a_busy_loop_is_no_outage(void **state)
{
    fixture *f = *state;
    server_start(&f->srv);
    pl_redis_options o = options(f);
    o.command_ms = 50;
    open_with(f, &o);
    up(f);
    DRIVE_UNTIL(&f->d, !((pl_redis_handle *)f->s)->sweeping);
    pl_store_call c = call(PL_STORE_GET, "x");
    assert_int_equal(pl_store_start(f->s, &c), PL_STORE_PENDING);
    uv_run(&f->d.loop, UV_RUN_NOWAIT); /* sends it */
    redisContext *s = server_talk(&f->srv);
    redisReply *r = redisCommand(s, "DEBUG SLEEP 0"); /* the server has read ours by now */
    if (r)
        freeReplyObject(r);
    redisFree(s);
    uint64_t until_ns = pl_now_ns() + 500000000;
    while (pl_now_ns() < until_ns)
        ;
    DRIVE_UNTIL(&f->d, !c.pending);
    assert_int_equal(c.result, PL_ENOTFOUND);
    assert_true(pl_store_redis_up(f->s));
}

typedef struct follower {
    pl_store_call first, then;
    fixture *f;
    uint64_t asked_ns, took_ns; /* of `then` */
} follower;

static void then_answered(pl_store_call *c)
{
    follower *x = (follower *)((char *)c - offsetof(follower, then));
    x->took_ns = pl_now_ns() - x->asked_ns;
}

static void ask_then(pl_store_call *c)
{
    follower *x = (follower *)c;
    x->asked_ns = pl_now_ns();
    (void)pl_store_start(x->f->s, &x->then);
}

/* Who asks again when a call has timed out waits for that answer as for any, and does not make
 * those wait longer who have asked before. */
static void a_call_from_a_timeout_has_its_own_time(void **state)
{
    fixture *f = *state;
    server_start(&f->srv);
    pl_redis_options o = options(f);
    open_with(f, &o);
    follower x;
    do { /* again where this machine was so slow that the connection counted as down first */
        up(f);
        DRIVE_UNTIL(&f->d, !((pl_redis_handle *)f->s)->sweeping);
        x = (follower){call(PL_STORE_GET, "first"), call(PL_STORE_GET, "then"), f, 0, 0};
        x.first.done = ask_then;
        x.then.done = then_answered;
        pl_store_call before = call(PL_STORE_GET, "before");
        pl_store_start(f->s, &before);
        server_tell(&f->srv, "PING"); /* it has answered that */
        kill(f->srv.pid, SIGSTOP);
        uint64_t first_ns = pl_now_ns();
        pl_store_start(f->s, &x.first);
        /* the last that is heard comes well after `first` was sent: so the connection still
         * counts as up when that times out */
        uint64_t until_ns = pl_now_ns() + COMMAND_MS / 2 * 1000000ull;
        while (pl_now_ns() < until_ns)
            ;
        pl_store_call later = call(PL_STORE_GET, "later");
        pl_store_start(f->s, &later);
        uint64_t apart_ms = (pl_now_ns() - first_ns) / 1000000;
        DRIVE_UNTIL(&f->d, !x.first.pending);
        const pl_timer *t = &((pl_redis_handle *)f->s)->timer;
        if (x.first.result == PL_ETIMEOUT && later.pending)
            assert_in_range(t->due_ms, 1, f->d.wheel.now_ms + apart_ms);
        DRIVE_UNTIL(&f->d, !before.pending && !x.then.pending && !later.pending);
        kill(f->srv.pid, SIGCONT);
    } while (x.first.result != PL_ETIMEOUT);
    assert_true(x.then.result == PL_EUNAVAILABLE || x.took_ns >= COMMAND_MS * 1000000ull);
}

/* A call that the server had no script for is sent once more, and in the time that it had. */
static void a_call_that_is_sent_again_keeps_nobody_waiting(void **state)
{
    fixture *f = *state;
    server_start(&f->srv);
    pl_redis_options o = options(f);
    o.command_ms = 20000; /* however slow this machine is, it counts as up */
    open_with(f, &o);
    up(f);
    pl_redis_handle *h = (pl_redis_handle *)f->s;
    DRIVE_UNTIL(&f->d, !h->sweeping);
    server_tell(&f->srv, "SCRIPT FLUSH");
    pl_store_call first = call(PL_STORE_GET, "first"), behind = call(PL_STORE_GET, "behind");
    assert_int_equal(pl_store_start(f->s, &first), PL_STORE_PENDING);
    uint64_t sent_ns = pl_now_ns();
    assert_int_equal(pl_store_start(f->s, &behind), PL_STORE_PENDING);
    server_tell(&f->srv, "PING"); /* it has answered both */
    kill(f->srv.pid, SIGSTOP);
    DRIVE_UNTIL(&f->d, h->newest->in_full);
    assert_true(first.pending == h->oldest && behind.pending == h->newest);
    assert_in_range(h->oldest->sent_ns, 1, sent_ns);
    assert_true(h->newest->sent_ns >= h->oldest->sent_ns);
    kill(f->srv.pid, SIGCONT);
    DRIVE_UNTIL(&f->d, !first.pending && !behind.pending);
    assert_true(first.result == PL_ENOTFOUND && behind.result == PL_ENOTFOUND);
}

/* Many handles that lose their server in one moment do not all come back in another one. */
static void they_do_not_come_back_all_at_once(void **state)
{
    enum { N = 16 };
    fixture *f = *state;
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%s", f->srv.path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0), accepted[N], n = 0, most = 0;
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(fd, 4 * N), 0);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    uv_timer_stop(&f->d.tick); /* the wheel's time is the test's */
    uint64_t ms = f->d.wheel.now_ms;
    pl_redis_options o = options(f);
    pl_store *s[N];
    assert_int_equal(pl_redis_new(&o, &f->r, NULL), 0);
    for (int i = 0; i < N; i++)
        assert_int_equal(pl_store_redis_new(f->r, &f->d.loop, &f->d.wheel, true, &s[i]), 0);
    while (n < N) {
        pl_wheel_advance(&f->d.wheel, ms += PL_WHEEL_TICK_MS);
        while (n < N && (accepted[n] = accept(fd, NULL, NULL)) >= 0)
            n++;
    }
    for (int i = 0; i < N; i++)
        close(accepted[i]);
    DRIVE_UNTIL(&f->d, atomic_load(&pl_redis_stats_of(f->r)->handles_down) == N);
    int ticks = 0;
    for (n = 0; n < N; ticks++) {
        int at_once = 0, c;
        pl_wheel_advance(&f->d.wheel, ms += PL_WHEEL_TICK_MS);
        for (; (c = accept(fd, NULL, NULL)) >= 0; at_once++)
            close(c);
        n += at_once;
        most = at_once > most ? at_once : most;
        assert_true(n == N || ticks < 7); /* 100 ms at most, and what is rounded up */
    }
    assert_int_equal(n, N);
    assert_true(most < N && ticks > 2);
    for (int i = 0; i < N; i++)
        pl_store_free(s[i]);
    close(fd);
    unlink(f->srv.path);
}

/* A binding of the outage is not the one that somebody wants to remove. */
static void a_removal_of_another_version_leaves_what_was_bound(void **state)
{
    fixture *f = *state;
    pl_redis_options o = options(f);
    open_with(f, &o);
    down(f);
    pl_store_call p = put("s", 4, PL_SESSION_ROUTER_ONLY);
    assert_int_equal(pl_store_start(f->s, &p), 0);
    pl_store_call r = call(PL_STORE_REMOVE, "s");
    r.when = PL_STORE_IF_VERSION;
    r.version = p.binding.version + 1;
    assert_int_equal(pl_store_start(f->s, &r), PL_EUNAVAILABLE);
    pl_store_call g = call(PL_STORE_PEEK, "s");
    assert_int_equal(pl_store_start(f->s, &g), 0);
    assert_int_equal(g.binding.slot, 4);
    r.version = p.binding.version;
    assert_int_equal(pl_store_start(f->s, &r), 0);
    assert_int_equal(r.old.slot, 4);
    assert_int_equal(pl_store_start(f->s, &g), PL_EUNAVAILABLE);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        TEST(not_there_at_the_start),
        TEST(it_stops_answering),
        TEST(it_is_killed_with_calls_under_way_and_comes_back_empty),
        TEST(it_is_asked_before_all_is_written),
        TEST(the_servers_binding_wins),
        TEST(calls_are_cancelled_and_the_store_freed_under_way),
        TEST(the_store_is_freed_by_the_last_answer),
        TEST(a_busy_loop_is_no_outage),
        TEST(a_call_from_a_timeout_has_its_own_time),
        TEST(a_call_that_is_sent_again_keeps_nobody_waiting),
        TEST(they_do_not_come_back_all_at_once),
        TEST(a_removal_of_another_version_leaves_what_was_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
