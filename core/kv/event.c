/* Batches of KV events: see event.h. Called by apply.c on the indexer's thread, and by tests and
 * the fuzzer on theirs. Nothing is allocated or kept.
 *
 * A batch is walked three times: once whole when it is opened (so that nothing after that can run
 * out of bytes), once per event to find its fields and check the type of every hash and token, and
 * once by whoever takes hashes and tokens out. */
#include "kv/event.h"

#include <string.h>

#include "base/err.h"

/* --- one value --- */

static bool read_hash_text(pl_str s, uint64_t *out)
{
    int base = 10;
    bool minus = false;
    if (pl_str_starts(s, PL_STR("-"))) {
        minus = true;
        s = (pl_str){s.p + 1, s.n - 1};
    } else if (pl_str_starts(s, PL_STR("0x"))) {
        base = 16;
        s = (pl_str){s.p + 2, s.n - 2};
    }
    if (s.n == 0 || s.n > 20)
        return false;
    uint64_t v = 0;
    for (size_t i = 0; i < s.n; i++) {
        char ch = (char)(s.p[i] >= 'A' && s.p[i] <= 'F' ? s.p[i] + 32 : s.p[i]);
        int digit = ch >= '0' && ch <= '9' ? ch - '0' : ch >= 'a' && ch <= 'f' ? ch - 'a' + 10 : 99;
        if (digit >= base || __builtin_mul_overflow(v, (uint64_t)base, &v) ||
            __builtin_add_overflow(v, (uint64_t)digit, &v))
            return false;
    }
    *out = minus ? -v : v;
    return true;
}

/* The value of a map's member; the map's head was just read. False: there is none. Steps over the
 * map. */
static bool member(pl_mp *c, uint32_t pairs, pl_str name, pl_mp_item *value)
{
    bool found = false;
    while (pairs--) {
        pl_mp_item key, v;
        if (pl_mp_read(c, &key) || pl_mp_skip_inside(c, &key) || pl_mp_read(c, &v) ||
            pl_mp_skip_inside(c, &v))
            return false;
        if (key.type == PL_MP_STR && pl_str_eq(key.s, name)) {
            found = true;
            *value = v;
        }
    }
    return found;
}

static bool hash_of(const pl_mp_item *it, uint64_t *out)
{
    switch (it->type) {
    case PL_MP_UINT:
        *out = it->u;
        return true;
    case PL_MP_INT:
        *out = (uint64_t)it->i;
        return true;
    case PL_MP_BIN: {
        uint64_t v = 0;
        for (size_t i = it->s.n > 8 ? it->s.n - 8 : 0; i < it->s.n; i++)
            v = v << 8 | (uint8_t)it->s.p[i];
        *out = v;
        return it->s.n > 0;
    }
    case PL_MP_STR: /* numbers that JSON's readers would round */
        return read_hash_text(it->s, out);
    default:
        return false;
    }
}

/* Reads one hash: a value, or a member of a RouterEvent's block. */
static bool take_hash(pl_mp *c, pl_str name, uint64_t *out)
{
    pl_mp_item it, m;
    if (pl_mp_fast_uint(c, out))
        return true;
    if (pl_mp_read(c, &it))
        return false;
    if (it.type == PL_MP_MAP)
        return member(c, it.n, name, &m) && hash_of(&m, out);
    return pl_mp_skip_inside(c, &it) == 0 && hash_of(&it, out);
}

static bool take_token(pl_mp *c, bool bigram, uint32_t *first, uint32_t *second)
{
    pl_mp_item it;
    uint64_t fast;
    if (!bigram && pl_mp_fast_uint(c, &fast)) {
        *first = (uint32_t)fast;
        return fast <= UINT32_MAX;
    }
    if (pl_mp_read(c, &it))
        return false;
    if (!bigram) {
        if (it.type != PL_MP_UINT || it.u > UINT32_MAX)
            return false;
        *first = (uint32_t)it.u;
        return true;
    }
    pl_mp_item a, b;
    if (it.type != PL_MP_ARRAY || it.n != 2 || pl_mp_read(c, &a) || pl_mp_read(c, &b) ||
        a.type != PL_MP_UINT || b.type != PL_MP_UINT || a.u > UINT32_MAX || b.u > UINT32_MAX)
        return false;
    *first = (uint32_t)a.u;
    *second = (uint32_t)b.u;
    return true;
}

size_t pl_kv_hashes(pl_kv_list *l, uint64_t *out, size_t cap)
{
    size_t n = 0;
    while (n < cap && l->n && take_hash(&l->at, PL_STR("block_hash"), &out[n]))
        n++, l->n--;
    return n;
}

size_t pl_kv_locals(pl_kv_list *l, uint64_t *out, size_t cap)
{
    size_t n = 0;
    while (n < cap && l->n && take_hash(&l->at, PL_STR("tokens_hash"), &out[n]))
        n++, l->n--;
    return n;
}

size_t pl_kv_tokens(pl_kv_list *l, uint32_t *out, uint32_t *next, size_t cap)
{
    size_t n = 0;
    while (n < cap && l->n &&
           take_token(&l->at, next != NULL, &out[n], next ? &next[n] : &(uint32_t){0}))
        n++, l->n--;
    return n;
}

bool pl_kv_extra_next(pl_kv_extra_iter *it, pl_kv_extra *x)
{
    pl_mp *c = &it->blocks.at;
    for (;;) {
        pl_mp_item v;
        while (it->left == 0) {
            if (it->blocks.n == 0 || pl_mp_read(c, &v))
                return false;
            it->block = it->block + 1; /* from 1; what is handed out is from 0 */
            it->blocks.n--;
            if (v.type == PL_MP_ARRAY)
                it->left = v.n;
            else if (pl_mp_skip_inside(c, &v))
                return false;
        }
        it->left--;
        *x = (pl_kv_extra){.block = it->block - 1};
        if (pl_mp_read(c, &v))
            return false;
        if (v.type == PL_MP_STR || v.type == PL_MP_BIN) {
            x->binary = v.type == PL_MP_BIN;
            x->s = v.s;
            return true;
        }
        if (v.type == PL_MP_ARRAY && v.n) {
            pl_mp_item id;
            if (pl_mp_read(c, &id) || pl_mp_skip_inside(c, &id) || pl_mp_skip(c, v.n - 1))
                return false;
            if (id.type == PL_MP_STR || id.type == PL_MP_BIN) {
                x->object = true;
                x->s = id.s;
                return true;
            }
        } else if (pl_mp_skip_inside(c, &v)) {
            return false;
        }
    }
}

int32_t pl_kv_tier_of(pl_str medium)
{
    static const struct {
        pl_str name;
        pl_tier tier;
    } names[] = {
        {PL_STR_INIT("gpu"), PL_TIER_DEVICE},      {PL_STR_INIT("device"), PL_TIER_DEVICE},
        {PL_STR_INIT("cpu"), PL_TIER_HOST},        {PL_STR_INIT("cpu_pinned"), PL_TIER_HOST},
        {PL_STR_INIT("cpu_tier1"), PL_TIER_HOST},  {PL_STR_INIT("host_pinned"), PL_TIER_HOST},
        {PL_STR_INIT("host"), PL_TIER_HOST},       {PL_STR_INIT("cpu_tier2"), PL_TIER_DISK},
        {PL_STR_INIT("disk"), PL_TIER_DISK},       {PL_STR_INIT("nvme"), PL_TIER_DISK},
        {PL_STR_INIT("storage"), PL_TIER_DISK},    {PL_STR_INIT("external"), PL_TIER_EXTERNAL},
        {PL_STR_INIT("remote"), PL_TIER_EXTERNAL}, {PL_STR_INIT("network"), PL_TIER_EXTERNAL},
        {PL_STR_INIT("shared"), PL_TIER_EXTERNAL},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (pl_str_ieq(medium, names[i].name))
            return (int32_t)names[i].tier;
    return -1;
}

/* --- one event: fields from wherever they stand --- */

typedef enum field {
    F_NONE,
    F_TYPE,
    F_HASHES,
    F_PARENT,
    F_TOKENS,
    F_BLOCK_SIZE,
    F_LORA_ID,
    F_MEDIUM,
    F_LORA_NAME,
    F_SALT,
    F_EXTRA,
    F_GROUP,
    F_SPEC,
    F_LOCALITY,
    F_EVENT,
    F_DATA,
    F_RANK,
    F_STORED,
    F_REMOVED,
    F_CLEARED
} field;

static field field_of(pl_str name)
{
    static const struct {
        pl_str name;
        field f;
    } names[] = {
        {PL_STR_INIT("type"), F_TYPE},
        {PL_STR_INIT("block_hashes"), F_HASHES},
        {PL_STR_INIT("blocks"), F_HASHES},
        {PL_STR_INIT("parent_block_hash"), F_PARENT},
        {PL_STR_INIT("parent_hash"), F_PARENT},
        {PL_STR_INIT("token_ids"), F_TOKENS},
        {PL_STR_INIT("block_size"), F_BLOCK_SIZE},
        {PL_STR_INIT("lora_id"), F_LORA_ID},
        {PL_STR_INIT("medium"), F_MEDIUM},
        {PL_STR_INIT("storage_tier"), F_MEDIUM},
        {PL_STR_INIT("lora_name"), F_LORA_NAME},
        {PL_STR_INIT("cache_salt"), F_SALT},
        {PL_STR_INIT("extra_keys"), F_EXTRA},
        {PL_STR_INIT("group_idx"), F_GROUP},
        {PL_STR_INIT("kv_cache_spec_kind"), F_SPEC},
        {PL_STR_INIT("locality"), F_LOCALITY},
        {PL_STR_INIT("event"), F_EVENT},
        {PL_STR_INIT("data"), F_DATA},
        {PL_STR_INIT("dp_rank"), F_RANK},
        {PL_STR_INIT("stored"), F_STORED},
        {PL_STR_INIT("removed"), F_REMOVED},
        {PL_STR_INIT("cleared"), F_CLEARED},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (pl_str_eq(name, names[i].name))
            return names[i].f;
    return F_NONE;
}

/* What is gathered of an event before it is judged. */
typedef struct draft {
    pl_kv_event *e;
    bool has_type, has_hashes, bad;
    bool remote;
} draft;

static pl_kv_kind kind_of(pl_str type)
{
    if (pl_str_eq(type, PL_STR("BlockStored")))
        return PL_KV_STORED;
    if (pl_str_eq(type, PL_STR("BlockRemoved")))
        return PL_KV_REMOVED;
    return pl_str_eq(type, PL_STR("AllBlocksCleared")) ? PL_KV_CLEARED : PL_KV_OTHER;
}

static pl_kv_spec spec_of(pl_str kind)
{
    return pl_str_eq(kind, PL_STR("full_attention")) || pl_str_eq(kind, PL_STR("mla_attention")) ||
                   pl_str_eq(kind, PL_STR("sink_full_attention"))
               ? PL_KV_SPEC_DENSE
               : PL_KV_SPEC_SPARSE;
}

static bool is_locality(pl_str s)
{
    return pl_str_ieq(s, PL_STR("LOCAL")) || pl_str_ieq(s, PL_STR("REMOTE"));
}

static void set_cleared(draft *d)
{
    d->has_type = true;
    d->e->kind = PL_KV_CLEARED;
}

/* The members of a map, each to take(). */
static int take_field(draft *d, field f, pl_mp *c, unsigned depth);

static int take_map(draft *d, pl_mp *c, uint32_t pairs, unsigned depth)
{
    while (pairs--) {
        pl_mp_item key;
        if (pl_mp_read(c, &key) || pl_mp_skip_inside(c, &key))
            return PL_ESYNTAX;
        field f = key.type == PL_MP_STR ? field_of(key.s) : F_NONE;
        if (take_field(d, f, c, depth))
            return PL_ESYNTAX;
    }
    return 0;
}

/* Reads one value that is the event's field f, and notes in d->bad when it cannot be. */
static int take_field(draft *d, field f, pl_mp *c, unsigned depth)
{
    pl_kv_event *e = d->e;
    pl_mp_item v;
    if (pl_mp_read(c, &v))
        return PL_ESYNTAX;
    pl_kv_list inside = {*c, v.type == PL_MP_ARRAY ? v.n : 0};
    if (v.type == PL_MP_MAP && depth < 3 &&
        (f == F_EVENT || f == F_DATA || f == F_STORED || f == F_REMOVED)) {
        if (f == F_STORED || f == F_REMOVED) {
            d->has_type = true;
            e->kind = f == F_STORED ? PL_KV_STORED : PL_KV_REMOVED;
        }
        return take_map(d, c, v.n, depth + 1);
    }
    if (pl_mp_skip_inside(c, &v))
        return PL_ESYNTAX;
    switch (f) {
    case F_TYPE:
        d->has_type = v.type == PL_MP_STR;
        if (d->has_type)
            e->kind = kind_of(v.s);
        break;
    case F_HASHES:
        d->has_hashes = v.type == PL_MP_ARRAY;
        e->hashes = inside;
        break;
    case F_PARENT:
        e->has_parent = v.type != PL_MP_NIL;
        d->bad |= e->has_parent && !hash_of(&v, &e->parent);
        break;
    case F_TOKENS:
        d->bad |= v.type != PL_MP_ARRAY && v.type != PL_MP_NIL;
        e->tokens = inside;
        break;
    case F_BLOCK_SIZE:
        e->block_tokens = v.type == PL_MP_UINT ? v.u : 0;
        break;
    case F_LORA_ID:
        e->unnamed_lora = v.type == PL_MP_UINT ? v.u > 0 : v.type == PL_MP_STR && v.s.n;
        break;
    case F_MEDIUM:
        if (v.type == PL_MP_STR)
            e->tier = pl_kv_tier_of(v.s);
        else if (v.type != PL_MP_NIL)
            e->tier = -1;
        break;
    case F_LORA_NAME:
        if (v.type == PL_MP_STR)
            e->lora = v.s;
        break;
    case F_SALT:
        if (v.type == PL_MP_STR)
            e->salt = v.s;
        break;
    case F_EXTRA:
        e->extra = inside;
        break;
    case F_GROUP:
        if (v.type == PL_MP_UINT)
            e->group = v.u <= INT32_MAX ? (int32_t)v.u : INT32_MAX;
        break;
    case F_SPEC:
        if (v.type == PL_MP_STR)
            e->spec = spec_of(v.s);
        break;
    case F_LOCALITY:
        d->remote = v.type == PL_MP_STR && pl_str_ieq(v.s, PL_STR("REMOTE"));
        break;
    case F_RANK:
        if (v.type == PL_MP_UINT && v.u <= PL_KV_RANK_MAX)
            e->rank = (int32_t)v.u;
        break;
    case F_DATA: /* a RouterEvent says "cleared" in place of a map */
        if (v.type == PL_MP_STR && pl_str_eq(v.s, PL_STR("cleared")))
            set_cleared(d);
        break;
    case F_CLEARED:
        set_cleared(d);
        break;
    default:
        break;
    }
    return 0;
}

/* Positions behind the ones that every engine agrees on: known by their types, and by how far
 * behind. The group and its kind come first, or second and third. */
static int take_tail(draft *d, pl_mp *c, uint32_t place, bool *group_passed)
{
    pl_mp ahead = *c;
    pl_mp_item v;
    if (pl_mp_read(&ahead, &v))
        return PL_ESYNTAX;
    field f = F_NONE;
    if (v.type == PL_MP_UINT && !*group_passed)
        f = F_GROUP;
    else if (v.type == PL_MP_STR && is_locality(v.s))
        f = F_LOCALITY;
    else if (v.type == PL_MP_STR && place < 3 && d->e->spec == PL_KV_SPEC_UNSAID)
        f = F_SPEC;
    /* what stands behind the group or the kind of a group is a window's size */
    *group_passed |= f == F_GROUP || f == F_SPEC;
    return take_field(d, f, c, 0);
}

static int take_array(draft *d, pl_mp *c, uint32_t n)
{
    static const field stored[] = {F_HASHES, F_PARENT, F_TOKENS, F_BLOCK_SIZE, F_LORA_ID, F_MEDIUM};
    static const field removed[] = {F_HASHES, F_MEDIUM};
    bool group_passed = false;
    if (n == 0)
        return 0;
    if (take_field(d, F_TYPE, c, 0))
        return PL_ESYNTAX;
    if (d->has_type && d->e->kind == PL_KV_REMOVED) {
        for (uint32_t i = 1; i < n; i++)
            if (i <= 2 ? take_field(d, removed[i - 1], c, 0)
                       : take_tail(d, c, i - 3, &group_passed))
                return PL_ESYNTAX;
        return 0;
    }
    if (!d->has_type || d->e->kind != PL_KV_STORED)
        return pl_mp_skip(c, n - 1);
    for (uint32_t i = 1; i < n; i++) {
        int rc = 0;
        if (i <= 6) {
            rc = take_field(d, stored[i - 1], c, 0);
        } else if (i == 7) { /* vLLM: the adapter's name; SGLang: a map with the salt */
            pl_mp ahead = *c;
            pl_mp_item v;
            rc = pl_mp_read(&ahead, &v);
            if (rc == 0 && v.type == PL_MP_MAP) {
                *c = ahead;
                rc = take_map(d, c, v.n, 3);
            } else if (rc == 0) {
                rc = take_field(d, F_LORA_NAME, c, 0);
            }
        } else {
            rc = i == 8 ? take_field(d, F_EXTRA, c, 0) : take_tail(d, c, i - 9, &group_passed);
        }
        if (rc)
            return PL_ESYNTAX;
    }
    return 0;
}

/* Every value of the lists is what it must be; finds out whether tokens are pairs, and whether
 * hashes come with local ones. */
static bool check_lists(pl_kv_event *e)
{
    pl_kv_list l = e->hashes;
    pl_mp_item first;
    pl_mp ahead = l.at;
    e->has_locals = l.n && e->kind == PL_KV_STORED && pl_mp_read(&ahead, &first) == 0 &&
                    first.type == PL_MP_MAP;
    for (uint32_t i = 0; i < l.n; i++) {
        uint64_t h;
        pl_mp again = l.at;
        if (!take_hash(&l.at, PL_STR("block_hash"), &h) ||
            (e->has_locals && !take_hash(&again, PL_STR("tokens_hash"), &h)))
            return false;
    }
    l = e->tokens;
    ahead = l.at;
    e->bigram = l.n && pl_mp_read(&ahead, &first) == 0 && first.type == PL_MP_ARRAY;
    for (uint32_t i = 0; i < l.n; i++) {
        uint32_t a, b;
        if (!take_token(&l.at, e->bigram, &a, &b))
            return false;
    }
    return true;
}

int pl_kv_batch_next(pl_kv_batch *b, pl_kv_event *e)
{
    if (b->left == 0)
        return 0;
    b->left--;
    *e = (pl_kv_event){.kind = PL_KV_OTHER, .tier = PL_TIER_DEVICE, .rank = -1, .group = -1};
    draft d = {.e = e};
    pl_mp_item head;
    if (pl_mp_read(&b->at, &head)) {
        b->left = 0;
        return PL_EPROTOCOL;
    }
    int rc = head.type == PL_MP_MAP     ? take_map(&d, &b->at, head.n, 0)
             : head.type == PL_MP_ARRAY ? take_array(&d, &b->at, head.n)
                                        : 0;
    if (rc) { /* cannot be: the batch was walked when it was opened */
        b->left = 0;
        return PL_EPROTOCOL;
    }
    if (!d.has_type)
        return PL_EPROTOCOL;
    if (d.remote)
        e->tier = PL_TIER_EXTERNAL;
    if (e->lora.n)
        e->unnamed_lora = false;
    if (e->kind == PL_KV_OTHER || e->kind == PL_KV_CLEARED)
        return 1;
    return d.bad || !d.has_hashes || !check_lists(e) ? PL_EPROTOCOL : 1;
}

/* --- the batch --- */

static void take_rank(pl_kv_batch *b, const pl_mp_item *v)
{
    if (v->type == PL_MP_UINT && v->u <= PL_KV_RANK_MAX)
        b->rank = (int32_t)v->u;
}

static void take_ts(pl_kv_batch *b, const pl_mp_item *v)
{
    double ts = v->type == PL_MP_REAL ? v->f : v->type == PL_MP_UINT ? (double)v->u : 0;
    b->ts = ts > 0 && ts < 1e15 ? ts : 0; /* also drops what is not a number */
}

int pl_kv_batch_open(pl_kv_batch *b, const void *p, size_t n)
{
    *b = (pl_kv_batch){.rank = -1};
    pl_mp c = pl_mp_of(p, n), whole = c;
    if (pl_mp_skip(&whole, 1) || whole.p != whole.end)
        return PL_ESYNTAX;
    pl_mp_item head, v;
    if (pl_mp_read(&c, &head))
        return PL_ESYNTAX;
    bool events = false;
    if (head.type != PL_MP_ARRAY && head.type != PL_MP_MAP)
        return PL_EPROTOCOL;
    for (uint32_t i = 0; i < head.n; i++) {
        uint32_t place = i;
        if (head.type == PL_MP_MAP) {
            pl_mp_item key;
            if (pl_mp_read(&c, &key) || pl_mp_skip_inside(&c, &key))
                return PL_ESYNTAX;
            pl_str k = key.type == PL_MP_STR ? key.s : PL_STR("");
            place =
                pl_str_eq(k, PL_STR("ts"))       ? 0
                : pl_str_eq(k, PL_STR("events")) ? 1
                : pl_str_eq(k, PL_STR("data_parallel_rank")) || pl_str_eq(k, PL_STR("attn_dp_rank"))
                    ? 2
                    : 3;
        }
        if (pl_mp_read(&c, &v))
            return PL_ESYNTAX;
        if (place == 0)
            take_ts(b, &v);
        if (place == 1 && v.type == PL_MP_ARRAY) {
            events = true;
            b->at = c;
            b->left = v.n;
        }
        if (place == 2)
            take_rank(b, &v);
        if (pl_mp_skip_inside(&c, &v))
            return PL_ESYNTAX;
    }
    return events ? 0 : PL_EPROTOCOL;
}
