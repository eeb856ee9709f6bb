/* The sessions' part of the Prometheus page: see metrics.c. */
#include "admin/metrics_text.h"
#include "router.h"

static double value_of(const _Atomic uint64_t *c)
{
    return (double)atomic_load_explicit(c, memory_order_relaxed);
}

static void controller(pl_text *t, const pl_sessions *sessions)
{
    const pl_sessions_stats *s = pl_sessions_stats_of(sessions);
    const struct {
        const char *name, *help;
        const _Atomic uint64_t *value;
    } list[] = {
        {"hits", "Turns whose session was bound", &s->hits},
        {"misses", "Turns whose session was not bound", &s->misses},
        {"binds", "Sessions bound", &s->binds},
        {"rebinds", "Sessions bound to another worker than before", &s->rebinds},
        {"expired", "Engine-backed sessions whose time was over", &s->expired},
        {"extended", "Of those, kept on by the expire hook", &s->extended},
        {"dropped", "Of those, left to the engine's own timeout by the expire hook", &s->dropped},
        {"opens", "Sessions opened on engines", &s->opens},
        {"open_failures", "Opens that failed", &s->open_failures},
        {"open_races", "Opens that another router had made first", &s->open_races},
        {"close_rpcs", "Calls of an engine's /close_session", &s->close_rpcs},
        {"close_failures", "Of those, failed", &s->close_failures},
        {"close_retries", "Closes tried again", &s->close_retries},
        {"close_given_up", "Closes left to the engine's own timeout", &s->close_given_up},
        {"turns_waited", "Turns that waited for the one before", &s->turns_waited},
        {"turns_refused", "Turns refused because too many waited, or too long", &s->turns_refused},
        {"poisoned", "Engine sessions that took no more turns", &s->poisoned},
        {"store_unavailable", "Look-ups that the shared store did not answer",
         &s->store_unavailable},
    };
    char name[64];
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        snprintf(name, sizeof name, "perilune_session_%s_total", list[i].name);
        pl_text_one(t, name, "counter", list[i].help, value_of(list[i].value));
    }
    pl_text_family(t, "perilune_session_closes_total", "counter",
                   "Engine sessions closed by cause");
    for (int i = 0; i < PL_CLOSE_CAUSES; i++)
        pl_text_value(t, value_of(&s->closes[i]), 1, "cause", pl_close_cause_names[i]);
    pl_text_family(t, "perilune_session_open_seconds", "histogram", "Engines' /open_session");
    pl_text_hist(t, pl_sessions_open_latency(sessions), PL_RANGE_REQUEST, NULL, NULL);
    pl_text_family(t, "perilune_session_close_seconds", "histogram", "Engines' /close_session");
    pl_text_hist(t, pl_sessions_close_latency(sessions), PL_RANGE_REQUEST, NULL, NULL);
}

static void shared_store(pl_text *t, const pl_redis *redis, int handles)
{
    const pl_redis_stats *s = pl_redis_stats_of(redis);
    const struct {
        const char *name, *help;
        const _Atomic uint64_t *value;
    } list[] = {
        {"calls", "Commands that the shared store was asked", &s->calls},
        {"timeouts", "Of those, not answered in time", &s->timeouts},
        {"out_of_reach", "Calls that found the shared store out of reach", &s->unavailable},
        {"refused", "Commands that the shared store answered with an error", &s->refused},
        {"outages", "Connections to the shared store that were lost or not made", &s->outages},
        {"cached", "Calls answered from a binding read moments ago", &s->cached},
        {"stale", "Calls answered in an outage from what this router last knew", &s->stale},
        {"journalled", "Bindings made in an outage", &s->journalled},
        {"written", "Sessions used in an outage, written after it", &s->written},
        {"conflicts", "Sessions used in an outage that the store still had, here or elsewhere",
         &s->conflicts},
        {"forgotten", "Sessions used in an outage and not written after it", &s->forgotten},
        {"claims", "Expired engine sessions that this router took to close", &s->claims},
        {"takeovers", "Of a router that went away, given to others", &s->takeovers},
        {"acks", "Expired engine sessions reported as closed", &s->acks},
    };
    char name[64];
    uint64_t down = atomic_load_explicit(&s->handles_down, memory_order_relaxed);
    pl_text_one(t, "perilune_session_store_up", "gauge",
                "1: every connection to the shared store serves; 0: some do not", down == 0);
    pl_text_one(t, "perilune_session_store_connections", "gauge",
                "Connections to the shared store that serve", (double)handles - (double)down);
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        snprintf(name, sizeof name, "perilune_session_store_%s_total", list[i].name);
        pl_text_one(t, name, "counter", list[i].help, value_of(list[i].value));
    }
    pl_hist latency = {0};
    pl_redis_latency(redis, &latency);
    pl_text_family(t, "perilune_session_store_seconds", "histogram",
                   "Commands of the shared store");
    pl_text_hist(t, &latency, PL_RANGE_CALL, NULL, NULL);
}

void pl_metrics_sessions(pl_text *t, pl_router *r)
{
    pl_store_stats s = {0};
    if (!r->sessions || !r->store)
        return;
    controller(t, r->sessions);
    pl_store_stats_read(r->store, &s);
    pl_text_family(t, "perilune_sessions", "gauge", "Sessions held by the store");
    pl_text_value(t, (double)s.router_only, 1, "kind", "router_only");
    pl_text_value(t, (double)s.engine_backed, 1, "kind", "engine_backed");
    pl_text_one(t, "perilune_session_store_bytes", "gauge", "Memory of the session store",
                (double)s.bytes);
    pl_text_family(t, "perilune_sessions_expired_total", "counter", "Sessions that expired");
    pl_text_value(t, (double)s.expired_router_only, 1, "kind", "router_only");
    pl_text_value(t, (double)s.expired_engine_backed, 1, "kind", "engine_backed");
    pl_text_one(t, "perilune_sessions_evicted_total", "counter",
                "Sessions given up for newer ones at the cap", (double)s.evicted);
    pl_text_one(t, "perilune_sessions_refused_total", "counter",
                "Sessions refused at the cap: engines held all of them", (double)s.refused);
    if (r->redis)
        shared_store(t, r->redis, r->loops_n + 1);
}
