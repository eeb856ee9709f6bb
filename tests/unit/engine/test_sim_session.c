/* Sessions of the simulated engine: what a turn finds and holds, refusals, aborts, closing and
 * timing out in every state, pressure on the pool, retention. Storms are in test_sim_storm.c. */
#include "sim_watch.h"

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

/* --- a known figure --- */

static double usage(const pl_sim *s)
{
    pl_sim_stats st = stats(s);
    return (double)(st.pool_tokens - st.available_tokens) / (double)st.pool_tokens;
}

/* One agent, and five sub-agents one after the other, each in a session of its own: how full the
 * pool is when each has said its last and when it is closed, against figures that another model of
 * the same load gave. */
static void test_pressure_of_agents(void **state)
{
    static const struct {
        int turns, growth;
        double peak, floor;
    } sub[5] = {{12, 5900, .42, .054},
                {11, 4500, .31, .060},
                {9, 4700, .28, .067},
                {15, 4350, .41, .074},
                {10, 6000, .38, .080}};
    pl_sim_options o;
    pl_sim_options_default(&o);
    pl_sim *s = engine(&o);
    uint32_t *t = calloc(20000, sizeof *t);
    fill(t, 8400, 1);
    int64_t now = 0;
    watch w = {.sim = s};
    pl_sim_submit(s, now, t, 8400, 96, 50, 7, &events, &w, &w.req);
    drain(s, now += 60 * SECOND);
    for (int k = 0; k < 5; k++) {
        char id[2] = {(char)('a' + k), 0};
        open_session(s, now, id, -1);
        uint32_t *said = calloc(6000, sizeof *said);
        for (int i = 0; i < sub[k].turns; i++) {
            int n = i ? sub[k].growth - 400 : 1200;
            fill(said, n, (uint32_t)(100 * k + i + 2));
            w = (watch){.sim = s};
            assert_int_equal(turn(&w, now, id, said, n, 400), 0);
            drain(s, now += 60 * SECOND);
            assert_int_equal(w.finished, 1);
            assert_int_equal(w.cached, i ? 1200 + 400 - 1 + (i - 1) * sub[k].growth : 0);
        }
        free(said);
        assert_true(usage(s) > sub[k].peak - .006 && usage(s) < sub[k].peak + .006);
        pl_sim_close(s, now, pl_str_c(id));
        assert_true(usage(s) > sub[k].floor - .001 && usage(s) < sub[k].floor + .001);
    }
    assert_int_equal(stats(s).evicted_tokens, 0);
    /* And the agent still finds all that it said. */
    for (int i = 0; i < 96; i++)
        t[8400 + i] = pl_sim_output_token(7, i);
    assert_int_equal(plain(s, now, t, 11996, 1), 8480);
    free(t);
    pl_sim_free(s);
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
        cmocka_unit_test(test_pressure_of_agents),
        cmocka_unit_test(test_free_midway),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
