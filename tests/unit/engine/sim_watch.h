/* What the tests of the simulated engine's sessions share: a request that is watched, an engine
 * with a timing that can be computed by hand, and the view of one session. */
#ifndef PL_TEST_SIM_WATCH_H
#define PL_TEST_SIM_WATCH_H

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

static inline void on_tokens(void *user, int64_t now_us, int from, int n)
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

static inline void on_finish(void *user, int64_t now_us, pl_sim_finish why)
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
static inline pl_sim_options options(void)
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

static inline pl_sim *engine(const pl_sim_options *o)
{
    pl_sim *s;
    pl_errbuf eb;
    assert_int_equal(pl_sim_new(o, &s, &eb), 0);
    return s;
}

static inline void fill(uint32_t *t, int n, uint32_t salt)
{
    for (int i = 0; i < n; i++)
        t[i] = salt * 1000003u + (uint32_t)i;
}

static inline int64_t drain(pl_sim *s, int64_t until)
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

static inline int open_session(pl_sim *s, int64_t now, const char *id, int64_t timeout_us)
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

static inline int turn(watch *w, int64_t now, const char *id, const uint32_t *t, int n, int out)
{
    pl_sim_slot *slot;
    const char *why = ask_slot(w->sim, now, &(pl_sim_turn){.id = pl_str_c(id)}, &slot);
    if (why)
        fail_msg("%s", why);
    pl_sim_ask ask = {.tokens = t, .n = n, .output_tokens = out, .out_seed = 7, .slot = slot};
    return pl_sim_ask_for(w->sim, now, &ask, &events, w, &w->req);
}

/* A turn from start to end; what it found. */
static inline int whole_turn(pl_sim *s, int64_t now, const char *id, uint32_t salt, int n, int out)
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

static inline int plain(pl_sim *s, int64_t now, const uint32_t *t, int n, int out)
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

static inline void look(void *user, const pl_sim_slot_info *info)
{
    looked_up *l = user;
    if (pl_str_eq(info->session.id, pl_str_c(l->id))) {
        l->info = *info;
        l->found = true;
    }
}

static inline looked_up info_of(const pl_sim *s, const char *id)
{
    looked_up l = {.id = id};
    pl_sim_each_slot(s, look, &l);
    return l;
}

static inline pl_sim_stats stats(const pl_sim *s)
{
    pl_sim_stats st;
    pl_sim_stats_of(s, &st);
    return st;
}

#endif
