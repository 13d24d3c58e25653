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

#include "carousel.h"

#include "lazy-mem.h"
#include "openvswitch/compiler.h"
#include "openvswitch/util.h"
#include "slot-list.h"
#include "slot-scale.h"
#include "util.h"

/* "Slot number" below is time divided by 'slot_ns', "index" a slot's place in
 * the array, which differs from it by multiples of the array's size and, since
 * an empty wheel may go on from where it stands, by a constant. */

/* Slots looked at at once. */
#define SCAN_SLOTS 8

struct carousel {
    /* Read-mostly: geometry. */
    uint32_t n_slots;
    uint32_t max_entries;
    uint64_t slot_ns;
    struct slot_scale scale;
    slot_word *slots;
    bool slot_by_slot;
    bool drop_beyond_horizon;

    /* Written for each call or entry. */
    OVS_ALIGNED_VAR(CACHE_LINE_SIZE)
    uint64_t front;             /* Slot number. */
    uint64_t clear;             /* Slots from the front up to, not including,
                                 * this number are empty. */
    uint32_t front_index;
    uint32_t n_entries;
    struct slot_pool pool;

    /* Seldom used. */
    bool flushing;
    uint64_t flush_front;       /* Front before the flush. */
    void *memory;
    size_t memory_bytes;
};

static struct carousel *
carousel_cast(const void *sched)
{
    return (struct carousel *) sched;
}

static void *
carousel_create(const struct edt_sched_config *config, uint64_t now_ns)
{
    struct carousel *c = xzalloc_cacheline(sizeof *c);
    /* An EDT that is 'horizon_ns' ahead of any time in the front's slot rounds
     * up to this slot at most. */
    uint32_t n_slots = DIV_ROUND_UP(config->horizon_ns, config->slot_ns) + 2;
    size_t n_nodes = slot_pool_n_nodes(config->max_entries, n_slots);
    /* SCAN_SLOTS more, for they are read together. */
    size_t slots_size = ROUND_UP((n_slots + SCAN_SLOTS) * sizeof *c->slots,
                                 CACHE_LINE_SIZE);

    c->n_slots = n_slots;
    c->max_entries = config->max_entries;
    c->slot_ns = config->slot_ns;
    slot_scale_init(&c->scale, config->slot_ns);
    c->slot_by_slot = config->slot_by_slot;
    c->drop_beyond_horizon = config->drop_beyond_horizon;

    c->memory_bytes = slots_size + n_nodes * sizeof(struct slot_node);
    c->memory = lazy_zalloc(c->memory_bytes);

    char *p = c->memory;
    c->slots = lazy_cut(&p, slots_size);
    slot_pool_init(&c->pool, lazy_cut(&p, n_nodes * sizeof(struct slot_node)),
                   n_nodes);

    c->front = slot_scale_floor(&c->scale, MIN(now_ns, INT64_MAX));
    c->clear = c->front;
    return c;
}

static void
carousel_destroy(void *sched)
{
    struct carousel *c = carousel_cast(sched);

    lazy_free(c->memory, c->memory_bytes);
    free_cacheline(c);
}

static unsigned int
carousel_level(const void *sched OVS_UNUSED,
               uint64_t gap_ns OVS_UNUSED)
{
    return 0;
}

/* Returns the index of the slot that is 'offset' slots, less than
 * 'c->n_slots', after the front. */
static inline uint32_t
carousel_index(const struct carousel *c, uint32_t offset)
{
    uint32_t index = c->front_index + offset;

    return index < c->n_slots ? index : index - c->n_slots;
}

static bool
carousel_enqueue(void *sched, void *entry, uint64_t edt_ns,
                 unsigned int level OVS_UNUSED)
{
    struct carousel *c = carousel_cast(sched);
    uint64_t number = slot_scale_ceil(&c->scale,
                                      MIN(edt_ns, EDT_SCHED_MAX_NS));

    if (OVS_UNLIKELY(c->n_entries >= c->max_entries)) {
        return false;
    }

    uint64_t offset = number > c->front ? number - c->front : 0;

    if (OVS_UNLIKELY(offset >= c->n_slots)) {
        if (c->drop_beyond_horizon) {
            return false;
        }
        offset = c->n_slots - 1;
    }
    c->clear = MIN(c->clear, c->front + offset);
    c->n_entries++;
    slot_append(&c->pool, &c->slots[carousel_index(c, offset)], entry);
    return true;
}

/* Returns the index of the first occupied slot of those with indexes 'begin'
 * to 'end', not including the latter, or 'end' if there is none. */
static inline uint32_t
carousel_scan_range(const slot_word *slots, uint32_t begin, uint32_t end)
{
    for (; begin < end && begin % SCAN_SLOTS; begin++) {
        if (slots[begin]) {
            return begin;
        }
    }
    for (; begin < end; begin += SCAN_SLOTS) {
        const slot_word *s = &slots[begin];

        if ((s[0] | s[1] | s[2] | s[3]) | (s[4] | s[5] | s[6] | s[7])) {
            while (!slots[begin]) {
                begin++;
            }
            return MIN(begin, end);
        }
    }
    return end;
}

/* Moves the front to slot 'number', which is not before it. */
static inline void
carousel_advance(struct carousel *c, uint64_t number)
{
    if (c->n_entries) {
        c->front_index = carousel_index(c, number - c->front);
    } else {
        /* All slots are alike. */
        c->clear = number;
    }
    c->front = number;
}

/* A scan from 'c->clear' on. */
struct scan {
    uint32_t index;             /* Where it is. */
    uint32_t end;               /* Index after the last one to look at... */
    uint32_t rest;              /* ...and how many there are from 0 on. */
    uint64_t base;              /* Slot number that belongs to index 0. */
};

/* Begins a scan of slots up to number 'last', which is not before
 * 'c->clear'. */
static inline void
scan_init(const struct carousel *c, struct scan *scan, uint64_t last)
{
    uint32_t offset = c->clear - c->front;
    uint64_t n = MIN(last - c->clear + 1, c->n_slots - offset);

    scan->index = carousel_index(c, offset);
    scan->end = MIN(scan->index + n, c->n_slots);
    scan->rest = n - (scan->end - scan->index);
    scan->base = c->clear - scan->index;
}

/* Goes to the next occupied slot and returns true, or returns false if there
 * is none. */
static inline bool
scan_next(const struct carousel *c, struct scan *scan)
{
    for (;;) {
        scan->index = carousel_scan_range(c->slots, scan->index, scan->end);
        if (OVS_LIKELY(scan->index < scan->end)) {
            return true;
        } else if (!scan->rest) {
            return false;
        }
        scan->base += c->n_slots;
        scan->index = 0;
        scan->end = scan->rest;
        scan->rest = 0;
    }
}

static inline size_t
carousel_dequeue__(struct carousel *c, uint64_t now, void **entries,
                   size_t max, bool slot_by_slot)
{
    uint32_t n_entries = c->n_entries;
    struct scan scan;
    size_t n = 0;

    if (!n_entries || c->clear > now || !max) {
        if (now > c->front && max) {
            carousel_advance(c, now);
        }
        return 0;
    }

    scan_init(c, &scan, now);
    while (scan_next(c, &scan)) {
        slot_word *slot = &c->slots[scan.index];

        n += slot_take(&c->pool, slot, &entries[n], max - n);
        if (n == max || slot_by_slot) {
            uint64_t number = scan.base + scan.index;

            c->clear = number + !*slot;
            c->front = number;
            c->front_index = scan.index;
            c->n_entries = n_entries - n;
            return n;
        }
        if (n == n_entries) {
            break;
        }
        scan.index++;
    }
    c->n_entries = n_entries - n;
    c->clear = now + 1;
    carousel_advance(c, now);
    return n;
}

static size_t
carousel_dequeue(void *sched, uint64_t now_ns, void **entries,
                 size_t max)
{
    struct carousel *c = carousel_cast(sched);
    uint64_t now = slot_scale_floor(&c->scale, MIN(now_ns, INT64_MAX));

    return carousel_dequeue__(c, now, entries, max, c->slot_by_slot);
}

static uint64_t
carousel_next_due(const void *sched)
{
    struct carousel *c = carousel_cast(sched);

    if (!c->n_entries) {
        return UINT64_MAX;
    }

    struct scan scan;
    scan_init(c, &scan, c->front + c->n_slots - 1);
    ovs_assert(scan_next(c, &scan));
    c->clear = scan.base + scan.index;
    return c->clear * c->slot_ns;
}

static size_t
carousel_flush(void *sched, void **entries, size_t max)
{
    struct carousel *c = carousel_cast(sched);

    if (!c->flushing) {
        c->flushing = true;
        c->flush_front = c->front;
    }

    size_t n = carousel_dequeue__(c, c->front + c->n_slots, entries, max,
                                  false);
    if (!c->n_entries) {
        c->flushing = false;
        c->front = c->flush_front;
        c->clear = c->front;
    }
    return n;
}

static size_t
carousel_count(const void *sched)
{
    return carousel_cast(sched)->n_entries;
}

static size_t
carousel_memory_bytes(const void *sched)
{
    return sizeof(struct carousel) + carousel_cast(sched)->memory_bytes;
}

const struct edt_sched_class carousel_class = {
    .name = "carousel",
    .create = carousel_create,
    .destroy = carousel_destroy,
    .level = carousel_level,
    .enqueue = carousel_enqueue,
    .dequeue = carousel_dequeue,
    .next_due = carousel_next_due,
    .flush = carousel_flush,
    .count = carousel_count,
    .memory_bytes = carousel_memory_bytes,
};
