/* What the policies of all loops share, as the VM's functions use it. Any thread. Handles are
 * indexes that stay valid for the life of the pl_shared. */
#ifndef PL_SHARED_H
#define PL_SHARED_H

#include "policy/vm.h"

#define PL_SHARED_BAD_NAME (-1)
#define PL_SHARED_FULL     (-2)

int pl_shared_counter(pl_shared *s, pl_str name); /* a handle, or one of the two above */
double pl_shared_counter_add(pl_shared *s, int handle, double by); /* NaN: no such handle */

int pl_shared_ewma(pl_shared *s, pl_str name, double half_life_seconds);
/* An observation counts half as much after each half life; a new generation of a slot starts over.
 * The new average, NaN when there is no such slot. */
double pl_shared_ewma_update(pl_shared *s, int handle, int slot, int generation, double value,
                             double now_seconds);
double pl_shared_ewma_get(pl_shared *s, int handle, int slot, int generation); /* NaN: none */

int pl_shared_metric(pl_shared *s, pl_str name, double value); /* 0, or one of the two above */

#endif
