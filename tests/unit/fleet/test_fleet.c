/* Fleet: slots and generations, views against a naive search through what was configured, when a
 * view is published and in which order, and all of it from several threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/arena.h"
#include "base/rng.h"
#include "fleet/fleet.h"
#include "policy_abi.h"

typedef struct subscriber {
    pl_fleet *fleet;
    pl_view *view; /* last published */
    int published;
    bool disorder;
} subscriber;

static void subscribe(void *ctx, pl_view *v)
{
    subscriber *s = ctx;
    s->published++;
    if (s->view && v->version <= s->view->version)
        s->disorder = true;
    pl_view_unref(s->view);
    s->view = v;
    pl_view *again = pl_fleet_view(s->fleet); /* reading is allowed here */
    if (again != v)
        s->disorder = true;
    pl_view_unref(again);
}

static void open_fleet(subscriber *s)
{
    *s = (subscriber){0};
    s->fleet = pl_fleet_new(subscribe, s);
    assert_non_null(s->fleet);
}

static void close_fleet(subscriber *s)
{
    assert_false(s->disorder);
    pl_view_unref(s->view);
    pl_fleet_free(s->fleet);
}

static pl_engine *add(subscriber *s, const char *name, int dp, const char *models)
{
    pl_str ids[8], rest = pl_str_c(models);
    int n = 0;
    while (rest.n && pl_str_cut(&rest, ' ', &ids[n]))
        n++;
    pl_engine_spec spec = {.url = PL_STR("http://h:1"),
                           .name = pl_str_c(name),
                           .dp_size = dp,
                           .models = n ? ids : NULL,
                           .models_n = n};
    pl_engine *e = NULL;
    pl_errbuf eb = {""};
    if (pl_fleet_add(s->fleet, &spec, &e, &eb) != 0)
        fail_msg("%s: %s", name, eb.text);
    return e;
}

/* "name/rank@slot ..." of a list of workers */
static const char *text(pl_worker_state *const *w, int n)
{
    static char out[2000];
    size_t at = 0;
    out[0] = 0;
    for (int i = 0; i < n; i++)
        at += (size_t)snprintf(out + at, sizeof out - at, "%s%s@%d", i ? " " : "", w[i]->name,
                               w[i]->slot);
    return out;
}

static const char *model_text(const pl_view *v, const char *id)
{
    const pl_model *m = pl_view_model(v, pl_str_c(id));
    return m ? text(m->workers, m->workers_n) : "none";
}

static void views_show_models_in_order(void **state)
{
    (void)state;
    subscriber s;
    open_fleet(&s);
    pl_view *empty = pl_fleet_view(s.fleet);
    assert_int_equal(empty->engines_n + empty->models_n + empty->workers_n, 0);
    assert_null(pl_view_model(empty, PL_STR("m")));
    assert_null(pl_view_only_model(empty));
    pl_engine *a = add(&s, "a", 2, "zeta alpha zeta");
    assert_int_equal(s.view->models_n, 2);
    assert_true(pl_str_eq(s.view->models[0].id, PL_STR("alpha")));
    assert_null(pl_view_only_model(s.view));
    pl_engine *b = add(&s, "b", 1, "alpha");
    pl_engine *c = add(&s, "c", 1, "");
    assert_string_equal(model_text(s.view, "alpha"), "a/0@0 a/1@1 b@2");
    assert_string_equal(model_text(s.view, "zeta"), "a/0@0 a/1@1");
    assert_string_equal(model_text(s.view, "alph"), "none");
    assert_string_equal(model_text(s.view, "alphaa"), "none");
    assert_string_equal(model_text(s.view, ""), "none");
    assert_string_equal(text(s.view->workers, s.view->workers_n), "a/0@0 a/1@1 b@2 c@3");
    assert_int_equal(s.view->engines_n, 3);
    assert_int_equal(empty->workers_n, 0); /* a view never changes */
    const pl_model *alpha = pl_view_model(s.view, PL_STR("alpha"));
    assert_true(pl_model_has(alpha, &b->workers[0]) && pl_model_has(alpha, &a->workers[1]));
    assert_false(pl_model_has(alpha, &c->workers[0]));
    pl_view_unref(empty);
    pl_engine_unref(a);
    pl_engine_unref(b);
    pl_engine_unref(c);
    close_fleet(&s);
}

static void the_only_model(void **state)
{
    (void)state;
    subscriber s;
    open_fleet(&s);
    pl_engine_unref(add(&s, "a", 1, "m"));
    pl_engine_unref(add(&s, "b", 1, "m"));
    assert_ptr_equal(pl_view_only_model(s.view), pl_view_model(s.view, PL_STR("m")));
    assert_non_null(pl_view_only_model(s.view));
    close_fleet(&s);
}

static void names_are_unique(void **state)
{
    (void)state;
    subscriber s;
    open_fleet(&s);
    pl_engine *a = add(&s, "a", 1, "");
    pl_errbuf eb = {""};
    pl_engine *e = a;
    pl_engine_spec spec = {.url = PL_STR("http://other"), .name = PL_STR("a")};
    int before = s.published;
    assert_int_equal(pl_fleet_add(s.fleet, &spec, &e, &eb), PL_EEXISTS);
    assert_null(e);
    assert_non_null(strstr(eb.text, "\"a\""));
    assert_non_null(strstr(eb.text, "http://h:1"));
    assert_int_equal(s.published, before);
    spec.url = PL_STR("nonsense");
    assert_int_equal(pl_fleet_add(s.fleet, &spec, NULL, NULL), PL_EINVALID);
    pl_engine *found = pl_fleet_find(s.fleet, PL_STR("a"));
    assert_ptr_equal(found, a);
    pl_engine_unref(found);
    assert_null(pl_fleet_find(s.fleet, PL_STR("b")));
    assert_int_equal(pl_fleet_remove(s.fleet, a), 0);
    assert_null(pl_fleet_find(s.fleet, PL_STR("a")));
    assert_int_equal(pl_fleet_add(s.fleet, &spec, NULL, NULL), PL_EINVALID);
    spec.url = PL_STR("http://other");
    assert_int_equal(pl_fleet_add(s.fleet, &spec, NULL, &eb), 0); /* the name is free at once */
    pl_engine_unref(a);
    close_fleet(&s);
}

static void a_slot_waits_for_the_last_request(void **state)
{
    (void)state;
    subscriber s;
    open_fleet(&s);
    pl_engine *a = add(&s, "a", 1, ""), *b = add(&s, "b", 2, "");
    int first = a->workers[0].generation;
    assert_int_equal(pl_fleet_remove(s.fleet, a), 0);
    assert_int_equal(a->admin, PL_ENGINE_REMOVED);
    pl_engine *c = add(&s, "c", 1, ""); /* somebody still holds a */
    assert_int_equal(c->workers[0].slot, 3);
    pl_engine_unref(a);
    pl_engine *d = add(&s, "d", 1, "");
    assert_int_equal(d->workers[0].slot, 0);
    assert_true(d->workers[0].generation > first);
    assert_int_equal(pl_fleet_remove(s.fleet, b), 0);
    pl_engine_unref(b);
    pl_engine *e = add(&s, "e", 3, ""); /* fills the hole, then goes on behind */
    assert_string_equal(text(s.view->workers, s.view->workers_n), "d@0 e/0@1 e/1@2 c@3 e/2@4");
    pl_engine_unref(c);
    pl_engine_unref(d);
    pl_engine_unref(e);
    close_fleet(&s);
}

/* A view that a loop still holds keeps the engine, too. */
static void a_view_keeps_its_engines(void **state)
{
    (void)state;
    subscriber s;
    open_fleet(&s);
    pl_engine *a = add(&s, "a", 1, "m");
    pl_view *old = pl_fleet_view(s.fleet);
    pl_fleet_remove(s.fleet, a);
    pl_engine_unref(a);
    pl_engine_unref(add(&s, "b", 1, "m"));
    assert_string_equal(model_text(s.view, "m"), "b@1");
    assert_string_equal(model_text(old, "m"), "a@0");
    assert_string_equal(old->engines[0]->url, "http://h:1");
    pl_view_unref(old);
    pl_engine_unref(add(&s, "c", 1, "m"));
    assert_string_equal(model_text(s.view, "m"), "c@0 b@1");
    close_fleet(&s);
}

static void draining_stays_in_view_removed_does_not(void **state)
{
    (void)state;
    subscriber s;
    open_fleet(&s);
    pl_engine *a = add(&s, "a", 1, "m");
    assert_int_equal(pl_fleet_drain(s.fleet, a, true), 0);
    assert_int_equal(a->admin, PL_ENGINE_DRAINING);
    assert_string_equal(model_text(s.view, "m"), "a@0");
    int published = s.published;
    assert_int_equal(pl_fleet_drain(s.fleet, a, true), 0);
    assert_int_equal(s.published, published); /* no change */
    assert_int_equal(pl_fleet_drain(s.fleet, a, false), 0);
    assert_int_equal(a->admin, PL_ENGINE_ACTIVE);
    assert_int_equal(s.published, published + 1);
    assert_int_equal(pl_fleet_remove(s.fleet, a), 0);
    assert_string_equal(model_text(s.view, "m"), "none");
    assert_int_equal(s.view->engines_n, 0);
    assert_int_equal(pl_fleet_remove(s.fleet, a), PL_ENOTFOUND);
    assert_int_equal(pl_fleet_drain(s.fleet, a, false), PL_ENOTFOUND);
    assert_int_equal(a->admin, PL_ENGINE_REMOVED);
    const pl_str m = PL_STR("m");
    assert_int_equal(pl_fleet_set_models(s.fleet, a, &m, 1), PL_ENOTFOUND);
    pl_engine_unref(a);
    close_fleet(&s);
}

static void models_publish_only_when_they_change(void **state)
{
    (void)state;
    subscriber s;
    open_fleet(&s);
    pl_engine *a = add(&s, "a", 1, "");
    pl_arena arena = PL_ARENA_INIT;
    pl_str *ids;
    assert_int_equal(pl_fleet_models(s.fleet, a, &arena, &ids), 0);
    const pl_str bca[] = {PL_STR("b"), PL_STR("c"), PL_STR("a"), PL_STR("b")};
    const pl_str abc[] = {PL_STR("a"), PL_STR("b"), PL_STR("c")};
    int n = s.published;
    assert_int_equal(pl_fleet_set_models(s.fleet, a, bca, 4), 0);
    assert_int_equal(s.published, n + 1);
    assert_int_equal(pl_fleet_set_models(s.fleet, a, abc, 3), 0);
    assert_int_equal(s.published, n + 1); /* the same set */
    assert_int_equal(pl_fleet_models(s.fleet, a, &arena, &ids), 3);
    for (int i = 0; i < 3; i++)
        assert_true(pl_str_eq(ids[i], abc[i]));
    assert_int_equal(pl_fleet_set_models(s.fleet, a, abc, 2), 0);
    assert_int_equal(s.published, n + 2);
    assert_string_equal(model_text(s.view, "c"), "none");
    assert_true(pl_str_eq(ids[2], abc[2])); /* a copy */
    pl_str long_id = {calloc(1, 600), 513};
    assert_int_equal(pl_fleet_set_models(s.fleet, a, &long_id, 1), PL_ELIMIT);
    assert_int_equal(pl_fleet_set_models(s.fleet, a, &(pl_str){"", 0}, 1), PL_ELIMIT);
    assert_int_equal(pl_fleet_set_models(s.fleet, a, abc, PL_FLEET_MAX_MODELS + 1), PL_ELIMIT);
    assert_int_equal(pl_fleet_models(s.fleet, a, &arena, &ids), 2); /* refused: as before */
    free((char *)long_id.p);
    assert_int_equal(pl_fleet_set_models(s.fleet, a, NULL, 0), 0);
    assert_int_equal(s.view->models_n, 0);
    pl_fleet_remove(s.fleet, a);
    assert_int_equal(pl_fleet_models(s.fleet, a, &arena, &ids), PL_ENOTFOUND);
    pl_arena_free(&arena);
    pl_engine_unref(a);
    close_fleet(&s);
}

static void the_fleet_has_a_bound(void **state)
{
    (void)state;
    subscriber s;
    open_fleet(&s);
    pl_engine *a = add(&s, "a", PL_MAX_WORKERS - 1, "m");
    pl_engine_spec spec = {.url = PL_STR("http://h"), .name = PL_STR("b"), .dp_size = 2};
    pl_errbuf eb = {""};
    assert_int_equal(pl_fleet_add(s.fleet, &spec, NULL, &eb), PL_ELIMIT);
    assert_non_null(strstr(eb.text, "4096"));
    pl_engine *c = add(&s, "c", 1, ""); /* what the refused one had taken is free */
    assert_int_equal(c->workers[0].slot, PL_MAX_WORKERS - 1);
    assert_int_equal(c->workers[0].generation, 1);
    assert_int_equal(s.view->workers_n, PL_MAX_WORKERS);
    pl_engine_unref(a);
    pl_engine_unref(c);
    close_fleet(&s);
}

/* --- against a naive search --- */

enum { ENGINES = 12, MODELS = 6 };

typedef struct naive {
    pl_engine *e[ENGINES]; /* NULL: not there */
    unsigned models[ENGINES];
} naive;

static int ids_of(unsigned mask, pl_str *ids)
{
    static const char *const all[MODELS] = {"a", "aa", "b", "Llama-3", "llama-3", "z/q"};
    int n = 0;
    for (int i = 0; i < MODELS; i++)
        if (mask >> i & 1)
            ids[n++] = pl_str_c(all[i]);
    return n;
}

static void check_against(const naive *m, const pl_view *v)
{
    int slots[PL_MAX_WORKERS] = {0}, engines = 0, models = 0;
    for (int i = 0; i < ENGINES; i++)
        engines += m->e[i] != NULL;
    assert_int_equal(v->engines_n, engines);
    for (int i = 0; i < v->workers_n; i++) {
        assert_int_equal(slots[v->workers[i]->slot]++, 0);
        assert_true(i == 0 || v->workers[i]->slot > v->workers[i - 1]->slot);
    }
    for (int k = 0; k < MODELS; k++) {
        pl_str id;
        ids_of(1u << k, &id);
        int serving = 0;
        const pl_model *found = pl_view_model(v, id);
        for (int i = 0; i < ENGINES; i++)
            if (m->e[i] && m->models[i] >> k & 1) {
                serving += m->e[i]->workers_n;
                for (int r = 0; r < m->e[i]->workers_n; r++)
                    assert_true(found && pl_model_has(found, &m->e[i]->workers[r]));
            }
        models += serving > 0;
        assert_int_equal(found ? found->workers_n : 0, serving);
        for (int i = 1; i < serving; i++)
            assert_true(found->workers[i]->slot > found->workers[i - 1]->slot);
    }
    assert_int_equal(v->models_n, models);
}

static void random_changes(void **state)
{
    (void)state;
    subscriber s;
    open_fleet(&s);
    naive m = {{NULL}, {0}};
    pl_rng rng = {5};
    for (int step = 0; step < 4000; step++) {
        int i = (int)pl_rng_below(&rng, ENGINES);
        pl_str ids[MODELS];
        unsigned mask = pl_rng_below(&rng, 1u << MODELS);
        int n = ids_of(mask, ids);
        char name[16];
        snprintf(name, sizeof name, "e%d", i);
        switch (pl_rng_below(&rng, 4)) {
        case 0:
            if (!m.e[i]) {
                pl_engine_spec spec = {.url = PL_STR("http://h"),
                                       .name = pl_str_c(name),
                                       .dp_size = (int)pl_rng_below(&rng, 4),
                                       .models = ids,
                                       .models_n = n};
                assert_int_equal(pl_fleet_add(s.fleet, &spec, &m.e[i], NULL), 0);
                m.models[i] = mask;
            }
            break;
        case 1:
            if (m.e[i] && pl_rng_below(&rng, 2)) {
                assert_int_equal(pl_fleet_remove(s.fleet, m.e[i]), 0);
                pl_engine_unref(m.e[i]);
                m.e[i] = NULL;
            }
            break;
        case 2:
            if (m.e[i]) {
                assert_int_equal(pl_fleet_set_models(s.fleet, m.e[i], ids, n), 0);
                m.models[i] = mask;
            }
            break;
        default:
            if (m.e[i])
                assert_int_equal(pl_fleet_drain(s.fleet, m.e[i], mask & 1), 0);
        }
        if (s.view)
            check_against(&m, s.view);
    }
    int highest = s.view->workers_n ? s.view->workers[s.view->workers_n - 1]->slot : 0;
    assert_true(highest < ENGINES * 3 + 8); /* slots were used again */
    for (int i = 0; i < ENGINES; i++)
        pl_engine_unref(m.e[i]);
    close_fleet(&s);
}

/* --- threads --- */

typedef struct shared_fleet {
    pl_fleet *fleet;
    _Atomic uint64_t last; /* version published last */
    _Atomic int disorder;
    _Atomic int writers;
} shared_fleet;

static void on_shared(void *ctx, pl_view *v)
{
    shared_fleet *s = ctx;
    if (atomic_exchange(&s->last, v->version) >= v->version)
        atomic_store(&s->disorder, 1);
    pl_view_unref(v);
}

static void *change_it(void *arg)
{
    shared_fleet *s = arg;
    char name[32];
    snprintf(name, sizeof name, "t%d", atomic_fetch_add(&s->writers, 1));
    const pl_str models[] = {PL_STR("m"), PL_STR("n")};
    for (int i = 0; i < 1000; i++) {
        pl_engine_spec spec = {.url = PL_STR("http://h"), .name = pl_str_c(name), .dp_size = 2};
        pl_engine *e = NULL;
        if (pl_fleet_add(s->fleet, &spec, &e, NULL) != 0 ||
            pl_fleet_set_models(s->fleet, e, models, 1 + i % 2) != 0 ||
            pl_fleet_drain(s->fleet, e, true) != 0 || pl_fleet_remove(s->fleet, e) != 0)
            abort();
        pl_engine_unref(e);
    }
    atomic_fetch_sub(&s->writers, 100);
    return NULL;
}

static void readers_beside_writers(void **state)
{
    (void)state;
    shared_fleet s = {0};
    s.fleet = pl_fleet_new(on_shared, &s);
    pthread_t t[3];
    for (int i = 0; i < 3; i++)
        pthread_create(&t[i], NULL, change_it, &s);
    uint64_t seen = 0;
    while (atomic_load(&s.writers) >= 0) {
        pl_view *v = pl_fleet_view(s.fleet);
        assert_true(v->version >= seen);
        seen = v->version;
        const pl_model *m = pl_view_model(v, PL_STR("m"));
        for (int i = 0; m && i < m->workers_n; i++) {
            pl_ticket ticket = {0};
            pl_ticket_begin(&ticket, m->workers[i],
                            &(pl_load){.prompt_tokens = 10, .stream = false});
            pl_engine_why(m->workers[i]->engine, &pl_breaker_default, 0);
            pl_ticket_end(&ticket);
        }
        pl_engine_unref(pl_fleet_find(s.fleet, PL_STR("t1")));
        pl_view_unref(v);
    }
    for (int i = 0; i < 3; i++)
        pthread_join(t[i], NULL);
    assert_int_equal(s.disorder, 0);
    assert_int_equal(s.last, 3 * 1000 * 4 + 1); /* the first, empty one is not published */
    pl_view *v = pl_fleet_view(s.fleet);
    assert_int_equal(v->engines_n, 0);
    pl_view_unref(v);
    pl_fleet_free(s.fleet);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(views_show_models_in_order),
        cmocka_unit_test(the_only_model),
        cmocka_unit_test(names_are_unique),
        cmocka_unit_test(a_slot_waits_for_the_last_request),
        cmocka_unit_test(a_view_keeps_its_engines),
        cmocka_unit_test(draining_stays_in_view_removed_does_not),
        cmocka_unit_test(models_publish_only_when_they_change),
        cmocka_unit_test(the_fleet_has_a_bound),
        cmocka_unit_test(random_changes),
        cmocka_unit_test(readers_beside_writers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
