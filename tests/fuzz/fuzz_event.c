/* Any bytes as a batch of KV events, from the wire or (after a first byte of 'j') as JSON: read in
 * pieces of any size its lists are the same, whatever is applied keeps the index's contract, and
 * every event is counted. The index is a stand-in that checks its caller. */
#include <stdlib.h>
#include <string.h>

#include "kv/apply.h"
#include "kv/block_hash.h"
#include "kv/event.h"
#include "kv/event_json.h"

#define MUST(x)                                                                                    \
    do {                                                                                           \
        if (!(x))                                                                                  \
            abort();                                                                               \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint64_t touched; /* so that what is handed over is read */

pl_index_space pl_index_space_open(pl_index *ix, pl_str model, uint32_t block_tokens, bool eagle,
                                   pl_str lora)
{
    MUST(model.n && block_tokens && lora.n <= PL_APPLY_NAME_MAX);
    return 1 + (pl_index_space)lora.n;
}

int pl_index_store(pl_index *ix, pl_index_space space, int slot, pl_tier tier,
                   const uint64_t *parent, const uint64_t *engine, const uint64_t *local, size_t n)
{
    MUST(space && slot >= 0 && slot < 2 && tier >= 0 && (int)tier < PL_TIERS && n);
    for (size_t i = 0; i < n; i++)
        touched += engine[i] ^ local[i];
    touched += parent ? *parent : 0;
    return engine[0] % 5 == 0 ? PL_ENOTFOUND : engine[0] % 7 == 0 ? PL_ELIMIT : 0;
}

size_t pl_index_remove(pl_index *ix, int slot, pl_tier tier, const uint64_t *engine, size_t n)
{
    MUST(slot >= 0 && slot < 2 && tier >= 0 && (int)tier < PL_TIERS && n);
    for (size_t i = 0; i < n; i++)
        touched += engine[i];
    return n / 2;
}

void pl_index_clear(pl_index *ix, int slot, int tier)
{
    MUST(slot >= 0 && slot < 2 && tier == -1);
}

bool pl_index_maintain(pl_index *ix)
{
    return false;
}

static pl_index_space space_of(void *ctx, int slot, uint64_t engine, uint64_t *seed)
{
    *seed = engine % 3 ? 0 : engine;
    return (pl_index_space)(engine % 4);
}

static void begins(void *ctx, int slot, uint64_t engine, uint64_t seed)
{
    MUST(slot >= 0 && slot < 2 && seed != PL_BLOCK_SEED);
}

static size_t also(void *ctx, int slot, pl_tier tier, const uint64_t *engine, size_t n)
{
    MUST(tier >= 0 && (int)tier < PL_TIERS && n);
    return n;
}

/* The sum over a list, taken in pieces. */
static uint64_t sum(const pl_kv_event *e, int which, size_t piece, size_t *n)
{
    uint64_t v[32], total = 0;
    uint32_t t[32], second[32];
    pl_kv_list l = which == 2 ? e->tokens : e->hashes;
    size_t k;
    *n = 0;
    while ((k = which == 0   ? pl_kv_hashes(&l, v, piece)
                : which == 1 ? pl_kv_locals(&l, v, piece)
                             : pl_kv_tokens(&l, t, e->bigram ? second : NULL, piece)) > 0) {
        for (size_t i = 0; i < k; i++)
            total = total * 31 + (which == 2 ? t[i] + (e->bigram ? second[i] : 0) : v[i]);
        *n += k;
    }
    return total;
}

static void look(const pl_kv_event *e)
{
    if (e->kind != PL_KV_STORED && e->kind != PL_KV_REMOVED)
        return;
    for (int which = 0; which < 3; which++) {
        size_t one, many;
        if (which == 1 && !e->has_locals)
            continue;
        MUST(sum(e, which, 1, &one) == sum(e, which, 32, &many) && one == many);
        MUST(one == (which == 2 ? e->tokens.n : e->hashes.n));
    }
    pl_kv_extra_iter it = pl_kv_extra_begin(e);
    pl_kv_extra x;
    uint32_t last = 0;
    while (pl_kv_extra_next(&it, &x)) {
        MUST(x.block >= last && x.block < e->extra.n);
        last = x.block;
        for (size_t i = 0; i < x.s.n; i++)
            touched += (uint8_t)x.s.p[i];
    }
}

static void batch(const void *p, size_t n)
{
    pl_kv_batch b;
    pl_kv_event e;
    int rc = pl_kv_batch_open(&b, p, n);
    MUST(rc == 0 || rc == PL_ESYNTAX || rc == PL_EPROTOCOL);
    uint64_t events = 0;
    if (rc == 0) {
        MUST(b.rank >= -1 && b.rank <= PL_KV_RANK_MAX && b.ts >= 0);
        uint32_t announced = b.left;
        while ((rc = pl_kv_batch_next(&b, &e)) != 0) {
            events++;
            if (rc > 0)
                look(&e);
        }
        MUST(events == announced);
        rc = 0;
    }
    static pl_apply *a;
    static unsigned uses;
    if (a && ++uses % 1000 == 0) { /* the list of spaces is meant to grow, not to fill the run */
        pl_apply_free(a);
        a = NULL;
    }
    if (!a) {
        pl_known known = {.space_of = space_of, .begins = begins, .also = also};
        MUST(pl_apply_new(NULL, &known, &a) == 0);
    }
    pl_apply_rank ranks[2] = {{.slot = 0, .group = -1}, {.slot = 1, .group = -1}};
    pl_apply_target t = {
        .model = PL_STR("m"), .block_tokens = n % 2 ? 4 : 0, .ranks = ranks, .ranks_n = 2};
    pl_applied what;
    MUST(pl_apply_batch(a, &t, 0, p, n, &what) == rc);
    MUST(ranks[0].counts.events + ranks[1].counts.events + ranks[0].counts.unknown_ranks == events);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size && data[0] == 'j') {
        pl_buf out = {0};
        pl_errbuf eb;
        int rc = pl_event_from_json((pl_str){(const char *)data + 1, size - 1}, &out, &eb);
        if (rc == 0) {
            pl_mp c = pl_mp_of(out.p, out.n);
            MUST(pl_mp_skip(&c, 1) == 0 && c.p == c.end);
            batch(out.p, out.n);
        }
        pl_buf_free(&out);
    } else {
        batch(data, size);
    }
    return 0;
}
