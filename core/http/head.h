/* Message heads. A head is collected contiguously, checked for what llhttp lets through (reference:
 * RFC 9112; see tests/http), then parsed by one llhttp call whose callbacks record spans into those
 * bytes. Both directions. */
#ifndef PL_HEAD_H
#define PL_HEAD_H

#include <llhttp.h>

#include "base/arena.h"
#include "base/str.h"

typedef struct pl_limits {
    size_t head_bytes;           /* request line and headers, 64 KiB */
    unsigned headers;            /* 100 */
    size_t target_bytes;         /* 8 KiB */
    size_t body_bytes;           /* 32 MiB */
    size_t chunk_overhead_bytes; /* chunk sizes and extensions beyond the data: 64 KiB + 1/1 of the
                                    body so far */
    size_t trailer_bytes;        /* 8 KiB */
} pl_limits;

extern const pl_limits pl_limits_default;

typedef struct pl_header {
    pl_str name, value; /* value trimmed of SP and HTAB */
} pl_header;

typedef enum pl_method {
    PL_GET,
    PL_HEAD,
    PL_POST,
    PL_PUT,
    PL_PATCH,
    PL_DELETE,
    PL_OPTIONS,
    PL_METHOD_COUNT
} pl_method;

extern const pl_str pl_method_names[PL_METHOD_COUNT];

/* A parsed head; every pl_str points into the head bytes, which the owner keeps while the head is
 * in use. */
typedef struct pl_head {
    bool request;
    pl_method method;   /* requests */
    pl_str target;      /* requests: as sent */
    pl_str path, query; /* requests: target split at '?'; absolute form has its origin cut off */
    int status;         /* responses */
    pl_str reason;      /* responses */
    int minor;          /* HTTP/1.minor */
    bool keep_alive;    /* after this message, by version and Connection */
    bool chunked;
    bool expect_continue;    /* requests */
    bool until_close;        /* responses: the body ends with the connection */
    uint64_t content_length; /* UINT64_MAX when absent */
    pl_header *headers;      /* in the arena given to the parser */
    int headers_n;
} pl_head;

/* First header of that name (lower case given); {NULL,0} when absent. */
pl_str pl_head_find(const pl_head *h, pl_str lower_name);

/* True for headers that belong to one connection or to the message's framing: never forwarded.
 * `connection` is the value of Connection ({NULL,0} when absent): what it names is hop-by-hop, too.
 */
bool pl_header_is_hop(pl_str name, pl_str connection);

/* Result of feeding the reader. */
typedef enum pl_reader_state {
    PL_READER_HEAD, /* wants more bytes of the head */
    PL_READER_BODY, /* head is complete (see head), body follows */
    PL_READER_DONE, /* the message is complete */
    PL_READER_ERROR /* see status and error; nothing more may be fed */
} pl_reader_state;

/* Reads one message after another from a byte stream. */
typedef struct pl_reader {
    llhttp_t parser;
    llhttp_settings_t settings;
    pl_reader_state state;
    const pl_limits *limits;
    pl_head head;
    pl_arena *arena; /* for the header table; the owner's */
    char *head_buf;  /* heap: bytes of an unfinished or current head */
    size_t head_n, head_cap;
    size_t checked;           /* head bytes already checked line by line */
    unsigned lines;           /* header lines seen */
    size_t overhead, trailer; /* counted against limits */
    uint64_t body_seen;       /* body bytes so far */
    void (*on_body)(void *ctx, const char *p, size_t n); /* a slice of the fed bytes */
    void *ctx;
    int status;        /* when failed: 400, 413, 414, 431, 501, 505 (requests); 502 (responses) */
    const char *error; /* when failed: static text for people */
    bool no_body;      /* responses: the request was HEAD (set before feeding) */
} pl_reader;

/* request: true for a server's side. The arena and limits outlive the reader. */
void pl_reader_init(pl_reader *r, bool request, const pl_limits *limits, pl_arena *arena,
                    void (*on_body)(void *ctx, const char *p, size_t n), void *ctx);

/* Consumes bytes and returns how many; stops right after the head (state BODY, so that the caller
 * may decide), at the end of the message (state DONE) or at an error. Call again with the rest. In
 * state BODY with content_length 0 or no body the state goes to DONE at once. */
size_t pl_reader_feed(pl_reader *r, const char *p, size_t n);

/* The peer has closed: DONE for a body that runs until close, else ERROR when inside a message. */
pl_reader_state pl_reader_eof(pl_reader *r);

/* Ready for the next message on the same connection; the previous head's bytes become invalid. */
void pl_reader_next(pl_reader *r);
void pl_reader_free(pl_reader *r);

/* Body bytes still to come when the length is known (Content-Length), else 0. */
uint64_t pl_reader_body_left(const pl_reader *r);

/* Reason phrase of a status; "Unknown" when not known. */
const char *pl_status_text(int status);

#endif
