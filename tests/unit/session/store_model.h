/* Part of store_suite.h, which includes it: random operations on a store and on a naive model, a
 * table that is searched. What must hold: the same answers, the same bindings handed back, each
 * engine-backed one reported when it expires and in time, and an eviction that takes one of the
 * least recently used. */
#ifndef PL_TEST_STORE_MODEL_H
#define PL_TEST_STORE_MODEL_H

enum { NAMES = 120 };

typedef struct model {
    pl_rng rng;
    int gone; /* by callback */
    int leased, released;
    struct entry {
        char id[80];
        bool there; /* and not yet seen to expire */
        pl_binding b;
        uint64_t owner, lease_ends_ns;
    } e[NAMES];
} model;

static struct entry *entry_of(model *m, pl_str id)
{
    for (int i = 0; i < NAMES; i++)
        if (pl_str_eq(pl_str_c(m->e[i].id), id))
            return &m->e[i];
    fail_msg("a name that was never put");
    return NULL;
}

static uint64_t model_ends_ns(const struct entry *e)
{
    return e->owner && e->lease_ends_ns > e->b.deadline_ns ? e->lease_ends_ns : e->b.deadline_ns;
}

static void model_expired(suite *s, const pl_session_name *name, const pl_binding *b)
{
    model *m = s->model;
    struct entry *e = entry_of(m, name->id);
    assert_true(pl_str_eq(name->tenant, PL_STR("acme")));
    assert_true(e->there);
    assert_int_equal(b->kind, ENGINE);
    assert_true(model_ends_ns(e) <= suite_now_ns(s));
    assert_same(b, &e->b);
    e->there = false;
    m->gone++;
}

/* Engine-backed ones are there until the callback said otherwise: on access that is now. */
static bool model_live(suite *s, const struct entry *e)
{
    return e->there && model_ends_ns(e) > suite_now_ns(s);
}

static void model_settled(suite *s, struct entry *e)
{
    if (!model_live(s, e))
        suite_reported(s);
    if (e->there && model_ends_ns(e) <= suite_now_ns(s)) {
        assert_int_equal(e->b.kind, ROUTER);
        e->there = false;
    }
}

static void model_look(suite *s, struct entry *e, pl_store_op op)
{
    bool live = model_live(s, e);
    pl_store_call c = call_of(op, e->id);
    assert_int_equal(run(s, &c), live ? 0 : PL_ENOTFOUND);
    model_settled(s, e);
    if (!live)
        return;
    uint64_t used_ns = e->b.used_at_ns;
    if (op == PL_STORE_GET) {
        e->b.turns++;
        e->b.deadline_ns = suite_now_ns(s) + e->b.ttl_ms * 1000000ull;
    }
    assert_same(&c.binding, &e->b);
    assert_int_equal(c.binding.used_at_ns, used_ns);
    if (op == PL_STORE_GET)
        e->b.used_at_ns = suite_now_ns(s);
}

static void model_note(model *m, pl_note *note)
{
    note->n = (uint8_t)pl_rng_below(&m->rng, sizeof note->bytes + 1);
    for (int i = 0; i < note->n; i++)
        note->bytes[i] = (uint8_t)pl_rng_next(&m->rng);
}

static void model_turn(suite *s, struct entry *e, pl_store_op op)
{
    model *m = s->model;
    bool found = model_live(s, e) && e->b.kind == ENGINE;
    pl_store_call c =
        turn_call(op, e->id, 1 + pl_rng_below(&m->rng, 3), 1 + pl_rng_below(&m->rng, 3000));
    if (op == PL_STORE_RELEASE && e->owner && pl_rng_below(&m->rng, 4))
        c.owner = e->owner;
    model_note(m, &c.binding.note);
    pl_note note = c.binding.note;
    uint64_t now_ns = suite_now_ns(s);
    int want = !found ? PL_ENOTFOUND
               : op == PL_STORE_LEASE
                   ? e->owner && e->owner != c.owner && e->lease_ends_ns > now_ns ? PL_EBUSY : 0
               : e->owner != c.owner ? PL_ENOTFOUND
                                     : 0;
    assert_int_equal(run(s, &c), want);
    model_settled(s, e);
    uint64_t used_ns = e->b.used_at_ns;
    if (!want && op == PL_STORE_LEASE) {
        e->owner = c.owner;
        e->lease_ends_ns = now_ns + c.lease_ms * 1000000ull;
        m->leased++;
    } else if (!want) {
        e->owner = 0;
        if (note.n)
            e->b.note = note;
        e->b.deadline_ns = now_ns + e->b.ttl_ms * 1000000ull;
        m->released++;
    }
    if (want != PL_ENOTFOUND) {
        assert_same(&c.binding, &e->b);
        assert_int_equal(c.binding.used_at_ns, used_ns);
    }
    if (!want && op == PL_STORE_RELEASE)
        e->b.used_at_ns = now_ns;
}

static void model_evict(suite *s, const struct entry *newcomer)
{
    model *m = s->model;
    uint64_t oldest_s = UINT64_MAX;
    for (int i = 0; i < NAMES; i++) {
        struct entry *e = &m->e[i];
        if (e != newcomer && e->there && e->b.kind == ROUTER &&
            e->b.used_at_ns / 1000000000 < oldest_s)
            oldest_s = e->b.used_at_ns / 1000000000;
    }
    int evicted = 0;
    for (int i = 0; i < NAMES; i++) {
        struct entry *e = &m->e[i];
        if (e == newcomer || !e->there)
            continue;
        pl_store_call c = call_of(PL_STORE_PEEK, e->id);
        if (run(s, &c) == 0)
            continue;
        assert_int_equal(e->b.kind, ROUTER);
        assert_int_equal(e->b.used_at_ns / 1000000000, oldest_s);
        e->there = false;
        evicted++;
    }
    assert_int_equal(evicted, 1);
}

static void model_put(suite *s, struct entry *e, uint64_t cap)
{
    static const uint32_t ttls[] = {300, 5000, 70000, 1200000};
    model *m = s->model;
    int there = 0, evictable = 0;
    for (int i = 0; i < NAMES; i++)
        model_look(s, &m->e[i], PL_STORE_PEEK); /* the expired ones go: the model knows who holds */
    for (int i = 0; i < NAMES; i++) {
        there += m->e[i].there;
        evictable += m->e[i].there && m->e[i].b.kind == ROUTER;
    }
    pl_store_call c = put_call(e->id, (int32_t)pl_rng_below(&m->rng, 64),
                               pl_rng_below(&m->rng, 3) ? ROUTER : ENGINE,
                               1 + pl_rng_below(&m->rng, ttls[pl_rng_below(&m->rng, 4)]));
    c.binding.turns = pl_rng_below(&m->rng, 5);
    c.binding.parent_hash = pl_rng_next(&m->rng);
    model_note(m, &c.binding.note);
    if (c.binding.kind == ROUTER)
        c.binding.note.n = 0;
    else if (pl_rng_below(&m->rng, 2)) {
        c.owner = 1 + pl_rng_below(&m->rng, 3);
        c.lease_ms = 1 + pl_rng_below(&m->rng, 3000);
    }
    c.when = (pl_store_when)pl_rng_below(&m->rng, 3);
    c.version = e->b.version + !pl_rng_below(&m->rng, 2);
    int want = c.when == PL_STORE_IF_ABSENT && e->there                     ? PL_EEXISTS
               : c.when == PL_STORE_IF_VERSION && !e->there                 ? PL_ENOTFOUND
               : c.when == PL_STORE_IF_VERSION && c.version != e->b.version ? PL_EEXISTS
               : !e->there && (uint64_t)there >= cap && !evictable          ? PL_ELIMIT
                                                                            : 0;
    assert_int_equal(run(s, &c), want);
    if (want != PL_ELIMIT) {
        assert_int_equal(c.had_old, e->there);
        if (e->there)
            assert_same(&c.old, &e->b);
    }
    if (want)
        return;
    bool full = !e->there && (uint64_t)there >= cap;
    assert_int_equal(c.binding.deadline_ns, suite_now_ns(s) + c.binding.ttl_ms * 1000000ull);
    assert_int_not_equal(c.binding.version, e->b.version);
    uint64_t opened_ns = e->there ? e->b.opened_at_ns : suite_now_ns(s);
    assert_in_range(c.binding.opened_at_ns, opened_ns - 1000000, opened_ns);
    assert_int_equal(c.binding.used_at_ns, suite_now_ns(s));
    e->b = c.binding;
    e->owner = c.owner;
    e->lease_ends_ns = suite_now_ns(s) + c.lease_ms * 1000000ull;
    e->there = true;
    if (full)
        model_evict(s, e);
}

static void model_remove(suite *s, struct entry *e)
{
    bool live = model_live(s, e);
    pl_store_call c = call_of(PL_STORE_REMOVE, e->id);
    assert_int_equal(run(s, &c), live ? 0 : PL_ENOTFOUND);
    model_settled(s, e);
    assert_int_equal(c.had_old, live);
    if (live)
        assert_same(&c.old, &e->b);
    e->there = false;
}

static void model_advance(suite *s)
{
    model *m = s->model;
    suite_advance(s);
    uint64_t late_ns = (PL_STORE_DUE_MS - PL_STORE_ADVANCE_MS) * 1000000ull;
    for (int i = 0; i < NAMES; i++) {
        struct entry *e = &m->e[i];
        if (e->there && e->b.kind == ENGINE && model_ends_ns(e) + late_ns <= suite_now_ns(s))
            fail_msg("%s has not expired", e->id);
    }
}

static void agrees_with_a_model(void **state)
{
    suite *s = *state;
    for (uint64_t seed = 1; seed <= SUITE_MODEL_SEEDS; seed++) {
        uint64_t cap = seed % 2 ? 40 : 1000;
        suite_open(s, cap);
        model *m = calloc(1, sizeof *m);
        m->rng.state = seed;
        for (int i = 0; i < NAMES; i++)
            snprintf(m->e[i].id, sizeof m->e[i].id, "%0*d", 1 + i % 70, i);
        s->model = m;
        s->on_expired = model_expired;
        for (int step = 0; step < SUITE_MODEL_STEPS; step++) {
            struct entry *e = &m->e[pl_rng_below(&m->rng, NAMES)];
            unsigned kind = pl_rng_below(&m->rng, 1000);
            if (kind < 110)
                model_turn(s, e, PL_STORE_LEASE);
            else if (kind < 200)
                model_turn(s, e, PL_STORE_RELEASE);
            else if (kind < 300)
                model_look(s, e, PL_STORE_GET);
            else if (kind < 400)
                model_look(s, e, PL_STORE_PEEK);
            else if (kind < 650)
                model_put(s, e, cap);
            else if (kind < 750)
                model_remove(s, e);
            else if (kind < 850)
                model_advance(s);
            else
                suite_pass(s, kind < 990   ? pl_rng_below(&m->rng, 400)
                              : kind < 998 ? pl_rng_below(&m->rng, 30000)
                                           : pl_rng_below(&m->rng, 2000000));
        }
        assert_true(m->gone > SUITE_MODEL_STEPS / 200);
        assert_true(m->leased > SUITE_MODEL_STEPS / 1000);
        assert_true(m->released > SUITE_MODEL_STEPS / 2000);
        s->on_expired = NULL;
        suite_close(s);
        free(m);
    }
}

#endif
