/* What every affinity store refuses: see store.h. Any thread. */
#include "session/store.h"

static bool valid_binding(const pl_binding *b)
{
    return b->slot >= 0 && b->rank >= 0 && b->rank <= PL_SESSION_MAX_RANK && b->ttl_ms > 0 &&
           b->ttl_ms <= PL_SESSION_MAX_TTL_MS && b->note.n <= sizeof b->note.bytes &&
           (b->kind == PL_SESSION_ROUTER_ONLY || b->kind == PL_SESSION_ENGINE_BACKED);
}

static bool valid_lease(const pl_store_call *c)
{
    return c->owner && c->lease_ms > 0 && c->lease_ms <= PL_SESSION_MAX_TTL_MS;
}

int pl_store_check(const pl_store_call *c)
{
    bool ok = c->name.tenant.n <= PL_SESSION_MAX_TENANT_BYTES && c->name.id.n > 0 &&
              c->name.id.n <= PL_SESSION_MAX_ID_BYTES;
    switch (c->op) {
    case PL_STORE_GET:
    case PL_STORE_PEEK:
    case PL_STORE_REMOVE:
        break;
    case PL_STORE_PUT:
        ok = ok && valid_binding(&c->binding);
        if (c->owner)
            ok = ok && valid_lease(c) && c->binding.kind == PL_SESSION_ENGINE_BACKED;
        break;
    case PL_STORE_LEASE:
        ok = ok && valid_lease(c);
        break;
    case PL_STORE_RELEASE:
        ok = ok && c->owner && c->binding.note.n <= sizeof c->binding.note.bytes;
        break;
    default:
        ok = false;
    }
    return ok ? 0 : PL_EINVALID;
}
