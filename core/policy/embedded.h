/* Lua that is compiled into the binary: lua/perilune/NAME.lua, policies/NAME.lua, and "policy_abi"
 * (declarations). */
#ifndef PL_EMBEDDED_H
#define PL_EMBEDDED_H

#include <stddef.h>

typedef struct pl_embedded {
    const char *name; /* path in the repository; NULL ends the table */
    const char *bytes;
    size_t n;
} pl_embedded;

extern const pl_embedded pl_embedded_files[];

/* NULL when there is no such file. */
const pl_embedded *pl_embedded_find(const char *name);

#endif
