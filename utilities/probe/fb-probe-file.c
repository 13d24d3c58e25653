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

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <rte_cycles.h>

#include "fb-probe-file.h"

#define CLOCK_TRIES 16
#define MAX_CLOCKS 36000                /* An hour of one each 100 ms. */

#define ALIGN_UP(N, UNIT) (((N) + (UNIT) - 1) / (UNIT) * (UNIT))

static bool
map_file(struct fb_probe_file *file, const char *name, size_t size,
         char *error)
{
    int fd = open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW,
                  0600);
    void *map = MAP_FAILED;
    int e;

    if (fd < 0) {
        fb_probe_error(error, "file: %.80s: %s", name, strerror(errno));
        return false;
    }

    /* All memory is had now: a page that cannot be had later would end the
     * application. */
    e = posix_fallocate(fd, 0, size);
    if (!e) {
        map = mmap(NULL, size, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_POPULATE, fd, 0);
        e = map == MAP_FAILED ? errno : 0;
    }
    close(fd);
    if (e) {
        unlink(name);
        fb_probe_error(error, "file: %.64s: %zu bytes: %s", name, size,
                       strerror(e));
        return false;
    }
    file->header = map;
    file->size = size;
    return true;
}

bool
fb_probe_file_create(struct fb_probe_file *file, const char *name,
                     const char *device, uint16_t port, uint32_t n_queues,
                     const struct fb_probe_config *c, char *error)
{
    struct fb_probe_header h = {
        .magic = FB_PROBE_MAGIC,
        .version = FB_PROBE_VERSION,
        .header_size = sizeof h,
        .flags = (c->wrap ? FB_PROBE_WRAP : 0) | (c->edt ? FB_PROBE_EDT : 0),
        .record_size = (c->edt ? sizeof(struct fb_probe_edt_record)
                        : sizeof(struct fb_probe_record)),
        .n_queues = n_queues,
        .queue_size = sizeof(struct fb_probe_queue),
        .n_records = c->records,
        .tsc_hz = rte_get_tsc_hz(),
        .max_clocks = MAX_CLOCKS,
        .pid = getpid(),
        .port_id = port,
        .flow = c->flow,
        .flow_offset = c->flow_offset,
        .edt_offset = c->edt_offset,
        .burst_wait_ns = c->burst_wait_ns,
    };
    struct fb_probe_queue *queues;
    size_t size;

    h.queues_offset = ALIGN_UP(sizeof h, RTE_CACHE_LINE_SIZE);
    h.clocks_offset = h.queues_offset + n_queues * sizeof *queues;
    h.records_offset = ALIGN_UP(h.clocks_offset
                                + MAX_CLOCKS * sizeof(struct fb_probe_clock),
                                UINT64_C(4096));
    snprintf(h.device, sizeof h.device, "%s", device);

    file->rings = aligned_alloc(RTE_CACHE_LINE_SIZE,
                                n_queues * sizeof *file->rings);
    if (!file->rings) {
        fb_probe_error(error, "out of memory");
        return false;
    }
    size = h.records_offset + n_queues * c->records * h.record_size;
    if (!map_file(file, name, size, error)) {
        return false;
    }
    *file->header = h;
    queues = (void *) ((char *) file->header + h.queues_offset);
    for (uint32_t i = 0; i < n_queues; i++) {
        file->rings[i] = (struct fb_probe_ring) {
            .records = ((char *) file->header + h.records_offset
                        + i * c->records * h.record_size),
            .shared = &queues[i],
            .mask = c->records - 1,
            .wait_tsc = (c->burst_wait_ns * (double) h.tsc_hz / 1e9),
            .flow = c->flow,
            .flow_offset = c->flow_offset,
            .edt = c->edt,
            .edt_offset = c->edt_offset,
            .edt_valid_offset = c->edt_valid_offset,
            .wrap = c->wrap,
            .full = !c->records,
        };
    }
    return true;
}

void
fb_probe_file_unmap(struct fb_probe_file *file)
{
    if (file->header) {
        munmap(file->header, file->size);
    }
    free(file->rings);
}

/* Of several tries this takes that during which least time passed, because
 * nothing interrupted it. */
void
fb_probe_file_add_clock(struct fb_probe_file *file)
{
    struct fb_probe_header *h = file->header;
    struct fb_probe_clock *clocks = (void *) ((char *) h + h->clocks_offset);
    struct fb_probe_clock best = { .error_tsc = UINT64_MAX };
    uint32_t i = RTE_MIN(h->n_clocks, h->max_clocks - 1);

    for (int try = 0; try < CLOCK_TRIES; try++) {
        struct timespec ts;
        uint64_t before = rte_rdtsc_precise();
        uint64_t after, error;

        clock_gettime(CLOCK_MONOTONIC, &ts);
        after = rte_rdtsc_precise();
        error = (after - before + 1) / 2;
        if (error < best.error_tsc) {
            best.tsc = before + (after - before) / 2;
            best.mono_ns = ts.tv_sec * UINT64_C(1000000000) + ts.tv_nsec;
            best.error_tsc = error;
        }
    }
    clocks[i] = best;
    __atomic_store_n(&h->n_clocks, i + 1, __ATOMIC_RELEASE);
}

void
fb_probe_file_set_stopped(struct fb_probe_file *file)
{
    __atomic_fetch_or(&file->header->flags, FB_PROBE_STOPPED,
                      __ATOMIC_RELEASE);
}
