/* The canonical byte stream of a prompt, and its hashes chunk by chunk: equal conversations give
 * equal streams however their JSON is written, different ones do not, and a conversation that goes
 * on extends its stream, so that it shares all whole chunks.
 *
 * The stream: text is put unescaped; structure is put as bytes 0xf8 .. 0xff, which no UTF-8 text
 * contains, so that two different structures never give one stream. Not part of it: whitespace and
 * escapes of the JSON, members that are null, cache_control (clients move it along from turn to
 * turn), and whether a text is a content by itself or the only text part of one. An image or other
 * attachment stands as a hash of what it is given by (its data or its URL), drawn out to at most
 * 4 KiB, since it has tokens, too.
 *
 * Pure; the caller owns the pl_kv_canon. JSON passed in is valid (pl_scan_body has accepted it);
 * text that is not is read as far as it makes sense, within its bounds. */
#ifndef PL_KV_CANON_H
#define PL_KV_CANON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "http/json.h"
#include "kv/chunk_hash.h"

#define PL_KV_CANON_CHUNK          PL_CHUNK_BYTES /* the default, and the fastest */
#define PL_KV_CANON_CHUNK_MIN      64
#define PL_KV_CANON_CHUNK_MAX      4096
#define PL_KV_CANON_ATTACHMENT_MAX 4096 /* bytes of the stream that one takes */
#define PL_KV_CANON_SLACK                                                                          \
    64 /* a stream is longer than its JSON by at most this, odd shapes aside */

typedef enum pl_kv_canon_tag {
    PL_KV_CANON_ATTACHMENT = 0xf8,
    PL_KV_CANON_SCALAR,
    PL_KV_CANON_CLOSE,
    PL_KV_CANON_OPEN, /* of an object or a list */
    PL_KV_CANON_KEY,
    PL_KV_CANON_STRING,
    PL_KV_CANON_TEXT,
    PL_KV_CANON_MESSAGE
} pl_kv_canon_tag;

typedef struct pl_kv_canon {
    uint64_t chain; /* hash of all whole chunks so far */
    uint64_t bytes; /* of the stream so far */
    uint64_t *keys; /* keys[i]: chain after chunk i */
    size_t n, cap;
    const pl_scan *scan;  /* of the request, or NULL: its long strings need no second look */
    uint32_t chunk, fill; /* fill: bytes in carry */
    char carry[PL_KV_CANON_CHUNK_MAX];
} pl_kv_canon;

/* scan is left NULL. keys: room for cap; what is behind cap chunks is counted in bytes and digest,
 * but has no key. */
void pl_kv_canon_init(pl_kv_canon *c, uint64_t seed, uint32_t chunk, uint64_t *keys, size_t cap);

void pl_kv_canon_put(pl_kv_canon *c, const char *p, size_t n);
void pl_kv_canon_put_tag(pl_kv_canon *c, pl_kv_canon_tag tag);

/* A JSON string, quotes included, unescaped, without a tag. */
void pl_kv_canon_string(pl_kv_canon *c, pl_str raw, bool escaped);
/* Any JSON value. */
void pl_kv_canon_value(pl_kv_canon *c, pl_str raw);
/* The message (or item of a conversation) that is next in the walk: role, name, content, then its
 * other members in their order. The walk fails only for what is no valid JSON. */
void pl_kv_canon_message(pl_kv_canon *c, pl_json *j);
/* A message of that role with this content (a string, a list of parts, or whatever else is there);
 * for a prompt's parts that are no messages. */
void pl_kv_canon_said(pl_kv_canon *c, pl_str role, const pl_member *content);

/* Hash of the whole stream so far, the begun chunk included. */
uint64_t pl_kv_canon_digest(const pl_kv_canon *c);

#endif
