/* What the router knows of prompts, where each request brings a cache salt of its own: what is
 * known of other tenants stays, two salts have nothing in common, memory does not grow. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "kv/holdings.h"

enum { PAGE = 16, TOKENS = 64, SALTS = 200000 };
#define NONE ((pl_str){NULL, 0})

typedef struct fixture {
    uint64_t now_ns;
    pl_fleet *fleet;
    pl_view *view;
    const pl_model *model;
    pl_worker_state *w;
    pl_holdings *h;
    pl_holdings_loop *l;
    pl_arena arena;
    uint32_t ids[TOKENS];
} fixture;

static void drop_view(void *ctx, pl_view *v)
{
    (void)ctx;
    pl_view_unref(v);
}

static void begin(fixture *x, int trust)
{
    const pl_str model = PL_STR("m");
    const pl_engine_spec spec = {
        .url = PL_STR("http://127.0.0.1:1"), .models = &model, .models_n = 1, .block_tokens = PAGE};
    pl_engine *e;
    pl_errbuf eb;
    memset(x, 0, sizeof *x);
    x->now_ns = 1000000000;
    x->fleet = pl_fleet_new(drop_view, NULL);
    assert_non_null(x->fleet);
    assert_int_equal(pl_fleet_add(x->fleet, &spec, &e, &eb), 0);
    x->w = &e->workers[0];
    atomic_store(&e->health, PL_HEALTH_UP);
    atomic_store(&x->w->block_tokens, PAGE);
    atomic_store(&x->w->kv_trust, trust);
    pl_engine_unref(e);
    x->view = pl_fleet_view(x->fleet);
    x->model = pl_view_only_model(x->view);
    assert_non_null(x->model);
    pl_holdings_options o;
    pl_holdings_options_default(&o);
    o.clock = pl_clock_virtual(&x->now_ns);
    o.routed_bytes = 4 << 20;
    assert_int_equal(pl_holdings_new(&o, &x->h), 0);
    x->l = pl_holdings_loop_new(x->h);
    assert_non_null(x->l);
    for (uint32_t i = 0; i < TOKENS; i++)
        x->ids[i] = i + 1;
}

static void end(fixture *x)
{
    pl_arena_free(&x->arena);
    pl_holdings_loop_free(x->l);
    pl_holdings_free(x->h);
    pl_view_unref(x->view);
    pl_fleet_free(x->fleet);
}

/* Tokens of the prompt that the worker has; then the request goes there, if it is to. */
static uint32_t ask(fixture *x, pl_str salt, bool route)
{
    pl_prompt p;
    uint32_t stamp;
    assert_true(pl_prompt_tokens(x->l, x->model, x->ids, TOKENS, &x->arena, salt, &p));
    const pl_kv_hit *hit = &pl_prompt_match(x->l, &p, x->model, &stamp)[x->w->slot];
    uint32_t tokens = hit->stamp == stamp ? hit->device : 0;
    if (route)
        pl_prompt_routed(x->l, &p, x->w, tokens);
    pl_arena_reset(&x->arena);
    return tokens;
}

static pl_str salt_of(char text[32], int i)
{
    return (pl_str){text, (size_t)snprintf(text, 32, "request-%d", i)};
}

typedef enum how { SILENT, NAMED, UNNAMED } how;

/* Workers without events, with such that name the salts, and with such that do not. */
static void flood(how h)
{
    fixture x;
    char text[32];
    begin(&x, h == SILENT ? PL_KV_ROUTED : PL_KV_LIVE);
    pl_index *ix = pl_holdings_index(x.h);
    assert_int_not_equal(pl_index_space_open(ix, PL_STR("*"), PAGE, false, NONE), 0);
    if (h == NAMED)
        pl_index_seed(ix, x.w->slot, 0, pl_block_seed(NONE, PL_STR("mine")));
    assert_int_equal(ask(&x, PL_STR("mine"), true), 0);
    for (int i = 0; i < SALTS; i++) {
        pl_str salt = salt_of(text, i);
        x.now_ns += 10000;
        if (h == NAMED)
            pl_index_seed(ix, x.w->slot, 0, pl_block_seed(NONE, salt));
        assert_int_equal(ask(&x, salt, true), 0);
        if (i % 1000 == 0) { /* who comes again is known again */
            if (h == NAMED)
                pl_index_seed(ix, x.w->slot, 0, pl_block_seed(NONE, PL_STR("mine")));
            assert_int_equal(ask(&x, PL_STR("mine"), true), TOKENS);
        }
    }
    assert_int_equal(ask(&x, salt_of(text, SALTS - 1), false), TOKENS);
    assert_int_equal(ask(&x, NONE, false), 0);
    pl_holdings_stats st;
    pl_holdings_stats_of(x.h, &st);
    const pl_approx_stats *s = h == NAMED ? &st.predicted : &st.routed;
    assert_int_equal(s->inserted, SALTS + 1 + SALTS / 1000);
    assert_true(s->bytes <= 4 << 20);
    /* others, who were not there meanwhile, begin anew */
    assert_int_equal(ask(&x, PL_STR("theirs"), true), 0);
    assert_int_equal(ask(&x, PL_STR("theirs"), true), TOKENS);
    /* no event will tell of what no event names: longer than a prediction it is held to be true */
    x.now_ns += 20000000000;
    pl_holdings_advance(x.h);
    assert_int_equal(ask(&x, PL_STR("mine"), false), h == NAMED ? 0 : TOKENS);
    end(&x);
}

static void salts_without_end_and_what_was_routed(void **state)
{
    (void)state;
    flood(SILENT);
}

static void salts_without_end_and_predictions(void **state)
{
    (void)state;
    flood(NAMED);
}

static void salts_without_end_that_no_event_names(void **state)
{
    (void)state;
    flood(UNNAMED);
}

static void store(fixture *x, pl_index_space space, pl_str salt, uint64_t name)
{
    pl_block_space s;
    uint64_t local[TOKENS / PAGE], engine[TOKENS / PAGE];
    assert_int_equal(pl_block_space_init(&s, PAGE, false, NONE, salt), 0);
    assert_int_equal(pl_block_hash(&s, x->ids, TOKENS, local, NULL, TOKENS / PAGE), TOKENS / PAGE);
    for (uint64_t i = 0; i < TOKENS / PAGE; i++)
        engine[i] = name + i;
    assert_int_equal(pl_index_store(pl_holdings_index(x->h), space, x->w->slot, PL_TIER_DEVICE,
                                    NULL, engine, local, TOKENS / PAGE),
                     0);
}

/* What engines have published is found under its salt, however many others are asked for. */
static void salts_without_end_and_what_was_published(void **state)
{
    (void)state;
    fixture x;
    char text[32];
    begin(&x, PL_KV_LIVE);
    pl_index_space space =
        pl_index_space_open(pl_holdings_index(x.h), PL_STR("*"), PAGE, false, NONE);
    assert_int_not_equal(space, 0);
    store(&x, space, PL_STR("mine"), 1);
    for (int i = 0; i < SALTS; i++) {
        assert_int_equal(ask(&x, salt_of(text, i), false), 0);
        if (i % 1000 == 0)
            assert_int_equal(ask(&x, PL_STR("mine"), false), TOKENS);
    }
    store(&x, space, PL_STR("theirs"), 100);
    assert_int_equal(ask(&x, PL_STR("theirs"), false), TOKENS);
    assert_int_equal(ask(&x, NONE, false), 0);
    end(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(salts_without_end_and_what_was_routed),
        cmocka_unit_test(salts_without_end_and_predictions),
        cmocka_unit_test(salts_without_end_that_no_event_names),
        cmocka_unit_test(salts_without_end_and_what_was_published),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
