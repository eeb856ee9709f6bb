/* What every affinity store must do. A store's test includes this, defines the functions
 * declared first, and runs STORE_SUITE with its own tests behind. Time is whatever suite_pass
 * makes of it. */
#ifndef PL_TEST_STORE_SUITE_H
#define PL_TEST_STORE_SUITE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "session/store.h"

/* Random runs against the model, and operations in each. */
#ifndef SUITE_MODEL_SEEDS
#define SUITE_MODEL_SEEDS 8
#define SUITE_MODEL_STEPS 8000
#endif

typedef struct suite suite;

/* Opens an empty store with this cap and suite_expired(s) as its callback, into s->store. */
static void suite_open(suite *s, uint64_t cap);
static void suite_close(suite *s);
/* Lets time pass without telling the store. */
static void suite_pass(suite *s, uint64_t ms);
static uint64_t suite_now_ns(suite *s);
/* pl_store_advance, and what it started has been done. */
static void suite_advance(suite *s);
/* What an access found expired has been reported; a shared store's next sweep does that. */
static void suite_reported(suite *s);
static int suite_list(suite *s, pl_store_list_call *c);
/* Returns when a pending call has been answered. */
static void suite_settle(suite *s, pl_store_call *c);

struct suite {
    pl_store *store;
    void *own; /* the store's test's */
    int expired;
    pl_binding last; /* that expired */
    char last_id[PL_SESSION_MAX_ID_BYTES + 1];
    void (*on_expired)(suite *s, const pl_session_name *name, const pl_binding *b);
    void *model;
};

static void suite_expired(void *ctx, const pl_session_name *name, const pl_binding *b)
{
    suite *s = ctx;
    s->expired++;
    s->last = *b;
    memcpy(s->last_id, name->id.p, name->id.n);
    s->last_id[name->id.n] = 0;
    if (s->on_expired)
        s->on_expired(s, name, b);
}

/* --- one call each --- */

static int run(suite *s, pl_store_call *c)
{
    int rc = pl_store_start(s->store, c);
    if (rc == PL_STORE_PENDING)
        suite_settle(s, c);
    else
        assert_int_equal(rc, c->result);
    assert_true(c->result <= 0);
    return c->result;
}

static pl_session_name named(const char *id)
{
    return (pl_session_name){PL_STR("acme"), pl_str_c(id)};
}

static pl_store_call call_of(pl_store_op op, const char *id)
{
    return (pl_store_call){.op = op, .name = named(id)};
}

static pl_store_call put_call(const char *id, int32_t slot, pl_session_kind kind, uint32_t ttl_ms)
{
    pl_store_call c = call_of(PL_STORE_PUT, id);
    c.binding = (pl_binding){
        .slot = slot, .generation = slot + 7, .rank = slot % 3, .kind = kind, .ttl_ms = ttl_ms};
    return c;
}

static pl_store_call turn_call(pl_store_op op, const char *id, uint64_t owner, uint32_t lease_ms)
{
    pl_store_call c = call_of(op, id);
    c.owner = owner;
    c.lease_ms = lease_ms;
    return c;
}

static int leased(suite *s, const char *id, uint64_t owner, uint32_t lease_ms)
{
    pl_store_call c = turn_call(PL_STORE_LEASE, id, owner, lease_ms);
    return run(s, &c);
}

static int released(suite *s, const char *id, uint64_t owner, const char *note)
{
    pl_store_call c = turn_call(PL_STORE_RELEASE, id, owner, 0);
    c.binding.note.n = (uint8_t)strlen(note);
    memcpy(c.binding.note.bytes, note, strlen(note));
    return run(s, &c);
}

/* The version of the new binding. */
static uint64_t bound(suite *s, const char *id, int32_t slot, pl_session_kind kind, uint32_t ttl_ms)
{
    pl_store_call c = put_call(id, slot, kind, ttl_ms);
    assert_int_equal(run(s, &c), 0);
    assert_int_not_equal(c.binding.version, 0);
    return c.binding.version;
}

/* The slot, -1 when it is not there. */
static int32_t asked(suite *s, pl_store_op op, const char *id)
{
    pl_store_call c = call_of(op, id);
    int rc = run(s, &c);
    if (rc == PL_ENOTFOUND)
        return -1;
    assert_int_equal(rc, 0);
    assert_int_equal(c.binding.generation, c.binding.slot + 7);
    assert_int_equal(c.binding.rank, c.binding.slot % 3);
    return c.binding.slot;
}

static int32_t got(suite *s, const char *id)
{
    return asked(s, PL_STORE_GET, id);
}

static int32_t peeked(suite *s, const char *id)
{
    return asked(s, PL_STORE_PEEK, id);
}

static uint64_t held(suite *s)
{
    pl_store_stats st;
    pl_store_stats_read(s->store, &st);
    return st.router_only + st.engine_backed;
}

#define ROUTER PL_SESSION_ROUTER_ONLY
#define ENGINE PL_SESSION_ENGINE_BACKED

static void assert_same(const pl_binding *a, const pl_binding *b)
{
    assert_int_equal(a->slot, b->slot);
    assert_int_equal(a->generation, b->generation);
    assert_int_equal(a->rank, b->rank);
    assert_int_equal(a->kind, b->kind);
    assert_int_equal(a->ttl_ms, b->ttl_ms);
    assert_int_equal(a->deadline_ns, b->deadline_ns);
    assert_int_equal(a->version, b->version);
    assert_int_equal(a->turns, b->turns);
    assert_int_equal(a->parent_hash, b->parent_hash);
    assert_int_equal(a->used_at_ns, b->used_at_ns);
    assert_in_range(a->opened_at_ns, b->opened_at_ns - 1000000, b->opened_at_ns + 1000000);
    assert_int_equal(a->note.n, b->note.n);
    assert_memory_equal(a->note.bytes, b->note.bytes, a->note.n);
}

/* --- time --- */

static void get_refreshes_and_peek_does_not(void **state)
{
    suite *s = *state;
    suite_open(s, 100);
    bound(s, "kept", 1, ENGINE, 10000);
    bound(s, "watched", 2, ENGINE, 10000);
    for (int i = 0; i < 6; i++) {
        suite_pass(s, 4000);
        suite_advance(s);
        assert_int_equal(got(s, "kept"), 1);
        assert_int_equal(peeked(s, "watched"), i < 2 ? 2 : -1);
    }
    assert_int_equal(s->expired, 1);
    assert_string_equal(s->last_id, "watched");
    assert_int_equal(s->last.slot, 2);
    suite_pass(s, 9000);
    assert_int_equal(peeked(s, "kept"), 1);
    suite_pass(s, 2000);
    suite_advance(s);
    assert_int_equal(peeked(s, "kept"), -1);
    assert_int_equal(s->expired, 2);
    suite_close(s);
}

static void due_sessions_expire_within_a_second_without_being_touched(void **state)
{
    static const uint32_t ttls[] = {1,       249,      250,      251,        999,
                                    16000,   16001,    64000,    300000,     1024000,
                                    3600000, 65536000, 86400000, 2592000000u};
    suite *s = *state;
    suite_open(s, 100);
    for (size_t i = 0; i < sizeof ttls / sizeof ttls[0]; i++) {
        for (unsigned k = 0; k < 2; k++) {
            suite_pass(s, 137);
            int before = s->expired;
            bound(s, "due", 1, k ? ENGINE : ROUTER, ttls[i]);
            suite_pass(s, ttls[i] - 1);
            suite_advance(s);
            assert_int_equal(held(s), 1);
            assert_int_equal(s->expired, before);
            for (unsigned ms = 0; ms < PL_STORE_DUE_MS; ms += PL_STORE_ADVANCE_MS) {
                suite_pass(s, PL_STORE_ADVANCE_MS);
                suite_advance(s);
            }
            assert_int_equal(held(s), 0);
            assert_int_equal(s->expired, before + (int)k);
        }
    }
    pl_store_stats st;
    pl_store_stats_read(s->store, &st);
    assert_int_equal(st.expired_router_only, sizeof ttls / sizeof ttls[0]);
    assert_int_equal(st.expired_engine_backed, sizeof ttls / sizeof ttls[0]);
    suite_close(s);
}

static void expiry_on_access(void **state)
{
    suite *s = *state;
    suite_open(s, 100);
    for (int op = PL_STORE_GET; op <= PL_STORE_REMOVE; op++) {
        for (int k = 0; k < 2; k++) {
            s->expired = 0;
            bound(s, "old", 3, k ? ENGINE : ROUTER, 1000);
            suite_pass(s, 1000);
            pl_store_call c = op == PL_STORE_PUT ? put_call("old", 4, ROUTER, 1000)
                                                 : call_of((pl_store_op)op, "old");
            assert_int_equal(run(s, &c), op == PL_STORE_PUT ? 0 : PL_ENOTFOUND);
            assert_false(c.had_old);
            suite_reported(s);
            assert_int_equal(s->expired, k);
            suite_advance(s);
            assert_int_equal(s->expired, k); /* once */
            pl_store_call gone = call_of(PL_STORE_REMOVE, "old");
            assert_int_equal(run(s, &gone), op == PL_STORE_PUT ? 0 : PL_ENOTFOUND);
        }
    }
    suite_close(s);
}

static void a_rebind_is_not_removed_by_the_old_expiry(void **state)
{
    suite *s = *state;
    suite_open(s, 100);
    bound(s, "moved", 1, ENGINE, 2000);
    suite_pass(s, 1999);
    pl_store_call c = put_call("moved", 2, ENGINE, 5000);
    assert_int_equal(run(s, &c), 0);
    assert_true(c.had_old);
    for (int i = 0; i < 9; i++) {
        suite_pass(s, 500);
        suite_advance(s);
        assert_int_equal(peeked(s, "moved"), 2);
    }
    assert_int_equal(s->expired, 0);
    /* and to an earlier deadline: the new one counts */
    bound(s, "moved", 3, ENGINE, 60000);
    bound(s, "moved", 4, ENGINE, 700);
    suite_pass(s, 700);
    suite_pass(s, PL_STORE_ADVANCE_MS);
    suite_advance(s);
    assert_int_equal(s->expired, 1);
    assert_int_equal(s->last.slot, 4);
    suite_close(s);
}

typedef struct rebind {
    pl_store_call c; /* first */
    uint64_t version;
    char id[16];
} rebind;

static void bound_again(pl_store_call *c)
{
    rebind *a = (rebind *)c;
    assert_int_equal(c->result, 0);
    assert_false(c->had_old);
    assert_int_not_equal(c->binding.version, a->version);
    free(a);
}

static void bind_again(suite *s, const pl_session_name *name, const pl_binding *b)
{
    rebind *a = calloc(1, sizeof *a);
    memcpy(a->id, name->id.p, name->id.n);
    a->version = b->version;
    a->c = put_call(a->id, b->slot + 1, b->kind, b->ttl_ms);
    a->c.done = bound_again;
    if (pl_store_start(s->store, &a->c) != PL_STORE_PENDING)
        bound_again(&a->c);
}

static void the_callback_may_use_the_store(void **state)
{
    suite *s = *state;
    suite_open(s, 1);
    s->on_expired = bind_again;
    bound(s, "phoenix", 1, ENGINE, 1000);
    for (int i = 0; i < 10; i++) { /* by the sweep and by access */
        suite_pass(s, 2000);
        if (i % 2)
            suite_advance(s);
        else
            assert_int_equal(got(s, "phoenix"), -1);
        suite_reported(s);
        assert_int_equal(s->expired, i + 1);
        assert_int_equal(peeked(s, "phoenix"), i + 2);
    }
    s->on_expired = NULL;
    suite_close(s);
}

/* --- names --- */

static void names_match_exactly(void **state)
{
    static char longest[PL_SESSION_MAX_ID_BYTES + 1], other[PL_SESSION_MAX_ID_BYTES + 1];
    static char tenant[PL_SESSION_MAX_TENANT_BYTES];
    memset(longest, 'x', PL_SESSION_MAX_ID_BYTES);
    memset(other, 'x', PL_SESSION_MAX_ID_BYTES);
    memset(tenant, 't', sizeof tenant);
    other[PL_SESSION_MAX_ID_BYTES - 1] = 'y';
    const pl_session_name names[] = {
        {PL_STR("acme"), PL_STR("session-1")},
        {PL_STR("acme"), PL_STR("session-12")},
        {PL_STR("acme"), PL_STR("session-")},
        {PL_STR("acme"), PL_STR("Session-1")},
        {PL_STR("acme"), PL_STR("session-1 ")},
        {PL_STR("acme"), PL_STR("session-1\0")},
        {PL_STR("acme"), PL_STR("session-1\0b")},
        {PL_STR("acmes"), PL_STR("ession-1")},
        {PL_STR("acm"), PL_STR("esession-1")},
        {PL_STR(""), PL_STR("acmesession-1")},
        {{NULL, 0}, PL_STR("session-1")},
        {PL_STR("other"), PL_STR("session-1")},
        {PL_STR("acme"), {longest, PL_SESSION_MAX_ID_BYTES}},
        {PL_STR("acme"), {other, PL_SESSION_MAX_ID_BYTES}},
        {PL_STR("acme"), {longest, PL_SESSION_MAX_ID_BYTES - 1}},
        {PL_STR("acm"), {longest, PL_SESSION_MAX_ID_BYTES}},
        {{tenant, sizeof tenant}, {longest, PL_SESSION_MAX_ID_BYTES}},
        {{tenant, sizeof tenant - 1}, {longest, PL_SESSION_MAX_ID_BYTES}},
        {PL_STR("t"), PL_STR("r\n*3\r\n$3\r\nSET \xff\"'{}")},
    };
    enum { N = sizeof names / sizeof names[0] };
    suite *s = *state;
    suite_open(s, 100);
    for (int i = 0; i < N; i++) {
        pl_store_call c = put_call("", i, i % 2 ? ENGINE : ROUTER, 60000);
        c.name = names[i];
        assert_int_equal(run(s, &c), 0);
        assert_false(c.had_old);
    }
    assert_int_equal(held(s), N);
    for (int i = 0; i < N; i++) {
        pl_store_call c = {.op = PL_STORE_GET, .name = names[i]};
        assert_int_equal(run(s, &c), 0);
        assert_int_equal(c.binding.slot, i);
    }
    for (int i = 0; i < N; i += 2) {
        pl_store_call c = {.op = PL_STORE_REMOVE, .name = names[i]};
        assert_int_equal(run(s, &c), 0);
        assert_int_equal(c.old.slot, i);
    }
    for (int i = 0; i < N; i++) {
        pl_store_call c = {.op = PL_STORE_PEEK, .name = names[i]};
        assert_int_equal(run(s, &c), i % 2 ? 0 : PL_ENOTFOUND);
    }
    suite_close(s);
}

static void bad_calls_are_refused_and_change_nothing(void **state)
{
    static char big[PL_SESSION_MAX_ID_BYTES + 1];
    memset(big, 'x', sizeof big);
    suite *s = *state;
    suite_open(s, 100);
    bound(s, "a", 1, ENGINE, 1000);
    for (int i = 0; i < 13; i++) {
        pl_store_call c = put_call("a", 2, ROUTER, 5000);
        switch (i) {
        case 0:
            c.name.id.n = 0;
            break;
        case 1:
            c.name.id = (pl_str){big, sizeof big};
            break;
        case 2:
            c.name.tenant = (pl_str){big, PL_SESSION_MAX_TENANT_BYTES + 1};
            break;
        case 3:
            c.binding.ttl_ms = 0;
            break;
        case 4:
            c.binding.ttl_ms = PL_SESSION_MAX_TTL_MS + 1;
            break;
        case 5:
            c.binding.slot = -1;
            break;
        case 6:
            c.binding.rank = -1;
            break;
        case 7:
            c.binding.rank = PL_SESSION_MAX_RANK + 1;
            break;
        case 8:
            c.binding.kind = (pl_session_kind)2;
            break;
        case 9:
            c.binding.note.n = sizeof c.binding.note.bytes + 1;
            break;
        case 10: /* a lease on a router-only one */
            c.owner = 7;
            c.lease_ms = 1000;
            break;
        case 11:
            c.binding.kind = ENGINE;
            c.owner = 7;
            break;
        case 12:
            c.binding.kind = ENGINE;
            c.owner = 7;
            c.lease_ms = PL_SESSION_MAX_TTL_MS + 1;
            break;
        }
        assert_int_equal(run(s, &c), PL_EINVALID);
        for (int op = PL_STORE_GET; i < 3 && op <= PL_STORE_RELEASE; op++) {
            c.op = (pl_store_op)op;
            c.owner = 7;
            c.lease_ms = 1000;
            assert_int_equal(run(s, &c), PL_EINVALID);
        }
    }
    pl_store_call none = turn_call(PL_STORE_LEASE, "a", 0, 1000); /* nobody's */
    assert_int_equal(run(s, &none), PL_EINVALID);
    none.op = PL_STORE_RELEASE;
    assert_int_equal(run(s, &none), PL_EINVALID);
    none = turn_call(PL_STORE_LEASE, "a", 7, 0);
    assert_int_equal(run(s, &none), PL_EINVALID);
    none = turn_call(PL_STORE_RELEASE, "a", 7, 0);
    none.binding.note.n = 80;
    assert_int_equal(run(s, &none), PL_EINVALID);
    none = call_of((pl_store_op)(PL_STORE_RELEASE + 1), "a");
    assert_int_equal(run(s, &none), PL_EINVALID);
    assert_int_equal(held(s), 1);
    assert_int_equal(peeked(s, "a"), 1);
    suite_close(s);
}

/* --- what is handed back --- */

static void remove_and_rebind_hand_back_the_binding(void **state)
{
    suite *s = *state;
    suite_open(s, 100);
    for (int kind = ROUTER; kind <= ENGINE; kind++) {
        uint64_t now_ns = suite_now_ns(s);
        uint64_t first = bound(s, "a", 5, (pl_session_kind)kind, 30000);
        pl_store_call c = put_call("a", 6, ENGINE, 40000);
        assert_int_equal(run(s, &c), 0);
        assert_true(c.had_old);
        assert_int_equal(c.old.slot, 5);
        assert_int_equal(c.old.generation, 12);
        assert_int_equal(c.old.rank, 2);
        assert_int_equal(c.old.kind, kind);
        assert_int_equal(c.old.ttl_ms, 30000);
        assert_true(c.old.deadline_ns >= now_ns + 30000 * 1000000ull);
        assert_int_equal(c.old.version, first);
        uint64_t second = c.binding.version;
        assert_int_not_equal(second, first);

        pl_store_call r = call_of(PL_STORE_REMOVE, "a");
        assert_int_equal(run(s, &r), 0);
        assert_true(r.had_old);
        assert_int_equal(r.old.slot, 6);
        assert_int_equal(r.old.kind, ENGINE);
        assert_int_equal(r.old.version, second);
        assert_int_equal(run(s, &r), PL_ENOTFOUND);
        assert_false(r.had_old);
        assert_int_equal(got(s, "a"), -1);
        assert_int_equal(held(s), 0);
    }
    suite_pass(s, 60000);
    suite_advance(s);
    assert_int_equal(s->expired, 0); /* none of them was left to expire */
    suite_close(s);
}

static void conditions_hold(void **state)
{
    suite *s = *state;
    suite_open(s, 100);
    pl_store_call first = put_call("a", 1, ENGINE, 5000);
    first.when = PL_STORE_IF_ABSENT;
    assert_int_equal(run(s, &first), 0);
    pl_store_call second = put_call("a", 2, ENGINE, 5000);
    second.when = PL_STORE_IF_ABSENT;
    assert_int_equal(run(s, &second), PL_EEXISTS);
    assert_true(second.had_old);
    assert_int_equal(second.old.slot, 1);
    assert_int_equal(second.old.version, first.binding.version);

    pl_store_call move = put_call("a", 3, ENGINE, 5000);
    move.when = PL_STORE_IF_VERSION;
    move.version = first.binding.version + 1;
    assert_int_equal(run(s, &move), PL_EEXISTS);
    assert_int_equal(peeked(s, "a"), 1);
    move.version = first.binding.version;
    assert_int_equal(run(s, &move), 0);
    assert_int_equal(move.old.slot, 1);
    assert_int_equal(run(s, &move), PL_EEXISTS); /* that version has gone */

    pl_store_call close = call_of(PL_STORE_REMOVE, "a");
    close.when = PL_STORE_IF_VERSION;
    close.version = first.binding.version;
    assert_int_equal(run(s, &close), PL_EEXISTS);
    assert_int_equal(got(s, "a"), 3);
    close.version = move.binding.version;
    assert_int_equal(run(s, &close), 0);
    assert_int_equal(close.old.slot, 3);
    assert_int_equal(run(s, &close), PL_ENOTFOUND);
    assert_int_equal(run(s, &move), PL_ENOTFOUND);

    /* a name that was removed gets no version again */
    pl_store_call again = put_call("a", 1, ENGINE, 5000);
    assert_int_equal(run(s, &again), 0);
    assert_int_not_equal(again.binding.version, first.binding.version);
    assert_int_not_equal(again.binding.version, move.binding.version);
    /* an expired one is absent */
    suite_pass(s, 5000);
    second.name = named("a");
    assert_int_equal(run(s, &second), 0);
    suite_reported(s);
    assert_int_equal(s->expired, 1);
    suite_close(s);
}

/* --- the cap --- */

static void at_the_cap_the_least_recently_used_router_only_session_goes(void **state)
{
    suite *s = *state;
    suite_open(s, 5);
    static const char *const ids[] = {"e1", "r1", "r2", "e2", "r3"};
    for (int i = 0; i < 5; i++) {
        bound(s, ids[i], i, ids[i][0] == 'e' ? ENGINE : ROUTER, 600000);
        suite_pass(s, 1500);
    }
    assert_int_equal(got(s, "r1"), 1); /* now the most recently used */
    suite_pass(s, 1500);
    assert_int_equal(peeked(s, "r2"), 2); /* no use */
    bound(s, "n1", 10, ENGINE, 600000);
    assert_int_equal(peeked(s, "r2"), -1);
    suite_pass(s, 1500);
    bound(s, "n2", 11, ROUTER, 600000);
    assert_int_equal(peeked(s, "r3"), -1);
    suite_pass(s, 1500);
    assert_int_equal(got(s, "r1"), 1);
    suite_pass(s, 1500);
    bound(s, "n3", 12, ENGINE, 600000);
    assert_int_equal(peeked(s, "n2"), -1);
    bound(s, "r1", 13, ENGINE, 600000); /* a rebind needs no room */
    assert_int_equal(held(s), 5);

    /* nothing is left to evict */
    for (int kind = ROUTER; kind <= ENGINE; kind++) {
        pl_store_call c = put_call("n4", 14, (pl_session_kind)kind, 600000);
        assert_int_equal(run(s, &c), PL_ELIMIT);
    }
    static const char *const left[] = {"e1", "e2", "n1", "n3", "r1"};
    for (int i = 0; i < 5; i++)
        assert_true(got(s, left[i]) >= 0);
    assert_int_equal(s->expired, 0);
    pl_store_stats st;
    pl_store_stats_read(s->store, &st);
    assert_int_equal(st.evicted, 3);
    assert_int_equal(st.refused, 2);
    assert_int_equal(st.engine_backed, 5);
    /* an expired one makes room */
    suite_pass(s, 600000 + PL_STORE_DUE_MS);
    suite_advance(s);
    bound(s, "n4", 14, ENGINE, 600000);
    suite_close(s);
}

#include "store_leases.h"
#include "store_model.h"

#define STORE_SUITE                                                                                \
    cmocka_unit_test_setup(get_refreshes_and_peek_does_not, fresh_suite),                          \
        cmocka_unit_test_setup(due_sessions_expire_within_a_second_without_being_touched,          \
                               fresh_suite),                                                       \
        cmocka_unit_test_setup(expiry_on_access, fresh_suite),                                     \
        cmocka_unit_test_setup(a_rebind_is_not_removed_by_the_old_expiry, fresh_suite),            \
        cmocka_unit_test_setup(the_callback_may_use_the_store, fresh_suite),                       \
        cmocka_unit_test_setup(names_match_exactly, fresh_suite),                                  \
        cmocka_unit_test_setup(bad_calls_are_refused_and_change_nothing, fresh_suite),             \
        cmocka_unit_test_setup(remove_and_rebind_hand_back_the_binding, fresh_suite),              \
        cmocka_unit_test_setup(conditions_hold, fresh_suite),                                      \
        cmocka_unit_test_setup(at_the_cap_the_least_recently_used_router_only_session_goes,        \
                               fresh_suite),                                                       \
        cmocka_unit_test_setup(a_binding_carries_what_its_owner_keeps, fresh_suite),               \
        cmocka_unit_test_setup(one_turn_at_a_time, fresh_suite),                                   \
        cmocka_unit_test_setup(a_leased_session_does_not_expire, fresh_suite),                     \
        cmocka_unit_test_setup(a_lease_that_is_not_renewed_ends, fresh_suite),                     \
        cmocka_unit_test_setup(a_lease_that_lapsed_is_told, fresh_suite),                          \
        cmocka_unit_test_setup(a_rebind_takes_the_lease_with_it, fresh_suite),                     \
        cmocka_unit_test_setup(a_list_has_each_session_once, fresh_suite),                         \
        cmocka_unit_test_setup(agrees_with_a_model, fresh_suite)

static int fresh_suite(void **state)
{
    static suite s;
    s = (suite){0};
    *state = &s;
    return 0;
}

#endif
