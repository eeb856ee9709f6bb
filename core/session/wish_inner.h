/* What wish.c, wish_nvext.c and wish_header.c share: reading members with errors that name them.
 * Private to them. */
#ifndef PL_WISH_INNER_H
#define PL_WISH_INNER_H

#include "session/wish.h"

typedef struct pl_wish_reader {
    pl_arena *a;
    const pl_wish_options *o;
    pl_wish_error *e;
    const char *code; /* of the errors to come */
} pl_wish_reader;

static inline bool pl_wish_there(const pl_member *m)
{
    return m->type != PL_JSON_ABSENT && m->type != PL_JSON_NULL;
}

/* "<path> must be <allowed>, not <what m is>". Returns PL_EINVALID. */
int pl_wish_refuse(const pl_wish_reader *r, const char *path, const char *allowed,
                   const pl_member *m);
int pl_wish_no_memory(const pl_wish_reader *r);

/* The members of `object` that `names` lists, into out[n]; others are passed over. A listed one
 * that is there twice is refused. */
int pl_wish_members(const pl_wish_reader *r, const char *path, const pl_member *object,
                    const pl_str *names, int n, pl_member *out);

/* Each reads a member that may be absent: *out is left alone then. */
int pl_wish_id(const pl_wish_reader *r, const char *path, const pl_member *m, pl_str *out);
int pl_wish_text(const pl_wish_reader *r, const char *path, const pl_member *m, pl_str *out);
int pl_wish_whole(const pl_wish_reader *r, const char *path, const pl_member *m, double low,
                  double high, double *out);
int pl_wish_timeout(const pl_wish_reader *r, const char *path, const pl_member *m, double *out);

/* A missing id, where one must be. */
int pl_wish_needs_id(const pl_wish_reader *r, const char *path, pl_str id);

/* nvext, all of it; m is an object. */
int pl_wish_nvext(const pl_wish_reader *r, const pl_member *m, pl_wish *w);
/* cache_control; strict: what is not understood is refused, else passed over. */
int pl_wish_retention(const pl_wish_reader *r, const char *path, const pl_member *m, bool strict,
                      pl_wish *w);
/* Session headers, after the body. */
bool pl_wish_any_header(const pl_head *head, const pl_wish_options *o);
int pl_wish_headers(const pl_wish_reader *r, const pl_head *head, pl_wish *w);

#endif
