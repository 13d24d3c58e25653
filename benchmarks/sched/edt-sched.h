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

#ifndef EDT_SCHED_H
#define EDT_SCHED_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "mltw.h"

/* Schedulers of departure times
 * =============================
 *
 * One interface for the data structures that hold references ("entries")
 * until their earliest departure time (EDT): the product's multi-level timing
 * wheel, and those that it is compared with.
 *
 *    type      structure                     slot times      described in
 *    --------  ----------------------------  --------------  ------------
 *    mltw      multi-level timing wheel      flow's level    "mltw.h"
 *    carousel  one timing wheel              slot_ns apart   "carousel.h"
 *    eiffel    two arrays of buckets with a  slot_ns apart   "eiffel.h"
 *              hierarchy of bitmaps (cFFS)
 *
 * What all of them promise
 * ------------------------
 *
 *  * An entry's slot time is its EDT rounded up to the granularity, which is
 *    that of its level for mltw and 'slot_ns' for the others.  So an entry
 *    within the horizon is never early, and late by less than a granularity
 *    plus the time that the caller lets pass between two calls of
 *    edt_sched_dequeue(), if those take all that is due.
 *
 *  * Entries leave in the order of their slot times, and those with the same
 *    slot time in the order in which they came.
 *
 *  * The front is the time up to which everything has been handed out.  It is
 *    the latest 'now_ns' given, rounded down to a granularity, but stops at a
 *    slot of which a part is still held.  An EDT before the front is taken as
 *    the front: such an entry is given out by the next edt_sched_dequeue(),
 *    even with an unchanged 'now_ns'.
 *
 *  * The horizon reaches from the front 'horizon_ns' ahead, or a little more.
 *    What becomes of an EDT beyond it is the type's affair (and
 *    'drop_beyond_horizon's); for mltw there is none.
 *
 *  * Time is passed in by the caller, in nanoseconds on any clock, as a number
 *    that does not wrap.  carousel and eiffel take what is beyond
 *    EDT_SCHED_MAX_NS (292 years) as that.  A 'now_ns' that is before one
 *    given earlier is harmless.
 *
 *  * At most 'max_entries' entries.  All memory is allocated on creation, and
 *    no page of it is touched before it is needed.
 *
 *  * Entries are not looked into, only prefetched when they are handed out.
 *
 *  * No allocation, lock or division per entry.  A call through the functions
 *    below is one indirect call.
 *
 * Thread-safety: none.  A scheduler belongs to one thread at a time, and
 * different schedulers share nothing. */

/* Latest EDT that carousel and eiffel tell from later ones. */
#define EDT_SCHED_MAX_NS ((UINT64_C(1) << 63) - (UINT64_C(1) << 31))

enum edt_sched_type {
    EDT_SCHED_MLTW,
    EDT_SCHED_CAROUSEL,
    EDT_SCHED_EIFFEL,
    EDT_SCHED_N_TYPES
};

struct edt_sched_config {
    enum edt_sched_type type;
    uint32_t max_entries;       /* Capacity, 1...2^24. */

    /* Batches.  If false, edt_sched_dequeue() fills the caller's array with
     * all that is due.  If true, a call returns entries of one slot only, as
     * the Extract of Carousel's and the dequeue of FlowBundler's papers do, so
     * that a caller who sends what a call returns sends each slot by itself;
     * the caller goes on until a call returns 0. */
    bool slot_by_slot;

    /* Only for mltw.  'mltw.max_entries' is not used. */
    struct mltw_config mltw;

    /* Only for the others. */
    uint64_t slot_ns;           /* Granularity, 1...2^30. */
    uint64_t horizon_ns;        /* 'slot_ns'...2^30 - 2 slots. */
    bool drop_beyond_horizon;   /* Refuse entries beyond the horizon? */
};

#define EDT_SCHED_CONFIG_DEFAULT                    \
    ((struct edt_sched_config) {                    \
        .type = EDT_SCHED_MLTW,                     \
        .max_entries = 131072,                      \
        .mltw = MLTW_CONFIG_DEFAULT,                \
        .slot_ns = 100,                             \
        .horizon_ns = UINT64_C(10000000000),        \
    })

/* A scheduler.  ('impl' is found as early as 'class', so that it costs the
 * same for all types.) */
struct edt_sched {
    const struct edt_sched_class *class;
    void *impl;                 /* What 'class->create' has returned. */
};

/* The functions of a type, which take what its 'create' returns.  For what
 * they do, see the function below that has the same name. */
struct edt_sched_class {
    const char *name;           /* As in a configuration, e.g. "mltw". */

    void *(*create)(const struct edt_sched_config *,
                                uint64_t now_ns);
    void (*destroy)(void *);
    unsigned int (*level)(const void *, uint64_t gap_ns);
    bool (*enqueue)(void *, void *entry, uint64_t edt_ns,
                    unsigned int level);
    size_t (*dequeue)(void *, uint64_t now_ns, void **entries,
                      size_t max_entries);
    uint64_t (*next_due)(const void *);
    size_t (*flush)(void *, void **entries, size_t max_entries);
    size_t (*count)(const void *);
    size_t (*memory_bytes)(const void *);
};

/* The types that are in files of their own; "mltw_slots" is that for mltw with
 * 'slot_by_slot'. */
extern const struct edt_sched_class mltw_class, mltw_slots_class;

/* Returns the name of 'type', e.g. "mltw". */
const char *edt_sched_type_name(enum edt_sched_type type);

/* Returns true and sets '*type' if 'name' is that of a type, else returns
 * false. */
bool edt_sched_type_from_name(const char *name, enum edt_sched_type *type);

/* Returns NULL if 'config' is valid, otherwise a static string that names the
 * first field that is not and the range that it must be in.  Fields that
 * 'config->type' does not use are not looked at. */
const char *edt_sched_config_error(const struct edt_sched_config *config);

/* Returns a new, empty scheduler whose front is 'now_ns'.  'config' must be
 * valid; it is copied.  The caller must eventually destroy the scheduler with
 * edt_sched_destroy(). */
struct edt_sched *edt_sched_create(const struct edt_sched_config *config,
                                   uint64_t now_ns);

/* Does what edt_sched_create() does, with a type that it does not know. */
struct edt_sched *edt_sched_create_class(const struct edt_sched_class *,
                                         const struct edt_sched_config *,
                                         uint64_t now_ns);

/* Frees 'sched', which may be NULL.  Entries that it still holds are the
 * caller's: use edt_sched_flush() before to get at them. */
static inline void
edt_sched_destroy(struct edt_sched *sched)
{
    if (sched) {
        sched->class->destroy(sched->impl);
        free(sched);
    }
}

/* Returns the level, for edt_sched_enqueue(), of a flow of which packets of
 * full size are 'gap_ns' ns apart; 0 for types that have no levels. */
static inline unsigned int
edt_sched_level(const struct edt_sched *sched, uint64_t gap_ns)
{
    return sched->class->level(sched->impl, gap_ns);
}

/* Adds 'entry', which must be neither NULL nor other than 8-byte aligned, to
 * 'sched', to be handed out at its slot time.  'level' is what
 * edt_sched_level() returned for the entry's flow.  The same reference may be
 * added more than once.
 *
 * Returns true if successful, false, without having changed anything, if
 * 'sched' already holds 'max_entries' entries, or if 'drop_beyond_horizon' is
 * configured and 'edt_ns' is beyond the horizon. */
static inline bool
edt_sched_enqueue(struct edt_sched *sched, void *entry, uint64_t edt_ns,
                  unsigned int level)
{
    return sched->class->enqueue(sched->impl, entry, edt_ns, level);
}

/* Moves entries that are due at 'now_ns' from 'sched' to 'entries', which has
 * room for 'max_entries' of them (at least 1; all of them may be overwritten),
 * in the order of their slot times.  Returns the number of entries moved.
 *
 * If it is less than 'max_entries', or with 'slot_by_slot' if it is 0, nothing
 * that is due is left; otherwise, call again.  Entries may be added between
 * calls, also in the middle of a slot. */
static inline size_t
edt_sched_dequeue(struct edt_sched *sched, uint64_t now_ns, void **entries,
                  size_t max_entries)
{
    return sched->class->dequeue(sched->impl, now_ns, entries, max_entries);
}

/* Returns the smallest 'now_ns' with which edt_sched_dequeue() would return at
 * least one entry, or UINT64_MAX if 'sched' is empty. */
static inline uint64_t
edt_sched_next_due(const struct edt_sched *sched)
{
    return sched->class->next_due(sched->impl);
}

/* Moves entries, whatever their time, from 'sched' to 'entries', which has
 * room for 'max_entries' of them (at least 1; all of them may be overwritten),
 * in the order in which edt_sched_dequeue() would return them.  Returns the
 * number of entries moved.
 *
 * To be called until it returns 0, without other calls in between than those
 * of edt_sched_count(), edt_sched_memory_bytes() and edt_sched_destroy().
 * 'sched' is then empty, its front is where it was before the first call, and
 * it can be used again. */
static inline size_t
edt_sched_flush(struct edt_sched *sched, void **entries, size_t max_entries)
{
    return sched->class->flush(sched->impl, entries, max_entries);
}

/* Returns the number of entries that 'sched' holds. */
static inline size_t
edt_sched_count(const struct edt_sched *sched)
{
    return sched->class->count(sched->impl);
}

/* Returns the number of bytes that 'sched' has allocated.  What is resident is
 * less, until all slots and entries have been used once. */
static inline size_t
edt_sched_memory_bytes(const struct edt_sched *sched)
{
    return sched->class->memory_bytes(sched->impl);
}

#endif /* edt-sched.h */
