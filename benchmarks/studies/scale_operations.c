/* Counts the file operations of a process below given directories, and makes each take a while.
 *
 *     cc -shared -fPIC -O1 -o operations.so scale_operations.c -ldl
 *     LD_PRELOAD=operations.so OPERATIONS_BELOW=/data:/venv OPERATIONS_MS=5 python ...
 *
 * `operations(place, kind)` returns the count of a kind below the directory of that number. What
 * a client keeps open costs it no more requests, so read, write and close are not counted.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OPEN, STAT, REMOVE, RENAME, MAKE, LIST, SYNC, KINDS };
enum { PLACES = 4 };
static _Atomic long counts[PLACES][KINDS];
static _Atomic int off;

long operations(int place, int kind) { return counts[place][kind]; }
void operations_pause(int paused) { off = paused; }

static int place_of(const char *path) {
    static char below[PLACES][4096];
    static _Atomic int known = -1;
    if (known < 0) {
        const char *list = getenv("OPERATIONS_BELOW");
        char copy[4 * 4096], *rest = copy;
        int number = 0;
        snprintf(copy, sizeof copy, "%s", list ? list : "");
        for (char *part; (part = strsep(&rest, ":")) && number < PLACES;)
            if (*part) snprintf(below[number++], sizeof below[0], "%s", part);
        known = number;
    }
    for (int number = 0; number < known; number++)
        if (!strncmp(path, below[number], strlen(below[number]))) return number;
    return -1;
}

static void count_path(int kind, const char *path) {
    int place = off ? -1 : place_of(path);
    if (place < 0) return;
    counts[place][kind]++;
    const char *milliseconds = place ? NULL : getenv("OPERATIONS_MS");
    if (milliseconds && atof(milliseconds) > 0) {
        double seconds = atof(milliseconds) / 1000;
        struct timespec wait = {(time_t)seconds, (long)(1e9 * (seconds - (time_t)seconds))};
        nanosleep(&wait, NULL);
    }
}

static void count(int kind, int directory, const char *path) {
    if (off || !path) return;
    if (path[0] == '/') { count_path(kind, path); return; }
    char link[64], whole[8192];
    snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d",
             directory);
    ssize_t length = readlink(link, whole, 4096);
    if (length <= 0) return;
    snprintf(whole + length, sizeof whole - (size_t)length, "%s%s", *path ? "/" : "", path);
    count_path(kind, whole);
}

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static mode_t mode_of(int flags, va_list rest) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}
#define OPENS(name)                                          \
    int name(const char *path, int flags, ...) {             \
        va_list rest;                                        \
        va_start(rest, flags);                               \
        mode_t mode = mode_of(flags, rest);                  \
        va_end(rest);                                        \
        count(OPEN, AT_FDCWD, path);                         \
        return REAL(name)(path, flags, mode);                \
    }
#define OPENS_AT(name)                                       \
    int name(int directory, const char *path, int flags, ...) { \
        va_list rest;                                        \
        va_start(rest, flags);                               \
        mode_t mode = mode_of(flags, rest);                  \
        va_end(rest);                                        \
        count(OPEN, directory, path);                        \
        return REAL(name)(directory, path, flags, mode);     \
    }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)
FILE *fopen(const char *path, const char *mode) {
    count(OPEN, AT_FDCWD, path);
    return REAL(fopen)(path, mode);
}
FILE *fopen64(const char *path, const char *mode) {
    count(OPEN, AT_FDCWD, path);
    return REAL(fopen64)(path, mode);
}
int stat(const char *path, struct stat *found) {
    count(STAT, AT_FDCWD, path);
    return REAL(stat)(path, found);
}
int stat64(const char *path, struct stat64 *found) {
    count(STAT, AT_FDCWD, path);
    return REAL(stat64)(path, found);
}
int lstat(const char *path, struct stat *found) {
    count(STAT, AT_FDCWD, path);
    return REAL(lstat)(path, found);
}
int lstat64(const char *path, struct stat64 *found) {
    count(STAT, AT_FDCWD, path);
    return REAL(lstat64)(path, found);
}
int fstatat(int directory, const char *path, struct stat *found, int flags) {
    if (*path) count(STAT, directory, path);
    return REAL(fstatat)(directory, path, found, flags);
}
int fstatat64(int directory, const char *path, struct stat64 *found, int flags) {
    if (*path) count(STAT, directory, path);
    return REAL(fstatat64)(directory, path, found, flags);
}
int statx(int directory, const char *path, int flags, unsigned mask, struct statx *found) {
    if (*path) count(STAT, directory, path);
    return REAL(statx)(directory, path, flags, mask, found);
}
int access(const char *path, int mode) {
    count(STAT, AT_FDCWD, path);
    return REAL(access)(path, mode);
}
int unlink(const char *path) {
    count(REMOVE, AT_FDCWD, path);
    return REAL(unlink)(path);
}
int unlinkat(int directory, const char *path, int flags) {
    count(REMOVE, directory, path);
    return REAL(unlinkat)(directory, path, flags);
}
int rmdir(const char *path) {
    count(REMOVE, AT_FDCWD, path);
    return REAL(rmdir)(path);
}
int rename(const char *from, const char *to) {
    count(RENAME, AT_FDCWD, from);
    return REAL(rename)(from, to);
}
int mkdir(const char *path, mode_t mode) {
    count(MAKE, AT_FDCWD, path);
    return REAL(mkdir)(path, mode);
}
DIR *opendir(const char *path) {
    count(LIST, AT_FDCWD, path);
    return REAL(opendir)(path);
}
DIR *fdopendir(int directory) {
    count(LIST, directory, "");
    return REAL(fdopendir)(directory);
}
int fsync(int file) {
    count(SYNC, file, "");
    return REAL(fsync)(file);
}
