/* The addresses of one host: a literal, or a name asked for through libuv's thread pool and
 * remembered. One resolver inside each upstream pool; all calls on that loop's thread. */
#ifndef PL_RESOLVE_H
#define PL_RESOLVE_H

#include <netinet/in.h>
#include <uv.h>

#include "base/str.h"

#define PL_RESOLVE_MAX 8 /* addresses kept of one name */

typedef union pl_address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
} pl_address;

typedef struct pl_resolver {
    uv_loop_t *loop;
    char *host;                           /* without brackets; heap */
    int port;                             /* host order */
    bool literal;                         /* the host is an address: never asked for */
    bool busy;                            /* a question is under way: the resolver must stay */
    int n;                                /* addresses known */
    int preferred;                        /* index of the one that worked last */
    pl_address addresses[PL_RESOLVE_MAX]; /* in the system's order of preference */
    uint64_t expires_ms;                  /* a name's addresses are asked for again after this */
    uint64_t asked_ms;                    /* when the question under way was asked */
    uv_getaddrinfo_t req;
    void (*done)(struct pl_resolver *r);
} pl_resolver;

/* Copies host (brackets of IPv6 are taken off). 0 or PL_ENOMEM. done runs on the loop after every
 * question; n == 0 then means that there is no address. */
int pl_resolver_init(pl_resolver *r, uv_loop_t *loop, pl_str host, int port,
                     void (*done)(pl_resolver *r));
/* Are there addresses that need not be asked for again? */
bool pl_resolver_fresh(const pl_resolver *r, uint64_t now_ms);
/* Asks, unless a question is under way. 0 (done will run), PL_ERESOLVE or PL_ENOMEM (it
 * will not). */
int pl_resolver_ask(pl_resolver *r, uint64_t now_ms);
/* Gives up the question under way as far as libuv can; done still runs, later. */
void pl_resolver_cancel(pl_resolver *r);
/* Not while busy. */
void pl_resolver_free(pl_resolver *r);

#endif
