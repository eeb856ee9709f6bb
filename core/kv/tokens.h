/* Token ids that share their beginnings: a prompt is the ids of an earlier one and what it adds, so
 * that a conversation of many turns is held once. Immutable, counted references, any thread. */
#ifndef PL_TOKENS_H
#define PL_TOKENS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct pl_tokens pl_tokens;

/* The ids of parent (NULL: none; a reference of its own is taken) followed by these. *bytes counts
 * the memory until it is freed, and must outlive it. NULL: out of memory, or too many. */
pl_tokens *pl_tokens_new(pl_tokens *parent, const uint32_t *ids, size_t n, _Atomic uint64_t *bytes);
pl_tokens *pl_tokens_ref(pl_tokens *t);
void pl_tokens_release(pl_tokens *t); /* NULL is fine */

size_t pl_tokens_count(const pl_tokens *t);
/* All of them into out, which has room for pl_tokens_count. */
void pl_tokens_copy(const pl_tokens *t, uint32_t *out);
/* Do ids[0 .. n) begin with all of t? */
bool pl_tokens_begin(const pl_tokens *t, const uint32_t *ids, size_t n);

/* Do both add the same ids to the same pl_tokens? */
bool pl_tokens_same_addition(const pl_tokens *a, const pl_tokens *b);

#endif
