/* Sessions of the simulated engine in random storms of turns, aborts, closes, timeouts, flushes and
 * other requests, against a plain model of each conversation, with every invariant checked after
 * each move; and very many sessions at once. */
#include "sim_watch.h"

enum { SESSIONS = 12, TURNS = 900 };

typedef struct model {
    bool open, closing;
    int tokens, kv;
    int prompt; /* of the turn that filled the slot: what the cache has of the session */
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
    bool cache;
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
            } else {
                m->prompt = m->tokens + m->new_tokens;
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
        if (m->turn)
            continue;
        assert_int_equal(l.info.kv_tokens, m->kv);
        assert_int_equal(l.info.prefix_tokens, m->kv && z->cache ? m->prompt - m->prompt % 4 : 0);
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
    z->cache = o.prefix_cache;
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

/* Each of many is found by its name, and goes at its own time. */
static void test_many(void **state)
{
    enum { MANY = 100000 };
    pl_sim_options o = options();
    pl_sim *s = engine(&o);
    char id[32];
    for (int i = 0; i < MANY; i++) {
        snprintf(id, sizeof id, "session-%d", i);
        int timeout = 1 + (int)((unsigned)i * 7919u % MANY);
        assert_int_equal(open_session(s, 0, id, timeout), 0);
    }
    assert_int_equal(stats(s).sessions, MANY);
    for (int i = 0; i < MANY; i += 999) {
        snprintf(id, sizeof id, "session-%d", i);
        int due = 1 + (int)((unsigned)i * 7919u % MANY);
        if (due > 50000)
            assert_true(pl_sim_close(s, 0, pl_str_c(id)));
    }
    int64_t next;
    uint64_t gone = 0;
    while ((next = pl_sim_next_us(s)) != INT64_MAX) {
        assert_true(next <= MANY);
        pl_sim_step(s, next);
        assert_int_equal(stats(s).timed_out, ++gone); /* no two are due at once */
    }
    assert_int_equal(stats(s).sessions, 0);
    assert_int_equal(stats(s).closed + gone, MANY);
    pl_sim_check(s);
    pl_sim_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_storms), cmocka_unit_test(test_many)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
