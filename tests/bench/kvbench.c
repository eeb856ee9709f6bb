/* The generator of the KV index workload: see kvbench.h. Called by bench_index, on one thread.
 *
 * Five classes, each with a fifth of the entries: conversations of 16, 64, 256 and 1024 blocks of
 * which the first half is one of four system prompts, and 64-block ones that share nothing. Four
 * turns each. Half of them branch off an earlier one after one to three turns, on the same worker
 * three times out of four. A turn's missing prompt is stored in one go (at most 512 blocks), then
 * what is decoded block by block. */
#include "kvbench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/evp.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { CLASSES = 5, FAMILIES = 4, TURNS = 4, PROMPT_MAX = 512, REMOVE_MAX = 8, NO_CUT = -1 };
static const struct {
    uint32_t depth, shared;
} shape[CLASSES] = {{16, 8}, {64, 32}, {256, 128}, {1024, 512}, {64, 0}};

/* Every block made is another one, so blocks have numbers and nothing is looked up by hash. */
typedef struct block {
    uint64_t local, seq;
    uint32_t number;
} block;
typedef struct chain {
    block *p;
    size_t n, cap;
} chain;
typedef struct conversation {
    uint32_t worker;
    chain blocks;
} conversation;
typedef struct numbers {
    uint32_t *p;
    size_t n, cap;
} numbers;

typedef struct gen {
    kvbench_stream *out;
    uint64_t rng, entries, of_class[CLASSES];
    size_t words;         /* of a set of workers */
    uint64_t *held;       /* blocks x words */
    uint64_t *uses;       /* (block + 1) << 16 | worker, twice as many places as are taken */
    uint32_t *uses_count; /* conversations of the worker with that block */
    size_t uses_mask, uses_n;
    uint32_t blocks, blocks_cap;
    chain shared[CLASSES][FAMILIES];
    numbers of[CLASSES][FAMILIES]; /* conversations of the load */
    conversation *conv;
    size_t conv_n, conv_cap;
} gen;

static void *grown(void *p, size_t *cap, size_t n, size_t size)
{
    if (n < *cap)
        return p;
    *cap = *cap ? *cap * 2 : 16;
    if (!(p = realloc(p, *cap * size))) {
        fputs("kvbench: out of memory\n", stderr);
        exit(1);
    }
    return p;
}

static uint64_t next(gen *g)
{
    return kvbench_mix(g->rng += 0x9e3779b97f4a7c15u);
}

static uint64_t below(gen *g, uint64_t n)
{
    return (uint64_t)(((unsigned __int128)next(g) * n) >> 64);
}

static void word(kvbench_section *s, uint64_t w)
{
    s->p = grown(s->p, &s->cap, s->n, sizeof *s->p);
    s->p[s->n++] = w;
}

static void begin_op(kvbench_section *s, int type, bool has_parent, uint32_t worker, size_t n,
                     uint64_t aux)
{
    word(s,
         (uint64_t)type | (uint64_t)has_parent << 8 | (uint64_t)worker << 16 | (uint64_t)n << 32);
    word(s, aux);
    s->ops++;
    s->blocks += n;
}

static uint64_t *holders(const gen *g, uint32_t number)
{
    return g->held + number * g->words;
}

static bool holds(const gen *g, uint32_t number, uint32_t worker)
{
    return holders(g, number)[worker / 64] >> worker % 64 & 1;
}

/* How many conversations of that worker have the block. */
static uint32_t *uses_of(gen *g, uint32_t number, uint32_t worker)
{
    if ((g->uses_n + 1) * 2 > g->uses_mask) {
        uint64_t *old = g->uses;
        uint32_t *count = g->uses_count;
        size_t mask = g->uses_mask;
        g->uses_mask = mask ? mask * 2 + 1 : 4095;
        g->uses_n = 0;
        g->uses = calloc(g->uses_mask + 1, sizeof *g->uses);
        g->uses_count = calloc(g->uses_mask + 1, sizeof *g->uses_count);
        if (!g->uses || !g->uses_count)
            exit(1);
        for (size_t i = 0; old && i <= mask; i++)
            if (old[i] && count[i])
                *uses_of(g, (uint32_t)(old[i] >> 16) - 1, (uint32_t)(old[i] & 0xffff)) = count[i];
        free(old);
        free(count);
    }
    uint64_t key = ((uint64_t)number + 1) << 16 | worker;
    size_t i = kvbench_mix(key) & g->uses_mask;
    while (g->uses[i] && g->uses[i] != key)
        i = (i + 1) & g->uses_mask;
    if (!g->uses[i])
        g->uses_n++;
    g->uses[i] = key;
    return &g->uses_count[i];
}

static void append(chain *c, const block *b)
{
    c->p = grown(c->p, &c->cap, c->n, sizeof *c->p);
    c->p[c->n++] = *b;
}

static void extend(gen *g, chain *c, size_t n)
{
    while (n--) {
        block b = {.local = next(g), .number = g->blocks++};
        uint64_t pair[2] = {c->n ? c->p[c->n - 1].seq : 0, b.local};
        b.seq = c->n ? XXH3_64bits_withSeed(pair, sizeof pair, 1337) : b.local;
        append(c, &b);
        if (g->blocks > g->blocks_cap) {
            g->blocks_cap = g->blocks_cap ? g->blocks_cap * 2 : 65536;
            g->held = realloc(g->held, g->blocks_cap * g->words * sizeof *g->held);
            if (!g->held)
                exit(1);
        }
        memset(holders(g, b.number), 0, g->words * sizeof *g->held);
    }
}

static uint64_t left_at(size_t word_index, uint64_t bits, uint64_t depth)
{
    uint64_t sum = 0;
    for (; bits; bits &= bits - 1) {
        uint64_t worker = word_index * 64 + (uint64_t)__builtin_ctzll(bits);
        sum += kvbench_mix(worker << 32 | depth);
    }
    return sum;
}

/* The checksum of the answer for the first n blocks of a chain. */
static uint64_t expected(const gen *g, const block *b, size_t n)
{
    uint64_t active[64], sum = 0, depth = 0, any = 1;
    memset(active, 0xff, sizeof active);
    for (; depth < n && any; depth += any != 0) {
        const uint64_t *h = holders(g, b[depth].number);
        any = 0;
        for (size_t k = 0; k < g->words; k++) {
            if (depth)
                sum += left_at(k, active[k] & ~h[k], depth);
            any |= active[k] &= h[k];
        }
    }
    for (size_t k = 0; any && k < g->words; k++)
        sum += left_at(k, active[k], depth);
    return sum;
}

/* A query for n blocks: the first `real` are the chain's, the others are nobody's. */
static void query(gen *g, kvbench_section *s, const block *b, size_t real, size_t n)
{
    size_t at = s->n + 1;
    begin_op(s, KVBENCH_QUERY, false, 0, n, 0);
    s->p[at] = expected(g, b, real);
    for (size_t i = 0; i < n; i++)
        word(s, i < real ? b[i].local : next(g));
}

static void store(gen *g, kvbench_section *s, int class, uint32_t worker, const chain *c, size_t i,
                  size_t end)
{
    if (i >= end)
        return;
    begin_op(s, KVBENCH_STORE, i > 0, worker, end - i, i ? c->p[i - 1].seq : 0);
    g->entries += end - i;
    g->of_class[class] += end - i;
    for (; i < end; i++) {
        word(s, c->p[i].local);
        word(s, c->p[i].seq);
        holders(g, c->p[i].number)[worker / 64] |= 1ull << worker % 64;
    }
}

/* A conversation of a class; churn: with a query each turn, and nobody branches off it. */
static size_t converse(gen *g, int class, kvbench_section *s, bool churn)
{
    uint32_t shared = shape[class].shared, turn = (shape[class].depth - shared) / TURNS, kept = 0;
    uint32_t family = (uint32_t)below(g, FAMILIES), worker = (uint32_t)below(g, g->out->workers);
    numbers *of = &g->of[class][family];
    chain c = {0};
    if (shared && below(g, 2) == 1 && of->n) {
        const conversation *from = &g->conv[of->p[below(g, of->n)]];
        kept = 1 + (uint32_t)below(g, TURNS - 1);
        if (below(g, 4) < 3)
            worker = from->worker;
        for (size_t i = 0; i < shared + kept * turn; i++)
            append(&c, &from->blocks.p[i]);
    } else {
        for (size_t i = 0; i < g->shared[class][family].n; i++)
            append(&c, &g->shared[class][family].p[i]);
    }
    size_t have = 0;
    while (have < c.n && holds(g, c.p[have].number, worker))
        have++;
    for (uint32_t t = kept; t < TURNS; t++) {
        size_t prompt = shared + t * turn + (turn + 1) / 2, end = shared + (t + 1) * turn;
        extend(g, &c, end - c.n);
        if (churn)
            query(g, s, c.p, prompt, prompt);
        for (size_t i = have; i < prompt; i += PROMPT_MAX)
            store(g, s, class, worker, &c, i, i + PROMPT_MAX < prompt ? i + PROMPT_MAX : prompt);
        for (size_t i = prompt; i < end; i++)
            store(g, s, class, worker, &c, i, i + 1);
        have = end;
    }
    for (size_t i = 0; i < c.n; i++)
        ++*uses_of(g, c.p[i].number, worker);
    g->conv = grown(g->conv, &g->conv_cap, g->conv_n, sizeof *g->conv);
    g->conv[g->conv_n] = (conversation){worker, c};
    if (!churn) {
        of->p = grown(of->p, &of->cap, of->n, sizeof *of->p);
        of->p[of->n++] = (uint32_t)g->conv_n;
    }
    return g->conv_n++;
}

/* Removes what no other conversation of the worker has, the last block first. */
static uint64_t evict(gen *g, size_t id, kvbench_section *s)
{
    conversation *v = &g->conv[id];
    uint64_t *gone = malloc((v->blocks.n + 1) * sizeof *gone);
    size_t n = 0;
    if (!gone)
        exit(1);
    for (size_t i = v->blocks.n; i-- > 0;) {
        const block *b = &v->blocks.p[i];
        if (--*uses_of(g, b->number, v->worker))
            continue;
        gone[n++] = b->seq;
        holders(g, b->number)[v->worker / 64] &= ~(1ull << v->worker % 64);
    }
    for (size_t i = 0; i < n; i += REMOVE_MAX) {
        size_t k = n - i < REMOVE_MAX ? n - i : REMOVE_MAX;
        begin_op(s, KVBENCH_REMOVE, false, v->worker, k, 0);
        for (size_t j = 0; j < k; j++)
            word(s, gone[i + j]);
    }
    g->entries -= n;
    free(gone);
    free(v->blocks.p);
    v->blocks = (chain){0};
    return n;
}

static void make_queries(gen *g)
{
    static const struct {
        uint32_t depth, count;
    } row[] = {{1, 4096}, {16, 4096}, {64, 4096}, {256, 4096}, {1024, 2048}};
    for (int q = 0; q < 5; q++)
        for (uint32_t i = 0; i < row[q].count; i++) {
            uint32_t d = row[q].depth, family, real = d;
            int class = d == 1 ? (int)below(g, 4) : q - 1;
            do
                family = (uint32_t)below(g, FAMILIES);
            while (!g->of[class][family].n);
            numbers *of = &g->of[class][family];
            const conversation *v = &g->conv[of->p[below(g, of->n)]];
            if (d > 1) {
                uint64_t r = below(g, 4);
                real = r < 2 ? d : r == 2 ? d / 8 * 7 : d / 2;
            }
            query(g, &g->out->section[KVBENCH_Q1 + q], v->blocks.p, real, d);
        }
}

static void make_churn(gen *g)
{
    static const int share[CLASSES] = {8, 8, 2, 1, 4};
    int class[64], n = 0;
    for (int c = 0; c < CLASSES; c++)
        for (int k = 0; k < share[c]; k++)
            class[n++] = c;
    kvbench_section *s = &g->out->section[KVBENCH_MIXED];
    for (int round = 0; round < 16; round++) {
        size_t id[64];
        for (int i = 0; i < 64; i++)
            id[i] = converse(g, class[below(g, (uint64_t)n)], s, true);
        for (int i = 63; i >= 0; i--)
            evict(g, id[i], s);
    }
}

void kvbench_make(kvbench_stream *out, uint64_t workers, uint64_t target, uint64_t seed)
{
    static const char *const name[] = {"load",  "q1",    "q16",    "q64", "q256",
                                       "q1024", "mixed", "remove", "rq"};
    *out = (kvbench_stream){.workers = workers, .target = target, .seed = seed};
    for (int i = 0; i < KVBENCH_SECTIONS; i++)
        strcpy(out->section[i].name, name[i]);
    gen *g = calloc(1, sizeof *g);
    if (!g)
        exit(1);
    g->out = out;
    g->rng = seed;
    g->words = (workers + 63) / 64;
    for (int c = 0; c < CLASSES; c++)
        for (int f = 0; f < FAMILIES; f++)
            extend(g, &g->shared[c][f], shape[c].shared);
    while (g->entries < target) { /* always the class with the fewest */
        int c = 0;
        for (int k = 1; k < CLASSES; k++)
            if (g->of_class[k] < g->of_class[c])
                c = k;
        converse(g, c, &out->section[KVBENCH_LOAD], false);
    }
    out->entries = g->entries;
    size_t loaded = g->conv_n;
    make_queries(g);
    make_churn(g);
    uint32_t *order = malloc(loaded * sizeof *order);
    if (!order)
        exit(1);
    for (size_t i = 0; i < loaded; i++)
        order[i] = (uint32_t)i;
    for (size_t i = loaded - 1; i >= 1; i--) {
        size_t j = below(g, i + 1);
        uint32_t t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    uint64_t removed = 0;
    for (size_t i = 0; i < loaded && removed < out->entries / 4; i++)
        removed += evict(g, order[i], &out->section[KVBENCH_REMOVE_SECTION]);
    for (int i = 0; i < 2000; i++) {
        const chain *c = &g->conv[below(g, loaded)].blocks;
        if (c->n)
            query(g, &out->section[KVBENCH_AFTER], c->p, c->n, c->n);
    }
    free(order);
    for (size_t i = 0; i < g->conv_n; i++)
        free(g->conv[i].blocks.p);
    for (int i = 0; i < CLASSES * FAMILIES; i++) {
        free(g->shared[i / FAMILIES][i % FAMILIES].p);
        free(g->of[i / FAMILIES][i % FAMILIES].p);
    }
    free(g->conv);
    free(g->held);
    free(g->uses);
    free(g->uses_count);
    free(g);
}

void kvbench_free(kvbench_stream *s)
{
    for (int i = 0; i < KVBENCH_SECTIONS; i++)
        free(s->section[i].p);
}

/* --- the file --- */

void kvbench_sha256(const kvbench_stream *s, char hex[65])
{
    uint64_t head[8] = {0, 1 | s->workers << 32, s->seed, s->target, KVBENCH_SECTIONS};
    uint64_t at = sizeof head + KVBENCH_SECTIONS * 48;
    unsigned char sum[32];
    memcpy(head, "KVIDXOP1", 8);
    EVP_MD_CTX *md = EVP_MD_CTX_new();
    if (!md || !EVP_DigestInit_ex(md, EVP_sha256(), NULL))
        exit(1);
    EVP_DigestUpdate(md, head, sizeof head);
    for (int i = 0; i < KVBENCH_SECTIONS; i++) {
        const kvbench_section *x = &s->section[i];
        uint64_t entry[4] = {at, x->n * 8, x->ops, x->blocks};
        EVP_DigestUpdate(md, x->name, sizeof x->name);
        EVP_DigestUpdate(md, entry, sizeof entry);
        at += x->n * 8;
    }
    for (int i = 0; i < KVBENCH_SECTIONS; i++)
        EVP_DigestUpdate(md, s->section[i].p, s->section[i].n * 8);
    EVP_DigestFinal_ex(md, sum, NULL);
    EVP_MD_CTX_free(md);
    for (int i = 0; i < 32; i++)
        sprintf(hex + 2 * i, "%02x", sum[i]);
}

const char *kvbench_sum(uint64_t workers, uint64_t target, uint64_t seed)
{
    static const struct {
        uint64_t workers, target;
        const char *sum;
    } known[] = {
        {8, 100000, "f05972388306ccc0d701965ace1cee3039791c0b33f597a9bd071d39527809c3"},
        {8, 1000000, "530dd1d2ff98eb5fb13fc8a068893ff967443b4e0e1b4500a6d03eb979727f5e"},
        {64, 100000, "1dd9532427eec0be769e1959a35edcc242d10faa45c8e570902d1d7f1c5d4e1f"},
        {64, 1000000, "dd8220011d8c64e87634ca4320db87849573704d262437eb227bf6fadcbab5cb"},
        {256, 100000, "a740685f0f2874d98e8f6f631f73bdb2207248fa37fd3afc97b6cb1e63f5061f"},
        {256, 1000000, "26d7db3a9a9222e9dbbd88d97253bcb1a789b6e08d272c2e696339cc8b9b7fc2"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].workers == workers && known[i].target == target && seed == 42)
            return known[i].sum;
    return NULL;
}
