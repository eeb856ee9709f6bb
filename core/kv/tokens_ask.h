/* What the cache of token ids (tokens_cache.c, its only caller) asks engines: what of a request
 * decides its token ids, the keys of its message boundaries, and the bodies for POST /tokenize. */
#ifndef PL_TOKENS_ASK_H
#define PL_TOKENS_ASK_H

#include "base/buf.h"
#include "http/scan.h"
#include "kv/tokens_cache.h"

enum { PL_ASK_EXTRAS = 3 }; /* members that templates read, beside messages and tools */

typedef struct pl_ask {
    bool chat;                       /* else a prompt */
    bool plain;                      /* no extras */
    const pl_scan *scan;             /* borrowed */
    pl_member extras[PL_ASK_EXTRAS]; /* ABSENT when not there */
    uint64_t *keys;                  /* keys[i]: of all up to message i; a prompt has one */
    size_t n, cap;
    pl_str *raw; /* raw[i]: message i in the body */
} pl_ask;

#define PL_ASK_MESSAGES_MAX 16384

/* Reads the request; seed sets models apart. PL_EINVALID when it has nothing that the engine could
 * be asked for, PL_ELIMIT, PL_ENOMEM. pl_ask_free in any case. */
int pl_ask_read(pl_ask *q, pl_str body, const pl_scan *scan, pl_tokcache_api api, uint64_t seed);
void pl_ask_free(pl_ask *q);

/* Appends a body: the whole request; what messages `from` and later are after the anchor; the
 * anchor alone. PL_ENOMEM. */
int pl_ask_whole(const pl_ask *q, pl_str model, pl_buf *out);
int pl_ask_after(const pl_ask *q, size_t from, pl_str model, pl_buf *out);
int pl_ask_anchor(const pl_ask *q, pl_str model, pl_buf *out);

/* Does message i come from the model? */
bool pl_ask_reply(const pl_ask *q, size_t i);

/* The ids of an answer, in *ids (to be freed by the caller). Their number, or PL_EPROTOCOL,
 * PL_ENOMEM. */
int64_t pl_ask_answer(pl_str response, uint32_t **ids);

#endif
