/* The memory of one VM: a private, capped mapping that is dropped whole. Handed to lua_newstate as
 * its allocator. One thread at a time. */
#ifndef PL_VM_ARENA_H
#define PL_VM_ARENA_H

#include <stddef.h>

typedef struct pl_vm_arena pl_vm_arena;

/* NULL when the address space cannot be had. owner: what pl_vm_arena_owner answers. */
pl_vm_arena *pl_vm_arena_new(size_t cap_bytes, void *owner);
void pl_vm_arena_free(pl_vm_arena *a);

/* A lua_Alloc: NULL once the cap is reached, which Lua turns into LUA_ERRMEM. */
void *pl_vm_arena_alloc(void *arena, void *ptr, size_t old_bytes, size_t new_bytes);

/* Bytes that Lua holds now. */
size_t pl_vm_arena_used(const pl_vm_arena *a);
void *pl_vm_arena_owner(const pl_vm_arena *a);

#endif
