/* Part of store_suite.h, which includes it: what travels with a binding, the leases of turns, and
 * the list. */
#ifndef PL_TEST_STORE_LEASES_H
#define PL_TEST_STORE_LEASES_H

static pl_binding seen(suite *s, pl_store_op op, const char *id)
{
    pl_store_call c = call_of(op, id);
    assert_int_equal(run(s, &c), 0);
    return c.binding;
}

static void assert_note(const pl_binding *b, const char *want)
{
    assert_int_equal(b->note.n, strlen(want));
    assert_memory_equal(b->note.bytes, want, strlen(want));
}

static void a_binding_carries_what_its_owner_keeps(void **state)
{
    suite *s = *state;
    suite_open(s, 100);
    for (int kind = ROUTER; kind <= ENGINE; kind++) {
        const char *id = kind == ENGINE ? "engine" : "router";
        uint64_t opened_ns = suite_now_ns(s);
        pl_store_call c = put_call(id, 4, (pl_session_kind)kind, 60000);
        c.binding.turns = 3;
        c.binding.parent_hash = 0xfedcba9876543210u;
        c.binding.note.n = 79;
        memset(c.binding.note.bytes, 0, 79);
        c.binding.note.bytes[78] = 0xff;
        pl_note note = c.binding.note;
        assert_int_equal(run(s, &c), 0);
        assert_in_range(c.binding.opened_at_ns, opened_ns - 1000000, opened_ns);

        suite_pass(s, 2000);
        pl_binding b = seen(s, PL_STORE_PEEK, id);
        assert_int_equal(b.turns, 3);
        assert_int_equal(b.parent_hash, 0xfedcba9876543210u);
        assert_int_equal(b.used_at_ns, opened_ns);
        assert_in_range(b.opened_at_ns, opened_ns - 1000000, opened_ns);
        assert_int_equal(b.note.n, kind == ENGINE ? 79 : 0);
        if (kind == ENGINE)
            assert_memory_equal(b.note.bytes, note.bytes, 79);

        b = seen(s, PL_STORE_GET, id);
        assert_int_equal(b.turns, 4);
        assert_int_equal(b.used_at_ns, opened_ns); /* before this one */
        suite_pass(s, 500);
        b = seen(s, PL_STORE_GET, id);
        assert_int_equal(b.turns, 5);
        assert_int_equal(b.used_at_ns, opened_ns + 2000000000u);

        /* a rebind is the same session */
        suite_pass(s, 1000);
        c = put_call(id, 5, (pl_session_kind)kind, 60000);
        c.binding.turns = 1;
        assert_int_equal(run(s, &c), 0);
        assert_int_equal(c.old.turns, 5);
        assert_int_equal(c.old.parent_hash, 0xfedcba9876543210u);
        assert_int_equal(c.old.used_at_ns, opened_ns + 2500000000u);
        assert_int_equal(c.old.note.n, kind == ENGINE ? 79 : 0);
        b = seen(s, PL_STORE_GET, id);
        assert_in_range(b.opened_at_ns, opened_ns - 1000000, opened_ns);
        assert_int_equal(b.turns, 2);
        assert_int_equal(b.parent_hash, 0);
        assert_int_equal(b.note.n, 0);

        /* one that was removed is another */
        pl_store_call gone = call_of(PL_STORE_REMOVE, id);
        assert_int_equal(run(s, &gone), 0);
        assert_int_equal(gone.old.turns, 2);
        bound(s, id, 4, (pl_session_kind)kind, 60000);
        b = seen(s, PL_STORE_PEEK, id);
        assert_in_range(b.opened_at_ns, opened_ns + 3499000000u, opened_ns + 3500000000u);
    }
    suite_close(s);
}

static void one_turn_at_a_time(void **state)
{
    suite *s = *state;
    suite_open(s, 100);
    bound(s, "a", 1, ENGINE, 60000);
    bound(s, "b", 2, ENGINE, 60000);
    bound(s, "r", 3, ROUTER, 60000);
    const uint64_t big = 0xffffffffffffffffu; /* owners are all of 64 bits */
    assert_int_equal(leased(s, "a", big, 5000), 0);
    pl_store_call c = turn_call(PL_STORE_LEASE, "a", big - 1, 5000);
    assert_int_equal(run(s, &c), PL_EBUSY);
    assert_int_equal(c.binding.slot, 1);
    assert_int_equal(leased(s, "b", big - 1, 5000), 0); /* another session's is its own */
    assert_int_equal(leased(s, "a", big, 5000), 0);     /* renewed */
    assert_int_equal(got(s, "a"), 1);                   /* and does not hide it */
    assert_int_equal(leased(s, "r", 9, 5000), PL_ENOTFOUND);
    assert_int_equal(leased(s, "none", 9, 5000), PL_ENOTFOUND);

    assert_int_equal(released(s, "a", big - 1, "not mine"), PL_ENOTFOUND);
    assert_int_equal(released(s, "none", big, ""), PL_ENOTFOUND);
    assert_int_equal(released(s, "r", big, ""), PL_ENOTFOUND);
    assert_int_equal(seen(s, PL_STORE_PEEK, "a").note.n, 0);
    suite_pass(s, 3000);
    uint64_t used_ns = seen(s, PL_STORE_PEEK, "a").used_at_ns;
    c = turn_call(PL_STORE_RELEASE, "a", big, 0);
    c.binding.note = (pl_note){3, {'o', 'n', 'e'}};
    assert_int_equal(run(s, &c), 0);
    assert_note(&c.binding, "one");
    assert_int_equal(c.binding.slot, 1);
    assert_int_equal(c.binding.used_at_ns, used_ns);
    assert_int_equal(seen(s, PL_STORE_PEEK, "a").used_at_ns, suite_now_ns(s));
    assert_int_equal(released(s, "a", big, "twice"), PL_ENOTFOUND);

    c = turn_call(PL_STORE_LEASE, "a", big - 1, 5000);
    assert_int_equal(run(s, &c), 0);
    assert_note(&c.binding, "one");
    assert_int_equal(released(s, "a", big - 1, ""), 0); /* an empty note leaves the present one */
    pl_binding b = seen(s, PL_STORE_GET, "a");
    assert_note(&b, "one");
    suite_close(s);
}

static void a_leased_session_does_not_expire(void **state)
{
    suite *s = *state;
    suite_open(s, 100);
    bound(s, "a", 1, ENGINE, 2000);
    assert_int_equal(leased(s, "a", 7, 5000), 0);
    for (int i = 0; i < 20; i++) { /* a long turn */
        suite_pass(s, 2500);
        suite_advance(s);
        assert_int_equal(peeked(s, "a"), 1);
        assert_int_equal(leased(s, "a", 7, 5000), 0);
    }
    /* the time to live counts from its end, and the lease's end no more */
    assert_int_equal(released(s, "a", 7, ""), 0);
    pl_binding b = seen(s, PL_STORE_PEEK, "a");
    assert_int_equal(b.deadline_ns, suite_now_ns(s) + 2000000000u);
    suite_pass(s, 1999);
    suite_advance(s);
    assert_int_equal(peeked(s, "a"), 1);
    assert_int_equal(s->expired, 0);
    suite_pass(s, 1);
    assert_int_equal(peeked(s, "a"), -1);
    suite_pass(s, PL_STORE_ADVANCE_MS);
    suite_advance(s);
    assert_int_equal(s->expired, 1);
    /* one that has expired cannot be leased */
    bound(s, "a", 1, ENGINE, 2000);
    suite_pass(s, 2000);
    assert_int_equal(leased(s, "a", 7, 5000), PL_ENOTFOUND);
    suite_reported(s);
    assert_int_equal(s->expired, 2);
    suite_close(s);
}

static void a_lease_that_is_not_renewed_ends(void **state)
{
    suite *s = *state;
    suite_open(s, 100);
    bound(s, "a", 1, ENGINE, 60000);
    assert_int_equal(leased(s, "a", 7, 5000), 0);
    suite_pass(s, 4999);
    assert_int_equal(leased(s, "a", 8, 5000), PL_EBUSY);
    suite_pass(s, 1);
    assert_int_equal(leased(s, "a", 8, 5000), 0);
    assert_int_equal(released(s, "a", 7, "too late"), PL_ENOTFOUND);
    suite_pass(s, 6000);
    assert_int_equal(released(s, "a", 8, "late"), 0); /* nobody took it meanwhile */
    pl_binding b = seen(s, PL_STORE_PEEK, "a");
    assert_note(&b, "late");

    /* and then the session expires as any other, with its note */
    bound(s, "long", 2, ENGINE, 1000);
    assert_int_equal(leased(s, "long", 7, 9000), 0);
    suite_pass(s, 8000);
    suite_advance(s);
    assert_int_equal(s->expired, 0);
    assert_int_equal(leased(s, "long", 7, 100), 0); /* a renewal may be shorter */
    suite_pass(s, 100);
    assert_int_equal(peeked(s, "long"), -1);
    for (unsigned ms = 0; ms < PL_STORE_DUE_MS; ms += PL_STORE_ADVANCE_MS) {
        suite_pass(s, PL_STORE_ADVANCE_MS);
        suite_advance(s);
    }
    assert_int_equal(s->expired, 1);
    suite_pass(s, 60000);
    suite_advance(s);
    assert_int_equal(s->expired, 2);
    assert_string_equal(s->last_id, "a");
    assert_note(&s->last, "late");
    suite_close(s);
}

/* Who takes a lease learns when the one before was never given back. */
static void a_lease_that_lapsed_is_told(void **state)
{
    suite *s = *state;
    suite_open(s, 100);
    bound(s, "a", 1, ENGINE, 60000);
    pl_store_call c = turn_call(PL_STORE_LEASE, "a", 7, 5000);
    c.lapsed = true;
    assert_int_equal(run(s, &c), 0);
    assert_false(c.lapsed); /* the first */
    assert_int_equal(run(s, &c), 0);
    assert_false(c.lapsed); /* renewed */
    suite_pass(s, 6000);
    assert_int_equal(run(s, &c), 0);
    assert_false(c.lapsed); /* late, but nobody else was there */
    pl_store_call d = turn_call(PL_STORE_LEASE, "a", 8, 5000);
    assert_int_equal(run(s, &d), PL_EBUSY);
    assert_false(d.lapsed);
    assert_int_equal(released(s, "a", 7, ""), 0);
    assert_int_equal(run(s, &d), 0);
    assert_false(d.lapsed); /* given back */
    suite_pass(s, 5000);
    assert_int_equal(run(s, &c), 0);
    assert_true(c.lapsed); /* 8 never gave it back */
    assert_int_equal(run(s, &c), 0);
    assert_false(c.lapsed); /* told once */
    assert_int_equal(released(s, "a", 7, ""), 0);
    assert_int_equal(run(s, &d), 0);
    assert_false(d.lapsed);
    suite_pass(s, 5000);
    bound(s, "a", 2, ENGINE, 60000); /* another session */
    assert_int_equal(run(s, &c), 0);
    assert_false(c.lapsed);
    suite_close(s);
}

static void a_rebind_takes_the_lease_with_it(void **state)
{
    suite *s = *state;
    suite_open(s, 100);
    pl_store_call c = put_call("a", 1, ENGINE, 1000);
    c.owner = 7;
    c.lease_ms = 5000;
    assert_int_equal(run(s, &c), 0); /* bound with the lease held */
    assert_int_equal(leased(s, "a", 8, 5000), PL_EBUSY);
    suite_pass(s, 4000);
    suite_advance(s);
    assert_int_equal(peeked(s, "a"), 1);
    bound(s, "a", 2, ENGINE, 1000);
    assert_int_equal(released(s, "a", 7, "of the old one"), PL_ENOTFOUND);
    assert_int_equal(leased(s, "a", 8, 100), 0);
    bound(s, "a", 3, ROUTER, 1000); /* and back: it keeps nothing of the engine-backed one */
    bound(s, "a", 4, ENGINE, 1000);
    assert_int_equal(leased(s, "a", 9, 100), 0);
    assert_int_equal(seen(s, PL_STORE_PEEK, "a").note.n, 0);
    /* a removed one leaves no lease behind */
    pl_store_call gone = call_of(PL_STORE_REMOVE, "a");
    assert_int_equal(run(s, &gone), 0);
    bound(s, "a", 5, ENGINE, 1000);
    assert_int_equal(leased(s, "a", 10, 100), 0);
    suite_close(s);
}

/* --- the list --- */

enum { LISTED = 500 };

typedef struct listed {
    suite *s;
    int times[LISTED];
    int others, all;
    bool meddle;
} listed;

static void on_listed(pl_store_list_call *c, const pl_session_name *name, const pl_binding *b)
{
    listed *l = c->ctx;
    l->all++;
    assert_true(pl_str_eq(name->tenant, PL_STR("acme")));
    char id[16];
    assert_true(name->id.n < sizeof id);
    memcpy(id, name->id.p, name->id.n);
    id[name->id.n] = 0;
    int i = atoi(id + 1);
    if (id[0] != 's') {
        l->others++;
        return;
    }
    assert_in_range(i, 0, LISTED - 1);
    l->times[i]++;
    assert_int_equal(b->slot, i % 64);
    assert_int_equal(b->kind, i % 2 ? ENGINE : ROUTER);
    assert_int_equal(b->note.n, i % 2 ? 4 : 0);
}

/* Sessions that come, go and are bound again while the pages are asked for. */
static void meddle(suite *s, int round)
{
    char id[16];
    for (int i = 0; i < 20; i++) {
        snprintf(id, sizeof id, "x%d", round * 20 + i);
        bound(s, id, 1, i % 2 ? ENGINE : ROUTER, 600000);
        if (i % 3) {
            pl_store_call c = call_of(PL_STORE_REMOVE, id);
            assert_int_equal(run(s, &c), 0);
        }
        snprintf(id, sizeof id, "s%d", (round * 20 + i) % LISTED);
        got(s, id);
    }
}

static void a_list_has_each_session_once(void **state)
{
    suite *s = *state;
    suite_open(s, 5000);
    pl_store_list_call c = {.limit = 10, .each = on_listed};
    listed l = {.s = s};
    c.ctx = &l;
    do
        assert_int_equal(suite_list(s, &c), 0); /* of nothing */
    while (c.cursor);
    assert_int_equal(l.all, 0);
    char id[16];
    for (int i = 0; i < LISTED; i++) {
        snprintf(id, sizeof id, "s%d", i);
        pl_store_call p = put_call(id, i % 64, i % 2 ? ENGINE : ROUTER, 600000);
        p.binding.note = (pl_note){4, {1, 2, 3, 4}};
        assert_int_equal(run(s, &p), 0);
        snprintf(id, sizeof id, "old%d", i);
        bound(s, id, 1, ROUTER, 1000);
    }
    suite_pass(s, 1000); /* the old ones have expired, swept or not */
    static const uint32_t limits[] = {1, 7, 100, PL_STORE_LIST_MAX};
    for (int round = 0; round < 4; round++) {
        memset(l.times, 0, sizeof l.times);
        l.others = 0;
        c.limit = limits[round];
        c.cursor = 0;
        int pages = 0;
        do {
            assert_int_equal(suite_list(s, &c), 0);
            if (++pages % 7 == 0 && round % 2)
                meddle(s, pages);
        } while (c.cursor);
        for (int i = 0; i < LISTED; i++)
            assert_int_equal(l.times[i], 1);
        if (round == 0)
            assert_int_equal(l.others, 0);
    }
    c.limit = 0;
    assert_int_equal(suite_list(s, &c), PL_EINVALID);
    c.limit = PL_STORE_LIST_MAX + 1;
    assert_int_equal(suite_list(s, &c), PL_EINVALID);
    suite_close(s);
}

#endif
