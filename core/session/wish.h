/* What a request says about its session, over all ways in, in one internal form: nvext
 * (session_control, agent_hints, pins), session headers, SGLang's session_params and session_id,
 * cache_control. Pure functions over a scanned body; strings point into the body, the head or the
 * arena.
 *
 * Which one names the session: nvext.session_control, then session_params, then session_id, then
 * the headers in the order of the list. What comes later and differs is a conflict; only
 * session_control and session_params that name two sessions are refused, because the engine would
 * read the second.
 *
 * nvext means what it means to Dynamo; the router's own additions are session_control.history
 * ("full", "delta") and session_control.parent_session_id. null is as good as absent everywhere.
 *
 * Ids: 1 .. PL_SESSION_MAX_ID_BYTES bytes after unescaping, no control characters. In headers:
 * printable ASCII only. An empty header is as good as none, one that comes twice with different
 * values is refused.
 *
 * cache_control is looked for at the top level and in nvext (which wins). Marks inside messages
 * (Anthropic's content blocks) are not searched: they are left to the engine. */
#ifndef PL_WISH_H
#define PL_WISH_H

#include "base/arena.h"
#include "http/head.h"
#include "http/scan.h"
#include "session/store.h"

#define PL_WISH_DEFAULT_TIMEOUT_SECONDS 300
#define PL_WISH_MAX_HEADERS             16

typedef enum pl_wish_action {
    PL_WISH_TURN, /* use the session if it is there */
    PL_WISH_OPEN, /* engine-backed */
    PL_WISH_BIND, /* router-only */
    PL_WISH_CLOSE /* after this turn */
} pl_wish_action;

typedef enum pl_wish_source {
    PL_WISH_NONE,    /* no session: nothing below id is set but the hints */
    PL_WISH_CONTROL, /* nvext.session_control */
    PL_WISH_HEADER,  /* a session header: bound at its first sight */
    PL_WISH_PARAMS,  /* SGLang's session_params.id */
    PL_WISH_TAG      /* SGLang's top-level session_id: a soft tag, treated as a header's id */
} pl_wish_source;

/* A session header, in the order in which they are looked for. parent and final belong to id; they
 * also count for a session that the body names, unless the header's id is another one. */
typedef struct pl_wish_header {
    pl_str id, parent, final; /* lower case; parent and final may be {NULL,0} */
    pl_str child; /* when present it is the id, and `id` names the parent unless `parent`
                     does (Claude Code's agent id); may be {NULL,0} */
} pl_wish_header;

typedef struct pl_wish_options {
    const pl_wish_header *headers;
    int headers_n;                 /* at most PL_WISH_MAX_HEADERS */
    double header_timeout_seconds; /* of sessions that only a header or a tag names, 300 */
    double max_timeout_seconds;    /* above it a timeout is refused: 86,400 */
    bool trusted;                  /* pins count */
    uint64_t filter; /* of the headers' names: pl_wish_filter(); 0: computed at each call */
} pl_wish_options;

/* The known agents' headers, the default list: X-Dynamo-Session-ID with parent and final, Claude
 * Code's, Codex's (both spellings), OpenCode's x-session-id, x-smg-routing-key. */
extern const pl_wish_header pl_wish_default_headers[];
extern const int pl_wish_default_headers_n;

/* For pl_wish_options.filter: tells almost all headers of a request apart from those of the list by
 * their length and first letter. */
uint64_t pl_wish_filter(const pl_wish_header *headers, int n);

typedef struct pl_wish {
    pl_wish_source source;
    pl_wish_action action;
    pl_str id;              /* 1 .. PL_SESSION_MAX_ID_BYTES bytes */
    pl_str parent;          /* {NULL,0}: none, or the session itself */
    double timeout_seconds; /* asked for (OPEN and BIND alone may ask), or the default */
    bool timeout_given;
    bool delta;    /* the client sends only what is new in the session */
    bool final;    /* close after this turn; always with CLOSE */
    bool conflict; /* two different sessions were named: the body's counts, see above */
    /* hints; absent: -1 */
    double retention_seconds; /* of cache_control, parsed from its ttl ("5m", "1h", seconds; absent:
                                 "5m") */
    double output_tokens;     /* agent_hints.osl */
    double priority;          /* agent_hints.priority; NaN: absent (it may be negative) */
    double strict_priority;
    /* pins, only from trusted clients (else counted in pins_removed and not looked at); absent: -1.
     * Those of split prefill and decode are counted alike and otherwise ignored. */
    double instance; /* backend_instance_id; a whole number that a double holds */
    double rank;     /* dp_rank */
    int pins_removed;
    pl_str cache_salt; /* nvext.cache_salt, else the top-level member; {NULL,0}: none, or empty */
    bool query_only;   /* an annotation query_instance_id:...: decide, do not send */
    bool nvext;        /* the body has the member: it is the router's alone */
    /* where session_params.id stands in the body, to be replaced; raw with quotes, {NULL,0}: none
     */
    pl_str params_id_raw;
} pl_wish;

/* A refusal: the status and code of the answer, with text for people in eb. */
typedef struct pl_wish_error {
    int status;       /* 400; 500 out of memory */
    const char *code; /* "invalid_session", "invalid_nvext", "invalid_cache_control" */
    pl_errbuf text;
} pl_wish_error;

/* Might there be one? false: pl_wish_read would find nothing. Cheap: for requests without. */
bool pl_wish_any(const pl_scan *s, const pl_head *head, const pl_wish_options *o);

/* 0, or a negative pl_err with e filled: an unknown action, an id that is missing, empty, too long
 * or has control characters, a timeout that is no number, or (with OPEN and BIND; others ignore it,
 * as Dynamo does) below 1 or above the maximum, session_params and session_id both, a member of the
 * wrong type or given twice. A top-level cache_control that is not understood is no error: it is
 * the engine's. Costs one pass over the headers when the body has none of these members. */
int pl_wish_read(pl_arena *a, pl_str body, const pl_scan *s, const pl_head *head,
                 const pl_wish_options *o, pl_wish *out, pl_wish_error *e);

/* Bodies of SGLang's own POST /open_session and /close_session, as wishes (OPEN with source PARAMS,
 * CLOSE). id {NULL,0} in an open: the router makes one up. A timeout that is absent (never, to
 * SGLang) becomes the default: nothing is held for ever. */
typedef struct pl_wish_open {
    bool streaming;
    double capacity_of_str_len; /* passed on; -1: not given */
} pl_wish_open;
int pl_wish_read_open(pl_arena *a, pl_str body, const pl_scan *s, const pl_wish_options *o,
                      pl_wish *out, pl_wish_open *open, pl_wish_error *e);
int pl_wish_read_close(pl_arena *a, pl_str body, const pl_scan *s, const pl_wish_options *o,
                       pl_wish *out, pl_wish_error *e);

#endif
