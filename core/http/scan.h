/* The request body: one pass over JSON bytes that validates them, finds the top-level members that
 * matter and builds no tree (scan.c, on json.h's walk); and splicing edits into the original bytes
 * (edits.c). Keys are compared after unescaping. Pure functions. */
#ifndef PL_SCAN_H
#define PL_SCAN_H

#include "base/arena.h"
#include "base/str.h"

/* Members the router reads itself. A duplicate of one of these is an error; others may repeat. */
#define PL_MEMBER_MAP(XX)                                                                          \
    XX(MODEL, "model")                                                                             \
    XX(STREAM, "stream")                                                                           \
    XX(STREAM_OPTIONS, "stream_options")                                                           \
    XX(MAX_TOKENS, "max_tokens")                                                                   \
    XX(MAX_COMPLETION_TOKENS, "max_completion_tokens")                                             \
    XX(MAX_OUTPUT_TOKENS, "max_output_tokens")                                                     \
    XX(SAMPLING_PARAMS, "sampling_params")                                                         \
    XX(N, "n")                                                                                     \
    XX(PRIORITY, "priority")                                                                       \
    XX(MESSAGES, "messages")                                                                       \
    XX(SYSTEM, "system")                                                                           \
    XX(TOOLS, "tools")                                                                             \
    XX(PROMPT, "prompt")                                                                           \
    XX(INPUT, "input")                                                                             \
    XX(INPUT_IDS, "input_ids")                                                                     \
    XX(INSTRUCTIONS, "instructions")                                                               \
    XX(TEXT, "text")                                                                               \
    XX(QUERY, "query")                                                                             \
    XX(DOCUMENTS, "documents")                                                                     \
    XX(NVEXT, "nvext")                                                                             \
    XX(RETENTION_SECONDS, "retention_seconds")                                                     \
    XX(EXTRA_ARGS, "extra_args")                                                                   \
    XX(SESSION_ID, "session_id")                                                                   \
    XX(SESSION_PARAMS, "session_params")                                                           \
    XX(RID, "rid")                                                                                 \
    XX(ROUTED_DP_RANK, "routed_dp_rank")                                                           \
    XX(DATA_PARALLEL_RANK, "data_parallel_rank")                                                   \
    XX(DISAGG_PREFILL_DP_RANK, "disagg_prefill_dp_rank")                                           \
    XX(BOOTSTRAP_HOST, "bootstrap_host")                                                           \
    XX(BOOTSTRAP_PORT, "bootstrap_port")                                                           \
    XX(BOOTSTRAP_ROOM, "bootstrap_room")                                                           \
    XX(KV_TRANSFER_PARAMS, "kv_transfer_params")                                                   \
    XX(CACHE_CONTROL, "cache_control")                                                             \
    XX(CACHE_SALT, "cache_salt")                                                                   \
    XX(EXTRA_KEY, "extra_key")                                                                     \
    XX(LORA_PATH, "lora_path")                                                                     \
    XX(USER, "user")

typedef enum pl_member_id {
#define XX(id, name) PL_MEMBER_##id,
    PL_MEMBER_MAP(XX)
#undef XX
        PL_MEMBER_COUNT
} pl_member_id;

extern const pl_str pl_member_names[PL_MEMBER_COUNT];

typedef enum pl_json_type {
    PL_JSON_ABSENT,
    PL_JSON_NULL,
    PL_JSON_TRUE,
    PL_JSON_FALSE,
    PL_JSON_NUMBER,
    PL_JSON_STRING,
    PL_JSON_ARRAY,
    PL_JSON_OBJECT
} pl_json_type;

typedef struct pl_member {
    pl_json_type type;
    size_t key_at;           /* offset of the key's opening quote */
    pl_str raw;              /* the value's bytes in the body, quotes included */
    uint32_t elements;       /* arrays: top-level elements */
    bool escaped;            /* strings: contains a backslash */
    uint32_t attachments;    /* "data:" URLs (images, audio) of 256 bytes and more in the value */
    size_t attachment_bytes; /* of raw, what those take */
} pl_member;

/* A string of PL_SCAN_LONG bytes or more: who walks over the body again steps over it. */
#define PL_SCAN_LONG  256
#define PL_SCAN_LONGS 128

typedef struct pl_scan_long {
    uint32_t at;          /* offset of its opening quote */
    uint32_t n : 31;      /* its bytes, quotes included */
    uint32_t escaped : 1; /* contains a backslash */
} pl_scan_long;

typedef struct pl_scan {
    pl_member members[PL_MEMBER_COUNT];
    size_t open_at;     /* offset of the object's '{' */
    size_t close_at;    /* offset of its '}' */
    uint32_t members_n; /* all top-level members */
    size_t error_at;    /* when failed: offset of the first byte that is wrong, see below */
    const char *error;  /* when failed: static text */
    const char *start;  /* the body; longs[].at counts from here */
    uint32_t longs_n;
    pl_scan_long longs[PL_SCAN_LONGS]; /* the first ones, in their order; the rest is not set */
} pl_scan;

/* What is set of it; a copy may be that short. */
static inline size_t pl_scan_bytes(const pl_scan *s)
{
    return offsetof(pl_scan, longs) + s->longs_n * sizeof s->longs[0];
}

/* Validates `body` as one JSON object (RFC 8259: strict; nesting at most max_depth, the object
 * itself being 1, and never above 1024; UTF-8 checked in the members of the map and in all keys).
 * 0, or PL_ESYNTAX / PL_ELIMIT with error and error_at set. error_at is the first byte that no
 * valid body could have there: the body's length when it is only cut short, the second key for a
 * duplicate, the bracket that is too deep. */
int pl_scan_body(pl_str body, unsigned max_depth, pl_scan *out);

/* The string value of a member, unescaped: the raw bytes when there is nothing to unescape, else a
 * copy in the arena. {NULL,0} when m is not a string or out of memory. */
pl_str pl_member_string(pl_arena *a, const pl_member *m);

/* Any top-level member by its name (the last of it), for req:member(). type ABSENT when there is
 * none. */
pl_member pl_scan_find(pl_str body, const pl_scan *s, pl_str name);

/* A member of an object value (raw as in pl_member.raw; key_at counts from its start). The last of
 * that name, which is the one that engines' parsers keep; type ABSENT when there is none, or
 * `object` is no object, or invalid before it. */
pl_member pl_object_find(pl_str object, pl_str name);

/* Is a valid object's raw text without a member? */
static inline bool pl_object_is_empty(pl_str object)
{
    size_t i = 1;
    while (i < object.n && (object.p[i] == ' ' || (object.p[i] >= '\t' && object.p[i] <= '\r')))
        i++;
    return i < object.n && object.p[i] == '}';
}

/* Numbers: 0 and *out, PL_ENOTFOUND when absent or null, PL_EINVALID when not a number that a
 * double holds (or written with more than 63 characters). */
int pl_member_number(const pl_member *m, double *out);

/* Estimated prompt tokens: token ids are counted (input_ids, prompt, input; lists of lists are
 * added up), text is bytes / 4 of the raw value over messages, system, tools, prompt, input,
 * instructions, text, query, documents; an attachment counts PL_ATTACHMENT_TOKENS whatever its
 * size. At least 1.
 */
#define PL_ATTACHMENT_TOKENS 1024
double pl_scan_prompt_tokens(const pl_scan *s);

/* One edit of the body: bytes [at, at + remove) are replaced by `insert`. Edits are kept in order
 * of `at` and must not overlap; inserts at one place keep the order in which they were added. */
typedef struct pl_edit {
    size_t at, remove;
    pl_str insert;
    enum { PL_EDIT_BYTES, PL_EDIT_REMOVE, PL_EDIT_APPEND } kind;
    pl_member_id id; /* REMOVE and APPEND */
} pl_edit;

/* What a request can come to: 7 pins, nvext (or 5 pins in it), stream_options and the model's name;
 * of a try: the limit (2), rid, rank, cache_salt, retention and priority (2); of a session's turn:
 * session_params, session_id, the trimmed conversation, tools and system. */
#define PL_EDITS_MAX    28
#define PL_EDITS_SLICES (2 * PL_EDITS_MAX + 1)

/* n = 0 begins it. The commas around removed and appended members are settled by pl_edits_slices,
 * when all edits are known. */
typedef struct pl_edits {
    int n;
    pl_edit v[PL_EDITS_MAX];
} pl_edits;

/* For places inside a member's value. 0, PL_ELIMIT when full, PL_EINVALID on overlap. `insert` must
 * outlive the edits. */
int pl_edits_add(pl_edits *e, size_t at, size_t remove, pl_str insert);

/* Sets a top-level member to raw JSON: replaces its value when present (raw_json must then outlive
 * the edits), else appends it before the closing brace. PL_EINVALID when this member was edited
 * before. */
int pl_edits_set(pl_edits *e, pl_arena *a, pl_str body, const pl_scan *s, pl_member_id id,
                 pl_str raw_json);

/* Removes a top-level member together with one comma. PL_ENOTFOUND when it is absent. */
int pl_edits_remove(pl_edits *e, pl_str body, const pl_scan *s, pl_member_id id);

/* The edited body as at most 2 * PL_EDITS_MAX + 1 slices of the original and the inserts; returns
 * their number and the total length. */
int pl_edits_slices(const pl_edits *e, pl_str body, pl_str slices[2 * PL_EDITS_MAX + 1],
                    size_t *total);

#endif
