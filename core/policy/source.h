/* The inside of a policy's source, for the loader: see vm.h for its life. */
#ifndef PL_SOURCE_H
#define PL_SOURCE_H

#include "policy/vm.h"

/* One file. Its memory lives as long as the source. */
typedef struct pl_source_file {
    char *name;  /* "least_loaded.lua", "lib/x.lua": relative to the policy's directory */
    char *chunk; /* chunk name for Lua: '@' and the path as people know it */
    char *bytes;
    size_t n;
    struct pl_source_file *next;
} pl_source_file;

const pl_source_file *pl_source_main(const pl_policy_source *s);
const json_t *pl_source_params(const pl_policy_source *s); /* object or NULL; borrowed */
const char *pl_source_label(const pl_policy_source *s);    /* file name without directory, .lua */

/* A file beside the policy, by module name ("a.b" is a/b.lua). Reads it at the first call; once the
 * source is sealed only what was read before is found. */
int pl_source_module(pl_policy_source *s, const char *module, const pl_source_file **out,
                     pl_errbuf *eb);

/* The first VM was built: no further file can join; the hash is fixed. */
void pl_source_seal(pl_policy_source *s);

/* The file whose name Lua shows as `shown` (LuaJIT shortens long ones to "..." and the end); NULL
 * when none. */
const pl_source_file *pl_source_shown(pl_policy_source *s, pl_str shown);

/* Does the text of any of its files contain the word? Once the first VM stands. */
bool pl_policy_source_names(const pl_policy_source *s, pl_str word);

#endif
