/* Bodies of inference requests: from JSON to token ids in the simulated engine. Called by front.c
 * and front_admin.c (/tokenize) on the front's thread; the JSON stays the caller's. Every prompt is
 * tokenised into front->scratch and submitted from there, so none is held twice.
 *
 * A chat becomes, for each message: its role's mark, the name (mark, text, mark) if any, the text
 * of its content, its tool calls, the end mark; before all, the declarations of tools; after all,
 * the assistant's mark. See token.h for why marks keep a conversation's history findable in the
 * cache. */
#include "engine/front_call.h"

#include <string.h>

#include "base/err.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { MOST_PARTS = 2048, MOST_CHOICES = 128 };

static pl_str str_of(const json_t *v)
{
    return json_is_string(v) ? (pl_str){json_string_value(v), json_string_length(v)}
                             : (pl_str){NULL, 0};
}

/* --- prompts --- */

static int add_json(pl_tokens *t, pl_mark mark, const json_t *v)
{
    char *text = json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY);
    int rc = text ? pl_tokens_mark(t, mark) : PL_ENOMEM;
    if (rc == 0)
        rc = pl_tokens_text(t, pl_str_c(text));
    if (rc == 0)
        rc = pl_tokens_mark(t, PL_MARK_TEXT);
    free(text);
    return rc;
}

/* A string, or a list of parts: those with text count as text, others as what they are. */
static int add_content(pl_tokens *t, const json_t *content)
{
    if (json_is_string(content))
        return pl_tokens_text(t, str_of(content));
    if (!json_is_array(content))
        return 0;
    int rc = 0;
    size_t i;
    json_t *part;
    json_array_foreach(content, i, part)
    {
        const json_t *text = json_object_get(part, "text");
        if (json_is_string(part))
            text = part;
        if (json_is_string(text))
            rc = pl_tokens_text(t, str_of(text));
        else
            rc = add_json(t, PL_MARK_MEDIA, part);
        if (rc == 0 && i + 1 < json_array_size(content))
            rc = pl_tokens_mark(t, PL_MARK_TEXT);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static int add_role(pl_tokens *t, pl_str role)
{
    static const struct {
        const char *name;
        pl_mark mark;
    } known[] = {{"system", PL_MARK_SYSTEM},
                 {"developer", PL_MARK_SYSTEM},
                 {"user", PL_MARK_USER},
                 {"assistant", PL_MARK_ASSISTANT},
                 {"tool", PL_MARK_TOOL}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (pl_str_eq(role, pl_str_c(known[i].name)))
            return pl_tokens_mark(t, known[i].mark);
    int rc = pl_tokens_mark(t, PL_MARK_ROLE);
    if (rc == 0)
        rc = pl_tokens_text(t, role);
    return rc ? rc : pl_tokens_mark(t, PL_MARK_TEXT);
}

static int add_message(pl_tokens *t, pl_str role, const json_t *message)
{
    int rc = add_role(t, role);
    pl_str name = str_of(json_object_get(message, "name"));
    if (rc == 0 && name.n) {
        rc = pl_tokens_mark(t, PL_MARK_NAME);
        if (rc == 0)
            rc = pl_tokens_text(t, name);
        if (rc == 0)
            rc = pl_tokens_mark(t, PL_MARK_TEXT);
    }
    const json_t *calls = json_object_get(message, "tool_calls");
    if (rc == 0)
        rc = add_content(t, json_object_get(message, "content"));
    if (rc == 0 && json_array_size(calls))
        rc = add_json(t, PL_MARK_CALL, calls);
    return rc ? rc : pl_tokens_mark(t, PL_MARK_END);
}

static int add_system(pl_tokens *t, const json_t *content)
{
    if (!content || json_is_null(content))
        return 0;
    int rc = pl_tokens_mark(t, PL_MARK_SYSTEM);
    if (rc == 0)
        rc = add_content(t, content);
    return rc ? rc : pl_tokens_mark(t, PL_MARK_END);
}

static int add_tools(pl_tokens *t, const json_t *tools)
{
    return json_array_size(tools) ? add_json(t, PL_MARK_TOOLS, tools) : 0;
}

/* `messages`, or the items of a Responses input. */
static int add_messages(pl_tokens *t, const json_t *list, const char *what, pl_errbuf *eb)
{
    if (json_array_size(list) == 0)
        return pl_fail(eb, PL_EINVALID, "%s must be a non-empty list", what);
    size_t i;
    json_t *m;
    json_array_foreach(list, i, m)
    {
        pl_str role = str_of(json_object_get(m, "role"));
        int rc;
        if (role.n)
            rc = add_message(t, role, m);
        else if (strcmp(what, "input") == 0 && json_is_object(m))
            rc = add_json(t, PL_MARK_CALL, m); /* a tool call or its result */
        else
            return pl_fail(eb, PL_EINVALID, "%s[%zu] has no role", what, i);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* later: it follows what its session said, so that what stands before all messages is there. */
static int chat_prompt(pl_tokens *t, const json_t *body, bool later, bool generation, pl_errbuf *eb)
{
    int rc = later ? 0 : add_tools(t, json_object_get(body, "tools"));
    if (rc == 0 && !later)
        rc = add_system(t, json_object_get(body, "system")); /* Anthropic's place for it */
    if (rc == 0)
        rc = add_messages(t, json_object_get(body, "messages"), "messages", eb);
    return rc == 0 && generation ? pl_tokens_mark(t, PL_MARK_ASSISTANT) : rc;
}

static int responses_prompt(pl_tokens *t, const json_t *body, pl_errbuf *eb)
{
    const json_t *input = json_object_get(body, "input");
    if (json_is_string(json_object_get(body, "previous_response_id")))
        return pl_fail(eb, PL_EINVALID,
                       "previous_response_id is not supported: no response is "
                       "stored");
    int rc = add_tools(t, json_object_get(body, "tools"));
    if (rc == 0)
        rc = add_system(t, json_object_get(body, "instructions"));
    if (rc == 0 && json_is_string(input)) {
        rc = pl_tokens_mark(t, PL_MARK_USER);
        if (rc == 0)
            rc = pl_tokens_text(t, str_of(input));
        if (rc == 0)
            rc = pl_tokens_mark(t, PL_MARK_END);
    } else if (rc == 0) {
        rc = add_messages(t, input, "input", eb);
    }
    return rc ? rc : pl_tokens_mark(t, PL_MARK_ASSISTANT);
}

static int add_ids(pl_tokens *t, const json_t *list, pl_errbuf *eb)
{
    size_t i;
    json_t *v;
    json_array_foreach(list, i, v)
    {
        json_int_t id = json_is_integer(v) ? json_integer_value(v) : -1;
        if (id < 0 || id > UINT32_MAX)
            return pl_fail(eb, PL_EINVALID, "token ids must be numbers from 0 to 4294967295");
        int rc = pl_tokens_add(t, (uint32_t)id);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* --- limits and options --- */

/* An integer member: PL_ENOTFOUND when absent or null. */
static int integer(const json_t *body, const char *name, int64_t low, int64_t high, int64_t *out,
                   pl_errbuf *eb)
{
    const json_t *v = json_object_get(body, name);
    if (!v || json_is_null(v))
        return PL_ENOTFOUND;
    if (!json_is_integer(v) || json_integer_value(v) < low || json_integer_value(v) > high)
        return pl_fail(eb, PL_EINVALID, "%s must be an integer from %lld to %lld", name,
                       (long long)low, (long long)high);
    *out = json_integer_value(v);
    return 0;
}

/* The client's limit of output tokens, by whatever name the API has for it; 0: none. */
static int output_limit(pl_front_call *c, const json_t *body, int64_t *want, pl_errbuf *eb)
{
    static const char *const names[] = {"max_completion_tokens", "max_tokens", "max_output_tokens",
                                        "max_new_tokens"};
    *want = 0;
    const json_t *sampling = json_object_get(body, "sampling_params");
    const json_t *from = c->api == PL_API_GENERATE ? sampling : body;
    if (c->api == PL_API_GENERATE && json_is_array(sampling))
        from = json_array_get(sampling, 0);
    for (size_t i = 0; i < sizeof names / sizeof *names && !*want; i++) {
        int rc = integer(from, names[i], 1, INT32_MAX, want, eb);
        if (rc != 0 && rc != PL_ENOTFOUND)
            return rc;
    }
    if (!*want && c->api == PL_API_MESSAGES)
        return pl_fail(eb, PL_EINVALID, "max_tokens: Field required");
    return 0;
}

/* The rank that the request names, else the next in turn. The header counts at the OpenAI paths and
 * wins there; the members are SGLang's, the second one its older name. */
static int choose_rank(pl_front_call *c, const json_t *body, pl_errbuf *eb)
{
    pl_front *f = c->front;
    pl_str header = c->api == PL_API_GENERATE
                        ? (pl_str){NULL, 0}
                        : pl_head_find(&c->x->head, PL_STR("x-data-parallel-rank"));
    int64_t rank = -1;
    int rc = PL_ENOTFOUND;
    if (header.p) {
        uint64_t v;
        rc = pl_str_u64(header, INT32_MAX, &v);
        if (rc != 0)
            return pl_fail(eb, PL_EINVALID, "X-Data-Parallel-Rank must be an integer, 0 or more");
        rank = (int64_t)v;
    } else if (!f->vllm) {
        rc = integer(body, "routed_dp_rank", 0, INT32_MAX, &rank, eb);
        if (rc == PL_ENOTFOUND)
            rc = integer(body, "data_parallel_rank", 0, INT32_MAX, &rank, eb);
    }
    if (rc == PL_ENOTFOUND)
        rank = f->next_rank++ % (unsigned)f->ranks_n;
    else if (rc != 0)
        return rc;
    if (rank >= f->ranks_n)
        return pl_fail(eb, PL_EINVALID, "data parallel rank %lld is out of range [0, %d)",
                       (long long)rank, f->ranks_n);
    c->rank = (int)rank;
    return 0;
}

typedef struct shape { /* what is the same for all prompts of a call */
    int64_t want;      /* asked output tokens; 0: not said */
    int priority;
    int64_t retain_us;
    uint64_t seed;
    bool generates;
} shape;

/* extra_args.retention_seconds, where it is a positive number; anything else is no wish. */
static int64_t retention(const json_t *body)
{
    double seconds = json_number_value(
        json_object_get(json_object_get(body, "extra_args"), "retention_seconds"));
    if (!(seconds > 0))
        return 0;
    return seconds < 1e-6 ? 1 : seconds < 1e9 ? (int64_t)(seconds * 1e6) : 1000000000000000;
}

/* Submits front->scratch, once for each choice. */
static int submit(pl_front_call *c, const shape *s, int *status, pl_errbuf *eb)
{
    pl_front *f = c->front;
    pl_tokens *t = &f->scratch;
    int64_t room = f->o->sim.pool_tokens - f->o->sim.pool_tokens % f->o->sim.page_tokens;
    int said = c->slot ? pl_sim_slot_tokens(c->slot) : 0;
    int64_t prompt = (int64_t)said + t->n;
    if (t->n == 0)
        return pl_fail(eb, PL_EINVALID, "the prompt is empty");
    int64_t want = !s->generates ? 0 : s->want ? s->want : f->o->default_output_tokens;
    if (s->generates && !s->want && prompt < room && prompt + want > room)
        want = room - prompt;
    if (prompt + want > room || (s->generates && prompt >= room))
        return pl_fail(
            eb, PL_EINVALID,
            "This model's maximum context length is %lld tokens. However, you requested "
            "%lld tokens (%lld in the messages, %lld in the completion). Please reduce the "
            "length of the messages or completion.",
            (long long)room, (long long)(prompt + want), (long long)prompt, (long long)want);
    uint64_t seed = XXH3_64bits_withSeed(t->v, (size_t)t->n * sizeof *t->v,
                                         f->o->seed + ((uint64_t)said << 32)) ^
                    s->seed * 0x9e3779b97f4a7c15u;
    for (int k = 0; k < c->choices; k++) {
        int rc = pl_front_call_submit(c, &(pl_sim_ask){.output_tokens = (int)want,
                                                       .priority = s->priority,
                                                       .out_seed = seed + (uint64_t)k,
                                                       .retain_us = s->retain_us});
        if (rc == PL_EBUSY) {
            *status = 503;
            return pl_fail(eb, rc, "The request queue is full.");
        }
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* Text, token ids, a list of texts or a list of lists of token ids. */
static int submit_prompts(pl_front_call *c, const shape *s, const json_t *prompt, const char *name,
                          int *status, pl_errbuf *eb)
{
    pl_tokens *t = &c->front->scratch;
    const json_t *first = json_array_get(prompt, 0);
    bool one = json_is_string(prompt) || json_is_integer(first);
    size_t n = one ? 1 : json_array_size(prompt);
    if (n == 0 || n > MOST_PARTS)
        return pl_fail(eb, PL_EINVALID,
                       "%s must be text, token ids, or a list of at most %d of these", name,
                       MOST_PARTS);
    c->parts_max = (int)n * c->choices;
    for (size_t i = 0; i < n; i++) {
        const json_t *v = one ? prompt : json_array_get(prompt, i);
        t->n = 0;
        int rc = PL_EINVALID;
        if (json_is_string(v))
            rc = pl_tokens_text(t, str_of(v));
        else if (json_is_array(v))
            rc = add_ids(t, v, eb);
        else
            pl_fail(eb, rc, "%s[%zu] is neither text nor token ids", name, i);
        if (rc == 0)
            rc = submit(c, s, status, eb);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* Rerank, score: each document after the query. */
static int submit_pairs(pl_front_call *c, const shape *s, const json_t *query, const json_t *list,
                        const char *names, int *status, pl_errbuf *eb)
{
    pl_tokens *t = &c->front->scratch;
    size_t n = json_is_string(list) ? 1 : json_array_size(list);
    size_t queries = json_is_array(query) ? json_array_size(query) : 1;
    if (n == 0 || n > MOST_PARTS || (queries != 1 && queries != n))
        return pl_fail(eb, PL_EINVALID, "%s: text and a list of 1 to %d texts are needed", names,
                       MOST_PARTS);
    c->parts_max = (int)n * c->choices;
    for (size_t i = 0; i < n; i++) {
        const json_t *q =
            json_is_array(query) ? json_array_get(query, queries == 1 ? 0 : i) : query;
        const json_t *d = json_is_string(list) ? list : json_array_get(list, i);
        if (json_is_object(d))
            d = json_object_get(d, "text");
        if (!json_is_string(q) || !json_is_string(d))
            return pl_fail(eb, PL_EINVALID, "%s: only text is understood", names);
        t->n = 0;
        int rc = pl_tokens_text(t, str_of(q));
        if (rc == 0)
            rc = pl_tokens_mark(t, PL_MARK_TEXT);
        if (rc == 0)
            rc = pl_tokens_text(t, str_of(d));
        if (rc == 0)
            rc = submit(c, s, status, eb);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static int submit_all(pl_front_call *c, const shape *s, const json_t *body, int *status,
                      pl_errbuf *eb)
{
    pl_tokens *t = &c->front->scratch;
    const json_t *list, *query;
    int rc = 0;
    t->n = 0;
    c->parts_max = c->choices;
    switch (c->api) {
    case PL_API_CHAT:
    case PL_API_MESSAGES:
        rc = chat_prompt(t, body, c->slot && pl_sim_slot_tokens(c->slot) > 0, true, eb);
        return rc ? rc : submit(c, s, status, eb);
    case PL_API_RESPONSES:
        rc = responses_prompt(t, body, eb);
        return rc ? rc : submit(c, s, status, eb);
    case PL_API_COMPLETIONS:
        return submit_prompts(c, s, json_object_get(body, "prompt"), "prompt", status, eb);
    case PL_API_GENERATE:
        list = json_object_get(body, "input_ids");
        query = json_object_get(body, "text");
        c->batch = list ? json_is_array(json_array_get(list, 0)) : json_is_array(query);
        return list ? submit_prompts(c, s, list, "input_ids", status, eb)
                    : submit_prompts(c, s, query, "text", status, eb);
    case PL_API_RERANK:
        list = json_object_get(body, "documents");
        rc = submit_pairs(c, s, json_object_get(body, "query"), list, "query and documents", status,
                          eb);
        if (rc == 0)
            c->documents = json_incref((json_t *)list);
        return rc;
    case PL_API_SCORE:
        query = json_object_get(body, "query");
        c->items = query != NULL;
        if (query)
            return submit_pairs(c, s, query, json_object_get(body, "items"), "query and items",
                                status, eb);
        return submit_pairs(c, s, json_object_get(body, "text_1"), json_object_get(body, "text_2"),
                            "text_1 and text_2", status, eb);
    default: /* embeddings, classify */
        return submit_prompts(c, s, json_object_get(body, "input"), "input", status, eb);
    }
}

int pl_front_call_parse(pl_front_call *c, json_t *body, int *status, pl_errbuf *eb)
{
    pl_front *f = c->front;
    *status = 400;
    snprintf(eb->text, sizeof eb->text, "%s", pl_strerror(PL_ENOMEM));
    pl_str model = str_of(json_object_get(body, "model"));
    c->model = f->o->models[0];
    if (model.n && c->api != PL_API_GENERATE) {
        int i = 0;
        while (i < f->o->models_n && !pl_str_eq(model, f->o->models[i]))
            i++;
        if (i == f->o->models_n) {
            *status = 404;
            return pl_fail(eb, PL_ENOTFOUND, "The model `%.*s` does not exist.",
                           PL_FMT(pl_str_clip(model, 200)));
        }
        c->model = f->o->models[i];
    }
    pl_str rid = str_of(json_object_get(body, f->vllm ? "request_id" : "rid"));
    c->id = rid.n ? pl_arena_str(&c->x->arena, rid) : c->request_id;
    if (!c->id.p)
        return PL_ENOMEM;

    shape s = {.generates = c->api <= PL_API_MESSAGES || c->api == PL_API_GENERATE};
    int64_t n = 1, v = 0;
    c->stream = s.generates && json_is_true(json_object_get(body, "stream"));
    const json_t *so = json_object_get(body, "stream_options");
    c->include_usage = json_is_true(json_object_get(so, "include_usage"));
    int rc = s.generates ? output_limit(c, body, &s.want, eb) : 0;
    c->limited = s.want != 0;
    if (rc == 0 && (c->api == PL_API_CHAT || c->api == PL_API_COMPLETIONS))
        rc = integer(body, "n", 1, MOST_CHOICES, &n, eb);
    c->choices = (int)n;
    if (rc == 0 || rc == PL_ENOTFOUND)
        rc = integer(body, "priority", INT32_MIN, INT32_MAX, &v, eb);
    if (f->vllm) /* lower is earlier; SGLang: higher */
        v = v == INT32_MIN ? INT32_MAX : -v;
    s.priority = (int)v;
    v = 0;
    if (rc == 0 || rc == PL_ENOTFOUND)
        rc = integer(body, "seed", INT64_MIN, INT64_MAX, &v, eb);
    s.seed = (uint64_t)v;
    v = 64;
    if ((rc == 0 || rc == PL_ENOTFOUND) && c->api == PL_API_EMBEDDINGS)
        rc = integer(body, "dimensions", 1, 4096, &v, eb);
    c->dimensions = (int)v;
    c->base64 = pl_str_eq(str_of(json_object_get(body, "encoding_format")), PL_STR("base64"));
    if (rc != 0 && rc != PL_ENOTFOUND)
        return rc;
    s.retain_us = retention(body);
    rc = choose_rank(c, body, eb);
    if (rc == 0)
        rc = pl_front_call_session(c, body, eb);
    if (rc != 0)
        return rc;
    rc = submit_all(c, &s, body, status, eb);
    if (rc == PL_ENOMEM)
        *status = 500;
    return rc;
}

int pl_front_tokenize(pl_front *f, json_t *body, pl_errbuf *eb)
{
    pl_tokens *t = &f->scratch;
    const json_t *prompt = json_object_get(body, "prompt");
    t->n = 0;
    snprintf(eb->text, sizeof eb->text, "%s", pl_strerror(PL_ENOMEM));
    if (json_is_string(prompt))
        return pl_tokens_text(t, str_of(prompt));
    if (json_is_array(json_object_get(body, "messages")))
        return chat_prompt(t, body, false,
                           !json_is_false(json_object_get(body, "add_generation_prompt")), eb);
    return pl_fail(eb, PL_EINVALID, "prompt (text) or messages is needed");
}
