/* The memory store beside a plain mutex and chained hash map in C that keeps the same bindings:
 * lookups and binds per second on one core and on two, bytes per session, and the latency of a
 * lookup while 100,000 sessions expire per second. The plain map has to look at all of its sessions
 * once a second to expire them in time. Prints markdown.
 *
 * Usage: bench_store [sessions, 1000000] [plain: 0 leaves the plain map out] */
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <xxhash.h>

#include "base/rng.h"
#include "session/store.h"

static void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "bench_store: %s\n", what);
        exit(1);
    }
}

/* --- the plain map --- */

typedef struct node {
    struct node *next;
    uint64_t hash;
    pl_binding b;
    uint16_t tenant_n, id_n;
    char name[];
} node;

static struct plain {
    pthread_mutex_t lock;
    node **buckets;
    uint64_t mask, count;
} plain = {PTHREAD_MUTEX_INITIALIZER, NULL, 0, 0};

static node **plain_find(const pl_session_name *name, uint64_t hash)
{
    node **at = &plain.buckets[hash & plain.mask];
    while (*at &&
           ((*at)->hash != hash || (*at)->tenant_n != name->tenant.n || (*at)->id_n != name->id.n ||
            memcmp((*at)->name, name->tenant.p, name->tenant.n) != 0 ||
            memcmp((*at)->name + name->tenant.n, name->id.p, name->id.n) != 0))
        at = &(*at)->next;
    return at;
}

static void plain_grow(void)
{
    uint64_t n = plain.buckets ? (plain.mask + 1) * 2 : 1024;
    node **to = calloc(n, sizeof(node *));
    must(to, "out of memory");
    for (uint64_t i = 0; plain.buckets && i <= plain.mask; i++) {
        for (node *e = plain.buckets[i], *next; e; e = next) {
            next = e->next;
            e->next = to[e->hash & (n - 1)];
            to[e->hash & (n - 1)] = e;
        }
    }
    free(plain.buckets);
    plain.buckets = to;
    plain.mask = n - 1;
}

static int plain_op(pl_store_op op, const pl_session_name *name, pl_binding *b)
{
    char key[512];
    memcpy(key, name->tenant.p, name->tenant.n);
    memcpy(key + name->tenant.n, name->id.p, name->id.n);
    uint64_t hash = XXH3_64bits_withSeed(key, name->tenant.n + name->id.n, 42);
    uint64_t now_ns = pl_now_ns();
    int rc = 0;
    pthread_mutex_lock(&plain.lock);
    if (!plain.buckets || plain.count > plain.mask)
        plain_grow();
    node **at = plain_find(name, hash);
    if (op == PL_STORE_PUT) {
        if (!*at) {
            node *e = malloc(sizeof *e + name->tenant.n + name->id.n);
            must(e, "out of memory");
            e->next = NULL;
            e->hash = hash;
            e->tenant_n = (uint16_t)name->tenant.n;
            e->id_n = (uint16_t)name->id.n;
            memcpy(e->name, key, name->tenant.n + name->id.n);
            *at = e;
            plain.count++;
        }
        b->deadline_ns = now_ns + b->ttl_ms * 1000000ull;
        (*at)->b = *b;
    } else if (*at && (*at)->b.deadline_ns > now_ns) {
        if (op == PL_STORE_GET)
            (*at)->b.deadline_ns = now_ns + (*at)->b.ttl_ms * 1000000ull;
        *b = (*at)->b;
    } else {
        rc = PL_ENOTFOUND;
    }
    pthread_mutex_unlock(&plain.lock);
    return rc;
}

static _Atomic uint64_t expired;

static void plain_sweep(void)
{
    uint64_t now_ns = pl_now_ns();
    pthread_mutex_lock(&plain.lock);
    for (uint64_t i = 0; plain.buckets && i <= plain.mask; i++) {
        for (node **at = &plain.buckets[i]; *at;) {
            node *e = *at;
            if (e->b.deadline_ns > now_ns) {
                at = &e->next;
                continue;
            }
            *at = e->next;
            plain.count--;
            expired++;
            free(e);
        }
    }
    pthread_mutex_unlock(&plain.lock);
}

/* --- both behind one call --- */

static pl_store *store; /* NULL: the plain map's turn */

static int do_op(pl_store_op op, const pl_session_name *name, pl_binding *b)
{
    if (!store)
        return plain_op(op, name, b);
    pl_store_call c = {.op = op, .name = *name};
    if (op == PL_STORE_PUT)
        c.binding = *b;
    int rc = pl_store_start(store, &c);
    *b = c.binding;
    return rc;
}

static void on_expired(void *ctx, const pl_session_name *name, const pl_binding *b)
{
    (void)ctx;
    (void)name;
    (void)b;
    atomic_fetch_add_explicit(&expired, 1, memory_order_relaxed);
}

/* A name as long as a UUID, different for each i. */
static pl_session_name name_of(uint64_t i, char id[36])
{
    static const char digits[] = "0123456789abcdef";
    memcpy(id, "00000000-7c3e-4b1f-9d52-0123456789ab", 36);
    for (int k = 0; k < 8; k++)
        id[k] = digits[i >> (4 * k) & 15];
    return (pl_session_name){PL_STR("acme"), {id, 36}};
}

typedef struct job {
    pl_store_op op;
    uint64_t from, to, names, n; /* put: from .. to; else n random ones of `names` */
    pl_session_kind kind;
    double ns, cpu_ns; /* out: of each */
} job;

static uint64_t thread_cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void *work(void *arg)
{
    job *j = arg;
    pl_rng rng = {j->from + 1};
    char id[36];
    uint64_t start = pl_now_ns(), cpu = thread_cpu_ns(), missing = 0,
             n = j->n ? j->n : j->to - j->from;
    for (uint64_t i = 0; i < n; i++) {
        pl_session_name name =
            name_of(j->n ? pl_rng_below(&rng, (uint32_t)j->names) : j->from + i, id);
        pl_binding b = {.slot = (int32_t)(i & 63), .kind = j->kind, .ttl_ms = 3600000};
        missing += do_op(j->op, &name, &b) != 0;
    }
    j->ns = (double)(pl_now_ns() - start) / (double)n;
    j->cpu_ns = (double)(thread_cpu_ns() - cpu) / (double)n;
    must(missing == 0, "a session is missing");
    return NULL;
}

static void measure(const char *what, job j, int threads)
{
    pthread_t t[2];
    job js[2] = {j, j};
    double each = 0;
    js[1].from += 1000000007;
    for (int i = 0; i < threads; i++)
        must(pthread_create(&t[i], NULL, work, &js[i]) == 0, "no thread");
    for (int i = 0; i < threads; i++) {
        pthread_join(t[i], NULL);
        each += 1 / js[i].ns;
    }
    printf("| %s | %s | %.0f | %.2f | %.2f |\n", store ? "memory store" : "mutex and map", what,
           js[0].cpu_ns, 1e3 / js[0].cpu_ns, each * 1e3);
    fflush(stdout);
}

/* --- latency while sessions expire --- */

enum { LIVE_S = 10, RATE = 100000, RUN_S = 5, BUCKETS = 200000 };
static _Atomic int stop;

static void *churn(void *arg)
{
    (void)arg;
    char id[36];
    uint64_t start_ns = pl_now_ns(), swept_ns = start_ns, n = 0;
    while (!atomic_load(&stop)) {
        uint64_t now_ns = pl_now_ns();
        for (; n * (1000000000 / RATE) < now_ns - start_ns; n++) {
            pl_session_name name = name_of((1ull << 31) + n, id);
            pl_binding b = {.kind = PL_SESSION_ENGINE_BACKED, .ttl_ms = LIVE_S * 1000};
            must(do_op(PL_STORE_PUT, &name, &b) == 0, "a bind failed");
        }
        if (store && now_ns - swept_ns >= 100000000) {
            pl_store_advance(store);
            swept_ns = now_ns;
        } else if (!store && now_ns - swept_ns >= 1000000000) {
            plain_sweep();
            swept_ns = now_ns;
        }
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    return NULL;
}

static void latency(uint64_t sessions)
{
    static uint32_t seen[BUCKETS]; /* by ns */
    memset(seen, 0, sizeof seen);
    char id[36];
    pl_rng rng = {7};
    for (uint32_t i = 0; i < LIVE_S * RATE; i++) { /* those that will expire, evenly */
        pl_session_name name = name_of((1ull << 30) + i, id);
        pl_binding b = {.kind = PL_SESSION_ENGINE_BACKED,
                        .ttl_ms = 1500 + pl_rng_below(&rng, LIVE_S * 1000)};
        must(do_op(PL_STORE_PUT, &name, &b) == 0, "a bind failed");
    }
    atomic_store(&stop, 0);
    pthread_t t;
    must(pthread_create(&t, NULL, churn, NULL) == 0, "no thread");
    nanosleep(&(struct timespec){2, 0}, NULL);
    uint64_t before = expired, start_ns = pl_now_ns(), at_ns = start_ns, n = 0, worst = 0;
    while (at_ns - start_ns < RUN_S * 1000000000ull) {
        pl_session_name name = name_of(pl_rng_below(&rng, (uint32_t)sessions), id);
        pl_binding b;
        at_ns = pl_now_ns();
        must(do_op(PL_STORE_GET, &name, &b) == 0, "a session is missing");
        uint64_t took = pl_now_ns() - at_ns;
        seen[took < BUCKETS ? took : BUCKETS - 1]++;
        worst = took > worst ? took : worst;
        n++;
    }
    double rate = (double)(expired - before) / RUN_S;
    atomic_store(&stop, 1);
    pthread_join(t, NULL);
    static const double want[] = {0.5, 0.99, 0.999, 0.9999};
    printf("| %s | %.0f |", store ? "memory store" : "mutex and map", rate);
    uint64_t sum = 0;
    for (int i = 0, w = 0; i < BUCKETS && w < 4; i++) {
        sum += seen[i];
        for (; w < 4 && (double)sum >= want[w] * (double)n; w++)
            printf(" %d |", i);
    }
    printf(" %.1f |\n", (double)worst / 1000);
}

static uint64_t heap_bytes(void)
{
    struct mallinfo2 m = mallinfo2();
    return m.uordblks + m.hblkhd;
}

int main(int argc, char **argv)
{
    uint64_t n = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000;
    must(n > 0 && n < 1 << 30, "sessions: 1 to 1073741823");
    bool with_plain = argc < 3 || strcmp(argv[2], "0") != 0;
    double bytes[2] = {0}, told = 0, engine_backed = 0;
    pl_store *ours;
    uint64_t before = heap_bytes();
    pl_store_options o = {pl_clock_real(), n + 3000000, on_expired, NULL};
    must(pl_store_memory_new(&o, &ours) == 0, "no store");
    printf("%llu sessions, ids of 36 bytes, tenant of 4\n\n", (unsigned long long)n);
    printf("| store | operation | CPU ns | million/s of a core | million/s by the wall "
           "|\n|---|---|---|---|---|\n");
    for (int turn = 0; turn < 1 + with_plain; turn++) {
        store = turn ? NULL : ours;
        before = turn ? heap_bytes() : before;
        measure("bind, new", (job){PL_STORE_PUT, 0, n, n, 0, PL_SESSION_ROUTER_ONLY, 0, 0}, 1);
        bytes[turn] = (double)(heap_bytes() - before) / (double)n;
        if (!turn) {
            pl_store_stats st;
            pl_store_stats_read(ours, &st);
            told = (double)st.bytes / (double)n;
        }
        job get = {PL_STORE_GET, 0, 0, n, 3000000, 0, 0, 0};
        measure("get, random", get, 1);
        measure("get, random, 2 threads", get, 2);
        job peek = {PL_STORE_PEEK, 0, 0, n, 3000000, 0, 0, 0};
        measure("peek, random", peek, 1);
        job again = {PL_STORE_PUT, 0, 0, n, 2 * n, PL_SESSION_ENGINE_BACKED, 0, 0};
        measure("bind, again", again, 1);
        if (!turn) { /* all are engine-backed now: no order of use to keep, but a note to read */
            measure("get, random, after that", get, 1);
            pl_store_stats st;
            pl_store_stats_read(ours, &st);
            engine_backed = (double)st.bytes / (double)n;
        }
    }
    printf("\nBytes per session: memory store %.1f (by its own count %.1f), engine-backed %.1f",
           bytes[0], told, engine_backed);
    if (with_plain)
        printf(", mutex and map %.1f", bytes[1]);
    printf("\n\nget on one thread while another binds %d/s and as many expire (ns; worst in us)\n\n"
           "| store | expired/s | p50 | p99 | p99.9 | p99.99 | worst us |\n"
           "|---|---|---|---|---|---|---|\n",
           RATE);
    store = ours;
    latency(n);
    if (with_plain) {
        store = NULL;
        latency(n);
    }
    pl_store_free(ours);
    return 0;
}
