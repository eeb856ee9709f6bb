/* When a stream of KV events is believed, repaired, begun anew or cut off. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "trust_calls.h"

static void is(const pl_trust *t, const char *state)
{
    assert_string_equal(pl_trust_state_name(t->state), state);
}

/* A stream with batches 0 .. n-1 of life 1 applied. */
static pl_trust at(uint64_t n, bool replay)
{
    pl_trust t = make(replay, false);
    if (replay) {
        assert_int_equal(pl_trust_start(&t, now), PL_DO_REPLAY);
        pl_trust_asked(&t, now);
        assert_int_equal(pl_trust_replay_end(&t, now), PL_DO_STOP | PL_DO_FLUSH);
    }
    for (uint64_t i = 0; i < n; i++)
        assert_int_equal(live(&t, 1, i), PL_DO_APPLY);
    return t;
}

static void in_order_is_live(void **state)
{
    (void)state;
    pl_trust t = make(false, false);
    is(&t, "new");
    assert_int_equal(pl_trust_start(&t, now), 0);
    assert_int_equal(live(&t, 1, 0), PL_DO_APPLY);
    is(&t, "live");
    assert_int_equal(live(&t, 1, 1), PL_DO_APPLY);
    assert_true(t.complete && t.next == 2);
    assert_int_equal(t.gaps + t.resets + t.restarts + t.duplicates, 0);
}

static void a_late_join_is_incomplete_until_the_engine_is_empty(void **state)
{
    (void)state;
    pl_trust t = make(false, false);
    assert_int_equal(live(&t, 1, 40), PL_DO_APPLY);
    is(&t, "live");
    assert_false(t.complete);
    pl_trust_emptied(&t);
    assert_true(t.complete);
}

static void a_start_asks_for_what_was_before(void **state)
{
    (void)state;
    pl_trust t = make(true, false);
    assert_int_equal(pl_trust_start(&t, now), PL_DO_REPLAY);
    assert_int_equal(t.ask_from, 0);
    is(&t, "gap");
    pl_trust_asked(&t, now);
    is(&t, "replaying");
    /* what comes live meanwhile is held, and applied behind the replay */
    assert_int_equal(live(&t, 1, 2), PL_DO_HOLD);
    assert_int_equal(live(&t, 1, 3), PL_DO_HOLD);
    assert_int_equal(replayed(&t, 1, 0), PL_DO_APPLY);
    assert_int_equal(replayed(&t, 1, 1), PL_DO_APPLY);
    assert_int_equal(replayed(&t, 1, 2), PL_DO_APPLY);
    assert_int_equal(pl_trust_replay_end(&t, now), PL_DO_STOP | PL_DO_FLUSH);
    is(&t, "live");
    assert_int_equal(held(&t, 1, 2), 0);
    assert_int_equal(held(&t, 1, 3), PL_DO_APPLY);
    assert_int_equal(live(&t, 1, 4), PL_DO_APPLY);
    assert_true(t.complete && t.replays == 1 && t.duplicates == 0);
}

static void an_engine_that_was_silent_so_far_is_complete(void **state)
{
    (void)state;
    pl_trust t = at(0, true);
    is(&t, "live");
    assert_true(t.complete && t.next == 0);
    assert_int_equal(live(&t, 1, 0), PL_DO_APPLY);
}

static void a_gap_is_replayed_from_the_last_known_batch(void **state)
{
    (void)state;
    pl_trust t = at(3, true);
    assert_int_equal(live(&t, 1, 5), PL_DO_REPLAY | PL_DO_HOLD);
    is(&t, "gap");
    assert_int_equal(t.ask_from, 2);
    assert_int_equal(t.missed, 2);
    pl_trust_asked(&t, now);
    assert_int_equal(replayed(&t, 1, 2), 0); /* it is the one we have */
    assert_int_equal(replayed(&t, 1, 3), PL_DO_APPLY);
    assert_int_equal(replayed(&t, 1, 4), PL_DO_APPLY);
    assert_int_equal(replayed(&t, 1, 5), PL_DO_APPLY);
    assert_int_equal(pl_trust_replay_end(&t, now), PL_DO_STOP | PL_DO_FLUSH);
    assert_int_equal(held(&t, 1, 5), 0);
    assert_int_equal(live(&t, 1, 6), PL_DO_APPLY);
    is(&t, "live");
    assert_true(t.complete && t.gaps == 1 && t.resets == 0);
}

static void without_replay_a_gap_resets(void **state)
{
    (void)state;
    pl_trust t = at(3, false);
    assert_int_equal(live(&t, 1, 5), PL_DO_CLEAR | PL_DO_APPLY);
    is(&t, "reset");
    assert_false(t.complete);
    assert_int_equal(t.resets, 1);
    assert_int_equal(live(&t, 1, 6), PL_DO_APPLY);
    is(&t, "live");
    assert_false(t.complete);
}

static void a_replay_that_lost_messages_is_resumed(void **state)
{
    (void)state;
    pl_trust t = at(1, true);
    live(&t, 1, 9);
    pl_trust_asked(&t, now);
    assert_int_equal(replayed(&t, 1, 0), 0);
    assert_int_equal(replayed(&t, 1, 1), PL_DO_APPLY);
    assert_int_equal(replayed(&t, 1, 4), PL_DO_STOP | PL_DO_REPLAY); /* 2 and 3 were dropped */
    assert_int_equal(t.ask_from, 1);
    assert_int_equal(replayed(&t, 1, 5), 0); /* not asked again yet */
    pl_trust_asked(&t, now);
    assert_int_equal(replayed(&t, 1, 1), 0);
    for (uint64_t i = 2; i < 10; i++)
        assert_int_equal(replayed(&t, 1, i), PL_DO_APPLY);
    pl_trust_replay_end(&t, now);
    assert_int_equal(t.resets, 0);
    assert_true(t.complete);
}

/* The engine itself lacks batches: asking again does not help, and must end. */
static void a_hole_in_the_engines_buffer_resets(void **state)
{
    (void)state;
    pl_trust t = at(1, true);
    live(&t, 1, 9);
    unsigned what = 0;
    for (int i = 0; i < 10 && !(what & PL_DO_APPLY); i++) {
        pl_trust_asked(&t, now);
        assert_int_equal(replayed(&t, 1, 0), 0);
        what = replayed(&t, 1, 4);
    }
    assert_int_equal(what, PL_DO_CLEAR | PL_DO_APPLY);
    assert_int_equal(replayed(&t, 1, 5), PL_DO_APPLY);
    pl_trust_replay_end(&t, now);
    assert_false(t.complete);
    assert_int_equal(t.resets, 1);
}

static void a_gap_older_than_the_buffer_resets(void **state)
{
    (void)state;
    pl_trust t = at(3, true);
    live(&t, 1, 5000);
    pl_trust_asked(&t, now);
    assert_int_equal(replayed(&t, 1, 4000), PL_DO_CLEAR | PL_DO_APPLY);
    for (uint64_t i = 4001; i <= 5000; i++)
        assert_int_equal(replayed(&t, 1, i), PL_DO_APPLY);
    pl_trust_replay_end(&t, now);
    assert_int_equal(held(&t, 1, 5000), 0);
    assert_false(t.complete);
    assert_int_equal(live(&t, 1, 5001), PL_DO_APPLY);
}

static void a_duplicate_is_ignored(void **state)
{
    (void)state;
    pl_trust t = at(5, false);
    assert_int_equal(live(&t, 1, 4), 0);
    assert_int_equal(live(&t, 1, 2), 0);
    assert_int_equal(t.duplicates, 2);
    assert_int_equal(live(&t, 1, 5), PL_DO_APPLY);
    is(&t, "live");
    assert_int_equal(t.restarts, 0);
}

static void a_number_that_goes_back_is_a_restart(void **state)
{
    (void)state;
    pl_trust t = at(5, false);
    assert_int_equal(live(&t, 2, 0), PL_DO_CLEAR | PL_DO_FORGET | PL_DO_STOP | PL_DO_APPLY);
    is(&t, "live");
    assert_true(t.complete && t.restarts == 1);
    assert_int_equal(live(&t, 2, 1), PL_DO_APPLY);
    /* with its first batches missed */
    t = at(5, true);
    assert_int_equal(live(&t, 2, 3),
                     PL_DO_CLEAR | PL_DO_FORGET | PL_DO_STOP | PL_DO_REPLAY | PL_DO_HOLD);
    assert_int_equal(t.ask_from, 0);
    pl_trust_asked(&t, now);
    for (uint64_t i = 0; i < 4; i++)
        assert_int_equal(replayed(&t, 2, i), PL_DO_APPLY);
    pl_trust_replay_end(&t, now);
    assert_true(t.complete && t.next == 4);
}

/* One batch was heard, the engine restarts, and its new first batch has the same number. */
static void the_same_number_with_other_contents_is_a_restart(void **state)
{
    (void)state;
    pl_trust t = at(1, false);
    assert_int_equal(live(&t, 2, 0), PL_DO_CLEAR | PL_DO_FORGET | PL_DO_STOP | PL_DO_APPLY);
    assert_int_equal(t.restarts, 1);
}

/* While the connection was down the engine restarted and got further than we had heard: only the
 * replay's first batch shows it. */
static void a_restart_behind_a_gap_is_seen_by_the_replay(void **state)
{
    (void)state;
    pl_trust t = at(3, true);
    assert_int_equal(live(&t, 2, 7), PL_DO_REPLAY | PL_DO_HOLD);
    pl_trust_asked(&t, now);
    assert_int_equal(replayed(&t, 2, 2), PL_DO_CLEAR | PL_DO_FORGET | PL_DO_STOP | PL_DO_REPLAY);
    assert_int_equal(t.ask_from, 0);
    pl_trust_asked(&t, now);
    for (uint64_t i = 0; i < 8; i++)
        assert_int_equal(replayed(&t, 2, i), PL_DO_APPLY);
    pl_trust_replay_end(&t, now);
    assert_int_equal(live(&t, 2, 8), PL_DO_APPLY);
    assert_true(t.complete && t.restarts == 1);
}

static void another_epoch_is_a_restart(void **state)
{
    (void)state;
    pl_trust t = make(false, false);
    assert_int_equal(pl_trust_live(&t, now, 0, 1, 77, 10), PL_DO_APPLY);
    assert_int_equal(pl_trust_live(&t, now, 1, 2, 77, 10), PL_DO_APPLY);
    assert_int_equal(pl_trust_live(&t, now, 2, 3, 78, 10),
                     PL_DO_CLEAR | PL_DO_FORGET | PL_DO_STOP | PL_DO_APPLY);
    is(&t, "reset");
    assert_int_equal(t.restarts, 1);
}

static void a_reconnect_checks_that_it_is_the_same_engine(void **state)
{
    (void)state;
    pl_trust t = at(4, true);
    pl_trust_lost(&t, now);
    assert_int_equal(pl_trust_connected(&t, now), PL_DO_REPLAY);
    pl_trust_asked(&t, now);
    assert_int_equal(replayed(&t, 1, 3), 0);
    assert_int_equal(pl_trust_replay_end(&t, now), PL_DO_STOP | PL_DO_FLUSH);
    is(&t, "live");
    assert_true(t.complete && t.resets == 0);
    /* it restarted and is idle: it has less than we know */
    pl_trust_lost(&t, now);
    assert_int_equal(pl_trust_connected(&t, now), PL_DO_REPLAY);
    pl_trust_asked(&t, now);
    assert_int_equal(pl_trust_replay_end(&t, now),
                     PL_DO_CLEAR | PL_DO_FORGET | PL_DO_STOP | PL_DO_REPLAY);
    pl_trust_asked(&t, now);
    pl_trust_replay_end(&t, now);
    is(&t, "live");
    assert_true(t.complete && t.next == 0 && t.restarts == 1);
    /* a first connect, or one that was never lost, asks for nothing */
    assert_int_equal(pl_trust_connected(&t, now), 0);
}

static void an_answer_that_does_not_come_is_given_up(void **state)
{
    (void)state;
    pl_trust t = at(3, true);
    unsigned what = live(&t, 1, 6);
    int asked = 0;
    while (what & PL_DO_REPLAY) {
        pl_trust_asked(&t, now);
        asked++;
        now += S;
        assert_int_equal(pl_trust_tick(&t, now, 0), 0);
        now += 2 * S;
        what = pl_trust_tick(&t, now, 0);
    }
    assert_int_equal(asked, 3);
    assert_int_equal(what, PL_DO_CLEAR | PL_DO_STOP | PL_DO_FLUSH);
    is(&t, "reset");
    assert_int_equal(held(&t, 1, 6), PL_DO_APPLY);
    assert_int_equal(live(&t, 1, 7), PL_DO_APPLY);
    is(&t, "live");
    /* a gap within the pause is not asked for, one after it is */
    assert_int_equal(live(&t, 1, 9), PL_DO_CLEAR | PL_DO_APPLY);
    now += 31 * S;
    assert_int_equal(live(&t, 1, 12), PL_DO_REPLAY | PL_DO_HOLD);
}

static void a_slow_answer_ends_in_total(void **state)
{
    (void)state;
    pl_trust t = at(1, true);
    live(&t, 1, 5000);
    pl_trust_asked(&t, now);
    uint64_t begun = now, seq = 0;
    unsigned what = 0;
    while (!(what & PL_DO_STOP)) {
        now += S;
        replayed(&t, 1, seq++);
        what = pl_trust_tick(&t, now, 0);
    }
    assert_true(now - begun == 120 * S);
}

/* No replay port to speak of: a quiet stream is not cleared because of it. */
static void a_failed_check_clears_nothing(void **state)
{
    (void)state;
    pl_trust t = at(3, true);
    pl_trust_lost(&t, now);
    unsigned what = pl_trust_connected(&t, now);
    while (what & PL_DO_REPLAY) {
        pl_trust_asked(&t, now);
        now += 3 * S;
        what = pl_trust_tick(&t, now, 0);
        assert_false(what & PL_DO_CLEAR);
    }
    is(&t, "stale");
    assert_int_equal(live(&t, 1, 3), PL_DO_APPLY);
    is(&t, "live");
}

static void used_but_silent_is_stale(void **state)
{
    (void)state;
    pl_trust t = at(3, false);
    uint64_t used = now;
    now += 59 * S;
    pl_trust_tick(&t, now, used);
    is(&t, "live");
    now += S;
    assert_int_equal(pl_trust_tick(&t, now, used), 0);
    is(&t, "stale");
    assert_int_equal(live(&t, 1, 3), PL_DO_APPLY);
    is(&t, "live");
    now += 1000 * S; /* not used: silence is what it should do */
    pl_trust_tick(&t, now, 0);
    is(&t, "live");
    /* where there is a replay it is asked first */
    t = at(3, true);
    used = now;
    now += 60 * S;
    assert_int_equal(pl_trust_tick(&t, now, used), PL_DO_REPLAY);
    pl_trust_asked(&t, now);
    assert_int_equal(replayed(&t, 1, 2), 0);
    pl_trust_replay_end(&t, now);
    is(&t, "live");
}

static void unreachable_is_stale(void **state)
{
    (void)state;
    pl_trust t = at(3, false);
    pl_trust_lost(&t, now);
    now += 60 * S;
    assert_int_equal(pl_trust_tick(&t, now, 0), 0);
    is(&t, "stale");
}

static void a_snapshot_repairs_what_replay_cannot(void **state)
{
    (void)state;
    pl_trust t = make(false, true);
    live(&t, 1, 0);
    assert_int_equal(live(&t, 1, 5), PL_DO_SNAPSHOT | PL_DO_HOLD);
    is(&t, "gap");
    pl_trust_asked(&t, now);
    assert_int_equal(live(&t, 1, 6), PL_DO_HOLD);
    assert_int_equal(live(&t, 1, 7), PL_DO_HOLD);
    assert_int_equal(pl_trust_snapshot_end(&t, now, 7), PL_DO_STOP | PL_DO_FLUSH);
    assert_int_equal(held(&t, 1, 5), 0);
    assert_int_equal(held(&t, 1, 6), 0);
    assert_int_equal(held(&t, 1, 7), PL_DO_APPLY);
    is(&t, "live");
    assert_true(!t.complete && t.resets == 0 && t.snapshots == 1);
    /* and when it fails the rank is reset */
    assert_int_equal(live(&t, 1, 11), PL_DO_SNAPSHOT | PL_DO_HOLD);
    pl_trust_asked(&t, now);
    assert_int_equal(pl_trust_ask_failed(&t, now), PL_DO_STOP | PL_DO_CLEAR | PL_DO_FLUSH);
    assert_int_equal(held(&t, 1, 11), PL_DO_APPLY);
    assert_int_equal(t.resets, 1);
}

static void a_batch_that_cannot_be_read_resets(void **state)
{
    (void)state;
    pl_trust t = at(3, true);
    assert_int_equal(live(&t, 1, 3), PL_DO_APPLY);
    assert_int_equal(pl_trust_bad(&t, now, true, 3), PL_DO_CLEAR);
    is(&t, "reset");
    assert_int_equal(live(&t, 1, 4), PL_DO_APPLY);
    is(&t, "live");
    assert_false(t.complete);
    assert_int_equal(pl_trust_bad(&t, now, false, 0), 0); /* no batch at all: nothing was lost */
    is(&t, "live");
}

static void garbage_is_cut_off_and_comes_back(void **state)
{
    (void)state;
    pl_trust t = at(3, true);
    const unsigned cut = PL_DO_CLEAR | PL_DO_FORGET | PL_DO_STOP | PL_DO_SHUT;
    for (int i = 0; i < 8; i++)
        assert_int_equal(pl_trust_bad(&t, now, false, 0), 0);
    assert_int_equal(pl_trust_bad(&t, now, false, 0), cut);
    is(&t, "untrusted");
    assert_int_equal(live(&t, 1, 3), 0);
    assert_int_equal(pl_trust_unnumbered(&t, now, 1), 0);
    now += 29 * S;
    assert_int_equal(pl_trust_tick(&t, now, 0), 0);
    now += S;
    assert_int_equal(pl_trust_tick(&t, now, 0), PL_DO_OPEN | PL_DO_REPLAY);
    pl_trust_asked(&t, now);
    replayed(&t, 1, 0);
    pl_trust_replay_end(&t, now);
    is(&t, "live");
    /* again: for twice as long; seldom garbage is only counted */
    for (int i = 0; i < 9; i++)
        pl_trust_bad(&t, now, false, 0);
    is(&t, "untrusted");
    now += 59 * S;
    assert_int_equal(pl_trust_tick(&t, now, 0), 0);
    now += S;
    assert_true(pl_trust_tick(&t, now, 0) & PL_DO_OPEN);
    for (int i = 0; i < 100; i++) {
        now += 2 * S;
        assert_int_equal(pl_trust_bad(&t, now, false, 0), 0);
    }
    assert_int_equal(t.bad, 118);
}

static void a_flood_is_cut_off(void **state)
{
    (void)state;
    pl_trust t = make(false, false);
    uint64_t seq = 0;
    while (t.state != PL_TRUST_UNTRUSTED && seq < 100000)
        live(&t, 1, seq++);
    assert_int_equal(seq, 50001);
    assert_int_equal(t.floods, 1);
    t = make(false, false);
    assert_int_equal(pl_trust_live(&t, now, 0, 1, 0, 200u << 20), PL_DO_APPLY);
    assert_true(pl_trust_live(&t, now, 1, 1, 0, 200u << 20) & PL_DO_SHUT);
    /* the same over a longer time is fine */
    t = make(false, false);
    for (seq = 0; seq < 100000; seq++) {
        now += S / 40000;
        assert_int_equal(live(&t, 1, seq), PL_DO_APPLY);
    }
}

/* The engine dies while some of its last messages are not read yet: they are no sign that it is
 * back, and the connection that comes is checked all the same. */
static void a_late_message_does_not_hide_a_reconnect(void **state)
{
    (void)state;
    pl_trust t = at(4, true);
    pl_trust_lost(&t, now);
    unsigned what = live(&t, 1, 4);
    assert_int_equal(what, PL_DO_REPLAY | PL_DO_HOLD);
    while (what & PL_DO_REPLAY) { /* it is not there yet */
        pl_trust_asked(&t, now);
        what = pl_trust_ask_failed(&t, now);
    }
    assert_int_equal(what, PL_DO_STOP | PL_DO_FLUSH);
    assert_int_equal(held(&t, 1, 4), PL_DO_APPLY);
    assert_int_equal(pl_trust_connected(&t, now), PL_DO_REPLAY);
    assert_int_equal(t.ask_from, 4);
    pl_trust_asked(&t, now);
    assert_int_equal(pl_trust_replay_end(&t, now), /* it has less than we know */
                     PL_DO_CLEAR | PL_DO_FORGET | PL_DO_STOP | PL_DO_REPLAY);
    assert_int_equal(t.restarts, 1);
    /* and what the new one says first must not pass for what the old one would have said next */
    t = at(4, true);
    pl_trust_lost(&t, now);
    assert_int_equal(live(&t, 2, 4), PL_DO_REPLAY | PL_DO_HOLD);
    /* nor is it known by what the old one had still answered when it came */
    t = at(4, true);
    pl_trust_lost(&t, now);
    assert_int_equal(live(&t, 1, 4), PL_DO_REPLAY | PL_DO_HOLD);
    pl_trust_asked(&t, now);
    assert_int_equal(pl_trust_connected(&t, now), 0);
    assert_int_equal(replayed(&t, 1, 3), 0);
    assert_int_equal(replayed(&t, 1, 4), PL_DO_APPLY);
    assert_int_equal(pl_trust_replay_end(&t, now), PL_DO_STOP | PL_DO_FLUSH);
    assert_int_equal(held(&t, 2, 5), PL_DO_REPLAY | PL_DO_HOLD);
    pl_trust_asked(&t, now);
    assert_true(replayed(&t, 2, 4) & PL_DO_CLEAR);
    assert_int_equal(t.restarts, 1);
}

/* An engine that answers at once that it has nothing of what is missing: asking that without end
 * would keep every batch that comes from being applied. */
static void answers_that_bring_nothing_end(void **state)
{
    (void)state;
    for (uint64_t n = 0; n < 4; n += 3) { /* joined late; known, and in the engine's buffer once */
        pl_trust t = at(n, true);
        unsigned what = live(&t, 1, 57);
        int asked = 0;
        while (what & PL_DO_REPLAY) {
            assert_true(asked++ < 10);
            pl_trust_asked(&t, now);
            if (n)
                assert_int_equal(replayed(&t, 1, n - 1), 0);
            assert_int_equal(pl_trust_replay_end(&t, now), PL_DO_STOP | PL_DO_FLUSH);
            what = held(&t, 1, 57);
        }
        assert_int_equal(asked, 3);
        assert_int_equal(what, PL_DO_CLEAR | PL_DO_APPLY);
        assert_false(t.complete);
        assert_int_equal(live(&t, 1, 58), PL_DO_APPLY);
        is(&t, "live");
    }
}

/* Tries that failed are in a row only until one succeeds, also where that had nothing new to say.
 */
static void a_check_that_succeeds_ends_the_row_of_failures(void **state)
{
    (void)state;
    pl_trust t = at(3, true);
    pl_trust_lost(&t, now);
    assert_int_equal(pl_trust_connected(&t, now), PL_DO_REPLAY);
    for (int i = 0; i < 2; i++) {
        pl_trust_asked(&t, now);
        assert_int_equal(pl_trust_ask_failed(&t, now), PL_DO_STOP | PL_DO_REPLAY);
    }
    pl_trust_asked(&t, now);
    assert_int_equal(replayed(&t, 1, 2), 0);
    pl_trust_replay_end(&t, now);
    assert_int_equal(live(&t, 1, 9), PL_DO_REPLAY | PL_DO_HOLD);
    pl_trust_asked(&t, now);
    assert_int_equal(pl_trust_ask_failed(&t, now), PL_DO_STOP | PL_DO_REPLAY);
}

/* What the engine before it did not answer says nothing of the one that has just begun. */
static void a_restarted_engine_is_asked_at_once(void **state)
{
    (void)state;
    pl_trust t = at(3, true);
    unsigned what = live(&t, 1, 6);
    while (what & PL_DO_REPLAY) {
        pl_trust_asked(&t, now);
        what = pl_trust_ask_failed(&t, now);
    }
    assert_int_equal(held(&t, 1, 6), PL_DO_APPLY);
    assert_true(live(&t, 2, 2) & PL_DO_REPLAY);
}

/* Two publishers whose numbers run into each other, or one that makes them up: no engine restarts
 * that often, and each time costs a clear and a replay. */
static void restarts_without_end_are_cut_off(void **state)
{
    (void)state;
    for (int replay = 0; replay < 2; replay++) {
        pl_trust t = at(1, replay);
        int restarts = 0;
        unsigned what = 0;
        while (!(what & PL_DO_SHUT)) {
            assert_true(restarts++ < 20);
            now += S / 2;
            what = live(&t, 1 + restarts, 0);
        }
        assert_int_equal(restarts, 9);
        is(&t, "untrusted");
        assert_int_equal(t.restarts, 9);
        /* one now and then is what engines do */
        t = at(1, replay);
        for (restarts = 0; restarts < 30; restarts++) {
            now += 2 * S;
            assert_false(live(&t, 2 + restarts, 0) & PL_DO_SHUT);
        }
    }
}

/* Nothing was there yet that could have been dropped. */
static void a_first_answer_is_no_reset(void **state)
{
    (void)state;
    pl_trust t = make(true, false);
    pl_trust_start(&t, now);
    pl_trust_asked(&t, now);
    assert_true(replayed(&t, 1, 4000) & PL_DO_APPLY);
    assert_int_equal(replayed(&t, 1, 4001), PL_DO_APPLY);
    pl_trust_replay_end(&t, now);
    assert_false(t.complete);
    assert_int_equal(t.resets, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_order_is_live),
        cmocka_unit_test(a_late_join_is_incomplete_until_the_engine_is_empty),
        cmocka_unit_test(a_start_asks_for_what_was_before),
        cmocka_unit_test(an_engine_that_was_silent_so_far_is_complete),
        cmocka_unit_test(a_gap_is_replayed_from_the_last_known_batch),
        cmocka_unit_test(without_replay_a_gap_resets),
        cmocka_unit_test(a_replay_that_lost_messages_is_resumed),
        cmocka_unit_test(a_hole_in_the_engines_buffer_resets),
        cmocka_unit_test(a_gap_older_than_the_buffer_resets),
        cmocka_unit_test(a_duplicate_is_ignored),
        cmocka_unit_test(a_number_that_goes_back_is_a_restart),
        cmocka_unit_test(the_same_number_with_other_contents_is_a_restart),
        cmocka_unit_test(a_restart_behind_a_gap_is_seen_by_the_replay),
        cmocka_unit_test(another_epoch_is_a_restart),
        cmocka_unit_test(a_reconnect_checks_that_it_is_the_same_engine),
        cmocka_unit_test(an_answer_that_does_not_come_is_given_up),
        cmocka_unit_test(a_slow_answer_ends_in_total),
        cmocka_unit_test(a_failed_check_clears_nothing),
        cmocka_unit_test(used_but_silent_is_stale),
        cmocka_unit_test(unreachable_is_stale),
        cmocka_unit_test(a_snapshot_repairs_what_replay_cannot),
        cmocka_unit_test(a_batch_that_cannot_be_read_resets),
        cmocka_unit_test(garbage_is_cut_off_and_comes_back),
        cmocka_unit_test(a_flood_is_cut_off),
        cmocka_unit_test(a_late_message_does_not_hide_a_reconnect),
        cmocka_unit_test(answers_that_bring_nothing_end),
        cmocka_unit_test(a_check_that_succeeds_ends_the_row_of_failures),
        cmocka_unit_test(a_restarted_engine_is_asked_at_once),
        cmocka_unit_test(restarts_without_end_are_cut_off),
        cmocka_unit_test(a_first_answer_is_no_reset),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
