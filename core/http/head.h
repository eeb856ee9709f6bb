/* Message heads and the reader that takes messages off a byte stream, in both directions. A head is
 * collected contiguously and checked line by line for what llhttp lets through (RFC 9112; see
 * tests/http), then parsed by one llhttp call whose callbacks record spans into those bytes. Used
 * by the server's connections and the upstream pool's, each on its loop's thread. */
#ifndef PL_HEAD_H
#define PL_HEAD_H

#include <llhttp.h>

#include "base/arena.h"
#include "base/str.h"

typedef struct pl_limits {
    size_t head_bytes;           /* request line and headers, 64 KiB */
    unsigned headers;            /* 100 */
    size_t target_bytes;         /* 8 KiB */
    size_t body_bytes;           /* of requests, 32 MiB */
    size_t chunk_overhead_bytes; /* chunk sizes and extensions may be this much more than the body
                                    so far (requests), or this much in a row (responses), 64 KiB */
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
    pl_header *headers;      /* in the reader's arena, or behind the head bytes */
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

/* Reads one message after another from a byte stream. Owners read state, head, status, error,
 * body_seen and trailer, and set no_body; the rest is the reader's. */
typedef struct pl_reader {
    llhttp_t parser;
    pl_reader_state state;
    bool request;
    bool no_body;    /* responses: the request was HEAD (set before feeding) */
    bool resumed;    /* chunked: llhttp has gone on past the head */
    bool in_trailer; /* chunked: the last chunk's size line is over */
    char trailer_prev;
    unsigned char lead; /* bytes of empty lines before the head */
    const pl_limits *limits;
    pl_head head;
    pl_arena *arena; /* for the header table; the owner's; NULL: it goes behind the head bytes */
    char *head_buf;  /* heap: bytes of an unfinished or current head */
    size_t head_n, head_cap;
    size_t line_at;     /* start of the line that is not complete yet */
    size_t checked;     /* no LF between line_at and here */
    unsigned lines;     /* complete lines, start line included */
    uint64_t overhead;  /* chunked: bytes of framing so far; responses: since the last body byte */
    const char *mark;   /* chunked, during a feed: framing is counted up to here */
    size_t trailer;     /* chunked: bytes after the last chunk; 2 when there is no trailer */
    size_t trailer_col; /* bytes in the trailer's current line */
    uint64_t body_seen; /* body bytes so far */
    void (*on_body)(void *ctx, const char *p, size_t n); /* a slice of the fed bytes */
    void *ctx;
    int status; /* when failed: 400, 413, 414, 417, 431, 500 (out of memory), 501, 505 for requests;
                   502, or 500 again, for responses */
    const char *error; /* when failed: static text for people */
} pl_reader;

/* request: true for a server's side. The arena (may be NULL) and limits outlive the reader. */
void pl_reader_init(pl_reader *r, bool request, const pl_limits *limits, pl_arena *arena,
                    void (*on_body)(void *ctx, const char *p, size_t n), void *ctx);

/* Consumes bytes and returns how many; stops right after the head (state BODY, so that the caller
 * may decide), at the end of the message (state DONE) or at an error. Call again with the rest. A
 * head without a body after it goes to DONE at once. An interim response (status below 200) is a
 * message of its own: call pl_reader_next and go on. */
size_t pl_reader_feed(pl_reader *r, const char *p, size_t n);

/* The peer has closed: DONE for a body that runs until close, else ERROR when inside a message. */
pl_reader_state pl_reader_eof(pl_reader *r);

/* True when a part of a head has been read. */
static inline bool pl_reader_begun(const pl_reader *r)
{
    return r->state == PL_READER_HEAD && r->head_n > 0;
}

/* Ready for the next message on the same connection; the previous head's bytes become invalid. */
void pl_reader_next(pl_reader *r);
void pl_reader_free(pl_reader *r);

/* Body bytes still to come when the length is known (Content-Length), else 0. */
uint64_t pl_reader_body_left(const pl_reader *r);

/* Between reader.c and head.c: parses and checks the complete head in head_buf into r->head and
 * leaves the parser paused behind it. False: failed, status and error are set. */
bool pl_head_parse(pl_reader *r);
/* Sets the error state; returns false. */
bool pl_reader_fail(pl_reader *r, int status, const char *error);

/* Reason phrase of a status; "Unknown" when not known. */
const char *pl_status_text(int status);

#endif
