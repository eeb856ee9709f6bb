/* For the tests of trust: a clock, and the messages of an engine. Batch n of engine lifetime L has
 * the fingerprint L * 1000 + n. */
#ifndef PL_TEST_TRUST_CALLS_H
#define PL_TEST_TRUST_CALLS_H

#include "kv/trust.h"

#define S PL_TRUST_S

static uint64_t now;

static inline pl_trust make(bool replay, bool snapshot)
{
    pl_trust_options o = PL_TRUST_DEFAULTS;
    o.replay = replay;
    o.snapshot = snapshot;
    pl_trust t;
    now = 1000 * S;
    pl_trust_init(&t, &o, now);
    return t;
}

static inline unsigned live(pl_trust *t, int life, uint64_t seq)
{
    return pl_trust_live(t, now, seq, (uint64_t)life * 1000 + seq, 0, 100);
}

static inline unsigned held(pl_trust *t, int life, uint64_t seq)
{
    return pl_trust_held(t, now, seq, (uint64_t)life * 1000 + seq);
}

static inline unsigned replayed(pl_trust *t, int life, uint64_t seq)
{
    return pl_trust_replayed(t, now, seq, (uint64_t)life * 1000 + seq);
}

#endif
