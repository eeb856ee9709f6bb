/* The simulated engine's tokens. A token is a run of up to 4 bytes of text that ends at a character
 * boundary (so 1 to 4 ASCII characters, or one emoji), and its id is those bytes packed into a
 * number, the first in the lowest bits: ids and text convert both ways without a table. The text is
 * cut from the left, so a longer text keeps the tokens of a shorter one but for the last.
 *
 * Ids whose lowest byte is 0xff, which no text contains, are marks: where a chat's messages begin
 * and end. A mark starts a new cut, so a message has the same tokens wherever it stands, and an
 * answer that is sent back as history is found in the cache. */
#ifndef PL_TOKEN_H
#define PL_TOKEN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/str.h"

typedef enum pl_mark {
    PL_MARK_SYSTEM, /* system, developer */
    PL_MARK_USER,
    PL_MARK_ASSISTANT,
    PL_MARK_TOOL,  /* a tool's result */
    PL_MARK_ROLE,  /* another role, its name follows */
    PL_MARK_NAME,  /* the sender's name follows */
    PL_MARK_TOOLS, /* the tools' declarations follow */
    PL_MARK_CALL,  /* a tool call follows */
    PL_MARK_MEDIA, /* an image or the like, its source follows */
    PL_MARK_TEXT,  /* end of a name, a role or a part: text follows */
    PL_MARK_END,   /* of a message */
    PL_MARK_COUNT
} pl_mark;

/* Its token id. */
static inline uint32_t pl_mark_id(pl_mark m)
{
    return 0xffu | (uint32_t)(m + 1) << 8;
}

/* A growable list. Zero-initialise; free(v). */
typedef struct pl_tokens {
    uint32_t *v;
    int n, cap;
} pl_tokens;

/* 0, PL_ENOMEM, or PL_ELIMIT above a thousand million. */
int pl_tokens_add(pl_tokens *t, uint32_t id) __attribute__((warn_unused_result));
int pl_tokens_text(pl_tokens *t, pl_str utf8) __attribute__((warn_unused_result));
int pl_tokens_mark(pl_tokens *t, pl_mark m) __attribute__((warn_unused_result));

/* The text of ids: marks as <|user|> and so on, bytes that are no UTF-8 as U+FFFD. */
int pl_tokens_to_text(const uint32_t *ids, int n, pl_buf *out) __attribute__((warn_unused_result));

#endif
