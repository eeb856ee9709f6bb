/* Following a reply to a session's turn: see history.h. Called by the proxy on a loop's thread with
 * each event of a stream, or with the whole answer; a pl_reply belongs to its turn. Answers were
 * not validated before, so everything here takes any bytes; what is not understood makes the reply
 * unreadable, which costs the proof and nothing else.
 *
 * Nothing of the text is kept. A text in pieces goes through a streaming hash (a chat's) or a chain
 * (a prompt's continuation). SGLang's /generate tells the whole text so far in each event: only the
 * last one is digested, and the first one's text must be its beginning, else the events were
 * increments. */
#include "session/history.h"

#include <stdlib.h>

#include <xxhash.h>

#include "http/json.h"

enum { CALLS_MAX = 64 };

/* Texts of an assistant's message that come in pieces, by name. */
enum { CONTENT, REFUSAL, REASONING_CONTENT, REASONING, TEXTS };
static const pl_str text_names[TEXTS] = {PL_STR_INIT("content"), PL_STR_INIT("refusal"),
                                         PL_STR_INIT("reasoning_content"),
                                         PL_STR_INIT("reasoning")};

typedef struct tool_call {
    bool seen, has_id, has_name;
    pl_digest id, name;
    XXH3_state_t *arguments; /* NULL: none were given */
} tool_call;

struct pl_reply {
    enum pl_api_kind api;
    bool finished;
    bool unreadable;   /* nothing is to be concluded from it */
    bool hidden_token; /* the engine holds an end token that a text does not show */
    bool aborted, poisoned;
    bool told_why; /* the engine has said why it refuses */
    /* chat: a message in pieces, or a whole one */
    XXH3_state_t *texts[TEXTS]; /* NULL: empty */
    tool_call *calls;
    int calls_n;
    bool whole;
    pl_digest message;
    /* completions, /generate */
    pl_chain text, ids;
    bool has_text, has_ids;
    pl_chain first; /* /generate: the first event's text */
};

pl_reply *pl_reply_new(enum pl_api_kind api)
{
    pl_reply *r = calloc(1, sizeof *r);
    if (r)
        r->api = api;
    return r;
}

void pl_reply_free(pl_reply *r)
{
    if (!r)
        return;
    for (int i = 0; i < TEXTS; i++)
        XXH3_freeState(r->texts[i]);
    for (int i = 0; i < r->calls_n; i++)
        XXH3_freeState(r->calls[i].arguments);
    free(r->calls);
    free(r);
}

static bool is(const pl_json_name *name, const char *plain)
{
    return pl_json_name_is(name, pl_str_c(plain));
}

static pl_str inside(const pl_member *m)
{
    return (pl_str){m->raw.p + 1, m->raw.n - 2};
}

/* Is it a string, and this one? */
static bool says(const pl_member *m, const char *plain)
{
    if (m->type != PL_JSON_STRING)
        return false;
    pl_json_name text = {inside(m), m->escaped};
    return pl_json_name_is(&text, pl_str_c(plain));
}

/* null, "" or [], as engines fill what they do not use. */
static bool unused(const pl_member *m)
{
    return m->type == PL_JSON_NULL || (m->type == PL_JSON_STRING && m->raw.n == 2) ||
           (m->type == PL_JSON_ARRAY && m->elements == 0);
}

/* A string's bytes behind what *state has; made when it is NULL. */
static void add_text(pl_reply *r, XXH3_state_t **state, const pl_member *m)
{
    if (m->type != PL_JSON_STRING) {
        r->unreadable |= m->type != PL_JSON_NULL;
        return;
    }
    if (!*state && (*state = XXH3_createState()) != NULL)
        XXH3_128bits_reset(*state);
    char small[256], *out = small;
    pl_str s = inside(m);
    if (m->escaped && s.n > sizeof small)
        out = malloc(s.n);
    if (!*state || !out) {
        r->unreadable = true;
        return;
    }
    if (m->escaped)
        s = (pl_str){out, pl_json_unescape(s, out)};
    XXH3_128bits_update(*state, s.p, s.n);
    if (out != small)
        free(out);
}

static pl_digest string_of(const XXH3_state_t *state)
{
    XXH128_hash_t h = XXH3_128bits_digest(state);
    return pl_canon_hashed((pl_digest){h.low64, h.high64});
}

/* --- refusals --- */

/* Does a message of the engine (raw JSON) say that the session is in no state to go on? */
static bool says_poisoned(pl_str raw)
{
    static const char *const signs[] = {"already has an active request",
                                        "Invalid request session id", "Invalid request: session id",
                                        "is appending to a request that hasn"};
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++)
        if (memmem(raw.p, raw.n, signs[i], strlen(signs[i])))
            return true;
    return false;
}

static void read_error(pl_reply *r, const pl_member *m)
{
    if (m->type == PL_JSON_ABSENT || m->type == PL_JSON_NULL)
        return;
    r->unreadable = true;
    r->poisoned |= says_poisoned(m->raw);
}

/* --- chat --- */

static tool_call *call_at(pl_reply *r, const pl_member *index)
{
    double v;
    if (pl_member_number(index, &v) != 0 || !(v >= 0 && v < CALLS_MAX) || v != (double)(int)v)
        return NULL;
    int i = (int)v;
    if (i >= r->calls_n) {
        tool_call *more = realloc(r->calls, ((size_t)i + 1) * sizeof *more);
        if (!more)
            return NULL;
        memset(&more[r->calls_n], 0, ((size_t)i + 1 - (size_t)r->calls_n) * sizeof *more);
        r->calls = more;
        r->calls_n = i + 1;
    }
    r->calls[i].seen = true;
    return &r->calls[i];
}

/* An id or a name, which comes once; later ones must be empty. */
static void take_once(pl_reply *r, const pl_member *m, bool *has, pl_digest *d)
{
    pl_json j;
    if (m->type == PL_JSON_ABSENT || m->type == PL_JSON_NULL || (*has && unused(m)))
        return;
    pl_json_init(&j, m->raw, 1, false);
    if (*has || m->type != PL_JSON_STRING || !pl_canon_value(&j, false, d))
        r->unreadable = true;
    *has = true;
}

static void read_function(pl_reply *r, tool_call *c, const pl_member *function)
{
    pl_json j;
    pl_json_name name;
    pl_member m;
    if (function->type == PL_JSON_ABSENT || function->type == PL_JSON_NULL)
        return;
    pl_json_init(&j, function->raw, PL_CANON_DEPTH, false);
    if (pl_json_enter(&j, '{') == 0)
        while (pl_json_key(&j, &name) > 0 && pl_json_value(&j, &m) == 0) {
            if (is(&name, "name"))
                take_once(r, &m, &c->has_name, &c->name);
            else if (is(&name, "arguments"))
                add_text(r, &c->arguments, &m);
            else if (!unused(&m))
                r->unreadable = true;
        }
    r->unreadable |= j.rc != 0;
}

static void read_call(pl_reply *r, const pl_member *call)
{
    pl_json j;
    pl_json_name name;
    pl_member m, index = {.type = PL_JSON_ABSENT}, id = index, function = index;
    pl_json_init(&j, call->raw, PL_CANON_DEPTH, false);
    if (pl_json_enter(&j, '{') == 0)
        while (pl_json_key(&j, &name) > 0 && pl_json_value(&j, &m) == 0) {
            if (is(&name, "index"))
                index = m;
            else if (is(&name, "id"))
                id = m;
            else if (is(&name, "function"))
                function = m;
            else if (is(&name, "type") && says(&m, "function"))
                continue;
            else if (!unused(&m))
                r->unreadable = true;
        }
    tool_call *c = j.rc == 0 ? call_at(r, &index) : NULL;
    if (!c) {
        r->unreadable = true;
        return;
    }
    take_once(r, &id, &c->has_id, &c->id);
    read_function(r, c, &function);
}

static void read_delta(pl_reply *r, const pl_member *delta)
{
    pl_json j, list;
    pl_json_name name;
    pl_member m, call;
    pl_json_init(&j, delta->raw, PL_CANON_DEPTH, false);
    if (pl_json_enter(&j, '{') == 0)
        while (pl_json_key(&j, &name) > 0 && pl_json_value(&j, &m) == 0) {
            int i = 0;
            while (i < TEXTS && !pl_json_name_is(&name, text_names[i]))
                i++;
            if (unused(&m)) {
                continue;
            } else if (i < TEXTS) {
                add_text(r, &r->texts[i], &m);
            } else if (is(&name, "role")) {
                r->unreadable |= !says(&m, "assistant");
            } else if (is(&name, "tool_calls") && m.type == PL_JSON_ARRAY) {
                pl_json_init(&list, m.raw, PL_CANON_DEPTH, false);
                if (pl_json_enter(&list, '[') == 0)
                    while (pl_json_item(&list) > 0 && pl_json_value(&list, &call) == 0)
                        read_call(r, &call);
                r->unreadable |= list.rc != 0;
            } else {
                r->unreadable = true;
            }
        }
    r->unreadable |= j.rc != 0;
}

static void read_message(pl_reply *r, const pl_member *message)
{
    pl_json j;
    pl_member role = pl_object_find(message->raw, PL_STR("role"));
    pl_json_init(&j, message->raw, PL_CANON_DEPTH, false);
    if (!says(&role, "assistant") || !pl_canon_message(&j, &r->message))
        r->unreadable = true;
    r->whole = true;
}

/* --- choices --- */

static void read_reason(pl_reply *r, const pl_member *m)
{
    static const char *const ends[] = {"stop", "length", "tool_calls"};
    if (m->type == PL_JSON_ABSENT || m->type == PL_JSON_NULL)
        return;
    r->finished = true;
    r->aborted |= says(m, "abort");
    bool known = false;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        known |= says(m, ends[i]);
    r->unreadable |= !known;
}

/* What ended the output: a text is in the engine's memory and was not told; the number of an end
 * token ends a message as its template would, but a text would go on without it. */
static void read_matched(pl_reply *r, const pl_member *m)
{
    r->unreadable |= m->type == PL_JSON_STRING;
    r->hidden_token |= m->type == PL_JSON_NUMBER;
}

static void read_choice(pl_reply *r, pl_str choice)
{
    pl_json j;
    pl_json_name name;
    pl_member m;
    pl_json_init(&j, choice, PL_CANON_DEPTH, false);
    if (pl_json_enter(&j, '{') == 0)
        while (pl_json_key(&j, &name) > 0 && pl_json_value(&j, &m) == 0) {
            if (is(&name, "index")) {
                r->unreadable |= !pl_str_eq(m.raw, PL_STR("0"));
            } else if (is(&name, "delta") && m.type == PL_JSON_OBJECT) {
                read_delta(r, &m);
            } else if (is(&name, "message") && m.type == PL_JSON_OBJECT) {
                read_message(r, &m);
            } else if (is(&name, "text") && m.type == PL_JSON_STRING) {
                pl_chain at;
                size_t raw_at;
                pl_chain_text(&r->text, inside(&m), UINT64_MAX, &at, &raw_at);
                r->has_text = true;
            } else if (is(&name, "finish_reason")) {
                read_reason(r, &m);
            } else if (is(&name, "matched_stop") || is(&name, "stop_reason")) {
                read_matched(r, &m);
            }
        }
    r->unreadable |= j.rc != 0;
}

static void read_choices(pl_reply *r, const pl_member *choices)
{
    pl_json j;
    pl_member m;
    pl_json_init(&j, choices->raw, PL_CANON_DEPTH, false);
    if (choices->elements > 1)
        r->unreadable = true;
    else if (pl_json_enter(&j, '[') == 0)
        while (pl_json_item(&j) > 0 && pl_json_value(&j, &m) == 0)
            read_choice(r, m.raw);
}

/* --- /generate --- */

static void read_end(pl_reply *r, const pl_member *reason)
{
    pl_member type, matched = {.type = PL_JSON_ABSENT};
    if (reason->type == PL_JSON_OBJECT) {
        type = pl_object_find(reason->raw, PL_STR("type"));
        matched = pl_object_find(reason->raw, PL_STR("matched"));
        pl_member message = pl_object_find(reason->raw, PL_STR("message"));
        if (message.type == PL_JSON_STRING) {
            r->poisoned |= says_poisoned(message.raw);
            r->told_why |= message.raw.n > 2;
        }
    } else {
        type = *reason;
    }
    read_reason(r, &type);
    if (type.type != PL_JSON_STRING) {
        r->finished = true;
        r->unreadable = true;
    }
    /* ids show a matched text, too */
    r->hidden_token |= matched.type == PL_JSON_NUMBER || matched.type == PL_JSON_STRING;
}

static void read_last_text(pl_reply *r, const pl_member *text)
{
    pl_chain at = {{0, 0}, 0};
    size_t raw_at;
    if (text->type != PL_JSON_STRING)
        return;
    pl_chain_text(&r->text, inside(text), r->first.n, &at, &raw_at);
    r->has_text = raw_at != SIZE_MAX && at.v[0] == r->first.v[0] && at.v[1] == r->first.v[1];
}

static void read_generated(pl_reply *r, const pl_member *text, const pl_member *ids,
                           const pl_member *meta)
{
    pl_member reason = {.type = PL_JSON_ABSENT}, made = reason;
    pl_chain at;
    size_t raw_at;
    double n;
    if (meta->type == PL_JSON_OBJECT) {
        reason = pl_object_find(meta->raw, PL_STR("finish_reason"));
        made = pl_object_find(meta->raw, PL_STR("completion_tokens"));
    }
    if (r->finished) { /* nothing comes behind the end */
        r->unreadable = true;
        return;
    }
    if (reason.type == PL_JSON_ABSENT || reason.type == PL_JSON_NULL) {
        if (r->first.n == 0 && text->type == PL_JSON_STRING)
            pl_chain_text(&r->first, inside(text), UINT64_MAX, &at, &raw_at);
        return;
    }
    read_end(r, &reason);
    read_last_text(r, text);
    if (ids->type != PL_JSON_ARRAY)
        return;
    r->has_ids = pl_chain_ids(&r->ids, ids->raw, UINT64_MAX, &at, &raw_at);
    if (pl_member_number(&made, &n) == 0 && n != (double)r->ids.n) {
        r->has_ids = false; /* only the last ones, or not all of them */
        r->has_text &= n < (double)r->ids.n;
    }
}

/* --- events and answers --- */

static void read_object(pl_reply *r, pl_str json)
{
    pl_json j;
    pl_json_name name;
    pl_member m, none = {.type = PL_JSON_ABSENT};
    pl_member choices = none, text = none, ids = none, meta = none, error = none, message = none;
    bool is_error = false;
    pl_json_init(&j, json, PL_JSON_DEPTH_MAX, false);
    if (pl_json_enter(&j, '{') != 0) {
        r->unreadable = true;
        return;
    }
    while (pl_json_key(&j, &name) > 0 && pl_json_value(&j, &m) == 0) {
        if (is(&name, "choices"))
            choices = m;
        else if (is(&name, "text"))
            text = m;
        else if (is(&name, "output_ids"))
            ids = m;
        else if (is(&name, "meta_info"))
            meta = m;
        else if (is(&name, "error"))
            error = m;
        else if (is(&name, "message"))
            message = m;
        else if (is(&name, "index") && !pl_str_eq(m.raw, PL_STR("0")))
            r->unreadable = true;
        else if (is(&name, "object"))
            is_error = says(&m, "error");
    }
    if (pl_json_done(&j) != 0)
        r->unreadable = true;
    read_error(r, &error);
    if (is_error)
        read_error(r, &message);
    if (r->unreadable)
        return;
    if (r->api == PL_API_GENERATE)
        read_generated(r, &text, &ids, &meta);
    else if (choices.type == PL_JSON_ARRAY &&
             (r->api == PL_API_CHAT || r->api == PL_API_COMPLETIONS))
        read_choices(r, &choices);
}

void pl_reply_event(pl_reply *r, pl_str json)
{
    if (json.n && !pl_str_eq(json, PL_STR("[DONE]")))
        read_object(r, json);
}

void pl_reply_answer(pl_reply *r, pl_str json)
{
    read_object(r, json);
}

pl_reply_state pl_reply_judge(const pl_reply *r, double prompt_tokens, double expected_min)
{
    bool one = prompt_tokens >= 0 && prompt_tokens <= 1 && expected_min > 1 && !r->told_why;
    return (pl_reply_state){
        .complete = r->finished && !r->unreadable && !r->aborted && !r->poisoned && !one,
        .aborted = r->aborted,
        .poisoned = r->poisoned || one,
    };
}

/* --- behind a history --- */

static bool message_of(const pl_reply *r, pl_digest *out)
{
    pl_canon_object message = {{0, 0}, 0};
    pl_canon_list calls = {{0, 0}, 0};
    if (r->whole) {
        *out = r->message;
        return true;
    }
    pl_canon_object_add(&message, PL_STR("role"), pl_canon_string(PL_STR("assistant")));
    for (int i = 0; i < TEXTS; i++)
        if (r->texts[i])
            pl_canon_object_add(&message, text_names[i], string_of(r->texts[i]));
    for (int i = 0; i < r->calls_n; i++) {
        const tool_call *c = &r->calls[i];
        pl_canon_object call = {{0, 0}, 0}, function = {{0, 0}, 0};
        if (!c->seen)
            return false;
        if (c->has_name)
            pl_canon_object_add(&function, PL_STR("name"), c->name);
        if (c->arguments)
            pl_canon_object_add(&function, PL_STR("arguments"), string_of(c->arguments));
        if (c->has_id)
            pl_canon_object_add(&call, PL_STR("id"), c->id);
        pl_canon_object_add(&call, PL_STR("function"), pl_canon_object_end(&function));
        pl_canon_list_add(&calls, pl_canon_object_end(&call));
    }
    if (calls.n)
        pl_canon_object_add(&message, PL_STR("tool_calls"), pl_canon_list_end(&calls));
    *out = pl_canon_object_end(&message);
    return true;
}

bool pl_reply_append(const pl_reply *r, pl_history_form form, pl_chain *c)
{
    pl_digest d;
    if (!pl_reply_judge(r, -1, -1).complete)
        return false;
    switch (form) {
    case PL_HISTORY_MESSAGES:
        if (r->api != PL_API_CHAT || !message_of(r, &d))
            return false;
        pl_chain_add(c, d);
        return true;
    case PL_HISTORY_TEXT:
        if (!r->has_text || r->hidden_token)
            return false;
        pl_chain_join(c, &r->text);
        return true;
    case PL_HISTORY_TOKENS:
        if (!r->has_ids)
            return false;
        pl_chain_join(c, &r->ids);
        return true;
    default:
        return false;
    }
}
