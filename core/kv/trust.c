/* The trust in a stream of KV events: see trust.h. Called by stream.c on the indexer's thread, and
 * by its test. Pure: owns nothing outside *t, knows no socket and no clock.
 *
 * What is missing is asked for; what cannot be had means that the rank's entries may be wrong, so
 * they are cleared: a router that believes in blocks which are gone sends requests to the wrong
 * worker for as long as it believes, one that forgets learns again. */
#include "kv/trust.h"

#include <string.h>

const char *pl_trust_state_name(pl_trust_state s)
{
    switch (s) {
#define XX(name, text)                                                                             \
    case PL_TRUST_##name:                                                                          \
        return text;
        PL_TRUST_STATE_MAP(XX)
#undef XX
    }
    return "?";
}

static void enter(pl_trust *t, pl_trust_state s, uint64_t now_ns)
{
    if (t->state != s)
        t->since_ns = now_ns;
    t->state = s;
}

void pl_trust_init(pl_trust *t, const pl_trust_options *o, uint64_t now_ns)
{
    memset(t, 0, sizeof *t);
    t->o = *o;
    t->since_ns = t->trusted_at = now_ns;
    t->quiet_for_ns = o->quiet_ns;
}

/* --- fingerprints --- */

static void remember(pl_trust *t, uint64_t seq, uint64_t print)
{
    t->prints[seq % PL_TRUST_PRINTS].seq = seq;
    t->prints[seq % PL_TRUST_PRINTS].print = print;
    t->prints[seq % PL_TRUST_PRINTS].valid = true;
}

static bool remembered(const pl_trust *t, uint64_t seq, uint64_t *print)
{
    if (!t->prints[seq % PL_TRUST_PRINTS].valid || t->prints[seq % PL_TRUST_PRINTS].seq != seq)
        return false;
    *print = t->prints[seq % PL_TRUST_PRINTS].print;
    return true;
}

/* Nothing of the stream is known any more. */
static void forget(pl_trust *t)
{
    memset(t->prints, 0, sizeof t->prints);
    t->known = t->complete = t->heard = t->has_last = false;
    t->next = t->last_live = 0;
}

/* Batch seq is the last that was applied. */
static void applied(pl_trust *t, uint64_t seq, uint64_t print)
{
    t->next = seq + 1;
    t->has_last = true;
    t->last_print = print;
}

/* --- asking --- */

static bool may_replay(const pl_trust *t, uint64_t now_ns)
{
    return t->o.replay && now_ns >= t->ask_not_before;
}

/* Wants a replay: from the last batch that is known, else from the first there ever was. */
static unsigned want_replay(pl_trust *t, uint64_t now_ns, bool check)
{
    t->ask = PL_ASK_REPLAY;
    t->asked = t->unsure = false;
    t->check = check;
    t->verify = t->known && t->next > 0;
    t->ask_from = t->verify ? t->next - 1 : 0;
    enter(t, PL_TRUST_GAP, now_ns);
    return PL_DO_REPLAY;
}

static void stop_asking(pl_trust *t)
{
    t->ask = PL_ASK_NOTHING;
    t->asked = t->check = t->verify = false;
}

/* What is missing cannot be replayed. After it the stream begins with the next batch there is. */
static unsigned give_up(pl_trust *t, uint64_t now_ns, bool snapshot)
{
    if (snapshot && t->o.snapshot && now_ns >= t->ask_not_before) {
        t->ask = PL_ASK_SNAPSHOT;
        t->asked = t->check = t->verify = false;
        enter(t, PL_TRUST_GAP, now_ns);
        return PL_DO_SNAPSHOT;
    }
    stop_asking(t);
    bool had = t->known;
    t->known = t->complete = false;
    t->resets += had;
    enter(t, had ? PL_TRUST_RESET : PL_TRUST_NEW, now_ns);
    return PL_DO_CLEAR;
}

/* The stream begins with this batch. */
static unsigned begin_at(pl_trust *t, uint64_t now_ns, uint64_t seq, uint64_t print)
{
    t->known = true;
    t->complete = seq == 0;
    applied(t, seq, print);
    if (t->complete || t->state != PL_TRUST_RESET)
        enter(t, PL_TRUST_LIVE, now_ns);
    return PL_DO_APPLY;
}

/* Batches before this one are missing. */
static unsigned gap(pl_trust *t, uint64_t now_ns, uint64_t seq, uint64_t print)
{
    t->gaps++;
    t->missed += seq - t->next;
    if (may_replay(t, now_ns))
        return want_replay(t, now_ns, false) | PL_DO_HOLD;
    unsigned what = give_up(t, now_ns, true);
    return what & PL_DO_SNAPSHOT ? what | PL_DO_HOLD : what | begin_at(t, now_ns, seq, print);
}

static unsigned cut_off(pl_trust *t, uint64_t now_ns)
{
    if (now_ns - t->trusted_at > t->o.quiet_max_ns)
        t->quiet_for_ns = t->o.quiet_ns;
    t->quiet_until = now_ns + t->quiet_for_ns;
    t->quiet_for_ns =
        t->quiet_for_ns * 2 < t->o.quiet_max_ns ? t->quiet_for_ns * 2 : t->o.quiet_max_ns;
    t->bad_in_window = t->restarts_in_window = 0;
    stop_asking(t);
    forget(t);
    enter(t, PL_TRUST_UNTRUSTED, now_ns);
    return PL_DO_CLEAR | PL_DO_FORGET | PL_DO_STOP | PL_DO_SHUT;
}

/* Counts a restart; true when no engine restarts that often. */
static bool restarts_too_often(pl_trust *t, uint64_t now_ns)
{
    if (now_ns - t->restart_window_at >= t->o.bad_window_ns) {
        t->restart_window_at = now_ns;
        t->restarts_in_window = 0;
    }
    t->restarts++;
    return ++t->restarts_in_window > t->o.bad_max;
}

/* This batch is of a new lifetime of the engine. */
static unsigned restart(pl_trust *t, uint64_t now_ns, uint64_t seq, uint64_t print)
{
    if (restarts_too_often(t, now_ns))
        return cut_off(t, now_ns);
    stop_asking(t);
    forget(t);
    t->ask_not_before = 0; /* that the one before did not answer says nothing of this one */
    t->attempts = 0;
    remember(t, seq, print);
    t->heard = true;
    t->last_live = seq;
    unsigned what = PL_DO_CLEAR | PL_DO_FORGET | PL_DO_STOP;
    if (seq > 0 && may_replay(t, now_ns))
        return what | want_replay(t, now_ns, false) | PL_DO_HOLD;
    enter(t, PL_TRUST_RESET, now_ns);
    t->resets += seq > 0;
    return what | begin_at(t, now_ns, seq, print);
}

unsigned pl_trust_start(pl_trust *t, uint64_t now_ns)
{
    if (may_replay(t, now_ns))
        return want_replay(t, now_ns, true);
    return 0;
}

/* --- abuse --- */

/* Counts a message; true when there are too many or too much of them. */
static bool floods(pl_trust *t, uint64_t now_ns, uint64_t bytes)
{
    if (now_ns - t->rate_window_at >= PL_TRUST_S) {
        t->rate_window_at = now_ns;
        t->rate_bytes = t->rate_batches = 0;
    }
    t->rate_bytes += bytes;
    t->rate_batches++;
    bool flood = (t->o.bytes_per_second_max && t->rate_bytes > t->o.bytes_per_second_max) ||
                 (t->o.batches_per_second_max && t->rate_batches > t->o.batches_per_second_max);
    t->floods += flood;
    return flood;
}

/* Counts a malformed message; true when there are too many. */
static bool too_bad(pl_trust *t, uint64_t now_ns)
{
    if (now_ns - t->bad_window_at >= t->o.bad_window_ns) {
        t->bad_window_at = now_ns;
        t->bad_in_window = 0;
    }
    t->bad++;
    return ++t->bad_in_window > t->o.bad_max;
}

unsigned pl_trust_bad(pl_trust *t, uint64_t now_ns, bool numbered, uint64_t seq)
{
    if (t->state == PL_TRUST_UNTRUSTED)
        return 0;
    if (too_bad(t, now_ns))
        return cut_off(t, now_ns);
    if (!numbered || !t->known || seq + 1 != t->next)
        return 0;
    /* its events are lost, and another replay would bring the same bytes */
    t->complete = false;
    t->resets++;
    if (t->ask == PL_ASK_NOTHING)
        enter(t, PL_TRUST_RESET, now_ns);
    return PL_DO_CLEAR;
}

unsigned pl_trust_flood(pl_trust *t, uint64_t now_ns)
{
    if (t->state == PL_TRUST_UNTRUSTED)
        return 0;
    t->floods++;
    return cut_off(t, now_ns);
}

/* --- batches --- */

unsigned pl_trust_live(pl_trust *t, uint64_t now_ns, uint64_t seq, uint64_t print, uint64_t epoch,
                       uint64_t bytes)
{
    if (t->state == PL_TRUST_UNTRUSTED)
        return 0;
    if (floods(t, now_ns, bytes))
        return cut_off(t, now_ns);
    t->unreachable_at = 0;
    bool other_life = epoch && t->epoch && epoch != t->epoch;
    if (epoch)
        t->epoch = epoch;
    if (other_life)
        return restart(t, now_ns, seq, print);
    uint64_t was;
    if (remembered(t, seq, &was)) {
        bool again = t->heard && seq <= t->last_live;
        if (was != print)
            return restart(t, now_ns, seq, print);
        t->duplicates += again;
        if (!again) { /* known from a replay */
            t->heard = true;
            t->last_live = seq;
        }
        return 0;
    }
    if ((t->heard && seq < t->last_live) || (t->known && seq + PL_TRUST_PRINTS < t->next))
        return restart(t, now_ns, seq, print);
    t->heard = true;
    t->last_live = seq;
    remember(t, seq, print);
    if (t->ask != PL_ASK_NOTHING)
        return PL_DO_HOLD;
    return pl_trust_held(t, now_ns, seq, print);
}

unsigned pl_trust_held(pl_trust *t, uint64_t now_ns, uint64_t seq, uint64_t print)
{
    if (t->ask != PL_ASK_NOTHING)
        return PL_DO_HOLD;
    if (!t->known) {
        if (seq > 0 && may_replay(t, now_ns))
            return want_replay(t, now_ns, false) | PL_DO_HOLD;
        return begin_at(t, now_ns, seq, print);
    }
    if (t->unsure && may_replay(t, now_ns))
        return want_replay(t, now_ns, true) | PL_DO_HOLD;
    if (seq < t->next)
        return 0;
    if (seq > t->next)
        return gap(t, now_ns, seq, print);
    applied(t, seq, print);
    enter(t, PL_TRUST_LIVE, now_ns);
    return PL_DO_APPLY;
}

unsigned pl_trust_unnumbered(pl_trust *t, uint64_t now_ns, uint64_t bytes)
{
    if (t->state == PL_TRUST_UNTRUSTED)
        return 0;
    if (floods(t, now_ns, bytes))
        return cut_off(t, now_ns);
    if (t->ask == PL_ASK_NOTHING)
        enter(t, PL_TRUST_LIVE, now_ns);
    return PL_DO_APPLY;
}

void pl_trust_emptied(pl_trust *t)
{
    t->complete = t->known;
}

/* --- answers --- */

void pl_trust_asked(pl_trust *t, uint64_t now_ns)
{
    if (t->ask == PL_ASK_NOTHING)
        return;
    t->asked = true;
    t->brought = false;
    t->ask_idle_at = now_ns + t->o.ask_idle_ns;
    t->ask_total_at = now_ns + t->o.ask_total_ns;
    enter(t, PL_TRUST_REPLAYING, now_ns);
}

/* The engine that answers is not the one that was heard. */
static unsigned answered_by_another(pl_trust *t, uint64_t now_ns)
{
    if (restarts_too_often(t, now_ns))
        return cut_off(t, now_ns);
    forget(t);
    return PL_DO_CLEAR | PL_DO_FORGET | PL_DO_STOP | want_replay(t, now_ns, false);
}

unsigned pl_trust_replayed(pl_trust *t, uint64_t now_ns, uint64_t seq, uint64_t print)
{
    if (t->ask != PL_ASK_REPLAY || !t->asked || seq < t->ask_from)
        return 0;
    t->ask_idle_at = now_ns + t->o.ask_idle_ns;
    unsigned what = 0;
    if (t->verify) {
        t->verify = false;
        if (seq == t->ask_from)
            return t->has_last && t->last_print != print ? answered_by_another(t, now_ns) : 0;
        t->known = false; /* the engine kept nothing that we know: begin with what it has */
    }
    if (!t->known) {
        if (seq > 0 || t->next > 0) {
            what = PL_DO_CLEAR;
            t->resets += t->next > 0;
        }
        t->known = true;
        t->complete = seq == 0;
        t->next = seq;
    }
    if (seq < t->next)
        return what;
    if (seq > t->next) {
        /* the answer lost messages on its way: once more from the last good one, until that does
         * not help */
        if (++t->attempts < t->o.ask_attempts)
            return PL_DO_STOP | want_replay(t, now_ns, t->check);
        t->gaps++;
        t->missed += seq - t->next;
        t->resets++;
        t->complete = false;
        what |= PL_DO_CLEAR;
    } else {
        t->attempts = 0;
    }
    t->brought = true;
    applied(t, seq, print);
    remember(t, seq, print);
    return what | PL_DO_APPLY;
}

unsigned pl_trust_replay_end(pl_trust *t, uint64_t now_ns)
{
    if (t->ask != PL_ASK_REPLAY || !t->asked)
        return 0;
    if (t->verify) /* it has published less than we know */
        return answered_by_another(t, now_ns);
    if (!t->known && !t->heard) {
        t->known = t->complete = true; /* nothing was ever published */
        t->next = 0;
    } else if (!t->brought && !(t->known && t->check) && ++t->attempts >= t->o.ask_attempts) {
        /* it publishes but keeps nothing of what is missing: what is held is the beginning */
        t->attempts = 0;
        t->ask_not_before = now_ns + t->o.ask_cooldown_ns;
    }
    if (t->brought || (t->known && t->check))
        t->attempts = 0;
    t->replays++;
    stop_asking(t);
    enter(t, t->known ? PL_TRUST_LIVE : PL_TRUST_NEW, now_ns);
    return PL_DO_STOP | PL_DO_FLUSH;
}

unsigned pl_trust_snapshot_end(pl_trust *t, uint64_t now_ns, uint64_t resume_seq)
{
    if (t->ask != PL_ASK_SNAPSHOT || !t->asked)
        return 0;
    t->snapshots++;
    t->attempts = 0;
    stop_asking(t);
    t->known = true;
    t->complete = false;
    t->next = resume_seq;
    t->has_last = false;
    enter(t, PL_TRUST_LIVE, now_ns);
    return PL_DO_STOP | PL_DO_FLUSH;
}

void pl_trust_snapshot_goes_on(pl_trust *t, uint64_t now_ns)
{
    t->ask_idle_at = now_ns + t->o.ask_idle_ns;
}

unsigned pl_trust_ask_failed(pl_trust *t, uint64_t now_ns)
{
    if (t->ask == PL_ASK_NOTHING)
        return 0;
    bool replay = t->ask == PL_ASK_REPLAY, check = t->check;
    t->replays_failed += replay;
    if (replay && ++t->attempts < t->o.ask_attempts)
        return PL_DO_STOP | want_replay(t, now_ns, check);
    t->attempts = 0;
    if (replay && check && (t->known || !t->heard)) { /* nothing is known to be wrong */
        t->ask_not_before = now_ns + t->o.ask_cooldown_ns;
        stop_asking(t);
        enter(t, t->known ? PL_TRUST_STALE : PL_TRUST_NEW, now_ns);
        return PL_DO_STOP | PL_DO_FLUSH;
    }
    unsigned what = give_up(t, now_ns, replay && t->known);
    t->ask_not_before = now_ns + t->o.ask_cooldown_ns;
    return PL_DO_STOP | what | (what & PL_DO_SNAPSHOT ? 0 : PL_DO_FLUSH);
}

/* --- time and connections --- */

void pl_trust_lost(pl_trust *t, uint64_t now_ns)
{
    t->lost = t->unsure = true;
    if (!t->unreachable_at)
        t->unreachable_at = now_ns;
}

unsigned pl_trust_connected(pl_trust *t, uint64_t now_ns)
{
    bool again = t->lost;
    t->lost = false;
    t->unreachable_at = 0;
    t->unsure |= again; /* what is under way may yet be answered by the one from before */
    if (!t->o.replay || t->state == PL_TRUST_UNTRUSTED || t->ask != PL_ASK_NOTHING ||
        (!again && t->known))
        return 0;
    t->ask_not_before = 0;
    t->attempts = 0;
    return want_replay(t, now_ns, true);
}

unsigned pl_trust_tick(pl_trust *t, uint64_t now_ns, uint64_t used_since_ns)
{
    if (t->state == PL_TRUST_UNTRUSTED) {
        if (now_ns < t->quiet_until)
            return 0;
        t->trusted_at = now_ns;
        t->unreachable_at = 0;
        t->lost = t->unsure = false;
        t->ask_not_before = 0;
        t->attempts = 0;
        enter(t, PL_TRUST_NEW, now_ns);
        return PL_DO_OPEN | pl_trust_start(t, now_ns);
    }
    if (t->ask != PL_ASK_NOTHING)
        return t->asked && (now_ns >= t->ask_idle_at || now_ns >= t->ask_total_at)
                   ? pl_trust_ask_failed(t, now_ns)
                   : 0;
    if (t->unsure && !t->lost && t->known && may_replay(t, now_ns))
        return want_replay(t, now_ns, true);
    if (!t->o.stale_ns || (t->state != PL_TRUST_LIVE && t->state != PL_TRUST_RESET))
        return 0;
    if (t->unreachable_at && now_ns - t->unreachable_at >= t->o.stale_ns) {
        enter(t, PL_TRUST_STALE, now_ns);
        return 0;
    }
    if (!used_since_ns || used_since_ns > now_ns || now_ns - used_since_ns < t->o.stale_ns)
        return 0;
    /* it may have nothing new to say: a replay of its last batch tells */
    if (may_replay(t, now_ns))
        return want_replay(t, now_ns, true);
    enter(t, PL_TRUST_STALE, now_ns);
    return 0;
}
