/* One part of the memory store (memory.c, its only caller): records, the table that finds them, the
 * wheel that expires them and the order of their last use. Not thread-safe: memory.c locks. */
#ifndef PL_SHARD_H
#define PL_SHARD_H

#include "session/store.h"

#define PL_SHARD_TICK_NS    250000000u /* of the wheel */
#define PL_SHARD_LEVELS     6  /* of 64 slots each: more ticks than nanoseconds fit 64 bits */
#define PL_SHARD_NAME_BYTES 47 /* kept in the record itself */

/* What a name is looked up by: tenant and id in one piece, with their hash. */
typedef struct pl_shard_key {
    uint64_t hash;
    uint32_t n, tenant_n;
    char bytes[PL_SESSION_MAX_TENANT_BYTES + PL_SESSION_MAX_ID_BYTES];
} pl_shard_key;

/* A number instead of a pointer: half the size. 0 is none. Good until the record is deleted. */
typedef uint32_t pl_shard_ref;

typedef struct pl_shard_record {
    pl_shard_ref next, prev; /* in a slot of the wheel; prev of the first names the slot */
    union {
        struct {
            pl_shard_ref newer, older; /* router-only: in order of use */
        };
        pl_shard_ref extra; /* engine-backed: its pl_shard_extra */
    };
    uint64_t deadline_ns; /* may be later than its slot of the wheel says, never earlier */
    uint64_t version;     /* 0: free */
    uint64_t parent_hash;
    uint32_t ttl_ms;
    int32_t slot, generation;
    uint32_t turns;
    uint32_t opened_ms; /* since the shard's birth; with opened_high above: good for 34 years */
    uint16_t rank : 15;
    uint16_t engine_backed : 1;
    uint8_t opened_high;
    uint8_t tenant_n;
    uint8_t id_n;                   /* less 1 */
    char name[PL_SHARD_NAME_BYTES]; /* tenant, then id; when longer, a pointer to it (see long_name)
                                     */
} pl_shard_record;

/* What only an engine-backed session has. */
typedef struct pl_shard_extra {
    uint64_t owner; /* whose lease was last and is not given back; 0: none */
    uint64_t lease_ends_ns;
    union {
        pl_note note;
        pl_shard_ref next; /* of the free ones */
    };
} pl_shard_extra;

typedef struct pl_shard_entry {
    uint32_t tag;     /* low half of the hash */
    pl_shard_ref ref; /* 0: empty */
} pl_shard_entry;

typedef struct pl_shard {
    pl_shard_entry *table; /* linear probing; NULL before the first insert */
    uint32_t mask;         /* entries less 1 */
    uint32_t count;
    pl_shard_record **chunks;
    uint32_t chunks_n;
    pl_shard_ref unused;         /* above all that were ever handed out; starts at 1 */
    pl_shard_ref freed;          /* linked by next */
    pl_shard_ref newest, oldest; /* of the router-only ones */
    pl_shard_extra **extra_chunks;
    uint32_t extra_chunks_n;
    pl_shard_ref extra_unused, extra_freed; /* as unused and freed */
    uint64_t versions;                      /* last one given */
    uint64_t born_ns;
    uint64_t bytes; /* on the heap */
    uint64_t tick;  /* everything due before it has been found */
    uint64_t filled[PL_SHARD_LEVELS];
    pl_shard_ref slots[PL_SHARD_LEVELS][64];
} pl_shard;

void pl_shard_init(pl_shard *s, uint64_t now_ns);
void pl_shard_destroy(pl_shard *s);

pl_shard_ref pl_shard_find(const pl_shard *s, const pl_shard_key *k);

/* A record for a name that is not there; it has no binding until pl_shard_bind, which is the next
 * call. 0 when out of memory. */
pl_shard_ref pl_shard_insert(pl_shard *s, const pl_shard_key *k);

/* Room for what one more engine-backed session needs; false when out of memory. To be called before
 * pl_shard_bind makes one of a record that is none. */
bool pl_shard_extra_ready(pl_shard *s);

/* Binds it to b from now on, with owner's lease when that is not 0; completes b. */
void pl_shard_bind(pl_shard *s, pl_shard_ref ref, pl_binding *b, uint64_t now_ns, uint64_t owner,
                   uint64_t lease_ends_ns);

/* It was used: counts a turn and moves the deadline, in constant time. */
void pl_shard_touch(pl_shard *s, pl_shard_ref ref, uint64_t now_ns);

/* Engine-backed ones. Lease: false when another owner's lasts; lapsed: it ended by itself. Release:
 * false when it is not owner's; else note replaces the present one, unless it is empty. */
bool pl_shard_lease(pl_shard *s, pl_shard_ref ref, uint64_t owner, uint64_t now_ns,
                    uint64_t lease_ends_ns, bool *lapsed);
bool pl_shard_release(pl_shard *s, pl_shard_ref ref, uint64_t owner, const pl_note *note,
                      uint64_t now_ns);

/* k is its key. */
void pl_shard_delete(pl_shard *s, pl_shard_ref ref, const pl_shard_key *k);

/* One that is due, to be deleted by the caller before the next call, or 0. Looks at *budget records
 * at most and counts it down: 0 left says that there may be more. */
pl_shard_ref pl_shard_due(pl_shard *s, uint64_t now_ns, int *budget);

/* Moves *at (0: before the first) to the next one in use. False at the end, or when *budget, the
 * records to look at, is used up: then *at is where to go on. A record keeps its number for life,
 * so this meets each that stays exactly once. */
bool pl_shard_next(const pl_shard *s, pl_shard_ref *at, int *budget);

void pl_shard_read(const pl_shard *s, pl_shard_ref ref, pl_binding *out);
bool pl_shard_engine_backed(const pl_shard *s, pl_shard_ref ref);
bool pl_shard_expired(const pl_shard *s, pl_shard_ref ref, uint64_t now_ns);
/* Fills all of k but the hash. */
void pl_shard_name(const pl_shard *s, pl_shard_ref ref, pl_shard_key *k);
/* Its last touch, bind or release. */
uint64_t pl_shard_used_ns(const pl_shard *s, pl_shard_ref ref);
/* When the least recently used router-only one was used; UINT64_MAX when there is none. */
uint64_t pl_shard_oldest_use_ns(const pl_shard *s);

#endif
