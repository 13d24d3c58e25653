/* Preloaded into vswitchd, makes windows of races with vhost-user guests as
 * wide as a test needs them.
 *
 * A guest that goes has DPDK's thread call OVS's destroy_device(), which takes
 * the port's device away, under the lock of all DPDK ports, and then waits
 * until no other thread uses it.  What the file $VHOST_RACE (struct race) says
 * has another thread wait, 5 s at most, until destroy_device() has done the
 * first and is about to do the second:
 *
 *     HOLD_LOCK        the main thread when it is about to take that lock,
 *                      which it does to take a port off the list of ports
 *     HOLD_UNREGISTER  whoever calls rte_vhost_driver_unregister()
 *
 * rte_vhost_driver_unregister() itself waits for callbacks, but it does so by
 * trying over and over, and if a client's connection ends between two of its
 * steps, it leaves the socket that it frees with the thread that reconnects.
 * That is a bug of DPDK (at least of 22.11) and not what is tested here: it is
 * not called until callbacks have returned. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <rte_vhost.h>

enum hold { HOLD_NOTHING, HOLD_LOCK, HOLD_UNREGISTER };

#define POLL_US 1000
#define HOLD_POLLS 5000
/* From when destroy_device() has given the lock back until it waits, and from
 * when it has returned until DPDK is done with the connection. */
#define SETTLE_US 50000

struct race {
    atomic_int hold;            /* What to hold, once; then HOLD_NOTHING. */
    atomic_int held;            /* How often something has been held. */
    atomic_int begun;           /* How often destroy_device() has waited. */
    atomic_int in_vain;         /* How often none came. */
};

/* Callbacks that tell that a guest goes, and DPDK's thread has not returned
 * from.  After the last one it needs no time that is worth mentioning. */
static atomic_int n_going;

static struct race *race;
static int (*real_lock)(pthread_mutex_t *);
static int (*real_unlock)(pthread_mutex_t *);
static int (*real_unregister)(const char *);
static int (*real_register)(const char *, const struct rte_vhost_device_ops *);

/* OVS's callbacks, and what is called in their place. */
static const struct rte_vhost_device_ops *real_ops;
static struct rte_vhost_device_ops ops;

/* The lock of all DPDK ports: the first that callbacks take. */
static pthread_mutex_t *_Atomic ports_mutex;
static __thread bool takes_ports_mutex;
static __thread bool destroys;

static void *
real(const char *name)
{
    void *function = dlsym(RTLD_NEXT, name);

    if (!function) {
        fprintf(stderr, "vhost-race: %s\n", dlerror());
        _exit(EXIT_FAILURE);
    }
    return function;
}

static void __attribute__((constructor))
init(void)
{
    const char *path = getenv("VHOST_RACE");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;

    race = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *race,
                                      PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                                      0);
    if (race == MAP_FAILED) {
        perror("VHOST_RACE");
        _exit(EXIT_FAILURE);
    }
    close(fd);
}

/* Waits for a destroy_device() if 'hold' is what is to be held. */
static void
hold(int hold)
{
    int begun = atomic_load(&race->begun);

    if (!atomic_compare_exchange_strong(&race->hold, &hold, HOLD_NOTHING)) {
        return;
    }
    atomic_fetch_add(&race->held, 1);
    for (int i = 0; atomic_load(&race->begun) == begun; i++) {
        if (i == HOLD_POLLS) {
            atomic_fetch_add(&race->in_vain, 1);
            return;
        }
        usleep(POLL_US);
    }
    usleep(SETTLE_US);
}

int
pthread_mutex_lock(pthread_mutex_t *mutex)
{
    if (!real_lock) {
        real_lock = real("pthread_mutex_lock");
    }
    if (takes_ports_mutex) {
        takes_ports_mutex = false;
        ports_mutex = mutex;
    } else if (mutex == ports_mutex && gettid() == getpid()) {
        hold(HOLD_LOCK);
    }
    return real_lock(mutex);
}

int
pthread_mutex_unlock(pthread_mutex_t *mutex)
{
    if (!real_unlock) {
        real_unlock = real("pthread_mutex_unlock");
    }

    int error = real_unlock(mutex);

    if (destroys && mutex == ports_mutex) {
        destroys = false;
        atomic_fetch_add(&race->begun, 1);
    }
    return error;
}

static int
new_device(int vid)
{
    takes_ports_mutex = true;
    return real_ops->new_device(vid);
}

static void
destroy_device(int vid)
{
    atomic_fetch_add(&n_going, 1);
    takes_ports_mutex = destroys = true;
    real_ops->destroy_device(vid);
    atomic_fetch_sub(&n_going, 1);
}

int
rte_vhost_driver_callback_register(
    const char *path, const struct rte_vhost_device_ops *const new_ops)
{
    if (!real_register) {
        real_register = real("rte_vhost_driver_callback_register");
    }
    /* The same for all ports. */
    real_ops = new_ops;
    ops = *new_ops;
    ops.new_device = new_device;
    ops.destroy_device = destroy_device;
    return real_register(path, &ops);
}

int
rte_vhost_driver_unregister(const char *path)
{
    if (!real_unregister) {
        real_unregister = real("rte_vhost_driver_unregister");
    }
    hold(HOLD_UNREGISTER);
    for (int i = 0; atomic_load(&n_going) && i < HOLD_POLLS; i++) {
        usleep(POLL_US);
    }
    usleep(SETTLE_US);
    return real_unregister(path);
}
