/* What goes with an engine-backed binding in the store: little-endian fields of fixed size, so that
 * routers that share a store read each other's. Pure functions, called by the other parts of the
 * controller on any thread. */
#include <stdio.h>
#include <string.h>

#include <xxhash.h>

#include "session/sessions_impl.h"

#define NOTE_VERSION 1
#define NOTE_BYTES   52

static char *put(char *at, uint64_t v, int bytes)
{
    for (int i = 0; i < bytes; i++)
        at[i] = (char)(v >> (8 * i));
    return at + bytes;
}

static uint64_t get(const uint8_t **at, int bytes)
{
    uint64_t v = 0;
    for (int i = 0; i < bytes; i++)
        v |= (uint64_t)(*at)[i] << (8 * i);
    *at += bytes;
    return v;
}

void pl_session_note_write(const pl_session_note *in, pl_note *out)
{
    uint64_t held = in->held_tokens >= 0 && in->held_tokens < 1e15 ? (uint64_t)in->held_tokens : 0;
    char *at = (char *)out->bytes;
    memset(out, 0, sizeof *out);
    at = put(at, NOTE_VERSION, 1);
    at = put(at, in->streaming, 1);
    at = put(at, in->nonce, 8);
    at = put(at, in->history.digest[0], 8);
    at = put(at, in->history.digest[1], 8);
    at = put(at, in->history.units, 4);
    at = put(at, in->history.form, 1);
    at = put(at, in->history.api, 1);
    at = put(at, held, 8);
    at = put(at, in->engine_seconds, 4);
    at = put(at, in->ttl_ms, 4);
    at = put(at, in->extended_ms, 4);
    out->n = (uint8_t)(at - (char *)out->bytes);
}

bool pl_session_note_read(const pl_note *in, pl_session_note *out)
{
    const uint8_t *at = in->bytes;
    memset(out, 0, sizeof *out);
    if (in->n < NOTE_BYTES || get(&at, 1) != NOTE_VERSION)
        return false;
    out->streaming = get(&at, 1) != 0;
    out->nonce = get(&at, 8);
    out->history.digest[0] = get(&at, 8);
    out->history.digest[1] = get(&at, 8);
    out->history.units = (uint32_t)get(&at, 4);
    out->history.form = (uint8_t)get(&at, 1);
    out->history.api = (uint8_t)get(&at, 1);
    out->held_tokens = (double)get(&at, 8);
    out->engine_seconds = (uint32_t)get(&at, 4);
    out->ttl_ms = (uint32_t)get(&at, 4);
    out->extended_ms = (uint32_t)get(&at, 4);
    return true;
}

/* The name goes into JSON, into logs and into the engine's own: bytes that would need care there
 * become '_'. The nonce makes it unique, whatever the id. */
size_t pl_session_engine_name(pl_str id, uint64_t nonce, char buf[PL_ENGINE_SESSION_MAX])
{
    size_t n = id.n < PL_SESSION_MAX_ID_BYTES ? id.n : PL_SESSION_MAX_ID_BYTES;
    for (size_t i = 0; i < n; i++) {
        char c = id.p[i];
        buf[i] = c > ' ' && c < 0x7f && c != '"' && c != '\\' ? c : '_';
    }
    return n + (size_t)snprintf(buf + n, PL_ENGINE_SESSION_MAX - n, "~%016llx",
                                (unsigned long long)nonce);
}

pl_session_name pl_session_name_copy(const pl_session_name *name, char *at)
{
    pl_session_name to = {{at, name->tenant.n}, {at + name->tenant.n, name->id.n}};
    if (name->tenant.n)
        memcpy(at, name->tenant.p, name->tenant.n);
    if (name->id.n)
        memcpy(at + name->tenant.n, name->id.p, name->id.n);
    return to;
}

uint64_t pl_session_name_hash(const pl_session_name *name)
{
    char bytes[PL_NAME_BYTES];
    if (name->tenant.n > PL_SESSION_MAX_TENANT_BYTES || name->id.n > PL_SESSION_MAX_ID_BYTES)
        return 1; /* no session has such a name */
    pl_session_name_copy(name, bytes);
    uint64_t h = XXH3_64bits_withSeed(bytes, name->tenant.n + name->id.n, name->tenant.n) >> 12;
    return h ? h : 1;
}
