/* Approximate mode on the text workload of the peers' figures: prompts of exactly 1,024, 8,192 and
 * 65,536 ASCII characters; 4 system prompts of half the length, the first 32 characters of which
 * are common to all; 4 turns of an eighth each; half of the conversations branch off an earlier one
 * after 1 to 3 turns, three quarters of those on its worker; 8 workers. 20,000 prompts (2,000 of
 * the longest), splitmix64 from seed 42. Matched are 4,096 prompts: half of them whole, a quarter
 * with new text from 7/8 on, a quarter from 1/2 on.
 *
 * Rates are of one thread by its CPU time (the machine may have other work). "from text" hashes the
 * characters into keys and then asks; "from a request" also scans a chat request's body that has
 * them as its only message. "ids" is the same in token ids, one for 4 characters, blocks of 16.
 * Each figure is the best of 5 runs. Every match is checked against what the generator knows.
 * Prints markdown.
 *
 * Usage: bench_text [seed, 42] */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/rng.h"
#include "kv/approx.h"
#include "kv/keys.h"

enum { WORKERS = 8, QUERIES = 4096, RUNS = 5, HEADER = 32, ID_CHARS = 4, ID_BLOCK = 16 };

static void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "bench_text: %s\n", what);
        exit(1);
    }
}

static void *get(size_t n)
{
    void *p = malloc(n);
    must(p, "out of memory");
    return p;
}

static uint64_t clock_ns(clockid_t id)
{
    struct timespec t;
    clock_gettime(id, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t cpu_ns(void)
{
    return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

static uint64_t resident_bytes(void)
{
    unsigned long all, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    must(f && fscanf(f, "%lu %lu", &all, &resident) == 2, "no /proc/self/statm");
    fclose(f);
    return resident * 4096ull;
}

/* --- the workload --- */

typedef struct load {
    size_t chars, prompts;
    char **text; /* of each prompt */
    int *worker;
    char **query;
    size_t *match; /* characters of the query that the best worker holds */
} load;

static pl_rng rng;

static void write_text(char *out, size_t n)
{
    static const char some[] = "abcdefghijklmnopqrstuvwxyz     .";
    for (size_t i = 0; i < n; i++)
        out[i] = some[pl_rng_below(&rng, 32)];
}

static void generate(load *l, size_t chars, size_t prompts)
{
    char *systems[4], header[HEADER];
    size_t half = chars / 2, turn = chars / 8, *of[4], n[4] = {0};
    *l = (load){chars,
                prompts,
                get(prompts * sizeof(char *)),
                get(prompts * sizeof(int)),
                get(QUERIES * sizeof(char *)),
                get(QUERIES * sizeof(size_t))};
    write_text(header, HEADER);
    for (int s = 0; s < 4; s++) {
        of[s] = get(prompts * sizeof(size_t));
        systems[s] = get(half);
        memcpy(systems[s], header, HEADER);
        write_text(systems[s] + HEADER, half - HEADER);
    }
    for (size_t i = 0; i < prompts; i++) {
        uint32_t s = pl_rng_below(&rng, 4);
        size_t kept = half;
        char *text = l->text[i] = get(chars);
        l->worker[i] = (int)pl_rng_below(&rng, WORKERS);
        memcpy(text, systems[s], half);
        if (n[s] && pl_rng_below(&rng, 2)) {
            size_t from = of[s][pl_rng_below(&rng, (uint32_t)n[s])];
            kept += turn * (1 + pl_rng_below(&rng, 3));
            memcpy(text, l->text[from], kept);
            if (pl_rng_below(&rng, 4) < 3)
                l->worker[i] = l->worker[from];
        }
        write_text(text + kept, chars - kept);
        of[s][n[s]++] = i;
    }
    for (int i = 0; i < QUERIES; i++) {
        char *text = l->query[i] = get(chars);
        memcpy(text, l->text[pl_rng_below(&rng, (uint32_t)prompts)], chars);
        uint32_t r = pl_rng_below(&rng, 4);
        l->match[i] = r < 2 ? chars : r == 2 ? turn * 7 : half;
        write_text(text + l->match[i], chars - l->match[i]);
    }
    for (int s = 0; s < 4; s++) {
        free(of[s]);
        free(systems[s]);
    }
}

static void load_free(load *l)
{
    for (size_t i = 0; i < l->prompts; i++)
        free(l->text[i]);
    for (int i = 0; i < QUERIES; i++)
        free(l->query[i]);
    free(l->text);
    free(l->worker);
    free(l->query);
    free(l->match);
}

/* --- keys of one prompt, in one of the ways --- */

typedef enum way { KEYS, TEXT, REQUEST, IDS } way;

static pl_keys_space space;
static pl_arena arena;

static size_t keys_of_text(const char *text, size_t chars, uint64_t *keys)
{
    pl_kv_canon c;
    pl_kv_canon_init(&c, space.text_seed, space.chunk_bytes, keys, chars / space.chunk_bytes);
    pl_kv_canon_put(&c, text, chars);
    return c.n;
}

static const uint64_t *keys_of_request(pl_str body, size_t *n)
{
    pl_scan scan;
    pl_keys k;
    pl_arena_reset(&arena);
    must(pl_scan_body(body, 100, &scan) == 0, "not a request");
    must(pl_keys_of_request(&space, &scan, &arena, &k) == 0, "out of memory");
    *n = k.n;
    return k.key;
}

static const uint64_t *keys_of_ids(const uint32_t *ids, size_t count, size_t *n)
{
    pl_keys k;
    pl_arena_reset(&arena);
    must(pl_keys_of_tokens(&space, ids, count, &arena, &k) == 0, "out of memory");
    *n = k.n;
    return k.key;
}

/* All inputs of a way, made before the clock runs. */
typedef struct inputs {
    size_t n;
    void **in;
    size_t *size; /* keys, or bytes of a body */
} inputs;

static inputs prepare(way w, const load *l, char **texts, size_t n)
{
    static const char before[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"",
                      after[] = "\"}]}";
    inputs x = {n, get(n * sizeof(void *)), get(n * sizeof(size_t))};
    for (size_t i = 0; i < n; i++) {
        if (w == KEYS) {
            x.in[i] = get(l->chars / space.chunk_bytes * sizeof(uint64_t));
            x.size[i] = keys_of_text(texts[i], l->chars, x.in[i]);
        } else if (w == TEXT) {
            x.in[i] = get(l->chars);
            memcpy(x.in[i], texts[i], l->chars);
        } else if (w == REQUEST) {
            x.size[i] = sizeof before - 1 + l->chars + sizeof after - 1;
            char *p = x.in[i] = get(x.size[i]);
            memcpy(p, before, sizeof before - 1);
            memcpy(p + sizeof before - 1, texts[i], l->chars);
            memcpy(p + sizeof before - 1 + l->chars, after, sizeof after - 1);
        } else {
            x.in[i] = get(l->chars / ID_CHARS * sizeof(uint32_t));
            memcpy(x.in[i], texts[i], l->chars / ID_CHARS * sizeof(uint32_t));
        }
    }
    return x;
}

static void inputs_free(inputs *x)
{
    for (size_t i = 0; i < x->n; i++)
        free(x->in[i]);
    free(x->in);
    free(x->size);
}

static const uint64_t *keys_in(way w, const load *l, const inputs *x, size_t i, uint64_t *buffer,
                               size_t *n)
{
    switch (w) {
    case KEYS:
        *n = x->size[i];
        return x->in[i];
    case TEXT:
        *n = keys_of_text(x->in[i], l->chars, buffer);
        return buffer;
    case REQUEST:
        return keys_of_request((pl_str){x->in[i], x->size[i]}, n);
    default:
        return keys_of_ids(x->in[i], l->chars / ID_CHARS, n);
    }
}

/* --- measurements --- */

static uint64_t now_ns;

static pl_approx *approx(uint64_t max_bytes)
{
    pl_approx_options o = {pl_clock_virtual(&now_ns), PL_APPROX_TTL_MS, WORKERS, max_bytes};
    pl_approx *a;
    must(pl_approx_new(&o, &a) == 0, "no index");
    return a;
}

static size_t best_of(pl_approx *a, const uint64_t *keys, size_t n)
{
    pl_approx_hit out[WORKERS];
    size_t best = 0;
    int found = pl_approx_match(a, keys, n, out, WORKERS);
    for (int i = 0; i < found; i++)
        best = out[i].chunks > best ? out[i].chunks : best;
    return best;
}

typedef struct rates {
    double match, insert;   /* per second */
    double bytes, resident; /* per prompt */
} rates;

static rates measure(way w, const load *l)
{
    rates r = {0, 0, 0, 0};
    inputs prompts = prepare(w, l, l->text, l->prompts);
    inputs queries = prepare(w, l, l->query, QUERIES);
    uint64_t *buffer = get(l->chars / space.chunk_bytes * sizeof *buffer);
    size_t unit = w == IDS ? ID_BLOCK * ID_CHARS : space.chunk_bytes, n;
    for (int run = 0; run < RUNS; run++) {
        uint64_t before = resident_bytes();
        pl_approx_stats s;
        pl_approx *a = approx(1ull << 40);
        uint64_t start = cpu_ns();
        for (size_t i = 0; i < l->prompts; i++) {
            const uint64_t *keys = keys_in(w, l, &prompts, i, buffer, &n);
            must(pl_approx_insert(a, keys, n, l->worker[i]) == 0, "out of memory");
        }
        double each = (double)(cpu_ns() - start) / (double)l->prompts;
        r.insert = 1e9 / each > r.insert ? 1e9 / each : r.insert;
        pl_approx_stats_of(a, &s);
        r.bytes = (double)s.bytes / (double)l->prompts;
        r.resident = (double)(resident_bytes() - before) / (double)l->prompts;
        start = cpu_ns();
        size_t sum = 0, want = 0;
        for (size_t i = 0; i < QUERIES; i++) {
            const uint64_t *keys = keys_in(w, l, &queries, i, buffer, &n);
            sum += best_of(a, keys, n);
        }
        each = (double)(cpu_ns() - start) / QUERIES;
        r.match = 1e9 / each > r.match ? 1e9 / each : r.match;
        for (size_t i = 0; i < QUERIES; i++) /* a request has 6 more bytes before its text */
            want += (l->match[i] + (w == REQUEST ? 6 : 0)) / unit;
        must(sum >= want && sum <= want + QUERIES / 100, "a match is wrong");
        pl_approx_free(a);
    }
    inputs_free(&prompts);
    inputs_free(&queries);
    free(buffer);
    return r;
}

/* The longest single call, by its CPU time and by the wall. */
typedef struct pause {
    uint64_t cpu, wall;
} pause;

static void longest(pause *p, uint64_t cpu_from, uint64_t wall_from)
{
    uint64_t cpu = cpu_ns() - cpu_from, wall = clock_ns(CLOCK_MONOTONIC) - wall_from;
    p->cpu = cpu > p->cpu ? cpu : p->cpu;
    p->wall = wall > p->wall ? wall : p->wall;
}

static void pauses(const load *l)
{
    inputs prompts = prepare(KEYS, l, l->text, l->prompts);
    pl_approx_stats s;
    pause insert = {0, 0}, advance = {0, 0};
    pl_approx *a = approx(1ull << 40);
    for (size_t i = 0; i < l->prompts; i++)
        must(pl_approx_insert(a, prompts.in[i], prompts.size[i], l->worker[i]) == 0, "insert");
    pl_approx_stats_of(a, &s);
    uint64_t half = s.bytes / 2 > PL_APPROX_MIN_BYTES ? s.bytes / 2 : PL_APPROX_MIN_BYTES;
    now_ns += (PL_APPROX_TTL_MS + 1) * 1000000ull;
    uint64_t calls = 0, start = cpu_ns();
    for (bool more = true; more; calls++) {
        uint64_t cpu = cpu_ns(), wall = clock_ns(CLOCK_MONOTONIC);
        more = pl_approx_advance(a);
        longest(&advance, cpu, wall);
    }
    double expiry_ms = (double)(cpu_ns() - start) / 1e6;
    uint64_t nodes = s.nodes;
    pl_approx_free(a);
    a = approx(half);
    for (size_t i = 0; i < l->prompts; i++) {
        now_ns += 10000;
        uint64_t cpu = cpu_ns(), wall = clock_ns(CLOCK_MONOTONIC);
        must(pl_approx_insert(a, prompts.in[i], prompts.size[i], l->worker[i]) == 0, "insert");
        longest(&insert, cpu, wall);
    }
    pl_approx_stats_of(a, &s);
    printf("| %zu | %llu | %.1f | %.1f | %llu | %.1f | %.1f | %.1f |\n", l->chars,
           (unsigned long long)s.evicted, (double)insert.cpu / 1e3, (double)insert.wall / 1e3,
           (unsigned long long)nodes, expiry_ms, (double)advance.cpu / 1e3,
           (double)advance.wall / 1e3);
    pl_approx_free(a);
    inputs_free(&prompts);
}

typedef struct job {
    pl_approx *a;
    const load *l;
    const inputs *in;
    size_t from;
    double ns; /* out: of a match and an insertion, by the wall */
} job;

static void *both(void *arg)
{
    job *j = arg;
    uint64_t start = clock_ns(CLOCK_MONOTONIC);
    size_t n = j->l->prompts;
    for (size_t i = 0; i < n; i++) {
        size_t k = (i + j->from) % n;
        best_of(j->a, j->in->in[k], j->in->size[k]);
        pl_approx_insert(j->a, j->in->in[k], j->in->size[k], j->l->worker[k]);
    }
    j->ns = (double)(clock_ns(CLOCK_MONOTONIC) - start) / (double)n;
    return NULL;
}

static void threads(const load *l)
{
    inputs prompts = prepare(KEYS, l, l->text, l->prompts);
    printf("| %zu |", l->chars);
    pl_approx *a = approx(1ull << 40);
    both(&(job){a, l, &prompts, 0, 0}); /* so that the memory is there */
    for (int count = 1; count <= 2; count++) {
        pthread_t t[2];
        job jobs[2];
        double rate = 0;
        for (int i = 0; i < count; i++) {
            jobs[i] = (job){a, l, &prompts, (size_t)i * l->prompts / 2, 0};
            must(pthread_create(&t[i], NULL, both, &jobs[i]) == 0, "no thread");
        }
        for (int i = 0; i < count; i++) {
            pthread_join(t[i], NULL);
            rate += 1e6 / jobs[i].ns;
        }
        printf(" %.0f |", rate);
    }
    pl_approx_free(a);
    printf("\n");
    inputs_free(&prompts);
}

int main(int argc, char **argv)
{
    static const size_t chars[] = {1024, 8192, 65536}, prompts[] = {20000, 20000, 2000};
    static const char *const names[] = {"keys at hand", "from text", "from a request", "ids"};
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 42;
    must(pl_keys_space_init(&space, PL_STR("m"), ID_BLOCK, false, PL_STR(""), PL_STR(""), 0) == 0,
         "no space");
    printf("Chunks of %u bytes, seed %llu. Thousands of operations a second.\n\n"
           "| characters | keys | match | insert | bytes / prompt | resident "
           "|\n|---|---|---|---|---|---|\n",
           space.chunk_bytes, (unsigned long long)seed);
    load l[3];
    rng.state = seed;
    for (int i = 0; i < 3; i++) {
        generate(&l[i], chars[i], prompts[i]);
        for (way w = KEYS; w <= IDS; w++) {
            rates r = measure(w, &l[i]);
            printf("| %zu | %s | %.0f | %.0f | %.0f | %.0f |\n", chars[i], names[w], r.match / 1e3,
                   r.insert / 1e3, r.bytes, r.resident);
            fflush(stdout);
        }
    }
    printf(
        "\nEviction under a cap of half of what all prompts need, and expiry of all at once in "
        "slices (us; CPU time of the thread, wall in a busy machine)\n\n"
        "| characters | evicted runs | longest insertion | wall | expired runs | all of it, ms | "
        "longest slice | wall |\n|---|---|---|---|---|---|---|---|\n");
    for (int i = 0; i < 3; i++)
        pauses(&l[i]);
    printf("\nA match and an insertion of the same prompt, keys at hand, in thousands of pairs a "
           "second by the wall\n\n| characters | 1 thread | 2 threads |\n|---|---|---|\n");
    for (int i = 0; i < 3; i++) {
        threads(&l[i]);
        load_free(&l[i]);
    }
    pl_arena_free(&arena);
    return 0;
}
