/* What the simulated engine tells of its prefix cache: put into a plain list of blocks, it equals
 * what the cache holds after every move of random storms with evictions, sessions, aborts, flushes
 * and preemptions; parents are told before their children and leave after them; names are
 * SGLang's. */
#include "sim_watch.h"

#include "engine/blocks.h"
#include "engine/radix.h"
#include "kv/page_hash.h"

enum { MOST = 512, PAGE = 4 };

/* The index of a naive listener. */
typedef struct listener {
    struct {
        pl_sim_kv_name name, parent;
        bool has_parent, seen;
    } block[MOST];
    int n;
    pl_page_hasher *hasher; /* checks names; NULL: they are not SGLang's */
    int stored, removed, cleared;
    int found; /* by compare */
} listener;

static bool same(const pl_sim_kv_name *a, const pl_sim_kv_name *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

static int find(const listener *l, const pl_sim_kv_name *name)
{
    int i = 0;
    while (i < l->n && !same(&l->block[i].name, name))
        i++;
    return i < l->n ? i : -1;
}

static void on_stored(void *user, const pl_sim_kv_run *run)
{
    listener *l = user;
    l->stored++;
    assert_int_equal(run->block_tokens, PAGE);
    assert_true(run->n >= 1 && l->n + run->n <= MOST);
    const pl_sim_kv_name *parent = run->parent;
    for (int i = 0; i < run->n; i++) {
        assert_true(!parent || find(l, parent) >= 0);
        assert_int_equal(find(l, &run->names[i]), -1);
        if (l->hasher) { /* over the tokens that are told */
            pl_page_space space = {.page_tokens = PAGE};
            pl_sim_kv_name want;
            int64_t wire;
            assert_int_equal(pl_page_hash(l->hasher, &space, parent ? parent->b : NULL,
                                          run->tokens + i * PAGE, PAGE, &wire, 1, want.b),
                             1);
            assert_true(same(&want, &run->names[i]));
            assert_int_equal(pl_sim_kv_sglang(&run->names[i]), wire);
        }
        l->block[l->n].name = run->names[i];
        l->block[l->n].has_parent = parent != NULL;
        if (parent)
            l->block[l->n].parent = *parent;
        l->n++;
        parent = &run->names[i];
    }
}

static void on_removed(void *user, const pl_sim_kv_run *run)
{
    listener *l = user;
    l->removed++;
    for (int i = 0; i < run->n; i++) {
        int at = find(l, &run->names[i]);
        assert_true(at >= 0);
        l->block[at] = l->block[--l->n];
    }
    for (int i = 0; i < l->n; i++) /* no block is left whose parent is gone */
        for (int k = 0; k < run->n; k++)
            assert_false(l->block[i].has_parent && same(&l->block[i].parent, &run->names[k]));
}

static void on_cleared(void *user)
{
    listener *l = user;
    l->cleared++;
    l->n = 0;
}

static const pl_sim_kv_events telling = {on_stored, on_removed, on_cleared};

static void compare_run(void *user, const pl_sim_kv_run *run)
{
    listener *l = user;
    for (int i = 0; i < run->n; i++) {
        int at = find(l, &run->names[i]);
        assert_true(at >= 0);
        const pl_sim_kv_name *parent = i ? &run->names[i - 1] : run->parent;
        assert_int_equal(l->block[at].has_parent, parent != NULL);
        assert_true(!parent || same(&l->block[at].parent, parent));
        l->found++;
    }
}

static void compare(listener *l, const pl_sim *s)
{
    l->found = 0;
    pl_sim_each_kv(s, compare_run, l);
    assert_int_equal(l->found, l->n);
}

static pl_sim *watched(const pl_sim_options *o, listener *l, pl_sim_kv_names names)
{
    pl_sim *s = engine(o);
    assert_int_equal(pl_sim_watch_kv(s, &telling, l, names), 0);
    return s;
}

/* --- by hand --- */

static void test_names(void **state)
{
    listener l = {.hasher = pl_page_hasher_new()};
    pl_sim_options o = options();
    pl_sim *s = watched(&o, &l, PL_SIM_KV_SHA256);
    const uint32_t t[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    plain(s, 0, t, 9, 0);
    assert_int_equal(l.stored, 1);
    assert_int_equal(l.n, 2); /* the ninth token fills no block */
    /* SGLang's published vector for [1, 2, 3, 4] in pages of 4 */
    assert_int_equal(pl_sim_kv_sglang(&l.block[0].name), -3488128144981237669);
    assert_false(l.block[0].has_parent);
    /* A longer prompt tells only what is new of it, below what was there. */
    const uint32_t longer[] = {1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14};
    plain(s, SECOND, longer, 13, 0);
    assert_int_equal(l.stored, 2);
    assert_int_equal(l.n, 3);
    assert_true(same(&l.block[2].parent, &l.block[1].name));
    /* One that leaves it in the middle of a run branches off the block before. */
    const uint32_t branch[] = {1, 2, 3, 4, 20, 21, 22, 23, 24};
    plain(s, 2 * SECOND, branch, 9, 0);
    assert_int_equal(l.n, 4);
    assert_true(same(&l.block[3].parent, &l.block[0].name));
    plain(s, 3 * SECOND, longer, 13, 0);
    assert_int_equal(l.stored, 3); /* all there */
    compare(&l, s);
    assert_int_equal(pl_sim_watch_kv(s, &telling, &l, PL_SIM_KV_SHA256), PL_EINVALID);
    pl_page_hasher_free(l.hasher);
    pl_sim_free(s);
}

/* The answer's tokens are told with the prompt's, but for the last, which is never computed. */
static void test_answer(void **state)
{
    listener l = {0};
    pl_sim_options o = options();
    pl_sim *s = watched(&o, &l, PL_SIM_KV_QUICK);
    uint32_t t[8];
    fill(t, 8, 1);
    plain(s, 0, t, 8, 8);
    assert_int_equal(l.stored, 2); /* at the end of the prefill, at the end of the answer */
    assert_int_equal(l.n, 3);
    plain(s, SECOND, t, 8, 9);
    assert_int_equal(l.n, 4);
    compare(&l, s);
    pl_sim_free(s);
}

static void test_flush(void **state)
{
    listener l = {0};
    pl_sim_options o = options();
    pl_sim *s = watched(&o, &l, PL_SIM_KV_QUICK);
    uint32_t t[40];
    fill(t, 40, 1);
    plain(s, 0, t, 40, 0);
    assert_int_equal(l.n, 10);
    pl_sim_flush_cache(s);
    assert_int_equal(l.cleared, 1);
    assert_int_equal(l.removed, 0);
    assert_int_equal(l.n, 0);
    compare(&l, s);
    /* While a request holds some of it, what goes is told block by block. */
    plain(s, SECOND, t, 40, 0);
    watch w = {.sim = s};
    assert_int_equal(pl_sim_submit(s, 2 * SECOND, t, 20, 50, 0, 1, &events, &w, &w.req), 0);
    pl_sim_step(s, 2 * SECOND);
    pl_sim_flush_cache(s);
    assert_int_equal(l.cleared, 1);
    assert_int_equal(l.removed, 1);
    assert_true(l.n > 0);
    compare(&l, s);
    pl_sim_abort(s, 2 * SECOND, w.req);
    pl_sim_flush_cache(s);
    assert_int_equal(l.cleared, 2);
    pl_sim_free(s);
}

/* Of a session, only the first turn's prompt is told. */
static void test_session(void **state)
{
    listener l = {0};
    pl_sim_options o = options();
    pl_sim *s = watched(&o, &l, PL_SIM_KV_QUICK);
    assert_int_equal(open_session(s, 0, "a", -1), 0);
    assert_int_equal(whole_turn(s, 0, "a", 1, 16, 12), 0);
    assert_int_equal(l.stored, 1);
    assert_int_equal(l.n, 4);
    for (int i = 1; i < 6; i++)
        assert_true(whole_turn(s, i * SECOND, "a", 2, 20, 12) > 0);
    assert_int_equal(l.stored, 1);
    assert_int_equal(l.n, 4);
    assert_true(pl_sim_close(s, 9 * SECOND, PL_STR("a")));
    assert_int_equal(l.removed + l.cleared, 0); /* it stays cached, as any prompt */
    compare(&l, s);
    pl_sim_free(s);
}

static void test_no_cache(void **state)
{
    listener l = {0};
    pl_sim_options o = options();
    o.prefix_cache = false;
    pl_sim *s = watched(&o, &l, PL_SIM_KV_SHA256);
    uint32_t t[40];
    fill(t, 40, 1);
    plain(s, 0, t, 40, 10);
    assert_int_equal(l.stored + l.removed + l.cleared, 0);
    pl_sim_free(s);
}

/* --- storms --- */

enum { SESSIONS = 6, REQUESTS = 700 };

typedef struct storm {
    pl_sim *s;
    listener l;
    pl_rng rng;
    watch w[REQUESTS];
    int n;
    int64_t now;
} storm;

static void go_to(storm *z, int64_t to)
{
    int64_t next;
    while ((next = pl_sim_next_us(z->s)) <= to && next != INT64_MAX) {
        pl_sim_step(z->s, next);
        compare(&z->l, z->s);
    }
    pl_sim_step(z->s, z->now = to);
    compare(&z->l, z->s);
}

static void one_move(storm *z)
{
    char id[8];
    snprintf(id, sizeof id, "s%u", (unsigned)pl_rng_below(&z->rng, SESSIONS));
    watch *w = &z->w[z->n];
    *w = (watch){.sim = z->s};
    uint32_t t[150];
    fill(t, 150, (uint32_t)pl_rng_below(&z->rng, 6)); /* so that prompts share beginnings, */
    int n = 1 + (int)pl_rng_below(&z->rng, 120);
    for (int i = (int)pl_rng_below(&z->rng, (uint32_t)n); i < n; i += 31)
        t[i] += (uint32_t)pl_rng_below(&z->rng, 2); /* and part anywhere */
    pl_sim_ask ask = {.tokens = t,
                      .n = n,
                      .output_tokens = (int)pl_rng_below(&z->rng, 40),
                      .priority = (int)pl_rng_below(&z->rng, 3),
                      .out_seed = pl_rng_below(&z->rng, 4),
                      .retain_us = pl_rng_below(&z->rng, 4) ? 0 : 100000};
    switch (pl_rng_below(&z->rng, 14)) {
    case 0:
        pl_sim_open(z->s, z->now,
                    &(pl_sim_session){.id = pl_str_c(id), .streaming = true, .timeout_us = 400000});
        break;
    case 1:
        pl_sim_close(z->s, z->now, pl_str_c(id));
        break;
    case 2:
        if (pl_rng_below(&z->rng, 4) == 0)
            pl_sim_flush_cache(z->s);
        break;
    case 3:
    case 4:
        w = &z->w[pl_rng_below(&z->rng, (uint32_t)z->n + 1)];
        if (w->req) {
            pl_sim_abort(z->s, z->now, w->req);
            w->req = NULL;
        }
        break;
    case 5:
    case 6:
    case 7: {
        const char *no = ask_slot(z->s, z->now, &(pl_sim_turn){.id = pl_str_c(id)}, &ask.slot);
        ask.n = n % 30 + 1;
        if (!no && pl_sim_ask_for(z->s, z->now, &ask, &events, w, &w->req) == 0)
            z->n++;
        break;
    }
    default:
        assert_int_equal(pl_sim_ask_for(z->s, z->now, &ask, &events, w, &w->req), 0);
        z->n++;
    }
    compare(&z->l, z->s);
}

static void weather(uint64_t seed)
{
    storm *z = calloc(1, sizeof *z);
    pl_sim_options o = options();
    o.eviction = (pl_radix_policy)(seed % 4);
    z->s = watched(&o, &z->l, seed == 1 ? PL_SIM_KV_QUICK : PL_SIM_KV_SHA256);
    z->l.hasher = seed == 1 ? NULL : pl_page_hasher_new();
    z->rng.state = seed;
    while (z->n < REQUESTS - 1) {
        one_move(z);
        if (pl_rng_below(&z->rng, 3) == 0)
            go_to(z, z->now + pl_rng_below(&z->rng, 30000));
    }
    pl_sim_check(z->s);
    pl_sim_stats st = stats(z->s);
    assert_true(st.preempted > 0 && st.evicted_tokens > 1000 && st.turns > 20);
    assert_true(z->l.stored > 100 && z->l.removed > 50 && z->l.cleared > 0);
    pl_page_hasher_free(z->l.hasher);
    pl_sim_free(z->s);
    free(z);
}

static void test_storms(void **state)
{
    for (uint64_t seed = 1; seed <= 6; seed++)
        weather(seed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),    cmocka_unit_test(test_answer),
        cmocka_unit_test(test_flush),    cmocka_unit_test(test_session),
        cmocka_unit_test(test_no_cache), cmocka_unit_test(test_storms),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
