/* Finds Lua that the build compiled in (generated/embedded_lua.c): see embedded.h. No state. */
#include "policy/embedded.h"

#include <string.h>

const pl_embedded *pl_embedded_find(const char *name)
{
    for (const pl_embedded *e = pl_embedded_files; e->name; e++)
        if (strcmp(e->name, name) == 0)
            return e;
    return NULL;
}
