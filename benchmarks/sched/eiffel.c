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

#include "eiffel.h"

#include "lazy-mem.h"
#include "openvswitch/compiler.h"
#include "openvswitch/util.h"
#include "slot-list.h"
#include "slot-scale.h"
#include "util.h"

/* "Slot number" below is time divided by 'slot_ns'.  A range begins at a slot
 * number that is otherwise arbitrary, so that two empty arrays can be put to
 * use wherever the next entry is. */

#define MAX_LEVELS 5            /* 64**5 is 2**30. */

/* An array of buckets. */
struct half {
    slot_word *buckets;
    uint64_t *bitmaps[MAX_LEVELS]; /* [0] has a bit for each bucket, [i] one
                                    * for each word of [i - 1]. */
};

/* An entry beyond the ranges. */
struct beyond {
    uint64_t number;            /* Slot number. */
    void *entry;
};

struct eiffel {
    /* Read-mostly: geometry. */
    uint32_t n_slots;           /* Of each array. */
    uint32_t max_entries;
    uint64_t slot_ns;
    struct slot_scale scale;
    unsigned int top;           /* Bitmap that is a single word. */
    bool slot_by_slot;
    bool drop_beyond_horizon;

    /* Written for each call or entry. */
    OVS_ALIGNED_VAR(CACHE_LINE_SIZE)
    uint64_t front;             /* Slot number. */
    uint64_t first;             /* First occupied slot, or UINT64_MAX. */
    uint64_t base;              /* Slot number at which the primary begins. */
    uint32_t n_entries;
    unsigned int primary;       /* Index of one of the halves. */
    struct slot_pool pool;
    struct half halves[2];

    /* Seldom used. */
    bool flushing;
    uint64_t flush_front;       /* Front before the flush. */
    struct beyond *beyond;      /* Entries beyond, in order of arrival. */
    uint32_t n_beyond;
    uint64_t first_beyond;      /* First slot number, or UINT64_MAX. */
    void *memory;
    size_t memory_bytes;
};

static struct eiffel *
eiffel_cast(const void *sched)
{
    return (struct eiffel *) sched;
}

/* Returns the number of bytes that an array of 'n' buckets takes. */
static size_t
half_size(size_t n, unsigned int top)
{
    size_t size = ROUND_UP(n * sizeof(slot_word), CACHE_LINE_SIZE);

    for (unsigned int i = 0; i <= top; i++) {
        n = DIV_ROUND_UP(n, 64);
        size += ROUND_UP(n * sizeof(uint64_t), CACHE_LINE_SIZE);
    }
    return size;
}

/* Takes what 'half' needs for 'n' buckets off the memory of which '*p' is what
 * is left. */
static void
half_init(struct half *half, size_t n, unsigned int top, char **p)
{
    half->buckets = lazy_cut(p, n * sizeof *half->buckets);
    for (unsigned int i = 0; i <= top; i++) {
        n = DIV_ROUND_UP(n, 64);
        half->bitmaps[i] = lazy_cut(p, n * sizeof *half->bitmaps[i]);
    }
}

static void *
eiffel_create(const struct edt_sched_config *config, uint64_t now_ns)
{
    struct eiffel *e = xzalloc_cacheline(sizeof *e);
    /* An EDT that is 'horizon_ns' ahead of any time in the front's slot rounds
     * up to this slot at most. */
    uint32_t n_slots = DIV_ROUND_UP(config->horizon_ns, config->slot_ns) + 2;
    size_t n_nodes = slot_pool_n_nodes(config->max_entries, 2 * n_slots);
    size_t nodes_size = ROUND_UP(n_nodes * sizeof(struct slot_node),
                                 CACHE_LINE_SIZE);
    size_t beyond_size = (config->drop_beyond_horizon ? 0
                          : config->max_entries * sizeof *e->beyond);

    e->n_slots = n_slots;
    e->max_entries = config->max_entries;
    e->slot_ns = config->slot_ns;
    slot_scale_init(&e->scale, config->slot_ns);
    e->top = (log_2_ceil(n_slots) + 5) / 6 - 1;
    e->slot_by_slot = config->slot_by_slot;
    e->drop_beyond_horizon = config->drop_beyond_horizon;

    e->memory_bytes = (2 * half_size(n_slots, e->top)
                       + nodes_size + beyond_size);
    e->memory = lazy_zalloc(e->memory_bytes);

    char *p = e->memory;
    for (size_t i = 0; i < ARRAY_SIZE(e->halves); i++) {
        half_init(&e->halves[i], n_slots, e->top, &p);
    }
    slot_pool_init(&e->pool, lazy_cut(&p, nodes_size), n_nodes);
    e->beyond = lazy_cut(&p, beyond_size);
    e->first_beyond = UINT64_MAX;

    e->front = slot_scale_floor(&e->scale, MIN(now_ns, INT64_MAX));
    e->base = e->front;
    e->first = UINT64_MAX;
    return e;
}

static void
eiffel_destroy(void *sched)
{
    struct eiffel *e = eiffel_cast(sched);

    lazy_free(e->memory, e->memory_bytes);
    free_cacheline(e);
}

static unsigned int
eiffel_level(const void *sched OVS_UNUSED,
             uint64_t gap_ns OVS_UNUSED)
{
    return 0;
}

/* Bitmaps. */

/* Marks bucket 'i', which was empty, as occupied. */
static inline void
half_mark(struct half *half, unsigned int top, uint32_t i)
{
    for (unsigned int level = 0; ; level++) {
        uint64_t *word = &half->bitmaps[level][i / 64];
        uint64_t old = *word;

        *word = old | (UINT64_C(1) << (i % 64));
        if (old || level == top) {
            break;
        }
        i /= 64;
    }
}

/* Finds the first bucket that is occupied after word 'i' of the first bitmap,
 * the first one that was not 0, has become 0.  Returns true and sets '*next',
 * or returns false if there is none. */
static bool
half_next_word(struct half *half, unsigned int top, uint32_t i, uint32_t *next)
{
    for (unsigned int level = 1; level <= top; level++) {
        uint64_t *word = &half->bitmaps[level][i / 64];

        *word &= ~(UINT64_C(1) << (i % 64));
        i /= 64;
        if (*word) {
            i = i * 64 + raw_ctz(*word);
            while (level) {
                level--;
                i = i * 64 + raw_ctz(half->bitmaps[level][i]);
            }
            *next = i;
            return true;
        }
    }
    return false;
}

static inline bool
half_is_empty(const struct half *half, unsigned int top)
{
    return !half->bitmaps[top][0];
}

/* Returns the first bucket that is occupied.  There must be one. */
static uint32_t
half_first(const struct half *half, unsigned int top)
{
    uint32_t i = 0;

    for (int level = top; level >= 0; level--) {
        i = i * 64 + raw_ctz(half->bitmaps[level][i]);
    }
    return i;
}

/* Moving ranges. */

/* Puts 'entry' into bucket 'i', counted from the start of the primary. */
static inline void
eiffel_put(struct eiffel *e, uint32_t i, void *entry)
{
    bool secondary = i >= e->n_slots;
    struct half *half = &e->halves[e->primary ^ secondary];

    i -= secondary ? e->n_slots : 0;
    if (slot_append(&e->pool, &half->buckets[i], entry)) {
        half_mark(half, e->top, i);
    }
}

/* Puts the entries that were beyond the ranges, and are not any more, into
 * their buckets. */
static void
eiffel_place_beyond(struct eiffel *e)
{
    uint64_t first = UINT64_MAX;
    uint32_t n = 0;

    for (uint32_t i = 0; i < e->n_beyond; i++) {
        struct beyond b = e->beyond[i];

        if (b.number - e->base < 2 * (uint64_t) e->n_slots) {
            eiffel_put(e, b.number - e->base, b.entry);
        } else {
            first = MIN(first, b.number);
            e->beyond[n++] = b;
        }
    }
    e->n_beyond = n;
    e->first_beyond = first;
}

/* Moves the front to slot 'number', which is not before it and not after the
 * first occupied one. */
static inline void
eiffel_advance(struct eiffel *e, uint64_t number)
{
    e->front = number;
    if (OVS_LIKELY(number - e->base < e->n_slots)) {
        return;
    }

    /* The primary is empty. */
    if (half_is_empty(&e->halves[!e->primary], e->top)) {
        e->base = number;
    } else {
        e->base += e->n_slots;
        e->primary = !e->primary;
    }
    if (e->first_beyond - e->base < 2 * (uint64_t) e->n_slots) {
        eiffel_place_beyond(e);
    }
}

/* Moves up to 'max' entries, at least 1, from the first bucket and those after
 * it that are at slot number 'limit' or before, of which the first one is, and
 * in the same word of the bitmap, to 'entries', and returns their number. */
static inline size_t
eiffel_take(struct eiffel *e, uint64_t limit, void **entries, size_t max)
{
    eiffel_advance(e, e->first);

    struct half *half = &e->halves[e->primary];
    uint32_t i = (e->front - e->base) / 64;
    uint64_t *word = &half->bitmaps[0][i];
    uint64_t bits = *word;      /* All buckets before the front are empty. */
    uint64_t word_number = e->base + i * 64;
    uint64_t number = e->front;
    size_t n = 0;

    for (;;) {
        slot_word *bucket = &half->buckets[number - e->base];

        n += slot_take(&e->pool, bucket, &entries[n], max - n);
        if (OVS_UNLIKELY(*bucket)) {
            break;
        }
        bits = zero_rightmost_1bit(bits);
        if (!bits || n >= max) {
            break;
        }

        uint64_t next = word_number + raw_ctz(bits);
        if (next > limit) {
            break;
        }
        number = next;
    }
    e->front = number;
    *word = bits;

    uint32_t next;
    if (OVS_LIKELY(bits)) {
        e->first = word_number + raw_ctz(bits);
    } else if (OVS_LIKELY(half_next_word(half, e->top, i, &next))) {
        e->first = e->base + next;
    } else {
        const struct half *secondary = &e->halves[!e->primary];

        e->first = (half_is_empty(secondary, e->top) ? e->first_beyond
                    : e->base + e->n_slots + half_first(secondary, e->top));
    }
    return n;
}

/* The functions of the class that hold and give out entries. */

static bool
eiffel_enqueue(void *sched, void *entry, uint64_t edt_ns,
               unsigned int level OVS_UNUSED)
{
    struct eiffel *e = eiffel_cast(sched);
    uint64_t number = slot_scale_ceil(&e->scale,
                                      MIN(edt_ns, EDT_SCHED_MAX_NS));

    if (OVS_UNLIKELY(e->n_entries >= e->max_entries)) {
        return false;
    }
    number = MAX(number, e->front);

    uint64_t i = number - e->base;

    if (OVS_UNLIKELY(number - e->front >= e->n_slots)) {
        if (e->drop_beyond_horizon) {
            return false;
        }
        if (i >= 2 * (uint64_t) e->n_slots) {
            e->beyond[e->n_beyond++] = (struct beyond) { number, entry };
            e->first_beyond = MIN(e->first_beyond, number);
            e->first = MIN(e->first, number);
            e->n_entries++;
            return true;
        }
    }
    e->first = MIN(e->first, number);
    e->n_entries++;
    eiffel_put(e, i, entry);
    return true;
}

static inline size_t
eiffel_dequeue__(struct eiffel *e, uint64_t now, void **entries, size_t max,
                 bool slot_by_slot)
{
    size_t n = 0;

    while (n < max) {
        if (e->first > now) {
            if (now > e->front) {
                eiffel_advance(e, now);
            }
            break;
        }

        n += eiffel_take(e, slot_by_slot ? e->first : now, &entries[n],
                         max - n);
        if (slot_by_slot) {
            break;
        }
    }
    e->n_entries -= n;
    return n;
}

static size_t
eiffel_dequeue(void *sched, uint64_t now_ns, void **entries,
               size_t max)
{
    struct eiffel *e = eiffel_cast(sched);
    uint64_t now = slot_scale_floor(&e->scale, MIN(now_ns, INT64_MAX));

    return eiffel_dequeue__(e, now, entries, max, e->slot_by_slot);
}

static uint64_t
eiffel_next_due(const void *sched)
{
    const struct eiffel *e = eiffel_cast(sched);

    return e->n_entries ? e->first * e->slot_ns : UINT64_MAX;
}

static size_t
eiffel_flush(void *sched, void **entries, size_t max)
{
    struct eiffel *e = eiffel_cast(sched);

    if (!e->flushing) {
        e->flushing = true;
        e->flush_front = e->front;
    }

    size_t n = eiffel_dequeue__(e, UINT64_MAX - 1, entries, max, false);
    if (!e->n_entries) {
        e->flushing = false;
        e->front = e->flush_front;
        e->base = e->front;
    }
    return n;
}

static size_t
eiffel_count(const void *sched)
{
    return eiffel_cast(sched)->n_entries;
}

static size_t
eiffel_memory_bytes(const void *sched)
{
    return sizeof(struct eiffel) + eiffel_cast(sched)->memory_bytes;
}

const struct edt_sched_class eiffel_class = {
    .name = "eiffel",
    .create = eiffel_create,
    .destroy = eiffel_destroy,
    .level = eiffel_level,
    .enqueue = eiffel_enqueue,
    .dequeue = eiffel_dequeue,
    .next_due = eiffel_next_due,
    .flush = eiffel_flush,
    .count = eiffel_count,
    .memory_bytes = eiffel_memory_bytes,
};
