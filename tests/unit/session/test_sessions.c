/* Turns of sessions: what a request that names one may rely on. */
#include "sessions_rig.h"

#include <sys/resource.h>

static void a_session_that_nobody_knows(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    for (pl_wish_action action = PL_WISH_TURN; action <= PL_WISH_CLOSE; action++) {
        assert_int_equal(turn_begin(&t, r.a.l[0], "s", action), 0);
        assert_false(t.t.bound || t.t.leased || t.t.fallback);
        char name[PL_ENGINE_SESSION_MAX];
        assert_int_equal(pl_turn_engine_id(&t.t, name), 0);
        pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
        assert_null(t.t.in);
    }
    assert_int_equal(count(&stats(&r.a)->misses), 4);
    assert_int_equal(count(&stats(&r.a)->hits), 0);
    assert_int_equal(r.f[0].opens + r.f[0].closes, 0);
    rig_close(&r);
}

static void router_only_sessions_bind_when_the_request_was_taken(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    pl_binding b;
    turn t, u;
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_BIND), 0);
    assert_false(rig_peek(&r, "s", &b));
    pl_turn_sent(&t.t, rig_worker(&r, 1), 60000);
    assert_true(rig_peek(&r, "s", &b));
    assert_int_equal(b.slot, rig_worker(&r, 1)->slot);
    assert_int_equal(b.kind, PL_SESSION_ROUTER_ONLY);
    assert_int_equal(b.ttl_ms, 60000);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);

    /* two turns at once, on two loops */
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
    assert_int_equal(turn_begin(&u, r.a.l[1], "s", PL_WISH_TURN), 0);
    assert_true(t.t.bound && u.t.bound && !t.t.leased && !u.t.leased);
    assert_int_equal(t.t.binding.turns, 2);
    pl_view *v = pl_fleet_view(r.fleet);
    const pl_model *m = pl_view_model(v, PL_STR("m"));
    assert_ptr_equal(pl_turn_worker(&t.t, m), rig_worker(&r, 1));
    pl_view_unref(v);

    /* a turn that went elsewhere takes the session along; the one that began before it does not
     * take it back */
    pl_turn_sent(&t.t, rig_worker(&r, 0), 60000);
    pl_turn_sent(&u.t, rig_worker(&r, 1), 30000);
    assert_true(rig_peek(&r, "s", &b));
    assert_int_equal(b.slot, rig_worker(&r, 0)->slot);
    assert_int_equal(count(&stats(&r.a)->rebinds), 1);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    pl_turn_end(&u.t, PL_TURN_DONE, NULL, -1);

    /* closes after the turn */
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_CLOSE), 0);
    pl_turn_sent(&t.t, rig_worker(&r, 0), 60000);
    assert_true(rig_peek(&r, "s", &b));
    pl_turn_end(&t.t, PL_TURN_FAILED, NULL, -1);
    assert_false(rig_peek(&r, "s", &b));
    assert_int_equal(r.f[0].opens + r.f[0].closes, 0);
    rig_close(&r);
}

static void the_time_to_live_counts_from_the_answer(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    pl_binding b;
    turn t;
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_BIND), 0);
    rig_pass(&r, 20000);
    pl_turn_sent(&t.t, rig_worker(&r, 0), 10000);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_pass(&r, 9000);
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
    assert_true(t.t.bound);
    rig_pass(&r, 9000); /* the answer takes that long */
    pl_turn_sent(&t.t, rig_worker(&r, 0), 10000);
    rig_pass(&r, 9000);
    assert_true(rig_peek(&r, "s", &b));
    /* and when it has expired meanwhile it is bound anew */
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
    rig_pass(&r, 12000);
    assert_false(rig_peek(&r, "s", &b));
    pl_turn_sent(&t.t, rig_worker(&r, 1), 10000);
    assert_true(rig_peek(&r, "s", &b));
    assert_int_equal(b.slot, rig_worker(&r, 1)->slot);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    /* 0: not at all */
    assert_int_equal(turn_begin(&t, r.a.l[0], "other", PL_WISH_TURN), 0);
    pl_turn_sent(&t.t, rig_worker(&r, 0), 0);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    assert_false(rig_peek(&r, "other", &b));
    rig_close(&r);
}

static void affinity_comes_after_the_engines_ok(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    pl_binding b;
    turn t;
    char name[PL_ENGINE_SESSION_MAX], want[400];
    r.f[0].on_open = FAKE_HOLD;
    assert_int_equal(turn_begin(&t, r.a.l[0], "agent-1", PL_WISH_OPEN), 0);
    assert_int_equal(turn_open(&t, rig_worker(&r, 0), 90500), PL_STORE_PENDING);
    rig_wait(&r, fake_held(&r.f[0]));
    assert_int_equal(t.ready, 0); /* generation waits */
    assert_false(rig_peek(&r, "agent-1", &b));
    assert_int_equal(rig_worker(&r, 0)->sessions, 1); /* its place is taken */
    fake_release(&r.f[0]);
    rig_wait(&r, t.ready);
    assert_int_equal(t.rc, 0);
    assert_true(t.t.bound && t.t.leased && t.t.streaming);
    assert_int_equal(t.t.history.form, PL_HISTORY_NONE);
    assert_true(rig_peek(&r, "agent-1", &b));
    assert_int_equal(b.kind, PL_SESSION_ENGINE_BACKED);
    assert_int_equal(b.slot, rig_worker(&r, 0)->slot);
    assert_false(rig_free_lease(&r, "agent-1"));
    size_t n = pl_turn_engine_id(&t.t, name);
    assert_int_equal(n, strlen("agent-1~") + 16);
    assert_memory_equal(name, "agent-1~", 8);
    assert_int_equal(strspn(name + 8, "0123456789abcdef"), 16);
    assert_int_equal(r.f[0].open_n, 1);
    assert_string_equal(r.f[0].open[0].name, name);
    snprintf(want, sizeof want,
             "{\"capacity_of_str_len\":65536,\"session_id\":\"%s\",\"streaming\":true,"
             "\"timeout\":121}",
             name);
    assert_string_equal(r.f[0].last_open, want);

    pl_turn_sent(&t.t, rig_worker(&r, 0), 90500);
    pl_turn_end(&t.t, PL_TURN_DONE, &some_history, 1234);
    assert_true(rig_free_lease(&r, "agent-1"));
    assert_int_equal(rig_worker(&r, 0)->session_tokens, 1234);

    /* the next turn, from the other router: the same session, and what it holds */
    assert_int_equal(turn_begin(&t, r.b.l[0], "agent-1", PL_WISH_TURN), 0);
    assert_true(t.t.bound && t.t.leased && t.t.streaming);
    assert_memory_equal(&t.t.history, &some_history, sizeof some_history);
    assert_true(t.t.held_tokens == 1234);
    char again[PL_ENGINE_SESSION_MAX];
    pl_turn_engine_id(&t.t, again);
    assert_string_equal(again, name);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    assert_int_equal(r.f[0].opens, 1);
    assert_int_equal(count(&stats(&r.a)->opens), 1);
    assert_int_equal(count(&stats(&r.a)->binds), 1);
    assert_int_equal(pl_sessions_open_latency(r.a.s)->total, 1);
    rig_close(&r);
}

static void any_id_makes_a_plain_name(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    char name[PL_ENGINE_SESSION_MAX];
    rig_opened(&r, &r.a, &t, "a \"b\\c\n\xc3\xa9", 0, 60000);
    pl_turn_engine_id(&t.t, name);
    assert_memory_equal(name, "a__b_c___~", 10);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    char longest[PL_SESSION_MAX_ID_BYTES + 2];
    memset(longest, 'x', sizeof longest);
    longest[PL_SESSION_MAX_ID_BYTES] = 0;
    rig_opened(&r, &r.a, &t, longest, 0, 60000);
    assert_int_equal(pl_turn_engine_id(&t.t, name), PL_ENGINE_SESSION_MAX - 1);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    longest[PL_SESSION_MAX_ID_BYTES] = 'x';
    longest[PL_SESSION_MAX_ID_BYTES + 1] = 0;
    assert_int_equal(turn_begin(&t, r.a.l[0], longest, PL_WISH_OPEN), PL_EINVALID);
    assert_int_equal(turn_begin(&t, r.a.l[0], "", PL_WISH_OPEN), PL_EINVALID);
    rig_close(&r);
}

/* Two tenants that use one id, and one id opened again after its close. */
static void names_on_an_engine_never_meet(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t, u = {0};
    rig_opened(&r, &r.a, &t, "s", 0, 60000);
    u.wish = (pl_wish){.action = PL_WISH_OPEN};
    u.t.name = (pl_session_name){PL_STR("other"), PL_STR("s")};
    u.t.wish = &u.wish;
    u.t.ready = turn_on_ready;
    assert_int_equal(pl_turn_begin(r.a.l[0], &u.t), 0);
    assert_false(u.t.bound);
    assert_int_equal(turn_open(&u, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
    rig_wait(&r, u.ready);
    assert_int_equal(u.rc, 0);
    assert_int_equal(r.f[0].open_n, 2);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    pl_turn_end(&u.t, PL_TURN_DONE, NULL, -1);
    rig_close(&r);
}

static void an_engine_that_refuses(void **state)
{
    (void)state;
    static const struct {
        fake_answer how;
        bool streaming;
        uint32_t caps; /* left */
    } rows[] = {{FAKE_404, true, 0},
                {FAKE_400, true, PL_CAP_SESSIONS},
                {FAKE_400, false, PL_CAP_SESSIONS | PL_CAP_STREAMING_SESSIONS},
                {FAKE_404, false, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        rig r;
        rig_open(&r, NULL, false);
        turn t;
        r.f[0].on_open = rows[i].how;
        assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_OPEN), 0);
        assert_int_equal(pl_sessions_can_open(r.a.s, rig_worker(&r, 0)), 0);
        t.inside = true;
        assert_int_equal(pl_turn_open(&t.t, rig_worker(&r, 0), 60000, rows[i].streaming),
                         PL_STORE_PENDING);
        t.inside = false;
        rig_wait(&r, t.ready);
        assert_int_equal(t.rc, PL_EUNAVAILABLE);
        assert_int_equal(r.e[0]->caps, rows[i].caps);
        assert_int_equal(rig_worker(&r, 0)->sessions, 0);
        assert_int_equal(count(&stats(&r.a)->open_failures), 1);
        if (rows[i].streaming) { /* known now: not even asked */
            assert_int_equal(pl_sessions_can_open(r.a.s, rig_worker(&r, 0)), PL_EUNAVAILABLE);
            assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_EUNAVAILABLE);
            assert_int_equal(r.f[0].opens, 1);
        }
        /* the turn goes on: elsewhere, or without */
        assert_int_equal(turn_open(&t, rig_worker(&r, 1), 60000), PL_STORE_PENDING);
        rig_wait(&r, t.ready);
        assert_int_equal(t.rc, 0);
        pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
        rig_settle(&r);
        assert_int_equal(r.f[0].closes, 0); /* nothing was there */
        rig_close(&r);
    }
}

/* The slow open lands after the close that was to undo it. */
static void an_open_that_times_out_is_closed_before_another_is_tried(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    r.f[0].on_open = FAKE_HOLD;
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_OPEN), 0);
    assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
    rig_wait(&r, fake_held(&r.f[0]));
    rig_pass(&r, 4900);
    assert_int_equal(t.ready, 0);
    r.f[0].on_close = FAKE_HOLD;
    rig_pass(&r, 200);
    rig_wait(&r, r.f[0].closes == 1);
    assert_int_equal(t.ready, 0); /* it waits for the close */
    r.f[0].on_close = FAKE_OK;
    fake_release(&r.f[0]); /* lands, and only then or before it the close is done */
    rig_wait(&r, t.ready);
    assert_int_equal(t.rc, PL_ETIMEOUT);
    assert_int_equal(turn_open(&t, rig_worker(&r, 1), 60000), PL_STORE_PENDING);
    rig_wait(&r, t.ready);
    assert_int_equal(t.rc, 0);
    assert_int_equal(rig_worker(&r, 0)->sessions, 1); /* nobody can be sure yet */
    rig_wait_pass(&r, 40000, rig_worker(&r, 0)->sessions == 0);
    assert_int_equal(r.f[0].open_n, 0);
    assert_int_equal(r.f[0].closes, 3);
    assert_int_equal(count(&stats(&r.a)->closes[PL_CLOSE_FAILED]), 1);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_close(&r);
}

static void the_close_of_a_timed_out_open_is_awaited_a_second(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    r.f[0].on_open = FAKE_SWALLOW;
    r.f[0].on_close = FAKE_DEAF;
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_OPEN), 0);
    assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
    rig_wait(&r, r.f[0].opens);
    rig_pass(&r, 5040);
    rig_wait(&r, r.f[0].closes == 1);
    assert_int_equal(t.ready, 0);
    rig_pass(&r, 1040);
    assert_int_equal(t.ready, 1);
    assert_int_equal(t.rc, PL_ETIMEOUT);
    assert_int_equal(r.f[0].open_n, 1);
    pl_turn_end(&t.t, PL_TURN_FAILED, NULL, -1);
    r.f[0].on_close = FAKE_OK; /* the closer goes on by itself */
    rig_wait_pass(&r, 60000, rig_worker(&r, 0)->sessions == 0);
    assert_int_equal(r.f[0].open_n, 0);
    assert_true(count(&stats(&r.a)->close_retries) >= 1);
    rig_close(&r);
}

static void other_failures_of_an_open(void **state)
{
    (void)state;
    static const struct {
        fake_answer how;
        int rc;
    } rows[] = {{FAKE_RESET, PL_ERESET}, {FAKE_WRONG, PL_EPROTOCOL}, {FAKE_500, PL_EPROTOCOL}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        rig r;
        rig_open(&r, NULL, false);
        turn t;
        pl_binding b;
        r.f[0].on_open = rows[i].how;
        assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_OPEN), 0);
        assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
        rig_wait(&r, t.ready);
        assert_int_equal(t.rc, rows[i].rc);
        assert_false(t.t.bound || t.t.leased);
        assert_false(rig_peek(&r, "s", &b));
        assert_int_equal(r.f[0].closes, 1); /* before it was told */
        assert_int_equal(r.f[0].open_n, 0);
        pl_turn_end(&t.t, PL_TURN_FAILED, NULL, -1);
        rig_wait_pass(&r, 40000, rig_worker(&r, 0)->sessions == 0);
        assert_int_equal(r.e[0]->caps, PL_CAP_SESSIONS | PL_CAP_STREAMING_SESSIONS);
        rig_close(&r);
    }
}

static void an_engine_that_is_not_there(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    fake closed;
    fake_start(&closed, &r.loop, false);
    pl_engine *e = rig_engine(&r, "closed", closed.port);
    pl_engine *first = r.e[0];
    r.e[0] = e;
    turn t;
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_OPEN), 0);
    assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
    rig_wait(&r, t.ready);
    assert_int_equal(t.rc, PL_ECONNECT);
    assert_int_equal(rig_worker(&r, 0)->sessions, 0); /* it never got there: nothing to close */
    assert_int_equal(count(&stats(&r.a)->close_rpcs), 0);
    pl_turn_end(&t.t, PL_TURN_FAILED, NULL, -1);
    fake_stop(&closed);
    r.e[0] = first;
    pl_engine_unref(e);
    rig_close(&r);
}

/* What the router lacks says nothing of an engine. */
static void a_router_without_files_blames_no_engine(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    struct rlimit before;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_OPEN), 0);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &(struct rlimit){0, before.rlim_max}), 0);
        int rc = turn_open(&t, rig_worker(&r, 0), 60000);
        if (rc == PL_STORE_PENDING)
            rig_wait(&r, t.ready);
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
        assert_int_equal(t.ready ? t.rc : rc, PL_EIO);
    }
    assert_int_equal(count(&stats(&r.a)->open_failures), 4);
    assert_int_equal(pl_sessions_can_open(r.a.s, rig_worker(&r, 0)), 0);
    assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
    rig_wait(&r, t.ready);
    assert_int_equal(t.rc, 0);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_close(&r);
}

static void caps_of_a_worker(void **state)
{
    (void)state;
    rig r;
    pl_sessions_options o;
    pl_sessions_options_default(&o);
    o.max_open_per_worker = 2;
    o.max_held_tokens_per_worker = 1000;
    rig_open(&r, &o, false);
    turn t, u;
    rig_session(&r, "one", 0, 60000);
    assert_int_equal(turn_begin(&t, r.a.l[0], "two", PL_WISH_OPEN), 0);
    assert_int_equal(turn_begin(&u, r.a.l[1], "three", PL_WISH_OPEN), 0);
    assert_int_equal(pl_sessions_can_open(r.a.s, rig_worker(&r, 0)), 0);
    assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
    /* the place is taken while the engine is asked */
    assert_int_equal(pl_sessions_can_open(r.a.s, rig_worker(&r, 0)), PL_ELIMIT);
    assert_int_equal(turn_open(&u, rig_worker(&r, 0), 60000), PL_ELIMIT);
    assert_int_equal(turn_open(&u, rig_worker(&r, 1), 60000), PL_STORE_PENDING);
    rig_wait(&r, t.ready && u.ready);
    assert_int_equal(t.rc, 0);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, 500);
    pl_turn_end(&u.t, PL_TURN_DONE, NULL, 1000);
    assert_int_equal(rig_worker(&r, 0)->session_tokens, 600);
    assert_int_equal(pl_sessions_can_open(r.a.s, rig_worker(&r, 1)), PL_ELIMIT); /* by tokens */
    assert_int_equal(turn_begin(&u, r.a.l[1], "three", PL_WISH_CLOSE), 0);
    pl_turn_end(&u.t, PL_TURN_DONE, NULL, 1100);
    rig_wait(&r, rig_worker(&r, 1)->sessions == 0);
    assert_int_equal(rig_worker(&r, 1)->session_tokens, 0);
    assert_int_equal(pl_sessions_can_open(r.a.s, rig_worker(&r, 1)), 0);
    rig_close(&r);
}

static void turns_of_a_session_run_one_at_a_time_in_order(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    enum { N = 9 };
    turn t[N], late;
    rig_session(&r, "s", 0, 60000);
    assert_int_equal(turn_begin(&t[0], r.a.l[0], "s", PL_WISH_TURN), 0);
    for (int i = 1; i < N; i++) /* on both loops */
        assert_int_equal(turn_begin(&t[i], r.a.l[i % 2], "s", i % 3 ? PL_WISH_TURN : PL_WISH_OPEN),
                         PL_STORE_PENDING);
    assert_int_equal(turn_begin(&late, r.a.l[0], "s", PL_WISH_TURN), PL_EBUSY);
    assert_null(late.t.in);
    /* another session's turn does not wait */
    assert_int_equal(turn_begin(&late, r.a.l[0], "s2", PL_WISH_OPEN), 0);
    pl_turn_end(&late.t, PL_TURN_FAILED, NULL, -1);
    turns_ready = 0;
    for (int i = 0; i < N; i++) {
        rig_settle(&r);
        for (int k = i + 1; k < N; k++)
            assert_int_equal(t[k].ready, 0);
        assert_true(t[i].t.leased);
        pl_turn_sent(&t[i].t, rig_worker(&r, 0), 60000);
        pl_history h = {{(uint64_t)i, 0}, 1, PL_HISTORY_MESSAGES, 0};
        pl_turn_end(&t[i].t, PL_TURN_DONE, &h, i);
        if (i + 1 < N) {
            rig_wait(&r, t[i + 1].ready);
            assert_int_equal(t[i + 1].rc, 0);
            assert_int_equal(t[i + 1].order, i + 1);
            assert_int_equal(t[i + 1].t.history.digest[0],
                             i); /* it sees what the one before left */
        }
    }
    assert_int_equal(count(&stats(&r.a)->turns_waited), N - 1);
    assert_int_equal(count(&stats(&r.a)->turns_refused), 1);
    rig_close(&r);
}

static void a_turn_waits_so_long_and_may_leave(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t, u, v, w;
    rig_session(&r, "s", 0, 60000);
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
    assert_int_equal(turn_begin(&u, r.a.l[0], "s", PL_WISH_TURN), PL_STORE_PENDING);
    assert_int_equal(turn_begin(&v, r.a.l[1], "s", PL_WISH_TURN), PL_STORE_PENDING);
    rig_pass(&r, 30000);
    assert_int_equal(turn_begin(&w, r.a.l[1], "s", PL_WISH_TURN), PL_STORE_PENDING);
    pl_turn_cancel(&v.t);
    assert_null(v.t.in);
    rig_pass(&r, 29000);
    assert_int_equal(u.ready, 0);
    rig_pass(&r, 1100);
    assert_int_equal(u.ready, 1);
    assert_int_equal(u.rc, PL_ETIMEOUT);
    assert_null(u.t.in); /* over */
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_wait(&r, w.ready);
    assert_int_equal(w.rc, 0);
    assert_int_equal(v.ready, 0);
    /* who leaves when its turn has just come hands it on */
    assert_int_equal(turn_begin(&u, r.a.l[0], "s", PL_WISH_TURN), PL_STORE_PENDING);
    assert_int_equal(turn_begin(&v, r.a.l[0], "s", PL_WISH_TURN), PL_STORE_PENDING);
    pl_turn_end(&w.t, PL_TURN_DONE, NULL, -1);
    pl_turn_cancel(&u.t);
    rig_wait(&r, v.ready);
    assert_int_equal(u.ready, 0);
    pl_turn_end(&v.t, PL_TURN_DONE, NULL, -1);
    assert_true(rig_free_lease(&r, "s"));
    rig_close(&r);
}

static void turns_of_two_routers_exclude_each_other(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t, u, v;
    rig_session(&r, "s", 0, 60000);
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
    assert_int_equal(turn_begin(&u, r.b.l[0], "s", PL_WISH_TURN), PL_STORE_PENDING);
    assert_int_equal(turn_begin(&v, r.b.l[1], "s", PL_WISH_TURN), PL_STORE_PENDING);
    rig_pass(&r, 50000); /* far longer than a lease: it is renewed */
    assert_int_equal(u.ready, 0);
    assert_true(t.t.leased);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_pass(&r, 100);
    assert_int_equal(u.ready, 1);
    assert_int_equal(u.rc, 0);
    assert_int_equal(v.ready, 0);
    pl_turn_end(&u.t, PL_TURN_DONE, NULL, -1);
    rig_wait_pass(&r, 100, v.ready);
    assert_int_equal(v.rc, 0);
    /* and no longer than that */
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), PL_STORE_PENDING);
    rig_pass(&r, 59000);
    assert_int_equal(t.ready, 0);
    rig_pass(&r, 1200);
    assert_int_equal(t.ready, 1);
    assert_int_equal(t.rc, PL_ETIMEOUT);
    pl_turn_end(&v.t, PL_TURN_DONE, NULL, -1);
    rig_close(&r);
}

static void the_winner_of_a_race_is_everybodys(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t, u;
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_OPEN), 0);
    assert_int_equal(turn_begin(&u, r.b.l[0], "s", PL_WISH_OPEN), 0);
    r.f[0].on_open = FAKE_HOLD;
    assert_int_equal(turn_open(&u, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
    rig_wait(&r, fake_held(&r.f[0]));
    assert_int_equal(turn_open(&t, rig_worker(&r, 1), 60000), PL_STORE_PENDING);
    rig_wait(&r, t.ready);
    assert_int_equal(t.rc, 0);
    fake_release(&r.f[0]);
    rig_wait(&r, r.f[0].closes == 1);
    rig_pass(&r, 200);
    assert_int_equal(r.f[0].open_n, 0); /* its own is closed */
    assert_int_equal(u.ready, 0);       /* and the winner's turn goes first */
    assert_int_equal(count(&stats(&r.b)->open_races), 1);
    pl_turn_end(&t.t, PL_TURN_DONE, &some_history, 10);
    rig_wait_pass(&r, 200, u.ready);
    assert_int_equal(u.rc, PL_EEXISTS);
    assert_true(u.t.bound && u.t.leased);
    assert_int_equal(u.t.binding.slot, rig_worker(&r, 1)->slot);
    assert_memory_equal(&u.t.history, &some_history, sizeof some_history);
    pl_turn_end(&u.t, PL_TURN_DONE, NULL, -1);
    rig_pass(&r, 100);
    assert_int_equal(rig_worker(&r, 0)->sessions, 0);
    assert_int_equal(r.f[1].open_n, 1);
    rig_close(&r);
}

static void a_router_only_binding_gives_way_to_an_open(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t, u;
    pl_binding b;
    r.f[0].on_open = FAKE_HOLD;
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_OPEN), 0);
    assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
    rig_wait(&r, fake_held(&r.f[0]));
    assert_int_equal(turn_begin(&u, r.a.l[1], "s", PL_WISH_TURN), 0); /* does not wait */
    pl_turn_sent(&u.t, rig_worker(&r, 1), 60000);
    pl_turn_end(&u.t, PL_TURN_DONE, NULL, -1);
    assert_true(rig_peek(&r, "s", &b));
    fake_release(&r.f[0]);
    rig_wait(&r, t.ready);
    assert_int_equal(t.rc, 0);
    assert_true(rig_peek(&r, "s", &b));
    assert_int_equal(b.kind, PL_SESSION_ENGINE_BACKED);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    /* and never the other way round */
    assert_int_equal(turn_begin(&u, r.a.l[1], "s", PL_WISH_TURN), 0);
    pl_turn_sent(&u.t, rig_worker(&r, 1), 60000);
    pl_turn_end(&u.t, PL_TURN_DONE, NULL, -1);
    assert_true(rig_peek(&r, "s", &b));
    assert_int_equal(b.kind, PL_SESSION_ENGINE_BACKED);
    rig_close(&r);
}

/* A session may become engine-backed in a turn that did not ask to open: it takes the turn then. */
static void an_open_without_the_wish(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t, u;
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
    assert_int_equal(turn_begin(&u, r.a.l[1], "s", PL_WISH_TURN), 0);
    assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
    assert_int_equal(turn_open(&u, rig_worker(&r, 0), 60000), PL_STORE_PENDING); /* behind t */
    rig_wait(&r, t.ready);
    assert_int_equal(t.rc, 0);
    rig_settle(&r);
    assert_int_equal(u.ready, 0);
    pl_turn_end(&t.t, PL_TURN_DONE, &some_history, 1);
    rig_wait(&r, u.ready);
    assert_int_equal(u.rc, PL_EEXISTS); /* t's */
    assert_true(u.t.leased);
    assert_memory_equal(&u.t.history, &some_history, sizeof some_history);
    pl_turn_end(&u.t, PL_TURN_DONE, NULL, -1);
    rig_wait(&r, r.f[0].open_n == 1);
    rig_close(&r);
}

static void a_rebind_closes_the_old_session(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    pl_binding b;
    rig_session(&r, "s", 0, 60000);
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_OPEN), 0);
    assert_true(t.t.bound && t.t.leased);
    assert_int_equal(turn_open(&t, rig_worker(&r, 1), 60000), PL_STORE_PENDING);
    rig_wait(&r, t.ready);
    assert_int_equal(t.rc, 0);
    assert_int_equal(t.t.history.form, PL_HISTORY_NONE);
    rig_wait(&r, r.f[0].open_n == 0); /* at once: nothing runs on it */
    assert_true(rig_peek(&r, "s", &b));
    assert_int_equal(b.slot, rig_worker(&r, 1)->slot);
    assert_false(rig_free_lease(&r, "s"));
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    assert_true(rig_free_lease(&r, "s"));
    assert_int_equal(count(&stats(&r.a)->closes[PL_CLOSE_REBOUND]), 1);
    assert_int_equal(count(&stats(&r.a)->rebinds), 1);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_session_that_nobody_knows),
        cmocka_unit_test(router_only_sessions_bind_when_the_request_was_taken),
        cmocka_unit_test(the_time_to_live_counts_from_the_answer),
        cmocka_unit_test(affinity_comes_after_the_engines_ok),
        cmocka_unit_test(any_id_makes_a_plain_name),
        cmocka_unit_test(names_on_an_engine_never_meet),
        cmocka_unit_test(an_engine_that_refuses),
        cmocka_unit_test(an_open_that_times_out_is_closed_before_another_is_tried),
        cmocka_unit_test(the_close_of_a_timed_out_open_is_awaited_a_second),
        cmocka_unit_test(other_failures_of_an_open),
        cmocka_unit_test(an_engine_that_is_not_there),
        cmocka_unit_test(a_router_without_files_blames_no_engine),
        cmocka_unit_test(caps_of_a_worker),
        cmocka_unit_test(turns_of_a_session_run_one_at_a_time_in_order),
        cmocka_unit_test(a_turn_waits_so_long_and_may_leave),
        cmocka_unit_test(turns_of_two_routers_exclude_each_other),
        cmocka_unit_test(the_winner_of_a_race_is_everybodys),
        cmocka_unit_test(a_router_only_binding_gives_way_to_an_open),
        cmocka_unit_test(an_open_without_the_wish),
        cmocka_unit_test(a_rebind_closes_the_old_session),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
