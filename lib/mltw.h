/*
 * Copyright (c) 2026 FlowBundler authors.
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

#ifndef MLTW_H
#define MLTW_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "openvswitch/util.h"
#include "util.h"

/* Multi-level timing wheel
 * ========================
 *
 * Holds references until their earliest departure time (EDT) and gives those
 * that are due back in time order.  The structure is that of FlowBundler (Shan
 * et al., INFOCOM 2023, section IV-B, algorithms 1 and 2): wheel 'i' has slots
 * that are 'min_granularity_ns << i' apart.  An entry's slot time is its EDT
 * rounded up to the granularity that fits its flow's rate, and the entry waits
 * in the coarsest wheel that has a slot at that time, so that entries of
 * different flows meet in one slot and leave in one batch.
 *
 * Properties:
 *
 *  * Never early: an entry leaves at its slot time or later, and the slot time
 *    is not before the EDT, however far ahead the EDT is.  (Except at the end
 *    of time: an EDT that is past the last multiple of 'min_granularity_ns'
 *    below UINT64_MAX is taken as that multiple.)
 *
 *  * Late by less than the granularity of the entry's level, plus the time
 *    that the caller lets pass between two calls of mltw_dequeue(), as long as
 *    those calls take all that is due.
 *
 *  * Ordered: entries leave in the order of their slot times, and those with
 *    the same slot time in the order in which they came.  So the entries of a
 *    flow that has a constant level and EDTs that do not decrease never
 *    overtake each other.  When a flow's level changes, the slot time of a
 *    later EDT can be the earlier one: a caller that needs the order then must
 *    have only one entry of each flow in the wheel.
 *
 *  * Bounded: at most 'max_entries' entries.  All memory is allocated by
 *    mltw_create(), and pages of it are touched only as they are needed.
 *
 *  * Cost: mltw_enqueue() is O(1) for an EDT within the horizon, that is
 *    'n_slots' slots ahead, of the wheel that has a slot at its slot time.
 *    Each time that the distance to the EDT shrinks to a quarter, until it is
 *    within this horizon, an entry further ahead than that is moved once.
 *    mltw_dequeue() takes O(n_wheels) for each slot that holds an entry and
 *    O(1) for each entry; slots without entries are not looked at, so a call
 *    after a long pause costs what any other does.  As long as there are only
 *    a few entries, they are in a sorted array, which is cheaper.  There is no
 *    allocation, division or lock in either.
 *
 *  * The wheel does not look into the entries; it only prefetches the cache
 *    line at their address when it hands them out.
 *
 * Time
 * ====
 *
 * The caller passes the time in, in nanoseconds on any clock, as a 64-bit
 * number that does not wrap.  A 'now' that is before one given earlier is
 * harmless: mltw_dequeue() then gives out what is due at that 'now', which is
 * nothing that was not due before.
 *
 * The wheel's front is the time up to which everything has been handed out.
 * It follows 'now' but stops at a slot of which a part is still held because
 * the caller's array was full.  An EDT before the front is taken as the front:
 * such an entry is given out by the next mltw_dequeue(), even with an
 * unchanged 'now'.
 *
 * Thread-safety
 * =============
 *
 * None: a wheel belongs to one thread at a time.  Different wheels share
 * nothing.
 *
 * States a caller can observe
 * ===========================
 *
 *  * Empty: mltw_count() is 0 and mltw_next_due() is UINT64_MAX.
 *
 *  * Holding: mltw_count() is at least 1, and mltw_next_due() is the smallest
 *    'now' with which mltw_dequeue() returns at least one entry.  If that is
 *    not after the present, entries are due, either because their time has
 *    come or because the last mltw_dequeue() filled the caller's array.
 *
 *  * Full: mltw_count() is 'max_entries' and mltw_enqueue() returns false.
 *
 *  * Being flushed: from the first call of mltw_flush() until it has returned
 *    0.  Only mltw_flush(), mltw_count(), mltw_memory_bytes(),
 *    mltw_get_stats() and mltw_destroy() may be called.
 */

struct mltw;

/* Geometry of a wheel. */
struct mltw_config {
    uint32_t n_wheels;            /* Number of wheels, 1...64. */
    uint32_t n_slots;             /* Slots a wheel: a power of two, 4...65536.
                                   * Slots that can never be used (the even
                                   * ones of all wheels but the last) take no
                                   * memory. */
    uint64_t min_granularity_ns;  /* Slot distance of the first wheel: a power
                                   * of two, 1...2^30. */
    uint64_t max_granularity_ns;  /* Coarsest granularity that a flow is given:
                                   * a power of two, not below
                                   * 'min_granularity_ns'.  Bounds how late an
                                   * entry of a slow flow can be. */
    uint32_t max_entries;         /* Capacity, 1...2^24. */
};

#define MLTW_CONFIG_DEFAULT             \
    ((struct mltw_config) {             \
        .n_wheels = 32,                 \
        .n_slots = 512,                 \
        .min_granularity_ns = 64,       \
        .max_granularity_ns = 65536,    \
        .max_entries = 131072,          \
    })

/* What a wheel did since it was created. */
struct mltw_stats {
    uint64_t n_slots_visited;   /* Slots looked into by mltw_dequeue() and
                                 * mltw_flush().  All of them held entries. */
    uint64_t n_far;             /* Entries whose EDT was past the horizon. */
    uint64_t n_moves;           /* Times that one of these was moved nearer. */
};

/* Returns NULL if 'config' is valid, otherwise a static string that names the
 * first field that is not and the range that it must be in. */
const char *mltw_config_error(const struct mltw_config *config);

/* Do 'a' and 'b' describe the same wheel, apart from 'max_entries'? */
bool mltw_config_equal(const struct mltw_config *a,
                       const struct mltw_config *b);

/* Returns a new, empty wheel whose front is 'now_ns'.  'config' must be valid;
 * it is copied.  The caller must eventually destroy the wheel with
 * mltw_destroy(). */
struct mltw *mltw_create(const struct mltw_config *config, uint64_t now_ns);

/* Frees 'wheel', which may be NULL.  Entries that it still holds are the
 * caller's: use mltw_flush() before to get at them. */
void mltw_destroy(struct mltw *wheel);

/* Private: what mltw_level() needs, the first member of struct mltw. */
struct mltw_levels__ {
    uint8_t granularity_shift;    /* log2(min_granularity_ns). */
    uint8_t max_level;            /* Coarsest level of a flow. */
};

/* Returns the level of a flow of which packets of full size are 'gap_ns' ns
 * apart (MTU divided by rate): the wheel with the coarsest granularity that is
 * neither above 'gap_ns' nor above the configured 'max_granularity_ns', or 0
 * if there is none.  A flow on that level leaves in bursts of at most two such
 * packets if 'gap_ns' is at least 'min_granularity_ns'. */
static inline unsigned int
mltw_level(const struct mltw *wheel, uint64_t gap_ns)
{
    const struct mltw_levels__ *levels = (const struct mltw_levels__ *) wheel;
    uint64_t gap = gap_ns >> levels->granularity_shift;

    return gap ? MIN(log_2_floor(gap), levels->max_level) : 0;
}

/* Returns the distance, in ns, between the slots of a flow on 'level', by
 * which an entry of the flow is late at most. */
static inline uint64_t
mltw_level_granularity_ns(const struct mltw *wheel, unsigned int level)
{
    const struct mltw_levels__ *levels = (const struct mltw_levels__ *) wheel;

    return UINT64_C(1) << (levels->granularity_shift
                           + MIN(level, levels->max_level));
}

/* Adds 'entry', which must be neither NULL nor other than 8-byte aligned, to
 * 'wheel', to be handed out when it is 'edt_ns' or at most a granularity of
 * 'level' later.  'level' is what mltw_level() returned for the entry's flow;
 * one that is too high is taken as the highest.  The same reference may be
 * added more than once.
 *
 * Returns true if successful, false, without having changed anything, if
 * 'wheel' already holds 'max_entries' entries. */
bool mltw_enqueue(struct mltw *wheel, void *entry, uint64_t edt_ns,
                  unsigned int level);

/* Moves entries that are due at 'now_ns' from 'wheel' to 'entries', which has
 * room for 'max_entries' of them (all of which may be overwritten), in the
 * order of their slot times.  Returns the number of entries moved.  If it is
 * less than 'max_entries', nothing that is due is left; otherwise, call again.
 *
 * Entries may be added between calls, also in the middle of a slot. */
size_t mltw_dequeue(struct mltw *wheel, uint64_t now_ns,
                    void **entries, size_t max_entries);

/* Returns the smallest 'now_ns' with which mltw_dequeue() would return at
 * least one entry, or UINT64_MAX if 'wheel' is empty.  O(1). */
uint64_t mltw_next_due(const struct mltw *wheel);

/* Moves entries, whatever their time, from 'wheel' to 'entries', which has
 * room for 'max_entries' of them (at least 1; all of them may be overwritten),
 * in the order in which mltw_dequeue() would return them.  Returns the number
 * of entries moved.
 *
 * To be called until it returns 0; 'wheel' is then empty, its front is where
 * it was before the first call, and it can be used again. */
size_t mltw_flush(struct mltw *wheel, void **entries, size_t max_entries);

/* Returns the number of entries that 'wheel' holds. */
size_t mltw_count(const struct mltw *wheel);

/* Returns the number of bytes that 'wheel' has allocated.  What is resident is
 * less: memory for entries is touched as more of them are held at a time. */
size_t mltw_memory_bytes(const struct mltw *wheel);

/* Private, for tests: makes 'wheel', which must be empty, put entries into its
 * wheels even if they are few. */
void mltw_disable_few__(struct mltw *wheel);

/* Returns the statistics of 'wheel', which stay valid, and change, until it is
 * destroyed. */
const struct mltw_stats *mltw_get_stats(const struct mltw *wheel);

#endif /* mltw.h */
