/* `perilune reload`: asks a running router, through its admin API, to load its policy again or
 * another one. */
#ifndef PL_RELOAD_CLI_H
#define PL_RELOAD_CLI_H

#include <jansson.h>
#include <stdio.h>

#include "base/err.h"
#include "base/str.h"

typedef struct pl_reload_options {
    pl_str admin;         /* host:port */
    pl_str token;         /* empty: none is sent */
    pl_str policy;        /* name or file; empty: the running one again */
    const json_t *params; /* object; NULL: those that run */
    uint64_t timeout_ms;
    bool json;       /* print the router's answer as it is */
    FILE *out, *err; /* results, refusals */
} pl_reload_options;

/* Blocks until the answer is there. 0: swapped in. PL_EPOLICY: refused, and printed why. Others:
 * nobody there, or not a router; eb says so. */
int pl_reload_cli(const pl_reload_options *o, pl_errbuf *eb);

#endif
