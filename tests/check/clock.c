/* Preloaded into a server: moves its clock ahead by a number of microseconds, the first eight bytes
   of the file that REDLATCH_CLOCK names. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static int64_t ahead(void) {
    static volatile int64_t *shared;
    if (!shared) {
        const char *path = getenv("REDLATCH_CLOCK");
        int file = path ? open(path, O_RDONLY) : -1;
        if (file < 0) return 0;
        void *page = mmap(0, sizeof *shared, PROT_READ, MAP_SHARED, file, 0);
        if (page == MAP_FAILED) return 0;
        shared = page;
    }
    return *shared;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (failed || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return failed;
    int64_t nanos = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + ahead() * 1000;
    now->tv_sec = nanos / 1000000000;
    now->tv_nsec = nanos % 1000000000;
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    int failed = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}
