/* A hashed timing wheel: many timeouts of which nearly all are cancelled. One per event loop, not
 * thread-safe. Precision is one tick (PL_WHEEL_TICK_MS); a timer never fires early. Add and cancel
 * are O(1). */
#ifndef PL_WHEEL_H
#define PL_WHEEL_H

#include <stdbool.h>
#include <stdint.h>

#define PL_WHEEL_TICK_MS 20
#define PL_WHEEL_SLOTS   1024

/* Embedded in the object that it times; zero-initialise. The object must cancel before it is freed.
 */
typedef struct pl_timer {
    struct pl_timer *next, *prev; /* NULL when not armed */
    uint64_t due_ms;
    void (*fire)(
        struct pl_timer *t); /* runs disarmed; may arm or free itself and cancel or free others */
} pl_timer;

typedef struct pl_wheel {
    pl_timer slots[PL_WHEEL_SLOTS]; /* list heads */
    pl_timer *cursor; /* next timer the running sweep looks at; cancel() moves it on */
    uint64_t tick;    /* last tick that was swept */
    uint64_t now_ms;
    uint64_t armed; /* number of armed timers */
} pl_wheel;

void pl_wheel_init(pl_wheel *w, uint64_t now_ms);

/* Arms (or re-arms) t to fire `after_ms` from the wheel's now. */
void pl_wheel_arm(pl_wheel *w, pl_timer *t, uint64_t after_ms, void (*fire)(pl_timer *t));
void pl_wheel_cancel(pl_wheel *w, pl_timer *t);

static inline bool pl_timer_armed(const pl_timer *t)
{
    return t->next != 0;
}

/* Fires what is due. now_ms is monotonic; the owner calls this at least once a tick. */
void pl_wheel_advance(pl_wheel *w, uint64_t now_ms);

#endif
