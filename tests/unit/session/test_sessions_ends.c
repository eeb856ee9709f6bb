/* How sessions end: closes, expiry, engines that leave, the stop. */
#include "sessions_rig.h"

/* --- closes --- */

static void closes_after_the_turn(void **state)
{
    (void)state;
    static const struct {
        pl_wish_action action;
        bool final;
        pl_turn_end_kind how;
        pl_close_cause cause;
    } rows[] = {{PL_WISH_CLOSE, false, PL_TURN_DONE, PL_CLOSE_CLIENT},
                {PL_WISH_TURN, true, PL_TURN_DONE, PL_CLOSE_CLIENT},
                {PL_WISH_CLOSE, false, PL_TURN_ABORTED, PL_CLOSE_CLIENT},
                {PL_WISH_CLOSE, false, PL_TURN_FAILED, PL_CLOSE_CLIENT},
                {PL_WISH_TURN, false, PL_TURN_POISONED, PL_CLOSE_POISONED},
                {PL_WISH_CLOSE, false, PL_TURN_POISONED, PL_CLOSE_POISONED}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        rig r;
        rig_open(&r, NULL, false);
        turn t;
        pl_binding b;
        char want[400], name[PL_ENGINE_SESSION_MAX];
        rig_session(&r, "s", 0, 60000);
        assert_int_equal(turn_begin(&t, r.a.l[0], "s", rows[i].action), 0);
        t.wish.final = rows[i].final; /* it counts at the end */
        pl_turn_engine_id(&t.t, name);
        pl_turn_sent(&t.t, rig_worker(&r, 0), 60000);
        rig_pass(&r, 1000);
        assert_int_equal(r.f[0].closes, 0);
        pl_turn_end(&t.t, rows[i].how, NULL, -1);
        assert_false(rig_peek(&r, "s", &b));
        rig_wait(&r, r.f[0].open_n == 0);
        snprintf(want, sizeof want, "{\"session_id\":\"%s\"}", name);
        assert_string_equal(r.f[0].last_close, want);
        rig_wait(&r, rig_worker(&r, 0)->sessions == 0);
        assert_int_equal(count(&stats(&r.a)->closes[rows[i].cause]), 1);
        assert_int_equal(count(&stats(&r.a)->poisoned), rows[i].how == PL_TURN_POISONED);
        assert_int_equal(count(&stats(&r.a)->discarded), rows[i].how == PL_TURN_ABORTED);
        assert_int_equal(pl_sessions_close_latency(r.a.s)->total, 1);
        rig_close(&r);
    }
}

/* What the engine holds after a turn is what the next one is told. */
static void history_is_kept_only_when_it_is_known(void **state)
{
    (void)state;
    static const struct {
        bool sent;
        pl_turn_end_kind how;
        int form;
    } rows[] = {{true, PL_TURN_DONE, PL_HISTORY_TEXT},
                {true, PL_TURN_FAILED, PL_HISTORY_LOST},
                {true, PL_TURN_ABORTED, PL_HISTORY_LOST},
                {false, PL_TURN_FAILED, PL_HISTORY_MESSAGES}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        rig r;
        rig_open(&r, NULL, false);
        turn t;
        pl_history h = {{1, 2}, 3, PL_HISTORY_TEXT, PL_API_COMPLETIONS};
        rig_session(&r, "s", 0, 60000);
        assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
        if (rows[i].sent)
            pl_turn_sent(&t.t, rig_worker(&r, 0), 60000);
        pl_turn_end(&t.t, rows[i].how, &h, -1);
        assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
        assert_int_equal(t.t.history.form, rows[i].form);
        assert_true(t.t.held_tokens == 100);
        pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
        rig_close(&r);
    }
}

static void a_first_dispatch_that_fails_closes(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    pl_binding b;
    for (int how = PL_TURN_FAILED; how <= PL_TURN_ABORTED; how++) {
        rig_opened(&r, &r.a, &t, "s", 0, 60000);
        assert_int_equal(r.f[0].open_n, 1);
        pl_turn_end(&t.t, (pl_turn_end_kind)how, NULL, -1);
        assert_false(rig_peek(&r, "s", &b));
        rig_wait(&r, r.f[0].open_n == 0);
    }
    assert_int_equal(count(&stats(&r.a)->closes[PL_CLOSE_FAILED]), 2);
    /* an open that was all that was asked for (SGLang's own way) stays */
    rig_opened(&r, &r.a, &t, "s", 0, 60000);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_settle(&r);
    assert_int_equal(r.f[0].open_n, 1);
    assert_true(rig_peek(&r, "s", &b));
    rig_close(&r);
}

static void a_client_that_leaves_has_closed_nonetheless(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t, u;
    pl_binding b;
    rig_session(&r, "s", 0, 60000);
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
    assert_int_equal(turn_begin(&u, r.a.l[1], "s", PL_WISH_CLOSE), PL_STORE_PENDING);
    pl_turn_cancel(&u.t);
    rig_pass(&r, 1000);
    assert_false(rig_peek(&r, "s", &b));
    assert_int_equal(r.f[0].closes, 0); /* a turn still runs on it */
    pl_turn_end(&t.t, PL_TURN_DONE, &some_history, 7);
    rig_wait(&r, rig_worker(&r, 0)->sessions == 0);
    assert_int_equal(r.f[0].open_n, 0);
    assert_false(rig_peek(&r, "s", &b));
    rig_close(&r);
}

static void closes_are_tried_again(void **state)
{
    (void)state;
    static const fake_answer hows[] = {FAKE_500, FAKE_400, FAKE_RESET, FAKE_SWALLOW, FAKE_DEAF};
    for (size_t i = 0; i < sizeof hows / sizeof *hows; i++) {
        rig r;
        rig_open(&r, NULL, false);
        turn t;
        r.f[0].on_close = hows[i];
        for (int k = 0; k < 20; k++) {
            char id[16];
            snprintf(id, sizeof id, "s%d", k);
            rig_session(&r, id, 0, 60000);
            assert_int_equal(turn_begin(&t, r.a.l[0], id, PL_WISH_CLOSE), 0);
            pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
        }
        rig_pass(&r, 12000);
        assert_int_equal(rig_worker(&r, 0)->sessions, 20);
        /* a lane that fails rests: not twenty calls every quarter of a second */
        assert_in_range(r.f[0].closes, 2, 40);
        assert_true(count(&stats(&r.a)->close_failures) >= 2);
        r.f[0].on_close = FAKE_OK;
        rig_wait_pass(&r, 60000, rig_worker(&r, 0)->sessions == 0);
        assert_int_equal(r.f[0].open_n, 0);
        assert_true(count(&stats(&r.a)->close_retries) >= 1);
        assert_int_equal(count(&stats(&r.a)->close_given_up), 0);
        rig_close(&r);
    }
}

static void closes_are_given_up_when_the_engine_has_freed_it_itself(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    r.f[0].on_close = FAKE_500;
    rig_session(&r, "s", 0, 20000); /* 50 s on the engine */
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_CLOSE), 0);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_pass(&r, 45000);
    assert_int_equal(rig_worker(&r, 0)->sessions, 1);
    rig_pass(&r, 45000);
    assert_int_equal(rig_worker(&r, 0)->sessions, 0);
    assert_int_equal(count(&stats(&r.a)->close_given_up), 1);
    int closes = r.f[0].closes;
    rig_pass(&r, 60000);
    assert_int_equal(r.f[0].closes, closes);
    /* an engine without the path has no sessions */
    rig_session(&r, "s", 0, 20000);
    r.f[0].on_close = FAKE_404;
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_CLOSE), 0);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_wait_pass(&r, 1000, rig_worker(&r, 0)->sessions == 0);
    rig_close(&r);
}

static int admin_rc;
static void on_admin(void *ctx, int rc)
{
    (void)ctx;
    admin_rc = rc;
}

static void the_operator_closes_during_a_turn(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    pl_binding b;
    pl_session_name name = {PL_STR("acme"), PL_STR("s")};
    rig_session(&r, "s", 0, 60000);
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
    pl_turn_sent(&t.t, rig_worker(&r, 0), 60000);
    admin_rc = 1;
    pl_sessions_close(r.a.s, &r.a.v.base, &name, on_admin, NULL);
    assert_int_equal(admin_rc, 0);
    assert_false(rig_peek(&r, "s", &b));
    pl_sessions_close(r.a.s, &r.a.v.base, &name, on_admin, NULL);
    assert_int_equal(admin_rc, PL_ENOTFOUND);
    rig_pass(&r, 20000); /* the turn learns that its lease is lost, and goes on */
    assert_false(t.t.leased);
    assert_int_equal(r.f[0].closes, 0);
    pl_turn_end(&t.t, PL_TURN_DONE, &some_history, 7);
    rig_wait(&r, rig_worker(&r, 0)->sessions == 0);
    assert_int_equal(r.f[0].open_n, 0);
    assert_int_equal(count(&stats(&r.a)->closes[PL_CLOSE_ADMIN]), 1);
    assert_false(rig_peek(&r, "s", &b)); /* its end brings nothing back */
    rig_close(&r);
}

/* --- expiry --- */

static void expiry_closes_but_never_during_a_turn(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    rig_session(&r, "s", 0, 5000);
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
    rig_pass(&r, 40000);
    assert_int_equal(r.f[0].closes, 0);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_pass(&r, 4000); /* counts from the turn's end */
    assert_int_equal(r.f[0].closes, 0);
    rig_pass(&r, 2100);
    rig_wait(&r, rig_worker(&r, 0)->sessions == 0);
    assert_int_equal(r.f[0].open_n, 0);
    assert_int_equal(count(&stats(&r.a)->expired), 1);
    assert_int_equal(count(&stats(&r.a)->closes[PL_CLOSE_EXPIRED]), 1);
    rig_close(&r);
}

static void expire_as_decided(router *x, int action, double seconds)
{
    assert_true(rig_decide(x, action, seconds));
    assert_int_equal(x->undecided, 0);
}

static void the_policy_decides_about_expiry(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, true);
    turn t;
    pl_binding b;
    /* CLOSE */
    rig_session(&r, "s", 0, 5000);
    rig_pass(&r, 6100);
    assert_int_equal(r.a.expiring, 1);
    assert_int_equal(r.f[0].closes, 0);
    expire_as_decided(&r.a, PL_CLOSE, 0);
    rig_wait(&r, rig_worker(&r, 0)->sessions == 0);
    assert_int_equal(r.f[0].open_n, 0);
    /* DROP: its engine frees it by itself */
    rig_session(&r, "s", 0, 5000);
    rig_pass(&r, 6100);
    assert_int_equal(r.a.expiring, 2);
    expire_as_decided(&r.a, PL_DROP, 0);
    rig_pass(&r, 1000);
    assert_int_equal(r.f[0].open_n, 1);
    assert_int_equal(rig_worker(&r, 0)->sessions, 0);
    assert_int_equal(count(&stats(&r.a)->dropped), 1);
    /* EXTEND: no longer than the engine keeps it, in sum; a turn brings back the time it had */
    rig_session(&r, "s", 1, 5000);
    rig_pass(&r, 6100);
    expire_as_decided(&r.a, PL_EXTEND, 20);
    rig_wait(&r, rig_peek(&r, "s", &b));
    assert_int_equal(b.ttl_ms, 20000);
    rig_pass(&r, 21100);
    assert_int_equal(r.a.expiring, 4);
    expire_as_decided(&r.a, PL_EXTEND, 20);
    rig_wait(&r, rig_peek(&r, "s", &b));
    assert_int_equal(b.ttl_ms, 10000);
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
    assert_true(t.t.leased);
    assert_memory_equal(&t.t.history, &some_history, sizeof some_history);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    assert_true(rig_peek(&r, "s", &b));
    assert_int_equal(b.ttl_ms, 5000);
    assert_true(rig_free_lease(&r, "s"));
    rig_pass(&r, 6100);
    assert_int_equal(r.a.expiring, 5);
    expire_as_decided(&r.a, PL_EXTEND, 100);
    rig_wait(&r, rig_peek(&r, "s", &b));
    assert_int_equal(b.ttl_ms, 30000);
    rig_pass(&r, 31100);
    assert_int_equal(r.a.expiring, 6);
    expire_as_decided(&r.a, PL_EXTEND, 1); /* nothing is left */
    rig_wait(&r, rig_worker(&r, 1)->sessions == 0);
    assert_int_equal(r.f[1].open_n, 0);
    assert_int_equal(count(&stats(&r.a)->extended), 3);
    rig_close(&r);
}

/* The session is bound anew before the verdict about the old one comes. */
static void a_verdict_that_comes_late_leaves_the_new_session(void **state)
{
    (void)state;
    static const int actions[] = {PL_CLOSE, PL_EXTEND, PL_DROP};
    for (int i = 0; i < 3; i++) {
        rig r;
        rig_open(&r, NULL, true);
        turn t;
        pl_binding b, c;
        rig_session(&r, "s", 0, 5000);
        rig_pass(&r, 6100);
        rig_opened(&r, &r.a, &t, "s", 1, 60000);
        assert_true(rig_peek(&r, "s", &b));
        expire_as_decided(&r.a, actions[i], 10);
        rig_wait(&r, rig_worker(&r, 0)->sessions == 0);
        rig_pass(&r, 1000);
        assert_int_equal(r.f[0].open_n, actions[i] == PL_DROP ? 1 : 0);
        assert_int_equal(r.f[1].open_n, 1);
        assert_true(rig_peek(&r, "s", &c));
        assert_int_equal(b.version, c.version);
        pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
        rig_close(&r);
    }
}

/* Another router closes a session that this one opened: this one's counts follow. */
static void what_another_router_closed_is_counted_no_more(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    rig_session(&r, "s", 0, 5000);
    rig_session(&r, "other", 0, 500000);
    assert_int_equal(turn_begin(&t, r.b.l[0], "s", PL_WISH_CLOSE), 0);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_wait(&r, r.f[0].open_n == 1);
    assert_int_equal(rig_worker(&r, 0)->sessions, 2);
    rig_pass(&r, 14000); /* its time to live, and some */
    assert_int_equal(rig_worker(&r, 0)->sessions, 1);
    assert_int_equal(rig_worker(&r, 0)->session_tokens, 100);
    /* what lives on in another router's turns stays counted */
    rig_session(&r, "s", 0, 5000);
    for (int i = 0; i < 10; i++) {
        assert_int_equal(turn_begin(&t, r.b.l[0], "s", PL_WISH_TURN), 0);
        pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
        rig_pass(&r, 3000);
    }
    assert_int_equal(rig_worker(&r, 0)->sessions, 2);
    rig_close(&r);
}

/* --- engines that leave --- */

static void an_engine_that_leaves(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t, u;
    pl_binding b;
    rig_session(&r, "idle", 0, 600000);
    rig_session(&r, "busy", 0, 600000);
    rig_session(&r, "elsewhere", 1, 600000);
    assert_int_equal(turn_begin(&t, r.a.l[0], "busy", PL_WISH_TURN), 0);
    assert_int_equal(turn_begin(&u, r.a.l[0], "opening", PL_WISH_OPEN), 0);
    r.f[0].on_open = FAKE_HOLD;
    assert_int_equal(turn_open(&u, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
    rig_wait(&r, fake_held(&r.f[0]));
    assert_int_equal(pl_fleet_remove(r.fleet, r.e[0]), 0);
    pl_sessions_engine_gone(r.a.s, r.e[0]);
    pl_sessions_engine_gone(r.b.s, r.e[0]);
    rig_wait(&r, r.f[0].open_n == 1); /* the busy one's turn goes on */
    fake_release(&r.f[0]);
    rig_wait(&r, u.ready);
    assert_int_equal(u.rc, PL_ECONNECT);
    assert_false(rig_peek(&r, "opening", &b));
    pl_turn_end(&u.t, PL_TURN_FAILED, NULL, -1);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_wait(&r, rig_worker(&r, 0)->sessions == 0);
    assert_int_equal(r.f[0].open_n, 0);
    assert_int_equal(rig_worker(&r, 1)->sessions, 1);
    /* the next turn finds that its worker is gone, and may move */
    assert_int_equal(turn_begin(&t, r.a.l[0], "idle", PL_WISH_OPEN), 0);
    assert_true(t.t.bound);
    pl_view *v = pl_fleet_view(r.fleet);
    assert_null(pl_turn_worker(&t.t, pl_view_model(v, PL_STR("m"))));
    pl_view_unref(v);
    assert_int_equal(turn_open(&t, rig_worker(&r, 1), 60000), PL_STORE_PENDING);
    rig_wait(&r, t.ready);
    assert_int_equal(t.rc, 0);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    assert_int_equal(rig_worker(&r, 1)->sessions, 2);
    rig_pass(&r, 1000);
    assert_int_equal(count(&stats(&r.a)->close_given_up), 0);
    pl_engine *e = r.e[0];
    rig_pass(&r, 6000);           /* the closer's connections go */
    assert_int_equal(e->refs, 2); /* the fleet's and ours: nothing of sessions is left on it */
    /* rig_close counts on the view's */
    pl_engine_ref(e);
    rig_close(&r);
    pl_engine_unref(e);
}

static void an_engine_that_leaves_and_does_not_answer(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    rig_session(&r, "s", 0, 600000);
    rig_session(&r, "closing", 0, 600000);
    r.f[0].on_close = FAKE_DEAF;
    assert_int_equal(turn_begin(&t, r.a.l[0], "closing", PL_WISH_CLOSE), 0);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_pass(&r, 30000);
    pl_engine_ref(r.e[0]);
    assert_int_equal(pl_fleet_remove(r.fleet, r.e[0]), 0);
    pl_sessions_engine_gone(r.a.s, r.e[0]);
    rig_pass(&r, 4000);
    assert_int_equal(rig_worker(&r, 0)->sessions, 2);
    rig_wait_pass(&r, 40000, rig_worker(&r, 0)->sessions == 0); /* not ten minutes */
    assert_int_equal(count(&stats(&r.a)->close_given_up), 2);
    assert_int_equal(count(&stats(&r.a)->closes[PL_CLOSE_GONE]), 1);
    pl_engine *e = r.e[0];
    rig_pass(&r, 6000);
    rig_close(&r);
    pl_engine_unref(e);
}

/* --- the stop --- */

static void the_stop_closes_what_is_open(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    rig_session(&r, "one", 0, 600000);
    rig_session(&r, "two", 1, 600000);
    rig_opened(&r, &r.b, &t, "theirs", 1, 600000);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    /* an open that timed out: its repeated closes are not waited for */
    r.f[0].on_open = FAKE_SWALLOW;
    assert_int_equal(turn_begin(&t, r.a.l[0], "slow", PL_WISH_OPEN), 0);
    assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
    rig_wait(&r, r.f[0].opens == 2);
    rig_pass(&r, 5040);
    rig_wait(&r, t.ready);
    pl_turn_end(&t.t, PL_TURN_FAILED, NULL, -1);
    pl_sessions_stop(r.a.s, true, 5000, rig_on_stopped, &r);
    rig_wait_pass(&r, 2000, r.stopped == 1);
    assert_int_equal(r.f[0].open_n, 0);
    assert_int_equal(r.f[1].open_n, 1); /* the other router's */
    assert_int_equal(rig_worker(&r, 0)->sessions, 0);
    assert_int_equal(count(&stats(&r.a)->closes[PL_CLOSE_SHUTDOWN]), 2);
    assert_int_equal(count(&stats(&r.a)->close_given_up), 0);
    rig_close(&r);
}

static void the_stop_does_not_wait_for_ever(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    rig_session(&r, "one", 0, 600000);
    r.f[0].on_close = FAKE_DEAF;
    pl_sessions_stop(r.a.s, true, 3000, rig_on_stopped, &r);
    rig_pass(&r, 2900);
    assert_int_equal(r.stopped, 0);
    rig_pass(&r, 200);
    assert_int_equal(r.stopped, 1);
    assert_int_equal(count(&stats(&r.a)->close_given_up), 1);
    assert_int_equal(rig_worker(&r, 0)->sessions, 0);
    rig_close(&r);
}

/* Sessions in a store that outlives the router stay open. */
static void the_stop_of_one_of_several_routers(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    rig_session(&r, "s", 0, 600000);
    pl_sessions_stop(r.a.s, false, 3000, rig_on_stopped, &r);
    rig_wait_pass(&r, 1000, r.stopped == 1);
    assert_int_equal(r.f[0].open_n, 1);
    assert_int_equal(turn_begin(&t, r.b.l[0], "s", PL_WISH_TURN), 0);
    assert_true(t.t.leased);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    /* and no new ones */
    assert_int_equal(turn_begin(&t, r.a.l[0], "new", PL_WISH_OPEN), 0);
    assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_ECANCELLED);
    pl_turn_end(&t.t, PL_TURN_FAILED, NULL, -1);
    router_close(&r.a);
    assert_int_equal(r.f[0].open_n, 1);
    assert_int_equal(rig_worker(&r, 0)->sessions, 0);
    rig_settle(&r);
    router_destroy(&r.a);
    router_open(&r.a, &r); /* the successor */
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_CLOSE), 0);
    assert_true(t.t.leased);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_wait(&r, r.f[0].open_n == 0);
    assert_int_equal(rig_worker(&r, 0)->sessions, 0);
    rig_close(&r);
}

/* Loops end with turns in every state. */
static void loops_that_end(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t[6];
    rig_session(&r, "s", 0, 600000);
    assert_int_equal(turn_begin(&t[0], r.a.l[1], "s", PL_WISH_TURN), 0);
    assert_int_equal(turn_begin(&t[1], r.a.l[0], "s", PL_WISH_TURN), PL_STORE_PENDING);
    assert_int_equal(turn_begin(&t[2], r.a.l[0], "s", PL_WISH_TURN), PL_STORE_PENDING);
    r.f[1].on_open = FAKE_SWALLOW;
    assert_int_equal(turn_begin(&t[3], r.a.l[0], "new", PL_WISH_OPEN), 0);
    assert_int_equal(turn_open(&t[3], rig_worker(&r, 1), 60000), PL_STORE_PENDING);
    rig_wait(&r, r.f[1].open_n == 1);
    r.a.v.late = true;
    assert_int_equal(turn_begin(&t[4], r.a.l[0], "x", PL_WISH_TURN), PL_STORE_PENDING);
    r.a.v.late = false;
    rig_opened(&r, &r.a, &t[5], "mine", 0, 600000);
    pl_turn_end(&t[0].t, PL_TURN_DONE, NULL, -1); /* t[1]'s turn is on its way */
    pl_sessions_loop_free(r.a.l[0]);
    r.a.l[0] = NULL;
    for (int i = 1; i < 6; i++) {
        assert_null(t[i].t.in);
        assert_true(t[i].ready == 0 || i == 5);
    }
    rig_pass(&r, 1000);
    assert_true(rig_free_lease(&r, "mine"));
    assert_int_equal(turn_begin(&t[0], r.a.l[1], "s", PL_WISH_TURN), 0); /* nobody stands in it */
    pl_turn_end(&t[0].t, PL_TURN_DONE, NULL, -1);
    rig_wait_pass(&r, 60000, rig_worker(&r, 1)->sessions == 0);
    assert_int_equal(r.f[1].open_n, 0);
    rig_close(&r);
}

/* A loop gives up a session when the control thread takes messages for the last time. */
static void what_comes_after_the_end(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, true);
    turn t;
    router *x = &r.b;
    rig_opened(&r, x, &t, "s", 0, 5000);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_opened(&r, x, &t, "t", 0, 60000);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    pl_binding b;
    assert_true(rig_peek(&r, "s", &b));
    assert_true(pl_binding_held_tokens(&b) == 0);
    pl_sessions_stop(x->s, false, 0, rig_on_stopped, &r);
    rig_wait_pass(&r, 100, r.stopped == 1);
    assert_int_equal(turn_begin(&t, x->l[0], "t", PL_WISH_CLOSE), 0);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    pl_session_name name = {PL_STR("acme"), PL_STR("s")};
    pl_sessions_expire(x->s, &name, &b, PL_EXTEND, 1);
    pl_sessions_loop_free(x->l[0]);
    pl_sessions_loop_free(x->l[1]);
    pl_sessions_free(x->s);
    rig_settle(&r); /* now the messages run */
    for (int i = 0; i < 2; i++)
        pl_mailbox_close(&x->mailbox[i]);
    pl_mailbox_close(&x->control);
    rig_settle(&r);
    router_destroy(x);
    assert_int_equal(rig_worker(&r, 0)->sessions, 0);
    router_open(x, &r);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(closes_after_the_turn),
        cmocka_unit_test(history_is_kept_only_when_it_is_known),
        cmocka_unit_test(a_first_dispatch_that_fails_closes),
        cmocka_unit_test(a_client_that_leaves_has_closed_nonetheless),
        cmocka_unit_test(closes_are_tried_again),
        cmocka_unit_test(closes_are_given_up_when_the_engine_has_freed_it_itself),
        cmocka_unit_test(the_operator_closes_during_a_turn),
        cmocka_unit_test(expiry_closes_but_never_during_a_turn),
        cmocka_unit_test(the_policy_decides_about_expiry),
        cmocka_unit_test(a_verdict_that_comes_late_leaves_the_new_session),
        cmocka_unit_test(what_another_router_closed_is_counted_no_more),
        cmocka_unit_test(an_engine_that_leaves),
        cmocka_unit_test(an_engine_that_leaves_and_does_not_answer),
        cmocka_unit_test(the_stop_closes_what_is_open),
        cmocka_unit_test(the_stop_does_not_wait_for_ever),
        cmocka_unit_test(the_stop_of_one_of_several_routers),
        cmocka_unit_test(loops_that_end),
        cmocka_unit_test(what_comes_after_the_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
