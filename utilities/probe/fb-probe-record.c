/*
 * Copyright (c) 2026 The FlowBundler authors.
 *
 * Licensed under the Apache License, Version 2.0 (the "License");
 * you may not use this file except in compliance with the License.
 * You may obtain a copy of the License at:
 *
 *     http://www.apache.org/licenses/LICENSE-2.0
 *
 * Unless required by applicable law or agreed to in writing, software
 * distributed under the License is distributed on an "AS IS" BASIS,
 * WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
 * See the License for the specific language governing permissions and
 * limitations under the License.
 */

#include <linux/membarrier.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_lcore.h>

#include "fb-probe-burst.h"
#include "fb-probe-file.h"
#include "fb-probe-record.h"

#define CLOCK_INTERVAL_US 100000
#define QUIESCE_MS 1000

struct recording {
    struct fb_probe_file file;
    uint32_t n_attached;
    struct fb_probe_status status;
};

static struct fb_probe_slot slots[RTE_MAX_ETHPORTS][RTE_MAX_QUEUES_PER_PORT];

/* Protects everything below. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct recording *recordings[RTE_MAX_ETHPORTS];
static bool clock_runs;
static bool events_registered;

/* Attaching to a port's queues, and leaving them. */

static uint32_t
count_tx_queues(uint16_t port)
{
    struct rte_eth_dev_info info;

    return rte_eth_dev_info_get(port, &info) ? 0 : info.nb_tx_queues;
}

/* Has the queues of 'port' recorded that have a ring and are not yet. */
static bool
attach_queues(uint16_t port, struct recording *r)
{
    uint32_t n = RTE_MIN(count_tx_queues(port), r->status.n_rings);

    for (; r->n_attached < n; r->n_attached++) {
        struct fb_probe_slot *slot = &slots[port][r->n_attached];

        if (slot->callback) {
            /* It could not be removed when the recording ended, because
             * the port did not have this queue any more. */
            rte_eth_remove_tx_callback(port, r->n_attached, slot->callback);
        }
        slot->callback = rte_eth_add_tx_callback(port, r->n_attached,
                                                 fb_probe_observe_burst, slot);
        if (!slot->callback) {
            return false;
        }
        atomic_store_explicit(&slot->ring, &r->file.rings[r->n_attached],
                              memory_order_release);
    }
    return true;
}

static int
membarrier(int command)
{
    return syscall(__NR_membarrier, command, 0, 0);
}

static bool
port_is_busy(uint16_t port, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (atomic_load_explicit(&slots[port][i].busy,
                                 memory_order_acquire)) {
            return true;
        }
    }
    return false;
}

/* Takes the rings of 'port' from the callbacks and removes these.  Returns
 * true if no thread uses a ring any more. */
static bool
leave_queues(uint16_t port, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        struct fb_probe_slot *slot = &slots[port][i];

        atomic_store(&slot->ring, NULL);
        if (!rte_eth_remove_tx_callback(port, i, slot->callback)) {
            slot->callback = NULL;
        }
    }

    /* After this a thread that has not seen its ring vanish is seen busy: in
     * it, too, the store to 'busy' has come before the load of 'ring'. */
    if (membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED)) {
        return false;
    }
    for (int ms = 0; port_is_busy(port, n); ms++) {
        if (ms >= QUIESCE_MS) {
            return false;
        }
        usleep(1000);
    }
    return true;
}

/* Has this thread run where the application's main thread does.  EAL keeps its
 * own threads, such as telemetry's, off the cores that it knows to be busy;
 * OVS's PMD threads are not among them, and preparing memory takes long. */
static void
use_main_core(void)
{
    rte_cpuset_t cpus = rte_lcore_cpuset(rte_get_main_lcore());

    pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus);
}

/* Starting and stopping; 'mutex' is held. */

static void
free_recording(struct recording *r)
{
    fb_probe_file_unmap(&r->file);
    free(r);
}

static void
stop_recording(uint16_t port)
{
    struct recording *r = recordings[port];
    bool unused = leave_queues(port, r->n_attached);

    recordings[port] = NULL;
    fb_probe_file_add_clock(&r->file);
    fb_probe_file_set_stopped(&r->file);
    if (unused) {
        free_recording(r);
    }
}

static void
get_status(uint16_t port, struct fb_probe_status *status)
{
    *status = recordings[port]->status;
    status->n_recorded = recordings[port]->n_attached;
    status->n_tx_queues = count_tx_queues(port);
}

/* While something is recorded: adds to the clocks, and looks for queues that
 * are new. */
static void *
clock_main(void *aux __rte_unused)
{
    bool any = true;

    use_main_core();
    while (any) {
        usleep(CLOCK_INTERVAL_US);
        any = false;
        pthread_mutex_lock(&mutex);
        for (uint16_t port = 0; port < RTE_MAX_ETHPORTS; port++) {
            if (recordings[port]) {
                fb_probe_file_add_clock(&recordings[port]->file);
                attach_queues(port, recordings[port]);
                any = true;
            }
        }
        clock_runs = any;
        pthread_mutex_unlock(&mutex);
    }
    return NULL;
}

/* A port is being closed. */
static int
port_destroyed(uint16_t port, enum rte_eth_event_type event __rte_unused,
               void *aux __rte_unused, void *ret __rte_unused)
{
    pthread_mutex_lock(&mutex);
    if (recordings[port]) {
        stop_recording(port);
    }
    pthread_mutex_unlock(&mutex);
    return 0;
}

/* What the first recording needs.  It cannot be done when the plug-in is
 * loaded, which is before DPDK is initialized. */
static bool
prepare(char *error)
{
    if (!events_registered) {
        membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED);
        if (rte_eth_dev_callback_register(RTE_ETH_ALL, RTE_ETH_EVENT_DESTROY,
                                          port_destroyed, NULL)) {
            fb_probe_error(error, "cannot watch for ports being closed");
            return false;
        }
        events_registered = true;
    }
    if (!clock_runs) {
        pthread_t thread;
        int e = pthread_create(&thread, NULL, clock_main, NULL);

        if (e) {
            fb_probe_error(error, "cannot start a thread: %s", strerror(e));
            return false;
        }
        pthread_setname_np(thread, "fb-probe");
        pthread_detach(thread);
        clock_runs = true;
    }
    return true;
}

static struct recording *
make_recording(uint16_t port, const struct fb_probe_config *c, char *error)
{
    struct recording *r = calloc(1, sizeof *r);
    uint32_t n_queues = count_tx_queues(port);

    if (!r) {
        fb_probe_error(error, "out of memory");
        return NULL;
    }
    if (!n_queues) {
        fb_probe_error(error, "port: %u has no tx queues yet", port);
        free_recording(r);
        return NULL;
    }
    r->status.n_rings = c->queues ? c->queues : n_queues;
    rte_eth_dev_get_name_by_port(port, r->status.device);
    snprintf(r->status.file, sizeof r->status.file, "%s", c->file);
    if (!c->file[0]) {
        snprintf(r->status.file, sizeof r->status.file,
                 "/dev/shm/fbprobe-%d-%u", (int) getpid(), port);
    }
    if (!fb_probe_file_create(&r->file, r->status.file, r->status.device, port,
                              r->status.n_rings, c, error)) {
        free_recording(r);
        return NULL;
    }
    return r;
}

static bool
start_recording(uint16_t port, const struct fb_probe_config *c, char *error)
{
    struct recording *r;

    if (recordings[port]) {
        fb_probe_error(error, "port: %u is being recorded already, to %.64s",
                       port, recordings[port]->status.file);
        return false;
    }
    r = prepare(error) ? make_recording(port, c, error) : NULL;
    if (!r) {
        return false;
    }
    fb_probe_file_add_clock(&r->file);
    recordings[port] = r;
    if (!attach_queues(port, r)) {
        fb_probe_error(error, "port: %u: no tx callback: %s", port,
                       rte_strerror(rte_errno));
        unlink(r->status.file);
        stop_recording(port);
        return false;
    }
    return true;
}

bool
fb_probe_find_port(const char *name, uint16_t *port, char *error)
{
    char *end;
    unsigned long number = strtoul(name, &end, 10);

    if (*name >= '0' && *name <= '9' && !*end && number < RTE_MAX_ETHPORTS
        && rte_eth_dev_is_valid_port(number)) {
        *port = number;
        return true;
    }
    if (*name && !rte_eth_dev_get_port_by_name(name, port)) {
        return true;
    }
    fb_probe_error(error, "port: '%.32s' is not allowed: the number or name "
                   "of one of DPDK's %u ports", name,
                   rte_eth_dev_count_avail());
    return false;
}

bool
fb_probe_start(uint16_t port, const struct fb_probe_config *c,
               struct fb_probe_status *status, char *error)
{
    bool ok;

    use_main_core();
    pthread_mutex_lock(&mutex);
    ok = start_recording(port, c, error);
    if (ok) {
        get_status(port, status);
    }
    pthread_mutex_unlock(&mutex);
    return ok;
}

/* Sets 'status' and returns true if 'port' is being recorded. */
static bool
find_recording(uint16_t port, struct fb_probe_status *status, char *error)
{
    if (!recordings[port]) {
        fb_probe_error(error, "port: %u is not being recorded", port);
        return false;
    }
    get_status(port, status);
    return true;
}

bool
fb_probe_stop(uint16_t port, struct fb_probe_status *status, char *error)
{
    bool ok;

    use_main_core();
    pthread_mutex_lock(&mutex);
    ok = find_recording(port, status, error);
    if (ok) {
        stop_recording(port);
    }
    pthread_mutex_unlock(&mutex);
    return ok;
}

bool
fb_probe_status(uint16_t port, struct fb_probe_status *status, char *error)
{
    bool ok;

    pthread_mutex_lock(&mutex);
    ok = find_recording(port, status, error);
    pthread_mutex_unlock(&mutex);
    return ok;
}

int
fb_probe_next(int port)
{
    pthread_mutex_lock(&mutex);
    do {
        port++;
    } while (port < RTE_MAX_ETHPORTS && !recordings[port]);
    pthread_mutex_unlock(&mutex);
    return port < RTE_MAX_ETHPORTS ? port : -1;
}
