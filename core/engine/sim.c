/* The simulated engine's scheduler: see sim.h for what it does and in which order. Called by the
 * live front (on its loop's thread) and by simulators; it owns its requests, their token ids, the
 * prefix cache and the sessions' slots. No clock, no randomness, no addresses in any decision.
 *
 * A request's prefix is in the tree and locked up to `depth`; its own pages carry on from there.
 * For a later turn of a session both are what its slot held, and more pages. */
#include "engine/sim.h"

#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "engine/sim_inner.h"

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
        s->tree = pl_radix_new(o->page_tokens, o->eviction);
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

static void list_add(pl_req_list *l, pl_sim_req *r)
{
    r->next = NULL;
    r->prev = l->tail;
    *(l->tail ? &l->tail->next : &l->head) = r;
    l->tail = r;
    l->n++;
}

static void list_remove(pl_req_list *l, pl_sim_req *r)
{
    *(r->prev ? &r->prev->next : &l->head) = r->next;
    *(r->next ? &r->next->prev : &l->tail) = r->prev;
    l->n--;
}

/* Makes `want` tokens of the pool free, evicting cache; false when there are not as many. */
static bool make_room(pl_sim *s, int64_t want)
{
    int64_t lacking = want - pl_sim_free_tokens(s);
    if (lacking <= 0)
        return true;
    pl_radix_decay(s->tree, s->now_us);
    if (lacking > pl_radix_evictable(s->tree))
        return false;
    s->count.evicted_tokens += (uint64_t)pl_radix_evict(s->tree, lacking);
    return true;
}

/* Tells the tree what a request's prefix is worth; costs nothing where that does not matter. */
static void mark(pl_sim *s, pl_sim_req *r, int uses)
{
    if (s->o.eviction != PL_RADIX_LRU || r->retain_us > 0)
        pl_radix_mark(s->tree, r->node, uses, r->priority,
                      r->retain_us > 0 ? s->now_us + r->retain_us : INT64_MIN);
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

/* How far what a request computed may be shared: of a session only the first turn's prompt. */
static int shareable(const pl_sim_req *r)
{
    if (!r->slot)
        return r->kv;
    if (r->slot->kv)
        return 0;
    return r->kv < r->n ? r->kv : r->n;
}

typedef enum leaving { ENDED, PREEMPTED, ABORTED } leaving;

/* Takes a running request off the pool. What it computed stays cached, evictable; a turn's goes
 * back to its slot, or, when it was aborted, is lost. */
static void leave(pl_sim *s, pl_sim_req *r, leaving how)
{
    pl_slot *slot = r->slot;
    if (!slot || how == PREEMPTED)
        share(s, r, shareable(r));
    mark(s, r, 0);
    if (slot && how == ENDED) {
        pl_sim_slot_keep(s, r);
    } else {
        s->own -= r->own;
        if (slot && slot->kv)
            s->held += slot->own; /* and its lock stays */
        else
            pl_radix_unlock(s->tree, r->node);
        if (slot && how == ABORTED)
            pl_sim_slot_drop(s, slot);
    }
    r->node = pl_radix_root(s->tree);
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
    if (!r->borrowed)
        free(r->tokens);
    free(r);
}

/* Ends a request that is in no list any more. */
static void finish(pl_sim *s, pl_sim_req *r, int64_t now_us, pl_sim_finish why)
{
    r->state = OVER;
    s->count.finished++;
    pl_sim_slot_over(s, r);
    s->calling = r;
    if (r->ev->on_finish)
        r->ev->on_finish(r->user, now_us, why);
    s->calling = NULL;
    drop(r);
}

/* --- requests come and go --- */

bool pl_sim_fits(const pl_sim *s, int n, int output_tokens)
{
    return pl_sim_whole_pages(s, (int64_t)n + output_tokens) <= s->pool;
}

/* The request's array of token ids: the slot's, or a copy. */
static bool take_tokens(pl_sim_req *r, const pl_sim_ask *ask)
{
    size_t n = (size_t)ask->n * sizeof *ask->tokens;
    pl_slot *slot = ask->slot;
    if (slot) {
        if (!pl_slot_reserve(slot, (int64_t)slot->n + ask->n))
            return false;
        memcpy(slot->tokens + slot->n, ask->tokens, n);
        r->tokens = slot->tokens;
        r->borrowed = true;
        r->n = slot->n + ask->n;
        return true;
    }
    r->tokens = malloc(n);
    r->n = ask->n;
    if (r->tokens)
        memcpy(r->tokens, ask->tokens, n);
    return r->tokens != NULL;
}

int pl_sim_ask_for(pl_sim *s, int64_t now_us, const pl_sim_ask *ask, const pl_sim_events *ev,
                   void *user, pl_sim_req **out)
{
    *out = NULL;
    pl_slot *slot = ask->slot;
    if (ask->n < 1 || ask->output_tokens < 0 || (slot && (slot->turn || slot->closing)))
        return PL_EINVALID;
    if (pl_sim_whole_pages(s, (int64_t)ask->n + (slot ? slot->n : 0) + ask->output_tokens) >
        s->pool)
        return PL_ELIMIT;
    int waiting = s->arriving.n + s->waiting.n;
    if (s->o.max_waiting && waiting >= s->o.max_waiting)
        return PL_EBUSY;
    pl_sim_req *r = calloc(1, sizeof *r);
    if (!r || waiting + s->running.n >= INT_MAX / 2 ||
        !pl_heap_reserve(&s->waiting, waiting + s->running.n + 1) || !take_tokens(r, ask)) {
        free(r);
        return PL_ENOMEM;
    }
    r->target = r->n;
    r->output_tokens = ask->output_tokens;
    r->priority = ask->priority;
    r->retain_us = ask->retain_us;
    r->place.major = (uint64_t)((int64_t)INT_MAX - ask->priority);
    r->place.minor = s->next_seq++;
    r->node = pl_radix_root(s->tree);
    r->seed = ask->out_seed;
    r->ev = ev;
    r->user = user;
    if (now_us > s->now_us)
        s->now_us = now_us;
    if (slot) {
        r->slot = slot;
        slot->turn = r;
        r->name_hash = pl_sim_name_hash(ask->name);
        r->tail = ask->tail;
        r->tailed = ask->tailed;
        pl_slots_active(&s->slots, slot, s->now_us);
    }
    r->ready_us = s->now_us + (int64_t)s->o.timing.api_us;
    list_add(&s->arriving, r);
    s->waiting_tokens += pl_sim_pending(r);
    s->count.requests++;
    *out = r;
    return 0;
}

int pl_sim_submit(pl_sim *s, int64_t now_us, const uint32_t *tokens, int n, int output_tokens,
                  int priority, uint64_t out_seed, const pl_sim_events *ev, void *user,
                  pl_sim_req **out)
{
    pl_sim_ask ask = {.tokens = tokens,
                      .n = n,
                      .output_tokens = output_tokens,
                      .priority = priority,
                      .out_seed = out_seed};
    return pl_sim_ask_for(s, now_us, &ask, ev, user, out);
}

void pl_sim_abort(pl_sim *s, int64_t now_us, pl_sim_req *r)
{
    if (r->state == OVER)
        return;
    if (now_us > s->now_us)
        s->now_us = now_us;
    if (r->state == RUNNING) {
        leave(s, r, ABORTED);
    } else {
        if (r->state == ARRIVING)
            list_remove(&s->arriving, r);
        else
            pl_heap_remove(&s->waiting, &r->place);
        s->waiting_tokens -= pl_sim_pending(r);
        if (r->slot && r->admitted) /* it has run, and was preempted */
            pl_sim_slot_drop(s, r->slot);
        s->blocked = false;
    }
    r->state = OVER;
    s->count.aborted++;
    pl_sim_slot_over(s, r);
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
    pl_slot *slot = r->slot && r->slot->kv ? r->slot : NULL;
    pl_radix_node *node = slot ? slot->node : pl_radix_root(s->tree);
    int hit = 0, depth, has = 0;
    if (slot) {
        hit = slot->kv;
        depth = slot->depth;
        has = slot->own;
    } else {
        if (s->o.prefix_cache)
            hit = pl_radix_match(s->tree, r->tokens, known - 1, &node);
        depth = hit;
    }
    int64_t more = pl_sim_whole_pages(s, known) - depth - has;
    int64_t spare = s->running.n ? s->pool / 100 : 0;
    if (!slot)
        pl_radix_lock(s->tree, node); /* before evicting: not what it is about to use */
    if (pl_sim_free_tokens(s) + pl_radix_evictable(s->tree) < more + spare || !make_room(s, more)) {
        if (!slot)
            pl_radix_unlock(s->tree, node);
        return false;
    }
    pl_heap_remove(&s->waiting, &r->place);
    s->waiting_tokens -= pl_sim_pending(r);
    r->state = RUNNING;
    r->node = node;
    r->depth = depth;
    r->kv = hit;
    r->own = has + (int)more;
    s->own += r->own;
    s->held -= has;
    r->target = known;
    r->decoding = false;
    r->chunk = 0;
    mark(s, r, !slot && !r->admitted);
    if (!r->admitted) {
        r->admitted = true;
        r->cached = hit;
        s->count.prompt_tokens += (uint64_t)r->n;
        s->count.cached_tokens += (uint64_t)hit;
        s->count.turns += r->slot != NULL;
    }
    list_add(&s->running, r);
    return true;
}

/* Room for what a request will produce, made when it is first admitted, so that long queues hold
 * prompts only. */
static bool grow(pl_sim_req *r)
{
    if (r->admitted)
        return true;
    int64_t all = (int64_t)r->n + r->output_tokens + r->tailed;
    if (r->slot) {
        bool room = pl_slot_reserve(r->slot, all);
        r->tokens = r->slot->tokens;
        return room;
    }
    if (r->output_tokens == 0)
        return true;
    uint32_t *tokens = realloc(r->tokens, (size_t)all * sizeof *tokens);
    if (tokens)
        r->tokens = tokens;
    return tokens != NULL;
}

/* Lowest priority, then last admitted. */
static void preempt(pl_sim *s)
{
    pl_sim_req *victim = s->running.head;
    for (pl_sim_req *r = victim->next; r; r = r->next)
        if (r->priority <= victim->priority)
            victim = r;
    leave(s, victim, PREEMPTED);
    s->waiting_tokens += pl_sim_pending(victim);
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
           (r = pl_sim_of_place(pl_heap_top(&s->waiting)))) {
        if (!grow(r)) {
            pl_heap_remove(&s->waiting, &r->place);
            s->waiting_tokens -= pl_sim_pending(r);
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
            share(s, r, shareable(r));
        r->decoding = true;
        if (r->output_tokens > 0 && !emit(s, r, now_us))
            continue;
        if (r->out == r->output_tokens) {
            leave(s, r, ENDED);
            finish(s, r, now_us, PL_SIM_DONE);
        }
    }
}

int64_t pl_sim_next_us(const pl_sim *s)
{
    int64_t at = pl_slots_next_us(&s->slots);
    if (s->step_end_us != INT64_MAX)
        return s->step_end_us < at ? s->step_end_us : at;
    if (s->waiting.n && !s->blocked)
        return s->now_us < at ? s->now_us : at;
    return s->arriving.head && s->arriving.head->ready_us < at ? s->arriving.head->ready_us : at;
}

void pl_sim_step(pl_sim *s, int64_t now_us)
{
    for (int64_t at; (at = pl_sim_next_us(s)) <= now_us && at != INT64_MAX;) {
        if (at > s->now_us)
            s->now_us = at;
        pl_sim_reap(s, at);
        if (s->step_end_us <= at)
            end_step(s, at);
        if (s->step_end_us == INT64_MAX)
            begin_step(s, at);
    }
    if (now_us > s->now_us)
        s->now_us = now_us;
}

/* --- what it says --- */

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
        drop(pl_sim_of_place(s->waiting.v[i]));
    free(s->waiting.v);
    pl_slots_free(&s->slots);
    pl_radix_free(s->tree);
    free(s);
}
