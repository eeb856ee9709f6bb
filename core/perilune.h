/* perilune as a library: the router behind opaque handles. Everything here is thread-safe unless it
 * says otherwise. Errors are negative codes; pl_strerror names them. */
#ifndef PERILUNE_H
#define PERILUNE_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PERILUNE_VERSION "0.1.0"

/* Static text of an error code; never NULL. */
const char *pl_strerror(int err);

typedef struct pl_router pl_router;

/* Builds a router from a configuration as JSON (the keys of the Lua config file; NULL: all
 * defaults). `log` is the process's: the last router with that key sets it. On failure *out is NULL
 * and `error` (may be NULL) has the reason. */
int pl_router_new(const char *config_json, pl_router **out, char *error, size_t error_cap);

/* Opens the ports, loads the policy and starts the loops; returns when requests are accepted. */
int pl_router_start(pl_router *r, char *error, size_t error_cap);

/* Lets this router answer the process's signals until it is freed: SIGTERM and SIGINT drain (a
 * second one cuts), SIGHUP reads the configuration file and the policy again. Best before
 * pl_router_start, so that none is missed; for at most one router of a process. Without it no
 * signal's disposition is touched. 0 or a negative pl_err. */
int pl_router_take_signals(pl_router *r);

/* Runs the control loop on the calling thread until pl_router_stop (several routers: one thread
 * each). Returns 0 after a clean drain. */
int pl_router_run(pl_router *r);

/* Drains: no new connections, streams get the drain timeout. A second call cuts them. From any
 * thread, but not from a signal handler. */
void pl_router_stop(pl_router *r);

/* Ports that were bound (useful with port 0); -1 before start or when off. */
int pl_router_port(const pl_router *r);
int pl_router_admin_port(const pl_router *r);

/* After pl_router_run has returned, or without it; no other call may be under way. */
void pl_router_free(pl_router *r);

#ifdef __cplusplus
}
#endif

#endif
