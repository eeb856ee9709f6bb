/* What the handlers of the admin API share: admin.c routes to the admin_*.c. All of it runs on the
 * control loop. */
#ifndef PL_ADMIN_API_H
#define PL_ADMIN_API_H

#include "admin/admin.h"

struct pl_admin {
    pl_router *router;
    pl_server *server;
    _Atomic uint32_t connections;
    _Atomic uint64_t body_memory;
    double started_at; /* monotonic seconds */
    uv_timer_t last;   /* closed after the server: frees */
};

/* --- answers: each ends the exchange --- */

/* body is taken; NULL: out of memory. */
void pl_admin_json(pl_exchange *x, int status, json_t *body);
void pl_admin_error(pl_exchange *x, int status, const char *code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* A JSON string of text that may hold anything: what is no UTF-8 becomes '?'. */
json_t *pl_admin_text(const char *s);

/* --- answers that come later --- */

/* The exchange may go before the answer is there: the waiter outlives it. Freed by _end, which
 * returns the exchange, or NULL when the client has left. */
typedef struct pl_admin_wait {
    pl_exchange *x;
    void *data; /* the handler's */
} pl_admin_wait;

pl_admin_wait *pl_admin_wait_begin(pl_exchange *x, void *data); /* NULL: out of memory */
pl_exchange *pl_admin_wait_end(pl_admin_wait *w);

/* --- input --- */

/* The body as a JSON object (empty: an empty one). NULL: it has been answered. */
json_t *pl_admin_body(pl_exchange *x);

/* Percent-decodes into the exchange's arena, NUL-terminated. False: no memory, or not decodable; a
 * name (any: false) has no blanks, slashes or bytes outside ASCII. */
bool pl_admin_decode(pl_exchange *x, pl_str in, bool any, pl_str *out);

/* The parameter of that name of the query, decoded into the exchange's arena; {NULL,0} when absent
 * (or not decodable). */
pl_str pl_admin_parameter(pl_exchange *x, pl_str name);

/* --- handlers; name: the decoded NAME of the path, NUL-terminated --- */
void pl_admin_engines_list(pl_admin *a, pl_exchange *x, pl_str name);
void pl_admin_engines_add(pl_admin *a, pl_exchange *x, pl_str name);
void pl_admin_engine_get(pl_admin *a, pl_exchange *x, pl_str name);
void pl_admin_engine_drain(pl_admin *a, pl_exchange *x, pl_str name);
void pl_admin_engine_undrain(pl_admin *a, pl_exchange *x, pl_str name);
void pl_admin_engine_remove(pl_admin *a, pl_exchange *x, pl_str name);
void pl_admin_sessions_list(pl_admin *a, pl_exchange *x, pl_str name);
void pl_admin_session_get(pl_admin *a, pl_exchange *x, pl_str id);
void pl_admin_session_close(pl_admin *a, pl_exchange *x, pl_str id);
void pl_admin_policy_get(pl_admin *a, pl_exchange *x, pl_str name);
void pl_admin_policy_reload(pl_admin *a, pl_exchange *x, pl_str name);
void pl_admin_explain(pl_admin *a, pl_exchange *x, pl_str name);
void pl_admin_index(pl_admin *a, pl_exchange *x, pl_str name);
void pl_admin_query(pl_admin *a, pl_exchange *x, pl_str name);
void pl_admin_query_by_hash(pl_admin *a, pl_exchange *x, pl_str name);
void pl_admin_events(pl_admin *a, pl_exchange *x, pl_str name);

#endif
