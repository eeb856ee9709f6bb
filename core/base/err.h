/* The one error convention: functions return 0 or a positive result on success and a negative
 * pl_err on failure. */
#ifndef PL_ERR_H
#define PL_ERR_H

#include <stddef.h>

/* name, number, text for people */
#define PL_ERR_MAP(XX)                                                                             \
    XX(NOMEM, 1, "out of memory")                                                                  \
    XX(INVALID, 2, "invalid argument")                                                             \
    XX(SYNTAX, 3, "syntax error")                                                                  \
    XX(LIMIT, 4, "a limit was exceeded")                                                           \
    XX(NOTFOUND, 5, "not found")                                                                   \
    XX(EXISTS, 6, "already exists")                                                                \
    XX(IO, 7, "input/output error")                                                                \
    XX(CONNECT, 8, "connect failed")                                                               \
    XX(RESET, 9, "connection reset by peer")                                                       \
    XX(EOF, 10, "connection closed early")                                                         \
    XX(TIMEOUT, 11, "timed out")                                                                   \
    XX(PROTOCOL, 12, "protocol error")                                                             \
    XX(CANCELLED, 13, "cancelled")                                                                 \
    XX(BUSY, 14, "busy")                                                                           \
    XX(POLICY, 15, "policy error")                                                                 \
    XX(UNAVAILABLE, 16, "unavailable")                                                             \
    XX(RESOLVE, 17, "name resolution failed")

typedef enum pl_err {
    PL_OK = 0,
#define XX(name, number, text) PL_E##name = -(number),
    PL_ERR_MAP(XX)
#undef XX
} pl_err;

/* Static text of an error code; never NULL. */
const char *pl_strerror(int err);

/* A place for a message to people, filled by functions that take one. Always NUL-terminated. */
typedef struct pl_errbuf {
    char text[1024];
} pl_errbuf;

/* Formats into eb (may be NULL) and returns err, so that `return pl_fail(eb, PL_EINVALID, ...)`
 * reads well. */
int pl_fail(pl_errbuf *eb, int err, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

#endif
