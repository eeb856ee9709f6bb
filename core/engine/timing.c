/* How long a step of the simulated engine takes. Called by the scheduler (sim.c) and the command
 * line; pure functions over constant tables.
 *
 * The presets come from public figures, not from measurements of ours (they are modelled, not
 * calibrated): the floor of a step from published fits of step times, prefill from the model's
 * floating-point work at 45 % (H100) or 32 % (L40S) of the card's peak, decode from reading the KV
 * cache at the memory's full bandwidth. The GLM mixture of experts reads more weights the more
 * requests decode: 8 ms at one, 33 ms at sixteen, drawn as a straight line. api_us (1.6 ms) is a
 * fit to published latencies of one benchmark. */
#include "engine/sim.h"

#include <math.h>

#define LONGEST_US 1e15 /* 31 years: sums stay in range */

static const pl_timing presets[] = {
    {"llama-8b-h100-tp1", 6900, 36, 1.2e-3, 5, 0.039, 1600},
    {"llama-70b-h100-tp4", 16600, 79, 1.5e-3, 5, 0.024, 1600},
    {"llama-8b-l40s-tp1", 23700, 138, 4.5e-3, 5, 0.152, 1600},
    {"glm47flash-l40s-tp2", 6333, 38, 4.2e-3, 1677, 0.063, 1600},
    {"instant", 0, 0, 0, 0, 0, 0},
};

const pl_timing *pl_timing_find(pl_str name)
{
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++)
        if (pl_str_eq(name, pl_str_c(presets[i].name)))
            return &presets[i];
    return NULL;
}

const char *pl_timing_names(void)
{
    return "llama-8b-h100-tp1, llama-70b-h100-tp4, llama-8b-l40s-tp1, glm47flash-l40s-tp2, instant";
}

int64_t pl_timing_step_us(const pl_timing *t, const pl_step_work *w)
{
    double us = t->base_us + t->prefill_token_us * (double)w->prefill_tokens +
                t->prefill_attn_us * w->prefill_attn + t->decode_req_us * w->decoding +
                t->kv_token_us * (double)w->context_tokens;
    int64_t whole = us < LONGEST_US ? llround(us) : (int64_t)LONGEST_US;
    return whole < 1 ? 1 : whole;
}
