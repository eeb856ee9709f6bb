/* Two routers in one process, each with a control thread, a loop, a policy and a port of its own,
 * which the system picks. They serve until the program's input ends.
 *
 *   cmake --install build
 *   cc two_routers.c $(pkg-config --cflags --libs perilune) -o two_routers
 *   ./two_routers http://127.0.0.1:30000 http://127.0.0.1:30001 */
#include <perilune.h>

#include <pthread.h>
#include <stdio.h>

static void *control(void *router)
{
    pl_router_run(router); /* until pl_router_stop */
    return NULL;
}

static pl_router *start(const char *engine, const char *policy, pthread_t *thread)
{
    char config[512], error[512] = "no thread";
    pl_router *r;
    int rc;
    snprintf(config, sizeof config,
             "{\"listen\": \"127.0.0.1:0\", \"admin\": {\"listen\": \"off\"}, \"threads\": 1,"
             " \"engines\": [\"%s\"], \"policy\": \"%s\", \"log\": {\"level\": \"warn\"}}",
             engine, policy);
    if ((rc = pl_router_new(config, &r, error, sizeof error)) != 0 ||
        (rc = pl_router_start(r, error, sizeof error)) != 0 ||
        pthread_create(thread, NULL, control, r) != 0) {
        fprintf(stderr, "%s: %s (%s)\n", engine, error, pl_strerror(rc));
        pl_router_free(r);
        return NULL;
    }
    printf("http://127.0.0.1:%d sends to %s by %s\n", pl_router_port(r), engine, policy);
    fflush(stdout);
    return r;
}

int main(int argc, char **argv)
{
    pthread_t threads[2];
    pl_router *routers[2] = {NULL, NULL};
    static const char *const policies[2] = {"least_loaded", "round_robin"};
    if (argc != 3) {
        fprintf(stderr, "usage: two_routers ENGINE_URL ENGINE_URL\n");
        return 2;
    }
    for (int i = 0; i < 2; i++)
        routers[i] = start(argv[1 + i], policies[i], &threads[i]);
    while (routers[0] && routers[1] && getchar() != EOF)
        ;
    for (int i = 0; i < 2; i++) {
        if (!routers[i])
            continue;
        pl_router_stop(routers[i]);
        pthread_join(threads[i], NULL);
        pl_router_free(routers[i]);
    }
    return routers[0] && routers[1] ? 0 : 1;
}
