/* KV events as engines put them on the wire: msgpack in the shapes of SGLang and of both
 * generations of vLLM. Encoding only; publish.h sends it. Pure but for the buffer's growth. */
#ifndef PL_PUBLISH_WIRE_H
#define PL_PUBLISH_WIRE_H

#include "base/buf.h"
#include "engine/blocks.h"

typedef enum pl_wire_format {
    PL_WIRE_SGLANG,     /* arrays, signed hashes */
    PL_WIRE_VLLM_ARRAY, /* arrays: up to about 0.22 */
    PL_WIRE_VLLM_MAP,   /* events are maps: since then */
    PL_WIRE_BY_KIND     /* for options: what the kind of engine sends; not for what is below */
} pl_wire_format;

typedef struct pl_wire {
    pl_wire_format format;
    bool byte_hashes; /* vLLM: the whole name as bytes, not its last 8 as a number */
} pl_wire;

/* "sglang", "vllm-array" or "vllm-map". False: none of them. */
bool pl_wire_parse(const char *name, pl_wire_format *out);
const char *pl_wire_name(pl_wire_format f);

/* The number that stands for a name in this format, whether it is sent or not. */
uint64_t pl_wire_number(const pl_wire *w, const pl_sim_kv_name *name);

/* Append to out; 0 or PL_ENOMEM (out has more bytes then than it had). A batch is its head, as many
 * events as it says, its tail. */
int pl_wire_head(pl_buf *out, double ts, uint32_t events) __attribute__((warn_unused_result));
int pl_wire_stored(pl_buf *out, const pl_wire *w, const pl_sim_kv_run *run)
    __attribute__((warn_unused_result));
int pl_wire_removed(pl_buf *out, const pl_wire *w, const pl_sim_kv_run *run)
    __attribute__((warn_unused_result));
int pl_wire_cleared(pl_buf *out, const pl_wire *w) __attribute__((warn_unused_result));
int pl_wire_tail(pl_buf *out, int rank) __attribute__((warn_unused_result));

#endif
