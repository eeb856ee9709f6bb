/* What engines publish about their KV caches, in one shape: a msgpack batch is opened, its events
 * are read one by one. Understood are SGLang's arrays, vLLM's arrays and maps (batch and events),
 * and Dynamo's RouterEvents (block hashes with local hashes in place of tokens), which is what
 * event_json.h makes of JSON. Unknown keys, positions and types are stepped over.
 *
 *     pl_kv_batch b;
 *     if (pl_kv_batch_open(&b, payload, n) == 0)
 *         while ((rc = pl_kv_batch_next(&b, &e)) != 0)
 *             rc > 0 ? use(&e) : count(rc);
 *
 * Opening checks the whole of it first: a batch that is cut short yields no event at all, and one
 * bad event costs no other. Pure, no allocation: an event points into the batch's bytes, and lists
 * are read from there in pieces of the caller's size, so memory does not depend on what is
 * announced. */
#ifndef PL_KV_EVENT_H
#define PL_KV_EVENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/str.h"
#include "kv/index.h"
#include "kv/msgpack.h"

#define PL_KV_RANK_MAX 65535 /* of a batch; above it is none */

/* Values in the batch's bytes, not read yet. Copy it to read it twice. */
typedef struct pl_kv_list {
    pl_mp at;
    uint32_t n; /* values left */
} pl_kv_list;

typedef struct pl_kv_batch {
    double ts;     /* seconds since 1970 by the engine's clock; 0 when it says none */
    int32_t rank;  /* data-parallel rank; -1: not said */
    uint32_t left; /* events */
    pl_mp at;
} pl_kv_batch;

typedef enum pl_kv_kind {
    PL_KV_STORED,
    PL_KV_REMOVED,
    PL_KV_CLEARED,
    PL_KV_OTHER /* a type that is not known: nothing else is set */
} pl_kv_kind;

/* Whether the group of layers that an event is about holds every block of a prefix. */
typedef enum pl_kv_spec { PL_KV_SPEC_UNSAID, PL_KV_SPEC_DENSE, PL_KV_SPEC_SPARSE } pl_kv_spec;

typedef struct pl_kv_event {
    pl_kv_kind kind;
    int32_t tier;  /* pl_tier; -1: a medium that is not known */
    int32_t rank;  /* of a RouterEvent; -1: not said */
    int32_t group; /* of a hybrid model; -1: not said */
    pl_kv_spec spec;
    pl_kv_list hashes; /* stored, removed: pl_kv_hashes */
    /* stored */
    bool has_parent;
    uint64_t parent;
    bool has_locals;       /* hashes come with local hashes (pl_kv_locals), tokens are empty */
    bool bigram;           /* tokens are pairs: each one with the token after it */
    pl_kv_list tokens;     /* pl_kv_tokens; empty for a tier whose events carry none */
    uint64_t block_tokens; /* as announced: 0 when it is no number, any other number */
    bool unnamed_lora;     /* an adapter by its id, without its name */
    pl_str lora, salt;     /* empty: none */
    pl_kv_list extra;      /* pl_kv_extra_next; by block */
} pl_kv_event;

/* 0, or PL_ESYNTAX: not one well-formed msgpack value, PL_EPROTOCOL: not a batch. */
int pl_kv_batch_open(pl_kv_batch *b, const void *p, size_t n) __attribute__((warn_unused_result));

/* 1: *e is set. 0: no more. PL_EPROTOCOL: this event has not the shape that its type must have; it
 * was stepped over. */
int pl_kv_batch_next(pl_kv_batch *b, pl_kv_event *e) __attribute__((warn_unused_result));

/* Take up to cap values from the list's front; return how many. The event was checked: every value
 * has one. Byte hashes are read as the number that their last 8 bytes are, negative numbers as the
 * same bits. */
size_t pl_kv_hashes(pl_kv_list *l, uint64_t *out, size_t cap);
size_t pl_kv_locals(pl_kv_list *l, uint64_t *out, size_t cap);
/* next: where the second of each pair goes; NULL unless bigram. */
size_t pl_kv_tokens(pl_kv_list *l, uint32_t *out, uint32_t *next, size_t cap);

/* What besides tokens went into the engine's hash of a block: the adapter's name, the salt,
 * images. */
typedef struct pl_kv_extra {
    uint32_t block; /* from the event's first */
    bool object;    /* (identifier, offset): an image or the like */
    bool binary;    /* bytes, as for prompt embeddings */
    pl_str s;
} pl_kv_extra;

typedef struct pl_kv_extra_iter {
    pl_kv_list blocks;
    uint32_t block, left; /* the block being read, its values left */
} pl_kv_extra_iter;

static inline pl_kv_extra_iter pl_kv_extra_begin(const pl_kv_event *e)
{
    return (pl_kv_extra_iter){e->extra, 0, 0};
}
/* False at the end. */
bool pl_kv_extra_next(pl_kv_extra_iter *it, pl_kv_extra *x);

/* The tier that a medium's name means, in any case; -1 when it is not known. */
int32_t pl_kv_tier_of(pl_str medium);

#endif
