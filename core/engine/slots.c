/* Open sessions: see slots.h. Called by the scheduler's session part (sim_session.c) on its thread;
 * it owns the slots, their ids and their token ids. */
#include "engine/slots.h"

#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/err.h"

static void slot_free(pl_slot *slot)
{
    free(slot->id);
    free(slot->tokens);
    free(slot);
}

void pl_slots_free(pl_slots *t)
{
    for (pl_slot *slot = t->head, *next; slot; slot = next) {
        next = slot->next;
        slot_free(slot);
    }
    free(t->bucket);
    free(t->due.v);
}

pl_slot *pl_slots_find(const pl_slots *t, pl_str id)
{
    uint64_t hash = XXH3_64bits(id.p ? id.p : "", id.n);
    for (pl_slot *slot = t->bucket ? t->bucket[hash & t->mask] : NULL; slot; slot = slot->chain)
        if (slot->hash == hash && slot->id_n == id.n && memcmp(slot->id, id.p, id.n) == 0)
            return slot;
    return NULL;
}

/* Room for one more; failing to grow costs speed only, but the first table must be there. */
static bool table_room(pl_slots *t)
{
    if (t->bucket && (size_t)t->n <= t->mask)
        return true;
    size_t mask = t->bucket ? t->mask * 2 + 1 : 63;
    pl_slot **bucket = calloc(mask + 1, sizeof(pl_slot *));
    if (!bucket)
        return t->bucket != NULL;
    for (pl_slot *slot = t->head; slot; slot = slot->next) {
        slot->chain = bucket[slot->hash & mask];
        bucket[slot->hash & mask] = slot;
    }
    free(t->bucket);
    t->bucket = bucket;
    t->mask = mask;
    return true;
}

int pl_slots_add(pl_slots *t, pl_str id, int64_t timeout_us, int64_t now_us, pl_slot **out)
{
    *out = NULL;
    if (id.n > PL_SLOT_ID_BYTES || t->n >= PL_SLOTS_MAX)
        return PL_ELIMIT;
    if (pl_slots_find(t, id))
        return PL_EEXISTS;
    pl_slot *slot = calloc(1, sizeof *slot);
    char *copy = malloc(id.n + 1);
    if (!slot || !copy || !table_room(t) || !pl_heap_reserve(&t->due, t->n + 1)) {
        free(slot);
        free(copy);
        return PL_ENOMEM;
    }
    if (id.n)
        memcpy(copy, id.p, id.n);
    copy[id.n] = 0;
    slot->id = copy;
    slot->id_n = id.n;
    slot->hash = XXH3_64bits(copy, id.n);
    slot->timeout_us = timeout_us;
    slot->due.minor = t->next_seq++;
    slot->chain = t->bucket[slot->hash & t->mask];
    t->bucket[slot->hash & t->mask] = slot;
    slot->prev = t->tail;
    *(t->tail ? &t->tail->next : &t->head) = slot;
    t->tail = slot;
    t->n++;
    pl_slots_active(t, slot, now_us);
    *out = slot;
    return 0;
}

void pl_slots_remove(pl_slots *t, pl_slot *slot)
{
    pl_slot **at = &t->bucket[slot->hash & t->mask];
    while (*at != slot)
        at = &(*at)->chain;
    *at = slot->chain;
    *(slot->prev ? &slot->prev->next : &t->head) = slot->next;
    *(slot->next ? &slot->next->prev : &t->tail) = slot->prev;
    t->n--;
    t->streaming_n -= slot->streaming;
    pl_slots_undue(t, slot);
    slot_free(slot);
}

void pl_slots_undue(pl_slots *t, pl_slot *slot)
{
    if (slot->due.at)
        pl_heap_remove(&t->due, &slot->due);
}

void pl_slots_active(pl_slots *t, pl_slot *slot, int64_t now_us)
{
    slot->active_us = now_us;
    if (slot->timeout_us < 0)
        return;
    pl_slots_undue(t, slot);
    slot->due.major = (uint64_t)(now_us + slot->timeout_us);
    pl_heap_push(&t->due, &slot->due);
}

static pl_slot *first_due(const pl_slots *t)
{
    pl_heap_item *top = pl_heap_top(&t->due);
    return top ? (pl_slot *)(void *)((char *)top - offsetof(pl_slot, due)) : NULL;
}

pl_slot *pl_slots_due(const pl_slots *t, int64_t now_us)
{
    pl_slot *slot = first_due(t);
    return slot && (int64_t)slot->due.major <= now_us ? slot : NULL;
}

int64_t pl_slots_next_us(const pl_slots *t)
{
    pl_slot *slot = first_due(t);
    return slot ? (int64_t)slot->due.major : INT64_MAX;
}

bool pl_slot_reserve(pl_slot *slot, int64_t n)
{
    if (n <= slot->cap)
        return true;
    int64_t cap = (int64_t)slot->cap * 3 / 2;
    if (cap < n)
        cap = n + 64;
    if (cap > INT_MAX)
        return false;
    uint32_t *v = realloc(slot->tokens, (size_t)cap * sizeof *v);
    if (!v)
        return false;
    slot->tokens = v;
    slot->cap = (int)cap;
    return true;
}
