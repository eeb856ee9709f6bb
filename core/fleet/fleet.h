/* The fleet: all engines, and immutable views of it. The control thread changes it; every change
 * publishes a new view, which the subscriber hands to each loop. A loop reads its view without
 * locks until it is given the next. */
#ifndef PL_FLEET_H
#define PL_FLEET_H

#include "base/err.h"
#include "fleet/engine.h"

/* What an engine may claim to serve; more is refused. */
#define PL_FLEET_MAX_MODELS      4096
#define PL_FLEET_MAX_MODEL_BYTES 512

/* A model and the workers that serve it. */
typedef struct pl_model {
    pl_str id;
    pl_worker_state **workers; /* in order of slot */
    int workers_n;
    bool adapter; /* a LoRA adapter, as an engine that serves it says */
} pl_model;

typedef struct pl_view {
    _Atomic int refs;
    uint64_t version;
    pl_engine **engines; /* referenced; removed engines are not in it, draining ones are */
    int engines_n;
    pl_model
        *models; /* sorted by id; the union of what the engines serve (or served when last seen) */
    int models_n;
    pl_worker_state **workers; /* all */
    int workers_n;
} pl_view;

pl_view *pl_view_ref(pl_view *v);
void pl_view_unref(pl_view *v); /* NULL is fine */
/* NULL when no engine serves it. */
const pl_model *pl_view_model(const pl_view *v, pl_str id);
/* The one model when there is exactly one, else NULL. */
const pl_model *pl_view_only_model(const pl_view *v);
/* Does the worker serve it? By identity: a successor in the same slot does not count. */
bool pl_model_has(const pl_model *m, const pl_worker_state *w);

typedef struct pl_fleet_state pl_fleet; /* policy_abi.h has a struct pl_fleet: the record */

/* publish runs on the thread that made the change, once per change, in the order of the changes,
 * with a new view whose reference it owns. It may read the fleet, and change it. */
pl_fleet *pl_fleet_new(void (*publish)(void *ctx, pl_view *v), void *ctx);
void pl_fleet_free(pl_fleet *f);

/* All of these take the fleet's lock: callable from any thread. A change that fails changed
 * nothing. A slot goes to the smallest free place; a removed engine's are free again, with the next
 * generation, once the last reference to it is gone. */
int pl_fleet_add(pl_fleet *f, const pl_engine_spec *spec, pl_engine **out,
                 pl_errbuf *eb);                    /* *out is a new reference; PL_EEXISTS */
pl_engine *pl_fleet_find(pl_fleet *f, pl_str name); /* new reference or NULL */
int pl_fleet_drain(pl_fleet *f, pl_engine *e, bool draining); /* false: back to active */
int pl_fleet_remove(pl_fleet *f,
                    pl_engine *e); /* out of the next view at once; its requests go on */
/* Models an engine serves; publishes only when they changed. PL_ELIMIT when there are more, or
 * longer ones, than allowed above: nothing changed. */
int pl_fleet_set_models(pl_fleet *f, pl_engine *e, const pl_str *ids, int n);
/* Which models are LoRA adapters there, whether it serves them or not. The same. */
int pl_fleet_set_adapters(pl_fleet *f, pl_engine *e, const pl_str *ids, int n);
/* The models last known of an engine, sorted; copies into the arena. Their number, PL_ENOTFOUND for
 * an engine that was removed, or PL_ENOMEM. */
struct pl_arena;
int pl_fleet_models(pl_fleet *f, const pl_engine *e, struct pl_arena *a, pl_str **ids);
pl_view *pl_fleet_view(pl_fleet *f); /* new reference to the current view */

#endif
