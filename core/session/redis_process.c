/* The process's part of the shared store (redis.h): options, the script's hash, what is known, the
 * counters. Made before the handles (redis.c) and freed after them, on the control thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/sha.h>

#include "session/redis_impl.h"
#include "session/redis_scripts.h"

static int copy(char **to, pl_str from, const char *otherwise)
{
    if (from.n == 0 && !otherwise)
        return 0;
    *to = pl_str_dup(from.n ? from : pl_str_c(otherwise));
    return *to ? 0 : PL_ENOMEM;
}

static int check(const pl_redis_options *o, pl_errbuf *eb)
{
    const pl_str *all[] = {&o->host, &o->unix_path, &o->user, &o->password, &o->prefix};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (all[i]->n && memchr(all[i]->p, 0, all[i]->n))
            return pl_fail(eb, PL_EINVALID, "a name with a NUL byte in it");
    if (o->port < 0 || o->port > 65535)
        return pl_fail(eb, PL_EINVALID, "port %d: 1 to 65535", o->port);
    if (o->unix_path.n > 107)
        return pl_fail(eb, PL_EINVALID, "the socket's path is longer than 107 bytes");
    if (o->unix_path.n && o->host.n)
        return pl_fail(eb, PL_EINVALID, "both a host and a socket's path");
    if (o->user.n && !o->password.n)
        return pl_fail(eb, PL_EINVALID, "a user without a password");
    if (o->db < 0 || o->db > 65535)
        return pl_fail(eb, PL_EINVALID, "database %d: 0 to 65535", o->db);
    if (o->prefix.n > 128)
        return pl_fail(eb, PL_EINVALID, "the prefix is longer than 128 bytes");
    if (!o->clock.now_ns || !o->worker_name || !o->find_worker || !o->expired)
        return pl_fail(eb, PL_EINVALID, "a callback is missing");
    return 0;
}

int pl_redis_new(const pl_redis_options *o, pl_redis **out, pl_errbuf *eb)
{
    *out = NULL;
    int err = check(o, eb);
    if (err)
        return err;
    pl_redis *r = calloc(1, sizeof *r);
    if (!r)
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    r->o = *o;
    r->o.port = o->port ? o->port : 6379;
    r->o.command_ms = o->command_ms ? o->command_ms : 50;
    r->o.connect_ms = o->connect_ms ? o->connect_ms : 1000;
    r->o.staleness_ms = o->staleness_ms ? o->staleness_ms : 1000;
    r->o.known_sessions = o->known_sessions ? o->known_sessions : 65536;
    r->o.cap = o->cap ? o->cap : 1000000;
    r->fresh_ns = o->no_stale ? 0 : r->o.staleness_ms * 1000000;
    unsigned char sha[SHA_DIGEST_LENGTH];
    SHA1((const unsigned char *)pl_redis_script, sizeof pl_redis_script - 1, sha);
    for (int i = 0; i < SHA_DIGEST_LENGTH; i++)
        snprintf(r->sha + 2 * i, 3, "%02x", sha[i]);
    if (copy(&r->host, o->host, "127.0.0.1") || copy(&r->unix_path, o->unix_path, NULL) ||
        copy(&r->user, o->user, NULL) || copy(&r->password, o->password, NULL) ||
        copy(&r->prefix, o->prefix, "perilune:") ||
        !(r->known = pl_known_new(r->o.known_sessions, &r->stats.forgotten)) ||
        pl_redis_encode_hello(r)) {
        pl_redis_free(r);
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    }
    if (r->unix_path)
        snprintf(r->where, sizeof r->where, "%s", r->unix_path);
    else
        snprintf(r->where, sizeof r->where, "%s:%d", r->host, r->o.port);
    *out = r;
    return 0;
}

void pl_redis_free(pl_redis *r)
{
    if (!r)
        return;
    if (r->password)
        explicit_bzero(r->password, strlen(r->password));
    free(r->host);
    free(r->unix_path);
    free(r->user);
    free(r->password);
    free(r->prefix);
    pl_buf_free(&r->hello);
    pl_known_free(r->known);
    for (pl_redis_account *p = atomic_load(&r->accounts), *next; p; p = next) {
        next = p->next;
        free(p);
    }
    free(r);
}

void pl_redis_distrust(pl_redis *r)
{
    pl_known_distrust(r->known, pl_clock_now_ns(r->o.clock));
}

const pl_redis_stats *pl_redis_stats_of(const pl_redis *r)
{
    return &r->stats;
}
