/* A connection to a Redis server that comes back: hiredis on a libuv loop. redis.c is its only
 * caller; all on the loop's thread. */
#ifndef PL_REDIS_CONN_H
#define PL_REDIS_CONN_H

#include <hiredis/hiredis.h>
#include <uv.h>

#include "base/err.h"
#include "base/str.h"
#include "base/wheel.h"

#define PL_REDIS_IN_FLIGHT_MAX 8192 /* commands; above it they are refused */

typedef struct pl_redis_conn pl_redis_conn;

/* One command, embedded by who sends it. */
typedef struct pl_redis_cmd pl_redis_cmd;
struct pl_redis_cmd {
    /* Exactly once after a send that returned 0; r NULL: there will be no reply. May free c. */
    void (*replied)(pl_redis_cmd *c, const redisReply *r);
    pl_redis_cmd *next; /* the connection's */
};

/* Strings stay valid as long as the connection. */
typedef struct pl_redis_conn_options {
    uv_loop_t *loop;
    pl_wheel *wheel;
    const char *host, *unix_path, *user, *password; /* NULL: none */
    int port, db;
    uint64_t connect_ms, silence_ms;
    uint64_t seed; /* of when it tries again: another one for each connection */
    pl_str hello;  /* a formatted command that must not be answered by an error */
    /* Commands are taken from up() on and refused from down() on: after a broken connection, or
     * while the server has been silent for silence_ms though commands wait. Neither runs inside
     * pl_redis_conn_send. why is good until down() returns. down() is called once for each attempt
     * that fails, too. */
    void (*up)(void *ctx);
    void (*down)(void *ctx, const char *why);
    void *ctx;
} pl_redis_conn_options;

/* Starts to connect. PL_ENOMEM. */
int pl_redis_conn_new(const pl_redis_conn_options *o, pl_redis_conn **out);

/* Sends a formatted command. 0, or PL_EUNAVAILABLE: it will not be replied to. */
int pl_redis_conn_send(pl_redis_conn *c, pl_redis_cmd *cmd, pl_str command);

bool pl_redis_conn_up(const pl_redis_conn *c);

/* Gives up the connection: what it refuses must not be sent (the server says that it is a replica,
 * is loading, ...). Connects again, with backoff. */
void pl_redis_conn_drop(pl_redis_conn *c, const char *why);

/* Closes: what is under way is replied to with NULL, before this returns. No
 * callback but these. The memory goes when libuv has closed its handle and the name question under
 * way, if any, has been answered. */
void pl_redis_conn_free(pl_redis_conn *c);

#endif
