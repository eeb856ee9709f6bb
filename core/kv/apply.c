/* Events into the index: see apply.h. Called by stream.c on the indexer's thread. A pl_apply owns
 * its scratch and the list of open spaces; memory is fixed but for the spaces, which are capped: a
 * model's block sizes and adapters, not the salts, of which clients make as many as they like. An
 * event of any length is worked off in pieces of the scratch's size. */
#include "kv/apply.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "kv/block_hash.h"
#include "kv/event.h"

enum {
    CHUNK_BLOCKS = 1024, /* given to the index at once */
    CHUNK_OBJECTS = 4096 /* images and the like in them */
};

/* A space that is open. Its names are behind it, in one allocation. */
typedef struct space {
    pl_index_space id;
    pl_block_space hash; /* without a salt */
    bool eagle;
    pl_str model, lora;
    uint64_t key;
} space;

/* Where an event's blocks go, and how they are hashed there. */
typedef struct place {
    const space *s;
    const pl_block_space *hash; /* of s, or with a salt that it names or its parent has */
} place;

struct pl_apply {
    pl_index *ix;
    pl_known known;
    space **spaces; /* a hash table by key, without removal: cap is a power of two */
    size_t spaces_n, spaces_cap;
    space **by_id;
    size_t by_id_cap;
    pl_block_space salted; /* made last; block_tokens 0: none was */
    uint64_t engine[CHUNK_BLOCKS], local[CHUNK_BLOCKS];
    pl_block_mm mm[CHUNK_OBJECTS];
    uint32_t tokens[PL_BLOCK_TOKENS_MAX + 1], next[PL_BLOCK_TOKENS_MAX];
};

int pl_apply_new(pl_index *ix, const pl_known *known, pl_apply **out)
{
    pl_apply *a = calloc(1, sizeof *a);
    if (!a)
        return PL_ENOMEM;
    a->ix = ix;
    if (known)
        a->known = *known;
    *out = a;
    return 0;
}

void pl_apply_free(pl_apply *a)
{
    if (!a)
        return;
    for (size_t i = 0; i < a->spaces_cap; i++)
        free(a->spaces[i]);
    free(a->spaces);
    free(a->by_id);
    free(a);
}

/* --- spaces --- */

static uint64_t key_of(pl_str model, uint32_t block_tokens, bool eagle, pl_str lora)
{
    uint64_t part[4] = {XXH3_64bits(model.p, model.n), XXH3_64bits(lora.p, lora.n), block_tokens,
                        eagle};
    return XXH3_64bits(part, sizeof part);
}

static bool is_space(const space *s, uint64_t key, pl_str model, uint32_t block_tokens, bool eagle,
                     pl_str lora)
{
    return s->key == key && s->hash.block_tokens == block_tokens && s->eagle == eagle &&
           pl_str_eq(s->model, model) && pl_str_eq(s->lora, lora);
}

static void put_space(space **table, size_t cap, space *s)
{
    size_t i = s->key & (cap - 1);
    while (table[i])
        i = (i + 1) & (cap - 1);
    table[i] = s;
}

/* Room for one more in both tables. */
static bool grow_spaces(pl_apply *a, pl_index_space id)
{
    if (a->spaces_n * 2 >= a->spaces_cap) {
        size_t cap = a->spaces_cap ? a->spaces_cap * 2 : 64;
        space **table = calloc(cap, sizeof *table);
        if (!table)
            return false;
        for (size_t i = 0; i < a->spaces_cap; i++)
            if (a->spaces[i])
                put_space(table, cap, a->spaces[i]);
        free(a->spaces);
        a->spaces = table;
        a->spaces_cap = cap;
    }
    if (id < a->by_id_cap || id >= 16u * PL_APPLY_SPACES_MAX)
        return true; /* an id beyond that can be opened, not looked up */
    size_t cap = a->by_id_cap ? a->by_id_cap : 64;
    while (cap <= id)
        cap *= 2;
    space **by_id = realloc(a->by_id, cap * sizeof *by_id);
    if (!by_id)
        return false;
    memset(by_id + a->by_id_cap, 0, (cap - a->by_id_cap) * sizeof *by_id);
    a->by_id = by_id;
    a->by_id_cap = cap;
    return true;
}

static pl_str copy_behind(char **at, pl_str s)
{
    char *p = *at;
    if (s.n)
        memcpy(p, s.p, s.n);
    *at += s.n;
    return (pl_str){p, s.n};
}

/* NULL: no room. The sizes were checked. */
static const space *open_space(pl_apply *a, pl_str model, uint32_t block_tokens, bool eagle,
                               pl_str lora)
{
    uint64_t key = key_of(model, block_tokens, eagle, lora);
    if (a->spaces_cap)
        for (size_t i = key & (a->spaces_cap - 1); a->spaces[i]; i = (i + 1) & (a->spaces_cap - 1))
            if (is_space(a->spaces[i], key, model, block_tokens, eagle, lora))
                return a->spaces[i];
    if (a->spaces_n >= PL_APPLY_SPACES_MAX)
        return NULL;
    space *s = malloc(sizeof *s + model.n + lora.n);
    if (!s)
        return NULL;
    char *at = (char *)(s + 1);
    *s = (space){.eagle = eagle, .key = key};
    s->model = copy_behind(&at, model);
    s->lora = copy_behind(&at, lora);
    if (pl_block_space_init(&s->hash, block_tokens, eagle, lora, PL_STR("")) ||
        !(s->id = pl_index_space_open(a->ix, model, block_tokens, eagle, lora)) ||
        !grow_spaces(a, s->id)) {
        free(s);
        return NULL;
    }
    put_space(a->spaces, a->spaces_cap, s);
    a->spaces_n++;
    if (s->id < a->by_id_cap)
        a->by_id[s->id] = s;
    return s;
}

/* --- stores --- */

/* Which of a hybrid model's groups counts: the first that holds whole prefixes. */
static bool group_counts(pl_apply_rank *r, const pl_kv_event *e)
{
    if (e->spec == PL_KV_SPEC_SPARSE)
        return false;
    if (e->group < 0)
        return true;
    if (r->group < 0 && e->kind == PL_KV_STORED && (e->spec == PL_KV_SPEC_DENSE || e->group == 0))
        r->group = e->group;
    return e->group == r->group;
}

/* The salt that vLLM puts among a prompt's first block's extra keys. */
static pl_str salt_among_extra(const pl_kv_event *e)
{
    pl_kv_extra_iter it = pl_kv_extra_begin(e);
    pl_kv_extra x;
    while (!e->has_parent && pl_kv_extra_next(&it, &x) && x.block == 0)
        if (!x.object && !x.binary && !pl_str_eq(x.s, e->lora))
            return x.s;
    return PL_STR("");
}

/* NULL: it cannot be. */
static const pl_block_space *hash_of(pl_apply *a, const space *s, uint64_t seed)
{
    pl_block_space *h = &a->salted;
    if (seed == s->hash.seed)
        return &s->hash;
    if (h->seed == seed && h->block_tokens == s->hash.block_tokens &&
        h->window_tokens == s->hash.window_tokens)
        return h;
    return pl_block_space_seeded(h, s->hash.block_tokens, s->eagle, seed) ? NULL : h;
}

/* False: it has none, which was counted. */
static bool place_of_event(pl_apply *a, const pl_apply_target *t, pl_apply_rank *r,
                           const pl_kv_event *e, uint32_t block_tokens, place *out)
{
    pl_str salt = e->salt.n ? e->salt : salt_among_extra(e);
    if (salt.n > PL_APPLY_NAME_MAX || e->lora.n > PL_APPLY_NAME_MAX) {
        r->counts.bad_names++;
        return false;
    }
    uint64_t seed = pl_block_seed(e->lora, salt);
    out->s = NULL;
    if (e->has_parent && a->known.space_of) {
        uint64_t before;
        pl_index_space id = a->known.space_of(a->known.ctx, r->slot, e->parent, &before);
        const space *s = id && id < a->by_id_cap ? a->by_id[id] : NULL;
        if (s && before == 0)
            before = s->hash.seed;
        bool same = s && s->hash.block_tokens == block_tokens && s->eagle == e->bigram &&
                    pl_str_eq(s->lora, e->lora) && (salt.n == 0 || before == seed);
        if (id == 0 || (s && !same)) {
            r->counts.unknown_parents++;
            return false;
        }
        out->s = s;
        if (s)
            seed = before;
    }
    if (!out->s)
        out->s = open_space(a, t->model, block_tokens, e->bigram, e->lora);
    out->hash = out->s ? hash_of(a, out->s, seed) : NULL;
    if (!out->hash)
        r->counts.refused += e->hashes.n;
    return out->hash != NULL;
}

/* An event's extra keys, in step with its blocks. */
typedef struct objects {
    pl_kv_extra_iter it;
    pl_kv_extra ahead;
    bool has_ahead;
} objects;

/* The objects of blocks [from, to) into a->mm; their number, or -1 when there are too many. What
 * the seed already stands for is left out; anything else that the engine hashed sets the block
 * apart, so that it cannot be taken for the same tokens without it. */
static long take_objects(pl_apply *a, const place *p, objects *o, uint32_t from, uint32_t to)
{
    long n = 0;
    while (o->has_ahead && o->ahead.block < to) {
        const pl_kv_extra *x = &o->ahead;
        bool name = !x->object && !x->binary &&
                    (pl_str_eq(x->s, p->s->lora) ||
                     (x->s.n && pl_block_seed(p->s->lora, x->s) == p->hash->seed));
        uint64_t hash;
        if (!name && pl_mm_hash(x->s, &hash) == 0) {
            if (n == CHUNK_OBJECTS)
                return -1;
            a->mm[n++] = (pl_block_mm){x->block - from, hash};
        }
        o->has_ahead = pl_kv_extra_next(&o->it, &o->ahead);
    }
    pl_block_mm_sort(a->mm, (size_t)n);
    return n;
}

/* The next k blocks' local hashes into a->local. seam: the token that the piece before ended
 * with. */
static bool hash_chunk(pl_apply *a, const place *p, pl_kv_list *tokens, size_t k, long objects_n,
                       const uint32_t *seam)
{
    size_t n = k * p->hash->block_tokens;
    if (pl_kv_tokens(tokens, a->tokens, p->s->eagle ? a->next : NULL, n) != n)
        return false;
    if (p->s->eagle) { /* pairs that overlap are one run of tokens */
        if (seam && a->tokens[0] != *seam)
            return false;
        for (size_t i = 0; i + 1 < n; i++)
            if (a->next[i] != a->tokens[i + 1])
                return false;
        a->tokens[n] = a->next[n - 1];
        n++;
    }
    int64_t got = objects_n > 0 ? pl_block_hash_mm(p->hash, a->tokens, n, a->mm, (size_t)objects_n,
                                                   a->local, NULL, k)
                                : pl_block_hash(p->hash, a->tokens, n, a->local, NULL, k);
    return got == (int64_t)k;
}

static void store_blocks(pl_apply *a, pl_apply_rank *r, const pl_kv_event *e, const place *p)
{
    pl_kv_list hashes = e->hashes, locals = e->hashes, tokens = e->tokens;
    size_t most = PL_BLOCK_TOKENS_MAX / p->hash->block_tokens;
    most = most < 1 ? 1 : most > CHUNK_BLOCKS ? CHUNK_BLOCKS : most;
    uint64_t parent = e->parent;
    bool has_parent = e->has_parent;
    uint32_t seam = 0;
    objects o = {.it = pl_kv_extra_begin(e)};
    o.has_ahead = pl_kv_extra_next(&o.it, &o.ahead);
    for (uint32_t from = 0; hashes.n;) {
        size_t k = pl_kv_hashes(&hashes, a->engine, most);
        long objects_n = take_objects(a, p, &o, from, from + (uint32_t)k);
        if (k == 0 || objects_n < 0 ||
            (e->has_locals ? pl_kv_locals(&locals, a->local, k) != k
                           : !hash_chunk(a, p, &tokens, k, objects_n, from ? &seam : NULL))) {
            r->counts.bad_events++;
            return;
        }
        int rc = pl_index_store(a->ix, p->s->id, r->slot, (pl_tier)e->tier,
                                has_parent ? &parent : NULL, a->engine, a->local, k);
        if (rc < 0) {
            if (rc == PL_ENOTFOUND)
                r->counts.unknown_parents++;
            else
                r->counts.refused += k + hashes.n;
            return;
        }
        if (!has_parent && p->hash != &p->s->hash && a->known.begins)
            a->known.begins(a->known.ctx, r->slot, a->engine[0], p->hash->seed);
        r->counts.stored += k;
        r->landed++;
        from += (uint32_t)k;
        parent = a->engine[k - 1];
        has_parent = true;
        seam = p->s->eagle && !e->has_locals ? a->next[k * p->hash->block_tokens - 1] : 0;
    }
}

/* Events of a lower tier may name blocks only: those that are known are there too. */
static void store_names(pl_apply *a, pl_apply_rank *r, const pl_kv_event *e)
{
    pl_kv_list hashes = e->hashes;
    while (hashes.n) {
        size_t k = pl_kv_hashes(&hashes, a->engine, CHUNK_BLOCKS);
        if (k == 0)
            return;
        size_t known = a->known.also
                           ? a->known.also(a->known.ctx, r->slot, (pl_tier)e->tier, a->engine, k)
                           : 0;
        r->counts.copied += known;
        r->landed += known > 0;
        r->counts.unresolved += k - known;
    }
}

/* A size that was learned is that of an engine which may have restarted since it was cleared; one
 * that a block alone has said stands when another event says it, too. */
static uint32_t learn_size(pl_apply_target *t, const pl_apply_rank *r, const pl_kv_event *e)
{
    uint32_t said = (uint32_t)e->block_tokens, known = pl_apply_block_tokens(t);
    bool alone = e->hashes.n == 1, last = said < known && alone;
    if (said == known) {
        t->guessed = false;
    } else if (!t->block_tokens && (r->landed ? t->guessed && !last : !(last && known % said))) {
        t->learned_tokens = said;
        t->guessed = alone;
    }
    return pl_apply_block_tokens(t);
}

/* Whether the event's block size is the worker's. */
static bool size_is_right(pl_apply_target *t, pl_apply_rank *r, const pl_kv_event *e)
{
    if (e->block_tokens == 0 || e->block_tokens > PL_BLOCK_TOKENS_MAX) {
        r->counts.bad_block_size++;
        return false;
    }
    if (e->tokens.n != e->hashes.n * e->block_tokens) {
        r->counts.bad_counts++;
        return false;
    }
    uint32_t said = (uint32_t)e->block_tokens, known = learn_size(t, r, e);
    bool last = said < known && e->hashes.n == 1; /* SGLang's last page, as short as it is */
    if (said == known)
        return true;
    r->counts.partial += last;
    r->counts.bad_block_size += !last;
    return false;
}

static void store(pl_apply *a, pl_apply_target *t, pl_apply_rank *r, const pl_kv_event *e)
{
    uint32_t block_tokens = pl_apply_block_tokens(t);
    place p;
    r->counts.stores++;
    r->tried++;
    if (e->tier < 0) {
        r->counts.unknown_media++;
    } else if (!group_counts(r, e)) {
        r->counts.sparse++;
    } else if (e->unnamed_lora) {
        r->counts.unnamed_lora++;
    } else if (e->hashes.n == 0) {
        return;
    } else if (e->has_locals) {
        if (block_tokens == 0)
            r->counts.bad_block_size++;
        else if (place_of_event(a, t, r, e, block_tokens, &p))
            store_blocks(a, r, e, &p);
    } else if (e->tokens.n == 0) {
        store_names(a, r, e);
    } else if (size_is_right(t, r, e)) {
        r->eagle = e->bigram;
        r->plain = !e->bigram;
        if (place_of_event(a, t, r, e, (uint32_t)e->block_tokens, &p))
            store_blocks(a, r, e, &p);
    }
}

static void take_out(pl_apply *a, pl_apply_rank *r, const pl_kv_event *e)
{
    r->counts.removals++;
    if (e->tier < 0) {
        r->counts.unknown_media++;
        return;
    }
    if (!group_counts(r, e)) {
        r->counts.sparse++;
        return;
    }
    pl_kv_list hashes = e->hashes;
    size_t k;
    while ((k = pl_kv_hashes(&hashes, a->engine, CHUNK_BLOCKS)) > 0) {
        size_t known = pl_index_remove(a->ix, r->slot, (pl_tier)e->tier, a->engine, k);
        r->counts.removed += known;
        r->counts.removed_unknown += k - known;
    }
}

/* --- batches --- */

void pl_apply_clear(pl_apply *a, pl_apply_rank *r)
{
    r->group = -1;
    r->tried = r->landed = 0;
    pl_index_clear(a->ix, r->slot, -1);
}

/* An engine with one worker here is that worker, whatever it calls its rank. */
static pl_apply_rank *rank_of(pl_apply_target *t, int stream, int32_t said)
{
    if (said < 0 || t->ranks_n == 1)
        return &t->ranks[stream];
    return said < t->ranks_n ? &t->ranks[said] : NULL;
}

int pl_apply_batch(pl_apply *a, pl_apply_target *t, int rank, const void *payload, size_t n,
                   pl_applied *what)
{
    pl_kv_batch b;
    int rc = pl_kv_batch_open(&b, payload, n);
    if (rc)
        return rc;
    *what = (pl_applied){.ts = b.ts};
    pl_apply_rank *stream = &t->ranks[rank];
    stream->counts.batches++;
    pl_kv_event e;
    while ((rc = pl_kv_batch_next(&b, &e)) != 0) {
        pl_apply_rank *r = rank_of(t, rank, rc > 0 && e.rank >= 0 ? e.rank : b.rank);
        if (!r) {
            stream->counts.unknown_ranks++;
            stream->tried++;
            continue;
        }
        r->counts.events++;
        if (rc < 0) {
            r->counts.bad_events++;
            r->tried++;
            continue;
        }
        switch (e.kind) {
        case PL_KV_STORED:
            if (t->fed)
                t->fed[(r - t->ranks) / 64] |= 1ull << (r - t->ranks) % 64;
            store(a, t, r, &e);
            break;
        case PL_KV_REMOVED:
            take_out(a, r, &e);
            break;
        case PL_KV_CLEARED:
            r->counts.clears++;
            pl_apply_clear(a, r);
            what->emptied |= r == stream;
            break;
        default:
            r->counts.unknown_types++;
            r->tried++;
        }
    }
    return 0;
}

int pl_apply_keep(pl_apply *a, pl_apply_rank *r, const uint64_t *engine, size_t n, size_t *dropped)
{
    if (!a->known.keep)
        return PL_EUNAVAILABLE;
    *dropped = a->known.keep(a->known.ctx, r->slot, engine, n);
    return 0;
}
