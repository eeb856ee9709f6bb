/* The simulated engine's scheduler: see sim.h for what it does and in which order. Called by the
 * live front (on its loop's thread) and by simulators; it owns its requests, their token ids and
 * the prefix cache. No clock, no randomness, no addresses in any decision.
 *
 * The pool is accounted in tokens of whole pages: what the tree holds (radix.c), what requests hold
 * beyond it (own), and the rest. A request's prefix is in the tree and locked up to `depth`; its
 * own pages carry on from there. */
#include "engine/sim.h"

#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/heap.h"
#include "engine/radix.h"

typedef enum req_state { ARRIVING, WAITING, RUNNING, OVER } req_state;

struct pl_sim_req {
    pl_heap_item place;      /* in the waiting queue: inverted priority, then order of arrival */
    pl_sim_req *next, *prev; /* in the list of arriving or of running requests */
    req_state state;
    int priority;
    int64_t ready_us; /* may wait from then on: api_us after its arrival */
    uint32_t *tokens; /* the prompt, then what was produced; room for n until admitted, then for all
                       */
    int n, output_tokens;
    int out;    /* produced */
    int kv;     /* tokens computed or taken from the cache */
    int target; /* kv at which prefill ends: n, or more after a preemption */
    int chunk;  /* tokens of the step under way, 0: not part of it */
    int cached; /* of the prompt, at its first admission */
    bool admitted, decoding;
    pl_radix_node *node; /* locked, ends at depth; the root when it holds no cache */
    int depth, own;
    uint64_t seed;
    const pl_sim_events *ev;
    void *user;
};

typedef struct req_list {
    pl_sim_req *head, *tail;
    int n;
} req_list;

struct pl_sim {
    pl_sim_options o;
    pl_radix *tree;
    int64_t pool; /* tokens, whole pages */
    int64_t own;  /* sum over requests */
    req_list arriving, running;
    pl_heap waiting;
    int64_t waiting_tokens;
    uint64_t next_seq;
    int64_t now_us, step_end_us; /* INT64_MAX: no step under way */
    bool blocked;        /* the first in the queue had no room, and nothing has changed since */
    pl_sim_req *cursor;  /* what a walk over `running` looks at next; removal moves it on */
    pl_sim_req *calling; /* a callback of this request is running: abort must not free it */
    pl_sim_stats count;
};

void pl_sim_options_default(pl_sim_options *o)
{
    *o = (pl_sim_options){
        .timing = *pl_timing_find(PL_STR("llama-8b-h100-tp1")),
        .page_tokens = 16,
        .pool_tokens = 180224,
        .max_running = 256,
        .max_batch_tokens = 8192,
        .prefix_cache = true,
    };
}

int pl_sim_new(const pl_sim_options *o, pl_sim **out, pl_errbuf *eb)
{
    *out = NULL;
    const pl_timing *t = &o->timing;
    if (o->page_tokens < 1 || o->page_tokens > 4096)
        return pl_fail(eb, PL_EINVALID, "page size %d is not in 1 .. 4096", o->page_tokens);
    if (o->pool_tokens < o->page_tokens || o->pool_tokens > 1000000000)
        return pl_fail(eb, PL_EINVALID, "a pool of %lld tokens is not in %d (a page) .. 1000000000",
                       (long long)o->pool_tokens, o->page_tokens);
    if (o->max_running < 1 || o->max_batch_tokens < 1 || o->max_waiting < 0)
        return pl_fail(eb, PL_EINVALID,
                       "running requests and batch tokens must be at least 1, the "
                       "queue's bound 0 or more");
    if (!(t->base_us >= 0 && t->prefill_token_us >= 0 && t->prefill_attn_us >= 0 &&
          t->decode_req_us >= 0 && t->kv_token_us >= 0 && t->api_us >= 0 && t->api_us < 1e12))
        return pl_fail(eb, PL_EINVALID, "timing figures must not be negative");
    pl_sim *s = calloc(1, sizeof *s);
    if (s)
        s->tree = pl_radix_new(o->page_tokens);
    if (!s || !s->tree) {
        free(s);
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    }
    s->o = *o;
    s->pool = o->pool_tokens - o->pool_tokens % o->page_tokens;
    s->step_end_us = INT64_MAX;
    *out = s;
    return 0;
}

/* --- small parts --- */

static void list_add(req_list *l, pl_sim_req *r)
{
    r->next = NULL;
    r->prev = l->tail;
    *(l->tail ? &l->tail->next : &l->head) = r;
    l->tail = r;
    l->n++;
}

static void list_remove(req_list *l, pl_sim_req *r)
{
    *(r->prev ? &r->prev->next : &l->head) = r->next;
    *(r->next ? &r->next->prev : &l->tail) = r->prev;
    l->n--;
}

static pl_sim_req *of_place(pl_heap_item *it)
{
    return it ? (pl_sim_req *)((char *)it - offsetof(pl_sim_req, place)) : NULL;
}

static int64_t whole_pages(const pl_sim *s, int64_t tokens)
{
    int64_t page = s->o.page_tokens;
    return (tokens + page - 1) / page * page;
}

static int64_t free_tokens(const pl_sim *s)
{
    return s->pool - pl_radix_tokens(s->tree) - s->own;
}

/* Makes `want` tokens of the pool free, evicting cache; false when there are not as many. */
static bool make_room(pl_sim *s, int64_t want)
{
    int64_t lacking = want - free_tokens(s);
    if (lacking <= 0)
        return true;
    if (lacking > pl_radix_evictable(s->tree))
        return false;
    s->count.evicted_tokens += (uint64_t)pl_radix_evict(s->tree, lacking);
    return true;
}

/* Hands the whole pages of tokens[0..upto) to the tree and keeps them locked. What the tree had
 * already (another request computed the same) is given back to the pool. Without memory the pages
 * simply stay the request's own. */
static void share(pl_sim *s, pl_sim_req *r, int upto)
{
    upto -= upto % s->o.page_tokens;
    if (!s->o.prefix_cache || upto <= r->depth)
        return;
    pl_radix_node *end;
    int added;
    if (pl_radix_insert(s->tree, r->node, r->depth, r->tokens, upto, &end, &added) < 0)
        return;
    pl_radix_lock(s->tree, end);
    pl_radix_unlock(s->tree, r->node);
    r->node = end;
    r->own -= upto - r->depth;
    s->own -= upto - r->depth;
    r->depth = upto;
    s->blocked = false;
}

/* Takes a running request off the pool; what it computed stays cached, evictable. */
static void leave(pl_sim *s, pl_sim_req *r)
{
    share(s, r, r->kv);
    pl_radix_unlock(s->tree, r->node);
    r->node = pl_radix_root(s->tree);
    s->own -= r->own;
    r->own = r->depth = r->kv = r->chunk = 0;
    if (s->cursor == r)
        s->cursor = r->next;
    list_remove(&s->running, r);
    s->blocked = false;
}

static void enqueue(pl_sim *s, pl_sim_req *r)
{
    r->state = WAITING;
    pl_heap_push(&s->waiting, &r->place); /* room was made at submit */
    if (pl_heap_top(&s->waiting) == &r->place)
        s->blocked = false;
}

static void drop(pl_sim_req *r)
{
    free(r->tokens);
    free(r);
}

/* Ends a request that is in no list any more. */
static void finish(pl_sim *s, pl_sim_req *r, int64_t now_us, pl_sim_finish why)
{
    r->state = OVER;
    s->count.finished++;
    s->calling = r;
    if (r->ev->on_finish)
        r->ev->on_finish(r->user, now_us, why);
    s->calling = NULL;
    drop(r);
}

/* --- requests come and go --- */

bool pl_sim_fits(const pl_sim *s, int n, int output_tokens)
{
    return whole_pages(s, (int64_t)n + output_tokens) <= s->pool;
}

int pl_sim_submit(pl_sim *s, int64_t now_us, const uint32_t *tokens, int n, int output_tokens,
                  int priority, uint64_t out_seed, const pl_sim_events *ev, void *user,
                  pl_sim_req **out)
{
    *out = NULL;
    if (n < 1 || output_tokens < 0)
        return PL_EINVALID;
    if (!pl_sim_fits(s, n, output_tokens))
        return PL_ELIMIT;
    int waiting = s->arriving.n + s->waiting.n;
    if (s->o.max_waiting && waiting >= s->o.max_waiting)
        return PL_EBUSY;
    pl_sim_req *r = calloc(1, sizeof *r);
    uint32_t *copy = malloc((size_t)n * sizeof *copy);
    if (!r || !copy || waiting + s->running.n >= INT_MAX / 2 ||
        !pl_heap_reserve(&s->waiting, waiting + s->running.n + 1)) {
        free(r);
        free(copy);
        return PL_ENOMEM;
    }
    memcpy(copy, tokens, (size_t)n * sizeof *copy);
    r->tokens = copy;
    r->n = r->target = n;
    r->output_tokens = output_tokens;
    r->priority = priority;
    r->place.major = (uint64_t)((int64_t)INT_MAX - priority);
    r->place.minor = s->next_seq++;
    r->node = pl_radix_root(s->tree);
    r->seed = out_seed;
    r->ev = ev;
    r->user = user;
    if (now_us > s->now_us)
        s->now_us = now_us;
    r->ready_us = s->now_us + (int64_t)s->o.timing.api_us;
    list_add(&s->arriving, r);
    s->waiting_tokens += n;
    s->count.requests++;
    *out = r;
    return 0;
}

void pl_sim_abort(pl_sim *s, int64_t now_us, pl_sim_req *r)
{
    if (r->state == OVER)
        return;
    if (now_us > s->now_us)
        s->now_us = now_us;
    if (r->state == RUNNING) {
        leave(s, r);
    } else {
        if (r->state == ARRIVING)
            list_remove(&s->arriving, r);
        else
            pl_heap_remove(&s->waiting, &r->place);
        s->waiting_tokens -= r->n;
        s->blocked = false;
    }
    r->state = OVER;
    s->count.aborted++;
    if (s->calling != r)
        drop(r);
}

int pl_sim_cached_tokens(const pl_sim_req *r)
{
    return r->cached;
}

bool pl_sim_is_running(const pl_sim_req *r)
{
    return r->state == RUNNING;
}

/* --- a step begins --- */

/* The first of the queue runs from here on; false when there is no room for it. */
static bool admit(pl_sim *s, pl_sim_req *r)
{
    int known = r->n + r->out;
    pl_radix_node *node = pl_radix_root(s->tree);
    int hit = s->o.prefix_cache ? pl_radix_match(s->tree, r->tokens, known - 1, &node) : 0;
    int64_t own = whole_pages(s, known) - hit;
    int64_t spare = s->running.n ? s->pool / 100 : 0;
    pl_radix_lock(s->tree, node); /* before evicting: not what it is about to use */
    if (free_tokens(s) + pl_radix_evictable(s->tree) < own + spare || !make_room(s, own)) {
        pl_radix_unlock(s->tree, node);
        return false;
    }
    pl_heap_remove(&s->waiting, &r->place);
    s->waiting_tokens -= r->n;
    r->state = RUNNING;
    r->node = node;
    r->depth = r->kv = hit;
    r->own = (int)own;
    s->own += own;
    r->target = known;
    r->decoding = false;
    r->chunk = 0;
    if (!r->admitted) {
        r->admitted = true;
        r->cached = hit;
        s->count.prompt_tokens += (uint64_t)r->n;
        s->count.cached_tokens += (uint64_t)hit;
    }
    list_add(&s->running, r);
    return true;
}

/* Room for what a request will produce, made when it is first admitted, so that long queues hold
 * prompts only. */
static bool grow(pl_sim_req *r)
{
    if (r->admitted || r->output_tokens == 0)
        return true;
    uint32_t *all = realloc(r->tokens, ((size_t)r->n + (size_t)r->output_tokens) * sizeof *all);
    if (all)
        r->tokens = all;
    return all != NULL;
}

/* Lowest priority, then last admitted. */
static void preempt(pl_sim *s)
{
    pl_sim_req *victim = s->running.head;
    for (pl_sim_req *r = victim->next; r; r = r->next)
        if (r->priority <= victim->priority)
            victim = r;
    leave(s, victim);
    s->waiting_tokens += victim->n;
    s->count.preempted++;
    enqueue(s, victim);
}

/* Each decoding request needs a place for one more token. True when somebody was preempted. */
static bool reserve_decodes(pl_sim *s)
{
    uint64_t before = s->count.preempted;
    s->cursor = s->running.head;
    while (s->cursor) {
        pl_sim_req *r = s->cursor;
        s->cursor = r->next;
        r->chunk = 0;
        if (!r->decoding)
            continue;
        while (r->state == RUNNING && r->kv == r->depth + r->own) {
            if (make_room(s, s->o.page_tokens)) {
                r->own += s->o.page_tokens;
                s->own += s->o.page_tokens;
            } else {
                preempt(s);
            }
        }
        if (r->state == RUNNING)
            r->chunk = 1;
    }
    return s->count.preempted != before;
}

static int prefill_chunk(pl_sim_req *r, int budget)
{
    int left = r->target - r->kv;
    r->chunk = left < budget ? left : budget;
    return r->chunk;
}

static void begin_step(pl_sim *s, int64_t now_us)
{
    pl_sim_req *r;
    while ((r = s->arriving.head) && r->ready_us <= now_us) {
        list_remove(&s->arriving, r);
        enqueue(s, r);
    }
    bool preempted = reserve_decodes(s);
    int budget = s->o.max_batch_tokens;
    for (r = s->running.head; r; r = r->next)
        budget -= r->decoding ? 1 : 0;
    for (r = s->running.head; r && budget > 0; r = r->next)
        if (!r->decoding)
            budget -= prefill_chunk(r, budget);
    while (budget > 0 && !preempted && !s->blocked && s->running.n < s->o.max_running &&
           (r = of_place(pl_heap_top(&s->waiting)))) {
        if (!grow(r)) {
            pl_heap_remove(&s->waiting, &r->place);
            s->waiting_tokens -= r->n;
            finish(s, r, now_us, PL_SIM_REFUSED);
        } else if (admit(s, r)) {
            budget -= prefill_chunk(r, budget);
        } else {
            s->blocked = true;
        }
    }
    if (s->running.n == 0)
        return;
    pl_step_work work = {0};
    for (r = s->running.head; r; r = r->next) {
        if (r->decoding) {
            work.decoding++;
            work.context_tokens += r->kv + 1;
        } else if (r->chunk) {
            work.prefill_tokens += r->chunk;
            work.prefill_attn += (double)r->chunk * ((double)r->kv + (double)r->chunk / 2);
        }
    }
    s->step_end_us = now_us + pl_timing_step_us(&s->o.timing, &work);
    s->count.steps++;
}

/* --- a step ends --- */

/* The next output token; false when the callback aborted the request, which is gone then. */
static bool emit(pl_sim *s, pl_sim_req *r, int64_t now_us)
{
    r->tokens[r->n + r->out] = pl_sim_output_token(r->seed, r->out);
    r->out++;
    s->count.output_tokens++;
    s->calling = r;
    if (r->ev->on_tokens)
        r->ev->on_tokens(r->user, now_us, r->out - 1, 1);
    s->calling = NULL;
    if (r->state != OVER)
        return true;
    drop(r);
    return false;
}

static void end_step(pl_sim *s, int64_t now_us)
{
    s->step_end_us = INT64_MAX;
    s->cursor = s->running.head;
    while (s->cursor) {
        pl_sim_req *r = s->cursor;
        s->cursor = r->next;
        r->kv += r->chunk;
        if (r->chunk == 0 || (!r->decoding && r->kv < r->target))
            continue;
        if (!r->decoding)
            share(s, r, r->kv);
        r->decoding = true;
        if (r->output_tokens > 0 && !emit(s, r, now_us))
            continue;
        if (r->out == r->output_tokens) {
            leave(s, r);
            finish(s, r, now_us, PL_SIM_DONE);
        }
    }
}

int64_t pl_sim_next_us(const pl_sim *s)
{
    if (s->step_end_us != INT64_MAX)
        return s->step_end_us;
    if (s->waiting.n)
        return s->now_us;
    return s->arriving.head ? s->arriving.head->ready_us : INT64_MAX;
}

void pl_sim_step(pl_sim *s, int64_t now_us)
{
    for (int64_t at; (at = pl_sim_next_us(s)) <= now_us;) {
        if (at > s->now_us)
            s->now_us = at;
        if (s->step_end_us != INT64_MAX)
            end_step(s, at);
        begin_step(s, at);
    }
    if (now_us > s->now_us)
        s->now_us = now_us;
}

/* --- the rest --- */

uint32_t pl_sim_output_token(uint64_t out_seed, int i)
{
    static const char words[64][5] = {
        "the ", "sun ", "and ", "sea ", "old ", "map ", "one ", "sky ", "new ", "day ", "low ",
        "hum ", "far ", "bay ", "red ", "fox ", "six ", "oar ", "wet ", "dew ", "ten ", "elm ",
        "sly ", "owl ", "two ", "hen ", "shy ", "cat ", "big ", "oak ", "dry ", "ash ", "ice ",
        "fog ", "mud ", "ant ", "bee ", "gem ", "hut ", "ink ", "jar ", "key ", "lid ", "net ",
        "orb ", "pen ", "rod ", "sap ", "tin ", "urn ", "van ", "wax ", "yew ", "zoo ", "arc ",
        "bow ", "cup ", "den ", "egg ", "fin ", "gap ", "hat ", "ivy ", "jug "};
    uint64_t z = out_seed + ((uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    const unsigned char *w = (const unsigned char *)words[z >> 58];
    return (uint32_t)w[0] | (uint32_t)w[1] << 8 | (uint32_t)w[2] << 16 | (uint32_t)w[3] << 24;
}

void pl_sim_flush_cache(pl_sim *s)
{
    s->count.evicted_tokens += (uint64_t)pl_radix_evict(s->tree, INT64_MAX);
    s->blocked = false;
}

void pl_sim_stats_of(const pl_sim *s, pl_sim_stats *out)
{
    *out = s->count;
    out->running = s->running.n;
    out->waiting = s->arriving.n + s->waiting.n;
    out->waiting_tokens = s->waiting_tokens;
    out->pool_tokens = s->pool;
    out->evictable_tokens = pl_radix_evictable(s->tree);
    out->available_tokens = free_tokens(s);
    out->used_tokens = s->pool - out->evictable_tokens - out->available_tokens;
}

static void must(bool holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "simulated engine: broken invariant: %s\n", what);
    abort();
}

void pl_sim_check(const pl_sim *s)
{
    int64_t own = 0, held = 0, prompts = 0;
    int n = 0;
    must(pl_radix_sound(s->tree), "the prefix cache is sound");
    for (const pl_sim_req *r = s->running.head; r; r = r->next) {
        must(r->state == RUNNING && r->own >= 0, "a running request's state");
        must(r->kv <= r->depth + r->own, "computed tokens have a place");
        must(r->depth + r->own <= whole_pages(s, (int64_t)r->n + r->output_tokens),
             "no request holds more than it can need");
        own += r->own;
        held += r->depth;
        n++;
    }
    must(n == s->running.n && n <= s->o.max_running, "the number of running requests");
    must(own == s->own, "pages held by requests add up");
    must(free_tokens(s) >= 0, "the pool is not overdrawn");
    must(pl_radix_tokens(s->tree) - pl_radix_evictable(s->tree) <= held, "locks are released");
    for (const pl_sim_req *r = s->arriving.head; r; r = r->next)
        prompts += r->n;
    for (int i = 0; i < s->waiting.n; i++) {
        const pl_sim_req *r = of_place(s->waiting.v[i]);
        must(r->state == WAITING && r->own == 0 && r->depth == 0, "waiting requests hold nothing");
        prompts += r->n;
    }
    must(prompts == s->waiting_tokens, "prompt tokens of waiting requests add up");
}

void pl_sim_free(pl_sim *s)
{
    if (!s)
        return;
    for (pl_sim_req *r = s->running.head, *next; r; r = next) {
        next = r->next;
        drop(r);
    }
    for (pl_sim_req *r = s->arriving.head, *next; r; r = next) {
        next = r->next;
        drop(r);
    }
    for (int i = 0; i < s->waiting.n; i++)
        drop(of_place(s->waiting.v[i]));
    free(s->waiting.v);
    pl_radix_free(s->tree);
    free(s);
}
