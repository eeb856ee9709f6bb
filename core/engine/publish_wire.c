/* KV events in msgpack: see publish_wire.h. Called by publish.c on its thread; the buffer is the
 * caller's. Written with msgpack-c, which the router's own reader of these bytes does not use. */
#include "engine/publish_wire.h"

#include <msgpack.h>

#include "base/err.h"

static const char *const names[] = {"sglang", "vllm-array", "vllm-map"};

bool pl_wire_parse(const char *name, pl_wire_format *out)
{
    for (int i = 0; i < 3; i++)
        if (strcmp(name, names[i]) == 0) {
            *out = (pl_wire_format)i;
            return true;
        }
    return false;
}

const char *pl_wire_name(pl_wire_format f)
{
    return names[f];
}

uint64_t pl_wire_number(const pl_wire *w, const pl_sim_kv_name *name)
{
    return w->format == PL_WIRE_SGLANG ? (uint64_t)pl_sim_kv_sglang(name) : pl_sim_kv_vllm(name);
}

static int add(void *buf, const char *p, size_t n)
{
    return pl_buf_add(buf, p, n);
}

static msgpack_packer packer(pl_buf *out)
{
    msgpack_packer pk;
    msgpack_packer_init(&pk, out, add);
    return pk;
}

static int put_str(msgpack_packer *pk, const char *s)
{
    size_t n = strlen(s);
    int rc = msgpack_pack_str(pk, n);
    return rc ? rc : msgpack_pack_str_body(pk, s, n);
}

/* A map's key; arrays have none. */
static int put_key(msgpack_packer *pk, const pl_wire *w, const char *key)
{
    return w->format == PL_WIRE_VLLM_MAP ? put_str(pk, key) : 0;
}

/* The event's own head: its number of members and its type. */
static int put_type(msgpack_packer *pk, const pl_wire *w, size_t members, const char *type)
{
    int rc = w->format == PL_WIRE_VLLM_MAP ? msgpack_pack_map(pk, members)
                                           : msgpack_pack_array(pk, members);
    if (rc == 0)
        rc = put_key(pk, w, "type");
    return rc ? rc : put_str(pk, type);
}

static int put_name(msgpack_packer *pk, const pl_wire *w, const pl_sim_kv_name *name)
{
    if (w->format == PL_WIRE_SGLANG)
        return msgpack_pack_int64(pk, pl_sim_kv_sglang(name));
    if (!w->byte_hashes)
        return msgpack_pack_uint64(pk, pl_sim_kv_vllm(name));
    int rc = msgpack_pack_bin(pk, sizeof name->b);
    return rc ? rc : msgpack_pack_bin_body(pk, name->b, sizeof name->b);
}

static int put_names(msgpack_packer *pk, const pl_wire *w, const pl_sim_kv_run *run)
{
    int rc = put_key(pk, w, "block_hashes");
    if (rc == 0)
        rc = msgpack_pack_array(pk, (size_t)run->n);
    for (int i = 0; i < run->n && rc == 0; i++)
        rc = put_name(pk, w, &run->names[i]);
    return rc;
}

static int put_nil(msgpack_packer *pk, const pl_wire *w, const char *key)
{
    int rc = put_key(pk, w, key);
    return rc ? rc : msgpack_pack_nil(pk);
}

static int put_medium(msgpack_packer *pk, const pl_wire *w)
{
    int rc = put_key(pk, w, "medium");
    return rc ? rc : put_str(pk, "GPU");
}

int pl_wire_stored(pl_buf *out, const pl_wire *w, const pl_sim_kv_run *run)
{
    static const size_t members[] = {7, 8, 11};
    msgpack_packer pk = packer(out);
    int tokens = run->n * run->block_tokens;
    int rc = put_type(&pk, w, members[w->format], "BlockStored");
    if (rc == 0)
        rc = put_names(&pk, w, run);
    if (rc == 0)
        rc = put_key(&pk, w, "parent_block_hash");
    if (rc == 0)
        rc = run->parent ? put_name(&pk, w, run->parent) : msgpack_pack_nil(&pk);
    if (rc == 0)
        rc = put_key(&pk, w, "token_ids");
    if (rc == 0)
        rc = msgpack_pack_array(&pk, (size_t)tokens);
    for (int i = 0; i < tokens && rc == 0; i++)
        rc = msgpack_pack_uint32(&pk, run->tokens[i]);
    if (rc == 0)
        rc = put_key(&pk, w, "block_size");
    if (rc == 0)
        rc = msgpack_pack_uint32(&pk, (uint32_t)run->block_tokens);
    if (rc == 0)
        rc = put_nil(&pk, w, "lora_id");
    if (rc == 0)
        rc = put_medium(&pk, w);
    if (rc == 0 && w->format != PL_WIRE_SGLANG)
        rc = put_nil(&pk, w, "lora_name");
    if (rc != 0 || w->format != PL_WIRE_VLLM_MAP)
        return rc;
    rc = put_str(&pk, "extra_keys"); /* of each block: none */
    if (rc == 0)
        rc = msgpack_pack_array(&pk, (size_t)run->n);
    for (int i = 0; i < run->n && rc == 0; i++)
        rc = msgpack_pack_nil(&pk);
    if (rc == 0)
        rc = put_str(&pk, "group_idx");
    if (rc == 0)
        rc = msgpack_pack_uint8(&pk, 0);
    if (rc == 0)
        rc = put_str(&pk, "kv_cache_spec_kind");
    return rc ? rc : put_str(&pk, "full_attention");
}

int pl_wire_removed(pl_buf *out, const pl_wire *w, const pl_sim_kv_run *run)
{
    msgpack_packer pk = packer(out);
    int rc = put_type(&pk, w, 3, "BlockRemoved");
    if (rc == 0)
        rc = put_names(&pk, w, run);
    return rc ? rc : put_medium(&pk, w);
}

int pl_wire_cleared(pl_buf *out, const pl_wire *w)
{
    msgpack_packer pk = packer(out);
    return put_type(&pk, w, 1, "AllBlocksCleared");
}

int pl_wire_head(pl_buf *out, double ts, uint32_t events)
{
    msgpack_packer pk = packer(out);
    int rc = msgpack_pack_array(&pk, 3);
    if (rc == 0)
        rc = msgpack_pack_double(&pk, ts);
    return rc ? rc : msgpack_pack_array(&pk, events);
}

int pl_wire_tail(pl_buf *out, int rank)
{
    msgpack_packer pk = packer(out);
    return msgpack_pack_int32(&pk, rank);
}
