/* "Did you mean": the closest of some known words to one that is not known. For flags and
 * configuration keys; pure functions. */
#ifndef PL_NEAREST_H
#define PL_NEAREST_H

#include "base/str.h"

typedef struct pl_nearest {
    pl_str word; /* what was written */
    pl_str best; /* the closest so far; {NULL,0} while none is close enough */
    int distance;
} pl_nearest;

/* Offers a known word; it is kept when it is closer than the best so far and plausible at all. */
void pl_nearest_try(pl_nearest *n, pl_str known);

/* Insertions, deletions, replacements and swaps of neighbours between two words of at most 64
 * bytes; longer ones are as far apart as can be. */
int pl_edit_distance(pl_str a, pl_str b);

#endif
