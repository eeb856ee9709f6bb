/* See guard.h. Owned by a decider, used on its thread; time is given, so that tests and simulators
 * move it. */
#include "policy/guard.h"

#include <string.h>

#define FIRST_BACKOFF_NS 1000000000u
#define MAX_BACKOFF_NS   60000000000u
#define FORGIVEN_NS      60000000000u /* well for so long after a suspension: begin at 1 s again */

void pl_guard_init(pl_guard *g, unsigned strikes, double window_seconds)
{
    memset(g, 0, sizeof *g);
    g->strikes = strikes < 1 ? 1 : strikes > PL_GUARD_STRIKES ? PL_GUARD_STRIKES : strikes;
    g->window_ns = (uint64_t)(window_seconds * 1e9);
}

bool pl_guard_admits(pl_guard *g, uint64_t now_ns)
{
    if (g->state != PL_GUARD_SUSPENDED)
        return true;
    if (now_ns < g->until_ns)
        return false;
    g->state = PL_GUARD_PROBING;
    return true;
}

bool pl_guard_success(pl_guard *g, uint64_t now_ns)
{
    if (g->state != PL_GUARD_PROBING)
        return false;
    g->state = PL_GUARD_OPEN;
    g->struck = 0;
    g->resumed_ns = now_ns;
    return true;
}

static bool enough(const pl_guard *g, uint64_t now_ns)
{
    if (g->state == PL_GUARD_PROBING)
        return true;
    if (g->struck < g->strikes)
        return false;
    uint64_t oldest = g->struck_at[(g->struck - g->strikes) % PL_GUARD_STRIKES];
    return now_ns - oldest <= g->window_ns;
}

bool pl_guard_strike(pl_guard *g, uint64_t now_ns)
{
    if (g->state == PL_GUARD_SUSPENDED)
        return false;
    g->struck_at[g->struck++ % PL_GUARD_STRIKES] = now_ns;
    if (!enough(g, now_ns))
        return false;
    if (g->state == PL_GUARD_OPEN && g->backoff_ns && now_ns - g->resumed_ns > FORGIVEN_NS)
        g->backoff_ns = 0;
    g->backoff_ns = g->backoff_ns ? g->backoff_ns * 2 : FIRST_BACKOFF_NS;
    if (g->backoff_ns > MAX_BACKOFF_NS)
        g->backoff_ns = MAX_BACKOFF_NS;
    g->until_ns = now_ns + g->backoff_ns;
    g->state = PL_GUARD_SUSPENDED;
    g->struck = 0;
    return true;
}
