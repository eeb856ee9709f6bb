/* A shard of the memory store: see shard.h. Called by memory.c with the shard's lock held.
 *
 * Records are 112 bytes in chunks that are never moved, named by 32-bit numbers; a name above 47
 * bytes is on the heap by itself, and what only engine-backed sessions have (lease and note) is in
 * chunks of its own. The table holds a number and 32 bits of hash for each, so that it
 * grows without looking at a record.
 *
 * The wheel has six levels of 64 slots, each slot of a level as long as the whole level below. A
 * record sits at the level of the highest 6-bit digit in which its due tick differs from the
 * current one, and moves down as time reaches its slot: at most five times. A refresh does not move
 * it: when its slot comes up, a record whose deadline has moved is put where it belongs by then,
 * which some refresh since the last time has paid for. So the cost follows what expires and what is
 * used, not what is open. (base/wheel.h would look at every record once in 20 seconds, at 40 bytes
 * for a timer, and fires callbacks with no bound on how many in a row.) */
#include "session/shard.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK_RECORDS 512u
#define EXTRA_RECORDS 64u
#define FIRST_TABLE   16u
#define HEAD          0x80000000u /* prev is not a record but a slot: level * 64 + place */
#define MAX_RECORDS   (HEAD - CHUNK_RECORDS)
#define LONG_NAME_AT  7 /* where in name[] the pointer is: aligned, for leak checkers */
#define MS_NS         1000000u
#define SECOND_NS     1000000000u

_Static_assert(sizeof(pl_shard_record) == 112, "a record is 112 bytes");
_Static_assert((offsetof(pl_shard_record, name) + LONG_NAME_AT) % sizeof(void *) == 0, "aligned");

static pl_shard_record *record(const pl_shard *s, pl_shard_ref ref)
{
    return &s->chunks[ref / CHUNK_RECORDS][ref % CHUNK_RECORDS];
}

static pl_shard_extra *extra_of(const pl_shard *s, const pl_shard_record *r)
{
    return &s->extra_chunks[r->extra / EXTRA_RECORDS][r->extra % EXTRA_RECORDS];
}

static size_t name_bytes(const pl_shard_record *r)
{
    return (size_t)r->tenant_n + r->id_n + 1;
}

static char *long_name(const pl_shard_record *r)
{
    char *p;
    memcpy(&p, r->name + LONG_NAME_AT, sizeof p);
    return p;
}

static const char *name_of(const pl_shard_record *r)
{
    return name_bytes(r) <= PL_SHARD_NAME_BYTES ? r->name : long_name(r);
}

/* --- the wheel --- */

/* When it expires: a lease holds it beyond its deadline. */
static uint64_t ends_ns(const pl_shard *s, const pl_shard_record *r)
{
    if (!r->engine_backed)
        return r->deadline_ns;
    uint64_t lease_ends_ns = extra_of(s, r)->lease_ends_ns;
    return lease_ends_ns > r->deadline_ns ? lease_ends_ns : r->deadline_ns;
}

static uint64_t due_tick(const pl_shard *s, const pl_shard_record *r)
{
    uint64_t deadline_ns = ends_ns(s, r);
    return deadline_ns / PL_SHARD_TICK_NS + (deadline_ns % PL_SHARD_TICK_NS != 0); /* never early */
}

static void wheel_put(pl_shard *s, pl_shard_ref ref)
{
    pl_shard_record *r = record(s, ref);
    uint64_t due = due_tick(s, r);
    if (due <= s->tick)
        due = s->tick + 1; /* a clock that was read before the sweep's */
    unsigned level = (63 - (unsigned)__builtin_clzll(due ^ s->tick)) / 6;
    if (level >= PL_SHARD_LEVELS)
        level = PL_SHARD_LEVELS - 1;
    unsigned place = (due >> (6 * level)) & 63;
    pl_shard_ref first = s->slots[level][place];
    r->next = first;
    r->prev = HEAD | (level * 64 + place);
    if (first)
        record(s, first)->prev = ref;
    s->slots[level][place] = ref;
    s->filled[level] |= 1ull << place;
}

static void wheel_take(pl_shard *s, pl_shard_ref ref)
{
    pl_shard_record *r = record(s, ref);
    if (r->next)
        record(s, r->next)->prev = r->prev;
    if (!(r->prev & HEAD)) {
        record(s, r->prev)->next = r->next;
        return;
    }
    unsigned at = r->prev & ~HEAD;
    s->slots[at / 64][at % 64] = r->next;
    if (!r->next)
        s->filled[at / 64] &= ~(1ull << at % 64);
}

/* The next tick with something to do, or target. A filled slot is always ahead of the current place
 * of its level, and everything in a level is due before anything in the next. */
static uint64_t next_tick(const pl_shard *s, uint64_t target)
{
    for (unsigned level = 0; level < PL_SHARD_LEVELS; level++) {
        uint64_t here = s->tick >> (6 * level);
        uint64_t ahead = s->filled[level] >> (here & 63) >> 1;
        if (ahead) {
            uint64_t tick = (here + 1 + (unsigned)__builtin_ctzll(ahead)) << (6 * level);
            return tick < target ? tick : target;
        }
    }
    return target;
}

pl_shard_ref pl_shard_due(pl_shard *s, uint64_t now_ns, int *budget)
{
    uint64_t target = now_ns / PL_SHARD_TICK_NS;
    for (;;) {
        for (int level = PL_SHARD_LEVELS - 1; level >= 0; level--) {
            unsigned place = (s->tick >> (6 * level)) & 63;
            while (s->filled[level] >> place & 1) {
                if (*budget <= 0)
                    return 0;
                --*budget;
                pl_shard_ref ref = s->slots[level][place];
                if (due_tick(s, record(s, ref)) <= s->tick)
                    return ref;
                wheel_take(s, ref);
                wheel_put(s, ref);
            }
        }
        if (s->tick >= target)
            return 0;
        s->tick = next_tick(s, target);
    }
}

/* --- the order of use: router-only records, newest first, to a second --- */

static uint64_t used_ns(const pl_shard_record *r)
{
    return r->deadline_ns - r->ttl_ms * (uint64_t)MS_NS;
}

static void order_put(pl_shard *s, pl_shard_ref ref)
{
    pl_shard_record *r = record(s, ref);
    r->newer = 0;
    r->older = s->newest;
    if (s->newest)
        record(s, s->newest)->newer = ref;
    else
        s->oldest = ref;
    s->newest = ref;
}

static void order_take(pl_shard *s, pl_shard_ref ref)
{
    pl_shard_record *r = record(s, ref);
    if (r->newer)
        record(s, r->newer)->older = r->older;
    else
        s->newest = r->older;
    if (r->older)
        record(s, r->older)->newer = r->newer;
    else
        s->oldest = r->newer;
}

uint64_t pl_shard_oldest_use_ns(const pl_shard *s)
{
    return s->oldest ? used_ns(record(s, s->oldest)) : UINT64_MAX;
}

/* --- table and records --- */

static void table_put(pl_shard_entry *table, uint32_t mask, pl_shard_entry e)
{
    uint32_t i = e.tag & mask;
    while (table[i].ref)
        i = (i + 1) & mask;
    table[i] = e;
}

static bool table_resize(pl_shard *s, uint32_t entries)
{
    pl_shard_entry *table = calloc(entries, sizeof *table);
    if (!table)
        return false;
    if (s->table) {
        for (uint32_t i = 0; i <= s->mask; i++)
            if (s->table[i].ref)
                table_put(table, entries - 1, s->table[i]);
        s->bytes -= ((uint64_t)s->mask + 1) * sizeof *table;
        free(s->table);
    }
    s->table = table;
    s->mask = entries - 1;
    s->bytes += (uint64_t)entries * sizeof *table;
    return true;
}

static void table_take(pl_shard *s, uint32_t tag, pl_shard_ref ref)
{
    uint32_t hole = tag & s->mask;
    while (s->table[hole].ref != ref)
        hole = (hole + 1) & s->mask;
    /* those that follow move up, unless the hole is before their own place */
    for (uint32_t i = (hole + 1) & s->mask; s->table[i].ref; i = (i + 1) & s->mask) {
        uint32_t home = s->table[i].tag & s->mask;
        if (((i - home) & s->mask) >= ((i - hole) & s->mask)) {
            s->table[hole] = s->table[i];
            hole = i;
        }
    }
    s->table[hole] = (pl_shard_entry){0, 0};
}

static bool add_chunk(pl_shard *s)
{
    if (s->unused >= MAX_RECORDS)
        return false;
    pl_shard_record **chunks = realloc(s->chunks, (s->chunks_n + 1) * sizeof *chunks);
    if (!chunks)
        return false;
    s->chunks = chunks;
    pl_shard_record *chunk = malloc(CHUNK_RECORDS * sizeof *chunk);
    if (!chunk)
        return false;
    s->chunks[s->chunks_n++] = chunk;
    s->bytes += CHUNK_RECORDS * sizeof *chunk + sizeof *chunks;
    return true;
}

bool pl_shard_extra_ready(pl_shard *s)
{
    if (s->extra_freed || s->extra_unused < s->extra_chunks_n * EXTRA_RECORDS)
        return true;
    pl_shard_extra **chunks =
        realloc(s->extra_chunks, (s->extra_chunks_n + 1) * sizeof *s->extra_chunks);
    if (!chunks)
        return false;
    s->extra_chunks = chunks;
    pl_shard_extra *chunk = malloc(EXTRA_RECORDS * sizeof *chunk);
    if (!chunk)
        return false;
    s->extra_chunks[s->extra_chunks_n++] = chunk;
    s->bytes += EXTRA_RECORDS * sizeof *chunk + sizeof *chunks;
    return true;
}

static void extra_take(pl_shard *s, pl_shard_record *r)
{
    r->extra = s->extra_freed;
    if (r->extra)
        s->extra_freed = extra_of(s, r)->next;
    else
        r->extra = s->extra_unused++;
}

static void extra_give(pl_shard *s, pl_shard_record *r)
{
    extra_of(s, r)->next = s->extra_freed;
    s->extra_freed = r->extra;
}

/* Nothing is held: what a peak has taken goes back, except what the next few need. */
static void shrink(pl_shard *s)
{
    while (s->chunks_n > 1) {
        free(s->chunks[--s->chunks_n]);
        s->bytes -= CHUNK_RECORDS * sizeof(pl_shard_record) + sizeof *s->chunks;
    }
    while (s->extra_chunks_n > 1) {
        free(s->extra_chunks[--s->extra_chunks_n]);
        s->bytes -= EXTRA_RECORDS * sizeof(pl_shard_extra) + sizeof *s->extra_chunks;
    }
    s->unused = s->extra_unused = 1;
    s->freed = s->extra_freed = 0;
    if (s->mask >= CHUNK_RECORDS)
        table_resize(s, FIRST_TABLE); /* when that fails the old one serves */
}

void pl_shard_init(pl_shard *s, uint64_t now_ns)
{
    memset(s, 0, sizeof *s);
    s->unused = s->extra_unused = 1;
    s->born_ns = now_ns;
    s->tick = now_ns / PL_SHARD_TICK_NS;
}

void pl_shard_destroy(pl_shard *s)
{
    for (uint32_t i = 0; s->table && i <= s->mask; i++) {
        pl_shard_ref ref = s->table[i].ref;
        if (ref && name_bytes(record(s, ref)) > PL_SHARD_NAME_BYTES)
            free(long_name(record(s, ref)));
    }
    for (uint32_t i = 0; i < s->chunks_n; i++)
        free(s->chunks[i]);
    for (uint32_t i = 0; i < s->extra_chunks_n; i++)
        free(s->extra_chunks[i]);
    free(s->extra_chunks);
    free(s->chunks);
    free(s->table);
    memset(s, 0, sizeof *s);
}

pl_shard_ref pl_shard_find(const pl_shard *s, const pl_shard_key *k)
{
    if (!s->count)
        return 0;
    uint32_t tag = (uint32_t)k->hash;
    for (uint32_t i = tag & s->mask; s->table[i].ref; i = (i + 1) & s->mask) {
        if (s->table[i].tag != tag)
            continue;
        const pl_shard_record *r = record(s, s->table[i].ref);
        __builtin_prefetch(r); /* its two cache lines together */
        __builtin_prefetch((const char *)(r + 1) - 1);
        if (r->tenant_n == k->tenant_n && name_bytes(r) == k->n &&
            memcmp(name_of(r), k->bytes, k->n) == 0)
            return s->table[i].ref;
    }
    return 0;
}

pl_shard_ref pl_shard_insert(pl_shard *s, const pl_shard_key *k)
{
    if (!s->table || s->count >= s->mask - s->mask / 4) {
        uint32_t entries = s->table ? (s->mask + 1) * 2 : FIRST_TABLE;
        if (!table_resize(s, entries))
            return 0;
    }
    if (!s->freed && s->unused >= s->chunks_n * CHUNK_RECORDS && !add_chunk(s))
        return 0;
    char *apart = NULL;
    if (k->n > PL_SHARD_NAME_BYTES) {
        if (!(apart = malloc(k->n)))
            return 0;
        memcpy(apart, k->bytes, k->n);
        s->bytes += k->n;
    }
    pl_shard_ref ref = s->freed;
    if (ref)
        s->freed = record(s, ref)->next;
    else
        ref = s->unused++;
    pl_shard_record *r = record(s, ref);
    memset(r, 0, sizeof *r);
    r->tenant_n = (uint8_t)k->tenant_n;
    r->id_n = (uint8_t)(k->n - k->tenant_n - 1);
    if (apart)
        memcpy(r->name + LONG_NAME_AT, &apart, sizeof apart);
    else
        memcpy(r->name, k->bytes, k->n);
    table_put(s->table, s->mask, (pl_shard_entry){(uint32_t)k->hash, ref});
    s->count++;
    return ref;
}

static void open_now(const pl_shard *s, pl_shard_record *r, uint64_t now_ns)
{
    uint64_t ms = now_ns > s->born_ns ? (now_ns - s->born_ns) / MS_NS : 0;
    r->opened_ms = (uint32_t)ms;
    r->opened_high = (uint8_t)(ms >> 32);
}

static uint64_t opened_ns(const pl_shard *s, const pl_shard_record *r)
{
    return s->born_ns + ((uint64_t)r->opened_high << 32 | r->opened_ms) * MS_NS;
}

void pl_shard_bind(pl_shard *s, pl_shard_ref ref, pl_binding *b, uint64_t now_ns, uint64_t owner,
                   uint64_t lease_ends_ns)
{
    pl_shard_record *r = record(s, ref);
    bool engine_backed = b->kind == PL_SESSION_ENGINE_BACKED;
    if (r->version) {
        wheel_take(s, ref);
        if (!r->engine_backed)
            order_take(s, ref);
        else if (!engine_backed)
            extra_give(s, r);
    } else {
        open_now(s, r, now_ns);
    }
    if (engine_backed && !(r->version && r->engine_backed))
        extra_take(s, r);
    b->deadline_ns = now_ns + b->ttl_ms * (uint64_t)MS_NS;
    b->version = ++s->versions;
    b->opened_at_ns = opened_ns(s, r);
    b->used_at_ns = now_ns;
    r->deadline_ns = b->deadline_ns;
    r->version = b->version;
    r->parent_hash = b->parent_hash;
    r->ttl_ms = b->ttl_ms;
    r->slot = b->slot;
    r->generation = b->generation;
    r->turns = b->turns;
    r->rank = (uint16_t)b->rank & PL_SESSION_MAX_RANK;
    r->engine_backed = engine_backed;
    if (engine_backed) {
        pl_shard_extra *x = extra_of(s, r);
        x->owner = owner;
        x->lease_ends_ns = owner ? lease_ends_ns : 0;
        x->note = b->note;
    } else {
        b->note.n = 0;
        order_put(s, ref);
    }
    wheel_put(s, ref);
}

void pl_shard_touch(pl_shard *s, pl_shard_ref ref, uint64_t now_ns)
{
    pl_shard_record *r = record(s, ref);
    uint64_t before_ns = used_ns(r);
    r->turns += r->turns < UINT32_MAX;
    if (now_ns <= before_ns)
        return;
    r->deadline_ns = now_ns + r->ttl_ms * (uint64_t)MS_NS;
    if (!r->engine_backed && s->newest != ref && now_ns / SECOND_NS != before_ns / SECOND_NS) {
        order_take(s, ref);
        order_put(s, ref);
    }
}

/* A lease that gets shorter or is given back may bring the end forward: the slot must not be later
 * than that. */
static void lease_is(pl_shard *s, pl_shard_ref ref, uint64_t owner, uint64_t ends)
{
    pl_shard_extra *x = extra_of(s, record(s, ref));
    wheel_take(s, ref);
    x->owner = owner;
    x->lease_ends_ns = ends;
    wheel_put(s, ref);
}

bool pl_shard_lease(pl_shard *s, pl_shard_ref ref, uint64_t owner, uint64_t now_ns,
                    uint64_t lease_ends_ns, bool *lapsed)
{
    const pl_shard_extra *x = extra_of(s, record(s, ref));
    if (x->owner && x->owner != owner && x->lease_ends_ns > now_ns)
        return false;
    *lapsed = x->owner && x->owner != owner;
    lease_is(s, ref, owner, lease_ends_ns);
    return true;
}

bool pl_shard_release(pl_shard *s, pl_shard_ref ref, uint64_t owner, const pl_note *note,
                      uint64_t now_ns)
{
    pl_shard_record *r = record(s, ref);
    pl_shard_extra *x = extra_of(s, r);
    if (x->owner != owner)
        return false;
    if (note->n)
        x->note = *note;
    if (now_ns > used_ns(r))
        r->deadline_ns = now_ns + r->ttl_ms * (uint64_t)MS_NS;
    lease_is(s, ref, 0, 0);
    return true;
}

void pl_shard_delete(pl_shard *s, pl_shard_ref ref, const pl_shard_key *k)
{
    pl_shard_record *r = record(s, ref);
    wheel_take(s, ref);
    if (r->engine_backed)
        extra_give(s, r);
    else
        order_take(s, ref);
    table_take(s, (uint32_t)k->hash, ref);
    if (k->n > PL_SHARD_NAME_BYTES) {
        free(long_name(r));
        s->bytes -= k->n;
    }
    r->version = 0;
    r->next = s->freed;
    s->freed = ref;
    if (--s->count == 0)
        shrink(s);
}

bool pl_shard_next(const pl_shard *s, pl_shard_ref *at, int *budget)
{
    while (*budget > 0 && *at < s->unused - 1) {
        --*budget;
        if (record(s, ++*at)->version)
            return true;
    }
    return false;
}

void pl_shard_read(const pl_shard *s, pl_shard_ref ref, pl_binding *out)
{
    const pl_shard_record *r = record(s, ref);
    out->slot = r->slot;
    out->generation = r->generation;
    out->rank = r->rank;
    out->kind = r->engine_backed ? PL_SESSION_ENGINE_BACKED : PL_SESSION_ROUTER_ONLY;
    out->turns = r->turns;
    out->parent_hash = r->parent_hash;
    out->opened_at_ns = opened_ns(s, r);
    out->used_at_ns = used_ns(r);
    out->ttl_ms = r->ttl_ms;
    out->deadline_ns = r->deadline_ns;
    out->version = r->version;
    if (r->engine_backed)
        out->note = extra_of(s, r)->note;
    else
        out->note.n = 0;
}

bool pl_shard_engine_backed(const pl_shard *s, pl_shard_ref ref)
{
    return record(s, ref)->engine_backed;
}

bool pl_shard_expired(const pl_shard *s, pl_shard_ref ref, uint64_t now_ns)
{
    const pl_shard_record *r = record(s, ref);
    return r->deadline_ns <= now_ns && ends_ns(s, r) <= now_ns;
}

uint64_t pl_shard_used_ns(const pl_shard *s, pl_shard_ref ref)
{
    return used_ns(record(s, ref));
}

void pl_shard_name(const pl_shard *s, pl_shard_ref ref, pl_shard_key *k)
{
    const pl_shard_record *r = record(s, ref);
    k->n = (uint32_t)name_bytes(r);
    k->tenant_n = r->tenant_n;
    memcpy(k->bytes, name_of(r), k->n);
}
