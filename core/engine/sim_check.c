/* The simulated engine's figures, its cache as others see it, and its invariants. Called by whoever
 * runs it, on their thread. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/sim_inner.h"

static bool idles(const pl_slot *slot)
{
    return !slot->turn || slot->turn->state != RUNNING;
}

void pl_sim_flush_cache(pl_sim *s)
{
    for (pl_slot *slot = s->slots.head; slot; slot = slot->next)
        if (!slot->turn)
            pl_sim_slot_drop(s, slot);
    s->count.evicted_tokens += (uint64_t)pl_radix_flush(s->tree);
    s->blocked = false;
}

int pl_sim_watch_kv(pl_sim *s, const pl_sim_kv_events *ev, void *user, pl_sim_kv_names names)
{
    return pl_radix_watch(s->tree, ev, user, names);
}

void pl_sim_each_kv(const pl_sim *s, void (*each)(void *user, const pl_sim_kv_run *run), void *user)
{
    pl_radix_each(s->tree, each, user);
}

void pl_sim_stats_of(const pl_sim *s, pl_sim_stats *out)
{
    *out = s->count;
    out->running = s->running.n;
    out->waiting = s->arriving.n + s->waiting.n;
    out->waiting_tokens = s->waiting_tokens;
    out->pool_tokens = s->pool;
    out->evictable_tokens = pl_radix_evictable(s->tree);
    out->available_tokens = pl_sim_free_tokens(s);
    out->retained_tokens = pl_radix_retained(s->tree);
    out->held_tokens = s->held;
    out->sessions = s->slots.n;
    out->streaming_sessions = s->slots.streaming_n;
    out->stalled = s->blocked && s->waiting.n && s->running.n == 0;
    out->used_tokens = s->pool - out->evictable_tokens - out->available_tokens;
}

static void must(bool holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "simulated engine: broken invariant: %s\n", what);
    abort();
}

/* Returns how much of the tree idle sessions and later turns lock, at most. */
static int64_t check_slots(const pl_sim *s)
{
    int64_t held = 0, locked = 0;
    int n = 0, streaming = 0;
    for (const pl_slot *slot = s->slots.head; slot; slot = slot->next) {
        const pl_sim_req *r = slot->turn;
        must(slot->kv <= slot->n, "a session holds no more than was said");
        must(slot->kv ? slot->depth + slot->own == pl_sim_whole_pages(s, slot->kv)
                      : slot->depth + slot->own == 0,
             "a slot holds the pages of what is computed");
        must(slot->kv || slot->node == NULL, "an empty slot locks nothing");
        must(!r || (r->slot == slot && r->state != OVER && r->tokens == slot->tokens &&
                    r->n > slot->n),
             "a slot and its turn belong together");
        must(!r || r->state != RUNNING || !slot->kv ||
                 (r->node == slot->node && r->depth == slot->depth && r->kv >= slot->kv),
             "a later turn stands on its slot");
        must(slot->turn || !slot->closing, "what is closing has a turn");
        must(!slot->closing || !slot->due.at, "what is closing has no deadline");
        if (idles(slot))
            held += slot->own;
        locked += slot->depth;
        streaming += slot->streaming;
        n++;
    }
    must(held == s->held, "tokens held by sessions add up");
    must(n == s->slots.n && streaming == s->slots.streaming_n, "the number of sessions");
    return locked;
}

void pl_sim_check(const pl_sim *s)
{
    int64_t own = 0, locked = 0, prompts = 0;
    int n = 0;
    must(pl_radix_sound(s->tree), "the prefix cache is sound");
    for (const pl_sim_req *r = s->running.head; r; r = r->next) {
        must(r->state == RUNNING && r->own >= 0, "a running request's state");
        must(r->kv <= r->depth + r->own, "computed tokens have a place");
        must(r->depth + r->own <= pl_sim_whole_pages(s, (int64_t)r->n + r->output_tokens),
             "no request holds more than it can need");
        own += r->own;
        locked += r->slot && r->slot->kv ? 0 : r->depth;
        n++;
    }
    must(n == s->running.n && n <= s->o.max_running, "the number of running requests");
    must(own == s->own, "pages held by requests add up");
    must(pl_sim_free_tokens(s) >= 0, "the pool is not overdrawn");
    must(pl_radix_tokens(s->tree) - pl_radix_evictable(s->tree) <= locked + check_slots(s),
         "locks are released");
    for (const pl_sim_req *r = s->arriving.head; r; r = r->next)
        prompts += pl_sim_pending(r);
    for (int i = 0; i < s->waiting.n; i++) {
        const pl_sim_req *r = pl_sim_of_place(s->waiting.v[i]);
        must(r->state == WAITING && r->own == 0 && r->depth == 0, "waiting requests hold nothing");
        prompts += pl_sim_pending(r);
    }
    must(prompts == s->waiting_tokens, "prompt tokens of waiting requests add up");
}
