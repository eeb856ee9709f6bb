/* The C functions that policies reach through the helpers (struct pl_api). Leaf calls on the thread
 * that is inside the VM: none re-enters Lua, raises, blocks or keeps a pointer. Compiled Lua calls
 * them directly. */
#include "policy/vm_priv.h"

#include <math.h>
#include <xxhash.h>

#include "base/log.h"
#include "policy/shared.h"

#define LOG_LINES_PER_SECOND 10
#define LOG_LINE_BYTES       1000

static double now_seconds(void *p)
{
    pl_vm *vm = p;
    return (double)pl_clock_now_ns(vm->options.clock) * 1e-9;
}

static double now_ns(void *p)
{
    return (double)pl_now_ns();
}

static double random_unit(void *p)
{
    pl_vm *vm = p;
    return pl_rng_unit(&vm->rng);
}

static const char *answer(pl_str s, int32_t *n)
{
    *n = (int32_t)s.n;
    return s.p;
}

static const char *req_model(void *p, int32_t *n)
{
    return answer(((pl_vm *)p)->view.model, n);
}

static const char *req_tenant(void *p, int32_t *n)
{
    return answer(((pl_vm *)p)->view.tenant, n);
}

static const char *req_path(void *p, int32_t *n)
{
    return answer(((pl_vm *)p)->view.path, n);
}

static const char *req_id(void *p, int32_t *n)
{
    return answer(((pl_vm *)p)->view.id, n);
}

static const char *req_session_id(void *p, int32_t *n)
{
    pl_str s = ((pl_vm *)p)->view.session_id;
    return answer(s.n ? s : (pl_str){NULL, 0}, n);
}

static const char *session_parent_id(void *p, int32_t *n)
{
    pl_str s = ((pl_vm *)p)->view.session_parent;
    return answer(s.n ? s : (pl_str){NULL, 0}, n);
}

static const char *req_header(void *p, const char *name, int32_t name_len, int32_t *n)
{
    pl_vm *vm = p;
    pl_str found = {NULL, 0};
    if (vm->view.find_header)
        found = vm->view.find_header(vm->view.ctx, (pl_str){name, (size_t)name_len});
    return answer(found, n);
}

static const char *req_member(void *p, const char *name, int32_t name_len, int32_t *n)
{
    pl_vm *vm = p;
    pl_str found = {NULL, 0};
    if (vm->view.find_member)
        found = vm->view.find_member(vm->view.ctx, (pl_str){name, (size_t)name_len});
    return answer(found, n);
}

static const char *worker_name(void *p, int32_t index, int32_t *n)
{
    pl_vm *vm = p;
    pl_str found = {NULL, 0};
    if (vm->view.worker_name && index >= 0 && index < vm->records.fleet->n)
        found = vm->view.worker_name(vm->view.worker_ctx, index);
    return answer(found, n);
}

static double hash(void *p, const char *s, int32_t n)
{
    return (double)(XXH3_64bits(s, (size_t)n) >> 12);
}

static int32_t rendezvous(void *p, const char *key, int32_t n)
{
    return pl_vm_rendezvous(p, key, (size_t)n);
}

static int32_t ring(void *p, const char *key, int32_t n, double load_factor)
{
    return pl_vm_ring(p, key, (size_t)n, load_factor);
}

static int32_t pick_min(void *p)
{
    return pl_vm_pick(p, 0, false);
}

static int32_t pick_softmax(void *p, double temperature)
{
    return pl_vm_pick(p, temperature, false);
}

/* Two costs at a time, four pairs in flight: the compiler's vector extension, on every target. */
typedef double pair __attribute__((vector_size(16), aligned(8)));
typedef int64_t mask __attribute__((vector_size(16)));

static pair lower(pair a, pair b)
{
    mask m = a < b;
    return (pair)((m & (mask)a) | (~m & (mask)b));
}

/* Lowest cost, and whether one is NaN. */
static double lowest(const double *cost, int n, bool *nan)
{
    pair m[4];
    mask bad = {0, 0};
    int i = 0;
    for (int k = 0; k < 4; k++)
        m[k] = (pair){INFINITY, INFINITY};
    for (; i + 8 <= n; i += 8) {
        for (int k = 0; k < 4; k++) {
            pair c = *(const pair *)(cost + i + 2 * k);
            bad |= c != c;
            m[k] = lower(c, m[k]);
        }
    }
    pair two = lower(lower(m[0], m[1]), lower(m[2], m[3]));
    double least = two[0] < two[1] ? two[0] : two[1];
    bool odd = bad[0] || bad[1];
    for (; i < n; i++) {
        odd |= cost[i] != cost[i];
        least = cost[i] < least ? cost[i] : least;
    }
    *nan = odd;
    return least;
}

static int count_equal(const double *cost, int n, double least)
{
    pair want = {least, least};
    mask hits = {0, 0};
    int i = 0;
    for (; i + 2 <= n; i += 2)
        hits -= *(const pair *)(cost + i) == want; /* true is -1 */
    return (int)(hits[0] + hits[1]) + (i < n && cost[i] == least);
}

static int pick_tied(pl_vm *vm, const double *cost, int n, double least)
{
    int ties = count_equal(cost, n, least), last = -1;
    uint32_t left = ties > 1 ? pl_rng_below(&vm->rng, (uint32_t)ties) : 0;
    for (int i = 0; i < n; i++) {
        if (cost[i] != least)
            continue;
        last = i;
        if (left-- == 0)
            break;
    }
    return last;
}

/* exp(-x / temperature), with x the cost scaled so that the lowest is 0 and the highest finite one
 * 1: the same temperature means the same for tokens and for seconds. */
static int pick_sampled(pl_vm *vm, const double *cost, int n, double least, double temperature)
{
    double most = least, sum = 0;
    for (int i = 0; i < n; i++)
        if (cost[i] > most && cost[i] < INFINITY)
            most = cost[i];
    double span = most - least;
    if (!(span > 0) || !isfinite(span))
        return pick_tied(vm, cost, n, least);
    double scale = -1 / (span * temperature);
    if (!isfinite(scale)) /* so cold that the product is no number any more */
        return pick_tied(vm, cost, n, least);
    for (int i = 0; i < n; i++)
        if (cost[i] < INFINITY)
            sum += exp((cost[i] - least) * scale);
    double left = pl_rng_unit(&vm->rng) * sum;
    int last = -1;
    for (int i = 0; i < n; i++) {
        if (!(cost[i] < INFINITY))
            continue;
        last = i;
        left -= exp((cost[i] - least) * scale);
        if (left < 0)
            break;
    }
    return last;
}

int pl_vm_pick(pl_vm *vm, double temperature, bool ready)
{
    double *cost = vm->records.cost;
    int n = vm->records.fleet->n;
    if (!ready)
        for (int i = 0; i < n; i++)
            if (!vm->records.workers[i].eligible)
                cost[i] = INFINITY;
    bool nan;
    double least = lowest(cost, n, &nan);
    if (nan)
        return -2;
    if (least == INFINITY)
        return -1;
    return temperature > 0 ? pick_sampled(vm, cost, n, least, temperature)
                           : pick_tied(vm, cost, n, least);
}

static int32_t counter_open(void *p, const char *name, int32_t n)
{
    return pl_shared_counter(((pl_vm *)p)->options.shared, (pl_str){name, (size_t)n});
}

static double counter_add(void *p, int32_t handle, double by)
{
    pl_vm *vm = p;
    return pl_shared_counter_add(vm->options.shared, handle, vm->dry ? 0 : by);
}

static int32_t ewma_open(void *p, const char *name, int32_t n, double half_life_seconds)
{
    return pl_shared_ewma(((pl_vm *)p)->options.shared, (pl_str){name, (size_t)n},
                          half_life_seconds);
}

static double ewma_update(void *p, int32_t handle, int32_t slot, int32_t generation, double value)
{
    pl_vm *vm = p;
    if (vm->dry)
        return value;
    return pl_shared_ewma_update(vm->options.shared, handle, slot, generation, value,
                                 now_seconds(vm));
}

static double ewma_get(void *p, int32_t handle, int32_t slot, int32_t generation)
{
    return pl_shared_ewma_get(((pl_vm *)p)->options.shared, handle, slot, generation);
}

static int32_t metric(void *p, const char *name, int32_t n, double value)
{
    pl_vm *vm = p;
    return vm->dry ? 0 : pl_shared_metric(vm->options.shared, (pl_str){name, (size_t)n}, value);
}

static int32_t log_line(void *p, const char *s, int32_t n)
{
    pl_vm *vm = p;
    if (vm->dry || !pl_log_allow(vm->log_state, LOG_LINES_PER_SECOND))
        return 0;
    pl_log(PL_LOG_INFO, "policy_log", "%s: %.*s", vm->name, n < LOG_LINE_BYTES ? n : LOG_LINE_BYTES,
           s);
    return 1;
}

const struct pl_api pl_vm_api = {
    .version = PL_ABI_VERSION,
    .size_req = sizeof(struct pl_req),
    .size_worker = sizeof(struct pl_worker),
    .size_fleet = sizeof(struct pl_fleet),
    .size_fault = sizeof(struct pl_fault),
    .size_outcome = sizeof(struct pl_outcome),
    .size_session = sizeof(struct pl_session),
    .size_verdict = sizeof(struct pl_verdict),
    .now_seconds = now_seconds,
    .now_ns = now_ns,
    .random = random_unit,
    .req_model = req_model,
    .req_tenant = req_tenant,
    .req_path = req_path,
    .req_id = req_id,
    .req_session_id = req_session_id,
    .session_parent_id = session_parent_id,
    .req_header = req_header,
    .req_member = req_member,
    .worker_name = worker_name,
    .hash = hash,
    .rendezvous = rendezvous,
    .ring = ring,
    .pick_min = pick_min,
    .pick_softmax = pick_softmax,
    .counter_open = counter_open,
    .counter_add = counter_add,
    .ewma_open = ewma_open,
    .ewma_update = ewma_update,
    .ewma_get = ewma_get,
    .metric = metric,
    .log = log_line,
};
