/* The sessions that a process knows although they are kept on a shared store: what it last heard of
 * each, to answer from while that is fresh or the store is out of reach, and what it bound in an
 * outage and has still to write. Bounded; the least recently used goes. Any thread. redis.c is its
 * only caller. */
#ifndef PL_REDIS_KNOWN_H
#define PL_REDIS_KNOWN_H

#include "session/store.h"

#define PL_KNOWN_LOCAL (1ull << 63) /* in the version of a binding that only this process has */

typedef struct pl_known pl_known;

/* NULL when out of memory. max 1 or more. forgotten counts those that had still to be written when
 * they went. */
pl_known *pl_known_new(uint32_t max, _Atomic uint64_t *forgotten);
void pl_known_free(pl_known *k);

/* The server said so at now_ns; b->used_at_ns is its last use, this one included. Ignored when a
 * newer binding is known, or memory is short. */
void pl_known_heard(pl_known *k, const pl_session_name *n, const pl_binding *b, uint64_t now_ns);
void pl_known_forget(pl_known *k, const pl_session_name *n);

/* A router-only binding that was heard less than fresh_ns ago, and lives ten times longer. get: it
 * is used, a turn counted. */
bool pl_known_fresh(pl_known *k, const pl_session_name *n, bool get, uint64_t fresh_ns,
                    uint64_t now_ns, pl_binding *out);
/* What was heard up to now is not fresh any more. */
void pl_known_distrust(pl_known *k, uint64_t now_ns);
/* Turns that were counted by pl_known_fresh and not yet told to the server; they are now. */
uint32_t pl_known_turns(pl_known *k, const pl_session_name *n);

/* In an outage: whatever is known and has not expired. get: it is used, and if router-only to be
 * written. */
bool pl_known_stale(pl_known *k, const pl_session_name *n, bool get, uint64_t now_ns,
                    pl_binding *out);
/* Back again: what was bound or used in the outage and is still to be written. */
bool pl_known_owed(pl_known *k, const pl_session_name *n, bool get, uint64_t now_ns,
                   pl_binding *out);
/* In an outage: b (router-only) is bound from now on, and to be written; completes b. False when
 * out of memory. */
bool pl_known_bind(pl_known *k, const pl_session_name *n, pl_binding *b, uint64_t now_ns);

/* The next one to be written, into name (which points to buf) and b; it is not given out again
 * until pl_known_unwritten. False when there is none. */
bool pl_known_take(pl_known *k, uint64_t now_ns, pl_session_name *name,
                   char buf[PL_SESSION_MAX_TENANT_BYTES + PL_SESSION_MAX_ID_BYTES], pl_binding *b);
/* Writing it failed: again another time. */
void pl_known_unwritten(pl_known *k, const pl_session_name *n);

#endif
