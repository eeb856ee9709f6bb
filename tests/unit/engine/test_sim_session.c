/* Sessions of the simulated engine: what a turn finds and holds, refusals, aborts, closing and
 * timing out in every state, pressure on the pool, retention, and random storms of all of it
 * against a plain model of each conversation. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/rng.h"
#include "engine/sim.h"

#define SECOND 1000000

typedef struct watch {
    pl_sim *sim;
    pl_sim_req *req;
    int id, tokens, finished, refused, cached;
    int64_t first_us, end_us;
    pl_buf *log;
    const char *close_at_first; /* closes this session at the first token */
    const char *open_at_end;    /* opens it when it finishes */
} watch;

static void on_tokens(void *user, int64_t now_us, int from, int n)
{
    watch *w = user;
    assert_int_equal(from, w->tokens);
    if (!w->tokens) {
        w->first_us = now_us;
        if (w->close_at_first)
            assert_true(pl_sim_close(w->sim, now_us, pl_str_c(w->close_at_first)));
    }
    w->tokens += n;
    if (w->log)
        assert_int_equal(pl_buf_addf(w->log, "%lld %d t%d\n", (long long)now_us, w->id, from), 0);
}

static void on_finish(void *user, int64_t now_us, pl_sim_finish why)
{
    watch *w = user;
    assert_non_null(w->req);
    w->cached = pl_sim_cached_tokens(w->req);
    w->req = NULL;
    w->finished++;
    w->refused += why == PL_SIM_REFUSED;
    w->end_us = now_us;
    if (w->open_at_end)
        assert_int_equal(pl_sim_open(w->sim, now_us,
                                     &(pl_sim_session){.id = pl_str_c(w->open_at_end),
                                                       .streaming = true,
                                                       .timeout_us = -1}),
                         0);
    if (w->log)
        assert_int_equal(
            pl_buf_addf(w->log, "%lld %d end %d\n", (long long)now_us, w->id, w->cached), 0);
}

static const pl_sim_events events = {on_tokens, on_finish};

/* 1,000 us a step and 10 a prefilled token. */
static pl_sim_options options(void)
{
    pl_sim_options o;
    pl_sim_options_default(&o);
    o.timing = (pl_timing){"test", 1000, 10, 0, 100, 0, 0};
    o.page_tokens = 4;
    o.pool_tokens = 400;
    o.max_running = 8;
    o.max_batch_tokens = 64;
    return o;
}

static pl_sim *engine(const pl_sim_options *o)
{
    pl_sim *s;
    pl_errbuf eb;
    assert_int_equal(pl_sim_new(o, &s, &eb), 0);
    return s;
}

static void fill(uint32_t *t, int n, uint32_t salt)
{
    for (int i = 0; i < n; i++)
        t[i] = salt * 1000003u + (uint32_t)i;
}

static int64_t drain(pl_sim *s, int64_t until)
{
    int64_t next;
    while ((next = pl_sim_next_us(s)) <= until && next != INT64_MAX) {
        pl_sim_step(s, next);
        pl_sim_check(s);
    }
    pl_sim_step(s, until);
    pl_sim_check(s);
    return until;
}

static int open_session(pl_sim *s, int64_t now, const char *id, int64_t timeout_us)
{
    return pl_sim_open(
        s, now, &(pl_sim_session){.id = pl_str_c(id), .streaming = true, .timeout_us = timeout_us});
}

/* Why a turn is refused; NULL: *slot is for it. */
static const char *ask_slot(pl_sim *s, int64_t now, const pl_sim_turn *turn, pl_sim_slot **slot)
{
    static pl_errbuf why;
    *slot = pl_sim_turn_slot(s, now, turn, &why);
    return *slot ? NULL : why.text;
}

static int turn(watch *w, int64_t now, const char *id, const uint32_t *t, int n, int out)
{
    pl_sim_slot *slot;
    const char *why = ask_slot(w->sim, now, &(pl_sim_turn){.id = pl_str_c(id)}, &slot);
    if (why)
        fail_msg("%s", why);
    pl_sim_ask ask = {.tokens = t, .n = n, .output_tokens = out, .out_seed = 7, .slot = slot};
    return pl_sim_ask_for(w->sim, now, &ask, &events, w, &w->req);
}

/* A turn from start to end; what it found. */
static int whole_turn(pl_sim *s, int64_t now, const char *id, uint32_t salt, int n, int out)
{
    uint32_t t[400];
    fill(t, n, salt);
    watch w = {.sim = s};
    assert_int_equal(turn(&w, now, id, t, n, out), 0);
    drain(s, now + SECOND);
    assert_int_equal(w.finished, 1);
    assert_int_equal(w.tokens, out);
    return w.cached;
}

static int plain(pl_sim *s, int64_t now, const uint32_t *t, int n, int out)
{
    watch w = {.sim = s};
    assert_int_equal(pl_sim_submit(s, now, t, n, out, 0, 7, &events, &w, &w.req), 0);
    drain(s, now + SECOND);
    assert_int_equal(w.finished, 1);
    return w.cached;
}

typedef struct looked_up {
    const char *id;
    pl_sim_slot_info info;
    bool found;
} looked_up;

static void look(void *user, const pl_sim_slot_info *info)
{
    looked_up *l = user;
    if (pl_str_eq(info->session.id, pl_str_c(l->id))) {
        l->info = *info;
        l->found = true;
    }
}

static looked_up info_of(const pl_sim *s, const char *id)
{
    looked_up l = {.id = id};
    pl_sim_each_slot(s, look, &l);
    return l;
}

static pl_sim_stats stats(const pl_sim *s)
{
    pl_sim_stats st;
    pl_sim_stats_of(s, &st);
    return st;
}

static void test_turns(void **state)
{
    pl_sim_options o = options();
    pl_sim *s = engine(&o);
    uint32_t all[200];
    assert_int_equal(open_session(s, 0, "a", -1), 0);
    assert_int_equal(open_session(s, 0, "a", -1), PL_EEXISTS);
    /* The first turn: 21 tokens, 5 answered. 20 of the prompt go to the tree. */
    assert_int_equal(whole_turn(s, 0, "a", 1, 21, 5), 0);
    looked_up a = info_of(s, "a");
    assert_int_equal(a.info.tokens, 26);
    assert_int_equal(a.info.kv_tokens, 25); /* the last token of an answer is never computed */
    assert_int_equal(a.info.prefix_tokens, 20);
    assert_int_equal(a.info.held_tokens, 8);
    assert_int_equal(a.info.turns, 1);
    /* A later turn finds all that was computed, not only whole pages, and leaves nothing. */
    assert_int_equal(whole_turn(s, SECOND, "a", 2, 10, 6), 25);
    a = info_of(s, "a");
    assert_int_equal(a.info.tokens, 42);
    assert_int_equal(a.info.kv_tokens, 41);
    assert_int_equal(a.info.held_tokens, 24);
    assert_int_equal(whole_turn(s, 2 * SECOND, "a", 3, 1, 0), 41); /* one that says nothing */
    assert_int_equal(info_of(s, "a").info.kv_tokens, 43);
    pl_sim_stats st = stats(s);
    assert_int_equal(st.used_tokens, 44);
    assert_int_equal(st.held_tokens, 24);
    assert_int_equal(st.evictable_tokens, 0);
    assert_int_equal(st.streaming_sessions, 1);
    assert_int_equal(st.turns, 3);
    /* The whole conversation without the session: only the first prompt is in the cache. */
    fill(all, 21, 1);
    for (int i = 0; i < 5; i++)
        all[21 + i] = pl_sim_output_token(7, i);
    fill(all + 26, 10, 2);
    assert_int_equal(plain(s, 3 * SECOND, all, 36, 1), 20);
    pl_sim_flush_cache(s);
    /* Closing gives all back at once but the part in the tree, which can be evicted then. */
    assert_int_equal(whole_turn(s, 5 * SECOND, "a", 4, 10, 2), 0); /* the flush took what it held */
    assert_int_equal(info_of(s, "a").info.tokens, 43 + 12);
    assert_true(pl_sim_close(s, 6 * SECOND, PL_STR("a")));
    assert_false(pl_sim_close(s, 6 * SECOND, PL_STR("a")));
    pl_sim_check(s);
    st = stats(s);
    assert_int_equal(st.used_tokens + st.held_tokens + st.sessions, 0);
    assert_int_equal(st.evictable_tokens, 52);
    assert_int_equal(st.available_tokens, 400 - 52);
    pl_sim_free(s);
}

/* The cost of a later turn is that of its new tokens. */
static void test_time_of_a_turn(void **state)
{
    pl_sim_options o = options();
    pl_sim *s = engine(&o);
    uint32_t t[200];
    open_session(s, 0, "a", -1);
    whole_turn(s, 0, "a", 1, 200, 8);
    fill(t, 12, 2);
    watch w = {.sim = s};
    assert_int_equal(turn(&w, 2 * SECOND, "a", t, 12, 1), 0);
    assert_int_equal(stats(s).waiting_tokens, 13); /* and the one that was never computed */
    drain(s, 3 * SECOND);
    assert_int_equal(w.first_us, 2 * SECOND + 1000 + 13 * 10);
    assert_int_equal(stats(s).waiting_tokens, 0);
    pl_sim_free(s);
}

/* What follows the answer of a chat's turn is part of the conversation, and computed by the next.
 */
static void test_tail(void **state)
{
    pl_sim_options o = options();
    pl_sim *s = engine(&o);
    uint32_t t[20], all[64];
    fill(t, 20, 1);
    open_session(s, 0, "a", -1);
    for (int k = 0; k < 2; k++) {
        pl_sim_slot *slot;
        assert_null(ask_slot(s, k * SECOND, &(pl_sim_turn){.id = PL_STR("a")}, &slot));
        watch w = {.sim = s};
        pl_sim_ask ask = {.tokens = t,
                          .n = k ? 3 : 20,
                          .output_tokens = 4,
                          .out_seed = 7,
                          .slot = slot,
                          .tail = 99,
                          .tailed = true};
        assert_int_equal(pl_sim_ask_for(s, k * SECOND, &ask, &events, &w, &w.req), 0);
        drain(s, k * SECOND + SECOND / 2);
        assert_int_equal(w.finished, 1);
        assert_int_equal(w.cached, k ? 23 : 0);
        assert_int_equal(info_of(s, "a").info.tokens, k ? 33 : 25);
    }
    /* When its slot is lost, the conversation is prefilled again: it then is in the tree, tails and
     * all, and can be found without the session. */
    pl_sim_flush_cache(s);
    whole_turn(s, 2 * SECOND, "a", 5, 3, 1);
    for (int k = 0, at = 0; k < 2; k++) {
        int n = k ? 3 : 20;
        memcpy(all + at, t, (size_t)n * sizeof *t);
        at += n;
        for (int i = 0; i < 4; i++)
            all[at++] = pl_sim_output_token(7, i);
        all[at++] = 99;
    }
    assert_int_equal(plain(s, 4 * SECOND, all, 33, 1), 32);
    pl_sim_free(s);
}

static void test_refusals(void **state)
{
    pl_sim_options o = options();
    pl_sim *s = engine(&o);
    uint32_t t[20];
    fill(t, 20, 1);
    pl_sim_slot *slot;
    pl_sim_turn all = {.id = PL_STR("a"),
                       .replace = true,
                       .drop_previous_output = true,
                       .offset = 3,
                       .after = PL_STR("none")};
    assert_string_equal(ask_slot(s, 0, &all, &slot),
                        "Invalid request: session id a does not exist");
    assert_int_equal(open_session(s, 0, "a", -1), 0);
    pl_sim_turn good = {.id = PL_STR("a")};
    assert_null(ask_slot(s, 0, &good, &slot));
    watch w = {.sim = s};
    pl_sim_ask ask = {
        .tokens = t, .n = 10, .output_tokens = 20, .slot = slot, .name = PL_STR("turn-1")};
    assert_int_equal(pl_sim_ask_for(s, 0, &ask, &events, &w, &w.req), 0);
    assert_string_equal(ask_slot(s, 0, &all, &slot),
                        "Streaming session already has an active request.");
    pl_sim_req *none;
    assert_int_equal(pl_sim_ask_for(s, 0, &ask, &events, &w, &none), PL_EINVALID);
    drain(s, SECOND);
    assert_string_equal(ask_slot(s, SECOND, &all, &slot),
                        "Streaming sessions do not support replace.");
    all.replace = false;
    assert_string_equal(ask_slot(s, SECOND, &all, &slot),
                        "Streaming sessions do not support drop_previous_output.");
    all.drop_previous_output = false;
    assert_string_equal(ask_slot(s, SECOND, &all, &slot),
                        "Streaming sessions do not support offset.");
    all.offset = 0;
    assert_string_equal(ask_slot(s, SECOND, &all, &slot), "Invalid request session id");
    all.after = PL_STR("turn-1");
    assert_null(ask_slot(s, SECOND, &all, &slot));
    /* Refusals changed nothing: the next turn finds all of the first. */
    assert_int_equal(whole_turn(s, SECOND, "a", 2, 4, 1), 29);
    /* A session that takes no turns. */
    assert_int_equal(pl_sim_open(s, 0, &(pl_sim_session){.id = PL_STR("r"), .timeout_us = -1}), 0);
    assert_non_null(strstr(ask_slot(s, SECOND, &(pl_sim_turn){.id = PL_STR("r")}, &slot),
                           "not a streaming session"));
    /* Too long a turn is refused without harm. */
    uint32_t *much = calloc(400, sizeof *much);
    assert_null(ask_slot(s, SECOND, &good, &slot));
    ask = (pl_sim_ask){.tokens = much, .n = 370, .slot = slot};
    assert_int_equal(pl_sim_ask_for(s, SECOND, &ask, &events, &w, &w.req), PL_ELIMIT);
    free(much);
    assert_int_equal(whole_turn(s, 3 * SECOND, "a", 3, 4, 1), 34);
    char id[1026];
    memset(id, 'x', 1025);
    id[1025] = 0;
    assert_int_equal(open_session(s, 0, id, -1), PL_ELIMIT);
    pl_sim_free(s);
}

static void test_abort(void **state)
{
    pl_sim_options o = options();
    o.timing.api_us = 100;
    pl_sim *s = engine(&o);
    uint32_t t[40];
    fill(t, 40, 9);
    open_session(s, 0, "a", -1);
    /* In the first turn: nothing was said yet. */
    watch w = {.sim = s};
    assert_int_equal(turn(&w, 0, "a", t, 20, 10), 0);
    while (w.tokens < 3)
        pl_sim_step(s, pl_sim_next_us(s));
    pl_sim_abort(s, pl_sim_next_us(s) - 1, w.req);
    pl_sim_check(s);
    assert_int_equal(info_of(s, "a").info.tokens, 0);
    assert_int_equal(stats(s).used_tokens, 0);
    assert_int_equal(whole_turn(s, SECOND, "a", 9, 20, 10), 16); /* its prompt is in the tree */
    /* Before it runs: the slot stays as it is. */
    assert_int_equal(turn(&w, 2 * SECOND, "a", t, 8, 10), 0);
    pl_sim_abort(s, 2 * SECOND + 50, w.req);
    pl_sim_check(s);
    assert_int_equal(info_of(s, "a").info.kv_tokens, 29);
    assert_false(info_of(s, "a").info.inflight);
    /* While it runs, in its prefill and while it decodes: all is given back, what was said stays.
     */
    for (int tokens = 0; tokens <= 2; tokens += 2) {
        w = (watch){.sim = s};
        assert_int_equal(turn(&w, 3 * SECOND, "a", t, 8, 10), 0);
        while (!pl_sim_is_running(w.req) || w.tokens < tokens)
            pl_sim_step(s, pl_sim_next_us(s));
        pl_sim_abort(s, pl_sim_next_us(s) - 1, w.req);
        pl_sim_check(s);
        assert_int_equal(info_of(s, "a").info.kv_tokens, 0);
        assert_int_equal(info_of(s, "a").info.tokens, 30);
        assert_int_equal(stats(s).used_tokens, 0);
        /* All 34 are prefilled again, but what the tree has: the first prompt, then, since this is
         * a first turn again, all of its prompt. */
        if (!tokens)
            assert_int_equal(whole_turn(s, 4 * SECOND, "a", 9, 4, 1), 20);
        else
            break;
        pl_sim_close(s, 5 * SECOND, PL_STR("a"));
        open_session(s, 5 * SECOND, "a", -1);
        whole_turn(s, 5 * SECOND, "a", 9, 20, 10);
    }
    pl_sim_free(s);
}

static void test_timeout(void **state)
{
    pl_sim_options o = options();
    pl_sim *s = engine(&o);
    uint32_t t[20];
    fill(t, 20, 1);
    open_session(s, 0, "never", -1);
    open_session(s, 0, "a", 30 * SECOND);
    open_session(s, 5, "b", 10 * SECOND);
    assert_int_equal(pl_sim_next_us(s), 10 * SECOND + 5);
    drain(s, 10 * SECOND + 4);
    assert_true(info_of(s, "b").found);
    drain(s, 10 * SECOND + 5);
    assert_false(info_of(s, "b").found);
    assert_int_equal(pl_sim_next_us(s), 30 * SECOND);
    /* A turn starts the count anew, at its beginning. */
    watch w = {.sim = s};
    assert_int_equal(turn(&w, 20 * SECOND, "a", t, 20, 5000 / 20), 0);
    drain(s, 40 * SECOND);
    assert_int_equal(w.finished, 1);
    assert_int_equal(pl_sim_next_us(s), 50 * SECOND);
    /* A refused turn does not. */
    pl_sim_slot *slot;
    assert_non_null(
        ask_slot(s, 45 * SECOND, &(pl_sim_turn){.id = PL_STR("a"), .replace = true}, &slot));
    assert_int_equal(pl_sim_next_us(s), 50 * SECOND);
    assert_true(stats(s).held_tokens > 0);
    drain(s, 50 * SECOND);
    assert_false(info_of(s, "a").found);
    assert_int_equal(stats(s).used_tokens, 0);
    assert_int_equal(stats(s).timed_out, 2);
    assert_int_equal(pl_sim_next_us(s), INT64_MAX);
    /* Whoever does not step in time finds it gone all the same. */
    open_session(s, 51 * SECOND, "c", SECOND);
    assert_non_null(ask_slot(s, 53 * SECOND, &(pl_sim_turn){.id = PL_STR("c")}, &slot));
    /* While its turn is under way, it is over when that ends. */
    open_session(s, 60 * SECOND, "d", 10000);
    w = (watch){.sim = s};
    assert_int_equal(turn(&w, 60 * SECOND, "d", t, 20, 50), 0);
    drain(s, 60 * SECOND + 20000);
    assert_int_equal(w.finished, 0);
    assert_true(info_of(s, "d").info.closing);
    assert_string_equal(ask_slot(s, 60 * SECOND + 20000, &(pl_sim_turn){.id = PL_STR("d")}, &slot),
                        "Invalid request: close was requested for session d");
    drain(s, 61 * SECOND);
    assert_int_equal(w.finished, 1);
    assert_int_equal(w.tokens, 50);
    assert_false(info_of(s, "d").found);
    pl_sim_close(s, 61 * SECOND, PL_STR("never"));
    assert_int_equal(stats(s).sessions, 0);
    assert_int_equal(stats(s).used_tokens, 0);
    pl_sim_free(s);
}

static void test_deferred_close(void **state)
{
    pl_sim_options o = options();
    pl_sim *s = engine(&o);
    uint32_t t[20];
    fill(t, 20, 1);
    open_session(s, 0, "a", -1);
    whole_turn(s, 0, "a", 1, 20, 4);
    /* In the callbacks, too; its name is free again when the last callback runs. */
    watch w = {.sim = s, .close_at_first = "a", .open_at_end = "a"};
    assert_int_equal(turn(&w, SECOND, "a", t, 8, 5), 0);
    while (!w.tokens)
        pl_sim_step(s, pl_sim_next_us(s));
    assert_true(info_of(s, "a").info.closing);
    assert_int_equal(open_session(s, SECOND, "a", -1), PL_EEXISTS);
    assert_true(pl_sim_close(s, SECOND, PL_STR("a"))); /* again: nothing more happens */
    drain(s, 2 * SECOND);
    assert_int_equal(w.finished, 1);
    assert_int_equal(w.tokens, 5);
    assert_true(info_of(s, "a").found);
    assert_int_equal(info_of(s, "a").info.tokens, 0);
    assert_int_equal(stats(s).held_tokens, 0);
    assert_int_equal(stats(s).closed, 1);
    /* An aborted turn ends it as well. */
    w = (watch){.sim = s};
    assert_int_equal(turn(&w, 3 * SECOND, "a", t, 8, 5), 0);
    pl_sim_step(s, pl_sim_next_us(s));
    pl_sim_close(s, 3 * SECOND, PL_STR("a"));
    assert_true(info_of(s, "a").found);
    pl_sim_abort(s, 3 * SECOND, w.req);
    pl_sim_check(s);
    assert_false(info_of(s, "a").found);
    assert_int_equal(stats(s).used_tokens, 0);
    pl_sim_free(s);
}

/* What sessions hold is not evicted: a request waits until one is closed, without the engine
 * turning in circles. */
static void test_stall(void **state)
{
    pl_sim_options o = options();
    pl_sim *s = engine(&o);
    uint32_t t[200];
    char id[2] = "a";
    for (; *id <= 'c'; ++*id) {
        open_session(s, 0, id, *id == 'b' ? 60 * SECOND : -1);
        whole_turn(s, (*id - 'a') * SECOND, id, (uint32_t)*id, 90, 10);
    }
    fill(t, 200, 1);
    watch w = {.sim = s};
    assert_int_equal(pl_sim_submit(s, 4 * SECOND, t, 150, 4, 0, 7, &events, &w, &w.req), 0);
    drain(s, 5 * SECOND);
    assert_false(pl_sim_is_running(w.req));
    assert_true(stats(s).stalled);
    assert_int_equal(stats(s).evicted_tokens, 0);
    assert_int_equal(pl_sim_next_us(s), 61 * SECOND); /* when b times out */
    drain(s, 61 * SECOND + SECOND / 2);
    assert_int_equal(w.finished, 1);
    assert_false(stats(s).stalled);
    /* Two turns outgrow the pool together: one falls back to what its slot held, and waits until
     * there is room, too. */
    watch v = {.sim = s};
    w = (watch){.sim = s};
    assert_int_equal(turn(&w, 63 * SECOND, "a", t, 20, 110), 0);
    assert_int_equal(turn(&v, 63 * SECOND, "c", t, 20, 110), 0);
    drain(s, 70 * SECOND);
    assert_int_equal(w.finished, 1);
    assert_int_equal(v.finished, 0); /* 230 and 230 of 400 */
    assert_true(stats(s).preempted > 0);
    assert_int_equal(info_of(s, "c").info.kv_tokens, 99);
    assert_true(stats(s).stalled);
    assert_int_equal(info_of(s, "a").info.tokens, 230);
    pl_sim_close(s, 71 * SECOND, PL_STR("a"));
    drain(s, 75 * SECOND);
    assert_int_equal(v.finished, 1);
    assert_int_equal(v.tokens, 110);
    assert_int_equal(w.cached, 99);
    assert_int_equal(v.cached, 99);
    assert_int_equal(info_of(s, "c").info.tokens, 230);
    pl_sim_free(s);
}

/* A turn that no room is left for waits for the end of another session, and is not lost. */
static void test_turn_outgrows_pool(void **state)
{
    pl_sim_options o = options();
    pl_sim *s = engine(&o);
    uint32_t t[20];
    fill(t, 20, 1);
    open_session(s, 0, "a", -1);
    open_session(s, 0, "b", -1);
    whole_turn(s, 0, "a", 2, 190, 10);
    whole_turn(s, SECOND, "b", 3, 90, 10);
    watch w = {.sim = s};
    assert_int_equal(turn(&w, 2 * SECOND, "a", t, 20, 160), 0);
    drain(s, 10 * SECOND);
    assert_int_equal(w.finished, 0);
    assert_true(stats(s).stalled);
    assert_true(stats(s).preempted > 0);
    assert_int_equal(pl_sim_next_us(s), INT64_MAX);
    int before = w.tokens;
    assert_true(before > 50);
    pl_sim_close(s, 11 * SECOND, PL_STR("b"));
    drain(s, 20 * SECOND);
    assert_int_equal(w.finished, 1);
    assert_int_equal(w.tokens, 160);
    assert_int_equal(info_of(s, "a").info.tokens, 380);
    /* Aborted while it waits after a preemption: it has run, so the slot goes. */
    open_session(s, 20 * SECOND, "d", -1);
    pl_sim_close(s, 20 * SECOND, PL_STR("a"));
    open_session(s, 20 * SECOND, "a", -1);
    whole_turn(s, 21 * SECOND, "a", 2, 190, 10);
    whole_turn(s, 22 * SECOND, "d", 3, 90, 10);
    w = (watch){.sim = s};
    assert_int_equal(turn(&w, 23 * SECOND, "a", t, 20, 160), 0);
    drain(s, 30 * SECOND);
    assert_true(stats(s).stalled);
    pl_sim_abort(s, 31 * SECOND, w.req);
    pl_sim_check(s);
    assert_int_equal(info_of(s, "a").info.kv_tokens, 0);
    assert_int_equal(info_of(s, "a").info.tokens, 200);
    assert_int_equal(stats(s).waiting_tokens, 0);
    pl_sim_free(s);
}

static int submit(watch *w, int64_t now, uint32_t salt, int n, int priority, int64_t retain_us)
{
    uint32_t t[400];
    fill(t, n, salt);
    pl_sim_ask ask = {
        .tokens = t, .n = n, .output_tokens = 1, .priority = priority, .retain_us = retain_us};
    *w = (watch){.sim = w->sim};
    int rc = pl_sim_ask_for(w->sim, now, &ask, &events, w, &w->req);
    drain(w->sim, now + SECOND / 2);
    return rc;
}

static int cached(pl_sim *s, int64_t now, uint32_t salt, int n)
{
    watch w = {.sim = s};
    submit(&w, now, salt, n, 0, 0);
    return w.cached;
}

static void test_retention(void **state)
{
    pl_sim_options o = options();
    for (int late = 0; late < 2; late++) {
        pl_sim *s = engine(&o);
        watch w = {.sim = s};
        submit(&w, 0, 1, 100, 0, 60 * SECOND); /* the oldest, retained */
        submit(&w, 1 * SECOND, 2, 100, 0, 0);
        submit(&w, 2 * SECOND, 3, 100, 0, 0);
        assert_int_equal(stats(s).retained_tokens, 100);
        int64_t now = late ? 61 * SECOND : 3 * SECOND;
        submit(&w, now, 4, 120, 0, 0); /* 20 tokens must go: the oldest that is not retained */
        assert_int_equal(cached(s, now + SECOND, 1, 100), late ? 0 : 96);
        if (!late) {
            /* What is retained goes last, but it goes. */
            submit(&w, now + 2 * SECOND, 5, 396, 0, 0);
            assert_int_equal(stats(s).retained_tokens, 0);
        }
        pl_sim_free(s);
    }
}

static void test_priority(void **state)
{
    for (int policy = PL_RADIX_LRU; policy <= PL_RADIX_PRIORITY; policy++) {
        pl_sim_options o = options();
        o.eviction = (pl_radix_policy)policy;
        pl_sim *s = engine(&o);
        watch w = {.sim = s};
        submit(&w, 0, 1, 100, 5, 0); /* oldest, of the highest priority */
        submit(&w, 1 * SECOND, 2, 100, 1, 0);
        submit(&w, 2 * SECOND, 2, 100, 1, 0); /* used twice */
        submit(&w, 3 * SECOND, 3, 100, 3, 0); /* youngest */
        submit(&w, 4 * SECOND, 4, 120, 9, 0); /* one must go */
        int gone = policy == PL_RADIX_LRU ? 1 : policy == PL_RADIX_PRIORITY ? 2 : 1;
        assert_int_equal(cached(s, 5 * SECOND, (uint32_t)gone, 4), 0);
        pl_sim_free(s);
    }
    /* Used once or twice, where the youngest was used once: frequency beats recency. */
    for (int policy = PL_RADIX_LFU; policy <= PL_RADIX_SLRU; policy++) {
        pl_sim_options o = options();
        o.eviction = (pl_radix_policy)policy;
        pl_sim *s = engine(&o);
        watch w = {.sim = s};
        submit(&w, 0, 1, 100, 0, 0);
        submit(&w, 1 * SECOND, 1, 101, 0, 0);
        submit(&w, 2 * SECOND, 2, 100, 0, 0);
        submit(&w, 3 * SECOND, 2, 101, 0, 0);
        submit(&w, 4 * SECOND, 3, 100, 0, 0);
        submit(&w, 5 * SECOND, 4, 120, 0, 0);
        assert_int_equal(cached(s, 6 * SECOND, 1, 50), 48);
        pl_sim_free(s);
    }
}

/* --- storms --- */

enum { SESSIONS = 12, TURNS = 900 };

typedef struct model {
    bool open, closing;
    int tokens, kv;
    int new_tokens, out, tail;
    int64_t due_us, timeout_us; /* timeout -1: none */
    watch *turn;                /* under way */
    bool ran;
} model;

typedef struct storm {
    pl_sim *s;
    pl_rng rng;
    pl_buf log;
    model m[SESSIONS];
    watch w[TURNS];
    int n;
    int64_t now;
    int refused, aborted, found;
} storm;

static pl_str name_of(int k)
{
    static char name[SESSIONS][8];
    snprintf(name[k], sizeof name[k], "s%d", k);
    return pl_str_c(name[k]);
}

/* What the steps up to now have done to the conversations. */
static void settle(storm *z)
{
    for (int k = 0; k < SESSIONS; k++) {
        model *m = &z->m[k];
        if (m->turn && m->turn->tokens)
            m->ran = true;
        if (m->turn && m->turn->finished) {
            if (m->kv) {
                assert_int_equal(m->turn->cached, m->kv);
                z->found++;
            }
            m->tokens += m->new_tokens + m->out;
            m->kv = m->out ? m->tokens - 1 : m->tokens;
            m->tokens += m->tail;
            if (m->timeout_us >= 0 && m->turn->end_us >= m->due_us)
                m->closing = true;
            m->turn = NULL;
            if (m->closing)
                *m = (model){0};
        }
        if (m->open && !m->turn && m->timeout_us >= 0 && m->due_us <= z->now)
            *m = (model){0};
        if (m->turn && m->timeout_us >= 0 && m->due_us <= z->now)
            m->closing = true;
        looked_up l = info_of(z->s, name_of(k).p);
        assert_int_equal(l.found, m->open);
        if (!m->open)
            continue;
        assert_int_equal(l.info.tokens, m->tokens);
        assert_int_equal(l.info.closing, m->closing);
        assert_int_equal(l.info.inflight, m->turn != NULL);
        if (!m->turn)
            assert_int_equal(l.info.kv_tokens, m->kv);
    }
    pl_sim_check(z->s);
}

static void go_to(storm *z, int64_t to)
{
    int64_t next;
    while ((next = pl_sim_next_us(z->s)) <= to && next != INT64_MAX) {
        pl_sim_step(z->s, next);
        z->now = next;
        settle(z);
    }
    pl_sim_step(z->s, to);
    z->now = to;
    settle(z);
}

static void take_turn(storm *z, int k)
{
    model *m = &z->m[k];
    pl_sim_turn ask_turn = {.id = name_of(k), .replace = pl_rng_below(&z->rng, 20) == 0};
    pl_errbuf why;
    pl_sim_slot *slot = pl_sim_turn_slot(z->s, z->now, &ask_turn, &why);
    assert_int_equal(slot != NULL, m->open && !m->closing && !m->turn && !ask_turn.replace);
    if (!slot) {
        z->refused++;
        return;
    }
    assert_int_equal(pl_sim_slot_tokens(slot), m->tokens);
    uint32_t t[64];
    int n = 1 + (int)pl_rng_below(&z->rng, 40), out = (int)pl_rng_below(&z->rng, 30);
    fill(t, n, pl_rng_below(&z->rng, 5));
    watch *w = &z->w[z->n];
    *w = (watch){.sim = z->s, .id = z->n, .log = &z->log};
    int tail = (int)pl_rng_below(&z->rng, 2);
    pl_sim_ask ask = {.tokens = t,
                      .n = n,
                      .output_tokens = out,
                      .priority = (int)pl_rng_below(&z->rng, 3),
                      .out_seed = (uint64_t)z->n,
                      .retain_us = pl_rng_below(&z->rng, 3) ? 0 : 200000,
                      .slot = slot,
                      .tail = 1,
                      .tailed = tail};
    int rc = pl_sim_ask_for(z->s, z->now, &ask, &events, w, &w->req);
    assert_int_equal(rc, (m->tokens + n + out + 3) / 4 * 4 > 400 ? PL_ELIMIT : 0);
    if (rc != 0)
        return;
    z->n++;
    m->turn = w;
    m->ran = false;
    m->new_tokens = n;
    m->out = out;
    m->tail = tail;
    if (m->timeout_us >= 0)
        m->due_us = z->now + m->timeout_us;
}

static void one_move(storm *z)
{
    int k = (int)pl_rng_below(&z->rng, SESSIONS);
    model *m = &z->m[k];
    switch (pl_rng_below(&z->rng, 12)) {
    case 0:
    case 1: {
        int64_t timeout = pl_rng_below(&z->rng, 2) ? (int64_t)pl_rng_below(&z->rng, 200000) : -1;
        int rc = pl_sim_open(
            z->s, z->now,
            &(pl_sim_session){.id = name_of(k), .streaming = true, .timeout_us = timeout});
        assert_int_equal(rc, m->open ? PL_EEXISTS : 0);
        if (rc == 0)
            *m = (model){.open = true, .timeout_us = timeout, .due_us = z->now + timeout};
        break;
    }
    case 2:
        assert_int_equal(pl_sim_close(z->s, z->now, name_of(k)), m->open);
        if (m->turn)
            m->closing = true;
        else
            *m = (model){0};
        break;
    case 3:
        if (m->turn) {
            bool ran = m->ran || pl_sim_is_running(m->turn->req);
            pl_sim_abort(z->s, z->now, m->turn->req);
            m->turn = NULL;
            z->aborted++;
            if (m->closing) {
                *m = (model){0};
                break;
            }
            int kv = info_of(z->s, name_of(k).p).info.kv_tokens;
            assert_true(kv == 0 || (!ran && kv == m->kv)); /* unseen: it ran and was preempted */
            m->kv = kv;
        }
        break;
    case 4:
        if (pl_rng_below(&z->rng, 10) == 0) {
            pl_sim_flush_cache(z->s);
            for (int i = 0; i < SESSIONS; i++)
                if (!z->m[i].turn)
                    z->m[i].kv = 0;
        }
        break;
    case 5:
    case 6: { /* beside them, requests without a session */
        watch *w = &z->w[z->n];
        uint32_t t[100];
        int n = 1 + (int)pl_rng_below(&z->rng, 99);
        fill(t, n, pl_rng_below(&z->rng, 5));
        *w = (watch){.sim = z->s, .id = z->n++, .log = &z->log};
        assert_int_equal(pl_sim_submit(z->s, z->now, t, n, (int)pl_rng_below(&z->rng, 30),
                                       (int)pl_rng_below(&z->rng, 3), 1, &events, w, &w->req),
                         0);
        break;
    }
    default:
        take_turn(z, k);
    }
    settle(z);
}

static pl_buf weather(uint64_t seed)
{
    storm *z = calloc(1, sizeof *z);
    pl_sim_options o = options();
    o.timing.api_us = 300;
    o.eviction = (pl_radix_policy)(seed % 4);
    o.prefix_cache = seed != 5;
    z->s = engine(&o);
    z->rng.state = seed;
    while (z->n < TURNS - 1) {
        one_move(z);
        if (pl_rng_below(&z->rng, 3) == 0)
            go_to(z, z->now + pl_rng_below(&z->rng, 20000));
    }
    /* Some requests may wait for the end of sessions. */
    for (int k = 0; k < SESSIONS; k++) {
        pl_sim_close(z->s, z->now, name_of(k));
        z->m[k].closing = z->m[k].turn != NULL;
        if (!z->m[k].turn)
            z->m[k] = (model){0};
    }
    /* And some for each other, each holding what the others need: until one is given up. */
    for (int k = 0; k <= SESSIONS; k++) {
        for (int64_t next; (next = pl_sim_next_us(z->s)) != INT64_MAX;)
            go_to(z, next);
        if (k == SESSIONS || !z->m[k].turn)
            continue;
        assert_true(stats(z->s).stalled);
        pl_sim_abort(z->s, z->now, z->m[k].turn->req);
        z->m[k] = (model){0};
        settle(z);
    }
    pl_sim_stats st = stats(z->s);
    assert_int_equal(st.finished + st.aborted, z->n);
    assert_int_equal(st.sessions + st.running + st.waiting, 0);
    assert_int_equal(st.held_tokens + st.used_tokens + st.waiting_tokens, 0);
    assert_int_equal(st.opened, st.closed + st.timed_out);
    assert_true(z->refused > 20 && z->aborted > 20 && z->found > 20 && st.timed_out > 0);
    assert_true(!o.prefix_cache || st.evicted_tokens > 0);
    pl_buf log = z->log;
    pl_sim_free(z->s);
    free(z);
    return log;
}

static void test_storms(void **state)
{
    for (uint64_t seed = 1; seed <= 8; seed++) {
        pl_buf a = weather(seed), b = weather(seed);
        assert_true(a.n > 1000);
        assert_true(pl_str_eq(pl_buf_str(&a), pl_buf_str(&b))); /* equal calls, equal events */
        pl_buf_free(&a);
        pl_buf_free(&b);
    }
}

/* An engine with sessions and turns in every state is freed without a leak. */
static void test_free_midway(void **state)
{
    pl_sim_options o = options();
    o.max_running = 1;
    pl_sim *s = engine(&o);
    uint32_t t[50];
    fill(t, 50, 70);
    watch w[2] = {{.sim = s}, {.sim = s}};
    open_session(s, 0, "a", -1);
    open_session(s, 0, "b", -1);
    open_session(s, 0, "c", SECOND);
    whole_turn(s, 0, "a", 1, 20, 4);
    turn(&w[0], SECOND, "a", t, 50, 20);
    pl_sim_step(s, SECOND + 10);
    turn(&w[1], SECOND + 10, "b", t, 50, 20);
    pl_sim_close(s, SECOND + 10, PL_STR("a"));
    pl_sim_check(s);
    pl_sim_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_turns),
        cmocka_unit_test(test_time_of_a_turn),
        cmocka_unit_test(test_tail),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_timeout),
        cmocka_unit_test(test_deferred_close),
        cmocka_unit_test(test_stall),
        cmocka_unit_test(test_turn_outgrows_pool),
        cmocka_unit_test(test_retention),
        cmocka_unit_test(test_priority),
        cmocka_unit_test(test_storms),
        cmocka_unit_test(test_free_midway),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
