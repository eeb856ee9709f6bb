/* From a request to keys: see keys.h. Called on the loops' threads, once per request; owns nothing,
 * what it makes is in the request's arena. */
#include "kv/keys.h"

#include "base/err.h"
#include "http/json.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

int pl_keys_space_init(pl_keys_space *s, pl_str model, uint32_t block_tokens, bool eagle,
                       pl_str lora, pl_str salt, uint32_t chunk_bytes)
{
    if (chunk_bytes == 0)
        chunk_bytes = PL_KV_CANON_CHUNK;
    if (chunk_bytes < PL_KV_CANON_CHUNK_MIN || chunk_bytes > PL_KV_CANON_CHUNK_MAX)
        return PL_ELIMIT;
    int rc = pl_block_space_init(&s->block, block_tokens, eagle, lora, salt);
    if (rc)
        return rc;
    s->chunk_bytes = chunk_bytes;
    /* block.seed has LoRA and salt in it; their sum could be another pair's, these links not */
    uint64_t seed = XXH3_64bits(model.p, model.n);
    seed = pl_kv_canon_link(seed, XXH3_64bits(lora.p, lora.n));
    seed = pl_kv_canon_link(seed, XXH3_64bits(salt.p, salt.n));
    s->ids_seed = pl_kv_canon_link(seed, (uint64_t)block_tokens << 1 | eagle);
    s->text_seed = pl_kv_canon_link(~seed, chunk_bytes);
    return 0;
}

/* --- token ids --- */

static const char *space(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\t' || *p == '\r'))
        p++;
    return p;
}

/* A natural number of up to 10 digits at p; NULL when there is none or it is no token id. */
static inline const char *natural(const char *p, const char *end, uint32_t *out)
{
    if (end - p >= 8) { /* eight bytes at once: of them, the digits that come first */
        uint64_t v;
        memcpy(&v, p, sizeof v);
        v ^= 0x3030303030303030u;
        uint64_t other = ((v + 0x7676767676767676u) | v) & 0x8080808080808080u;
        unsigned bits = other ? (unsigned)__builtin_ctzll(other) & ~7u : 64;
        if (bits == 0)
            return NULL;
        if (bits < 64) {
            v <<= 64 - bits;
            v = (v * 10 + (v >> 8)) & 0x00ff00ff00ff00ffu;
            v = (v * 100 + (v >> 16)) & 0x0000ffff0000ffffu;
            *out = (uint32_t)(v * 10000 + (v >> 32));
            return p + bits / 8;
        }
    }
    uint64_t v = 0;
    const char *start = p;
    while (p < end && *p >= '0' && *p <= '9' && p - start < 10)
        v = v * 10 + (uint64_t)(*p++ - '0');
    if (p == start || v > UINT32_MAX)
        return NULL;
    *out = (uint32_t)v;
    return p;
}

size_t pl_keys_parse_ids(pl_str array, uint32_t *out, size_t cap)
{
    const char *p = array.p, *end = p + array.n;
    size_t n = 0;
    p = space(p, end);
    if (p == end || *p++ != '[')
        return 0;
    while (n < cap) {
        p = space(p, end);
        uint32_t id;
        p = natural(p, end, &id);
        if (!p)
            break;
        p = space(p, end);
        if (p == end || (*p != ',' && *p != ']'))
            break; /* 1.5, 1e3 */
        out[n++] = id;
        if (*p++ == ']')
            break;
    }
    return n;
}

/* An array's first element; ABSENT when it has none or is no array. */
static pl_member first_of(const pl_scan *s, pl_str array)
{
    pl_json j;
    pl_member m = {.type = PL_JSON_ABSENT};
    pl_json_init(&j, array, PL_JSON_DEPTH_MAX, false);
    pl_json_know(&j, s);
    if (pl_json_enter(&j, '[') == 0 && pl_json_item(&j) > 0)
        pl_json_value(&j, &m);
    return m;
}

/* The list of ids that a member gives, the first of several; ABSENT when it gives none. *batch is
 * how many there are. */
static pl_member ids_in(const pl_scan *s, const pl_member *m, uint32_t *batch)
{
    pl_member list = *m;
    *batch = 1;
    for (int level = 0; level < 2 && list.type == PL_JSON_ARRAY; level++) {
        pl_member first = first_of(s, list.raw);
        if (first.type == PL_JSON_NUMBER)
            return list;
        *batch = list.elements;
        list = first;
    }
    return (pl_member){.type = PL_JSON_ABSENT};
}

int pl_keys_of_tokens(const pl_keys_space *s, const uint32_t *tokens, size_t n, pl_arena *a,
                      pl_keys *out)
{
    const bool ones = s->block.block_tokens == 1;
    const size_t group = ones ? PL_KEYS_GROUP : 1, most = ones ? PL_KEYS_ONES : PL_KEYS_MAX;
    *out = (pl_keys){.kind = PL_KEYS_TOKENS,
                     .tokens = tokens,
                     .tokens_n = n,
                     .unit = s->block.block_tokens * (uint32_t)group,
                     .batch = 1};
    size_t blocks = pl_block_count(&s->block, n);
    if (blocks > most) {
        blocks = most;
        n = (size_t)s->block.block_tokens * (blocks - 1) + s->block.window_tokens;
    }
    if (blocks == 0)
        return 0;
    size_t units = blocks / group;
    uint64_t *local = pl_arena_alloc(a, (blocks + units) * sizeof *local), *key = local + blocks;
    if (!local)
        return PL_ENOMEM;
    if (!ones)
        pl_block_hash_linked(&s->block, tokens, blocks, local, s->ids_seed, key);
    else if (pl_block_hash(&s->block, tokens, n, local, NULL, blocks) < 0)
        return PL_EINVALID;
    uint64_t chain = s->ids_seed;
    for (size_t i = 0; ones && i < units; i++)
        key[i] = chain = pl_kv_canon_link(
            chain, XXH3_64bits(local + i * PL_KEYS_GROUP, PL_KEYS_GROUP * sizeof *local));
    out->local = local;
    out->local_n = blocks;
    out->key = key;
    out->n = units;
    return 0;
}

/* --- text --- */

static bool has(const pl_scan *s, pl_member_id id)
{
    const pl_member *m = &s->members[id];
    return m->type > PL_JSON_FALSE && !(m->type == PL_JSON_ARRAY && m->elements == 0);
}

/* A prompt by itself: a string, or the first of several. */
static void prompt(const pl_member *m, pl_kv_canon *c)
{
    pl_member text = m->type == PL_JSON_ARRAY ? first_of(c->scan, m->raw) : *m;
    pl_kv_canon_put_tag(c, PL_KV_CANON_TEXT);
    if (text.type == PL_JSON_STRING)
        pl_kv_canon_string(c, text.raw, text.escaped);
    else
        pl_kv_canon_value(c, text.raw);
}

static void messages(const pl_member *m, size_t max, pl_kv_canon *c)
{
    pl_json j;
    if (m->type != PL_JSON_ARRAY) {
        pl_kv_canon_said(c, PL_STR("user"), m); /* the Responses API's short form */
        return;
    }
    pl_json_init(&j, m->raw, PL_JSON_DEPTH_MAX, false);
    pl_json_know(&j, c->scan);
    if (pl_json_enter(&j, '[') == 0)
        for (size_t i = 0; i < max && pl_json_item(&j) > 0; i++)
            pl_kv_canon_message(c, &j);
}

void pl_keys_canonical(const pl_scan *s, size_t max_messages, pl_kv_canon *c)
{
    const pl_member *m = s->members;
    c->scan = s;
    static const struct {
        pl_member_id id;
        char name;
    } before[] = {{PL_MEMBER_TOOLS, 't'}, {PL_MEMBER_DOCUMENTS, 'd'}};
    for (size_t i = 0; i < sizeof before / sizeof before[0]; i++) {
        if (!has(s, before[i].id))
            continue;
        pl_kv_canon_put_tag(c, PL_KV_CANON_KEY);
        pl_kv_canon_put(c, &before[i].name, 1);
        pl_kv_canon_value(c, m[before[i].id].raw);
    }
    if (has(s, PL_MEMBER_SYSTEM))
        pl_kv_canon_said(c, PL_STR("system"), &m[PL_MEMBER_SYSTEM]);
    if (has(s, PL_MEMBER_INSTRUCTIONS))
        pl_kv_canon_said(c, PL_STR("system"), &m[PL_MEMBER_INSTRUCTIONS]);
    if (has(s, PL_MEMBER_MESSAGES))
        messages(&m[PL_MEMBER_MESSAGES], max_messages, c);
    else if (has(s, PL_MEMBER_PROMPT))
        prompt(&m[PL_MEMBER_PROMPT], c);
    else if (has(s, PL_MEMBER_TEXT))
        prompt(&m[PL_MEMBER_TEXT], c);
    else if (has(s, PL_MEMBER_INPUT))
        messages(&m[PL_MEMBER_INPUT], max_messages, c);
}

static int of_text(const pl_keys_space *s, const pl_scan *scan, pl_arena *a, pl_keys *out)
{
    static const pl_member_id ids[] = {
        PL_MEMBER_TOOLS,    PL_MEMBER_DOCUMENTS, PL_MEMBER_SYSTEM, PL_MEMBER_INSTRUCTIONS,
        PL_MEMBER_MESSAGES, PL_MEMBER_PROMPT,    PL_MEMBER_TEXT,   PL_MEMBER_INPUT};
    size_t bytes = 0;
    for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++)
        bytes += has(scan, ids[i]) ? scan->members[ids[i]].raw.n : 0;
    if (bytes == 0)
        return 0;
    size_t cap = (bytes + PL_KV_CANON_SLACK) / s->chunk_bytes;
    if (cap > PL_KEYS_MAX)
        cap = PL_KEYS_MAX;
    uint64_t *key = pl_arena_alloc(a, (cap ? cap : 1) * sizeof *key);
    if (!key)
        return PL_ENOMEM;
    pl_kv_canon c;
    pl_kv_canon_init(&c, s->text_seed, s->chunk_bytes, key, cap);
    pl_keys_canonical(scan, SIZE_MAX, &c);
    *out = (pl_keys){.kind = PL_KEYS_TEXT,
                     .n = c.n,
                     .key = key,
                     .bytes = c.bytes,
                     .unit = s->chunk_bytes,
                     .batch = 1};
    const pl_member *p =
        &scan->members[has(scan, PL_MEMBER_PROMPT) ? PL_MEMBER_PROMPT : PL_MEMBER_TEXT];
    if (!has(scan, PL_MEMBER_MESSAGES) && p->type == PL_JSON_ARRAY)
        out->batch = p->elements;
    return 0;
}

int pl_keys_of_request(const pl_keys_space *s, const pl_scan *scan, pl_arena *a, pl_keys *out)
{
    *out = (pl_keys){.kind = PL_KEYS_NONE};
    const pl_member *m = scan->members;
    pl_member data = {.type = PL_JSON_ABSENT}, ids = data;
    uint32_t batch = 1;
    if (m[PL_MEMBER_NVEXT].type == PL_JSON_OBJECT)
        data = pl_object_find(m[PL_MEMBER_NVEXT].raw, PL_STR("token_data"));
    const pl_member *from[] = {&data, &m[PL_MEMBER_INPUT_IDS], &m[PL_MEMBER_PROMPT],
                               &m[PL_MEMBER_INPUT]};
    for (size_t i = 0; i < sizeof from / sizeof from[0] && ids.type == PL_JSON_ABSENT; i++)
        if (from[i]->type == PL_JSON_ARRAY)
            ids = ids_in(scan, from[i], &batch);
    if (ids.type == PL_JSON_ABSENT)
        return of_text(s, scan, a, out);
    uint32_t *tokens = pl_arena_alloc(a, ids.elements * sizeof *tokens);
    if (!tokens)
        return PL_ENOMEM;
    int rc = pl_keys_of_tokens(s, tokens, pl_keys_parse_ids(ids.raw, tokens, ids.elements), a, out);
    out->batch = batch;
    return rc;
}

/* --- tokens of units and back --- */

double pl_keys_tokens(const pl_keys *k, size_t units, double prompt_tokens)
{
    double tokens = (double)units * k->unit;
    if (k->kind == PL_KEYS_TEXT)
        tokens = k->bytes ? tokens / (double)k->bytes * prompt_tokens : 0;
    return tokens < prompt_tokens ? tokens : prompt_tokens;
}

size_t pl_keys_held(const pl_keys *k, size_t predicted, double cached_tokens, double prompt_tokens)
{
    double said = pl_keys_tokens(k, predicted, prompt_tokens);
    double unit = pl_keys_tokens(k, 1, prompt_tokens);
    double slack = unit + (k->kind == PL_KEYS_TEXT ? said / 8 : 0);
    if (!(unit > 0) || !(cached_tokens + slack < said))
        return k->n;
    double units = cached_tokens > 0 ? cached_tokens / unit : 0;
    return units < (double)k->n ? (size_t)units : k->n;
}
