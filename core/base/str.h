/* (ptr,len) strings: a borrowed view, never NUL-terminated by contract. Whoever made the bytes owns
 * them. */
#ifndef PL_STR_H
#define PL_STR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct pl_str {
    const char *p;
    size_t n;
} pl_str;

#define PL_STR(literal) ((pl_str){(literal), sizeof(literal) - 1})
#define PL_STR_INIT(literal)                                                                       \
    {                                                                                              \
        (literal), sizeof(literal) - 1                                                             \
    }                               /* for static initialisers */
#define PL_FMT(s) (int)(s).n, (s).p /* for "%.*s" */

static inline pl_str pl_str_c(const char *s)
{
    return (pl_str){s, s ? strlen(s) : 0};
}

static inline bool pl_str_eq(pl_str a, pl_str b)
{
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

/* ASCII case-insensitive: header names, tokens. */
bool pl_str_ieq(pl_str a, pl_str b);
bool pl_str_starts(pl_str s, pl_str prefix);
bool pl_str_ends(pl_str s, pl_str suffix);

/* Without leading and trailing SP and HTAB. */
pl_str pl_str_trim(pl_str s);

/* Parses an unsigned decimal that fills s completely. PL_ESYNTAX when it does not, PL_ELIMIT above
 * max. */
int pl_str_u64(pl_str s, uint64_t max, uint64_t *out);

/* Parses a decimal double that fills s completely; no hex, inf or nan. */
int pl_str_double(pl_str s, double *out);

/* A heap copy with a terminating NUL; free() it. NULL when out of memory. */
char *pl_str_dup(pl_str s);

/* Splits off the part before the first sep into *head; what follows stays in *rest. False when
 * *rest was exhausted. Without sep in *rest, all of it is the head. Start with rest->p non-NULL. */
bool pl_str_cut(pl_str *rest, char sep, pl_str *head);

/* True when s is well-formed UTF-8; otherwise *bad (may be NULL) is the offset of the first bad
 * byte. */
bool pl_str_utf8(pl_str s, size_t *bad);

/* The longest beginning of s of at most so many bytes that does not end in the middle of a
 * character. */
pl_str pl_str_clip(pl_str s, size_t most);

/* Equal contents, in time that depends only on the lengths. For secrets. */
bool pl_str_eq_secret(pl_str a, pl_str b);

#endif
