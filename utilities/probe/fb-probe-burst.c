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

#include <string.h>

#include <rte_byteorder.h>
#include <rte_cycles.h>
#include <rte_mbuf.h>
#include <rte_prefetch.h>

#include "fb-probe-burst.h"

static inline uint32_t
read_be32(const uint8_t *p)
{
    rte_be32_t be;

    memcpy(&be, p, sizeof be);
    return rte_be_to_cpu_32(be);
}

/* Returns the flow of a packet by its IP source or destination. */
static inline uint32_t
flow_by_ip(const struct rte_mbuf *m, bool dst)
{
    const uint8_t *frame = rte_pktmbuf_mtod(m, const uint8_t *);
    uint32_t len = rte_pktmbuf_data_len(m);
    uint32_t l3 = 14;
    uint16_t type;

    if (len < 14 + 20) {
        return 0;
    }
    type = frame[12] << 8 | frame[13];
    while ((type == 0x8100 || type == 0x88a8) && l3 < 14 + 2 * 4) {
        l3 += 4;
        type = frame[l3 - 2] << 8 | frame[l3 - 1];
    }
    if (type == 0x0800 && len >= l3 + 20) {
        return read_be32(frame + l3 + (dst ? 16 : 12));
    } else if (type == 0x86dd && len >= l3 + 40) {
        const uint8_t *ip = frame + l3 + (dst ? 24 : 8);

        return (read_be32(ip) ^ read_be32(ip + 4)
                ^ read_be32(ip + 8) ^ read_be32(ip + 12));
    }
    return 0;
}

static inline uint32_t
flow_of(const struct fb_probe_ring *ring, const struct rte_mbuf *m,
        enum fb_probe_flow flow)
{
    uint32_t at = ring->flow_offset;
    uint32_t value;

    switch (flow) {
    case FB_PROBE_FLOW_DST:
        return flow_by_ip(m, true);
    case FB_PROBE_FLOW_SRC:
        return flow_by_ip(m, false);
    case FB_PROBE_FLOW_OFFSET:
        return (rte_pktmbuf_data_len(m) < at + 4 ? 0
                : read_be32(rte_pktmbuf_mtod_offset(m, uint8_t *, at)));
    case FB_PROBE_FLOW_MBUF:
    default:
        memcpy(&value, (const char *) m + at, sizeof value);
        return value;
    }
}

/* Writes the records of a burst.  'flow' and 'edt' are constants where this
 * is called, so that the loop has no branches on them. */
static __rte_always_inline void
write_records(struct fb_probe_ring *ring, struct rte_mbuf **packets,
              uint16_t n, uint64_t tsc, enum fb_probe_flow flow,
              const bool edt)
{
    const size_t size = (edt ? sizeof(struct fb_probe_edt_record)
                         : sizeof(struct fb_probe_record));

    /* Headers have often left the cache while packets waited: fetch them
     * together. */
    for (uint16_t i = 0; i < n; i++) {
        if (flow != FB_PROBE_FLOW_MBUF) {
            rte_prefetch0(rte_pktmbuf_mtod(packets[i], void *));
        }
        if (edt) {
            rte_prefetch0((char *) packets[i] + ring->edt_valid_offset);
            rte_prefetch0((char *) packets[i] + ring->edt_offset);
        }
    }
    for (uint16_t i = 0; i < n; i++) {
        const struct rte_mbuf *m = packets[i];
        struct fb_probe_edt_record *r
            = (void *) (ring->records
                        + ((ring->now.written + i) & ring->mask) * size);

        r->record.tsc = tsc;
        r->record.flow = flow_of(ring, m, flow);
        r->record.bytes = RTE_MIN(m->pkt_len, (uint32_t) UINT16_MAX);
        r->record.position = i;
        if (edt) {
            r->edt_ns = 0;
            if (!ring->edt_valid_offset
                || ((const char *) m)[ring->edt_valid_offset]) {
                memcpy(&r->edt_ns, (const char *) m + ring->edt_offset,
                       sizeof r->edt_ns);
            }
        }
    }
}

static void
record_burst(struct fb_probe_ring *ring, struct rte_mbuf **packets, uint16_t n,
             uint64_t tsc)
{
    struct fb_probe_queue *now = &ring->now;

    if (!ring->wrap && now->written + n > ring->mask + 1) {
        ring->full = true;
    }
    if (ring->full) {
        now->lost += n;
        return;
    }

    /* Claimed before the records change, written after they have. */
    now->claimed += n;
    __atomic_store_n(&ring->shared->claimed, now->claimed, __ATOMIC_RELAXED);
    atomic_thread_fence(memory_order_release);

#define WRITE(FLOW)                                                       \
    case FLOW:                                                            \
        if (ring->edt) {                                                  \
            write_records(ring, packets, n, tsc, FLOW, true);             \
        } else {                                                          \
            write_records(ring, packets, n, tsc, FLOW, false);            \
        }                                                                 \
        break;

    switch (ring->flow) {
    WRITE(FB_PROBE_FLOW_DST)
    WRITE(FB_PROBE_FLOW_SRC)
    WRITE(FB_PROBE_FLOW_OFFSET)
    WRITE(FB_PROBE_FLOW_MBUF)
    }
#undef WRITE

    now->written += n;
}

uint16_t
fb_probe_observe_burst(uint16_t port __rte_unused,
                       uint16_t queue __rte_unused,
                       struct rte_mbuf *packets[], uint16_t n, void *slot_)
{
    struct fb_probe_slot *slot = slot_;
    struct fb_probe_ring *ring;

    /* Pairs with leave_queues() in fb-probe-record.c. */
    atomic_store_explicit(&slot->busy, true, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst);
    ring = atomic_load_explicit(&slot->ring, memory_order_acquire);
    if (ring && n) {
        struct fb_probe_queue *now = &ring->now;
        struct fb_probe_queue *shared = ring->shared;
        uint64_t tsc = rte_rdtsc();

        record_burst(ring, packets, n, tsc);
        now->bursts++;
        now->packets += n;
        for (uint16_t i = 0; i < n; i++) {
            now->bytes += packets[i]->pkt_len;
        }
        shared->bursts = now->bursts;
        shared->packets = now->packets;
        shared->bytes = now->bytes;
        shared->lost = now->lost;
        __atomic_store_n(&shared->written, now->written, __ATOMIC_RELEASE);

        if (ring->wait_tsc) {
            uint64_t end = rte_rdtsc() + ring->wait_tsc;

            while (rte_rdtsc() < end) {
                continue;
            }
        }
    }
    atomic_store_explicit(&slot->busy, false, memory_order_release);
    return n;
}
