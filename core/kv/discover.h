/* Where an engine publishes its KV events, out of what it says about itself: SGLang's /server_info
 * (vLLM has nothing of the kind). Pure; any thread. */
#ifndef PL_DISCOVER_H
#define PL_DISCOVER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/str.h"
#include "kv/feed.h"

typedef struct pl_discovered {
    pl_feed_mode mode; /* CONNECT */
    /* of rank 0, ZeroMQ's form: rank r has port + r. Empty: there is none. */
    char endpoint[256], replay[256], snapshot[256];
    char topic[256];
    uint32_t block_tokens; /* 0: not said */
    int ranks;             /* 0: not said */
} pl_discovered;

/* From the body of GET /server_info. host: the engine's, as the router reaches it (an IPv6 address
 * without brackets); it stands in for an address that means any. PL_ENOTFOUND with a message: this
 * engine does not publish; PL_ESYNTAX: not JSON; PL_EPROTOCOL: it says it publishes, but not where.
 */
int pl_discover_sglang(pl_str server_info, pl_str host, pl_discovered *out, pl_errbuf *eb)
    __attribute__((warn_unused_result));

/* Fills what discovery says into a source (mode, addresses, topic, block size where the source has
 * none); its strings stay the discovery's. */
void pl_discovered_source(const pl_discovered *d, pl_feed_source *s);

#endif
