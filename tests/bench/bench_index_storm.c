/* The differential test of the KV index against the model of the unit tests, for longer than tests
 * may take: bench_index_storm OPERATIONS [SEED]. Each 100,000 operations are another seed's, with
 * other numbers of workers, and names that lie or do not. Exits 1 at the first difference. */
#include <stdio.h>
#include <stdlib.h>

#include "../unit/kv/index_storm.h"

static void die(const char *what)
{
    fprintf(stderr, "bench_index_storm: %s\n", what);
    exit(1);
}

static int storm_for(long operations, uint64_t seed)
{
    pl_index *ix;
    pl_index_options o = {.max_bytes = UINT64_MAX};
    storm *s = calloc(1, sizeof *s);
    storm_op *op = calloc(1, sizeof *op);
    long done = 0;
    for (; s && op && done < operations; seed++) {
        model *m = calloc(1, sizeof *m);
        pl_index_reader *r = NULL;
        if (!m || pl_index_new(&o, &ix) != 0 || !(r = pl_index_reader_new(ix)))
            die("out of memory");
        pl_index_space space[STORM_SPACES];
        for (int i = 0; i < STORM_SPACES; i++)
            space[i] = pl_index_space_open(ix, PL_STR("m"), 16u + (uint32_t)i, false, (pl_str){0});
        *s = (storm){.rng = {.state = seed},
                     .workers = 1 + (int)(seed % 7) * (int)(seed % 5),
                     .honest = seed % 3 == 0,
                     .wide = seed % 2 ? 3 : 1u << 20};
        for (long i = 0; i < 100000 && done < operations; i++, done++) {
            storm_next(s, op);
            const char *wrong = storm_apply(ix, r, m, space, op, s->workers);
            if (wrong) {
                printf("seed %llu, operation %ld: %s\n", (unsigned long long)seed, i, wrong);
                return 1;
            }
            if (i % 256 == 0)
                pl_index_maintain(ix);
        }
        model_free(m);
        pl_index_reader_free(r);
        pl_index_free(ix);
    }
    free(op);
    free(s);
    printf("%ld operations, no difference\n", done);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 2)
        die("bench_index_storm OPERATIONS [SEED]");
    return storm_for(atol(argv[1]), argc > 2 ? strtoull(argv[2], NULL, 10) : 1);
}
