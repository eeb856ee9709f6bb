/* `perilune check`: loads a policy, runs its hooks over made-up fleets (1 to 512 workers, ties,
 * ineligible ones) and reports which hooks it has, whether the hot ones are compiled, and which
 * line stops the compiler. */
#ifndef PL_CHECK_H
#define PL_CHECK_H

#include <stdio.h>

#include "policy/vm.h"

/* Prints to out, as JSON when json. 0 when the policy may be used, else PL_EPOLICY. */
int pl_check(pl_str name_or_file, const json_t *params, bool json, FILE *out);

/* The self-test that a reload runs on a candidate: a few decisions over made-up fleets must not
 * fail. */
int pl_selftest(pl_vm *vm, pl_vm_error *err);

/* Loads, init and the self-test, on a VM of its own that serves nobody. 0, or err says which stage
 * failed. */
int pl_try_out(pl_policy_source *src, const pl_vm_options *options, pl_vm_error *err);

#endif
