/* Digests of a conversation that do not depend on how its JSON was written: whitespace, escaping
 * and the order of members make no difference, numbers count as they are written. Used by history.c
 * (requests) and reply.c (answers), so that a message the client sends back has the digest of the
 * reply it came from. Pure; no cryptography: whoever constructs a collision deceives himself.
 *
 * The digests travel between routers (in the store's note): they must come out the same in every
 * router of a fleet, so a change here is a change of format. */
#ifndef PL_CANON_H
#define PL_CANON_H

#include "http/json.h"

typedef struct pl_digest {
    uint64_t lo, hi;
} pl_digest;

/* --- values --- */

/* Containers nested in what is digested; deeper ones cannot be. */
#define PL_CANON_DEPTH 64

/* A value at j's place, which is moved behind it. loose: members that are null count as absent.
 * False: not valid, too deep, or an object has a member twice; then nothing is to be concluded. */
bool pl_canon_value(pl_json *j, bool loose, pl_digest *out);

/* One chat message at j's place; false as above, or it is no object. What counts as the same:
 *   - a member that is null or an empty list, and one that is absent;
 *   - content (refusal, reasoning_content, reasoning) that is "", and one that is absent;
 *   - content "x", and a list of one part {"type":"text","text":"x"};
 *   - a tool call with and without `index`, and with and without "type":"function". */
bool pl_canon_message(pl_json *j, pl_digest *out);

/* The digests of hand-made values: they equal those of the JSON. */
pl_digest pl_canon_string(pl_str plain);
pl_digest pl_canon_hashed(pl_digest xxh3_128); /* of a string's bytes */

typedef struct pl_canon_object {
    pl_digest sum;
    uint64_t n;
} pl_canon_object;
void pl_canon_object_add(pl_canon_object *o, pl_str name, pl_digest value);
pl_digest pl_canon_object_end(const pl_canon_object *o);

typedef struct pl_canon_list {
    pl_digest chain;
    uint64_t n;
} pl_canon_list;
void pl_canon_list_add(pl_canon_list *l, pl_digest value);
pl_digest pl_canon_list_end(const pl_canon_list *l);

/* Length of the escape at p, with n bytes to the end of a valid string's inside; the two of a
 * surrogate pair are one. */
size_t pl_canon_escape(const char *p, size_t n);

/* --- chains --- */

/* A digest over units in order that can be cut and joined anywhere: two polynomials modulo 2^61 - 1
 * whose coefficients are the units. Zero-initialised it is empty; v may begin with anything (below
 * the modulus) that the units stand behind. */
typedef struct pl_chain {
    uint64_t v[2];
    uint64_t n; /* units */
} pl_chain;

void pl_chain_begin(pl_chain *c, pl_digest d); /* empty, behind d */
void pl_chain_add(pl_chain *c, pl_digest d);
void pl_chain_bytes(pl_chain *c, pl_str s);            /* a unit is a byte */
void pl_chain_id(pl_chain *c, uint32_t id);            /* a unit is a token id */
void pl_chain_join(pl_chain *c, const pl_chain *tail); /* tail began empty, behind nothing */

/* The inside of a valid JSON string, unescaped, onto c. `cut` units from c's beginning (its n
 * included) *at becomes the chain and *raw_at the place in `inside`; SIZE_MAX when there is no
 * such place between two characters. */
void pl_chain_text(pl_chain *c, pl_str inside, uint64_t cut, pl_chain *at, size_t *raw_at);

/* A valid JSON array of token ids onto c; `cut` as above, *raw_at is where the element behind it
 * begins in `array` (SIZE_MAX: there is none). False: an element is no number from 0 to 2^32 - 1.
 */
bool pl_chain_ids(pl_chain *c, pl_str array, uint64_t cut, pl_chain *at, size_t *raw_at);

#endif
