/* The prefix cache against a naive model that keeps a list of nodes with their whole paths and
 * searches it from end to end, under random matches, inserts, locks, marks and evictions. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "engine/radix.h"

enum { LONGEST = 48, MODEL_NODES = 4096, HELD = 6 };

typedef struct model_node {
    uint32_t path[LONGEST];
    int start, end; /* its tokens are path[start..end) */
    int refs;
    uint64_t used;
    int uses, priority;
    int64_t until; /* retained; INT64_MIN: not */
    bool alive;
} model_node;

typedef struct model {
    model_node node[MODEL_NODES];
    int n, page;
    pl_radix_policy policy;
    uint64_t stamp;
} model;

static bool holds(const model_node *v, const uint32_t *tokens, int upto)
{
    return v->alive && v->end >= upto && memcmp(v->path, tokens, (size_t)upto * 4) == 0;
}

static model_node *model_add(model *m, const uint32_t *tokens, int start, int end)
{
    int at = 0;
    while (at < m->n && m->node[at].alive)
        at++;
    assert_true(at < MODEL_NODES);
    if (at == m->n)
        m->n++;
    model_node *v = &m->node[at];
    *v = (model_node){.start = start,
                      .end = end,
                      .used = m->stamp,
                      .uses = 1,
                      .priority = INT32_MIN,
                      .until = INT64_MIN,
                      .alive = true};
    memcpy(v->path, tokens, (size_t)end * 4);
    return v;
}

static int model_match(model *m, const uint32_t *tokens, int n)
{
    int done = 0;
    n -= n % m->page;
    m->stamp++;
    for (;;) {
        model_node *next = NULL;
        for (int i = 0; i < m->n && done < n; i++)
            if (m->node[i].start == done && holds(&m->node[i], tokens, done + m->page))
                next = &m->node[i];
        if (!next)
            return done;
        int end = done + m->page;
        while (end < next->end && end < n && holds(next, tokens, end + m->page))
            end += m->page;
        if (end < next->end) { /* split: the upper part is refreshed, the lower keeps its age */
            model_node *upper = model_add(m, next->path, next->start, end);
            upper->refs = next->refs;
            upper->uses = next->uses;
            upper->priority = next->priority;
            upper->until = next->until;
            next->start = end;
            return end;
        }
        next->used = m->stamp;
        done = end;
    }
}

static int model_peek(const model *m, const uint32_t *tokens, int n)
{
    int best = 0;
    for (int i = 0; i < m->n; i++)
        for (int upto = m->page; upto <= n; upto += m->page)
            if (upto > best && holds(&m->node[i], tokens, upto))
                best = upto;
    return best;
}

static void model_insert(model *m, const uint32_t *tokens, int n)
{
    int have = model_match(m, tokens, n);
    if (have < n)
        model_add(m, tokens, have, n);
}

static void model_lock(model *m, const uint32_t *tokens, int n, int by)
{
    for (int i = 0; i < m->n; i++)
        if (m->node[i].end <= n && holds(&m->node[i], tokens, m->node[i].end))
            m->node[i].refs += by;
}

static void model_mark(model *m, const uint32_t *tokens, int n, int uses, int priority,
                       int64_t until)
{
    for (int i = 0; i < m->n; i++) {
        model_node *v = &m->node[i];
        if (v->end > n || !holds(v, tokens, v->end))
            continue;
        v->uses += uses;
        v->priority = priority > v->priority ? priority : v->priority;
        v->until = until > v->until ? until : v->until;
    }
}

static void model_decay(model *m, int64_t now)
{
    for (int i = 0; i < m->n; i++)
        if (m->node[i].until <= now)
            m->node[i].until = INT64_MIN;
}

/* True when a goes before b. */
static bool sooner(const model *m, const model_node *a, const model_node *b)
{
    bool kept_a = a->until != INT64_MIN, kept_b = b->until != INT64_MIN;
    if (kept_a != kept_b)
        return kept_b;
    if (m->policy == PL_RADIX_LFU && a->uses != b->uses)
        return a->uses < b->uses;
    if (m->policy == PL_RADIX_SLRU && (a->uses > 1) != (b->uses > 1))
        return b->uses > 1;
    if (m->policy == PL_RADIX_PRIORITY && a->priority != b->priority)
        return a->priority < b->priority;
    return a->used < b->used;
}

static int64_t model_evict(model *m, int64_t want)
{
    int64_t gone = 0;
    while (gone < want) {
        model_node *oldest = NULL;
        for (int i = 0; i < m->n; i++) {
            model_node *v = &m->node[i];
            bool leaf = v->alive && v->refs == 0;
            for (int j = 0; leaf && j < m->n; j++)
                leaf = m->node[j].start != v->end || !holds(&m->node[j], v->path, v->end);
            if (leaf && (!oldest || sooner(m, v, oldest)))
                oldest = v;
        }
        if (!oldest)
            break;
        gone += oldest->end - oldest->start;
        oldest->alive = false;
    }
    return gone;
}

static void model_count(const model *m, int64_t *tokens, int64_t *evictable, int64_t *retained,
                        int *nodes)
{
    *tokens = *evictable = *retained = *nodes = 0;
    for (int i = 0; i < m->n; i++)
        if (m->node[i].alive) {
            *tokens += m->node[i].end - m->node[i].start;
            *evictable += m->node[i].refs ? 0 : m->node[i].end - m->node[i].start;
            *retained += m->node[i].until == INT64_MIN ? 0 : m->node[i].end - m->node[i].start;
            ++*nodes;
        }
}

/* Prompts that share prefixes: few symbols, and often a continuation of the last one. */
static int random_prompt(pl_rng *rng, uint32_t *tokens, int last)
{
    int keep = last ? (int)pl_rng_below(rng, (uint32_t)last + 1) : 0;
    int n = keep + 1 + (int)pl_rng_below(rng, 16);
    if (n > LONGEST)
        n = LONGEST;
    for (int i = keep; i < n; i++)
        tokens[i] = pl_rng_below(rng, 3) + 0xfffffffdu;
    return n;
}

static void differential(int page, pl_radix_policy policy, uint64_t seed)
{
    static model m;
    memset(&m, 0, sizeof m);
    m.page = page;
    m.policy = policy;
    pl_radix *r = pl_radix_new(page, policy);
    pl_rng rng = {seed};
    uint32_t prompt[LONGEST], held[HELD][LONGEST];
    pl_radix_node *lock[HELD] = {0};
    int held_n[HELD] = {0}, n = 0;
    for (int round = 0; round < 4000; round++) {
        n = random_prompt(&rng, prompt, n);
        assert_int_equal(pl_radix_peek(r, prompt, n), model_peek(&m, prompt, n));
        int k = (int)pl_rng_below(&rng, HELD);
        uint32_t what = pl_rng_below(&rng, 10);
        if (what < 4) { /* a request: match, lock, insert the rest, keep or let go */
            pl_radix_node *node, *end;
            int hit = pl_radix_match(r, prompt, n, &node), added;
            assert_int_equal(hit, model_match(&m, prompt, n));
            pl_radix_lock(r, node);
            model_lock(&m, prompt, hit, 1);
            int full = n - n % page;
            assert_int_equal(pl_radix_insert(r, node, hit, prompt, full, &end, &added), 0);
            assert_int_equal(added, full - hit);
            model_insert(&m, prompt, full);
            pl_radix_lock(r, end);
            model_lock(&m, prompt, full, 1);
            pl_radix_unlock(r, node);
            model_lock(&m, prompt, hit, -1);
            int uses = (int)pl_rng_below(&rng, 3), priority = (int)pl_rng_below(&rng, 5) - 2;
            int64_t until = pl_rng_below(&rng, 3) ? INT64_MIN : round + pl_rng_below(&rng, 200);
            pl_radix_mark(r, end, uses, priority, until);
            model_mark(&m, prompt, full, uses, priority, until);
            if (lock[k]) {
                pl_radix_unlock(r, lock[k]);
                model_lock(&m, held[k], held_n[k], -1);
            }
            lock[k] = end;
            held_n[k] = full;
            memcpy(held[k], prompt, sizeof prompt);
        } else if (what < 7 && lock[k]) {
            pl_radix_unlock(r, lock[k]);
            model_lock(&m, held[k], held_n[k], -1);
            lock[k] = NULL;
        } else if (what < 8) {
            pl_radix_node *node;
            assert_int_equal(pl_radix_match(r, prompt, n, &node), model_match(&m, prompt, n));
        } else {
            pl_radix_decay(r, round);
            model_decay(&m, round);
            int64_t want = pl_rng_below(&rng, what == 9 ? 8 : 60);
            assert_int_equal(pl_radix_evict(r, want), model_evict(&m, want));
        }
        int64_t tokens, evictable, retained;
        int nodes;
        model_count(&m, &tokens, &evictable, &retained, &nodes);
        assert_int_equal(pl_radix_retained(r), retained);
        assert_int_equal(pl_radix_tokens(r), tokens);
        assert_int_equal(pl_radix_evictable(r), evictable);
        assert_int_equal(pl_radix_nodes(r), nodes);
        assert_true(pl_radix_sound(r));
    }
    for (int k = 0; k < HELD; k++)
        if (lock[k])
            pl_radix_unlock(r, lock[k]);
    assert_int_equal(pl_radix_evictable(r), pl_radix_tokens(r));
    pl_radix_evict(r, INT64_MAX);
    assert_int_equal(pl_radix_tokens(r), 0);
    assert_int_equal(pl_radix_nodes(r), 0);
    pl_radix_free(r);
}

static void test_page_1(void **state)
{
    differential(1, PL_RADIX_LRU, 1);
    differential(1, PL_RADIX_LFU, 2);
    differential(1, PL_RADIX_SLRU, 5);
}

static void test_page_2(void **state)
{
    differential(2, PL_RADIX_PRIORITY, 3);
    differential(2, PL_RADIX_LRU, 6);
}

static void test_page_4(void **state)
{
    differential(4, PL_RADIX_LRU, 4);
    differential(4, PL_RADIX_PRIORITY, 7);
}

static void test_only_whole_pages(void **state)
{
    pl_radix *r = pl_radix_new(16, PL_RADIX_LRU);
    uint32_t t[64];
    for (uint32_t i = 0; i < 64; i++)
        t[i] = i;
    pl_radix_node *end;
    int added;
    assert_int_equal(pl_radix_insert(r, pl_radix_root(r), 0, t, 48, &end, &added), 0);
    assert_int_equal(added, 48);
    assert_int_equal(pl_radix_match(r, t, 64, &end), 48);
    assert_int_equal(pl_radix_match(r, t, 47, &end), 32);
    assert_int_equal(pl_radix_match(r, t, 15, &end), 0);
    t[20] = 999;
    assert_int_equal(pl_radix_peek(r, t, 64), 16);
    pl_radix_free(r);
}

/* Least recently used goes first, and what is locked never goes. */
static void test_eviction_order(void **state)
{
    pl_radix *r = pl_radix_new(1, PL_RADIX_LRU);
    uint32_t a[] = {7, 1}, b[] = {7, 2}, c[] = {7, 3};
    pl_radix_node *node[3];
    int added;
    pl_radix_insert(r, pl_radix_root(r), 0, a, 2, &node[0], &added);
    pl_radix_insert(r, pl_radix_root(r), 0, b, 2, &node[1], &added);
    pl_radix_insert(r, pl_radix_root(r), 0, c, 2, &node[2], &added);
    pl_radix_match(r, a, 2, &node[0]);
    pl_radix_lock(r, node[1]);
    assert_int_equal(pl_radix_evictable(r), 2); /* a's and c's own tokens; 7 is shared with b */
    assert_int_equal(pl_radix_evict(r, 1), 1);
    assert_int_equal(pl_radix_peek(r, c, 2), 1);
    assert_int_equal(pl_radix_peek(r, a, 2), 2);
    assert_int_equal(pl_radix_evict(r, 100), 1);
    assert_int_equal(pl_radix_peek(r, a, 2), 1);
    assert_int_equal(pl_radix_peek(r, b, 2), 2);
    pl_radix_unlock(r, node[1]);
    assert_int_equal(pl_radix_evict(r, 100), 2);
    assert_int_equal(pl_radix_tokens(r), 0);
    pl_radix_free(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_page_1),         cmocka_unit_test(test_page_2),
        cmocka_unit_test(test_page_4),         cmocka_unit_test(test_only_whole_pages),
        cmocka_unit_test(test_eviction_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
