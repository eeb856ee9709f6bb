/* pl.ring and pl.rendezvous: consistent choices by key over the fleet of the call. Called from
 * vm_api.c on the VM's thread. Owns, per VM, a few rings (one per fleet membership) and the hashes
 * of worker names, so that a request does not rebuild them. Bounded loads: Mirrokni, Thorup,
 * Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016. */
#include "policy/vm_priv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

#define RINGS            8      /* memberships remembered: one per model, mostly */
#define POINTS_PER_SHARE 100    /* of a worker of weight 1 */
#define MAX_POINTS       131072 /* of a ring; large fleets get fewer each */

typedef struct point {
    uint64_t hash;
    int32_t index;
} point;

typedef struct circle {
    uint64_t membership; /* 0: unused */
    uint64_t used_at;
    point *points; /* by hash */
    int n;
} circle;

typedef struct name_hash {
    int32_t generation; /* meaningful when hash is not 0 */
    uint64_t hash;
} name_hash;

struct pl_ring {
    circle circles[RINGS];
    uint64_t clock;
    name_hash names[PL_VM_SLOTS];
};

static pl_ring *ring_of(pl_vm *vm)
{
    if (!vm->ring)
        vm->ring = calloc(1, sizeof *vm->ring);
    return vm->ring;
}

void pl_vm_ring_free(pl_ring *r)
{
    if (!r)
        return;
    for (int i = 0; i < RINGS; i++)
        free(r->circles[i].points);
    free(r);
}

static uint64_t mix(uint64_t a, uint64_t b)
{
    pl_rng r = {a ^ (b * 0x9e3779b97f4a7c15u)};
    return pl_rng_next(&r);
}

/* By name, not by slot: every router, and this one after a restart, agrees. */
static uint64_t hash_of(pl_vm *vm, pl_ring *r, int index)
{
    const struct pl_worker *w = &vm->records.workers[index];
    bool slotted = w->slot >= 0 && w->slot < PL_VM_SLOTS;
    if (slotted && r->names[w->slot].hash && r->names[w->slot].generation == w->generation)
        return r->names[w->slot].hash;
    pl_str name = {NULL, 0};
    if (vm->view.worker_name)
        name = vm->view.worker_name(vm->view.worker_ctx, index);
    uint64_t h = name.n ? XXH3_64bits(name.p, name.n) : mix((uint64_t)w->slot + 1, 1);
    if (h == 0)
        h = 1;
    if (slotted && name.n)
        r->names[w->slot] = (name_hash){w->generation, h};
    return h;
}

static double share_of(const struct pl_worker *w)
{
    return w->weight > 0 ? w->weight : 0;
}

int pl_vm_rendezvous(pl_vm *vm, const char *key, size_t n)
{
    pl_ring *r = ring_of(vm);
    if (!r)
        return -1;
    uint64_t k = XXH3_64bits(key, n);
    int best = -1;
    double least = INFINITY;
    for (int i = 0; i < vm->records.fleet->n; i++) {
        const struct pl_worker *w = &vm->records.workers[i];
        if (!w->eligible || share_of(w) == 0)
            continue;
        /* exponential with rate weight: the first to ring wins with probability ~ weight */
        double u = ((double)(mix(k, hash_of(vm, r, i)) >> 11) + 0.5) * 0x1.0p-53;
        double t = -log(u) / share_of(w);
        if (t < least) {
            least = t;
            best = i;
        }
    }
    return best;
}

static uint64_t membership_of(const pl_vm *vm)
{
    uint64_t h = (uint64_t)vm->records.fleet->n + 1;
    for (int i = 0; i < vm->records.fleet->n; i++) {
        const struct pl_worker *w = &vm->records.workers[i];
        union {
            double d;
            uint64_t u;
        } weight = {w->weight};
        h = mix(h ^ ((uint64_t)(uint32_t)w->slot << 32 | (uint32_t)w->generation), weight.u);
    }
    return h ? h : 1;
}

static int by_hash(const void *a, const void *b)
{
    const point *x = a, *y = b;
    return x->hash < y->hash ? -1 : x->hash > y->hash ? 1 : x->index - y->index;
}

static bool build(pl_vm *vm, pl_ring *r, circle *c, uint64_t membership)
{
    int n = vm->records.fleet->n, total = 0;
    double shares = 0;
    for (int i = 0; i < n; i++)
        shares += share_of(&vm->records.workers[i]);
    if (!(shares > 0) || !isfinite(shares))
        return false;
    double per_share = fmin(POINTS_PER_SHARE, (MAX_POINTS - n) / shares);
    point *points = malloc(MAX_POINTS * sizeof *points);
    if (!points)
        return false;
    for (int i = 0; i < n; i++) {
        double share = share_of(&vm->records.workers[i]);
        int mine = share > 0 ? (int)fmax(1, share * per_share) : 0;
        uint64_t name = mine ? hash_of(vm, r, i) : 0;
        for (int k = 0; k < mine && total < MAX_POINTS; k++)
            points[total++] = (point){mix(name, (uint64_t)k), i};
    }
    qsort(points, (size_t)total, sizeof *points, by_hash);
    point *fit = realloc(points, (size_t)total * sizeof *points);
    free(c->points);
    c->points = fit ? fit : points;
    c->n = total;
    c->membership = membership;
    return true;
}

static circle *circle_of(pl_vm *vm, pl_ring *r)
{
    uint64_t membership = membership_of(vm);
    circle *oldest = &r->circles[0];
    for (int i = 0; i < RINGS; i++) {
        circle *c = &r->circles[i];
        if (c->membership == membership) {
            c->used_at = ++r->clock;
            return c;
        }
        if (c->used_at < oldest->used_at)
            oldest = c;
    }
    if (!build(vm, r, oldest, membership))
        return NULL;
    oldest->used_at = ++r->clock;
    return oldest;
}

int pl_vm_ring(pl_vm *vm, const char *key, size_t n, double load_factor)
{
    pl_ring *r = ring_of(vm);
    circle *c = r ? circle_of(vm, r) : NULL;
    if (!c)
        return -1;
    const struct pl_worker *workers = vm->records.workers;
    double load = 1, shares = 0; /* with this request */
    for (int i = 0; i < vm->records.fleet->n; i++) {
        if (!workers[i].eligible)
            continue;
        load += workers[i].inflight;
        shares += share_of(&workers[i]);
    }
    if (!(shares > 0))
        return -1;
    uint64_t k = mix(XXH3_64bits(key, n), 0);
    int low = 0, high = c->n;
    while (low < high) {
        int mid = low + (high - low) / 2;
        if (c->points[mid].hash < k)
            low = mid + 1;
        else
            high = mid;
    }
    /* some eligible worker is at or below the mean, so with a factor of 1 or more the walk ends */
    int first = -1;
    for (int step = 0; step < c->n; step++) {
        int i = c->points[(low + step) % c->n].index;
        const struct pl_worker *w = &workers[i];
        if (!w->eligible)
            continue;
        if (first < 0)
            first = i;
        if (w->inflight + 1 <= ceil(load_factor * load * share_of(w) / shares))
            return i;
    }
    return first;
}
