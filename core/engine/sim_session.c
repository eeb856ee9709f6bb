/* Sessions of the simulated engine: opening, closing and timing out, which turns are taken, and
 * what passes between a session's slot and its turn. Called by the front or a simulator and by the
 * scheduler (sim.c), on their thread. */
#include <stddef.h>

#include "engine/sim_inner.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

static const int64_t longest_us = 1000000000000000; /* 31 years: sums stay in range */

static void remove_slot(pl_sim *s, pl_slot *slot)
{
    pl_sim_slot_drop(s, slot);
    pl_slots_remove(&s->slots, slot);
}

/* Over now, or when its turn is. */
static void end(pl_sim *s, pl_slot *slot)
{
    if (!slot->turn) {
        remove_slot(s, slot);
        return;
    }
    slot->closing = true;
    pl_slots_undue(&s->slots, slot);
}

void pl_sim_reap(pl_sim *s, int64_t now_us)
{
    for (pl_slot *slot; (slot = pl_slots_due(&s->slots, now_us));) {
        s->count.timed_out++;
        end(s, slot);
    }
}

static void pass(pl_sim *s, int64_t now_us)
{
    if (now_us > s->now_us)
        s->now_us = now_us;
    pl_sim_reap(s, s->now_us);
}

int pl_sim_open(pl_sim *s, int64_t now_us, const pl_sim_session *o)
{
    pass(s, now_us);
    pl_slot *slot;
    int rc = pl_slots_add(&s->slots, o->id, o->timeout_us > longest_us ? longest_us : o->timeout_us,
                          s->now_us, &slot);
    if (rc != 0)
        return rc;
    slot->streaming = o->streaming;
    slot->capacity = o->capacity;
    s->slots.streaming_n += o->streaming;
    s->count.opened++;
    return 0;
}

bool pl_sim_close(pl_sim *s, int64_t now_us, pl_str id)
{
    pass(s, now_us);
    pl_slot *slot = pl_slots_find(&s->slots, id);
    if (!slot)
        return false;
    if (!slot->closing) {
        s->count.closed++;
        end(s, slot);
    }
    return true;
}

uint64_t pl_sim_name_hash(pl_str name)
{
    return name.n ? XXH3_64bits(name.p, name.n) | 1 : 0;
}

static const char *refusal(const pl_slot *slot, const pl_sim_turn *turn)
{
    if (slot->turn)
        return "Streaming session already has an active request.";
    if (turn->replace)
        return "Streaming sessions do not support replace.";
    if (turn->drop_previous_output)
        return "Streaming sessions do not support drop_previous_output.";
    if (turn->offset)
        return "Streaming sessions do not support offset.";
    if (turn->after.n && pl_sim_name_hash(turn->after) != slot->rid_hash)
        return "Invalid request session id";
    return NULL;
}

pl_slot *pl_sim_turn_slot(pl_sim *s, int64_t now_us, const pl_sim_turn *turn, pl_errbuf *why)
{
    pass(s, now_us);
    pl_str shown = pl_str_clip(turn->id, 200);
    pl_slot *slot = pl_slots_find(&s->slots, turn->id);
    const char *no = NULL;
    if (!slot)
        pl_fail(why, PL_ENOTFOUND, "Invalid request: session id %.*s does not exist",
                PL_FMT(shown));
    else if (slot->closing)
        pl_fail(why, PL_EINVALID, "Invalid request: close was requested for session %.*s",
                PL_FMT(shown));
    else if (!slot->streaming)
        pl_fail(why, PL_EINVALID,
                "Session %.*s is not a streaming session; the simulated engine takes turns of "
                "streaming sessions only",
                PL_FMT(shown));
    else if ((no = refusal(slot, turn)))
        pl_fail(why, PL_EINVALID, "%s", no);
    else
        return slot;
    return NULL;
}

int pl_sim_slot_tokens(const pl_slot *slot)
{
    return slot->n;
}

/* --- a slot and its turn --- */

void pl_sim_slot_keep(pl_sim *s, pl_sim_req *r)
{
    pl_slot *slot = r->slot;
    slot->n = r->n + r->out;
    if (r->tailed)
        slot->tokens[slot->n++] = r->tail; /* room was made when the turn was admitted */
    slot->kv = r->kv;
    slot->depth = r->depth;
    slot->own = (int)(pl_sim_whole_pages(s, r->kv) - r->depth);
    slot->node = r->node;
    slot->turns++;
    slot->rid_hash = r->name_hash;
    s->own -= r->own;
    s->held += slot->own;
}

void pl_sim_slot_drop(pl_sim *s, pl_slot *slot)
{
    if (!slot->kv)
        return;
    pl_radix_unlock(s->tree, slot->node);
    s->held -= slot->own;
    slot->kv = slot->depth = slot->own = 0;
    slot->node = NULL;
    s->blocked = false;
}

void pl_sim_slot_over(pl_sim *s, pl_sim_req *r)
{
    pl_slot *slot = r->slot;
    if (!slot)
        return;
    r->slot = NULL;
    slot->turn = NULL;
    if (slot->closing)
        remove_slot(s, slot);
}

void pl_sim_each_slot(const pl_sim *s, void (*each)(void *user, const pl_sim_slot_info *info),
                      void *user)
{
    for (const pl_slot *slot = s->slots.head; slot; slot = slot->next) {
        const pl_sim_req *r = slot->turn && slot->turn->state == RUNNING ? slot->turn : NULL;
        pl_sim_slot_info info = {
            .session = {.id = {slot->id, slot->id_n},
                        .streaming = slot->streaming,
                        .timeout_us = slot->timeout_us,
                        .capacity = slot->capacity},
            .inflight = slot->turn != NULL,
            .closing = slot->closing,
            .turns = slot->turns,
            .tokens = slot->n,
            .kv_tokens = r ? r->kv : slot->kv,
            .held_tokens = r ? r->own : slot->own,
            .prefix_tokens = r ? r->depth : slot->depth,
            .active_us = slot->active_us,
        };
        each(user, &info);
    }
}
