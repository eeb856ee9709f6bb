/* Counters, moving averages and gauges of policies: see shared.h. Names are added under a mutex and
 * never go away; values are atomics, or guarded by a lock of their own that is held for a few
 * instructions. Owned by the router (or simulator); every VM borrows it. */
#include "policy/shared.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NAMES 256
#define MAX_EWMAS 64
#define MAX_SLOTS PL_MAX_WORKERS

typedef struct named {
    char name[64];
    _Atomic double value;
} named;

/* The average is sum / weight: both decay, and each observation adds itself and 1. A burst at one
 * instant counts fully, which a decay of the average itself would ignore. */
typedef struct cell {
    _Atomic int lock;
    int generation;
    double sum, weight, at_seconds;
} cell;

typedef struct ewma {
    char name[64];
    double half_life_seconds;
    cell *cells; /* MAX_SLOTS */
} ewma;

struct pl_shared {
    pthread_mutex_t lock; /* taken to add a name */
    _Atomic int counters_n, metrics_n, ewmas_n;
    named counters[MAX_NAMES], metrics[MAX_NAMES];
    ewma ewmas[MAX_EWMAS];
};

pl_shared *pl_shared_new(void)
{
    pl_shared *s = calloc(1, sizeof *s);
    if (s)
        pthread_mutex_init(&s->lock, NULL);
    return s;
}

void pl_shared_free(pl_shared *s)
{
    if (!s)
        return;
    for (int i = 0; i < s->ewmas_n; i++)
        free(s->ewmas[i].cells);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static bool good_name(pl_str name)
{
    if (name.n == 0 || name.n > 63 || (name.p[0] >= '0' && name.p[0] <= '9'))
        return false;
    for (size_t i = 0; i < name.n; i++) {
        char c = name.p[i];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
              c == '_'))
            return false;
    }
    return true;
}

static int find(const named *list, const _Atomic int *count, pl_str name)
{
    int n = atomic_load_explicit(count, memory_order_acquire);
    for (int i = 0; i < n; i++)
        if (strlen(list[i].name) == name.n && memcmp(list[i].name, name.p, name.n) == 0)
            return i;
    return -1;
}

static int find_or_add(pl_shared *s, named *list, _Atomic int *count, pl_str name)
{
    if (!good_name(name))
        return PL_SHARED_BAD_NAME;
    int i = find(list, count, name);
    if (i >= 0)
        return i;
    pthread_mutex_lock(&s->lock);
    i = find(list, count, name);
    if (i < 0) {
        int n = atomic_load_explicit(count, memory_order_relaxed);
        i = PL_SHARED_FULL;
        if (n < MAX_NAMES) {
            memcpy(list[n].name, name.p, name.n);
            atomic_store_explicit(count, n + 1, memory_order_release);
            i = n;
        }
    }
    pthread_mutex_unlock(&s->lock);
    return i;
}

int pl_shared_counter(pl_shared *s, pl_str name)
{
    return find_or_add(s, s->counters, &s->counters_n, name);
}

double pl_shared_counter_add(pl_shared *s, int handle, double by)
{
    if (handle < 0 || handle >= atomic_load_explicit(&s->counters_n, memory_order_acquire))
        return NAN;
    if (!isfinite(by)) /* one 0/0 would stay in the sum for good, reloads included */
        return NAN;
    _Atomic double *v = &s->counters[handle].value;
    double old = atomic_load_explicit(v, memory_order_relaxed);
    if (by == 0)
        return old;
    while (!atomic_compare_exchange_weak_explicit(v, &old, old + by, memory_order_relaxed,
                                                  memory_order_relaxed))
        continue;
    return old + by;
}

int pl_shared_metric(pl_shared *s, pl_str name, double value)
{
    int i = find_or_add(s, s->metrics, &s->metrics_n, name);
    if (i < 0)
        return i;
    atomic_store_explicit(&s->metrics[i].value, value, memory_order_relaxed);
    return 0;
}

void pl_shared_each_metric(pl_shared *s, pl_shared_metric_fn fn, void *ctx)
{
    int n = atomic_load_explicit(&s->metrics_n, memory_order_acquire);
    for (int i = 0; i < n; i++)
        fn(ctx, pl_str_c(s->metrics[i].name),
           atomic_load_explicit(&s->metrics[i].value, memory_order_relaxed));
}

int pl_shared_ewma(pl_shared *s, pl_str name, double half_life_seconds)
{
    if (!good_name(name) || !(half_life_seconds > 0))
        return PL_SHARED_BAD_NAME;
    pthread_mutex_lock(&s->lock);
    int n = atomic_load_explicit(&s->ewmas_n, memory_order_relaxed), i = 0;
    while (i < n &&
           (strlen(s->ewmas[i].name) != name.n || memcmp(s->ewmas[i].name, name.p, name.n) != 0))
        i++;
    if (i == n) {
        ewma *e = &s->ewmas[n < MAX_EWMAS ? n : 0];
        if (n >= MAX_EWMAS || !(e->cells = calloc(MAX_SLOTS, sizeof *e->cells))) {
            i = PL_SHARED_FULL;
        } else {
            memcpy(e->name, name.p, name.n);
            e->half_life_seconds = half_life_seconds; /* the first to name it decides */
            atomic_store_explicit(&s->ewmas_n, n + 1, memory_order_release);
        }
    }
    pthread_mutex_unlock(&s->lock);
    return i;
}

static cell *lock_cell(pl_shared *s, int handle, int slot)
{
    if (handle < 0 || handle >= atomic_load_explicit(&s->ewmas_n, memory_order_acquire) ||
        slot < 0 || slot >= MAX_SLOTS)
        return NULL;
    cell *c = &s->ewmas[handle].cells[slot];
    while (atomic_exchange_explicit(&c->lock, 1, memory_order_acquire))
        sched_yield();
    return c;
}

static void unlock_cell(cell *c)
{
    atomic_store_explicit(&c->lock, 0, memory_order_release);
}

double pl_shared_ewma_update(pl_shared *s, int handle, int slot, int generation, double value,
                             double now_seconds)
{
    cell *c = lock_cell(s, handle, slot);
    if (!c || !isfinite(value)) {
        if (c)
            unlock_cell(c);
        return NAN;
    }
    double passed = now_seconds - c->at_seconds;
    double keep = c->generation != generation ? 0
                  : passed > 0                ? exp2(-passed / s->ewmas[handle].half_life_seconds)
                                              : 1;
    c->sum = c->sum * keep + value;
    c->weight = c->weight * keep + 1;
    if (passed > 0 || c->generation != generation)
        c->at_seconds = now_seconds;
    c->generation = generation;
    double average = c->sum / c->weight;
    unlock_cell(c);
    return average;
}

double pl_shared_ewma_get(pl_shared *s, int handle, int slot, int generation)
{
    cell *c = lock_cell(s, handle, slot);
    if (!c)
        return NAN;
    double average = c->weight > 0 && c->generation == generation ? c->sum / c->weight : NAN;
    unlock_cell(c);
    return average;
}
