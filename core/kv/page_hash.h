/* Hashes of KV pages as SGLang's engines name them in their events: SHA-256 over the page's tokens,
 * chained through the whole 32-byte digest, of which the wire carries the first 8 bytes as a signed
 * number. With them a prompt can be looked up by the engine's own keys, without tokens in the
 * index.
 *
 * Nothing in the router calls these yet. A hasher belongs to one thread at a time. Hashing
 * allocates nothing of its own; libcrypto may renew its state (OpenSSL 3.0: 112 bytes freed and
 * allocated again, once a page). */
#ifndef PL_PAGE_HASH_H
#define PL_PAGE_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/str.h"

#define PL_PAGE_TOKENS_MAX 65536
#define PL_PAGE_KEY_MAX    65536 /* bytes of an extra key */
#define PL_PAGE_DIGEST     32    /* bytes */

typedef struct pl_page_hasher pl_page_hasher;

/* NULL when out of memory or when libcrypto has no SHA-256. */
pl_page_hasher *pl_page_hasher_new(void);
void pl_page_hasher_free(pl_page_hasher *h); /* NULL is fine */

/* How an engine cuts and names pages. */
typedef struct pl_page_space {
    uint32_t page_tokens;
    bool bigram;             /* Eagle: a unit is a token and the one after it, n tokens are n-1 */
    const pl_str *extra_key; /* borrowed; NULL: none, which is not the same as an empty one */
} pl_page_space;

/* How many pages n tokens make, the last one full or not. 0 without page_tokens. */
size_t pl_page_count(const pl_page_space *s, size_t n);

/* Hashes the pages of tokens[0 .. n) into out[], which has room for cap. parent: the digest of the
 * page before them, NULL at the root. last: where the digest of the last page goes, may be NULL or
 * parent; left alone when there is no page. To continue from it, that page must be a full one.
 * Returns the number of pages; PL_EINVALID without page_tokens; PL_ELIMIT when there are more than
 * cap or a bound above is exceeded (nothing is written); PL_ENOMEM when libcrypto fails (out[] may
 * be partly written; the hasher can be used again). */
int64_t pl_page_hash(pl_page_hasher *h, const pl_page_space *s, const uint8_t *parent,
                     const uint32_t *tokens, size_t n, int64_t *out, size_t cap, uint8_t *last)
    __attribute__((warn_unused_result));

#endif
