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

#ifndef FB_PROBE_BURST_H
#define FB_PROBE_BURST_H 1

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <rte_ethdev.h>

#include "fb-probe-ring.h"

/* A ring as its writer sees it. */
struct fb_probe_ring {
    /* Constant. */
    char *records;
    struct fb_probe_queue *shared;
    uint64_t mask;
    uint64_t wait_tsc;
    uint32_t flow_offset;
    uint32_t edt_offset;
    uint32_t edt_valid_offset;
    enum fb_probe_flow flow;
    bool edt;
    bool wrap;

    /* Changes with each burst. */
    bool full;                          /* Nothing is recorded any more. */
    struct fb_probe_queue now;          /* What 'shared' is to become. */
} __rte_cache_aligned;

/* A queue of a port.  It exists for good, because a callback that could not
 * be removed may use it at any time. */
struct fb_probe_slot {
    _Atomic(struct fb_probe_ring *) ring;   /* NULL: nothing to do. */
    atomic_bool busy;                   /* Is a thread in the callback? */
    const struct rte_eth_rxtx_callback *callback;
} __rte_cache_aligned;

/* The tx callback, of a slot: DPDK calls it in the thread that sends, before
 * the driver gets the packets. */
uint16_t fb_probe_observe_burst(uint16_t port, uint16_t queue,
                                struct rte_mbuf *packets[], uint16_t n,
                                void *slot);

#endif /* fb-probe-burst.h */
