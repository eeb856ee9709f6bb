/* The allocator of a VM: see vm_arena.h. Called by LuaJIT, and by vm.c for its life cycle; on the
 * thread that runs the VM. Blocks have size classes (16-byte steps up to 512 bytes, then four per
 * doubling); a freed block goes to the list of its class, fresh ones are cut from the end of what
 * was used. Lua says how large a block is when it gives it back, so blocks carry no header. Nothing
 * is merged: when the end is reached, larger free blocks are cut up instead. */
#include "policy/vm_arena.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SMALL_MAX     512u
#define SMALL_CLASSES 32
#define CLASSES       (SMALL_CLASSES + 4 * 33)

/* LuaJIT keeps pointers in 47 bits. */
#define ADDRESS_LIMIT ((uintptr_t)1 << 47)

typedef struct block {
    struct block *next;
} block;

struct pl_vm_arena {
    char *base;
    size_t cap;  /* bytes mapped */
    size_t end;  /* bytes cut off so far */
    size_t used; /* bytes in blocks that Lua holds */
    void *owner;
    block *free[CLASSES];
};

static unsigned class_of(size_t n)
{
    if (n <= SMALL_MAX)
        return n ? (unsigned)((n - 1) / 16) : 0;
    unsigned e = 63u - (unsigned)__builtin_clzll(n - 1);
    return SMALL_CLASSES + (e - 9) * 4 + (unsigned)((n - 1) >> (e - 2) & 3);
}

static size_t class_size(unsigned c)
{
    if (c < SMALL_CLASSES)
        return (c + 1) * 16u;
    unsigned e = (c - SMALL_CLASSES) / 4 + 9, k = (c - SMALL_CLASSES) % 4;
    return ((size_t)1 << e) + ((size_t)(k + 1) << (e - 2));
}

pl_vm_arena *pl_vm_arena_new(size_t cap_bytes, void *owner)
{
    pl_vm_arena *a = calloc(1, sizeof *a);
    if (!a)
        return NULL;
    cap_bytes = (cap_bytes + 0xffff) & ~(size_t)0xffff;
    /* on x86-64 any address will do; elsewhere a hint keeps it low */
    void *p = mmap((void *)(uintptr_t)0x100000000000u, cap_bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED && (uintptr_t)p + cap_bytes >= ADDRESS_LIMIT) {
        munmap(p, cap_bytes);
        p = MAP_FAILED;
    }
    if (p == MAP_FAILED) {
        free(a);
        return NULL;
    }
    a->base = p;
    a->cap = cap_bytes;
    a->owner = owner;
    return a;
}

void pl_vm_arena_free(pl_vm_arena *a)
{
    if (!a)
        return;
    munmap(a->base, a->cap);
    free(a);
}

static void give_back(pl_vm_arena *a, void *p, unsigned c)
{
    block *b = p;
    b->next = a->free[c];
    a->free[c] = b;
}

/* The end is reached: takes a larger free block and files what is left over. */
static void *carve(pl_vm_arena *a, unsigned c)
{
    size_t want = class_size(c);
    for (unsigned big = c + 1; big < CLASSES; big++) {
        block *b = a->free[big];
        if (!b)
            continue;
        a->free[big] = b->next;
        char *rest = (char *)b + want;
        size_t left = class_size(big) - want;
        while (left >= 16) {
            unsigned fit = class_of(left);
            while (class_size(fit) > left)
                fit--;
            give_back(a, rest, fit);
            rest += class_size(fit);
            left -= class_size(fit);
        }
        return b;
    }
    return NULL;
}

static void *take(pl_vm_arena *a, size_t n)
{
    if (n > a->cap)
        return NULL;
    unsigned c = class_of(n);
    block *b = a->free[c];
    if (b) {
        a->free[c] = b->next;
        return b;
    }
    size_t size = class_size(c);
    if (size <= a->cap - a->end) {
        char *p = a->base + a->end;
        a->end += size;
        return p;
    }
    return carve(a, c);
}

void *pl_vm_arena_alloc(void *arena, void *ptr, size_t old_bytes, size_t new_bytes)
{
    pl_vm_arena *a = arena;
    if (new_bytes == 0) {
        if (ptr) {
            unsigned c = class_of(old_bytes);
            a->used -= class_size(c);
            give_back(a, ptr, c);
        }
        return NULL;
    }
    if (!ptr) {
        void *p = take(a, new_bytes);
        if (p)
            a->used += class_size(class_of(new_bytes));
        return p;
    }
    unsigned from = class_of(old_bytes), to = class_of(new_bytes);
    if (from == to)
        return ptr;
    size_t from_size = class_size(from), to_size = class_size(to);
    size_t at = (size_t)((char *)ptr - a->base);
    if (at + from_size == a->end && new_bytes <= a->cap && at + to_size <= a->cap) {
        a->end = at + to_size; /* the last block grows and shrinks where it is */
        a->used += to_size - from_size;
        return ptr;
    }
    void *p = take(a, new_bytes);
    if (!p && new_bytes < old_bytes) { /* Lua relies on shrinking: the rest of the block is lost */
        a->used += to_size - from_size;
        return ptr;
    }
    if (!p)
        return NULL;
    memcpy(p, ptr, old_bytes < new_bytes ? old_bytes : new_bytes);
    give_back(a, ptr, from);
    a->used += to_size - from_size;
    return p;
}

size_t pl_vm_arena_used(const pl_vm_arena *a)
{
    return a->used;
}

void *pl_vm_arena_owner(const pl_vm_arena *a)
{
    return a->owner;
}
