/* Timing wheel: see wheel.h. A timer sits in the slot of its due tick modulo the wheel's size and
 * is looked at once a revolution until its tick has come. */
#include "base/wheel.h"

#include <stddef.h>

static uint64_t due_tick(uint64_t due_ms)
{
    return due_ms / PL_WHEEL_TICK_MS + (due_ms % PL_WHEEL_TICK_MS != 0); /* up: never early */
}

static void unlink_timer(pl_wheel *w, pl_timer *t)
{
    if (w->cursor == t)
        w->cursor = t->next;
    t->prev->next = t->next;
    t->next->prev = t->prev;
    t->next = t->prev = NULL;
    w->armed--;
}

void pl_wheel_init(pl_wheel *w, uint64_t now_ms)
{
    for (int i = 0; i < PL_WHEEL_SLOTS; i++)
        w->slots[i].next = w->slots[i].prev = &w->slots[i];
    w->cursor = NULL;
    w->tick = now_ms / PL_WHEEL_TICK_MS;
    w->now_ms = now_ms;
    w->armed = 0;
}

void pl_wheel_arm(pl_wheel *w, pl_timer *t, uint64_t after_ms, void (*fire)(pl_timer *t))
{
    if (t->next)
        unlink_timer(w, t);
    t->due_ms = after_ms < UINT64_MAX - w->now_ms ? w->now_ms + after_ms : UINT64_MAX;
    t->fire = fire;
    uint64_t tick = due_tick(t->due_ms);
    if (tick <= w->tick)
        tick = w->tick + 1;
    pl_timer *slot = &w->slots[tick % PL_WHEEL_SLOTS];
    t->prev = slot->prev;
    t->next = slot;
    slot->prev->next = t;
    slot->prev = t;
    w->armed++;
}

void pl_wheel_cancel(pl_wheel *w, pl_timer *t)
{
    if (t->next)
        unlink_timer(w, t);
}

static void sweep(pl_wheel *w, pl_timer *slot)
{
    w->cursor = slot->next;
    while (w->cursor != slot) {
        pl_timer *t = w->cursor;
        w->cursor = t->next;
        if (due_tick(t->due_ms) <= w->tick) {
            unlink_timer(w, t);
            t->fire(t);
        }
    }
    w->cursor = NULL;
}

void pl_wheel_advance(pl_wheel *w, uint64_t now_ms)
{
    if (now_ms > w->now_ms)
        w->now_ms = now_ms;
    uint64_t target = w->now_ms / PL_WHEEL_TICK_MS;
    if (target > w->tick + PL_WHEEL_SLOTS) {
        /* after a long pause one revolution sees every timer */
        w->tick = target - PL_WHEEL_SLOTS;
    }
    while (w->tick < target) {
        w->tick++;
        sweep(w, &w->slots[w->tick % PL_WHEEL_SLOTS]);
    }
}
