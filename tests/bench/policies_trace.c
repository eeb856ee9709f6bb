/* Reads the traces of the comparison (policies_bench.h): Mooncake's rows, one request each with ids
 * of 512-token blocks, and Claude Code sessions in delta form, ids of 64-token blocks. Tokens are
 * made from ids: equal ids, equal tokens. Called by bench_policies.c and its test. */
#include "policies_bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

typedef struct reader {
    const pb_trace_options *o;
    pb_trace *t;
    int rows_cap, sessions_cap;
    int64_t ids_cap;
    const char *path;
    int line;
} reader;

static bool bad(const reader *r, const char *what)
{
    fprintf(stderr, "%s:%d: %s\n", r->path, r->line, what);
    return false;
}

static bool more(void **v, int64_t n, int64_t cap_now, size_t size)
{
    void *p = n < cap_now ? *v : realloc(*v, (size_t)cap_now * 2 * size);
    if (p)
        *v = p;
    return p != NULL;
}

static bool room_for_row(reader *r)
{
    pb_trace *t = r->t;
    if (t->rows_n < r->rows_cap)
        return true;
    if (!more((void **)&t->rows, t->rows_n, r->rows_cap, sizeof *t->rows))
        return bad(r, "out of memory");
    r->rows_cap *= 2;
    return true;
}

static bool add_id(reader *r, uint32_t id)
{
    pb_trace *t = r->t;
    if (t->ids_n == r->ids_cap) {
        if (!more((void **)&t->ids, t->ids_n, r->ids_cap, sizeof *t->ids))
            return bad(r, "out of memory");
        r->ids_cap *= 2;
    }
    t->ids[t->ids_n++] = id;
    return true;
}

static int64_t int_of(const json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);
    return json_is_number(v) ? (int64_t)json_number_value(v) : -1;
}

/* --- mooncake --- */

static bool mooncake_row(reader *r, const json_t *o)
{
    pb_trace *t = r->t;
    const json_t *ids = json_object_get(o, "hash_ids");
    int64_t at = int_of(o, "timestamp"), in = int_of(o, "input_length"),
            out = int_of(o, "output_length");
    size_t n = json_array_size(ids);
    if (at < 0 || in < 1 || out < 0 || (int64_t)n != (in + 511) / 512)
        return bad(r, "not a row of a Mooncake trace");
    in *= r->o->scale;
    if (in > r->o->max_prompt) {
        t->left_out++;
        return true;
    }
    if (!room_for_row(r))
        return false;
    pb_row *row = &t->rows[t->rows_n++];
    /* the first block is everybody's; the second one is where conversations part */
    const json_t *key = json_array_get(ids, n > 1 ? 1 : 0);
    *row = (pb_row){.at_us = at * 1000,
                    .first = t->ids_n,
                    .blocks = (int32_t)n,
                    .input = (int32_t)in,
                    .output = (int32_t)(out > 0 ? out : 1),
                    .session = (int32_t)json_integer_value(key)};
    for (size_t i = 0; i < n; i++)
        if (!add_id(r, (uint32_t)json_integer_value(json_array_get(ids, i))))
            return false;
    return true;
}

/* --- claude code --- */

static bool claude_rows(reader *r, const json_t *rows, int session)
{
    pb_trace *t = r->t;
    int64_t before = 0, before_n = 0; /* the ids of the row before this one in its chain */
    size_t i;
    json_t *o;
    json_array_foreach(rows, i, o)
    {
        const json_t *sub = json_object_get(o, "rows");
        if (sub) { /* the agent waits for its sub-agent */
            if (!claude_rows(r, sub, session))
                return false;
            continue;
        }
        int64_t in = int_of(o, "in"), out = int_of(o, "out"), keep = int_of(o, "keep");
        if (in < 1 || keep < 0 || keep > before_n)
            return bad(r, "not a row of a session");
        int64_t first = t->ids_n;
        for (int64_t k = 0; k < keep; k++)
            if (!add_id(r, t->ids[before + k]))
                return false;
        const json_t *ranges = json_object_get(o, "add");
        for (size_t k = 0; k < json_array_size(ranges); k++) {
            const json_t *range = json_array_get(ranges, k);
            int64_t from = json_integer_value(json_array_get(range, 0)),
                    n = json_integer_value(json_array_get(range, 1));
            for (int64_t j = 0; j < n; j++)
                if (!add_id(r, (uint32_t)(from + j)))
                    return false;
        }
        before = first;
        before_n = t->ids_n - first;
        if (in > r->o->max_prompt) {
            t->left_out++;
            continue;
        }
        if (!room_for_row(r))
            return false;
        double think = json_number_value(json_object_get(o, "think"));
        t->rows[t->rows_n++] =
            (pb_row){.think_us = (int64_t)(fmin(fmax(think, 0), r->o->think_most_s) * 1e6),
                     .first = first,
                     .blocks = (int32_t)before_n,
                     .input = (int32_t)in,
                     .output = (int32_t)(out > 0 ? out : 1),
                     .session = session};
        t->sessions[session].rows++;
    }
    return true;
}

static bool claude_session(reader *r, const json_t *o)
{
    pb_trace *t = r->t;
    if (t->sessions_n == r->sessions_cap) {
        if (!more((void **)&t->sessions, t->sessions_n, r->sessions_cap, sizeof *t->sessions))
            return bad(r, "out of memory");
        r->sessions_cap *= 2;
    }
    int session = t->sessions_n++;
    t->sessions[session] = (pb_session){.first_row = t->rows_n};
    int64_t ids = t->ids_n;
    if (!claude_rows(r, json_object_get(o, "rows"), session))
        return false;
    pb_session *s = &t->sessions[session];
    if (s->rows == 0) {
        t->sessions_n--;
        return true;
    }
    int64_t shared = int_of(o, "tool_tokens") + int_of(o, "system_tokens");
    s->warm_from = t->ids[ids];
    s->warm_to = s->warm_from;
    if (shared > 0)
        s->warm_to += (uint32_t)((double)shared * r->o->warm_share / t->block_tokens);
    return true;
}

/* --- the file --- */

static bool line(reader *r, const char *p, size_t n)
{
    pb_trace *t = r->t;
    json_error_t err;
    json_t *o = json_loadb(p, n, 0, &err);
    if (!o)
        return bad(r, err.text);
    if (r->line == 1) {
        t->closed = json_object_get(o, "rows") != NULL;
        t->block_tokens = t->closed ? (int)int_of(o, "block_size") : 512 * r->o->scale;
    }
    bool ok = t->block_tokens < 1 ? bad(r, "no block size")
              : t->closed         ? claude_session(r, o)
                                  : mooncake_row(r, o);
    json_decref(o);
    return ok;
}

/* The smallest step between two times of an open-loop trace: requests within it come in no order.
 */
static int64_t bucket_of(const pb_trace *t)
{
    int64_t least = INT64_MAX;
    for (int i = 1; i < t->rows_n; i++) {
        int64_t step = t->rows[i].at_us - t->rows[i - 1].at_us;
        if (step > 0 && step < least)
            least = step;
    }
    return least == INT64_MAX ? 0 : least;
}

static char *read_all(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    char *p = NULL;
    *n = 0;
    for (size_t cap = 1 << 16; f; cap *= 2) {
        char *q = realloc(p, cap);
        if (!q)
            break;
        p = q;
        *n += fread(p + *n, 1, cap - *n, f);
        if (*n < cap) {
            fclose(f);
            return p;
        }
    }
    if (f)
        fclose(f);
    free(p);
    fprintf(stderr, "%s: cannot be read\n", path);
    return NULL;
}

static bool read_lines(reader *r, const char *p, size_t n)
{
    pb_trace *t = r->t;
    for (const char *end = p + n; p < end;) {
        const char *nl = memchr(p, '\n', (size_t)(end - p));
        size_t len = (size_t)((nl ? nl : end) - p);
        r->line++;
        if (len && !line(r, p, len))
            return false;
        p += len + 1;
        if (r->o->max_rows && t->rows_n >= r->o->max_rows)
            break;
    }
    return t->rows_n > 0 || bad(r, "no rows");
}

bool pb_trace_read(const char *path, const pb_trace_options *o, pb_trace *t)
{
    size_t n;
    memset(t, 0, sizeof *t);
    char *text = read_all(path, &n);
    if (!text)
        return false;
    reader r = {.o = o, .t = t, .path = path, .rows_cap = 1024, .sessions_cap = 16};
    r.ids_cap = 1 << 16;
    t->rows = malloc((size_t)r.rows_cap * sizeof *t->rows);
    t->sessions = malloc((size_t)r.sessions_cap * sizeof *t->sessions);
    t->ids = malloc((size_t)r.ids_cap * sizeof *t->ids);
    bool ok = t->rows && t->sessions && t->ids ? read_lines(&r, text, n) : bad(&r, "out of memory");
    t->bytes_hash = XXH3_64bits(text, n);
    free(text);
    if (ok)
        t->bucket_us = t->closed ? 0 : bucket_of(t);
    else
        pb_trace_free(t);
    return ok;
}

void pb_trace_free(pb_trace *t)
{
    free(t->rows);
    free(t->sessions);
    free(t->ids);
    memset(t, 0, sizeof *t);
}

/* --- tokens --- */

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* n tokens of the block `id` of a namespace; of a vocabulary of 2^17. */
static void block(uint64_t space, uint64_t id, uint32_t *out, int n)
{
    uint64_t base = mix((space << 40) + id + 0x9e3779b97f4a7c15u);
    for (int j = 0; j < n; j++)
        out[j] = (uint32_t)(((base + (uint64_t)j) * 0xd6e8feb86659fd93u) >> 47);
}

#define EVERYBODY 0xfffffu /* spaces: of global ids, and of what all sessions share */
#define NOBODY    0xffffeu

void pb_trace_tokens(const pb_trace *t, int row, uint32_t *out)
{
    const pb_row *r = &t->rows[row];
    int left = r->input;
    for (int i = 0; left > 0; i++) {
        int n = left < t->block_tokens ? left : t->block_tokens;
        uint64_t space = t->closed ? (uint64_t)r->session : EVERYBODY, id;
        if (i < r->blocks) {
            id = t->ids[r->first + i];
            const pb_session *s = t->closed ? &t->sessions[r->session] : NULL;
            if (s && id >= s->warm_from && id < s->warm_to) {
                space = EVERYBODY;
                id -= s->warm_from;
            }
        } else {
            space = NOBODY;
            id = ((uint64_t)row << 12) + (uint64_t)i % 4096;
        }
        block(space, id, out, n);
        out += n;
        left -= n;
    }
}
