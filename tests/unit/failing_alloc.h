/* Allocation failures on demand, for one test program: include this in its only source file instead
 * of linking base/arena.c and base/buf.c. Those two are compiled into the test with malloc and
 * realloc replaced; the linker then takes them from here rather than from libperilune, so
 * everything that the test calls uses them. Nothing in the product knows of it, and sanitizers see
 * ordinary allocations.
 *
 *     for (long n = 0;; n++) { failing_alloc_after(n); ... ; if (it worked) break; } */
#ifndef PL_TEST_FAILING_ALLOC_H
#define PL_TEST_FAILING_ALLOC_H

#include <stdbool.h>
#include <stdlib.h>

static long failing_alloc_left = -1;

/* The next n allocations work, later ones fail; negative: all work. */
static inline void failing_alloc_after(long n)
{
    failing_alloc_left = n;
}

static inline bool failing_alloc_fails(void)
{
    if (failing_alloc_left > 0)
        failing_alloc_left--;
    else if (failing_alloc_left == 0)
        return true;
    return false;
}

static inline void *failing_malloc(size_t n)
{
    return failing_alloc_fails() ? NULL : malloc(n);
}

static inline void *failing_realloc(void *p, size_t n)
{
    return failing_alloc_fails() ? NULL : realloc(p, n);
}

#define malloc  failing_malloc
#define realloc failing_realloc
#include "base/arena.c"
#include "base/buf.c"
#undef malloc
#undef realloc

#endif
