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

#ifndef SHAPER_THREAD_H
#define SHAPER_THREAD_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dp-packet.h"
#include "edt-chains.h"
#include "edt-late.h"
#include "openvswitch/compiler.h"
#include "openvswitch/util.h"

/* What the shapers of one thread hold, and on behalf of whom
 * ==========================================================
 *
 * Packets that wait occupy buffers of the pools that their receive ports take
 * buffers from, and they come from receive queues that could stop.  The
 * shapers of a thread ("flow-shaper.h") account here for both:
 *
 *  * Buffers of each pool, in all, by receiving port, and by the first meter
 *    that the packets in them have passed.  So what waits never stops other
 *    ports' receiving, and who exceeds his rate takes no room from those who
 *    are received at the same port.
 *
 *    A meter that shapes asks for room before it promises a packet a time
 *    (shaper_thread_admit()), and what it has promised is then held for sure,
 *    so that no time is lost on packets that are dropped.
 *
 *  * Bytes by receive queue, so that a thread can stop polling a queue of
 *    which too much is waiting already.  When a queue moves from one thread to
 *    another, the first may still hold packets of it.  These it goes on
 *    counting, and tells the others once an iteration how many are left.
 *
 * Thread-safety: none, a struct shaper_thread belongs to one thread at a time.
 * shaper_rxq_id_alloc() and shaper_rxq_id_free() may be called by any.
 */

/* Where a packet was received. */
struct shaper_source {
    uint16_t port;                  /* SHAPER_NO_SOURCE if nowhere. */
    uint16_t rxq;                   /* From shaper_rxq_id_alloc(), or
                                     * SHAPER_NO_RXQ if it does not matter. */
};
#define SHAPER_NO_SOURCE UINT16_MAX
#define SHAPER_NO_RXQ 0
#define SHAPER_SOURCE_NONE \
    ((struct shaper_source) { SHAPER_NO_SOURCE, SHAPER_NO_RXQ })

#define SHAPER_MAX_POOLS 64

/* Meters with higher ids are not counted. */
#define SHAPER_MAX_METERS (1u << 18)

/* Most bytes of a receive queue that a limit can be set to. */
#define SHAPER_MAX_RX_LIMIT (UINT64_C(1) << 40)

/* Buffers of one pool that the shapers of a thread hold. */
struct shaper_pool {
    const void *pool;               /* NULL: the heap. */
    uint32_t size;                  /* Of the whole pool. */
    uint32_t budget;                /* What this thread may hold of it. */
    uint32_t reserve;               /* On top of it, for what meters have
                                     * admitted. */
    uint32_t held;
    uint32_t *held_by_port;
    uint32_t n_ports;               /* Elements in 'held_by_port'. */
};

/* A receive queue that another thread polls, while this one holds packets that
 * were received there. */
struct shaper_left {
    uint16_t rxq;
    uint64_t told_bytes;            /* That other threads know of. */
};

struct shaper_thread {
    struct edt_finder meters;       /* Set by the owner; for fair meters. */
    struct edt_chains *chains;      /* Set by the owner: of meters that packets
                                     * have passed. */
    uint64_t *bytes_by_rxq;
    uint32_t n_rxqs;                /* Elements in 'bytes_by_rxq'. */
    uint32_t n_meters;              /* Elements in 'held_by_meter'. */
    uint32_t *held_by_meter;        /* Packets, by the first meter that they
                                     * have passed. */
    uint16_t *polled;               /* Receive queues of the thread. */
    size_t n_polled;
    struct shaper_left *left;
    size_t n_left;
    unsigned int n_threads;         /* That the budgets were computed for. */
    size_t n_pools;
    struct shaper_pool pools[SHAPER_MAX_POOLS];
};

struct shaper_thread *shaper_thread_create(void);
void shaper_thread_destroy(struct shaper_thread *);

uint8_t shaper_thread_pool(struct shaper_thread *, const struct dp_packet *);
uint8_t shaper_thread_heap(struct shaper_thread *);
void shaper_thread_grow__(struct shaper_thread *, uint8_t pool_idx,
                          struct shaper_source);
void shaper_thread_grow_meters__(struct shaper_thread *, uint32_t meter_id);
uint32_t shaper_thread_admit(struct shaper_thread *,
                             const struct dp_packet_batch *,
                             struct shaper_source, uint32_t meter_id);

uint32_t shaper_thread_port_share(uint32_t size);

void *shaper_grow(void *array, uint32_t *n, uint32_t index, size_t size);

void shaper_thread_set_polled(struct shaper_thread *, uint16_t *rxqs,
                              size_t n);
void shaper_thread_find_left(struct shaper_thread *);
void shaper_thread_tell_left__(struct shaper_thread *);
uint64_t shaper_rxq_left_bytes(uint16_t rxq);

uint16_t shaper_rxq_id_alloc(void);
void shaper_rxq_id_free(uint16_t id);

/* Returns the pool that the buffer of 'packet' comes from, NULL for the
 * heap. */
static inline const void *
shaper_packet_mempool(const struct dp_packet *packet OVS_UNUSED)
{
#ifdef DPDK_NETDEV
    return packet->source == DPBUF_DPDK ? packet->mbuf.pool : NULL;
#else
    return NULL;
#endif
}

/* Counts 'n' packets of together 'bytes' bytes, from 'source' and in pool
 * 'pool_idx', that begin to wait. */
static inline void
shaper_thread_count(struct shaper_thread *thread, uint8_t pool_idx,
                    struct shaper_source source, uint32_t n, uint64_t bytes)
{
    struct shaper_pool *pool = &thread->pools[pool_idx];

    if (OVS_UNLIKELY(source.port >= pool->n_ports
                     || source.rxq >= thread->n_rxqs)) {
        shaper_thread_grow__(thread, pool_idx, source);
    }
    pool->held += n;
    pool->held_by_port[source.port] += n;
    thread->bytes_by_rxq[source.rxq] += bytes;
}

/* Takes back what shaper_thread_count() did for 'n' packets of together
 * 'bytes' bytes. */
static inline void
shaper_thread_uncount(struct shaper_thread *thread, uint8_t pool_idx,
                      struct shaper_source source, uint32_t n, uint64_t bytes)
{
    struct shaper_pool *pool = &thread->pools[pool_idx];

    pool->held -= n;
    pool->held_by_port[source.port] -= n;
    thread->bytes_by_rxq[source.rxq] -= bytes;
}

/* Counts 'n' packets, of which 'meter_id' is the first meter (UINT32_MAX:
 * none), that begin to wait. */
static inline void
shaper_thread_count_meter(struct shaper_thread *thread, uint32_t meter_id,
                          uint32_t n)
{
    if (OVS_UNLIKELY(meter_id >= thread->n_meters)) {
        if (meter_id >= SHAPER_MAX_METERS) {
            return;
        }
        shaper_thread_grow_meters__(thread, meter_id);
    }
    thread->held_by_meter[meter_id] += n;
}

/* Takes back what shaper_thread_count_meter() did. */
static inline void
shaper_thread_uncount_meter(struct shaper_thread *thread, uint32_t meter_id,
                            uint32_t n)
{
    if (OVS_LIKELY(meter_id < thread->n_meters)) {
        thread->held_by_meter[meter_id] -= n;
    }
}

/* Returns how many buffers of 'pool' are left for 'port', by what it has
 * received already: it may hold as much as is left for all of them (dynamic
 * thresholds, Choudhury and Hahne, 1998).  Alone it gets half of the budget,
 * and there is always something left for a port that has nothing yet. */
static inline uint32_t
shaper_pool_left(const struct shaper_pool *pool, uint16_t port)
{
    uint32_t used = pool->held + (port < pool->n_ports
                                  ? pool->held_by_port[port] : 0);

    return pool->budget > used ? pool->budget - used : 0;
}

/* Returns how many more packets of pool 'pool_idx' that 'port' received, and
 * that no meter has admitted, a shaper of 'thread' may hold. */
static inline uint32_t
shaper_thread_room(const struct shaper_thread *thread, uint8_t pool_idx,
                   uint16_t port)
{
    /* Each packet adds to what the port has and takes from what is left. */
    return (shaper_pool_left(&thread->pools[pool_idx], port) + 1) / 2;
}

/* Returns how many more packets of pool 'pool_idx' that
 * shaper_thread_admit() has admitted a shaper of 'thread' may hold. */
static inline uint32_t
shaper_thread_admitted_room(const struct shaper_thread *thread,
                            uint8_t pool_idx)
{
    const struct shaper_pool *pool = &thread->pools[pool_idx];
    uint32_t limit = pool->budget + pool->reserve;

    return limit > pool->held ? limit - pool->held : 0;
}

/* Returns the number of bytes of packets that shapers hold and receive queue
 * 'rxq', which 'thread' polls, received; 0 for SHAPER_NO_RXQ. */
static inline uint64_t
shaper_thread_rxq_bytes(const struct shaper_thread *thread, uint16_t rxq)
{
    if (rxq == SHAPER_NO_RXQ) {
        return 0;
    }
    return (rxq < thread->n_rxqs ? thread->bytes_by_rxq[rxq] : 0)
           + shaper_rxq_left_bytes(rxq);
}

/* Tells other threads how many bytes 'thread' still holds that were received
 * from queues that they poll now.  To be called once an iteration. */
static inline void
shaper_thread_tell_left(struct shaper_thread *thread)
{
    if (OVS_UNLIKELY(thread->n_left)) {
        shaper_thread_tell_left__(thread);
    }
}

#endif /* shaper-thread.h */
