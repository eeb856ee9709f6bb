/* A policy's bytes: the main file and the files beside it that it requires. Made by whoever loads a
 * policy (control thread), then shared by the VMs of all loops, which may be rebuilt on their own
 * threads: a mutex guards the list of files. Once the first VM stands the list is sealed, so every
 * VM of a generation sees the same bytes, and the hash covers all of them. */
#include "policy/source.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "policy/embedded.h"

#define MAX_FILE_BYTES (1u << 20)
#define MAX_FILES      64
#define BUILTIN        "builtin:"

struct pl_policy_source {
    _Atomic int refs;
    char *file;  /* path or builtin:NAME */
    char *dir;   /* with its trailing slash; "" for the current one; NULL for embedded policies */
    char *label; /* default name */
    json_t *params;
    pthread_mutex_t lock;  /* guards what follows */
    pl_source_file *files; /* the main file first */
    int files_n;
    bool sealed;
    char sha256[65];
};

static int read_file(const char *path, char **out, size_t *n, pl_errbuf *eb)
{
    /* non-blocking, so that a FIFO cannot hang the router */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return pl_fail(eb, errno == ENOENT ? PL_ENOTFOUND : PL_EIO, "cannot open %s: %s", path,
                       strerror(errno));
    struct stat st;
    int rc = 0;
    char *bytes = NULL;
    size_t have = 0;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
        rc = pl_fail(eb, PL_EIO, "%s is not a regular file", path);
    else if (st.st_size > MAX_FILE_BYTES)
        rc = pl_fail(eb, PL_ELIMIT, "%s is larger than %u bytes", path, MAX_FILE_BYTES);
    else if (!(bytes = malloc(MAX_FILE_BYTES + 1)))
        rc = pl_fail(eb, PL_ENOMEM, "out of memory");
    while (rc == 0) {
        ssize_t got = read(fd, bytes + have, MAX_FILE_BYTES + 1 - have);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            rc = pl_fail(eb, PL_EIO, "cannot read %s: %s", path, strerror(errno));
        else if ((have += (size_t)got) > MAX_FILE_BYTES)
            rc = pl_fail(eb, PL_ELIMIT, "%s is larger than %u bytes", path, MAX_FILE_BYTES);
        if (got <= 0 || rc)
            break;
    }
    close(fd);
    if (rc) {
        free(bytes);
        return rc;
    }
    char *fit = realloc(bytes, have + 1);
    *out = fit ? fit : bytes;
    (*out)[have] = 0;
    *n = have;
    return 0;
}

static void file_free(pl_source_file *f)
{
    free(f->name);
    free(f->chunk);
    free(f->bytes);
    free(f);
}

/* Takes bytes, also on failure. */
static int add_file(pl_policy_source *s, const char *name, const char *shown, char *bytes, size_t n,
                    const pl_source_file **out, pl_errbuf *eb)
{
    pl_source_file *f = calloc(1, sizeof *f), **end = &s->files;
    size_t shown_n = strlen(shown);
    if (f) {
        f->name = pl_str_dup(pl_str_c(name));
        f->chunk = malloc(shown_n + 2);
    }
    if (!f || !f->name || !f->chunk || !bytes) {
        if (f)
            file_free(f);
        free(bytes);
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    }
    f->chunk[0] = '@';
    memcpy(f->chunk + 1, shown, shown_n + 1);
    f->bytes = bytes;
    f->n = n;
    while (*end)
        end = &(*end)->next;
    *end = f;
    s->files_n++;
    *out = f;
    return 0;
}

static int add_embedded(pl_policy_source *s, const char *name, const pl_source_file **out,
                        pl_errbuf *eb)
{
    char path[256];
    snprintf(path, sizeof path, "policies/%s", name);
    const pl_embedded *e = pl_embedded_find(path);
    if (!e)
        return pl_fail(eb, PL_ENOTFOUND, "there is no ready-made file %s", path);
    return add_file(s, name, path, pl_str_dup((pl_str){e->bytes, e->n}), e->n, out, eb);
}

const char *const *pl_policy_builtin_names(void)
{
    static const char *names[65];
    static char text[64][64];
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&once);
    if (!names[0]) {
        int n = 0;
        for (const pl_embedded *e = pl_embedded_files; e->name && n < 64; e++) {
            pl_str file = pl_str_c(e->name);
            if (!pl_str_starts(file, PL_STR("policies/")) || !pl_str_ends(file, PL_STR(".lua")))
                continue;
            snprintf(text[n], sizeof text[n], "%.*s", (int)file.n - 13, file.p + 9);
            names[n] = text[n];
            n++;
        }
    }
    pthread_mutex_unlock(&once);
    return names;
}

static int unknown_builtin(pl_str name, pl_errbuf *eb)
{
    char known[512] = "";
    size_t n = 0;
    for (const char *const *p = pl_policy_builtin_names(); *p && n + 66 < sizeof known; p++)
        n += (size_t)snprintf(known + n, sizeof known - n, "%s%s", n ? ", " : "", *p);
    return pl_fail(
        eb, PL_ENOTFOUND,
        "there is no ready-made policy '%.*s' (there are: %s); a file is given by a path "
        "that contains '/' or ends in .lua",
        PL_FMT(name), known);
}

static int load_main(pl_policy_source *s, pl_str given, pl_errbuf *eb)
{
    const pl_source_file *main_file;
    bool is_path = memchr(given.p, '/', given.n) != NULL || pl_str_ends(given, PL_STR(".lua"));
    if (pl_str_starts(given, PL_STR(BUILTIN))) {
        given = (pl_str){given.p + strlen(BUILTIN), given.n - strlen(BUILTIN)};
        is_path = false;
    }
    if (!is_path) {
        char file[128];
        if (given.n == 0 || given.n > 64)
            return unknown_builtin(given, eb);
        snprintf(file, sizeof file, BUILTIN "%.*s", PL_FMT(given));
        s->file = pl_str_dup(pl_str_c(file));
        s->label = pl_str_dup(given);
        snprintf(file, sizeof file, "%.*s.lua", PL_FMT(given));
        if (!s->file || !s->label)
            return pl_fail(eb, PL_ENOMEM, "out of memory");
        int rc = add_embedded(s, file, &main_file, eb);
        return rc == PL_ENOTFOUND ? unknown_builtin(given, eb) : rc;
    }
    if (given.n >= 512 || memchr(given.p, 0, given.n))
        return pl_fail(eb, PL_EINVALID, "the policy's path is too long or has a NUL");
    const char *slash = memrchr(given.p, '/', given.n);
    size_t dir_n = slash ? (size_t)(slash - given.p) + 1 : 0;
    pl_str base = {given.p + dir_n, given.n - dir_n}, label = base;
    if (pl_str_ends(label, PL_STR(".lua")))
        label.n -= 4;
    s->file = pl_str_dup(given);
    s->dir = pl_str_dup((pl_str){given.p, dir_n});
    s->label = pl_str_dup(label);
    char *name = pl_str_dup(base), *bytes;
    size_t n;
    int rc = 0;
    if (!s->file || !s->dir || !s->label || !name)
        rc = pl_fail(eb, PL_ENOMEM, "out of memory");
    if (rc == 0)
        rc = read_file(s->file, &bytes, &n, eb);
    if (rc == 0)
        rc = add_file(s, name, s->file, bytes, n, &main_file, eb);
    free(name);
    return rc;
}

int pl_policy_source_load(pl_str name_or_file, const json_t *params, pl_policy_source **out,
                          pl_errbuf *eb)
{
    *out = NULL;
    pl_policy_source *s = calloc(1, sizeof *s);
    if (!s)
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    atomic_init(&s->refs, 1);
    pthread_mutex_init(&s->lock, NULL);
    int rc = load_main(s, name_or_file, eb);
    if (rc == 0 && params && !(s->params = json_deep_copy(params)))
        rc = pl_fail(eb, PL_ENOMEM, "out of memory");
    if (rc < 0) {
        pl_policy_source_unref(s);
        return rc;
    }
    *out = s;
    return 0;
}

pl_policy_source *pl_policy_source_ref(pl_policy_source *s)
{
    atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
    return s;
}

void pl_policy_source_unref(pl_policy_source *s)
{
    if (!s || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1)
        return;
    for (pl_source_file *f = s->files, *next; f; f = next) {
        next = f->next;
        file_free(f);
    }
    free(s->file);
    free(s->dir);
    free(s->label);
    json_decref(s->params);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

const char *pl_policy_source_file(const pl_policy_source *s)
{
    return s->file;
}

const char *pl_policy_source_sha256(const pl_policy_source *s)
{
    return s->sha256;
}

const pl_source_file *pl_source_main(const pl_policy_source *s)
{
    return s->files;
}

const json_t *pl_source_params(const pl_policy_source *s)
{
    return s->params;
}

const char *pl_source_label(const pl_policy_source *s)
{
    return s->label;
}

/* "a.b" to "a/b.lua". False when it is no module name. */
static bool module_path(const char *module, char *out, size_t cap)
{
    size_t n = strlen(module);
    if (n == 0 || n + 5 > cap || module[0] == '.' || module[n - 1] == '.' || strstr(module, ".."))
        return false;
    for (size_t i = 0; i < n; i++) {
        char c = module[i];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
              c == '_' || c == '.'))
            return false;
        out[i] = c == '.' ? '/' : c;
    }
    memcpy(out + n, ".lua", 5);
    return true;
}

static int module_locked(pl_policy_source *s, const char *module, const char *name,
                         const pl_source_file **out, pl_errbuf *eb)
{
    for (const pl_source_file *f = s->files; f; f = f->next) {
        if (strcmp(f->name, name) == 0) {
            *out = f;
            return 0;
        }
    }
    if (s->sealed)
        return pl_fail(eb, PL_ENOTFOUND,
                       "require '%s': this file was not read when the policy was first loaded",
                       module);
    if (s->files_n >= MAX_FILES)
        return pl_fail(eb, PL_ELIMIT, "require '%s': a policy may have %d files", module,
                       MAX_FILES);
    if (!s->dir)
        return add_embedded(s, name, out, eb);
    size_t cap = strlen(s->dir) + strlen(name) + 1;
    char *path = malloc(cap), *bytes;
    size_t n;
    if (!path)
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    snprintf(path, cap, "%s%s", s->dir, name);
    int rc = read_file(path, &bytes, &n, eb);
    if (rc == 0)
        rc = add_file(s, name, path, bytes, n, out, eb);
    free(path);
    return rc;
}

int pl_source_module(pl_policy_source *s, const char *module, const pl_source_file **out,
                     pl_errbuf *eb)
{
    char name[256];
    if (!module_path(module, name, sizeof name))
        return pl_fail(eb, PL_EINVALID,
                       "require '%.100s': policies may require \"perilune\", \"perilune.NAME\" and "
                       "files beside them, named with letters, digits, _ and . for folders",
                       module);
    pthread_mutex_lock(&s->lock);
    int rc = module_locked(s, module, name, out, eb);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

static bool sha256_hex(const void *p, size_t n, char out[65])
{
    unsigned char digest[32];
    if (EVP_Digest(p, n, digest, NULL, EVP_sha256(), NULL) != 1)
        return false;
    for (int i = 0; i < 32; i++)
        snprintf(out + 2 * i, 3, "%02x", digest[i]);
    return true;
}

/* One file: its own hash. Several: the hash of the lines `sha256  name`, main file first, as
 * sha256sum prints them, so that people can check it with that tool. */
static void hash_locked(pl_policy_source *s)
{
    if (!s->files->next) {
        if (!sha256_hex(s->files->bytes, s->files->n, s->sha256))
            s->sha256[0] = 0;
        return;
    }
    char lines[MAX_FILES * 330], hex[65];
    size_t n = 0;
    for (const pl_source_file *f = s->files; f; f = f->next) {
        if (!sha256_hex(f->bytes, f->n, hex))
            return;
        int more = snprintf(lines + n, sizeof lines - n, "%s  %s\n", hex, f->name);
        if (more < 0 || (size_t)more >= sizeof lines - n)
            return;
        n += (size_t)more;
    }
    if (!sha256_hex(lines, n, s->sha256))
        s->sha256[0] = 0;
}

void pl_source_seal(pl_policy_source *s)
{
    pthread_mutex_lock(&s->lock);
    if (!s->sealed)
        hash_locked(s);
    s->sealed = true;
    pthread_mutex_unlock(&s->lock);
}

const pl_source_file *pl_source_shown(pl_policy_source *s, pl_str shown)
{
    pthread_mutex_lock(&s->lock);
    const pl_source_file *f = s->files;
    for (; f; f = f->next) {
        pl_str path = pl_str_c(f->chunk + 1);
        if (pl_str_eq(path, shown))
            break;
        if (pl_str_starts(shown, PL_STR("...")) &&
            pl_str_ends(path, (pl_str){shown.p + 3, shown.n - 3}))
            break;
    }
    pthread_mutex_unlock(&s->lock);
    return f;
}

bool pl_policy_source_names(const pl_policy_source *s, pl_str word)
{
    for (int i = 0; s->sealed && i < s->files_n; i++)
        if (memmem(s->files[i].bytes, s->files[i].n, word.p, word.n))
            return true;
    return false;
}
