/* Made-up requests, fleets and sessions, for `perilune check` and the self-test of reloads. */
#ifndef PL_MADE_UP_H
#define PL_MADE_UP_H

#include "policy/vm.h"

#define PL_MADE_UP_KINDS 4
typedef enum pl_made_up_kind {
    PL_ALL_DIFFERENT,
    PL_ALL_TIED,
    PL_SOME_OUT,
    PL_ALL_OUT
} pl_made_up_kind;

/* Fills the VM's records with a request and n workers; the same seed makes the same. Odd seeds name
 * a session: sixteen of them in a row have each event with and without a parent, and turns that are
 * bound and not. */
#define PL_MADE_UP_SESSIONS 16
void pl_make_up(pl_vm *vm, int n, pl_made_up_kind kind, uint64_t seed);

#endif
