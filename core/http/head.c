/* Parsing and checking one complete message head. Called by the reader (reader.c) on the thread of
 * its connection's loop, once a message, with the head's bytes contiguous in the reader's buffer;
 * the spans recorded here point into that buffer. llhttp parses the header lines; everything that
 * llhttp 8.1 accepts and a router must not is checked here or, where it shows only in the raw lines
 * (bare LF, folding, empty names), in reader.c. */
#include "http/head.h"

#include <stdlib.h>

#include "base/err.h"

const pl_limits pl_limits_default = {
    .head_bytes = 64 * 1024,
    .headers = 100,
    .target_bytes = 8 * 1024,
    .body_bytes = 32 * 1024 * 1024,
    .chunk_overhead_bytes = 64 * 1024,
    .trailer_bytes = 8 * 1024,
};

const pl_str pl_method_names[PL_METHOD_COUNT] = {
    [PL_GET] = PL_STR_INIT("GET"),         [PL_HEAD] = PL_STR_INIT("HEAD"),
    [PL_POST] = PL_STR_INIT("POST"),       [PL_PUT] = PL_STR_INIT("PUT"),
    [PL_PATCH] = PL_STR_INIT("PATCH"),     [PL_DELETE] = PL_STR_INIT("DELETE"),
    [PL_OPTIONS] = PL_STR_INIT("OPTIONS"),
};

pl_str pl_head_find(const pl_head *h, pl_str lower_name)
{
    for (int i = 0; i < h->headers_n; i++)
        if (h->headers[i].name.n == lower_name.n && pl_str_ieq(h->headers[i].name, lower_name))
            return h->headers[i].value;
    return (pl_str){NULL, 0};
}

/* True when the comma-separated list has the token (lower case given). */
static bool list_has(pl_str list, pl_str token)
{
    pl_str item;
    while (pl_str_cut(&list, ',', &item))
        if (pl_str_ieq(pl_str_trim(item), token))
            return true;
    return false;
}

bool pl_header_is_hop(pl_str name, pl_str connection)
{
    static const pl_str hop[] = {
        PL_STR_INIT("te"),
        PL_STR_INIT("expect"),
        PL_STR_INIT("trailer"),
        PL_STR_INIT("upgrade"),
        PL_STR_INIT("connection"),
        PL_STR_INIT("keep-alive"),
        PL_STR_INIT("content-length"),
        PL_STR_INIT("proxy-connection"),
        PL_STR_INIT("transfer-encoding"),
        PL_STR_INIT("proxy-authenticate"),
        PL_STR_INIT("proxy-authorization"),
    };
    for (size_t i = 0; i < sizeof hop / sizeof *hop; i++)
        if (hop[i].n == name.n && pl_str_ieq(hop[i], name))
            return true;
    return connection.n && list_has(connection, name);
}

/* --- character classes --- */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_alpha(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool is_token(pl_str s)
{
    for (size_t i = 0; i < s.n; i++)
        if (!is_alpha(s.p[i]) && !is_digit(s.p[i]) &&
            !(s.p[i] && strchr("!#$%&'*+-.^_`|~", s.p[i])))
            return false;
    return s.n > 0;
}

/* host [ ":" port ] as in RFC 3986, without userinfo; a comma is allowed there, yet in a Host it is
 * only ever two hosts in one line. */
static bool authority_ok(pl_str a)
{
    size_t i = 0;
    if (a.n && a.p[0] == '[') {
        for (i = 1; i < a.n && a.p[i] != ']'; i++)
            if (!is_digit(a.p[i]) && !(a.p[i] && strchr("abcdefABCDEF:.", a.p[i])))
                return false;
        if (i >= a.n || i < 3)
            return false;
        i++;
    } else {
        for (; i < a.n && a.p[i] != ':'; i++)
            if (!is_alpha(a.p[i]) && !is_digit(a.p[i]) &&
                !(a.p[i] && strchr("-._~%!$&'()*+;=", a.p[i])))
                return false;
        if (i == 0)
            return false;
    }
    if (i == a.n)
        return true;
    if (a.p[i] != ':' || a.n - i > 6)
        return false;
    for (i++; i < a.n; i++)
        if (!is_digit(a.p[i]))
            return false;
    return true;
}

/* --- start lines --- */

/* "HTTP/1.0" or "HTTP/1.1"; 505 for another version, 400 for what is none. */
static int version_of(pl_str s, int *minor)
{
    if (s.n != 8 || memcmp(s.p, "HTTP/", 5) != 0 || !is_digit(s.p[5]) || s.p[6] != '.' ||
        !is_digit(s.p[7]))
        return 400;
    if (s.p[5] != '1' || s.p[7] > '1')
        return 505;
    *minor = s.p[7] - '0';
    return 0;
}

static bool method_of(pl_str s, pl_method *out)
{
    for (int i = 0; i < PL_METHOD_COUNT; i++) {
        if (pl_str_eq(pl_method_names[i], s)) {
            *out = (pl_method)i;
            return true;
        }
    }
    return false;
}

/* Splits the target; *authority is that of an absolute form, else empty. NULL or what is wrong. */
static const char *split_target(pl_head *h, pl_str *authority)
{
    pl_str t = h->target;
    for (size_t i = 0; i < t.n; i++)
        if ((unsigned char)t.p[i] <= ' ' || (unsigned char)t.p[i] >= 0x7f)
            return "the request target has an invalid character";
    if (memchr(t.p, '#', t.n))
        return "the request target has a fragment";
    if (t.n == 1 && t.p[0] == '*') {
        if (h->method != PL_OPTIONS)
            return "the request target * is for OPTIONS only";
        h->path = t;
        return NULL;
    }
    if (t.p[0] != '/') {
        size_t scheme = t.n > 7 && pl_str_ieq((pl_str){t.p, 7}, PL_STR("http://"))    ? 7
                        : t.n > 8 && pl_str_ieq((pl_str){t.p, 8}, PL_STR("https://")) ? 8
                                                                                      : 0;
        if (!scheme)
            return "the request target is neither a path nor an http URL";
        size_t end = scheme;
        while (end < t.n && t.p[end] != '/' && t.p[end] != '?')
            end++;
        *authority = (pl_str){t.p + scheme, end - scheme};
        if (!authority_ok(*authority))
            return "the request target's host is invalid";
        t = (pl_str){t.p + end, t.n - end};
    }
    const char *q = t.n ? memchr(t.p, '?', t.n) : NULL;
    h->path = q ? (pl_str){t.p, (size_t)(q - t.p)} : t;
    h->query = q ? (pl_str){q + 1, (size_t)(t.p + t.n - q - 1)} : (pl_str){NULL, 0};
    if (h->path.n == 0)
        h->path = PL_STR("/");
    return NULL;
}

/* method SP target SP version, nothing else; `line` without its CRLF. */
static bool parse_request_line(pl_reader *r, pl_str line, pl_str *authority)
{
    pl_head *h = &r->head;
    const char *sp = memchr(line.p, ' ', line.n);
    const char *last = memrchr(line.p, ' ', line.n);
    if (!sp || last == sp)
        return pl_reader_fail(r, 400, "the request line is not: method target version");
    pl_str method = {line.p, (size_t)(sp - line.p)};
    h->target = (pl_str){sp + 1, (size_t)(last - sp - 1)};
    int bad = version_of((pl_str){last + 1, (size_t)(line.p + line.n - last - 1)}, &h->minor);
    if (bad == 400)
        return pl_reader_fail(r, 400, "the request line does not end with an HTTP version");
    for (size_t i = 0; i < method.n; i++)
        if ((method.p[i] < 'A' || method.p[i] > 'Z') && method.p[i] != '-')
            return pl_reader_fail(r, 400, "the method is invalid");
    if (bad)
        return pl_reader_fail(r, 505, "only HTTP/1.0 and HTTP/1.1 are supported");
    if (!method_of(method, &h->method))
        return pl_reader_fail(r, 501, "the method is not supported");
    if (h->target.n == 0)
        return pl_reader_fail(r, 400, "the request line has no target");
    if (h->target.n > r->limits->target_bytes)
        return pl_reader_fail(r, 414, "the request target is too long");
    const char *why = split_target(h, authority);
    return why ? pl_reader_fail(r, 400, why) : true;
}

static bool parse_status_line(pl_reader *r, pl_str line)
{
    pl_head *h = &r->head;
    if (line.n < 12 || version_of((pl_str){line.p, 8}, &h->minor) != 0 || line.p[8] != ' ' ||
        !is_digit(line.p[9]) || !is_digit(line.p[10]) || !is_digit(line.p[11]) ||
        (line.n > 12 && line.p[12] != ' '))
        return pl_reader_fail(r, 502, "the status line is invalid");
    h->status = (line.p[9] - '0') * 100 + (line.p[10] - '0') * 10 + (line.p[11] - '0');
    if (h->status < 100 || h->status > 599 || h->status == 101)
        return pl_reader_fail(r, 502, "the status is invalid");
    if (line.n > 13)
        h->reason = (pl_str){line.p + 13, line.n - 13};
    for (size_t i = 0; i < h->reason.n; i++)
        if (((unsigned char)h->reason.p[i] < ' ' && h->reason.p[i] != '\t') ||
            h->reason.p[i] == 0x7f)
            return pl_reader_fail(r, 502, "the status line has an invalid character");
    return true;
}

/* --- header lines --- */

/* All Connection headers together: each name in them is compared with each header. */
#define CONNECTION_BYTES 1024

/* What the checks need to know of the header lines. */
typedef struct seen {
    int hosts, lengths, encodings;
    size_t connection_bytes;
    pl_str host, length, encoding;
    bool close, keep_alive, bad_expect, expect_continue;
} seen;

static void note(pl_header *f, seen *s)
{
    switch (f->name.n) {
    case 4:
        if (pl_str_ieq(f->name, PL_STR("host"))) {
            s->hosts++;
            s->host = f->value;
        }
        break;
    case 6:
        if (pl_str_ieq(f->name, PL_STR("expect"))) {
            if (pl_str_ieq(f->value, PL_STR("100-continue")))
                s->expect_continue = true;
            else
                s->bad_expect = true;
        }
        break;
    case 10:
        if (pl_str_ieq(f->name, PL_STR("connection"))) {
            s->connection_bytes += f->value.n;
            s->close |= list_has(f->value, PL_STR("close"));
            s->keep_alive |= list_has(f->value, PL_STR("keep-alive"));
        }
        break;
    case 14:
        if (pl_str_ieq(f->name, PL_STR("content-length"))) {
            s->lengths++;
            s->length = f->value;
        }
        break;
    case 17:
        if (pl_str_ieq(f->name, PL_STR("transfer-encoding"))) {
            s->encodings++;
            s->encoding = f->value;
        }
        break;
    default:
        break;
    }
}

static bool check_framing(pl_reader *r, const seen *s)
{
    pl_head *h = &r->head;
    h->content_length = UINT64_MAX;
    if (s->encodings) {
        if (s->lengths)
            return pl_reader_fail(r, 400, "both Content-Length and Transfer-Encoding");
        if (h->minor == 0)
            return pl_reader_fail(r, 400, "Transfer-Encoding in HTTP/1.0");
        if (s->encodings > 1)
            return pl_reader_fail(r, 400, "more than one Transfer-Encoding");
        if (!pl_str_ieq(s->encoding, PL_STR("chunked"))) {
            if (!is_token(s->encoding))
                return pl_reader_fail(r, 400, "invalid Transfer-Encoding");
            return pl_reader_fail(r, 501, "only the transfer coding chunked is supported");
        }
        h->chunked = true;
    }
    if (s->lengths) {
        if (s->lengths > 1)
            return pl_reader_fail(r, 400, "more than one Content-Length");
        /* below 2^63, so that sums with it cannot wrap */
        int rc = pl_str_u64(s->length, INT64_MAX, &h->content_length);
        if (rc == PL_ELIMIT)
            return pl_reader_fail(r, 413, "the body is too large");
        if (rc < 0)
            return pl_reader_fail(r, 400, "invalid Content-Length");
    }
    return true;
}

static bool check_request(pl_reader *r, const seen *s, pl_str authority)
{
    pl_head *h = &r->head;
    if (s->hosts > 1)
        return pl_reader_fail(r, 400, "more than one Host");
    if (s->hosts == 0 && h->minor == 1)
        return pl_reader_fail(r, 400, "no Host");
    if (s->hosts && !authority_ok(s->host))
        return pl_reader_fail(r, 400, "invalid Host");
    if (s->hosts && authority.n && !pl_str_ieq(authority, s->host))
        return pl_reader_fail(r, 400, "Host differs from the request target's");
    if (s->bad_expect)
        return pl_reader_fail(r, 417, "only the expectation 100-continue is supported");
    if (h->content_length != UINT64_MAX && h->content_length > r->limits->body_bytes)
        return pl_reader_fail(r, 413, "the body is too large");
    h->expect_continue = s->expect_continue && h->minor == 1;
    return true;
}

/* Places the header table for `n` headers; the head's bytes may move. */
static bool place_table(pl_reader *r, unsigned n)
{
    size_t bytes = n * sizeof(pl_header);
    if (r->arena) {
        r->head.headers = pl_arena_alloc(r->arena, bytes ? bytes : 1);
    } else {
        size_t at = (r->head_n + 15) & ~(size_t)15;
        if (at + bytes > r->head_cap) {
            char *grown = realloc(r->head_buf, at + bytes);
            if (!grown)
                return pl_reader_fail(r, 500, "out of memory");
            r->head_buf = grown;
            r->head_cap = at + bytes;
        }
        r->head.headers = (pl_header *)(void *)(r->head_buf + at);
    }
    return r->head.headers ? true : pl_reader_fail(r, 500, "out of memory");
}

bool pl_head_parse(pl_reader *r)
{
    pl_head *h = &r->head;
    unsigned max = r->lines - 1;
    if (!place_table(r, max))
        return false;

    const char *lf = memchr(r->head_buf, '\n', r->head_n);
    pl_str line = {r->head_buf, (size_t)(lf - r->head_buf) - 1};
    pl_str authority = {NULL, 0};
    if (r->request ? !parse_request_line(r, line, &authority) : !parse_status_line(r, line))
        return false;

    llhttp_errno_t err = llhttp_execute(&r->parser, r->head_buf, r->head_n);
    if (r->state == PL_READER_ERROR)
        return false;
    /* paused by on_headers_complete, and with nothing of the head left over */
    if (err != HPE_PAUSED || llhttp_get_error_pos(&r->parser) != r->head_buf + r->head_n ||
        (unsigned)h->headers_n != max)
        return pl_reader_fail(r, 400,
                              err != HPE_PAUSED ? llhttp_get_error_reason(&r->parser)
                                                : "the head is malformed");
    seen s = {0};
    for (int i = 0; i < h->headers_n; i++) {
        h->headers[i].value = pl_str_trim(h->headers[i].value);
        note(&h->headers[i], &s);
    }
    if (s.connection_bytes > CONNECTION_BYTES)
        return pl_reader_fail(r, 431, "too much in Connection");
    if (!check_framing(r, &s) || (r->request && !check_request(r, &s, authority)))
        return false;
    h->keep_alive = h->minor == 1 ? !s.close : s.keep_alive && !s.close;
    return true;
}

const char *pl_status_text(int status)
{
    switch (status) {
    case 100:
        return "Continue";
    case 200:
        return "OK";
    case 201:
        return "Created";
    case 202:
        return "Accepted";
    case 204:
        return "No Content";
    case 206:
        return "Partial Content";
    case 301:
        return "Moved Permanently";
    case 302:
        return "Found";
    case 303:
        return "See Other";
    case 304:
        return "Not Modified";
    case 307:
        return "Temporary Redirect";
    case 308:
        return "Permanent Redirect";
    case 400:
        return "Bad Request";
    case 401:
        return "Unauthorized";
    case 403:
        return "Forbidden";
    case 404:
        return "Not Found";
    case 405:
        return "Method Not Allowed";
    case 406:
        return "Not Acceptable";
    case 408:
        return "Request Timeout";
    case 409:
        return "Conflict";
    case 410:
        return "Gone";
    case 411:
        return "Length Required";
    case 413:
        return "Content Too Large";
    case 414:
        return "URI Too Long";
    case 415:
        return "Unsupported Media Type";
    case 417:
        return "Expectation Failed";
    case 422:
        return "Unprocessable Content";
    case 429:
        return "Too Many Requests";
    case 431:
        return "Request Header Fields Too Large";
    case 499:
        return "Client Closed Request";
    case 500:
        return "Internal Server Error";
    case 501:
        return "Not Implemented";
    case 502:
        return "Bad Gateway";
    case 503:
        return "Service Unavailable";
    case 504:
        return "Gateway Timeout";
    case 505:
        return "HTTP Version Not Supported";
    case 529:
        return "Overloaded";
    default:
        return "Unknown";
    }
}
