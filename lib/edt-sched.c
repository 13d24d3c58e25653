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

#include "edt-sched.h"

#include <string.h>

#include "carousel.h"
#include "eiffel.h"
#include "mltw.h"
#include "openvswitch/compiler.h"
#include "openvswitch/util.h"
#include "util.h"

/* The multi-level timing wheel behind the interface. */

struct edt_sched_mltw {
    struct edt_sched sched;
    struct mltw *wheel;
};

static const struct edt_sched_class edt_sched_mltw_class;
static const struct edt_sched_class edt_sched_mltw_slots_class;

static struct mltw *
mltw_cast(const struct edt_sched *sched)
{
    return CONTAINER_OF(sched, struct edt_sched_mltw, sched)->wheel;
}

static struct edt_sched *
edt_sched_mltw_create(const struct edt_sched_config *config, uint64_t now_ns)
{
    struct edt_sched_mltw *m = xmalloc(sizeof *m);
    struct mltw_config mltw = config->mltw;

    mltw.max_entries = config->max_entries;
    m->sched.class = (config->slot_by_slot
                      ? &edt_sched_mltw_slots_class
                      : &edt_sched_mltw_class);
    m->wheel = mltw_create(&mltw, now_ns);
    return &m->sched;
}

static void
edt_sched_mltw_destroy(struct edt_sched *sched)
{
    mltw_destroy(mltw_cast(sched));
    free(CONTAINER_OF(sched, struct edt_sched_mltw, sched));
}

static unsigned int
edt_sched_mltw_level(const struct edt_sched *sched, uint64_t gap_ns)
{
    return mltw_level(mltw_cast(sched), gap_ns);
}

static bool
edt_sched_mltw_enqueue(struct edt_sched *sched, void *entry, uint64_t edt_ns,
                       unsigned int level)
{
    return mltw_enqueue(mltw_cast(sched), entry, edt_ns, level);
}

static size_t
edt_sched_mltw_dequeue(struct edt_sched *sched, uint64_t now_ns,
                       void **entries, size_t max_entries)
{
    return mltw_dequeue(mltw_cast(sched), now_ns, entries, max_entries);
}

/* With 'slot_by_slot'. */
static size_t
edt_sched_mltw_dequeue_slot(struct edt_sched *sched, uint64_t now_ns,
                            void **entries, size_t max_entries)
{
    struct mltw *wheel = mltw_cast(sched);

    /* At the time of the first slot, no other one is due. */
    return mltw_dequeue(wheel, MIN(now_ns, mltw_next_due(wheel)),
                        entries, max_entries);
}

static uint64_t
edt_sched_mltw_next_due(const struct edt_sched *sched)
{
    return mltw_next_due(mltw_cast(sched));
}

static size_t
edt_sched_mltw_flush(struct edt_sched *sched, void **entries,
                     size_t max_entries)
{
    return mltw_flush(mltw_cast(sched), entries, max_entries);
}

static size_t
edt_sched_mltw_count(const struct edt_sched *sched)
{
    return mltw_count(mltw_cast(sched));
}

static size_t
edt_sched_mltw_memory_bytes(const struct edt_sched *sched)
{
    return (sizeof(struct edt_sched_mltw)
            + mltw_memory_bytes(mltw_cast(sched)));
}

#define MLTW_CLASS(DEQUEUE)                         \
    {                                               \
        .name = "mltw",                             \
        .create = edt_sched_mltw_create,            \
        .destroy = edt_sched_mltw_destroy,          \
        .level = edt_sched_mltw_level,              \
        .enqueue = edt_sched_mltw_enqueue,          \
        .dequeue = DEQUEUE,                         \
        .next_due = edt_sched_mltw_next_due,        \
        .flush = edt_sched_mltw_flush,              \
        .count = edt_sched_mltw_count,              \
        .memory_bytes = edt_sched_mltw_memory_bytes \
    }

static const struct edt_sched_class edt_sched_mltw_class
    = MLTW_CLASS(edt_sched_mltw_dequeue);
static const struct edt_sched_class edt_sched_mltw_slots_class
    = MLTW_CLASS(edt_sched_mltw_dequeue_slot);

/* Types. */

static const struct edt_sched_class *const classes[EDT_SCHED_N_TYPES] = {
    [EDT_SCHED_MLTW] = &edt_sched_mltw_class,
    [EDT_SCHED_CAROUSEL] = &carousel_class,
    [EDT_SCHED_EIFFEL] = &eiffel_class,
};

const char *
edt_sched_type_name(enum edt_sched_type type)
{
    return classes[type]->name;
}

bool
edt_sched_type_from_name(const char *name, enum edt_sched_type *type)
{
    for (int i = 0; i < EDT_SCHED_N_TYPES; i++) {
        if (!strcmp(name, classes[i]->name)) {
            *type = i;
            return true;
        }
    }
    return false;
}

const char *
edt_sched_config_error(const struct edt_sched_config *config)
{
    if (config->type < 0 || config->type >= EDT_SCHED_N_TYPES) {
        return "type must be mltw, carousel or eiffel";
    }
    if (config->max_entries < 1 || config->max_entries > 1 << 24) {
        return "max_entries must be 1 to 16777216";
    }
    if (config->type == EDT_SCHED_MLTW) {
        struct mltw_config mltw = config->mltw;

        mltw.max_entries = config->max_entries;
        return mltw_config_error(&mltw);
    }
    if (config->slot_ns < 1 || config->slot_ns > 1 << 30) {
        return "slot_ns must be 1 to 1073741824";
    }
    if (config->horizon_ns < config->slot_ns) {
        return "horizon_ns must not be below slot_ns";
    }
    if (config->horizon_ns / config->slot_ns
        + !!(config->horizon_ns % config->slot_ns) > (1 << 30) - 2) {
        return "horizon_ns must be at most 1073741822 slots of slot_ns";
    }
    return NULL;
}

bool
edt_sched_config_equal(const struct edt_sched_config *a,
                       const struct edt_sched_config *b)
{
    if (a->type != b->type || a->slot_by_slot != b->slot_by_slot) {
        return false;
    }
    if (a->type == EDT_SCHED_MLTW) {
        return a->mltw.n_wheels == b->mltw.n_wheels
               && a->mltw.n_slots == b->mltw.n_slots
               && a->mltw.min_granularity_ns == b->mltw.min_granularity_ns
               && a->mltw.max_granularity_ns == b->mltw.max_granularity_ns;
    }
    return a->slot_ns == b->slot_ns && a->horizon_ns == b->horizon_ns
           && a->drop_beyond_horizon == b->drop_beyond_horizon;
}

struct edt_sched *
edt_sched_create(const struct edt_sched_config *config, uint64_t now_ns)
{
    ovs_assert(!edt_sched_config_error(config));

    return classes[config->type]->create(config, now_ns);
}
