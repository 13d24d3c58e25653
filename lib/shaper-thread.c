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

#include <config.h>

#include "shaper-thread.h"

#ifdef DPDK_NETDEV
#include <rte_mempool.h>
#endif

#include "dp-packet.h"
#include "id-pool.h"
#include "ovs-atomic.h"
#include "ovs-thread.h"
#include "shaper-offload.h"
#include "util.h"

/* Share of a pool that shapers may hold: the rest is for receiving. */
#define POOL_SHARE(SIZE) ((SIZE) - (SIZE) / 4)
#define HEAP_BUDGET_PACKETS 65536   /* Packets that are not in any pool. */

/* What a meter has admitted comes to a shaper at the end of the batch that was
 * received, or with tx-flush-interval a few batches later.  Meanwhile there is
 * room for it in a part of the pool that is for nothing else. */
#define POOL_RESERVE(SIZE) ((SIZE) / 16)

/* Threads share out the pools evenly. */
static atomic_count n_shaper_threads = ATOMIC_COUNT_INIT(0);

/* What other threads than the one that polls a receive queue hold of it. */
static atomic_uint64_t left_bytes[UINT16_MAX + 1];

static void forget_left(struct shaper_thread *);

/* Creates the state that the shapers of one thread share. */
struct shaper_thread *
shaper_thread_create(void)
{
    atomic_count_inc(&n_shaper_threads);
    return xzalloc_cacheline(sizeof(struct shaper_thread));
}

/* Destroys 'thread' (which may be NULL), to which no shaper is attached. */
void
shaper_thread_destroy(struct shaper_thread *thread)
{
    if (thread) {
        for (size_t i = 0; i < thread->n_pools; i++) {
            free_cacheline(thread->pools[i].held_by_port);
        }
        forget_left(thread);
        free(thread->left);
        free(thread->polled);
        free_cacheline(thread->bytes_by_rxq);
        free_cacheline(thread->held_by_meter);
        free_cacheline(thread);
        atomic_count_dec(&n_shaper_threads);
    }
}

/* Returns how many of 'size' buffers of a pool the packets of one receiving
 * port may take in one thread while no others wait.  Thread-safe. */
uint32_t
shaper_thread_port_share(uint32_t size)
{
    return POOL_SHARE(size) / MAX(atomic_count_get(&n_shaper_threads), 1) / 2;
}

static void
pool_set_size(struct shaper_pool *pool, uint32_t size, unsigned int n_threads)
{
    pool->size = size;
    pool->budget = POOL_SHARE(size) / MAX(n_threads, 1);
    pool->reserve = POOL_RESERVE(size) / MAX(n_threads, 1);
}

/* Returns the index in 'thread' of 'pool', NULL for the heap. */
static uint8_t
find_pool(struct shaper_thread *thread, const void *pool)
{
    unsigned int n_threads = atomic_count_get(&n_shaper_threads);
    uint32_t size = HEAP_BUDGET_PACKETS;
    size_t i;

#ifdef DPDK_NETDEV
    if (pool) {
        size = ((const struct rte_mempool *) pool)->size;
    }
#endif

    if (OVS_UNLIKELY(n_threads != thread->n_threads)) {
        thread->n_threads = n_threads;
        for (i = 0; i < thread->n_pools; i++) {
            pool_set_size(&thread->pools[i], thread->pools[i].size,
                          n_threads);
        }
    }

    for (i = 0; i < thread->n_pools; i++) {
        if (thread->pools[i].pool == pool) {
            /* Another pool may have come to lie where one was. */
            if (OVS_UNLIKELY(thread->pools[i].size != size)) {
                pool_set_size(&thread->pools[i], size, n_threads);
            }
            return i;
        }
    }

    /* Reuse what belonged to a pool that is no longer used. */
    for (i = 0; i < thread->n_pools; i++) {
        if (!thread->pools[i].held) {
            break;
        }
    }
    if (i == SHAPER_MAX_POOLS) {
        /* More pools than this are accounted for together. */
        return 0;
    }
    if (i == thread->n_pools) {
        thread->n_pools++;
    }
    thread->pools[i].pool = pool;
    pool_set_size(&thread->pools[i], size, n_threads);
    return i;
}

/* Returns the index in 'thread' of the pool that the buffer of 'packet' comes
 * from. */
uint8_t
shaper_thread_pool(struct shaper_thread *thread,
                   const struct dp_packet *packet)
{
    return find_pool(thread, shaper_packet_mempool(packet));
}

/* Returns the index in 'thread' of the heap. */
uint8_t
shaper_thread_heap(struct shaper_thread *thread)
{
    return find_pool(thread, NULL);
}

/* Returns 'array' (NULL if '*n' is 0), which has '*n' elements of 'size'
 * bytes, grown, with zeros, so that it has an element number 'index'.  What a
 * thread counts in for each packet shares no cache line with what others
 * do. */
void *
shaper_grow(void *array, uint32_t *n, uint32_t index, size_t size)
{
    uint32_t old = *n;
    void *grown;

    *n = MAX(ROUND_UP(index + 1, 256), 2 * old);
    grown = xzalloc_cacheline(*n * size);
    if (old) {
        memcpy(grown, array, old * size);
        free_cacheline(array);
    }
    return grown;
}

/* Makes room for 'source' in what 'thread' counts. */
void
shaper_thread_grow__(struct shaper_thread *thread, uint8_t pool_idx,
                     struct shaper_source source)
{
    struct shaper_pool *pool = &thread->pools[pool_idx];

    if (source.port >= pool->n_ports) {
        pool->held_by_port = shaper_grow(pool->held_by_port, &pool->n_ports,
                                         source.port,
                                         sizeof *pool->held_by_port);
    }
    if (source.rxq >= thread->n_rxqs) {
        thread->bytes_by_rxq = shaper_grow(thread->bytes_by_rxq,
                                           &thread->n_rxqs, source.rxq,
                                           sizeof *thread->bytes_by_rxq);
    }
}

/* Makes 'thread' count packets of 'meter_id'. */
void
shaper_thread_grow_meters__(struct shaper_thread *thread, uint32_t meter_id)
{
    thread->held_by_meter = shaper_grow(thread->held_by_meter,
                                        &thread->n_meters, meter_id,
                                        sizeof *thread->held_by_meter);
}

/* Returns how many packets of 'batch', which 'source' has received and which
 * come to meter 'meter_id', shapers of 'thread' have room for, should they
 * have to wait; UINT32_MAX if an earlier meter has asked.  The meter, one that
 * is not fair, is to promise times to no more than these, the first ones, so
 * that nothing that it promises has to be dropped for want of a buffer.
 *
 * A meter may hold as much as is left for its port: dynamic thresholds again,
 * within the port's.  So of many who are received at one port (an uplink, a
 * tunnel) those who exceed their rates share what they can have equally, and
 * leave as much as each of them has for one who does not. */
uint32_t
shaper_thread_admit(struct shaper_thread *thread,
                    const struct dp_packet_batch *batch,
                    struct shaper_source source, uint32_t meter_id)
{
    const struct dp_packet *first = batch->packets[0];
    const struct shaper_pool *pool;
    uint32_t left, mine;

    if (dp_packet_batch_is_empty(batch)
        || (first->md.edt_valid && first->md.edt.flags & EDT_PROMISED)) {
        /* There is nothing, or a meter has asked already. */
        return UINT32_MAX;
    }
    if (first->md.edt_valid) {
        struct edt_chain_ends ends;

        edt_chains_get(thread->chains, first->md.edt.chain, &ends);
        meter_id = ends.first_meter;
    }
    /* Segments are made in the heap. */
    pool = &thread->pools[find_pool(thread, (shaper_is_tso(first) ? NULL
                                             : shaper_packet_mempool(first)))];
    left = shaper_pool_left(pool, source.port);
    mine = meter_id < thread->n_meters ? thread->held_by_meter[meter_id] : 0;

    /* Each packet adds to what meter and port have and takes from what is left
     * for others. */
    return left > mine ? (left - mine + 2) / 3 : 0;
}

/* Receive queues that have moved to another thread. */

/* Takes back what 'thread' has told others about. */
static void
forget_left(struct shaper_thread *thread)
{
    uint64_t orig;

    for (size_t i = 0; i < thread->n_left; i++) {
        const struct shaper_left *left = &thread->left[i];

        atomic_sub_relaxed(&left_bytes[left->rxq], left->told_bytes, &orig);
    }
    thread->n_left = 0;
}

static bool
is_polled(const struct shaper_thread *thread, uint16_t rxq)
{
    for (size_t i = 0; i < thread->n_polled; i++) {
        if (thread->polled[i] == rxq) {
            return true;
        }
    }
    return false;
}

/* Finds the receive queues that others poll and that 'thread' holds packets
 * of.  To be called when 'thread' has taken packets over from another one.
 * Takes time in proportion to the receive queues that there are. */
void
shaper_thread_find_left(struct shaper_thread *thread)
{
    size_t allocated;
    uint64_t orig;

    forget_left(thread);
    free(thread->left);
    thread->left = NULL;
    allocated = 0;
    for (uint32_t rxq = SHAPER_NO_RXQ + 1; rxq < thread->n_rxqs; rxq++) {
        uint64_t bytes = thread->bytes_by_rxq[rxq];

        if (bytes && !is_polled(thread, rxq)) {
            if (thread->n_left == allocated) {
                thread->left = x2nrealloc(thread->left, &allocated,
                                          sizeof *thread->left);
            }
            thread->left[thread->n_left].rxq = rxq;
            thread->left[thread->n_left++].told_bytes = bytes;
            atomic_add_relaxed(&left_bytes[rxq], bytes, &orig);
        }
    }
}

/* Makes 'rxqs', 'n' of them, the receive queues that 'thread' polls, and takes
 * ownership of the array. */
void
shaper_thread_set_polled(struct shaper_thread *thread, uint16_t *rxqs,
                         size_t n)
{
    free(thread->polled);
    thread->polled = rxqs;
    thread->n_polled = n;
    shaper_thread_find_left(thread);
}

/* Does what shaper_thread_tell_left() does, if there is something to tell. */
void
shaper_thread_tell_left__(struct shaper_thread *thread)
{
    uint64_t orig;
    size_t n = 0;

    for (size_t i = 0; i < thread->n_left; i++) {
        struct shaper_left left = thread->left[i];
        uint64_t bytes = thread->bytes_by_rxq[left.rxq];

        if (bytes != left.told_bytes) {
            /* Modulo 2^64, so that it may also have become more. */
            atomic_add_relaxed(&left_bytes[left.rxq], bytes - left.told_bytes,
                               &orig);
            left.told_bytes = bytes;
        }
        if (bytes) {
            thread->left[n++] = left;
        }
    }
    thread->n_left = n;
}

/* Returns the number of bytes that were received from 'rxq' and are held by
 * threads that do not poll it, as these have told.  Thread-safe. */
uint64_t
shaper_rxq_left_bytes(uint16_t rxq)
{
    uint64_t bytes;

    atomic_read_relaxed(&left_bytes[rxq], &bytes);
    return bytes;
}

/* Identities of receive queues, in all threads. */
static struct ovs_mutex rxq_ids_mutex = OVS_MUTEX_INITIALIZER;
static struct id_pool *rxq_ids OVS_GUARDED_BY(rxq_ids_mutex);

/* Returns an identity for a receive queue, or SHAPER_NO_RXQ if there is none
 * left.  The caller gives it back with shaper_rxq_id_free() when the
 * queue goes; what waits still may then count as the next user's for as long
 * as it waits.  Thread-safe. */
uint16_t
shaper_rxq_id_alloc(void)
{
    uint32_t id;

    ovs_mutex_lock(&rxq_ids_mutex);
    if (!rxq_ids) {
        rxq_ids = id_pool_create(SHAPER_NO_RXQ + 1, UINT16_MAX);
    }
    if (!id_pool_alloc_id(rxq_ids, &id)) {
        id = SHAPER_NO_RXQ;
    }
    ovs_mutex_unlock(&rxq_ids_mutex);
    return id;
}

/* Gives back 'id' (which may be SHAPER_NO_RXQ).  Thread-safe. */
void
shaper_rxq_id_free(uint16_t id)
{
    if (id != SHAPER_NO_RXQ) {
        ovs_mutex_lock(&rxq_ids_mutex);
        id_pool_free_id(rxq_ids, id);
        ovs_mutex_unlock(&rxq_ids_mutex);
    }
}
