/* SGLang's page hashes: see page_hash.h. Not wired to requests yet: the simulated engine
 * (engine/blocks.c), the tests and bench_hash are its callers. The hasher owns its digest context
 * and is used by one thread at a time; everything else is the caller's.
 *
 * A page goes through a buffer on the stack, so that small pages cost libcrypto one update. SHA-256
 * itself bounds large pages; of a page of one token over a quarter is EVP's starting and ending
 * (OpenSSL 3.0 allocates its state anew at each start; SHA256_Init and its kin do not, but are
 * deprecated). */
#include "kv/page_hash.h"

#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"

/* Token ids are hashed as they lie in memory. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "page hashes need a little-endian host");

struct pl_page_hasher {
    EVP_MD *sha256;
    EVP_MD_CTX *ctx;
};

pl_page_hasher *pl_page_hasher_new(void)
{
    pl_page_hasher *h = calloc(1, sizeof *h);
    if (!h)
        return NULL;
    h->sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
    h->ctx = EVP_MD_CTX_new();
    if (!h->sha256 || !h->ctx) {
        pl_page_hasher_free(h);
        return NULL;
    }
    return h;
}

void pl_page_hasher_free(pl_page_hasher *h)
{
    if (!h)
        return;
    EVP_MD_CTX_free(h->ctx);
    EVP_MD_free(h->sha256);
    free(h);
}

size_t pl_page_count(const pl_page_space *s, size_t n)
{
    size_t units = s->bigram && n ? n - 1 : n;
    return s->page_tokens && units ? (units - 1) / s->page_tokens + 1 : 0;
}

/* Bytes on their way into the digest. */
typedef struct feed {
    EVP_MD_CTX *ctx;
    size_t n;
    bool failed;
    uint8_t bytes[1024];
} feed;

static void feed_flush(feed *f)
{
    if (f->n && !EVP_DigestUpdate(f->ctx, f->bytes, f->n))
        f->failed = true;
    f->n = 0;
}

static inline void feed_put(feed *f, const void *bytes, size_t n)
{
    if (n > sizeof f->bytes - f->n) {
        feed_flush(f);
        if (n > sizeof f->bytes) {
            if (!EVP_DigestUpdate(f->ctx, bytes, n))
                f->failed = true;
            return;
        }
    }
    memcpy(f->bytes + f->n, bytes, n);
    f->n += n;
}

int64_t pl_page_hash(pl_page_hasher *h, const pl_page_space *s, const uint8_t *parent,
                     const uint32_t *tokens, size_t n, int64_t *out, size_t cap, uint8_t *last)
{
    if (s->page_tokens == 0)
        return PL_EINVALID;
    size_t count = pl_page_count(s, n);
    if (count > cap || s->page_tokens > PL_PAGE_TOKENS_MAX ||
        (s->extra_key && s->extra_key->n > PL_PAGE_KEY_MAX))
        return PL_ELIMIT;
    size_t units = s->bigram && n ? n - 1 : n;
    uint8_t digest[PL_PAGE_DIGEST];
    if (parent)
        memcpy(digest, parent, sizeof digest);
    feed f;
    f.ctx = h->ctx;
    f.n = 0;
    f.failed = false;
    for (size_t i = 0; i < count; i++) {
        size_t from = i * s->page_tokens;
        size_t to = units - from < s->page_tokens ? units : from + s->page_tokens;
        if (!EVP_DigestInit_ex2(h->ctx, h->sha256, NULL))
            return PL_ENOMEM;
        if (s->extra_key) {
            uint32_t key_n = (uint32_t)s->extra_key->n;
            feed_put(&f, &key_n, sizeof key_n);
            if (key_n)
                feed_put(&f, s->extra_key->p, key_n);
        }
        if (i || parent)
            feed_put(&f, digest, sizeof digest);
        if (s->bigram)
            for (size_t t = from; t < to; t++)
                feed_put(&f, tokens + t, 2 * sizeof *tokens);
        else
            feed_put(&f, tokens + from, (to - from) * sizeof *tokens);
        feed_flush(&f);
        if (f.failed || !EVP_DigestFinal_ex(h->ctx, digest, NULL))
            return PL_ENOMEM;
        uint64_t wire;
        memcpy(&wire, digest, sizeof wire);
        out[i] = (int64_t)__builtin_bswap64(wire);
    }
    if (last && count)
        memcpy(last, digest, sizeof digest);
    return (int64_t)count;
}
