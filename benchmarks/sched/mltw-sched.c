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

/* The multi-level timing wheel behind the interface of "edt-sched.h". */

#include <config.h>

#include "edt-sched.h"
#include "mltw.h"

static void *
mltw_sched_create(const struct edt_sched_config *config, uint64_t now_ns)
{
    struct mltw_config mltw = config->mltw;

    mltw.max_entries = config->max_entries;
    return mltw_create(&mltw, now_ns);
}

static void
mltw_sched_destroy(void *wheel)
{
    mltw_destroy(wheel);
}

static unsigned int
mltw_sched_level(const void *wheel, uint64_t gap_ns)
{
    return mltw_level(wheel, gap_ns);
}

static bool
mltw_sched_enqueue(void *wheel, void *entry, uint64_t edt_ns,
                   unsigned int level)
{
    return mltw_enqueue(wheel, entry, edt_ns, level);
}

static size_t
mltw_sched_dequeue(void *wheel, uint64_t now_ns, void **entries,
                   size_t max_entries)
{
    return mltw_dequeue(wheel, now_ns, entries, max_entries);
}

/* With 'slot_by_slot'. */
static size_t
mltw_sched_dequeue_slot(void *wheel, uint64_t now_ns,
                        void **entries, size_t max_entries)
{
    /* At the time of the first slot, no other one is due. */
    return mltw_dequeue(wheel, MIN(now_ns, mltw_next_due(wheel)),
                        entries, max_entries);
}

static uint64_t
mltw_sched_next_due(const void *wheel)
{
    return mltw_next_due(wheel);
}

static size_t
mltw_sched_flush(void *wheel, void **entries, size_t max_entries)
{
    return mltw_flush(wheel, entries, max_entries);
}

static size_t
mltw_sched_count(const void *wheel)
{
    return mltw_count(wheel);
}

static size_t
mltw_sched_memory_bytes(const void *wheel)
{
    return mltw_memory_bytes(wheel);
}

#define MLTW_CLASS(DEQUEUE)                         \
    {                                               \
        .name = "mltw",                             \
        .create = mltw_sched_create,                \
        .destroy = mltw_sched_destroy,              \
        .level = mltw_sched_level,                  \
        .enqueue = mltw_sched_enqueue,              \
        .dequeue = DEQUEUE,                         \
        .next_due = mltw_sched_next_due,            \
        .flush = mltw_sched_flush,                  \
        .count = mltw_sched_count,                  \
        .memory_bytes = mltw_sched_memory_bytes     \
    }

const struct edt_sched_class mltw_class = MLTW_CLASS(mltw_sched_dequeue);
const struct edt_sched_class mltw_slots_class
    = MLTW_CLASS(mltw_sched_dequeue_slot);
