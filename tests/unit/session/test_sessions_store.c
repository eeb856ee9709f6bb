/* Turns of sessions over a store that answers late, refuses, or does a thing and does not say so;
 * and clients that leave in the midst of it. */
#include "sessions_rig.h"

static void cancel_in_every_state(void **state)
{
    (void)state;
    for (int where = 0; where < 9; where++) {
        for (int late = 0; late < 2; late++) {
            rig r;
            rig_open(&r, NULL, false);
            turn t, u;
            pl_binding b;
            rig_session(&r, "s", 0, 600000);
            rig_session(&r, "kept", 0, 600000);
            r.a.v.late = late;
            switch (where) {
            case 0: /* LOOKUP */
            case 1: /* GATE, behind a turn */
            case 2: /* the turn comes while it leaves */
                r.a.v.late = false;
                assert_int_equal(turn_begin(&u, r.a.l[1], "s", PL_WISH_TURN), 0);
                r.a.v.late = late || where == 0;
                turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN);
                if (where)
                    while (veil_deliver(&r.a.v))
                        ;
                if (where == 2)
                    pl_turn_end(&u.t, PL_TURN_DONE, NULL, -1);
                pl_turn_cancel(&t.t);
                if (where != 2)
                    pl_turn_end(&u.t, PL_TURN_DONE, NULL, -1);
                break;
            case 3: /* LEASE or, at once, leased */
                turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN);
                if (late)
                    assert_true(veil_deliver(&r.a.v));
                pl_turn_cancel(&t.t);
                break;
            case 4: /* POLL */
                assert_int_equal(turn_begin(&u, r.b.l[0], "s", PL_WISH_TURN), 0);
                turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN);
                while (veil_deliver(&r.a.v))
                    ;
                pl_turn_cancel(&t.t);
                pl_turn_end(&u.t, PL_TURN_DONE, NULL, -1);
                break;
            default:
                turn_begin(&t, r.a.l[0], where == 8 ? "s" : "new", PL_WISH_OPEN);
                while (veil_deliver(&r.a.v))
                    ;
                r.f[1].on_open = where == 5 ? FAKE_HOLD : where == 6 ? FAKE_SWALLOW : FAKE_OK;
                r.f[1].on_close = where == 6 ? FAKE_HOLD : FAKE_OK;
                assert_int_equal(turn_open(&t, rig_worker(&r, 1), 600000), PL_STORE_PENDING);
                if (where == 5) { /* OPENING */
                    rig_wait(&r, fake_held(&r.f[1]));
                } else if (where == 6) { /* the awaited close */
                    rig_wait(&r, r.f[1].opens);
                    rig_pass(&r, 5040);
                    rig_wait(&r, fake_held(&r.f[1]));
                } else if (late) { /* BINDING */
                    rig_wait(&r, r.a.v.queued);
                } else {
                    rig_wait(&r, t.ready);
                }
                pl_turn_cancel(&t.t);
                r.f[1].on_close = FAKE_OK;
                fake_release(&r.f[1]);
            }
            assert_null(t.t.in);
            int before = t.ready;
            for (int i = 0; i < 200; i++) { /* 30 s */
                while (veil_deliver(&r.a.v))
                    ;
                rig_pass(&r, 150);
            }
            assert_int_equal(t.ready, before); /* nothing after a cancel */
            assert_true(rig_free_lease(&r, "s") && rig_free_lease(&r, "new"));
            assert_false(rig_peek(&r, "new", &b));
            assert_int_equal(r.f[1].open_n, 0);
            assert_int_equal(rig_worker(&r, 1)->sessions, 0);
            /* 8: its session was to move and both are over; else it is as it was */
            assert_int_equal(rig_peek(&r, "s", &b), where != 8);
            assert_int_equal(r.f[0].open_n, where == 8 ? 1 : 2);
            r.a.v.late = false;
            assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
            assert_int_equal(t.t.bound, where != 8);
            pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
            rig_close(&r);
        }
    }
}

/* Everything is answered late, as by a store behind a socket. */
static void with_a_store_that_answers_later(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    pl_binding b;
    r.a.v.late = true;
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_OPEN), PL_STORE_PENDING);
    assert_true(veil_deliver(&r.a.v));
    assert_int_equal(t.ready, 1);
    assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
    rig_wait(&r, r.a.v.queued == 1);
    assert_int_equal(t.ready, 0);
    assert_true(veil_deliver(&r.a.v));
    assert_int_equal(t.ready, 1);
    assert_true(t.t.leased);
    pl_turn_sent(&t.t, rig_worker(&r, 0), 60000);
    pl_turn_end(&t.t, PL_TURN_DONE, &some_history, 5);
    assert_null(t.t.in);
    memset(&t, 0xff, sizeof t); /* it is the caller's */
    assert_true(veil_deliver(&r.a.v));
    assert_true(rig_free_lease(&r, "s"));

    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), PL_STORE_PENDING);
    assert_true(veil_deliver(&r.a.v)); /* GET */
    assert_int_equal(t.ready, 0);
    assert_true(veil_deliver(&r.a.v)); /* LEASE */
    assert_int_equal(t.ready, 1);
    assert_memory_equal(&t.t.history, &some_history, sizeof some_history);
    t.wish.final = true;
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    assert_true(veil_deliver(&r.a.v));

    /* a router-only put is under way when its turn ends, with a close */
    assert_int_equal(turn_begin(&t, r.a.l[0], "r", PL_WISH_BIND), PL_STORE_PENDING);
    assert_true(veil_deliver(&r.a.v));
    pl_turn_sent(&t.t, rig_worker(&r, 0), 60000);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    assert_true(veil_deliver(&r.a.v));
    assert_false(veil_deliver(&r.a.v));
    assert_true(rig_peek(&r, "r", &b));
    rig_close(&r);
}

static void without_the_store_requests_go_on(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        rig r;
        rig_open(&r, NULL, false);
        turn t;
        pl_binding b;
        rig_session(&r, "s", 0, 60000);
        r.a.v.fail = i % 2 ? PL_ETIMEOUT : PL_EUNAVAILABLE;
        r.a.v.fail_op = i < 2 ? -1 : PL_STORE_LEASE;
        r.a.v.fail_does = i % 2; /* a lease that was taken, for all we know */
        assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_OPEN), 0);
        assert_true(t.t.fallback);
        assert_false(t.t.bound || t.t.leased);
        assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_EIO);
        pl_turn_sent(&t.t, rig_worker(&r, 1), 60000);
        pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
        assert_true(count(&stats(&r.a)->store_unavailable) >= 1);
        r.a.v.fail = 0;
        assert_true(rig_peek(&r, "s", &b));
        assert_int_equal(b.kind, PL_SESSION_ENGINE_BACKED);
        /* back at once, or when a lease that nobody could give back has ended by itself */
        if (i % 2 == 0)
            assert_true(rig_free_lease(&r, "s"));
        rig_pass(&r, 31000);
        assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
        assert_true(t.t.leased && !t.t.fallback);
        pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
        rig_close(&r);
    }
}

/* Another turn comes between the look-up and the lease, whose answer is lost: what that turn left
 * behind stays. */
static void a_lease_that_nobody_confirms_is_given_back(void **state)
{
    (void)state;
    for (int leaves = 0; leaves < 2; leaves++) {
        rig r;
        rig_open(&r, NULL, false);
        turn t, u;
        pl_history h = {{5, 6}, 9, PL_HISTORY_TEXT, 0};
        rig_session(&r, "s", 0, 60000);
        r.a.v.late = true;
        assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), PL_STORE_PENDING);
        assert_int_equal(turn_begin(&u, r.b.l[0], "s", PL_WISH_TURN), 0);
        pl_turn_sent(&u.t, rig_worker(&r, 0), 60000);
        pl_turn_end(&u.t, PL_TURN_DONE, &h, 300);
        r.a.v.fail = PL_ETIMEOUT;
        r.a.v.fail_op = PL_STORE_LEASE;
        r.a.v.fail_does = true;
        assert_true(veil_deliver(&r.a.v)); /* the look-up: the lease goes out */
        assert_false(rig_free_lease(&r, "s"));
        if (leaves)
            pl_turn_cancel(&t.t);
        while (veil_deliver(&r.a.v))
            ;
        assert_true(rig_free_lease(&r, "s"));
        assert_int_equal(t.ready, !leaves);
        if (!leaves) {
            assert_true(t.t.fallback);
            pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
        }
        assert_int_equal(turn_begin(&u, r.b.l[0], "s", PL_WISH_TURN), 0);
        assert_memory_equal(&u.t.history, &h, sizeof h);
        pl_turn_end(&u.t, PL_TURN_DONE, NULL, -1);
        rig_close(&r);
    }
}

static void a_bind_that_nobody_confirms_is_undone(void **state)
{
    (void)state;
    for (int does = 0; does < 2; does++) {
        rig r;
        rig_open(&r, NULL, false);
        turn t;
        pl_binding b;
        assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_OPEN), 0);
        r.a.v.fail = PL_ETIMEOUT;
        r.a.v.fail_op = PL_STORE_PUT;
        r.a.v.fail_does = does;
        assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
        rig_wait(&r, t.ready);
        assert_int_equal(t.rc, PL_EIO);
        assert_true(t.t.fallback);
        assert_false(t.t.bound || t.t.leased);
        pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
        rig_wait(&r, rig_worker(&r, 0)->sessions == 0);
        assert_int_equal(r.f[0].open_n, 0);
        assert_false(rig_peek(&r, "s", &b));
        rig_close(&r);
    }
}

/* What the engine got in a turn must reach the next one. */
static void a_lease_is_given_back_when_the_store_is_back(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    pl_history h = {{5, 6}, 9, PL_HISTORY_TEXT, 0};
    rig_session(&r, "s", 0, 60000);
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
    pl_turn_sent(&t.t, rig_worker(&r, 0), 60000);
    r.a.v.fail = PL_EUNAVAILABLE;
    r.a.v.fail_op = -1;
    pl_turn_end(&t.t, PL_TURN_DONE, &h, 300);
    rig_pass(&r, 8000);
    assert_false(rig_free_lease(&r, "s"));
    r.a.v.fail = 0;
    rig_pass(&r, 1100);
    assert_true(rig_free_lease(&r, "s"));
    assert_int_equal(turn_begin(&t, r.b.l[0], "s", PL_WISH_TURN), 0);
    assert_memory_equal(&t.t.history, &h, sizeof h);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    /* renewals that fail for a while cost nothing */
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_TURN), 0);
    r.a.v.fail = PL_EUNAVAILABLE;
    rig_pass(&r, 20000);
    r.a.v.fail = 0;
    rig_pass(&r, 30000);
    assert_true(t.t.leased);
    assert_false(rig_free_lease(&r, "s"));
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_close(&r);
}

static void a_close_without_the_store_closes_on_the_engine(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    rig_session(&r, "s", 0, 60000);
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_CLOSE), 0);
    r.a.v.fail = PL_ETIMEOUT;
    r.a.v.fail_op = -1;
    r.a.v.fail_does = true;
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_wait(&r, rig_worker(&r, 0)->sessions == 0);
    assert_int_equal(r.f[0].open_n, 0);
    r.a.v.fail = 0;
    rig_close(&r);
}

/* The store was full: the session is not left on the engine. */
static void a_full_store(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn t;
    assert_int_equal(turn_begin(&t, r.a.l[0], "s", PL_WISH_OPEN), 0);
    r.a.v.fail = PL_ELIMIT;
    r.a.v.fail_op = PL_STORE_PUT;
    assert_int_equal(turn_open(&t, rig_worker(&r, 0), 60000), PL_STORE_PENDING);
    rig_wait(&r, t.ready);
    assert_int_equal(t.rc, PL_ELIMIT);
    assert_false(t.t.fallback);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_wait(&r, rig_worker(&r, 0)->sessions == 0);
    assert_int_equal(r.f[0].open_n, 0);
    rig_close(&r);
}

/* A router that stops in the midst of a turn: what its engine holds is not what the note says. */
static void a_lease_that_lapsed_leaves_an_unknown_history(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, NULL, false);
    turn dead, t;
    rig_session(&r, "s", 0, 600000);
    assert_int_equal(turn_begin(&t, r.b.l[0], "s", PL_WISH_TURN), 0);
    assert_int_equal(t.t.history.form, PL_HISTORY_MESSAGES); /* given back: as it says */
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    assert_int_equal(turn_begin(&dead, r.a.l[0], "s", PL_WISH_TURN), 0);
    pl_turn_sent(&dead.t, rig_worker(&r, 0), 600000);
    r.a.v.fail = PL_EUNAVAILABLE;
    r.a.v.fail_op = -1;
    rig_pass(&r, r.o.lease_ms + 1000);
    assert_int_equal(turn_begin(&t, r.b.l[0], "s", PL_WISH_TURN), 0);
    assert_true(t.t.leased);
    assert_int_equal(t.t.history.form, PL_HISTORY_LOST);
    pl_turn_end(&t.t, PL_TURN_FAILED, NULL, -1); /* never sent: it knows no better than before */
    assert_int_equal(turn_begin(&t, r.b.l[0], "s", PL_WISH_TURN), 0);
    assert_int_equal(t.t.history.form, PL_HISTORY_LOST);
    pl_turn_end(&t.t, PL_TURN_DONE, &some_history, 100);
    r.a.v.fail = 0;
    pl_turn_end(&dead.t, PL_TURN_DONE, &(pl_history){{1, 2}, 5, PL_HISTORY_MESSAGES, PL_API_CHAT},
                100); /* it was not dead, but too late */
    assert_int_equal(turn_begin(&t, r.b.l[0], "s", PL_WISH_TURN), 0);
    assert_int_equal(t.t.history.units, some_history.units);
    pl_turn_end(&t.t, PL_TURN_DONE, NULL, -1);
    rig_close(&r);
}

/* Another router removes the binding and closes the session: once. A store that may have lost the
 * binding is another matter. */
static void who_removes_closes(void **state)
{
    (void)state;
    for (int lost = 0; lost < 2; lost++) {
        rig r;
        rig_open(&r, NULL, false);
        rig_session(&r, "s", 0, 10000);
        r.a.v.outages = (uint64_t)lost;
        pl_store_call c = {.op = PL_STORE_REMOVE, .name = {PL_STR("acme"), PL_STR("s")}};
        assert_int_equal(pl_store_start(r.memory, &c), 0);
        assert_int_equal(rig_worker(&r, 0)->sessions, 1);
        rig_wait_pass(&r, 30000, rig_worker(&r, 0)->sessions == 0);
        assert_int_equal(r.f[0].closes, lost);
        rig_close(&r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(with_a_store_that_answers_later),
        cmocka_unit_test(cancel_in_every_state),
        cmocka_unit_test(without_the_store_requests_go_on),
        cmocka_unit_test(a_lease_that_nobody_confirms_is_given_back),
        cmocka_unit_test(a_bind_that_nobody_confirms_is_undone),
        cmocka_unit_test(a_lease_is_given_back_when_the_store_is_back),
        cmocka_unit_test(a_close_without_the_store_closes_on_the_engine),
        cmocka_unit_test(a_full_store),
        cmocka_unit_test(a_lease_that_lapsed_leaves_an_unknown_history),
        cmocka_unit_test(who_removes_closes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
