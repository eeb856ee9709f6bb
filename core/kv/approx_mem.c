/* Memory for approximate mode: see approx_mem.h. Called with a part's lock held, on any thread.
 *
 * Pieces up to 8 KiB are of one of 31 sizes, at most a quarter apart, and lie in slabs of 64 KiB
 * that hold one size each; a larger one has a mapping of its own that begins like a slab. Both
 * begin at a multiple of 64 KiB, so a piece's slab is found from its address. */
#include "kv/approx_mem.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n)   ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

enum { SLAB = 64 << 10, HEAD = 64, CLASS_MAX = 8192, ALONE = PL_APPROX_MEM_CLASSES };

typedef struct piece {
    struct piece *next;
} piece;

struct pl_approx_slab {
    pl_approx_slab *next, *prev; /* in its partial list */
    piece *freed;
    size_t size;               /* of a piece; ALONE: of it */
    uint32_t used, total, cut; /* pieces in use, in all, and that were ever handed out */
    uint32_t size_class;
};

_Static_assert(sizeof(pl_approx_slab) <= HEAD, "the head of a slab");

static pl_approx_slab *slab_of(const void *p)
{
    return (pl_approx_slab *)((uintptr_t)p & ~(uintptr_t)(SLAB - 1));
}

/* 32, 48; then four steps from each power of two to the next: 64, 80, 96, 112, 128, 160, ... */
static uint32_t class_of(size_t n)
{
    if (n <= 48)
        return n > 32;
    if (n <= 64)
        return 2;
    unsigned power = 63 - (unsigned)__builtin_clzll(n - 1); /* 2^power < n <= 2^(power + 1) */
    return 3 + (power - 6) * 4 + (uint32_t)((n - 1) >> (power - 2) & 3);
}

static size_t class_size(uint32_t c)
{
    if (c <= 2)
        return 32 + 16 * c;
    return ((size_t)5 + (c - 3) % 4) << ((c - 3) / 4 + 4);
}

/* A mapping that begins at a multiple of SLAB. */
static void *map(size_t bytes)
{
    char *p = mmap(NULL, bytes + SLAB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    size_t before = (SLAB - ((uintptr_t)p & (SLAB - 1))) & (SLAB - 1);
    if (before)
        munmap(p, before);
    munmap(p + before + bytes, SLAB - before);
    return p + before;
}

static size_t map_size(const pl_approx_slab *s)
{
    if (s->size_class != ALONE)
        return SLAB;
    return (s->size + HEAD + 4095) & ~(size_t)4095;
}

static void unmap(pl_approx_slab *s)
{
    size_t bytes = map_size(s);
    ASAN_UNPOISON_MEMORY_REGION(s, bytes);
    munmap(s, bytes);
}

static pl_approx_slab *slab_new(uint32_t size_class, size_t size)
{
    pl_approx_slab like = {.size = size, .size_class = size_class};
    pl_approx_slab *s = map(map_size(&like));
    if (!s)
        return NULL;
    *s = like;
    s->total = size_class == ALONE ? 1 : (uint32_t)((SLAB - HEAD) / size);
    return s;
}

static void list_put(pl_approx_mem *m, pl_approx_slab *s)
{
    pl_approx_slab **first = &m->partial[s->size_class];
    s->prev = NULL;
    s->next = *first;
    if (*first)
        (*first)->prev = s;
    *first = s;
}

static void list_take(pl_approx_mem *m, pl_approx_slab *s)
{
    if (s->next)
        s->next->prev = s->prev;
    *(s->prev ? &s->prev->next : &m->partial[s->size_class]) = s->next;
}

void *pl_approx_mem_get(pl_approx_mem *m, size_t n)
{
    if (n > CLASS_MAX) {
        pl_approx_slab *s = slab_new(ALONE, n);
        return s ? (char *)s + HEAD : NULL;
    }
    uint32_t c = class_of(n);
    pthread_mutex_lock(&m->lock);
    pl_approx_slab *s = m->partial[c];
    if (!s) {
        s = slab_new(c, class_size(c));
        if (!s) {
            pthread_mutex_unlock(&m->lock);
            return NULL;
        }
        list_put(m, s);
    }
    void *p = s->freed;
    if (p) {
        ASAN_UNPOISON_MEMORY_REGION(p, s->size);
        s->freed = s->freed->next;
    } else {
        p = (char *)s + HEAD + s->cut++ * s->size;
    }
    if (++s->used == s->total)
        list_take(m, s);
    pthread_mutex_unlock(&m->lock);
    return p;
}

void pl_approx_mem_put(pl_approx_mem *m, void *p)
{
    if (!p)
        return;
    pl_approx_slab *s = slab_of(p);
    if (s->size_class == ALONE) {
        unmap(s);
        return;
    }
    pthread_mutex_lock(&m->lock);
    piece *f = p;
    f->next = s->freed;
    s->freed = f;
    ASAN_POISON_MEMORY_REGION(p, s->size);
    if (s->used-- == s->total)
        list_put(m, s);
    bool spare = s->used == 0 && (s->next || s->prev); /* the last one of a class stays */
    if (spare)
        list_take(m, s);
    pthread_mutex_unlock(&m->lock);
    if (spare)
        unmap(s);
}

size_t pl_approx_mem_size(const void *p)
{
    return slab_of(p)->size;
}

void pl_approx_mem_init(pl_approx_mem *m)
{
    *m = (pl_approx_mem){.partial = {NULL}};
    pthread_mutex_init(&m->lock, NULL);
}

void pl_approx_mem_destroy(pl_approx_mem *m)
{
    for (int c = 0; c < PL_APPROX_MEM_CLASSES; c++)
        while (m->partial[c]) {
            pl_approx_slab *s = m->partial[c];
            list_take(m, s);
            unmap(s);
        }
    pthread_mutex_destroy(&m->lock);
}
