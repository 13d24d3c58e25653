/* Preloaded into a process, adds to its wall clock the nanoseconds (an
 * int64_t) that the file $WALL_CLOCK_OFFSET has at the moment, so that a test
 * can step it.  Clocks that nobody sets, such as CLOCK_MONOTONIC, stay as they
 * are. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NSEC_PER_SEC INT64_C(1000000000)

static const volatile int64_t *offset_ns;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

static void __attribute__((constructor))
init(void)
{
    const char *path = getenv("WALL_CLOCK_OFFSET");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *map = (fd < 0 ? MAP_FAILED
                 : mmap(NULL, sizeof *offset_ns, PROT_READ, MAP_SHARED, fd,
                        0));

    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    if (map == MAP_FAILED || !real_clock_gettime) {
        perror("WALL_CLOCK_OFFSET");
        _exit(EXIT_FAILURE);
    }
    close(fd);
    offset_ns = map;
}

int
clock_gettime(clockid_t clock, struct timespec *ts)
{
    int error;

    if (!real_clock_gettime) {
        init();                 /* Another library's constructor asks. */
    }
    error = real_clock_gettime(clock, ts);
    if (!error && (clock == CLOCK_REALTIME
                   || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = ts->tv_sec * NSEC_PER_SEC + ts->tv_nsec + *offset_ns;

        ts->tv_sec = ns / NSEC_PER_SEC;
        ts->tv_nsec = ns % NSEC_PER_SEC;
    }
    return error;
}

int
gettimeofday(struct timeval *restrict tv, void *restrict tz)
{
    struct timespec ts;

    (void) tz;
    clock_gettime(CLOCK_REALTIME, &ts);
    tv->tv_sec = ts.tv_sec;
    tv->tv_usec = ts.tv_nsec / 1000;
    return 0;
}

time_t
time(time_t *t)
{
    struct timespec ts;

    clock_gettime(CLOCK_REALTIME, &ts);
    if (t) {
        *t = ts.tv_sec;
    }
    return ts.tv_sec;
}
