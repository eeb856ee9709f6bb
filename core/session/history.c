/* Proving that a request begins with what an engine's session holds: see history.h. Called by the
 * proxy on a loop's thread for turns of engine-backed sessions only; pure, owns nothing. The body
 * was scanned before, so it is valid JSON. */
#include "session/history.h"

#include "base/err.h"
#include "http/json.h"

_Static_assert(sizeof(pl_history) == 24, "the session's note has room for 24 bytes");

/* Members of a body that may count beside the prompt. */
#define MEMBERS_MAX 32

/* The prompt of a request. */
typedef struct prompt {
    pl_history_form form;
    pl_member_id id;    /* the member it is in */
    const pl_member *m; /* the same */
    pl_digest settings; /* of all that counts beside the prompt */
} prompt;

/* --- members beside the prompt --- */

/* Without effect on the prompt: they may differ from turn to turn. */
static const char *const passed_over[] = {"stream",
                                          "stream_options",
                                          "max_tokens",
                                          "max_completion_tokens",
                                          "min_tokens",
                                          "temperature",
                                          "top_p",
                                          "top_k",
                                          "min_p",
                                          "seed",
                                          "stop",
                                          "stop_token_ids",
                                          "ignore_eos",
                                          "presence_penalty",
                                          "frequency_penalty",
                                          "repetition_penalty",
                                          "logit_bias",
                                          "logprobs",
                                          "top_logprobs",
                                          "return_logprob",
                                          "top_logprobs_num",
                                          "sampling_params",
                                          "user",
                                          "metadata",
                                          "store",
                                          "service_tier",
                                          "safety_identifier",
                                          "prompt_cache_key",
                                          "rid",
                                          "request_id",
                                          "priority",
                                          "nvext",
                                          "extra_args",
                                          "cache_control",
                                          "session_id",
                                          "session_params",
                                          "routed_dp_rank",
                                          "data_parallel_rank",
                                          "disagg_prefill_dp_rank",
                                          "bootstrap_host",
                                          "bootstrap_port",
                                          "bootstrap_room",
                                          "kv_transfer_params"};

/* With these the engine holds something else than prompt and reply one behind the other, or puts
 * more into each prompt than can be cut out. Fine when absent, null, false, "", [] or {}. */
static const char *const unprovable[] = {
    "echo",       "suffix",     "continue_final_message", "use_beam_search",    "image_data",
    "video_data", "audio_data", "input_embeds",           "prompt_embeds",      "documents",
    "functions",  "modalities", "multi_modal_data",       "mm_processor_kwargs"};

static bool listed(const pl_json_name *name, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (pl_json_name_is(name, pl_str_c(list[i])))
            return true;
    return false;
}
#define LISTED(name, list) listed(name, list, sizeof(list) / sizeof *(list))

static bool nothing(const pl_member *m)
{
    switch (m->type) {
    case PL_JSON_ABSENT:
    case PL_JSON_NULL:
    case PL_JSON_FALSE:
        return true;
    case PL_JSON_STRING:
        return m->raw.n == 2;
    case PL_JSON_ARRAY:
        return m->elements == 0;
    case PL_JSON_OBJECT: {
        pl_json j;
        pl_json_name name;
        pl_json_init(&j, m->raw, PL_JSON_DEPTH_MAX, false);
        return pl_json_enter(&j, '{') == 0 && pl_json_key(&j, &name) == 0;
    }
    default:
        return false;
    }
}

static bool one_or_absent(const pl_member *m)
{
    double v = 1;
    return m->type == PL_JSON_ABSENT || m->type == PL_JSON_NULL ||
           (pl_member_number(m, &v) == 0 && v == 1);
}

/* Why a member makes a proof impossible; NULL: it does not. */
static const char *objection(const pl_json_name *name, const pl_member *m)
{
    if (pl_json_name_is(name, PL_STR("n")) || pl_json_name_is(name, PL_STR("best_of")))
        return one_or_absent(m) ? NULL : "more than one choice is asked for";
    if (pl_json_name_is(name, PL_STR("add_generation_prompt")))
        return m->type == PL_JSON_FALSE ? "add_generation_prompt is off" : NULL;
    if (LISTED(name, unprovable) && !nothing(m))
        return "a member changes what the engine holds (echo, suffix, images and the like)";
    if (!pl_json_name_is(name, PL_STR("sampling_params")))
        return NULL;
    if (m->type == PL_JSON_ARRAY)
        return "the request is a batch";
    pl_member n = pl_object_find(m->raw, PL_STR("n"));
    return one_or_absent(&n) ? NULL : "more than one choice is asked for";
}

/* Everything but the prompt's own member and what has no effect, into p->settings. */
static const char *read_settings(pl_str body, const pl_scan *s, prompt *p)
{
    pl_canon_object sum = {{0, 0}, 0};
    pl_digest seen[MEMBERS_MAX]; /* names: engines take the last of two */
    pl_json j;
    pl_json_name name;
    pl_json_init(&j, body, PL_JSON_DEPTH_MAX, false);
    if (pl_json_enter(&j, '{') != 0)
        return "the body cannot be read";
    while (pl_json_key(&j, &name) > 0) {
        const char *at = j.p;
        pl_member m;
        pl_digest d;
        if (at == p->m->raw.p) {
            j.p += p->m->raw.n;
            continue;
        }
        if (pl_json_value(&j, &m) != 0)
            return "the body cannot be read";
        const char *why = objection(&name, &m);
        if (why)
            return why;
        if (m.type == PL_JSON_NULL || LISTED(&name, passed_over))
            continue;
        pl_json value;
        char plain[256];
        if (name.raw.n > sizeof plain || sum.n == MEMBERS_MAX)
            return "the body has too many members, or one with too long a name";
        pl_str known = {plain, pl_json_unescape(name.raw, plain)};
        seen[sum.n] = pl_canon_string(known);
        for (uint64_t i = 0; i < sum.n; i++)
            if (memcmp(&seen[i], &seen[sum.n], sizeof seen[i]) == 0)
                return "a member of the body is there twice";
        pl_json_init(&value, m.raw, PL_CANON_DEPTH, false);
        if (!pl_canon_value(&value, false, &d))
            return "a member is nested too deeply, or has a member twice";
        pl_canon_object_add(&sum, known, d);
    }
    p->settings = pl_canon_object_end(&sum);
    return NULL;
}

/* --- the prompt --- */

static bool ids_first(const pl_member *m)
{
    size_t i = 1;
    while (m->raw.p[i] == ' ' || m->raw.p[i] == '\t' || m->raw.p[i] == '\r' || m->raw.p[i] == '\n')
        i++;
    return m->raw.p[i] >= '0' && m->raw.p[i] <= '9';
}

/* Finds the prompt and what counts beside it; NULL, or why nothing can be proved. */
static const char *read_prompt(enum pl_api_kind api, pl_str body, const pl_scan *s, unsigned flags,
                               prompt *p)
{
    const pl_member *m = s->members;
    bool ids = m[PL_MEMBER_INPUT_IDS].type != PL_JSON_ABSENT &&
               m[PL_MEMBER_INPUT_IDS].type != PL_JSON_NULL;
    *p = (prompt){.form = PL_HISTORY_LOST};
    p->id = api == PL_API_CHAT          ? PL_MEMBER_MESSAGES
            : api == PL_API_COMPLETIONS ? PL_MEMBER_PROMPT
            : ids                       ? PL_MEMBER_INPUT_IDS
                                        : PL_MEMBER_TEXT;
    if (api != PL_API_CHAT && api != PL_API_COMPLETIONS && api != PL_API_GENERATE)
        return "histories of this API are not followed";
    p->m = &m[p->id];
    if (api == PL_API_CHAT && p->m->type == PL_JSON_ARRAY)
        p->form = PL_HISTORY_MESSAGES;
    else if (api != PL_API_CHAT && p->m->type == PL_JSON_STRING)
        p->form = PL_HISTORY_TEXT;
    else if (api != PL_API_CHAT && p->m->type == PL_JSON_ARRAY && ids_first(p->m))
        p->form = PL_HISTORY_TOKENS;
    else
        return "the prompt is a batch, or is not there";
    if (api == PL_API_CHAT && !(flags & PL_HISTORY_CUT_TOOLS) && !nothing(&m[PL_MEMBER_TOOLS]))
        return "the engine reads tool calls only for requests that carry `tools`, which would put "
               "them into the prompt once more";
    return read_settings(body, s, p);
}

static const char cannot_compare[] =
    "the prompt cannot be compared: it is nested too deeply, has a member twice, or is no list of "
    "messages or ids";

/* What comparing found. */
typedef struct found {
    pl_chain at;   /* the chain `cut` units from the beginning */
    size_t raw_at; /* where the next unit begins in the member's raw; SIZE_MAX: there is none */
} found;

static bool chain_messages(const pl_member *m, pl_chain *c, uint64_t cut, found *f)
{
    pl_json j;
    pl_digest d;
    int rc;
    f->raw_at = SIZE_MAX;
    pl_json_init(&j, m->raw, PL_CANON_DEPTH, false);
    if (pl_json_enter(&j, '[') != 0)
        return false;
    while ((rc = pl_json_item(&j)) > 0) {
        if (c->n == cut) {
            f->at = *c;
            f->raw_at = (size_t)(j.p - m->raw.p);
        }
        if (!pl_canon_message(&j, &d))
            return false;
        pl_chain_add(c, d);
    }
    return rc == 0;
}

/* The whole prompt onto c, and its beginning of `cut` units. False: it cannot be digested. */
static bool chain_prompt(const prompt *p, pl_chain *c, uint64_t cut, found *f)
{
    if (p->form == PL_HISTORY_MESSAGES)
        return chain_messages(p->m, c, cut, f);
    if (p->form == PL_HISTORY_TOKENS)
        return pl_chain_ids(c, p->m->raw, cut, &f->at, &f->raw_at);
    pl_str inside = {p->m->raw.p + 1, p->m->raw.n - 2};
    pl_chain_text(c, inside, cut, &f->at, &f->raw_at);
    f->raw_at += f->raw_at != SIZE_MAX;
    return true;
}

/* Where the first unit begins in the member's raw. */
static size_t first_unit(const prompt *p)
{
    size_t i = 1;
    if (p->form != PL_HISTORY_TEXT)
        while (p->m->raw.p[i] == ' ' || p->m->raw.p[i] == '\t' || p->m->raw.p[i] == '\r' ||
               p->m->raw.p[i] == '\n')
            i++;
    return i;
}

static pl_history history_of(const pl_chain *c, pl_history_form form, enum pl_api_kind api)
{
    if (c->n > UINT32_MAX)
        form = PL_HISTORY_LOST;
    return (pl_history){{c->v[0], c->v[1]}, (uint32_t)c->n, (uint8_t)form, (uint8_t)api};
}

static const char *add_edits(const prompt *p, size_t new_at, pl_str body, const pl_scan *s,
                             pl_edits *edits)
{
    static const pl_member_id repeated[] = {PL_MEMBER_TOOLS, PL_MEMBER_SYSTEM};
    pl_edits before = *edits;
    size_t base = (size_t)(p->m->raw.p - body.p), first = first_unit(p);
    int rc = pl_edits_add(edits, base + first, new_at - first, (pl_str){"", 0});
    for (size_t i = 0; i < 2 && rc == 0 && p->form == PL_HISTORY_MESSAGES; i++)
        if (s->members[repeated[i]].type != PL_JSON_ABSENT)
            rc = pl_edits_remove(edits, body, s, repeated[i]);
    if (rc == 0)
        return NULL;
    *edits = before;
    return "the body has too many edits";
}

/* A turn that brings the whole conversation. Returns why it cannot be trimmed. */
static const char *plan_full(const pl_history *h, const prompt *p, enum pl_api_kind api,
                             pl_str body, const pl_scan *s, pl_edits *edits, pl_history *next)
{
    pl_chain c;
    found f;
    if (h->form == PL_HISTORY_LOST)
        return "an earlier reply was not seen whole";
    if (h->form != p->form || h->api != api)
        return "the session was begun through another API or with another form of prompt";
    pl_chain_begin(&c, p->settings);
    if (!chain_prompt(p, &c, h->units, &f))
        return cannot_compare;
    if (c.n < h->units)
        return "it is shorter than what the engine holds";
    if (c.n == h->units)
        return "nothing in it is new to the engine";
    if (f.raw_at == SIZE_MAX || f.at.v[0] != h->digest[0] || f.at.v[1] != h->digest[1])
        return "its beginning, its tools or its settings differ from what the engine holds";
    const char *why = add_edits(p, f.raw_at, body, s, edits);
    if (!why)
        *next = history_of(&c, p->form, api);
    return why;
}

int pl_history_plan_turn(const pl_history *h, enum pl_api_kind api, pl_str body, const pl_scan *s,
                         unsigned flags, pl_edits *edits, pl_history_plan *plan)
{
    prompt p;
    found f;
    bool delta = (flags & PL_HISTORY_DELTA) != 0, fresh = h->form == PL_HISTORY_NONE;
    const char *why = read_prompt(api, body, s, flags, &p);
    *plan = (pl_history_plan){.how = PL_PLAN_OUTSIDE, .next = *h};
    if (!delta && !fresh) {
        plan->why = why ? why : plan_full(h, &p, api, body, s, edits, &plan->next);
        plan->how = plan->why ? PL_PLAN_OUTSIDE : PL_PLAN_TRIM;
        return 0;
    }
    pl_chain c = {{h->digest[0], h->digest[1]}, h->units};
    if (fresh && !why)
        pl_chain_begin(&c, p.settings);
    bool follows = !why && (fresh || (h->form == p.form && h->api == api)) &&
                   chain_prompt(&p, &c, UINT64_MAX, &f);
    if (!follows && !delta) {
        plan->why = why ? why : cannot_compare;
        return 0;
    }
    plan->how = fresh ? PL_PLAN_WHOLE : PL_PLAN_DELTA;
    plan->next = follows ? history_of(&c, p.form, api)
                         : (pl_history){.form = PL_HISTORY_LOST, .api = (uint8_t)api};
    return 0;
}

void pl_history_advance(pl_history *h, const pl_history_plan *plan, const pl_reply *r)
{
    if (plan->how == PL_PLAN_OUTSIDE)
        return;
    const pl_history *next = &plan->next;
    pl_history_form form = (pl_history_form)next->form;
    pl_chain c = {{next->digest[0], next->digest[1]}, next->units};
    bool whole = form != PL_HISTORY_LOST && pl_reply_append(r, form, &c);
    *h = whole ? history_of(&c, form, (enum pl_api_kind)next->api)
               : (pl_history){.form = PL_HISTORY_LOST, .api = next->api};
}
